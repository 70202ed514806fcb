#include "tools/engines/llama.cpp/sequences.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

/// Runs of a batch up to which their sequences may take the quick way next: more would keep a lot of memory for it.
constexpr size_t kMostSights = 16;

}  // namespace

/// The first tokens of the sequence that the run sees, all of them.
uint32_t Sequences::common(const Sequence& sequence, uint32_t stream, const Run& run) const {
  uint32_t length = 0;
  for (const Token& token : sequence.tokens) {
    if (!sees(run, stream, token)) break;
    ++length;
  }
  return length;
}

bool Sequences::sees(const Run& run, uint32_t stream, const Token& token) const {
  return token.cell < run.past.size() && run.past[token.cell] != 0 && cells_.holds(stream, token);
}

/// Whether the run sees the sequence's last tokens, at least one, and nothing else. What the first ones have become is
/// of no interest: a cache for sliding windows fills their cells again.
bool Sequences::lacks_beginning(const Sequence& sequence, uint32_t stream, const Run& run) const {
  const size_t count = sequence.tokens.size();
  if (run.past_count == 0 || run.past_count >= count) return false;
  return std::all_of(sequence.tokens.end() - run.past_count, sequence.tokens.end(),
                     [&](const Token& token) { return sees(run, stream, token); });
}

/// The sequence that shares most tokens with the run's past. It can go on as it is where nobody else may want what
/// would be cut off: its next token was written over, or there is none. Of one that has been copied each token is
/// asked.
Sequences::Match Sequences::best(uint32_t stream, const Run& run, uint32_t last_new) const {
  Match found;
  for (const auto& sequence : sequences_) {
    const uint32_t length = common(*sequence, stream, run);
    if (length == 0 && !sequence->tokens.empty()) continue;
    bool in_place = is_free(*sequence, stream);
    if (in_place && length < sequence->tokens.size()) {
      in_place = !sequence->turns.empty() ? may_turn(*sequence, stream, run, last_new)
                 : is_strict(*sequence)   ? loses_nothing(*sequence, stream, run)
                                          : !is_wanted(sequence->tokens[length], stream);
    }
    if (found.sequence == nullptr ||
        std::tuple(length, in_place) > std::tuple(found.length, found.in_place)) {
      found = {sequence.get(), length, in_place};
    }
  }
  if (found.length == 0) return {};
  return found;
}

/// Of the sequences that have all that the run sees, and more in between, the one that goes on with most tokens as they
/// are. Where a first token alone is not seen any more, twice in a row, it has left a sliding window.
Sequences::Match Sequences::with_gaps(uint32_t stream, const Run& run, uint32_t last_new) const {
  Match found;
  if (run.past_count == 0) return found;
  for (const auto& sequence : sequences_) {
    const std::vector<Token>& tokens = sequence->tokens;
    const auto seen = std::count_if(tokens.begin(), tokens.end(),
                                    [&](const Token& token) { return sees(run, stream, token); });
    if (seen != static_cast<ptrdiff_t>(run.past_count)) continue;
    const bool slides = tokens.size() == run.past_count + 1 && sequence->turns.empty() &&
                        lacks_beginning(*sequence, stream, run);
    if (slides && sequence->slid) continue;
    const uint32_t length = common(*sequence, stream, run);
    const bool in_place = is_free(*sequence, stream) &&
                          (sequence->turns.empty() ? loses_nothing(*sequence, stream, run)
                                                   : may_turn(*sequence, stream, run, last_new));
    if (found.sequence == nullptr ||
        std::tuple(length, in_place) > std::tuple(found.length, found.in_place)) {
      found = {sequence.get(), length, in_place, true, slides};
    }
  }
  return found;
}

/// Takes out what the run does not see, and turns what is to be turned.
void Sequences::rewrite(Sequence& sequence, const Run& run, uint32_t stream,
                        Rewriter* rewriter) const {
  if (rewriter == nullptr)
    throw std::runtime_error("a session's keys are not where they should be");
  Rewriting change;
  std::vector<Token> kept;
  for (size_t i = 0; i < sequence.tokens.size(); ++i) {
    if (!sees(run, stream, sequence.tokens[i])) continue;
    const int32_t turn = i < sequence.turns.size() ? sequence.turns[i] : 0;
    if (i == change.first && turn == 0) {
      ++change.first;
    } else {
      change.kept.push_back(static_cast<uint32_t>(i));
      change.turns.push_back(turn);
    }
    kept.push_back(sequence.tokens[i]);
  }
  sequence.tokens = std::move(kept);
  sequence.turns.clear();
  sequence.unbuilt = true;
  rewriter->rewrite(*sequence.session, change);
}

