#include "tools/engines/llama.cpp/cuda/card_cache.h"

#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "tools/engines/llama.cpp/cuda/host_inputs.h"
#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

/// Sessions that are kept without being used: as many as llama.cpp has sequences, as a lost one may not be made again.
constexpr size_t kMostSequences = 256;

}  // namespace

CardCache::CardCache(const Settings& settings, CardMemory& memory, CardStream& sessions,
                     CardStream& prompts)
    : settings_(settings),
      copy_(settings.copy.value_or(false)),
      memory_(memory),
      stream_(sessions),
      prompts_(prompts),
      lazy_([this] { return store_->make(); }),
      follower_([this](const Following& f) { catch_up(*f.session, f.stream, f.cells); }) {}

CardCache::~CardCache() {
  follower_.drop();
  if (!sequences_) return;
  if (joined_ + joined_graphs_ != 0) {
    log(Level::kInfo, told_joints(joined_ + joined_graphs_) + ", " +
                          std::to_string(joined_graphs_) + " of them as one CUDA graph");
  }
  for (const auto& sequence : sequences_->all()) {
    try {
      const std::string line = sequence->session->describe();
      if (!line.empty()) log(Level::kInfo, line);
    } catch (const std::runtime_error&) {  // what a session that failed says is of no interest
    }
  }
}

void CardCache::add(const ggml_tensor* tensor, const CacheName& name) {
  const auto streams = static_cast<uint32_t>(tensor->ne[2]);
  const auto cells = static_cast<uint32_t>(tensor->ne[1]);
  layers_[name.layer].rows.set(tensor, name.values);
  if (!cells_) {
    cells_ = std::make_unique<Cells>(streams, cells);
    sequences_ = std::make_unique<Sequences>(
        *cells_, kMostSequences, true,
        [this](uint32_t stream, uint32_t cell) {
          return restored_.has(size_t{stream} * cells_->cells() + cell);
        },
        [this](uint32_t stream, uint32_t first, uint32_t count) {
          read_out(stream, first, count);
        });
  } else if (cells_->streams() != streams || cells_->cells() != cells) {
    stay(std::string("tensor '") + tensor->name + "' has another number of cells than others");
  }
}

void CardCache::announce(const ggml_tensor* attention, const CacheName& name) {
  // When the engine is made, meet_attention() says where a graph is not as those before.
  const auto found = layers_.find(name.layer);
  if (found == layers_.end() || store_) return;
  Layer& layer = found->second;
  std::string why = why_not(attention);
  if (why.empty() && layer.shape && has_shape(attention, *layer.shape)) return;
  const LayerShape shape = layer_shape(attention);
  if (why.empty() && layer.rows.tensor(true) == nullptr) why = "keys without values";
  const auto is_known = [&](const auto& other) {
    return other.second.shape && has_shape(attention, *other.second.shape);
  };
  if (why.empty() && std::none_of(layers_.begin(), layers_.end(), is_known)) {
    why = refusal(settings_, shape, static_cast<uint32_t>(stream_.ordinal()));
  }
  if (why.empty()) {
    layer.shape = shape;
  } else if (layer.left.empty()) {
    layer.left = why;
  }
}

/// Keyhole can take over, as far as is known.
bool CardCache::takeable() const {
  return stays_.empty() && batch_ > 1 &&
         std::any_of(layers_.begin(), layers_.end(), [](const auto& layer) {
           return layer.second.left.empty() && layer.second.shape;
         });
}

/// llama.cpp attends from now on, over its cells: nothing of them is in sessions.
void CardCache::stay(const std::string& why) {
  follower_.drop();
  if (!on_card() || gone_ != 0) {
    throw std::runtime_error(why + ", which Keyhole cannot follow");
  }
  on_card_ = true;
  if (stays_.empty()) log(Level::kInfo, "llama.cpp attends itself: " + why);
  stays_ = why;
  if (sequences_) sequences_->clear();
  parts_.clear();
}

