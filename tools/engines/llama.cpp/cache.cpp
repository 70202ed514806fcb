#include "tools/engines/llama.cpp/cache.h"

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

/// Sessions that are kept without being used: as many as llama.cpp has sequences, where a lost one cannot be made
/// again.
constexpr size_t kMostSessions = 64;
constexpr size_t kMostSequences = 256;

int64_t row_id(const ggml_tensor* ids, int64_t i) {
  return ids->type == GGML_TYPE_I64 ? static_cast<const int64_t*>(ids->data)[i]
                                    : static_cast<const int32_t*>(ids->data)[i];
}

/// One row of K or V in the cache's dtype, as ggml's own SET_ROWS rounds it.
void convert(const ggml_tensor* from, const void* row, const ggml_tensor* to, void* out) {
  const int64_t n = from->ne[0];
  if (from->type == to->type) {
    std::memcpy(out, row, ggml_row_size(to->type, n));
  } else if (from->type == GGML_TYPE_F32 && to->type == GGML_TYPE_F16) {
    ggml_fp32_to_fp16_row(static_cast<const float*>(row), static_cast<ggml_fp16_t*>(out), n);
  } else if (from->type == GGML_TYPE_F32 && to->type == GGML_TYPE_BF16) {
    ggml_fp32_to_bf16_row(static_cast<const float*>(row), static_cast<ggml_bf16_t*>(out), n);
  } else {
    throw std::runtime_error(std::string("K and V come in ") + ggml_type_name(from->type) +
                             " for a cache in " + ggml_type_name(to->type));
  }
}

/// All caches of the process, in the order in which they were made.
struct Caches {
  std::mutex mutex;
  std::vector<const Cache*> all;
};
Caches& caches() {
  static auto* const all =
      new Caches;  // never destroyed: the last cache may go when the process ends
  return *all;
}

}  // namespace

Cache::Cache(const Settings& settings) : settings_(settings), copy_(settings.copy.value_or(true)) {
  const std::lock_guard lock(caches().mutex);
  caches().all.push_back(this);
}

Cache::~Cache() {
  {
    const std::lock_guard lock(caches().mutex);
    std::erase(caches().all, this);
  }
  if (!sequences_) return;
  if (joined_ != 0) log(Level::kInfo, told_joints(joined_));
  for (const auto& sequence : sequences_->all()) {
    try {
      log(Level::kInfo, sequence->session->describe());
    } catch (const std::runtime_error&) {  // what a session that failed says is of no interest
    }
  }
}

void Cache::add(const ggml_tensor* tensor, const CacheName& name) {
  const auto streams = static_cast<uint32_t>(tensor->ne[2]);
  const auto cells = static_cast<uint32_t>(tensor->ne[1]);
  layers_[name.layer].tensors[name.values ? 1 : 0] = tensor;
  if (!cells_) {
    cells_ = std::make_unique<Cells>(streams, cells);
    sequences_ = std::make_unique<Sequences>(
        *cells_, copy_ ? kMostSessions : kMostSequences, copy_,
        [this](uint32_t stream, uint32_t cell) {
          return restored_.has(size_t{stream} * cells_->cells() + cell);
        },
        [this](uint32_t stream, uint32_t first, uint32_t count) {
          read_out(stream, first, count);
        });
  } else if (cells_->streams() != streams || cells_->cells() != cells) {
    broken_ = std::string("tensor '") + tensor->name + "' has another number of cells than others";
  }
}

void Cache::announce(const ggml_tensor* attention, const CacheName& name) {
  const auto found = layers_.find(name.layer);
  if (found == layers_.end()) return;
  Layer& layer = found->second;
  const LayerShape shape = layer_shape(attention);
  std::string why = why_not(attention);
  if (why.empty() && (!layer.shape || *layer.shape != shape)) why = refusal(settings_, shape);
  if (opened_) return;  // attend() says so where a graph is not as those before
  if (why.empty()) {
    layer.shape = shape;
  } else if (layer.left.empty()) {
    layer.left = why;
  }
}