/// The sequence with its first `length` tokens, or with all that the run sees, or a copy with them; without a match an
/// empty one.
Sequence& Sequences::take(const Match& match, const Run& run, uint32_t stream,
                          SessionSource& source, Rewriter* rewriter) {
  Sequence* sequence = match.sequence;
  if (!match.in_place) {
    auto made = std::make_unique<Sequence>();
    made->stream = stream;
    if (sequence != nullptr) {
      made->session = sequence->session->fork();
      made->tokens = sequence->tokens;
      made->turns = sequence->turns;
      made->unbuilt = sequence->unbuilt;
      made->is_refilled = sequence->is_refilled;
      if (sequence->family == 0) sequence->family = ++last_family_;
      made->family = sequence->family;
      leave(*sequence, match, run, stream);
    } else {
      made->session = source.make();
    }
    sequence = made.get();
    sequences_.push_back(std::move(made));
  }
  sequence->batch = batch_;
  sequence->stream = stream;
  sequence->is_left = sequence->is_passed_over = false;
  sequence->alone.clear();
  sequence->slid = match.slides;
  if (match.gaps || !sequence->turns.empty()) {
    rewrite(*sequence, run, stream, rewriter);
  } else if (match.length < sequence->tokens.size()) {
    sequence->session->truncate(match.length);
    sequence->tokens.resize(match.length);
  }
  return *sequence;
}

/// Whether all of a sequence but its first token is seen, for the second time in a row.
bool Sequences::is_window(uint32_t stream, const Run& run) const {
  return std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& sequence) {
    return sequence->slid && sequence->tokens.size() == run.past_count + 1 &&
           lacks_beginning(*sequence, stream, run);
  });
}

/// Whether each token that the run sees and the match has not can be brought; not where a window would have all of them
/// brought with each step. Those that are in sessions are read out, as these may lose them when the batch is placed.
bool Sequences::can_refill(const Match& match, uint32_t stream, const Run& run) {
  if (!brings_) return false;
  std::vector<uint8_t> missing = run.past;
  if (match.sequence != nullptr) {
    // What is rewritten keeps what the run sees behind a gap, too.
    const std::vector<Token>& tokens = match.sequence->tokens;
    const size_t kept = match.sequence->turns.empty() ? match.length : tokens.size();
    for (size_t i = 0; i < kept; ++i) {
      if (sees(run, stream, tokens[i])) missing[tokens[i].cell] = 0;
    }
  }
  std::vector<uint32_t> in_sessions;
  for (uint32_t cell = 0; cell < missing.size(); ++cell) {
    if (missing[cell] == 0 || brings_(stream, cell)) continue;
    if (!reads_out_ || find(stream, cell).sequence == nullptr) return false;
    in_sessions.push_back(cell);
  }
  if (!in_sessions.empty() && is_window(stream, run)) return false;
  for (size_t i = 0; i < in_sessions.size();) {
    uint32_t count = 1;
    while (i + count < in_sessions.size() && in_sessions[i + count] == in_sessions[i] + count) {
      ++count;
    }
    reads_out_(stream, in_sessions[i], count);
    i += count;
  }
  return true;
}

/// Appends to the list what the run sees and the sequence has not, in the order in which it was written.
void Sequences::refill(Sequence& sequence, const Run& run) {
  std::vector<uint8_t> missing = run.past;
  for (const Token& token : sequence.tokens) missing[token.cell] = 0;
  std::vector<Token> tokens;
  for (uint32_t cell = 0; cell < missing.size(); ++cell) {
    if (missing[cell] == 0) continue;
    if (cells_.stamp(sequence.stream, cell) == 0) cells_.write(sequence.stream, cell);
    tokens.push_back({cell, cells_.stamp(sequence.stream, cell)});
  }
  std::sort(tokens.begin(), tokens.end(),
            [](const Token& a, const Token& b) { return a.stamp < b.stamp; });
  sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
  sequence.unbuilt = sequence.is_refilled = true;
}

