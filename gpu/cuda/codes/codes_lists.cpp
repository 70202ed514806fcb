// Lists of a store of codes on a CUDA device: making them beside steps, and when steps find them.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/codes/codes_memory.h"
#include "gpu/cuda/codes/cuda_codes.h"

namespace keyhole::gpu {
namespace {

/// Of k-means: on recorded heads more change errors by less than clusterings differ by chance (bench/RESULTS.md,
/// "Making lists on a device").
constexpr uint32_t kListIterations = 4;

/// Whether the stream has come to the event, without waiting.
bool has_passed(const Event& event) {
  const cudaError_t state = cudaEventQuery(event.get());
  if (state == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(state, "making lists of codes");
  return true;
}

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  (void)cudaStreamIsCapturing(stream_of(stream), &status);
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

bool CudaCodes::takes_lists(uint32_t layer) const {
  impl_->check_layer(layer);
  return impl_->variants.has_lists();
}

void find_work(MakeLists& p, const ListWorkLayout& work, std::byte* at) {
  p.keys = at + work.keys;
  p.values = at + work.values;
  p.labels = reinterpret_cast<uint16_t*>(at + work.labels);
  p.order = reinterpret_cast<uint16_t*>(at + work.order);
  p.counts = reinterpret_cast<uint16_t*>(at + work.counts);
  p.starts = reinterpret_cast<uint32_t*>(at + work.starts);
  p.centroids = reinterpret_cast<uint16_t*>(at + work.centroids);
  p.offsets = reinterpret_cast<float*>(at + work.offsets);
  p.begins = reinterpret_cast<uint32_t*>(at + work.begins);
}

MakeLists CudaCodes::Impl::listing(uint32_t layer, uint32_t begin, uint32_t rows,
                                   uint32_t first_head) const {
  const Layer& l = layers[layer];
  const ListWorkLayout& work = layout.list_work;
  std::byte* const lists = list_memory(layer);
  std::byte* const at = in_lists.data() + coded_layers(shape) * layout.list_stride;
  MakeLists p;
  p.shape = shape.code;
  p.dtype = shape.dtype;
  p.row_bytes = static_cast<uint32_t>(shape.code.dim * dtype_size(shape.dtype));
  p.pair_bytes = static_cast<uint32_t>(list_pair_bytes(shape.code));
  p.first_row = begin;
  p.rows = rows;
  p.kv_heads = shape.kv_heads;
  p.first_head = first_head;
  p.heads = std::min(work.heads, shape.kv_heads - first_head);
  p.stretch = ListStretch(rows, shape.list_rows);
  p.iterations = kListIterations;
  p.kept_rows = kept_list_rows(shape.code.dim);
  p.host_keys = l.rows.keys.data;
  p.host_values = l.rows.values.data;
  p.rows_stride = head_bytes(layer);
  p.row_scales = row_scales(layer);
  p.key_scale = key_scales(layer);
  p.value_scale = value_scales(layer);
  find_work(p, work, at);
  p.list_capacity = layout.lists.lists;
  p.pair_capacity = layout.lists.pairs;
  p.pairs = lists + layout.list_pairs;
  p.ids = reinterpret_cast<uint32_t*>(lists + layout.list_ids);
  p.places = reinterpret_cast<ListPlace*>(lists + layout.list_places);
  p.figures = reinterpret_cast<ListFigures*>(lists + layout.list_figures);
  p.key_means = reinterpret_cast<uint16_t*>(lists + layout.list_key_means);
  p.value_means = reinterpret_cast<uint16_t*>(lists + layout.list_value_means);
  p.mean_tiles = reinterpret_cast<uint32_t*>(lists + layout.list_mean_tiles);
  const size_t stretches = l.stretches.size() + l.making.size();
  p.before = list_totals(layer, stretches);
  p.after = list_totals(layer, stretches + 1);
  return p;
}

bool CudaCodes::make_lists(uint32_t layer, uint32_t begin, uint32_t rows) {
  Impl& m = *impl_;
  Impl::Layer& l = m.layer_at(layer);
  const uint32_t first = begin / kCodeBlock, end = (begin + rows) / kCodeBlock;
  if (begin % kCodeBlock != 0 || rows % kCodeBlock != 0 || rows == 0 || rows > kListStretch ||
      end > l.count || first != l.made()) {
    refuse_codes("lists to be made of rows " + std::to_string(begin) + " to " +
                 std::to_string(begin + rows) + " of a layer with " +
                 std::to_string(size_t{l.count} * kCodeBlock) + " rows, of which " +
                 std::to_string(size_t{l.made()} * kCodeBlock) +
                 " are in lists; allowed are up to " + std::to_string(kListStretch) +
                 " behind these");
  }
  if (!takes_lists(layer) || m.exchange != nullptr) return false;
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  const Event& turn = m.turns[m.begun % m.turns.size()];
  if (!has_passed(turn)) return false;
  Impl::Layer::Making making{first, end, std::make_unique<Event>()};
  l.making.reserve(l.making.size() + 1);
  // Scales of int8 rows come with their blocks; steps before a truncation may read what lay here.
  m.maker->wait_for(m.changed->get());
  try {
    for (uint32_t head = 0; head < m.shape.kv_heads; head += m.layout.list_work.heads) {
      const MakeLists p = m.listing(layer, begin, rows, head);
      launch_copy_rows(p, m.maker->get());
      launch_cluster_rows(p, m.maker->get());
      launch_encode_lists(p, m.maker->get());
    }
    making.done->record(m.maker->get());
    turn.record(m.maker->get());
  } catch (...) {
    (void)cudaStreamSynchronize(m.maker->get());  // what was enqueued reads rows
    throw;
  }
  l.making.push_back(std::move(making));
  ++m.begun;
  return true;
}

void CudaCodes::use_lists(uint32_t layer, Stream stream) {
  Impl& m = *impl_;
  m.check_layer(layer);
  Impl::Layer& l = m.layers[layer];
  if (l.making.empty() || is_capturing(stream)) return;
  const DeviceScope scope(m.ordinal);
  size_t done = 0;
  {
    const BesideCapture beside;
    while (done < l.making.size() && has_passed(*l.making[done].done)) ++done;
  }
  if (done == 0) return;
  l.stretches.reserve(l.stretches.size() + done);
  for (size_t i = 0; i < done; ++i) {
    l.stretches.push_back({l.making[i].begin, l.making[i].end});
  }
  l.making.erase(l.making.begin(), l.making.begin() + static_cast<ptrdiff_t>(done));
  m.count_lists(layer, stream);
  m.set_count(layer, l.count, stream);
}

void CudaCodes::stop_lists(uint32_t layer) {
  Impl& m = *impl_;
  m.check_layer(layer);
  if (m.layers[layer].making.empty()) return;
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  m.maker->wait("making lists of codes");
  m.layers[layer].making.clear();
}

uint32_t CudaCodes::listed(uint32_t layer) const {
  impl_->check_layer(layer);
  return impl_->layers[layer].listed() * kCodeBlock;
}

uint32_t CudaCodes::made_lists(uint32_t layer) const {
  impl_->check_layer(layer);
  return impl_->layers[layer].made() * kCodeBlock;
}

}  // namespace keyhole::gpu
