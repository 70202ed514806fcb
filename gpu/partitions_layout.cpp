#include "gpu/partitions_layout.h"

#include <initializer_list>
#include <string>

#include "gpu/alignment.h"
#include "gpu/layer_kinds.h"

namespace keyhole::gpu {

namespace {

constexpr size_t kHeadBytes = 16;  // PartitionsHead of gpu/cuda/partitions/kernels.h

class Allocator {
 public:
  /// The offset of memory for the product of `factors` bytes.
  size_t take(std::initializer_list<size_t> factors) {
    size_t bytes = 1;
    for (const size_t f : factors) {
      if (__builtin_mul_overflow(bytes, f, &bytes)) too_large();
    }
    const size_t offset = end_;
    if (__builtin_add_overflow(bytes, kPartAlignment - 1, &bytes)) too_large();
    if (__builtin_add_overflow(end_, bytes / kPartAlignment * kPartAlignment, &end_)) too_large();
    return offset;
  }
  [[nodiscard]] size_t end() const { return end_; }

 private:
  [[noreturn]] static void too_large() {
    throw Error(Status::invalid_argument, "partitions: the size in bytes exceeds 2^64 - 1");
  }

  size_t end_ = 0;
};

void check_partitions(const PartitionsShape& s) {
  const auto refuse = [](const std::string& what, uint64_t seen, const std::string& allowed) {
    throw Error(Status::invalid_argument,
                "partitions: " + what + " is " + std::to_string(seen) + ", allowed: " + allowed);
  };
  if (s.kv_heads == 0 || s.kv_heads > 65535) refuse("kv_heads", s.kv_heads, "1 to 65535");
  if (s.q_heads % s.kv_heads != 0 || s.q_heads == 0 || s.q_heads / s.kv_heads > kMaxDeviceGroup) {
    refuse("q_heads", s.q_heads, "1 to 16 times kv_heads (" + std::to_string(s.kv_heads) + ")");
  }
  if (!is_device_head_dim(s.head_dim)) {
    refuse("head_dim", s.head_dim, "64, 80, 96, 128, 256");
  }
  if (s.dtype == DType::i8) refuse("dtype", static_cast<uint64_t>(s.dtype), "f32, f16, bf16");
  if (s.most_chosen > kMostChosen) {
    refuse("most_chosen", s.most_chosen, "0 to " + std::to_string(kMostChosen));
  }
  constexpr uint32_t kMostPartitions = 1U << 26;  // numbers times a padded group stay below 2^31
  if (s.partitions > kMostPartitions) {
    refuse("partitions", s.partitions, "0 to " + std::to_string(kMostPartitions));
  }
}

}  // namespace

PartitionsLayout::PartitionsLayout(const PartitionsShape& shape) {
  check_partitions(shape);
  capacity = (shape.partitions + kPartitionTile - 1) / kPartitionTile * kPartitionTile;
  if (capacity == 0) capacity = kPartitionTile;
  padded = padded_group(shape.q_heads / shape.kv_heads);
  const size_t dim = shape.head_dim;
  const size_t kv_heads = shape.kv_heads;
  const size_t q_heads = shape.q_heads;
  const size_t layers = shape.layers;
  Allocator a;
  heads = a.take({layers, kv_heads, kHeadBytes});
  codes = a.take({layers, kv_heads, capacity, dim});
  sizes = a.take({layers, kv_heads, capacity, sizeof(float)});
  variances = a.take({layers, kv_heads, capacity, sizeof(float)});
  scales = a.take({layers, kv_heads, dim, sizeof(float)});
  centers = a.take({layers, kv_heads, dim, sizeof(float)});
  query_scales = a.take({layers, kv_heads, dim, sizeof(float)});
  values = a.take({layers, kv_heads, capacity, dim, dtype_size(shape.dtype)});
  weights = a.take({kv_heads, capacity, padded, sizeof(float)});
  tile_states = a.take({kv_heads, capacity / kPartitionTile, padded, 2 * sizeof(float)});
  factors = a.take({kv_heads, capacity / kPartitionTile, padded, sizeof(float)});
  log_sums = a.take({q_heads, sizeof(float)});
  least_shares = a.take({q_heads, sizeof(float)});
  keys = a.take({kv_heads, capacity, sizeof(uint32_t)});
  chosen_bits = a.take({kv_heads, capacity / 8});
  arrivals = a.take({kv_heads, sizeof(uint32_t)});
  tail_arrivals = a.take({q_heads, sizeof(uint32_t)});
  partial_o = a.take({q_heads, kMostSplits, dim, sizeof(float)});
  partial_sums = a.take({q_heads, kMostSplits, 2, sizeof(float)});
  tail_o = a.take({q_heads, dim, sizeof(float)});
  tail_lse = a.take({q_heads, sizeof(float)});
  bytes = a.end();
}

size_t partitions_bytes(const PartitionsShape& shape) {
  return sum_of_parts(parts_of(shape),
                      [](const PartitionsShape& part) { return PartitionsLayout(part).bytes; });
}

}  // namespace keyhole::gpu
