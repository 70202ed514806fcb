// How a cache's tokens go from the card to sessions, and back.
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {
namespace {

using Clock = std::chrono::steady_clock;

std::string milliseconds(Clock::time_point begin, Clock::time_point end) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(end - begin).count());
}

/// Calls use(first, count) for each longest stretch of cells that are chosen, of `count` in all.
template <class Is, class Use>
void for_stretches(size_t count, const Is& is_chosen, const Use& use) {
  for (size_t id = 0; id < count; ++id) {
    const size_t first = id;
    while (id < count && is_chosen(id)) ++id;
    if (id > first) use(first, id - first);
  }
}

}  // namespace

void CardCache::no_memory() {
  throw std::runtime_error("the card has no memory for the cache's cells");
}

/// A prompt's tokens come to sessions batch by batch, so that little is left to do when it ends (`ends`).
void CardCache::follow_on_card(bool ends) {
  open();
  if (ends) return hand_over(ids_);
  std::vector<Following> work;
  for (const auto& parts : parts_) {
    for (const Part& part : parts) {
      if (part.past < settings_.card) continue;
      work.push_back({part.sequence->session.get(), part.sequence->stream,
                      cells_of(*part.sequence, part.past)});
      part.sequence->unbuilt = true;
    }
  }
  stream_.follow(cuda_);
  // These rows stay as they are, and the sessions are there until end_following().
  follower_.take(std::move(work));
}

void CardCache::end_following() {
  try {
    follower_.finish();
  } catch (const std::runtime_error& error) {
    stay(error.what());
  }
}

/// Where the first tokens of a sequence lie.
std::vector<uint32_t> CardCache::cells_of(const Sequence& sequence, uint32_t tokens) {
  std::vector<uint32_t> cells;
  cells.reserve(tokens);
  for (uint32_t i = 0; i < tokens; ++i) cells.push_back(sequence.tokens[i].cell);
  return cells;
}

void CardCache::catch_up(Sequence& sequence, uint32_t tokens) {
  const bool is_there = std::all_of(layers_.begin(), layers_.end(), [&](const auto& each) {
    const Layer& layer = each.second;
    return !layer.left.empty() || sequence.session->tokens(layer.number) == tokens;
  });
  if (!is_there) catch_up(*sequence.session, sequence.stream, cells_of(sequence, tokens));
}

/// Brings tokens that a session should hold, and does not yet, from llama.cpp's cells. cells: of all of its tokens, of
/// `stream`.
void CardCache::catch_up(Session& session, uint32_t stream, std::span<const uint32_t> cells) {
  const auto tokens = static_cast<uint32_t>(cells.size());
  for (auto& [number, layer] : layers_) {
    if (!layer.left.empty()) continue;
    uint32_t at = session.tokens(layer.number);
    if (at > tokens) {
      throw std::runtime_error("a session holds " + std::to_string(at) + " tokens, of which " +
                               std::to_string(tokens) + " were expected");
    }
    while (at < tokens) {
      const uint32_t cell = cells[at];
      const size_t id = size_t{stream} * cells_->cells() + cell;
      const auto is_here = [&](uint32_t i) { return on_card() || restored_.has(id + i - at); };
      uint32_t count = 0;
      while (at + count < tokens && cells[at + count] == cell + count && is_here(at + count)) {
        ++count;
      }
      if (count == 0) {
        throw std::runtime_error("a session holds " + std::to_string(at) + " of " +
                                 std::to_string(tokens) +
                                 " tokens (tokens were removed, or shifted); others need copy=on");
      }
      Rows rows[2];
      for (const bool values : {false, true}) {
        Rows& r = rows[values ? 1 : 0];
        r = layer.rows.rows(values, stream, cell, count, layer.shape->kv_heads);
        if (on_card()) continue;
        r.data = restored_.row(layer.rows.tensor(values), id);
        r.on_device = false;
      }
      session.append(layer.number, rows[0], rows[1]);
      at += count;
    }
  }
}

/// What waits in the host's memory is kept until the batch that takes it is done, which may fail.
void CardCache::forget_taken() {
  if (on_card_ || !restored_.any()) return;
  std::vector<uint32_t> own;
  for (const auto& [number, layer] : layers_) {
    if (layer.left.empty()) own.push_back(layer.number);
  }
  keyhole::llama_cpp::forget_taken(*sequences_, *cells_, own, restored_);
}

/// Tokens come out of sessions that may lose them, to be taken by another.
void CardCache::read_out(uint32_t stream, uint32_t first, uint32_t count) {
  for (auto& [number, layer] : layers_) {
    if (!layer.left.empty()) continue;
    for (const bool values : {false, true}) {
      keyhole::llama_cpp::read_out(*sequences_, rewriter_.get(), rows_of(layer, values),
                                   layer.rows.tensor(values), cells_->cells(), stream, first, count,
                                   restored_);
    }
  }
}

/// Indexes what a prompt has left, before the first small batch after it.
void CardCache::build(Sequence& sequence, uint32_t tokens) {
  if (!sequence.unbuilt || tokens == 0) return;
  sequence.session->build();
  sequence.unbuilt = false;
}

