// Whose tokens a batch has, and who attends with them.
#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/cuda/host_inputs.h"
#include "tools/engines/llama.cpp/log.h"
#include "tools/engines/llama.cpp/placing.h"

namespace keyhole::llama_cpp {
namespace {

/// From so many tokens on Keyhole attends with prompts; before, llama.cpp's own attention takes next to no time.
constexpr uint32_t kLongPrompt = 2048;

/// Steps of so many tokens may be CUDA graphs: drafts. More are computed by other kernels, which wait on the host.
constexpr uint32_t kMostCaptured = 9;
/// And so many of all sequences together: as many as the library attends by one launch of each kernel.
constexpr uint32_t kMostCapturedTogether = 16;

/// What a session leaves of the card's memory: llama.cpp takes a little more for large batches.
constexpr size_t kSessionLeaves = size_t{128} << 20U;

/// Rows `first` to `first + count` of a tensor that has tokens in one dimension and heads in another, of stream
/// `stream` of the batch.
Rows tokens_of(const ggml_tensor* t, int tokens, int heads, size_t stream, uint32_t first,
               uint32_t count) {
  return {static_cast<const std::byte*>(t->data) + stream * t->nb[3] + first * t->nb[tokens],
          Number::kF32,
          count,
          t->ne[heads],
          t->ne[0],
          static_cast<int64_t>(t->nb[tokens]),
          static_cast<int64_t>(t->nb[heads]),
          true};
}

/// Rows `first` to `first + count` of new keys or values, which have the heads of a token side by side.
Rows new_rows(const ggml_tensor* x, size_t first, uint32_t count, const LayerShape& shape) {
  const Number number = *number_of(x);
  return {static_cast<const std::byte*>(x->data) + first * x->nb[1],
          number,
          count,
          shape.kv_heads,
          shape.head_dim,
          static_cast<int64_t>(x->nb[1]),
          int64_t{shape.head_dim} * (number == Number::kF32 ? 4 : 2),
          true};
}

Rows part_of(Rows rows, size_t first, uint32_t count) {
  rows.data =
      static_cast<const std::byte*>(rows.data) + static_cast<int64_t>(first) * rows.token_stride;
  rows.tokens = count;
  return rows;
}

}  // namespace

/// Finds out whose tokens the batch has, and who attends.
void CardCache::plan(const ggml_tensor* node) {
  mask_ = node->src[3];
  const void* host = host_input(mask_);
  if (host == nullptr) return stay("the mask of a batch is not known on the host");
  const Mask mask{static_cast<const uint16_t*>(host),
                  static_cast<int64_t>(mask_->nb[1] / sizeof(uint16_t)),
                  mask_->ne[3] > 1 ? static_cast<int64_t>(mask_->nb[3] / sizeof(uint16_t)) : 0,
                  static_cast<uint32_t>(node->src[1]->ne[1])};
  // A prompt's rows may still be on their way to its session: its list of tokens alone may grow meanwhile.
  if (sequences_->all().size() > 1) end_following();
  Placed placed =
      place_batch(ids_, static_cast<size_t>(node->src[0]->ne[3]), mask, *cells_, *sequences_, lazy_,
                  on_card() ? nullptr : rewriter_.get(), [this] { end_following(); });
  if (!stays_.empty()) return parts_.clear();
  kind_ = placed.kind;
  if (kind_ == BatchKind::kSliding) return stay("the cache has a sliding window");
  parts_ = std::move(placed.parts);
  if (kind_ == BatchKind::kRuns) choose_way();
}

void CardCache::choose_way() {
  uint32_t past = 0;     // the longest
  uint32_t least = ~0U;  // of any part: its new tokens
  uint32_t longest = 0;
  size_t count = 0;
  for (const auto& parts : parts_) {
    for (const Part& part : parts) {
      const auto rows = static_cast<uint32_t>(part.rows.size());
      past = std::max(past, part.past);
      least = std::min(least, rows);
      longest = std::max(longest, part.past + rows);
      ++count;
    }
  }
  const bool prompt = settings_.prompt != "none" && least >= settings_.prompt_from;
  if (!on_card_ && past == 0 && sequences_->all().size() == count && bring_restored()) {
    come_back();
  }
  const bool ends = least < settings_.prompt_from || !settings_.rows_on_card;
  if (ends || too_large_) end_following();
  if (!stays_.empty()) return;
  if (on_card_) check_not_gone();
  if (on_card_ && too_large_) hand_over(ids_);
  // New keys and values that the CUDA backend has computed in a graph before may lie in the cells alone.
  if (on_card_ && takeable() && past >= settings_.card && graph_ == batch_graph_) {
    try {
      follow_on_card(ends);
    } catch (const std::runtime_error& error) {
      if (!on_card_) throw;
      return stay(error.what());
    }
  }
  if (on_card_) {
    const auto ordered = [&](const std::vector<Part>& parts) {
      return std::all_of(parts.begin(), parts.end(), [&](const Part& p) { return in_order(p); });
    };
    way_ = prompt && takeable() && longest >= kLongPrompt &&
                   std::all_of(parts_.begin(), parts_.end(), ordered)
               ? Way::kPrompt
               : Way::kCard;
    try {
      if (way_ == Way::kPrompt) open();
    } catch (const std::runtime_error& error) {
      stay(error.what());
    }
    return;
  }
  way_ = Way::kSession;
  stream_.follow(cuda_);
  for (const auto& parts : parts_) {
    for (const Part& part : parts) {
      catch_up(*part.sequence, part.past);
      if (part.rows.size() < settings_.prompt_from) build(*part.sequence, part.past);
      part.sequence->unbuilt = part.sequence->unbuilt || part.rows.size() >= settings_.prompt_from;
    }
  }
}

/// Throws where the batch goes on with tokens that were in sessions alone, when these were given up.
void CardCache::check_not_gone() {
  if (gone_ == 0) return;
  for (const auto& parts : parts_) {
    for (const Part& part : parts) {
      const auto begin = part.sequence->tokens.begin();
      if (std::none_of(begin, begin + part.past,
                       [&](const Token& token) { return token.stamp <= gone_; })) {
        continue;
      }
      end_following();  // to these sessions, maybe
      sequences_->drop_current();
      parts_.clear();
      throw std::runtime_error(
          "it goes on with tokens that were in a session which is gone, for which Keyhole needs "
          "copy=on");
    }
  }
}

/// Whether a part's tokens lie in the batch, and all of the sequence in its cells, one after the other.
bool CardCache::in_order(const Part& part) const {
  if (part.rows.back() - part.rows.front() + 1 != part.rows.size()) return false;
  const std::vector<Token>& tokens = part.sequence->tokens;
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (tokens[i].cell != tokens[0].cell + i) return false;
  }
  return true;
}