void CardCache::begin_batch(const ggml_tensor* ids) {
  if (sequences_) forget_taken();
  ++batch_;
  before_batch_ = cells_->last();
  batch_graph_ = graph_;
  abandoned_ = false;
  mask_ = nullptr;
  kind_ = BatchKind::kOther;
  way_ = on_card_ ? Way::kCard : Way::kSession;
  parts_.clear();
  renewed_ = false;
  too_large_ = false;
  ids_.clear();
  const void* host = ids->type == GGML_TYPE_I64 ? host_input(ids) : nullptr;
  if (host == nullptr) {
    stay("the numbers of the cells of a batch are not known on the host");
    for (auto& [number, layer] : layers_) {
      for (uint32_t stream = 0; stream < cells_->streams(); ++stream) {
        if (!layer.rows.hold(memory_, stream, cells_->cells())) no_memory();
      }
    }
    return;
  }
  const auto* numbers = static_cast<const int64_t*>(host);
  ids_.assign(numbers, numbers + ids->ne[0]);
  const int64_t room = int64_t{cells_->streams()} * cells_->cells();
  for (const int64_t id : ids_) {
    if (id < 0 || id >= room) {
      throw std::runtime_error("a row goes to cell " + std::to_string(id) + " of " +
                               std::to_string(room));
    }
    cells_->write(static_cast<uint32_t>(id / cells_->cells()),
                  static_cast<uint32_t>(id % cells_->cells()));
    restored_.forget(static_cast<size_t>(id));
  }
  hold_batch();
}

/// Gives memory to the cells of the batch, in layers whose cells are on the card.
void CardCache::hold_batch() {
  for (auto& [number, layer] : layers_) {
    if (!on_card() && layer.left.empty()) continue;
    for (const int64_t id : ids_) {
      // llama.cpp attends to as many cells as are used, rounded up.
      constexpr int64_t kPadding = 256;
      const int64_t end = (id % cells_->cells() / kPadding + 1) * kPadding;
      if (layer.rows.hold(memory_, static_cast<uint32_t>(id / cells_->cells()),
                          static_cast<uint32_t>(std::min<int64_t>(end, cells_->cells())))) {
        continue;
      }
      if (!takeable() || copy_ || !layer.left.empty()) no_memory();
      too_large_ = true;
      return;
    }
  }
}

void CardCache::meet_write(const ggml_tensor* node, const CacheName& name) {
  Layer& layer = layers_.at(name.layer);
  const ggml_tensor* x = node->src[0];
  const ggml_tensor* cache = layer.rows.tensor(name.values);
  if (x->ne[0] != cache->ne[0] || x->ne[2] != 1 || x->ne[3] != 1) {
    // Without flash attention values are written element by element.
    stay("values are not written row by row (flash attention is off)");
    if (!layer.rows.hold_bytes(memory_, name.values, 0, ggml_nbytes(cache))) no_memory();
    return;
  }
  uint64_t& written = layer.written[name.values ? 1 : 0];
  if (abandoned_ || written == batch_) begin_batch(node->src[1]);
  written = batch_;
  layer.fresh[name.values ? 1 : 0] = x;
  if (x->ne[1] != static_cast<int64_t>(ids_.size()) && stays_.empty()) {
    stay("keys and values do not come together");
  }
  if (!number_of(x) && layer.left.empty()) {
    end_following();  // it reads which layers are left
    layer.left = std::string("keys or values come in ") + ggml_type_name(x->type);
  }
}

void CardCache::meet_attention(const ggml_tensor* node, const CacheName& name) {
  Layer& layer = layers_.at(name.layer);
  layer.aside = batch_;  // unless all is as it should be
  if (stays_.empty() && layer.left.empty() && why_to_leave(node, layer).empty()) layer.aside = 0;
  if (!on_card() && layer.left.empty() && layer.shape) return;
  const ggml_tensor* keys = node->src[1];
  const auto first =
      static_cast<uint32_t>(root(keys)->ne[2] > 1 ? keys->view_offs / root(keys)->nb[2] : 0);
  for (uint32_t s = first; s < first + static_cast<uint32_t>(keys->ne[3]); ++s) {
    if (!layer.rows.hold(memory_, s, static_cast<uint32_t>(keys->ne[1]))) no_memory();
  }
}

