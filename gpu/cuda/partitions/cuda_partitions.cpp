#include "gpu/cuda/partitions/cuda_partitions.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/common/waiting.h"
#include "gpu/cuda/partitions/kernels.h"
#include "gpu/cuda/resident/cuda_resident.h"
#include "gpu/device.h"

namespace keyhole::gpu {

static_assert(sizeof(PartitionsHead) == 16 && sizeof(PartitionsFlag) == 128);

struct CudaPartitions::Impl {
  Impl(const PartitionsShape& wanted, int device, bool may_cluster)
      : shape(wanted),
        layout(wanted),
        ordinal(device),
        ids_stride((wanted.most_chosen + 31) / 32 * 32),
        heads(size_t{wanted.layers} * wanted.kv_heads) {
    const DeviceScope scope(ordinal);
    const BesideCapture beside;
    size_t free = 0;
    size_t total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for free device memory");
    if (layout.bytes > free) {
      throw Error(Status::out_of_device_memory, "partitions need " + std::to_string(layout.bytes) +
                                                    " bytes of device memory, and " +
                                                    std::to_string(free) + " are free");
    }
    memory = DeviceBuffer(layout.bytes);
    // Codes and values beyond a head's count are never read. Heads begin at zero, as `heads` does here; so do counters
    // and scratch.
    memory.clear(layout.heads, layout.codes);
    memory.clear(layout.weights, layout.bytes);
    flags = PinnedBuffer(heads.size() * sizeof(PartitionsFlag));
    ids = PinnedBuffer(heads.size() * ids_stride * sizeof(uint32_t));
    stream = std::make_unique<OwnStream>();
    for (uint32_t i = 0; i < shape.layers; ++i) layers.push_back(layer_at(i));
    if (layers.empty()) return;
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
          "the device's capability");
    in_clusters = may_cluster && load_choose_cluster(layers[0], major);
    for (PartitionsLayer& l : layers) l.has_shares = in_clusters;
    if (!in_clusters) {
      check(load_choose(layers[0]), "loading the kernel that chooses partitions");
    }
    check(load_attend(layers[0]), "loading the kernel that attends partitions");
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] size_t head(uint32_t layer, uint32_t kv_head) const {
    if (layer >= shape.layers || kv_head >= shape.kv_heads) {
      throw Error(Status::invalid_argument, "partitions: layer " + std::to_string(layer) +
                                                ", KV head " + std::to_string(kv_head) + " of " +
                                                std::to_string(shape.layers) + " layers of " +
                                                std::to_string(shape.kv_heads) + " KV heads");
    }
    return size_t{layer} * shape.kv_heads + kv_head;
  }

  [[nodiscard]] PartitionsLayer layer_at(uint32_t layer) const {
    const size_t first = size_t{layer} * shape.kv_heads;
    const size_t partitions = first * layout.capacity;
    PartitionsLayer l;
    l.kv_heads = shape.kv_heads;
    l.group = shape.q_heads / shape.kv_heads;
    l.dim = shape.head_dim;
    l.padded = layout.padded;
    l.capacity = layout.capacity;
    l.most_chosen = ids_stride;
    l.logits = shape.logits_of(layer);
    l.dtype = shape.dtype;
    l.heads = memory.as<PartitionsHead>(layout.heads) + first;
    l.codes = memory.as<int8_t>(layout.codes) + partitions * shape.head_dim;
    l.sizes = memory.as<float>(layout.sizes) + partitions;
    l.variances = memory.as<float>(layout.variances) + partitions;
    l.scales = memory.as<float>(layout.scales) + first * shape.head_dim;
    l.centers = memory.as<float>(layout.centers) + first * shape.head_dim;
    l.query_scales = memory.as<float>(layout.query_scales) + first * shape.head_dim;
    l.values = memory.data() + layout.values + partitions * row_bytes();
    l.weights = memory.as<float>(layout.weights);
    l.tile_states = memory.as<AttentionState>(layout.tile_states);
    l.factors = memory.as<float>(layout.factors);
    l.log_sums = memory.as<float>(layout.log_sums);
    l.least_shares = memory.as<float>(layout.least_shares);
    l.keys = memory.as<uint32_t>(layout.keys);
    l.chosen_bits = memory.as<uint32_t>(layout.chosen_bits);
    l.arrivals = memory.as<uint32_t>(layout.arrivals);
    l.tail_arrivals = memory.as<uint32_t>(layout.tail_arrivals);
    l.partial_o = memory.as<float>(layout.partial_o);
    l.partial_sums = memory.as<float>(layout.partial_sums);
    l.tail_o = memory.as<float>(layout.tail_o);
    l.tail_lse = memory.as<float>(layout.tail_lse);
    l.ids = ids.device<uint32_t>() + first * ids_stride;
    l.flags = flags.device<PartitionsFlag>() + first;
    return l;
  }