/// Makes the engine, for all layers that were announced, and says so in one line.
void CardCache::open() {
  if (store_) return;
  StoreShape shape;
  shape.max_tokens = cells_->cells();
  shape.threads = settings_.threads;
  shape.device = static_cast<uint32_t>(stream_.ordinal());
  shape.stream = stream_.handle();
  shape.room = [this]() -> uint64_t {
    // Without a copy the cells' memory is the session's when they are. While rows of a prompt stay on the card,
    // sessions are made beside them.
    const size_t free =
        memory_.free_on_card() + (copy_ || settings_.rows_on_card ? 0 : memory_.held());
    return std::max({free > kSessionLeaves ? free - kSessionLeaves : 0, free / 2, size_t{1}});
  };
  std::string left;
  std::string why;
  for (auto& [number, layer] : layers_) {
    if (layer.left.empty() && layer.shape) {
      layer.number = static_cast<uint32_t>(shape.layers.size());
      shape.number = *number_of(layer.rows.tensor(false));
      shape.layers.push_back(*layer.shape);
    } else {
      if (layer.left.empty()) layer.left = "it was not in the graphs that came first";
      left += (left.empty() ? "" : ", ") + std::to_string(number);
      why = layer.left;
    }
  }
  if (!left.empty())
    log(Level::kWarning, "llama.cpp attends itself in layers " + left + ": " + why);
  store_ = make_store(settings_, shape);
  rewriter_ = std::make_unique<SessionRewriter>(shape);
  const LayerShape& first = shape.layers.front();
  const SequenceMemory memory = memory_of(settings_, shape);
  const bool is_chosen = settings_.index == "auto";
  log(settings_.plan ? Level::kWarning : Level::kInfo,
      std::to_string(shape.layers.size()) + " layers, " + std::to_string(first.q_heads) +
          " query and " + std::to_string(first.kv_heads) + " KV heads of " +
          std::to_string(first.head_dim) + " on card " + std::to_string(stream_.ordinal()) +
          ": index " + settings_.index + (is_chosen ? " (" + memory.index + ")" : "") + ", sink " +
          std::to_string(settings_.sink) + ", window " + std::to_string(settings_.window) +
          ", up to " + std::to_string(shape.max_tokens) +
          " tokens, in the card's memory until a sequence decodes behind " +
          std::to_string(settings_.card) + "; memory, taken as tokens come: up to " +
          mib(memory.host) + " of the host's and " + mib(memory.device) +
          " of the card's for each sequence" + (copy_ ? ", with a copy on the card" : ""));
}

void CardCache::attend(const ggml_tensor* node, const CacheName& name) {
  Layer& layer = layers_.at(name.layer);
  if (way_ == Way::kPrompt) {
    attend_prompt(node, layer);
    prompts_.lead(cuda_);
  } else {
    attend_session(node, layer, false);
  }
}

void CardCache::capture(const ggml_tensor* node, const CacheName& name) {
  attend_session(node, layers_.at(name.layer), true);
}

uint32_t CardCache::most_joint() const { return settings_.together ? kMostJointTokens : 0; }

