#include "tools/engines/llama.cpp/sequences.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace keyhole::llama_cpp {

/// The first tokens of the sequence that the run sees, all of them.
uint32_t Sequences::common(const Sequence& sequence, uint32_t stream, const Run& run) const {
  uint32_t length = 0;
  for (const Token& token : sequence.tokens) {
    if (token.cell >= run.past.size() || run.past[token.cell] == 0 ||
        !cells_.holds(stream, token)) {
      break;
    }
    ++length;
  }
  return length;
}

/// Whether the run sees the sequence's last tokens, at least one, and nothing else. What the first ones have become is
/// of no interest: a cache for sliding windows fills their cells again.
bool Sequences::lacks_beginning(const Sequence& sequence, uint32_t stream, const Run& run) const {
  const size_t count = sequence.tokens.size();
  if (run.past_count == 0 || run.past_count >= count) return false;
  return std::all_of(sequence.tokens.end() - run.past_count, sequence.tokens.end(),
                     [&](const Token& token) {
                       return token.cell < run.past.size() && run.past[token.cell] != 0 &&
                              cells_.holds(stream, token);
                     });
}

/// The sequence that shares most tokens with the run's past. It can go on as it is where nobody else may want what
/// would be cut off: its next token was written over, or there is none.
Sequences::Match Sequences::best(uint32_t stream, const Run& run) const {
  Match found;
  for (const auto& sequence : sequences_) {
    const uint32_t length = common(*sequence, stream, run);
    if (length == 0 && !sequence->tokens.empty()) continue;
    const bool in_place =
        sequence->stream == stream && sequence->batch != batch_ &&
        (length == sequence->tokens.size() || !cells_.holds(stream, sequence->tokens[length]));
    if (found.sequence == nullptr ||
        std::tuple(length, in_place) > std::tuple(found.length, found.in_place)) {
      found = {sequence.get(), length, in_place};
    }
  }
  if (found.length == 0) return {};
  return found;
}

/// The sequence with its first `length` tokens, or a copy with them; without a match an empty one.
Sequence& Sequences::take(const Match& match, uint32_t stream, SessionSource& source) {
  Sequence* sequence = match.sequence;
  if (!match.in_place) {
    auto made = std::make_unique<Sequence>();
    made->stream = stream;
    if (sequence != nullptr) {
      made->session = sequence->session->fork();
      made->tokens = sequence->tokens;
      made->unbuilt = sequence->unbuilt;
    } else {
      made->session = source.make();
    }
    sequence = made.get();
    sequences_.push_back(std::move(made));
  }
  if (match.length < sequence->tokens.size()) {
    sequence->session->truncate(match.length);
    sequence->tokens.resize(match.length);
  }
  sequence->batch = batch_;
  return *sequence;
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
  sequence.unbuilt = true;
}

/// Sequences whose first token was written over can never go on, and of the others the oldest go.
void Sequences::drop_dead() {
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence->batch != batch_ &&
           (sequence->tokens.empty() || !cells_.holds(sequence->stream, sequence->tokens.front()));
  });
  while (sequences_.size() > most_) {
    const auto oldest =
        std::min_element(sequences_.begin(), sequences_.end(),
                         [](const auto& a, const auto& b) { return a->batch < b->batch; });
    if ((*oldest)->batch == batch_) return;
    sequences_.erase(oldest);
  }
}

/// Makes the sequence's `sight` anew.
void Sequences::look(Sequence& sequence) const {
  sequence.sight = blind_row(cells_.cells());
  sequence.sight_end = 0;
  for (const Token& token : sequence.tokens) {
    sequence.sight[token.cell] = 0;
    sequence.sight_end = std::max(sequence.sight_end, token.cell + 1);
  }
  sequence.sighted = cells_.changes();
}

std::optional<Part> Sequences::go_on(uint32_t stream, const uint16_t* mask, int64_t row_stride,
                                     uint32_t seen, std::span<const uint32_t> new_cells,
                                     size_t written) {
  for (const auto& candidate : sequences_) {
    Sequence& sequence = *candidate;
    if (sequence.stream != stream || sequence.batch == batch_ || sequence.sight.empty() ||
        sequence.tokens.empty() || sequence.sighted + written != cells_.changes()) {
      continue;
    }
    const auto is_new = [&](uint32_t cell) { return sequence.sight[cell] != 0; };
    if (sequence.sight_end > seen || mask[sequence.tokens.back().cell] != 0 ||
        !std::all_of(new_cells.begin(), new_cells.end(), is_new) ||
        !goes_on(mask, row_stride, seen, new_cells, sequence.sight)) {
      continue;
    }
    Part part{&sequence, static_cast<uint32_t>(sequence.tokens.size()), stream, {}};
    for (uint32_t row = 0; row < new_cells.size(); ++row) {
      part.rows.push_back(row);
      sequence.tokens.push_back({new_cells[row], cells_.stamp(stream, new_cells[row])});
      sequence.sight[new_cells[row]] = 0;
      sequence.sight_end = std::max(sequence.sight_end, new_cells[row] + 1);
    }
    sequence.sighted = cells_.changes();
    sequence.batch = batch_;
    return part;
  }
  return std::nullopt;
}

std::optional<std::vector<Part>> Sequences::place(uint32_t stream, const Batch& batch,
                                                  std::span<const uint32_t> new_cells,
                                                  SessionSource& source) {
  std::vector<Match> matches;
  for (const Run& run : batch.runs) {
    matches.push_back(best(stream, run));
    if (matches.back().length == run.past_count) continue;
    for (const auto& sequence : sequences_) {
      if (lacks_beginning(*sequence, stream, run)) return std::nullopt;
    }
    if (!refill_) {
      throw std::runtime_error(
          "tokens were removed, shifted or restored (llama.cpp shows " +
          std::to_string(run.past_count) + " earlier tokens, of which a session holds the first " +
          std::to_string(matches.back().length) + "), which copy=off cannot follow");
    }
  }

  std::vector<Part> parts;
  for (size_t i = 0; i < batch.runs.size(); ++i) {
    const Run& run = batch.runs[i];
    // A run before this one may have taken the sequence: then this one goes on with a copy of what it was.
    Match& match = matches[i];
    if (match.sequence != nullptr && match.sequence->batch == batch_) match.in_place = false;
    Sequence& sequence = take(match, stream, source);
    if (sequence.tokens.size() < run.past_count) refill(sequence, run);
    Part part{&sequence, static_cast<uint32_t>(sequence.tokens.size()), stream, run.rows};
    for (const uint32_t row : run.rows) {
      sequence.tokens.push_back({new_cells[row], cells_.stamp(stream, new_cells[row])});
    }
    sequence.sight.clear();
    if (batch.runs.size() == 1) look(sequence);
    parts.push_back(std::move(part));
  }
  drop_dead();
  return parts;
}

void Sequences::drop(const Sequence* sequence) {
  std::erase_if(sequences_, [&](const auto& s) { return s.get() == sequence; });
}

void Sequences::drop_current() {
  std::erase_if(sequences_, [&](const auto& s) { return s->batch == batch_; });
}

}  // namespace keyhole::llama_cpp