void Cache::set_threads(int now, int most) {
  threads_ = std::max(threads_, static_cast<uint32_t>(std::max(most, 0)));
  parallel_.set_threads(now);
  if (rewriter_) rewriter_->set_threads(now);
}

/// The cache that its thread made before this one, or after it, where that has the model's other layers and the two are
/// mixed. So llama.cpp makes the two caches of a model in which some layers have a sliding window: theirs is the
/// second.
const Cache* Cache::beside(bool before) const {
  const auto& all = caches().all;
  const auto own = std::find(all.begin(), all.end(), this) - all.begin();
  const auto count = static_cast<ptrdiff_t>(all.size());
  const Cache* other = nullptr;
  for (ptrdiff_t i = own + (before ? -1 : 1); i >= 0 && i < count; i += before ? -1 : 1) {
    const Cache* cache = all[static_cast<size_t>(i)];
    if (cache->made_by_ != made_by_ || !cache->cells_) continue;
    other = cache;
    break;
  }
  if (other == nullptr || other->layers_.rbegin()->first < layers_.begin()->first ||
      layers_.rbegin()->first < other->layers_.begin()->first) {
    return nullptr;
  }
  const bool shared = std::any_of(layers_.begin(), layers_.end(), [&](const auto& layer) {
    return other->layers_.count(layer.first) != 0;
  });
  return shared ? nullptr : other;
}

/// Layers with a sliding window are llama.cpp's. Of a model that has some the last full layer may lend its cells to
/// layers without any (gemma3n, gemma4), of which the backend is not told: its cells are filled in any case.
void Cache::look_beside() {
  const std::lock_guard lock(caches().mutex);
  const Cache* larger = beside(true);
  sliding_ = larger != nullptr && larger->cells_->cells() > cells_->cells();
  layers_.rbegin()->second.lent = beside(false) != nullptr;
}

/// Makes the engine, for all layers that were announced.
void Cache::open() {
  look_beside();
  if (sliding_) {
    // Such a cache is small, and its cells are llama.cpp's alone, also where others have no copy.
    opened_ = copy_ = true;
    restored_.clear();  // they are in the cells as well
    log(Level::kInfo, "a cache of " + std::to_string(cells_->cells()) + " cells for " +
                          std::to_string(layers_.size()) +
                          " layers with a sliding window: llama.cpp attends there itself");
    return;
  }
  StoreShape shape;
  shape.max_tokens = cells_->cells();
  shape.threads = settings_.threads != 0 ? settings_.threads : threads_;
  if (settings_.threads == 0 && ParallelFor::keeps_threads()) shape.parallel = &parallel_;
  std::string left;
  std::string why;
  for (auto& [number, layer] : layers_) {
    if (layer.left.empty() && layer.shape) {
      layer.number = static_cast<uint32_t>(shape.layers.size());
      shape.number = *number_of(layer.tensors[0]);
      shape.layers.push_back(*layer.shape);
    } else {
      if (layer.left.empty()) layer.left = "it was not in the graphs that llama.cpp measured";
      left += (left.empty() ? "" : ", ") + std::to_string(number);
      why = layer.left;
    }
  }
  if (!left.empty()) {
    log(Level::kWarning, "llama.cpp attends itself in layers " + left + ": " + why);
  }
  if (!shape.layers.empty()) {
    store_ = make_store(settings_, shape);
    rewriter_ = std::make_unique<SessionRewriter>(shape);
  }
  opened_ = true;
  if (store_) tell(shape);
}