GraphStep CardCache::graph_step(size_t layers) const {
  // With a copy the cells of a step are part of its graph.
  if (!settings_.graphs || copy_ || way_ != Way::kSession || parts_.empty()) return {};
  for (const auto& [number, layer] : layers_) {
    if (!layer.left.empty()) continue;
    if (layer.aside == batch_ || layers == 0) return {};
    --layers;
  }
  if (layers != 0) return {};
  const std::vector<Joint> joints = join(parts_, ids_.size() / parts_.size(), most_joint());
  if (joints.size() != 1) return {};
  GraphStep step;
  uint32_t all = 0;
  for (const Stretch& s : joints.front()) {
    step.sessions.push_back(static_cast<LazySession*>(s.part->sequence->session.get()));
    step.tokens.push_back(s.count);
    all += s.count;
    if (s.count > kMostCaptured) return {};
  }
  return all <= kMostCapturedTogether ? step : GraphStep{};
}

bool CardCache::announce(const GraphStep& step, uint64_t graph) {
  if (step.sessions.size() == 1) return step.sessions.front()->announce(graph);
  std::vector<Session*> sessions;
  for (LazySession* session : step.sessions) sessions.push_back(&session->own());
  return store_->announce_together(sessions, graph);
}

void CardCache::launched(const GraphStep& step) {
  for (size_t i = 0; i < step.sessions.size(); ++i) step.sessions[i]->launched(step.tokens[i]);
  if (step.sessions.size() > 1) ++joined_graphs_;
}

void CardCache::attend_session(const ggml_tensor* node, Layer& layer, bool captured) {
  stream_.follow(cuda_);
  const ggml_tensor* queries = node->src[0];
  const auto n = static_cast<size_t>(queries->ne[1]);
  const uint32_t heads = layer.shape->kv_heads;
  // Rows of two streams lie side by side as those of one, mostly.
  const bool is_even = queries->nb[3] == n * queries->nb[1] && node->nb[3] == n * node->nb[2];
  const auto is_whole = [&](size_t row) {
    return (is_even || (row + 1) % n != 0) && (!copy_ || ids_[row + 1] == ids_[row] + 1);
  };
  for (const Joint& joint : join(parts_, n, most_joint(), is_whole)) {
    const auto [part, stream, first, count_of_first] = joint.front();
    const size_t row = stream * n + first;
    const auto cell = static_cast<uint32_t>(ids_[row] % cells_->cells());
    uint32_t count = 0;
    for (const Stretch& s : joint) count += s.count;
    const JointRows rows{
        tokens_of(queries, 1, 2, stream, first, count),
        // With a copy the rows are taken from it: the CUDA backend may have written nothing but the cells.
        copy_ ? layer.rows.rows(false, part->stream, cell, count, heads)
              : new_rows(layer.fresh[0], row, count, *layer.shape),
        copy_ ? layer.rows.rows(true, part->stream, cell, count, heads)
              : new_rows(layer.fresh[1], row, count, *layer.shape),
        tokens_of(node, 2, 1, stream, first, count)};
    auto& session = static_cast<LazySession&>(*part->sequence->session);
    if (joint.size() > 1) {
      attend_together(layer, joint, rows, captured);
    } else if (captured) {
      session.capture(layer.number, rows.q, rows.k, rows.v, rows.out);
    } else {
      session.attend(layer.number, rows.q, rows.k, rows.v, rows.out);
    }
  }
  stream_.lead(cuda_);
}

void CardCache::attend_together(const Layer& layer, const Joint& joint, const JointRows& rows,
                                bool captured) {
  std::vector<Session*> sessions;
  std::vector<uint32_t> starts{0};
  const auto session_of = [](const Stretch& s) {
    return static_cast<LazySession*>(s.part->sequence->session.get());
  };
  for (const Stretch& s : joint) {
    sessions.push_back(&session_of(s)->own());
    starts.push_back(starts.back() + s.count);
  }
  store_->attend_together(layer.number, sessions, starts, rows.q, rows.k, rows.v, rows.out);
  if (captured) return;
  for (const Stretch& s : joint) session_of(s)->add(layer.number, s.count);
  if (std::exchange(joined_batch_, batch_) != batch_) ++joined_;
}

void CardCache::attend_prompt(const ggml_tensor* node, Layer& layer) {
  const Rows q = half_.convert(cuda_, node, layer.rows.tensor(false)->type);
  prompts_.follow(cuda_);
  const auto n = static_cast<size_t>(node->src[0]->ne[1]);
  for (size_t stream = 0; stream < parts_.size(); ++stream) {
    for (const Part& part : parts_[stream]) {
      const uint32_t first = part.rows.front();
      const auto count = static_cast<uint32_t>(part.rows.size());
      const uint32_t cell = part.sequence->tokens.front().cell;
      const uint32_t heads = layer.shape->kv_heads;
      store_->attend_prompt(layer.number, part_of(q, stream * n + first, count),
                            layer.rows.rows(false, part.stream, cell, part.past + count, heads),
                            layer.rows.rows(true, part.stream, cell, part.past + count, heads),
                            tokens_of(node, 2, 1, stream, first, count), prompts_.handle());
    }
  }
}

}  // namespace keyhole::llama_cpp