/// All tokens go from the card to sessions, and those that no session can have to the host's memory, but for the cells
/// `coming`: those of the batch under way.
void CardCache::hand_over(std::span<const int64_t> coming) {
  if (!takeable()) no_memory();
  open();
  const auto begin = Clock::now();
  stream_.follow(cuda_);
  for (const auto& sequence : sequences_->all()) {
    uint32_t tokens = 0;
    while (tokens < sequence->tokens.size() &&
           cells_->holds(sequence->stream, sequence->tokens[tokens])) {
      ++tokens;
    }
    bool in_batch = false;
    for (const auto& parts : parts_) {
      for (const Part& part : parts) {
        if (part.sequence != sequence.get()) continue;
        tokens = part.past;
        in_batch = true;
      }
    }
    if (!in_batch) {
      sequence->session->truncate(tokens);
      sequence->tokens.resize(tokens);
      sequence->sight.clear();
    }
    catch_up(*sequence, tokens);
    sequence->unbuilt = sequence->unbuilt || tokens > 0;
    build(*sequence, tokens);
  }
  if (!copy_) {
    ggml_backend_synchronize(cuda_);
    stream_.wait();
    keep_loose(coming);
  }
  on_card_ = false;
  if (copy_) return;
  const auto brought = Clock::now();
  let_go();
  log(Level::kInfo, "the cache's tokens are in sessions now, brought in " +
                        milliseconds(begin, brought) + " ms; of its " +
                        std::to_string(memory_.bytes() >> 20U) + " MiB the card holds " +
                        std::to_string(memory_.held() >> 20U) + ", the others were given back in " +
                        milliseconds(brought, Clock::now()) + " ms");
}

/// Tokens of which no sequence is known go to the host's memory, where a batch that goes on with them finds them: no
/// batch has done so since they were restored or shifted, or tokens before them were removed and their cells filled
/// again.
void CardCache::keep_loose(std::span<const int64_t> coming) {
  const uint32_t cells = cells_->cells();
  std::vector<uint8_t> is_loose(size_t{cells_->streams()} * cells);
  for (size_t id = 0; id < is_loose.size(); ++id) {
    const uint64_t stamp =
        cells_->stamp(static_cast<uint32_t>(id / cells), static_cast<uint32_t>(id % cells));
    is_loose[id] = stamp > gone_ ? 1 : 0;
  }
  for (const int64_t id : coming) is_loose[static_cast<size_t>(id)] = 0;
  uint32_t any_layer = 0;
  for (const auto& [number, layer] : layers_) {
    if (layer.left.empty()) any_layer = layer.number;
  }
  for (const auto& sequence : sequences_->all()) {
    const size_t held =
        std::min<size_t>(sequence->session->tokens(any_layer), sequence->tokens.size());
    for (size_t i = 0; i < held; ++i) {
      const Token& token = sequence->tokens[i];
      for (uint32_t stream = 0; stream < cells_->streams(); ++stream) {
        if (cells_->holds(stream, token)) is_loose[size_t{stream} * cells + token.cell] = 0;
      }
    }
  }
  size_t kept = 0;
  try {
    for_stretches(
        is_loose.size(), [&](size_t id) { return is_loose[id] != 0; },
        [&](size_t first, size_t count) {
          kept += count;
          for (auto& [number, layer] : layers_) {
            if (!layer.left.empty()) continue;
            for (const bool values : {false, true}) {
              const ggml_tensor* tensor = layer.rows.tensor(values);
              const size_t row = tensor->nb[1];
              std::byte* to = restored_.write(tensor, first * row, count * row);
              layer.rows.read(memory_, values, first, count, to);
            }
          }
        });
  } catch (...) {
    restored_.clear();
    throw;
  }
  if (kept == 0) return;
  log(Level::kInfo, std::to_string(kept) + " tokens that no batch has gone on with lie in the " +
                        "host's memory until one does");
}

/// Gives the memory of the cells that are in sessions back.
void CardCache::let_go() {
  bool all = true;
  for (auto& [number, layer] : layers_) {
    if (layer.left.empty()) layer.rows.let_go(memory_);
    all = all && layer.left.empty();
  }
  // Pieces that two layers share are neither's alone.
  if (all) memory_.let_go_all();
}

/// What waits in the host's memory lies in the cells again, from which sessions have nothing that anybody wants. False:
/// the card has too little memory, and all is as it was.
bool CardCache::bring_restored() {
  if (copy_) return true;
  std::vector<std::pair<uint64_t, size_t>> brought;  // numbers of writes, and cells
  const uint32_t cells = cells_->cells();
  bool has_room = true;
  for_stretches(
      size_t{cells_->streams()} * cells, [&](size_t id) { return restored_.has(id); },
      [&](size_t first, size_t count) {
        for (auto& [number, layer] : layers_) {
          if (!layer.left.empty()) continue;
          for (const bool values : {false, true}) {
            has_room =
                has_room && layer.rows.write(memory_, values, first, count,
                                             restored_.row(layer.rows.tensor(values), first));
          }
        }
        for (size_t id = first; id < first + count; ++id) {
          brought.emplace_back(
              cells_->stamp(static_cast<uint32_t>(id / cells), static_cast<uint32_t>(id % cells)),
              id);
        }
      });
  if (!has_room) {
    let_go();
    return false;
  }
  // All others are gone with their sessions, which is known by their numbers.
  gone_ = before_batch_;
  std::sort(brought.begin(), brought.end());
  for (const auto& [stamp, id] : brought) {
    cells_->write(static_cast<uint32_t>(id / cells), static_cast<uint32_t>(id % cells));
  }
  return true;
}

/// The cells are llama.cpp's again.
void CardCache::come_back() {
  restored_.clear();
  if (on_card_) return;
  on_card_ = true;
  if (abandoned_) return;
  hold_batch();
}

/// The card has no memory for cells that are to be filled between batches: all goes to sessions.
void CardCache::make_room() {
  if (copy_ || cuda_ == nullptr || !stays_.empty()) no_memory();
  parts_.clear();
  hand_over({});
}

}  // namespace keyhole::llama_cpp