std::optional<std::vector<Part>> Sequences::place(uint32_t stream, const Batch& batch,
                                                  std::span<const uint32_t> new_cells,
                                                  SessionSource& source, Rewriter* rewriter) {
  const uint32_t last_new =
      new_cells.empty() ? 0 : *std::max_element(new_cells.begin(), new_cells.end());
  std::vector<Match> matches;
  for (const Run& run : batch.runs) {
    matches.push_back(best(stream, run, last_new));
    if (matches.back().length == run.past_count) continue;
    if (rewriter != nullptr) {
      const Match match = with_gaps(stream, run, last_new);
      if (match.sequence != nullptr) {
        matches.back() = match;
        continue;
      }
    }
    for (const auto& sequence : sequences_) {
      if (rewriter != nullptr || sequence->tokens.size() != run.past_count + 1 ||
          !lacks_beginning(*sequence, stream, run)) {
        continue;
      }
      if (sequence->slid) return std::nullopt;
      matches.back().slides = true;
    }
    // With a rewriter nothing is in the cells.
    const bool is_in_cells = refill_ && rewriter == nullptr;
    if (!is_in_cells && !can_refill(matches.back(), stream, run)) {
      throw std::runtime_error(
          "tokens were restored, left a window, or come from several sequences (llama.cpp shows " +
          std::to_string(run.past_count) + " earlier tokens, of which a session holds the first " +
          std::to_string(matches.back().length) + "), which copy=off cannot follow");
    }
  }
  places_.clear();  // lists change
  // What is rewritten for one run another may want as it is.
  for (Match& match : matches) {
    if (match.sequence == nullptr || (!match.gaps && match.sequence->turns.empty())) continue;
    if (std::count_if(matches.begin(), matches.end(),
                      [&](const Match& other) { return other.sequence == match.sequence; }) > 1) {
      match.in_place = false;
    }
  }

  std::vector<Part> parts;
  for (size_t i = 0; i < batch.runs.size(); ++i) {
    const Run& run = batch.runs[i];
    // A run before this one may have taken the sequence: then this one goes on with a copy of what it was.
    Match& match = matches[i];
    if (match.sequence != nullptr && match.sequence->batch == batch_) match.in_place = false;
    Sequence& sequence = take(match, run, stream, source, rewriter);
    if (sequence.tokens.size() < run.past_count) refill(sequence, run);
    Part part{&sequence, static_cast<uint32_t>(sequence.tokens.size()), stream, run.rows};
    for (const uint32_t row : run.rows) {
      sequence.tokens.push_back({new_cells[row], cells_.stamp(stream, new_cells[row])});
    }
    sequence.sight.clear();
    if (batch.runs.size() <= kMostSights) look(sequence);
    parts.push_back(std::move(part));
  }
  drop_useless(stream, new_cells);
  return parts;
}

void Sequences::shift(std::span<const int32_t> by) {
  places_.clear();
  const size_t there = sequences_.size();
  for (size_t i = 0; i < there; ++i) keep_for_copies(i, by);
  std::vector<Token*> moved;
  std::vector<uint32_t> streams;
  for (const auto& sequence : sequences_) {
    bool moves = false;
    for (size_t i = 0; i < sequence->tokens.size(); ++i) {
      Token& token = sequence->tokens[i];
      if (!cells_.holds(sequence->stream, token)) continue;
      const int32_t turn = by[size_t{sequence->stream} * cells_.cells() + token.cell];
      if (turn == 0) continue;
      sequence->turns.resize(sequence->tokens.size());
      sequence->turns[i] += turn;
      moved.push_back(&token);
      streams.push_back(sequence->stream);
      moves = true;
    }
    for (Token& token : sequence->alone) {
      if (!cells_.holds(sequence->stream, token) ||
          by[size_t{sequence->stream} * cells_.cells() + token.cell] == 0) {
        continue;
      }
      moved.push_back(&token);
      streams.push_back(sequence->stream);
    }
    if (moves) sequence->sight.clear();
  }
  cells_.write_where(by.data());
  for (size_t i = 0; i < moved.size(); ++i) {
    moved[i]->stamp = cells_.stamp(streams[i], moved[i]->cell);
  }
}

void Sequences::drop_current() {
  places_.clear();
  std::erase_if(sequences_, [&](const auto& s) { return s->batch == batch_; });
  for (const auto& other : sequences_) other->is_left = false;  // their copies may be gone
}

}  // namespace keyhole::llama_cpp