/// Why llama.cpp attends with this batch over a layer that is Keyhole's, over its cells. "": Keyhole may attend.
std::string CardCache::why_to_leave(const ggml_tensor* node, Layer& layer) {
  const ggml_tensor* q = node->src[0];
  const bool fresh = !abandoned_ && layer.written[0] == batch_ && layer.written[1] == batch_ &&
                     ids_.size() == static_cast<size_t>(q->ne[1] * q->ne[3]);
  std::string why;
  if (!fresh || layer.met == batch_) {
    // A layer without cells of its own attends over this one's, in this graph or in one that follows it.
    if (fresh && !store_) layer.left = "layers without cells of their own attend to its";
    why = "attention without new tokens of its layer";
  } else if (layer.known == 0 || layer.known != uid_) {
    why = why_not(node);
    if (why.empty() && !has_shape(node, *layer.shape)) why = "the layer's shape has changed";
    if (why.empty()) layer.known = uid_;
  }
  if (why.empty() && mask_ == nullptr) plan(node);
  if (!stays_.empty()) return stays_;
  if (why.empty() && mask_ != node->src[3]) why = "the layer has a mask of its own";
  if (why.empty() && kind_ != BatchKind::kRuns) why = "the mask is not causal";
  layer.met = batch_;
  if (!why.empty() && !on_card()) {
    throw std::runtime_error(why + ", which Keyhole leaves to llama.cpp and needs copy=on for");
  }
  return why;
}

void CardCache::meet_read(const ggml_tensor* touched, const CacheName& name) {
  Layer& layer = layers_.at(name.layer);
  if (!on_card() && layer.left.empty() && layer.shape) {
    throw std::runtime_error("it reads llama.cpp's cache, for which Keyhole needs copy=on");
  }
  hold(touched, name);
}

bool CardCache::meet_change(const ggml_tensor* node, const ggml_tensor* touched,
                            const CacheName& name) {
  Layer& layer = layers_.at(name.layer);
  changed_ = graph_;
  const bool in_sessions = std::any_of(layers_.begin(), layers_.end(), [](const auto& other) {
    return other.second.left.empty() && other.second.shape;
  });
  // llama.cpp turns the keys of all cells, also of those that hold nothing yet. Of all layers, or of none.
  if (on_card_ && !renewed_ && in_sessions && !copy_ && takeable() && !hold_keys()) {
    end_following();
    if (on_card_) make_room();
  }
  if (!copy_ && !on_card_ && in_sessions) {
    const std::span<const int32_t> by = note_shifts(node);
    if (layer.left.empty() && layer.shape) {
      rewriter_->learn(layer.number, node);
      turn_restored(restored_, *rewriter_, rows_of(layer, false), layer.rows.tensor(false), by);
      return false;
    }
    hold(touched, name);
    return true;
  }
  hold(touched, name);
  if (renewed_) return true;
  end_following();
  sequences_->clear();
  // Tokens that are gone have their numbers still, by which they are known.
  cells_->renew(gone_);
  renewed_ = true;
  if (!on_card_) come_back();
  return true;
}

/// Memory for the keys of all cells. False: the card has too little, and holds what it held before.
bool CardCache::hold_keys() {
  const size_t before = memory_.pieces();
  const bool all = std::all_of(layers_.begin(), layers_.end(), [&](auto& each) {
    CardRows& rows = each.second.rows;
    const ggml_tensor* keys = rows.tensor(false);
    return keys == nullptr || rows.hold_bytes(memory_, false, 0, ggml_nbytes(keys));
  });
  if (!all) memory_.let_go_since(before);
  return all;
}

std::span<const int32_t> CardCache::note_shifts(const ggml_tensor* node) {
  const size_t room = size_t{cells_->streams()} * cells_->cells();
  const auto* by = static_cast<const int32_t*>(host_input(shifts_of(node, room)));
  if (by == nullptr) {
    throw std::runtime_error("how far positions are shifted is not known on the host");
  }
  if (shifted_ != graph_) {
    forget_taken();
    sequences_->shift({by, room});
  }
  shifted_ = graph_;
  return {by, room};
}

/// Memory for the cells of a tensor of the cache, or of a view of it.
void CardCache::hold(const ggml_tensor* touched, const CacheName& name) {
  if (!layers_.at(name.layer)
           .rows.hold_bytes(memory_, name.values, touched == root(touched) ? 0 : touched->view_offs,
                            ggml_nbytes(touched))) {
    no_memory();
  }
}