  [[nodiscard]] size_t row_bytes() const { return shape.head_dim * dtype_size(shape.dtype); }

  void copy(size_t offset, const void* from, size_t bytes) const {
    if (bytes == 0) return;
    check(
        cudaMemcpyAsync(memory.data() + offset, from, bytes, cudaMemcpyHostToDevice, stream->get()),
        "copying partitions to the device");
  }
  /// Makes `head` what the kernels read of head h from now on. Waits for uploads, too.
  void update_head(size_t h, const PartitionsHead& head) {
    copy(layout.heads + h * sizeof(PartitionsHead), &head, sizeof(PartitionsHead));
    stream->wait("copying partitions to the device");
    heads[h] = head;
  }

  PartitionsShape shape;
  PartitionsLayout layout;
  int ordinal;
  uint32_t ids_stride;  // numbers from one KV head's to the next: whole lines
  std::vector<PartitionsHead> heads;
  DeviceBuffer memory;
  PinnedBuffer flags, ids;
  std::unique_ptr<OwnStream> stream;  // of uploads
  bool in_clusters = false;
  std::vector<PartitionsLayer> layers;
};

CudaPartitions::CudaPartitions(const PartitionsShape& shape, int ordinal, bool may_cluster)
    : impl_(std::make_unique<Impl>(shape, ordinal, may_cluster)) {}

CudaPartitions::~CudaPartitions() = default;

void CudaPartitions::upload(uint32_t layer, uint32_t kv_head, uint32_t first,
                            const PartitionRows& rows) {
  Impl& m = *impl_;
  const size_t h = m.head(layer, kv_head);
  PartitionsHead head = m.heads[h];
  if (first > head.count || rows.count > m.shape.partitions ||
      first > m.shape.partitions - rows.count) {
    throw Error(Status::invalid_argument, "partitions " + std::to_string(first) + " to " +
                                              std::to_string(uint64_t{first} + rows.count) +
                                              " of a head that has " + std::to_string(head.count) +
                                              " and capacity for " +
                                              std::to_string(m.shape.partitions));
  }
  for (uint32_t i = 0; i < rows.count; ++i) {
    if (!(rows.sizes[i] >= 1.0F)) {
      throw Error(Status::invalid_argument, "partition " + std::to_string(first + i) + " has " +
                                                std::to_string(rows.sizes[i]) +
                                                " keys, allowed: 1 or more");
    }
  }
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  const size_t dim = m.shape.head_dim;
  const std::vector<float> ones(dim, 1.0F);
  const size_t at = h * m.layout.capacity + first;
  m.copy(m.layout.codes + at * dim, rows.keys, rows.count * dim);
  m.copy(m.layout.sizes + at * sizeof(float), rows.sizes, rows.count * sizeof(float));
  m.copy(m.layout.variances + at * sizeof(float), rows.variances, rows.count * sizeof(float));
  m.copy(m.layout.values + at * m.row_bytes(), rows.values, rows.count * m.row_bytes());
  if (rows.count != 0) {
    m.copy(m.layout.scales + h * dim * sizeof(float), rows.scales, dim * sizeof(float));
    m.copy(m.layout.centers + h * dim * sizeof(float), rows.center, dim * sizeof(float));
    m.copy(m.layout.query_scales + h * dim * sizeof(float),
           rows.query_scales == nullptr ? ones.data() : rows.query_scales, dim * sizeof(float));
  }
  head.count = first + rows.count;
  m.update_head(h, head);
}

