#include "runtime/stream/device_partitions.h"

#include <algorithm>
#include <string>

namespace keyhole::runtime {
namespace {

gpu::PartitionsTail device_tail(keyhole_tail_mode tail) {
  return tail == KEYHOLE_TAIL_SECOND ? gpu::PartitionsTail::second : gpu::PartitionsTail::centroid;
}

}  // namespace

DevicePartitions::DevicePartitions(const SessionParams& params, const ModelShape& model, Make make,
                                   const Log& log)
    : params_(&params),
      model_(model),
      make_(std::move(make)),
      log_(log),
      numbers_(model.head_numbers()),
      counts_(numbers_.count()),
      chooses_(counts_.size()),
      layers_(model.layers) {}

void DevicePartitions::drop() {
  std::fill(counts_.begin(), counts_.end(), 0U);
  is_stale_ = true;
}

size_t DevicePartitions::update(std::span<const PartitionedHead> heads) {
  is_stale_ = true;  // until all is done
  std::vector<char> chooses(heads.size()), layers(model_.layers);
  uint32_t most = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    if (!may_choose(i, heads[i])) continue;
    chooses[i] = 1;
    layers[numbers_.layer_of(i)] = 1;
    most = std::max(most, static_cast<uint32_t>(heads[i].tree->fine().count()));
  }
  if (most > capacity_ && !reserve(most)) {
    std::fill(chooses.begin(), chooses.end(), 0);
    std::fill(layers.begin(), layers.end(), 0);
  }
  if (layers_ != layers) version_ += 1;
  layers_ = std::move(layers);
  chooses_ = std::move(chooses);
  size_t rows = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    if (layers_[numbers_.layer_of(i)] != 0) rows = std::max(rows, upload(i, heads[i]));
  }
  is_stale_ = false;
  return rows;
}

bool DevicePartitions::may_choose(size_t i, const PartitionedHead& head) {
  if (params_->partitions == KEYHOLE_PLACE_HOST || is_refused_ || head.tree == nullptr)
    return false;
  const uint64_t wanted =
      (uint64_t{head.min_keys} + params_->tail_partition - 1) / params_->tail_partition;
  const uint32_t most_chosen = params_->partitions_shape(model_, 0).most_chosen;
  if (std::min<uint64_t>(wanted, head.tree->fine().count()) <= most_chosen) return true;
  if (!has_told_of_many_) {
    has_told_of_many_ = true;
    log_(KEYHOLE_LOG_WARNING, "layer " + std::to_string(numbers_.layer_of(i)) + ", KV head " +
                                  std::to_string(numbers_.kv_head_of(i)) + ": min_keys of " +
                                  std::to_string(head.min_keys) + " are " + std::to_string(wanted) +
                                  " partitions a step, and the device chooses at most " +
                                  std::to_string(most_chosen) +
                                  ": partitions of such heads stay on the host");
  }
  return false;
}

bool DevicePartitions::reserve(uint32_t partitions) {
  // Capacity for what appends of the session may add, but at most a quarter more than there are.
  const uint32_t capacity =
      partitions + std::max(partitions / 4, 2 * params_->append_block / params_->tail_partition);
  const gpu::PartitionsShape shape = params_->partitions_shape(model_, capacity);
  // The old ones go first: the device may have no memory for both.
  version_ += 1;
  partitions_.reset();
  capacity_ = 0;
  std::fill(counts_.begin(), counts_.end(), 0U);
  std::fill(chooses_.begin(), chooses_.end(), 0);
  std::fill(layers_.begin(), layers_.end(), 0);
  try {
    const size_t bytes = gpu::partitions_bytes(shape);
    const size_t held = gpu::cuda_resident_bytes(params_->resident_shape(model_));
    if (params_->device_memory_limit != 0 && held + bytes > params_->device_memory_limit) {
      throw Error(Status::out_of_device_memory, "partitions on the device need " +
                                                    std::to_string(bytes) +
                                                    " bytes more than the " + std::to_string(held) +
                                                    " held, device_memory_limit is " +
                                                    std::to_string(params_->device_memory_limit));
    }
    partitions_ = make_(shape);
  } catch (const Error& e) {
    if (params_->partitions == KEYHOLE_PLACE_DEVICE) throw;
    log_(KEYHOLE_LOG_WARNING, std::string("partitions of tails stay on the host: ") + e.what());
    is_refused_ = true;
    return false;
  }
  capacity_ = capacity;
  bytes_peak_ = std::max(bytes_peak_, bytes());
  return true;
}

size_t DevicePartitions::upload(size_t i, const PartitionedHead& head) {
  const uint32_t layer = numbers_.layer_of(i), kv_head = numbers_.kv_head_of(i);
  if (chooses_[i] == 0) {
    // Its layer's kernels score all heads: this one has nothing that could be chosen or stand for keys.
    partitions_->set(layer, kv_head, 0, gpu::PartitionsTail::none);
    return 0;
  }
  const index::TailTree& tree = *head.tree;
  const index::TailLevel& fine = tree.fine();
  const uint32_t first = counts_[i];
  const auto count = static_cast<uint32_t>(fine.count());
  if (first < count) {
    const uint32_t dim = tree.dim();
    float scales[kMaxHeadDim], center[kMaxHeadDim];
    for (uint32_t j = 0; j < dim; ++j) {
      scales[j] = tree.codes().scale(j);
      center[j] = tree.codes().center(j);
    }
    partitions_->upload(
        layer, kv_head, first,
        {.count = count - first,
         .keys = fine.keys.data() + size_t{first} * dim,
         .scales = scales,
         .center = center,
         .sizes = fine.sizes.data() + first,
         .query_scales = tree.query_scale().data(),
         .variances = fine.variances.data() + first,
         .values = fine.values.data() + size_t{first} * dim * dtype_size(tree.dtype())});
    counts_[i] = count;
  }
  const uint64_t wanted =
      (uint64_t{head.min_keys} + params_->tail_partition - 1) / params_->tail_partition;
  const auto chosen = static_cast<uint32_t>(std::min<uint64_t>(wanted, count));
  partitions_->set(layer, kv_head, chosen, device_tail(head.tail));
  // Only new partitions are measured: the step has reserved what the others need.
  size_t largest = 0;
  for (uint32_t f = first; f < count; ++f) largest = std::max(largest, tree.rows_of(f).size());
  return largest * params_->partitions_shape(model_, 0).most_chosen;
}

}  // namespace keyhole::runtime