Way CardCache::way(const CacheName& name) const {
  const Layer& layer = layers_.at(name.layer);
  return !layer.left.empty() || layer.aside == batch_ || !stays_.empty() ? Way::kCard : way_;
}

bool CardCache::is_written(const CacheName& name) const {
  return on_card() || !layers_.at(name.layer).left.empty();
}

void CardCache::failed() {
  abandoned_ = true;
  // llama.cpp goes on as if the keys had been turned.
  if (on_card_ && changed_ == graph_) gone_ = cells_->last();
  if (on_card_) return;
  parts_.clear();
  if (!sequences_) return;
  if (batch_graph_ == graph_) {
    // Their sessions may have the tokens in some layers and not in others.
    sequences_->drop_current();
  } else {
    sequences_->clear();
  }
}

CellRows CardCache::rows_of(const Layer& layer, bool values) {
  return {layer.number, values, *number_of(layer.rows.tensor(false)), layer.shape->kv_heads,
          layer.shape->head_dim};
}

bool CardCache::read(const CacheName& name, size_t offset, size_t bytes, std::byte* out) {
  end_following();
  Layer& layer = layers_.at(name.layer);
  if (on_card() || !layer.left.empty() || !layer.shape) {
    const size_t bytes_of_cell = layer.rows.tensor(name.values)->nb[1];
    for (size_t id = offset / bytes_of_cell; id * bytes_of_cell < offset + bytes; ++id) {
      const uint64_t stamp = cells_->stamp(static_cast<uint32_t>(id / cells_->cells()),
                                           static_cast<uint32_t>(id % cells_->cells()));
      if (layer.left.empty() && layer.shape && stamp != 0 && stamp <= gone_) {
        throw std::runtime_error("tokens were in a session which is gone");
      }
    }
    if (!layer.rows.hold_bytes(memory_, name.values, offset, bytes)) no_memory();
    return false;
  }
  const ggml_tensor* tensor = layer.rows.tensor(name.values);
  read_tensor(*sequences_, rewriter_.get(), restored_, rows_of(layer, name.values), tensor,
              cells_->cells(), offset, bytes, out);
  return true;
}

std::byte* CardCache::open_to_write(const CacheName& name, size_t offset, size_t bytes) {
  end_following();
  Layer& layer = layers_.at(name.layer);
  const ggml_tensor* tensor = layer.rows.tensor(name.values);
  const size_t row = tensor->nb[1];
  for (size_t id = offset / row; id * row < offset + bytes; ++id) {
    cells_->write(static_cast<uint32_t>(id / cells_->cells()),
                  static_cast<uint32_t>(id % cells_->cells()));
  }
  const bool is_ours = layer.left.empty() && layer.shape;
  if ((on_card() || !is_ours) && !layer.rows.hold_bytes(memory_, name.values, offset, bytes)) {
    if (!is_ours) no_memory();
    make_room();
  }
  return !on_card() && is_ours ? restored_.write(tensor, offset, bytes) : nullptr;
}

uint32_t CardCache::copied(const CacheName& name, uint32_t from, uint32_t to) {
  end_following();  // it may read what the copy is written over
  Layer& layer = layers_.at(name.layer);
  uint32_t used = 0;
  for (uint32_t cell = 0; cell < cells_->cells(); ++cell) {
    if (cells_->stamp(from, cell) != 0) used = cell + 1;
  }
  const ggml_tensor* tensor = layer.rows.tensor(name.values);
  const bool is_ours = layer.left.empty() && layer.shape;
  for (const uint32_t stream : {from, to}) {
    if (!on_card() && is_ours) break;
    if (layer.rows.hold_bytes(memory_, name.values, stream * tensor->nb[2], used * tensor->nb[1])) {
      continue;
    }
    if (!is_ours) no_memory();
    make_room();
  }
  cells_->copy_stream(from, to);
  if (on_card() || !is_ours) return used;
  const size_t cells = cells_->cells();
  restored_.copy(tensor, from * cells, to * cells, cells);
  return 0;
}

void CardCache::cleared() {
  if (!cells_) return;
  gone_ = 0;
  end_following();
  sequences_->clear();
  cells_->clear();
  parts_.clear();
  abandoned_ = true;
  for (auto& [number, layer] : layers_) layer.rows.let_go(memory_);
  come_back();
}

}  // namespace keyhole::llama_cpp
