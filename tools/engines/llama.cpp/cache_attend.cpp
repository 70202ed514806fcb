// Attention of a batch over the cache: the mask is read once for all layers, then each layer goes to its sessions.
#include <ggml.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cache.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/placing.h"

namespace keyhole::llama_cpp {
namespace {

/// Rows `first` to `first + count` of a tensor that has tokens in one dimension and heads in another, of stream
/// `stream`.
Rows tokens_of(const ggml_tensor* t, int tokens, int heads, int64_t stream, uint32_t first,
               size_t count) {
  const std::byte* data =
      static_cast<const std::byte*>(t->data) + stream * static_cast<int64_t>(t->nb[3]);
  return {data + first * t->nb[tokens],
          Number::kF32,
          static_cast<int64_t>(count),
          t->ne[heads],
          t->ne[0],
          static_cast<int64_t>(t->nb[tokens]),
          static_cast<int64_t>(t->nb[heads])};
}

/// Rows of tokens that do not lie one after the other, put together in memory of our own, or taken apart again.
class Gathered {
 public:
  Gathered(const Rows& all, const std::vector<uint32_t>& rows) : all_(all), rows_(rows) {
    const int64_t head = all.components * (all.number == Number::kF32 ? 4 : 2);
    packed_ = {nullptr,   all.number,     static_cast<int64_t>(rows.size()),
               all.heads, all.components, head * all.heads,
               head};
    memory_.resize(rows.size() * static_cast<size_t>(packed_.token_stride));
    packed_.data = memory_.data();
  }
  const Rows& gather() {
    copy(true);
    return packed_;
  }
  const Rows& empty() { return packed_; }
  void scatter() { copy(false); }

 private:
  void copy(bool in) {
    for (size_t i = 0; i < rows_.size(); ++i) {
      for (int64_t h = 0; h < all_.heads; ++h) {
        std::byte* far = const_cast<std::byte*>(static_cast<const std::byte*>(all_.data)) +
                         rows_[i] * all_.token_stride + h * all_.head_stride;
        std::byte* near = memory_.data() + static_cast<int64_t>(i) * packed_.token_stride +
                          h * packed_.head_stride;
        const auto bytes = static_cast<size_t>(packed_.head_stride);
        if (in) {
          std::memcpy(near, far, bytes);
        } else {
          std::memcpy(far, near, bytes);
        }
      }
    }
  }
  Rows all_;
  const std::vector<uint32_t>& rows_;
  Rows packed_;
  std::vector<std::byte> memory_;
};

Rows part_of(Rows rows, uint32_t first, size_t count) {
  rows.data = static_cast<const std::byte*>(rows.data) + first * rows.token_stride;
  rows.tokens = static_cast<int64_t>(count);
  return rows;
}

}  // namespace

/// False: llama.cpp attends over its cache, if that is whole. The log has each reason once.
bool Cache::leave(const std::string& why) {
  if (complete()) {
    if (reasons_.insert(why).second) {
      log(Level::kInfo, "llama.cpp attends itself where it has to: " + why);
    }
    return false;
  }
  throw std::runtime_error(why + ", which Keyhole leaves to llama.cpp and needs copy=on for");
}

bool Cache::attend(const ggml_tensor* node, const CacheName& name) {
  if (!broken_.empty()) throw std::runtime_error(broken_);
  if (!opened_) open();
  Layer& layer = layers_.at(name.layer);
  if (!layer.left.empty()) return false;
  if (sliding_) return complete() ? false : leave("the cache has a sliding window");
  if (std::string why = why_not(node); !why.empty()) return leave(why);
  if (*layer.shape != layer_shape(node)) return leave("the layer's shape has changed");
  const ggml_tensor* q = node->src[0];
  const bool fresh = layer.written[0] == batch_ && layer.written[1] == batch_ &&
                     new_rows_[0].layer == &layer && new_rows_[1].layer == &layer &&
                     ids_.size() == static_cast<size_t>(q->ne[1] * q->ne[3]);
  if (!fresh || layer.attended == batch_) {
    if (layer.lent) return false;
    return leave("attention without new tokens of its layer");
  }
  try {
    if (mask_ == nullptr && !plan(node))
      return complete() ? false : leave("the cache has a sliding window");
    if (mask_ != node->src[3]) return leave("the layer has a mask of its own");
    if (kind_ != BatchKind::kRuns) return leave("the mask is not causal");
    for (size_t stream = 0; stream < parts_.size(); ++stream) {
      for (const Part& part : parts_[stream]) {
        attend_part(part, static_cast<uint32_t>(stream), node, layer);
      }
    }
  } catch (...) {
    // Their sessions may have the tokens in some layers and not in others; other sequences go on.
    sequences_->drop_current();
    parts_.clear();
    kind_ = BatchKind::kOther;
    throw;
  }
  if (!copy_ && layer.attended == 0 && !layer.lent) close_to_others(layer);
  layer.attended = batch_;
  taken_ = true;
  return true;
}

/// Without a copy, llama.cpp's cells of a layer are empty. Its scheduler may give attention over them to the CPU
/// backend without asking (layers that share another one's cache): better a fault than an answer made of zeros.
void Cache::close_to_others(const Layer& layer) const {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const ggml_tensor* cache : layer.tensors) {
    const auto begin = (reinterpret_cast<uintptr_t>(cache->data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(cache->data) + ggml_nbytes(cache)) / page * page;
    if (begin >= end) continue;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
    mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_NONE);
  }
}