void Cache::tell(const StoreShape& shape) const {
  const LayerShape& first = shape.layers.front();
  size_t copy = 0;
  for (const auto& [number, layer] : layers_) {
    for (const ggml_tensor* tensor : layer.tensors) {
      if (copy_ && tensor != nullptr) copy += ggml_nbytes(tensor);
    }
  }
  log(settings_.plan ? Level::kWarning : Level::kInfo,
      std::to_string(shape.layers.size()) + " layers, " + std::to_string(first.q_heads) +
          " query and " + std::to_string(first.kv_heads) + " KV heads of " +
          std::to_string(first.head_dim) + ": index " + settings_.index + ", sink " +
          std::to_string(settings_.sink) + ", window " + std::to_string(settings_.window) + ", " +
          std::to_string(shape.threads) +
          (shape.parallel != nullptr ? " threads of llama.cpp's, up to " : " threads, up to ") +
          std::to_string(shape.max_tokens) + " tokens; memory, taken as tokens come: up to " +
          mib(memory_of(settings_, shape).host) + " for each sequence" +
          (copy > 0 ? ", " + mib(copy) + " for the copy in llama.cpp's cache"
                    : ", without a copy"));
}

void Cache::forget_taken() {
  std::vector<uint32_t> own;
  for (const auto& [number, layer] : layers_) {
    if (layer.left.empty()) own.push_back(layer.number);
  }
  keyhole::llama_cpp::forget_taken(*sequences_, *cells_, own, restored_);
}

/// Tokens come out of sessions that may lose them, to be taken by another.
void Cache::read_out(uint32_t stream, uint32_t first, uint32_t count) {
  for (auto& [number, layer] : layers_) {
    if (!layer.left.empty()) continue;
    for (const bool values : {false, true}) {
      keyhole::llama_cpp::read_out(*sequences_, rewriter_.get(), rows_of(layer, values),
                                   layer.tensors[values ? 1 : 0], cells_->cells(), stream, first,
                                   count, restored_);
    }
  }
}

void Cache::begin_batch(std::vector<int64_t> ids) {
  if (restored_.any()) forget_taken();
  ++batch_;
  ids_ = std::move(ids);
  mask_ = nullptr;
  kind_ = BatchKind::kOther;
  parts_.clear();
  renewed_ = false;
  turned_.clear();
  for (const int64_t id : ids_) {
    cells_->write(static_cast<uint32_t>(id / cells_->cells()),
                  static_cast<uint32_t>(id % cells_->cells()));
    restored_.forget(static_cast<size_t>(id));
  }
}

bool Cache::write(const ggml_tensor* node, const CacheName& name) {
  const ggml_tensor* x = node->src[0];
  const ggml_tensor* ids = node->src[1];
  Layer& layer = layers_.at(name.layer);
  const ggml_tensor* cache = layer.tensors[name.values ? 1 : 0];
  const int64_t n = x->ne[1];
  const int64_t room = int64_t{cells_->streams()} * cells_->cells();
  std::vector<int64_t> cells(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = row_id(ids, i);
    if (id < 0 || id >= room) {
      throw std::runtime_error("row " + std::to_string(i) + " goes to cell " + std::to_string(id) +
                               " of " + std::to_string(room));
    }
    cells[static_cast<size_t>(i)] = id;
  }
  // The first layer of a batch is known by its having been there in the one before, or by other cells.
  uint64_t& written = layer.written[name.values ? 1 : 0];
  if (written == batch_ || cells != ids_) begin_batch(std::move(cells));
  written = batch_;
  if (!number_of(cache)) return false;

  // The scheduler may use the memory of x before the attention, so the rows are kept.
  const size_t width = cache->nb[1];
  new_rows_[name.values ? 1 : 0].layer = &layer;
  std::vector<std::byte>& rows = new_rows_[name.values ? 1 : 0].rows;
  rows.resize(static_cast<size_t>(n) * width);
  for (int64_t i = 0; i < n; ++i) {
    std::byte* row = rows.data() + static_cast<size_t>(i) * width;
    convert(x, static_cast<const std::byte*>(x->data) + static_cast<size_t>(i) * x->nb[1], cache,
            row);
    if (holds(name)) {
      std::memcpy(static_cast<std::byte*>(cache->data) +
                      static_cast<size_t>(ids_[static_cast<size_t>(i)]) * width,
                  row, width);
    }
  }
  return true;
}

