#include "gpu/cuda/indexing/neighbour_plan.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "gpu/cuda/indexing/neighbour_kernels.h"

namespace keyhole::gpu {
namespace {

// Queries per launch: 32 tiles, of which 8 shares of the keys fill an H200 twice.
constexpr size_t kBatch = 8192;
constexpr size_t kHeld = 131072;
constexpr size_t kMemoryLimit = size_t{2} << 30U;
// Keys of a share: with fewer, filling the pipeline costs more than the next share brings.
constexpr size_t kLeastShare = 512;

}  // namespace

void check_task(const NeighbourTask& task, const NeighbourLists& lists) {
  const auto refuse = [](const std::string& text) {
    throw Error(Status::invalid_argument, "neighbour search: " + text);
  };
  if (task.most < 1 || task.most > kMostNeighbours) {
    refuse("most is " + std::to_string(task.most) + ", allowed: 1.." +
           std::to_string(kMostNeighbours));
  }
  if (!is_device_index_dim(task.keys.dim) || task.queries.dim != task.keys.dim) {
    refuse("dimensions are " + std::to_string(task.keys.dim) + " of keys and " +
           std::to_string(task.queries.dim) +
           " of queries, allowed: the same of 64, 80, 96, 128, 256");
  }
  for (const DType type : {task.keys.dtype, task.queries.dtype}) {
    if (type == DType::i8) refuse("dtype i8, allowed: f32, f16, bf16");
  }
  constexpr size_t kMostRows = 0xFFFFFFFF - kMostBlockKeys;
  if (task.keys.tokens > kMostRows || task.queries.tokens > kMostRows) {
    refuse("more than 2^32 - 2^17 - 1 rows");
  }
  if (task.thin > task.most || (task.thin != 0 && lists.scores != nullptr) ||
      (task.thin != 0 && task.queries.tokens != task.keys.tokens)) {
    refuse("thin is " + std::to_string(task.thin) +
           ", allowed: 0, or 1..most where the queries are the keys and no scores are asked for");
  }
  if ((task.key_extra == nullptr) != (task.query_extra == nullptr)) {
    refuse("an extra coordinate of keys or of queries alone");
  }
  const bool no_data = (task.queries.tokens != 0 && task.queries.data == nullptr) ||
                       (task.keys.tokens != 0 && task.keys.data == nullptr);
  if (no_data || (task.queries.tokens != 0 && (lists.ids == nullptr || lists.counts == nullptr))) {
    refuse("a null pointer for keys, queries, ids or counts");
  }
}

size_t operand_bytes(const NeighbourTask& task) {
  return size_t{task.keys.dim} * (task.keys.dtype == DType::f32 ? 6 : 2);
}

uint32_t sample_rank(uint32_t most) {
  const double mean = static_cast<double>(most) / kSampleEvery;
  return static_cast<uint32_t>(std::ceil(mean + 4.5 * std::sqrt(mean) + 4.0));
}

NeighbourPlan::NeighbourPlan(const NeighbourConfig& config, int processors)
    : memory_limit_(config.memory_limit == 0 ? kMemoryLimit : config.memory_limit),
      block_keys_(config.block_keys == 0 ? kMostBlockKeys : config.block_keys),
      processors_(static_cast<size_t>(processors)) {
  if (block_keys_ % 1024 != 0 || block_keys_ > kMostBlockKeys) {
    throw Error(Status::invalid_argument, "block_keys is " + std::to_string(block_keys_) +
                                              ", allowed: multiples of 1024 up to 131072");
  }
}

size_t NeighbourPlan::shares_of(size_t rows, size_t keys, bool limited) const {
  const size_t tiles = (rows + kTileQueries - 1) / kTileQueries;
  const size_t wanted = waves(limited) / tiles;
  return std::clamp<size_t>(std::min(wanted, keys / kLeastShare), 1, kMostShares);
}

size_t NeighbourPlan::most_lists(size_t rows, bool limited) const {
  const size_t full = kTileQueries * waves(limited);
  return std::max(rows, std::min(round_up(rows, kTileQueries) * kMostShares, full));
}

size_t NeighbourPlan::bytes_of(const NeighbourTask& task, const NeighbourSizes& s) const {
  const DType type = task.keys.dtype;
  const size_t row = operand_bytes(task);
  const size_t lists = most_lists(s.batch, task.limits != nullptr);
  const size_t raw = type == DType::f32 || task.queries.dtype != type ? 4 * task.keys.dim : 0;
  return s.held * (row + task.most * sizeof(Rank) + 28) + 2 * s.block * (row + 4) +
         std::max(s.held, s.block) * raw + (task.thin != 0 ? task.keys.tokens * (row + 4) : 0) +
         lists * (kListCapacity * sizeof(Rank) + 4) +
         s.batch * (kMostGroups * sizeof(float) + 16 * size_t{task.most});
}

NeighbourSizes NeighbourPlan::sizes_of(const NeighbourTask& task) const {
  NeighbourSizes s = {std::min(task.queries.tokens, kHeld), std::min(task.queries.tokens, kBatch),
                      std::min(round_up(std::max<size_t>(task.keys.tokens, 1), 1024), block_keys_)};
  while (bytes_of(task, s) > memory_limit_) {
    if (s.batch > 2048) {
      s.batch /= 2;
    } else if (s.held > std::max<size_t>(s.batch, 8192)) {
      s.held /= 2;
    } else if (s.block > 8192) {
      s.block = round_up(s.block / 2, 1024);
    } else {
      throw Error(Status::out_of_device_memory,
                  "neighbour search: " + std::to_string(bytes_of(task, s)) + " bytes are needed, " +
                      std::to_string(memory_limit_) + " allowed");
    }
  }
  return s;
}

}  // namespace keyhole::gpu