/// Finds out whose tokens the batch has. False: the mask is that of a sliding window.
bool Cache::plan(const ggml_tensor* node) {
  mask_ = node->src[3];
  const Mask mask{static_cast<const uint16_t*>(mask_->data),
                  static_cast<int64_t>(mask_->nb[1] / sizeof(uint16_t)),
                  mask_->ne[3] > 1 ? static_cast<int64_t>(mask_->nb[3] / sizeof(uint16_t)) : 0,
                  static_cast<uint32_t>(node->src[1]->ne[1])};
  parts_.clear();
  Placed placed = place_batch(ids_, static_cast<size_t>(node->src[0]->ne[3]), mask, *cells_,
                              *sequences_, *store_, copy_ ? nullptr : rewriter_.get());
  kind_ = placed.kind;
  if (kind_ == BatchKind::kSliding) {
    log(Level::kInfo, "a cache of " + std::to_string(cells_->cells()) +
                          " cells has a sliding window: llama.cpp attends there itself");
    sliding_ = true;
    sequences_->clear();
    return false;
  }
  parts_ = std::move(placed.parts);
  for (const std::vector<Part>& parts : parts_) build(parts);
  return true;
}

/// Indexes what a prompt has left, before the first small batch after it.
void Cache::build(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    Sequence& sequence = *part.sequence;
    const bool prompt = part.rows.size() >= settings_.prompt_from;
    if (sequence.unbuilt && !prompt &&
        std::all_of(layers_.begin(), layers_.end(), [&](const auto& layer) {
          return !layer.second.left.empty() ||
                 sequence.session->tokens(layer.second.number) == part.past;
        })) {
      sequence.session->build();
      sequence.unbuilt = false;
    }
    sequence.unbuilt = sequence.unbuilt || prompt;
  }
}

/// K or V of cells that lie one after the other, as they are in llama.cpp's cache.
Rows Cache::cached(const Layer& layer, bool values, uint32_t stream, uint32_t cell,
                   uint32_t count) const {
  const ggml_tensor* cache = layer.tensors[values ? 1 : 0];
  const size_t id = size_t{stream} * cells_->cells() + cell;
  const auto heads = static_cast<int64_t>(layer.shape->kv_heads);
  const auto row = static_cast<int64_t>(cache->nb[1]);
  return {static_cast<const std::byte*>(cache->data) + id * cache->nb[1],
          *number_of(cache),
          count,
          heads,
          layer.shape->head_dim,
          row,
          row / heads};
}

/// Brings tokens that the sequence should hold in this layer, and does not yet, from llama.cpp's cache.
void Cache::catch_up(const Part& part, Layer& layer) {
  const Sequence& sequence = *part.sequence;
  uint32_t at = sequence.session->tokens(layer.number);
  if (at > part.past) {
    throw std::runtime_error("a session holds " + std::to_string(at) + " tokens, of which " +
                             std::to_string(part.past) + " were expected");
  }
  while (at < part.past) {
    const uint32_t cell = sequence.tokens[at].cell;
    const size_t id = size_t{part.stream} * cells_->cells() + cell;
    const auto is_here = [&](uint32_t i) { return copy_ || restored_.has(id + i); };
    uint32_t count = 0;
    while (at + count < part.past && sequence.tokens[at + count].cell == cell + count &&
           is_here(count)) {
      ++count;
    }
    if (count == 0) {
      throw std::runtime_error("a session holds " + std::to_string(at) + " of " +
                               std::to_string(part.past) + " tokens; others need copy=on");
    }
    Rows keys = cached(layer, false, part.stream, cell, count);
    Rows values = cached(layer, true, part.stream, cell, count);
    if (!copy_) {
      keys.data = restored_.row(layer.tensors[0], id);
      values.data = restored_.row(layer.tensors[1], id);
    }
    sequence.session->append(layer.number, keys, values);
    at += count;
  }
}

void Cache::attend_part(const Part& part, uint32_t stream_row, const ggml_tensor* node,
                        Layer& layer) {
  catch_up(part, layer);
  const auto n = static_cast<uint32_t>(node->src[0]->ne[1]);
  const uint32_t first = part.rows.front();
  const size_t count = part.rows.size();
  const auto rows = [&](bool values) {
    Rows r = cached(layer, values, 0, 0, n);
    r.data = new_rows_[values ? 1 : 0].rows.data() +
             size_t{stream_row} * n * static_cast<size_t>(r.token_stride);
    return r;
  };
  Session& session = *part.sequence->session;
  if (part.rows.back() - first + 1 == count) {
    session.attend(layer.number, tokens_of(node->src[0], 1, 2, stream_row, first, count),
                   part_of(rows(false), first, count), part_of(rows(true), first, count),
                   tokens_of(node, 2, 1, stream_row, first, count));
    return;
  }
  Gathered q(tokens_of(node->src[0], 1, 2, stream_row, 0, n), part.rows);
  Gathered k(rows(false), part.rows);
  Gathered v(rows(true), part.rows);
  Gathered out(tokens_of(node, 2, 1, stream_row, 0, n), part.rows);
  session.attend(layer.number, q.gather(), k.gather(), v.gather(), out.empty());
  out.scatter();
}

}  // namespace keyhole::llama_cpp