uint32_t CudaPartitions::count(uint32_t layer, uint32_t kv_head) const {
  return impl_->heads[impl_->head(layer, kv_head)].count;
}

void CudaPartitions::set(uint32_t layer, uint32_t kv_head, uint32_t chosen, PartitionsTail tail) {
  Impl& m = *impl_;
  const size_t h = m.head(layer, kv_head);
  if (chosen > m.shape.most_chosen) {
    throw Error(Status::invalid_argument, "partitions chosen: " + std::to_string(chosen) +
                                              ", allowed: 0 to " +
                                              std::to_string(m.shape.most_chosen));
  }
  PartitionsHead head = m.heads[h];
  // A session sets all of its heads, 256 say, at each block of tokens that it appends, most of them to what they are; a
  // copy and its wait take 6 us.
  if (head.chosen == chosen && head.tail == static_cast<uint32_t>(tail)) return;
  head.chosen = chosen;
  head.tail = static_cast<uint32_t>(tail);
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  m.update_head(h, head);
}

size_t CudaPartitions::bytes() const { return impl_->layout.bytes; }

void CudaPartitions::choose(uint32_t layer, const DeviceRows& q, const uint32_t* sequence,
                            Stream stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  if (impl_->in_clusters) {
    check(launch_choose_cluster(impl_->layers[layer], q, sequence, s), "choosing partitions");
    return;
  }
  launch_choose(impl_->layers[layer], q, sequence, s);
  check_launch("choosing partitions");
}

void CudaPartitions::attend(uint32_t layer, Stream stream) {
  launch_attend(impl_->layers[layer], static_cast<cudaStream_t>(stream));
  check_launch("attending partitions");
}

const float* CudaPartitions::tail_o() const {
  return impl_->memory.as<float>(impl_->layout.tail_o);
}

const float* CudaPartitions::tail_lse() const {
  return impl_->memory.as<float>(impl_->layout.tail_lse);
}

bool CudaPartitions::await(uint32_t layer, uint32_t kv_head, uint32_t sequence, uint64_t timeout_us,
                           const std::atomic<bool>& stop, Chosen& out) {
  using Clock = std::chrono::steady_clock;
  constexpr uint32_t kLooksPerClock = 256;
  constexpr uint64_t kForever = uint64_t{1} << 50;  // microseconds that a clock can count
  const size_t h = size_t{layer} * impl_->shape.kv_heads + kv_head;
  const PartitionsFlag& flag = impl_->flags.as<PartitionsFlag>()[h];
  const auto is_there = [&] { return has_reached(load_acquire(flag.sequence), sequence); };
  Clock::time_point end;
  for (uint32_t looks = 0; !is_there(); ++looks) {
    if (looks == 0) end = Clock::now() + std::chrono::microseconds(std::min(timeout_us, kForever));
    if (stop.load(std::memory_order_relaxed)) return false;
    if (looks % kLooksPerClock == kLooksPerClock - 1 && Clock::now() > end) return is_there();
    pause_cpu();
  }
  out = {impl_->ids.as<uint32_t>() + h * impl_->ids_stride, flag.count};
  return true;
}

std::unique_ptr<Partitions> make_cuda_partitions(Resident& resident, const PartitionsShape& shape) {
  return std::make_unique<CudaPartitions>(shape, static_cast<CudaResident&>(resident).ordinal());
}

}  // namespace keyhole::gpu