void Cache::restored(const CacheName& name, size_t offset, size_t bytes) {
  const ggml_tensor* cache = layers_.at(name.layer).tensors[name.values ? 1 : 0];
  const size_t row = cache->nb[1];
  for (size_t id = offset / row; id * row < offset + bytes; ++id) {
    cells_->write(static_cast<uint32_t>(id / cells_->cells()),
                  static_cast<uint32_t>(id % cells_->cells()));
  }
}

CellRows Cache::rows_of(const Layer& layer, bool values) {
  return {layer.number, values, *number_of(layer.tensors[0]), layer.shape->kv_heads,
          layer.shape->head_dim};
}

std::byte* Cache::room_for_restored(const ggml_tensor* tensor, const CacheName& name, size_t offset,
                                    size_t bytes) {
  const Layer& layer = layers_.at(name.layer);
  if (copy_ || !layer.left.empty() || !number_of(tensor)) return nullptr;
  // Graphs without flash attention announce no layer: no session will take what the cells have, and keep.
  if (!layer.shape) return nullptr;
  return restored_.write(tensor, offset, bytes);
}

void Cache::read(const ggml_tensor* tensor, const CacheName& name, size_t offset, size_t bytes,
                 std::byte* out) {
  const Layer& layer = layers_.at(name.layer);
  read_tensor(*sequences_, rewriter_.get(), restored_, rows_of(layer, name.values), tensor,
              cells_->cells(), offset, bytes, out);
}

void Cache::cleared() {
  if (!cells_) return;
  restored_.clear();
  sequences_->clear();
  cells_->clear();
  ids_.clear();
  broken_.clear();
}

void Cache::changed_by_others() {
  if (!cells_) return;
  sequences_->clear();
  // Streams that were copied have tokens in common, which may be shifted in one of them alone. The scheduler asks about
  // every layer: once is enough.
  if (!renewed_) cells_->renew();
  renewed_ = true;
}

void Cache::shifted(ggml_tensor* node, CpuBackend& cpu) {
  const size_t room = size_t{cells_->streams()} * cells_->cells();
  const ggml_tensor* shifts = shifts_of(node, room);
  const CacheName name = *cache_name(node);
  // A layer that comes again is the next shift's.
  if (turned_.count(name.layer) != 0) turned_.clear();
  try {
    const std::span by(static_cast<const int32_t*>(shifts->data), room);
    if (restored_.any()) {
      if (!opened_) open();
      if (turned_.empty()) forget_taken();
    }
    if (turned_.empty()) sequences_->shift(by);
    turned_.insert(name.layer);
    const Layer& layer = layers_.at(name.layer);
    if (layer.left.empty() && rewriter_) {
      rewriter_->learn(layer.number, node);
      turn_restored(restored_, *rewriter_, rows_of(layer, false), layer.tensors[0], by);
    }
    if (holds(name)) cpu.compute(node);
  } catch (...) {
    // llama.cpp goes on after a shift that failed, and repeats it: sessions would have layers that were not turned, or
    // turned twice.
    sequences_->clear();
    turned_.clear();
    throw;
  }
}

void Cache::copied(const CacheName& name, uint32_t from, uint32_t to) {
  cells_->copy_stream(from, to);
  const size_t cells = cells_->cells();
  restored_.copy(layers_.at(name.layer).tensors[name.values ? 1 : 0], from * cells, to * cells,
                 cells);
  renewed_ = false;
}

void Cache::read_by_others(const ggml_tensor* node) {
  if (!opened_ && !told_ && (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_CPY)) {
    told_ = true;
    log(Level::kWarning,
        node_text(node) +
            " reads the cache: llama.cpp attends itself (flash attention is off, or the "
            "cache is in f32)");
  }
  if (complete() || !broken_.empty()) return;
  broken_ = node_text(node) + " reads llama.cpp's cache, for which Keyhole needs copy=on";
}

}  // namespace keyhole::llama_cpp
