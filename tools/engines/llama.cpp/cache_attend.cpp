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
    attend_parts(node, layer);
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

/// New K or V of rows of the batch, counted through all streams.
Rows Cache::new_rows(const Layer& layer, bool values, size_t row, uint32_t count) const {
  Rows r = cached(layer, values, 0, 0, count);
  r.data = new_rows_[values ? 1 : 0].rows.data() + static_cast<int64_t>(row) * r.token_stride;
  return r;
}

void Cache::attend_parts(const ggml_tensor* node, Layer& layer) {
  const ggml_tensor* queries = node->src[0];
  const auto n = static_cast<size_t>(queries->ne[1]);
  // Rows of two streams lie side by side as those of one, mostly.
  const bool is_even = queries->nb[3] == n * queries->nb[1] && node->nb[3] == n * node->nb[2];
  const auto is_whole = [&](size_t row) { return is_even || (row + 1) % n != 0; };
  for (const Joint& joint : join(parts_, n, settings_.together ? kMostJointTokens : 0, is_whole)) {
    const bool all = std::all_of(joint.begin(), joint.end(),
                                 [](const Stretch& s) { return s.count == s.part->rows.size(); });
    if (joint.size() > 1 && all) {
      attend_together(joint, node, layer);
      continue;
    }
    // Rows that lie apart are put together.
    for (const Stretch& s : joint) {
      if (s.first == s.part->rows.front()) attend_part(*s.part, s.stream, node, layer);
    }
  }
}

void Cache::attend_together(const Joint& joint, const ggml_tensor* node, Layer& layer) {
  const auto n = static_cast<size_t>(node->src[0]->ne[1]);
  std::vector<Session*> sessions;
  std::vector<uint32_t> starts{0};
  for (const Stretch& s : joint) {
    catch_up(*s.part, layer);
    sessions.push_back(s.part->sequence->session.get());
    starts.push_back(starts.back() + s.count);
  }
  const Stretch& first = joint.front();
  const size_t row = first.stream * n + first.first;
  const auto stream = static_cast<int64_t>(first.stream);
  store_->attend_together(layer.number, sessions, starts,
                          tokens_of(node->src[0], 1, 2, stream, first.first, starts.back()),
                          new_rows(layer, false, row, starts.back()),
                          new_rows(layer, true, row, starts.back()),
                          tokens_of(node, 2, 1, stream, first.first, starts.back()));
  if (std::exchange(joined_batch_, batch_) != batch_) ++joined_;
}

void Cache::attend_part(const Part& part, size_t stream, const ggml_tensor* node, Layer& layer) {
  catch_up(part, layer);
  const auto n = static_cast<uint32_t>(node->src[0]->ne[1]);
  const uint32_t first = part.rows.front();
  const auto count = static_cast<uint32_t>(part.rows.size());
  const auto own = static_cast<int64_t>(stream);
  Session& session = *part.sequence->session;
  if (part.rows.back() - first + 1 == count) {
    const size_t row = stream * n + first;
    session.attend(layer.number, tokens_of(node->src[0], 1, 2, own, first, count),
                   new_rows(layer, false, row, count), new_rows(layer, true, row, count),
                   tokens_of(node, 2, 1, own, first, count));
    return;
  }
  Gathered q(tokens_of(node->src[0], 1, 2, own, 0, n), part.rows);
  Gathered k(new_rows(layer, false, stream * n, n), part.rows);
  Gathered v(new_rows(layer, true, stream * n, n), part.rows);
  Gathered out(tokens_of(node, 2, 1, own, 0, n), part.rows);
  session.attend(layer.number, q.gather(), k.gather(), v.gather(), out.empty());
  out.scatter();
}

}  // namespace keyhole::llama_cpp
