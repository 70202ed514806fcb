// The partitions of tails on the device: which heads have them there, and keeping them as the trees are.
#include <algorithm>

#include "runtime/session.h"

namespace keyhole::runtime {
namespace {

gpu::PartitionsTail front_tail(keyhole_tail_mode tail) {
  return tail == KEYHOLE_TAIL_SECOND ? gpu::PartitionsTail::second : gpu::PartitionsTail::centroid;
}

}  // namespace

bool Session::wants_front(const Head& hd) const {
  const Budget& b = hd.params.budget;
  return b.can_choose_on_device() && hd.indexed() != 0 && hd.full_tail() != nullptr;
}

bool Session::chooses_on_device(const Head& hd) const {
  if (stream_ == nullptr || stream_->front == nullptr || !wants_front(hd)) return false;
  const auto i = static_cast<size_t>(&hd - heads_.data());
  return stream_->front_counts[i] == hd.tail->fine().count();
}

void Session::drop_front() {
  if (stream_ == nullptr) return;
  std::fill(stream_->front_counts.begin(), stream_->front_counts.end(), 0U);
  stream_->front_stale = true;
}

void Session::update_front() {
  StreamSide& side = *stream_;
  side.front_stale = false;
  const ModelShape& m = engine_->model();
  std::vector<bool> layers(m.layers);
  uint32_t most = 0;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const Head& hd = heads_[i];
    const auto layer = static_cast<uint32_t>(i / m.kv_heads);
    if (params_.partitions == KEYHOLE_PLACE_HOST || side.front_refused || !wants_front(hd) ||
        is_dense(layer, static_cast<uint32_t>(i % m.kv_heads))) {
      continue;
    }
    layers[layer] = true;
    most = std::max(most, static_cast<uint32_t>(hd.tail->fine().count()));
  }
  if (most == 0) {
    side.front_layers = layers;
    return;
  }
  if (side.front == nullptr || side.front_room < most) {
    // Room for as many more as appends of the session may bring, a quarter at most at once.
    const uint32_t room =
        most + std::max(most / 4, 2 * params_.append_block / params_.tail_partition);
    const gpu::PartitionsShape shape = params_.partitions_shape(m, room);
    if (side.front != nullptr) side.version += 1;
    side.front.reset();
    drop_front();
    side.front_stale = false;
    side.front_layers.assign(m.layers, false);
    const size_t bytes = gpu::partitions_bytes(shape);
    try {
      const uint64_t held = device_bytes();
      if (params_.device_memory_limit != 0 && held + bytes > params_.device_memory_limit) {
        throw Error(Status::out_of_device_memory,
                    "partitions on the device need " + std::to_string(bytes) +
                        " bytes more than the " + std::to_string(held) +
                        " held, device_memory_limit is " +
                        std::to_string(params_.device_memory_limit));
      }
      side.front = engine_->stream_device().make_partitions(*resident_, shape);
      side.front_room = room;
      side.version += 1;
    } catch (const Error& e) {
      if (params_.partitions == KEYHOLE_PLACE_DEVICE) {
        side.front_stale = true;  // the next step says so again
        throw;
      }
      engine_->log()(KEYHOLE_LOG_WARNING,
                     std::string("partitions of tails stay on the host: ") + e.what());
      side.front_refused = true;
      return;
    }
    device_bytes_peak_ = std::max(device_bytes_peak_, device_bytes());
  }
  if (side.front_layers != layers) side.version += 1;
  side.front_layers = layers;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const auto layer = static_cast<uint32_t>(i / m.kv_heads);
    if (layers[layer]) upload_front(layer, static_cast<uint32_t>(i % m.kv_heads));
  }
}

void Session::upload_front(uint32_t layer, uint32_t kv_head) {
  StreamSide& side = *stream_;
  const size_t i = size_t{layer} * engine_->model().kv_heads + kv_head;
  const Head& hd = heads_[i];
  if (!wants_front(hd) || is_dense(layer, kv_head)) {
    side.front->set(layer, kv_head, 0, gpu::PartitionsTail::none);
    return;
  }
  const index::TailTree& tree = *hd.tail;
  const index::TailLevel& fine = tree.fine();
  const uint32_t first = side.front_counts[i];
  const auto count = static_cast<uint32_t>(fine.count());
  if (first < count) {
    const uint32_t dim = tree.dim();
    float scales[kMaxHeadDim], center[kMaxHeadDim];
    for (uint32_t j = 0; j < dim; ++j) {
      scales[j] = tree.codes().scale(j);
      center[j] = tree.codes().center(j);
    }
    side.front->upload(layer, kv_head, first,
                       {count - first, fine.keys.data() + size_t{first} * dim, scales, center,
                        fine.sizes.data() + first, fine.variances.data() + first,
                        fine.values.data() + size_t{first} * dim * dtype_size(tree.dtype())});
    side.front_counts[i] = count;
  }
  const uint32_t most_chosen = params_.partitions_shape(engine_->model(), 0).most_chosen;
  size_t largest = 0;
  for (uint32_t f = first; f < count; ++f) largest = std::max(largest, tree.rows_of(f).size());
  step_.reserve_chosen_rows(largest * most_chosen);
  const Budget& b = hd.params.budget;
  const uint32_t chosen = (b.min_keys + params_.tail_partition - 1) / params_.tail_partition;
  side.front->set(layer, kv_head, std::min({chosen, count, most_chosen}), front_tail(b.tail));
}

}  // namespace keyhole::runtime
