// Which sequences somebody may go on with, and which are of no use any more.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/sequences.h"

namespace keyhole::llama_cpp {
namespace {

/// Of a sequence that was removed as a whole the next prompt takes the cells from the first on; where its first tokens
/// alone were removed, others take theirs, and no more. So nobody may want a sequence when this many of its first
/// tokens were written over. Where more than that have left without a shift, and others have filled their cells before
/// the sequence goes on, that is wrong, but where the others had to pass over cells of what is left.
constexpr size_t kFirst = 32;

}  // namespace

/// Whether somebody may have a token that the run of a stream's batch does not see. Where there are several streams
/// each is one sequence's.
bool Sequences::is_wanted(const Token& token, uint32_t stream) const {
  if (cells_.streams() == 1) return cells_.holds(stream, token);
  for (uint32_t other = 0; other < cells_.streams(); ++other) {
    if (other != stream && cells_.holds(other, token)) return true;
  }
  return false;
}

/// Whether another one has tokens in common with a sequence, as far as is known, which lie in no cell of llama.cpp's
/// cache: what a run does not see of it may be the other's.
bool Sequences::is_strict(const Sequence& sequence) const {
  return (rewrites_ || !refill_) && sequence.family != 0 &&
         std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& other) {
           return other.get() != &sequence && other->family == sequence.family;
         });
}

/// Whether all that the run does not see of a sequence is of no use to others.
bool Sequences::loses_nothing(const Sequence& sequence, uint32_t stream, const Run& run) const {
  return std::all_of(sequence.tokens.begin(), sequence.tokens.end(), [&](const Token& token) {
    return sees(run, stream, token) || !is_wanted(token, stream);
  });
}

/// Whether a sequence whose keys are to be turned may be rewritten for a run: a context shift has removed what the run
/// does not see, and nobody may have filled these cells yet. But a copy may be there that has not gone on. In a single
/// stream a token is somebody else's where its key was turned, as llama.cpp turns none of an empty cell; and where its
/// cell is below `last_new`, the highest one of the batch's new tokens, as llama.cpp fills the lowest empty cells. In
/// several streams copies of a shifted one have sessions of their own (keep_for_copies()).
bool Sequences::may_turn(const Sequence& sequence, uint32_t stream, const Run& run,
                         uint32_t last_new) const {
  if (cells_.streams() > 1) return true;
  for (size_t i = 0; i < sequence.tokens.size(); ++i) {
    const Token& token = sequence.tokens[i];
    if (sees(run, stream, token) || !is_wanted(token, stream)) continue;
    const bool is_turned = i < sequence.turns.size() && sequence.turns[i] != 0;
    if (is_turned || token.cell < last_new) return false;
  }
  return true;
}

/// Whether the session is a stream's to go on with: its own, or one that its own stream has given up, of which this one
/// has a copy.
bool Sequences::is_free(const Sequence& sequence, uint32_t stream) const {
  return sequence.batch != batch_ &&
         (sequence.stream == stream ||
          (refill_ ? is_dead(sequence, sequence.stream) : is_gone(sequence, sequence.stream)));
}

/// A copy goes on without some of the sequence's tokens.
void Sequences::leave(Sequence& sequence, const Match& match, const Run& run,
                      uint32_t stream) const {
  // One of another stream is that one's, and one that has gone on is somebody's.
  if (sequence.stream != stream || sequence.batch == batch_) return;
  sequence.is_left = true;
  sequence.alone.clear();
  for (size_t i = match.length; i < sequence.tokens.size(); ++i) {
    if (sees(run, stream, sequence.tokens[i])) continue;
    sequence.alone.push_back(sequence.tokens[i]);
  }
}

/// Whether the sequence can never go on in a stream: its first tokens were written over, of which one is enough where
/// none can be taken out. A shifted one may lack its beginning.
bool Sequences::is_dead(const Sequence& sequence, uint32_t stream) const {
  const std::vector<Token>& tokens = sequence.tokens;
  const size_t first = std::min(rewrites_ ? kFirst : 1, tokens.size());
  for (size_t i = 0; i < first; ++i) {
    if (cells_.holds(stream, tokens[i])) return false;
  }
  for (size_t i = first; i < sequence.turns.size(); ++i) {
    if (sequence.turns[i] != 0 && cells_.holds(stream, tokens[i])) return false;
  }
  return true;
}

bool Sequences::is_dead_everywhere(const Sequence& sequence) const {
  for (uint32_t stream = 0; stream < cells_.streams(); ++stream) {
    if (!is_dead(sequence, stream)) return false;
  }
  return true;
}

/// Whether none of the sequence's tokens lies in its cell of a stream.
bool Sequences::is_gone(const Sequence& sequence, uint32_t stream) const {
  return std::none_of(sequence.tokens.begin(), sequence.tokens.end(),
                      [&](const Token& token) { return cells_.holds(stream, token); });
}

/// Whether no stream can go on with the sequence, or each that can has a copy of it.
bool Sequences::is_of_no_use(Sequence& sequence) const {
  if (sequence.is_left) {
    const auto is_held = [&](const Token& token) {
      for (uint32_t stream = 0; stream < cells_.streams(); ++stream) {
        if (cells_.holds(stream, token)) return true;
      }
      return false;
    };
    std::vector<Token>& alone = sequence.alone;
    while (!alone.empty() && !is_held(alone.back())) alone.pop_back();
    if (alone.empty()) return true;
  }
  if (refill_ && !sequence.is_passed_over) return is_dead_everywhere(sequence);
  for (uint32_t stream = 0; stream < cells_.streams(); ++stream) {
    if (!is_gone(sequence, stream)) return false;
  }
  return true;
}

/// Whether a token of the sequence lies between two new ones whose cells were searched for in one go: its cell was not
/// free.
bool Sequences::was_passed_over(const Sequence& sequence, uint32_t stream,
                                std::span<const uint32_t> new_cells) const {
  if (new_cells.size() < 2 || !std::is_sorted(new_cells.begin(), new_cells.end())) return false;
  return std::any_of(sequence.tokens.begin(), sequence.tokens.end(), [&](const Token& token) {
    return token.cell > new_cells.front() && token.cell < new_cells.back() &&
           cells_.holds(stream, token) &&
           !std::binary_search(new_cells.begin(), new_cells.end(), token.cell);
  });
}

/// Sequences of no use go, and of the others the oldest. Where tokens are in sessions alone, those that nobody may want
/// stay as long as all sessions together hold no more tokens than there are cells.
void Sequences::drop_useless(uint32_t stream, std::span<const uint32_t> new_cells) {
  for (const auto& sequence : sequences_) {
    if (sequence->batch == batch_ || !is_dead_everywhere(*sequence)) continue;
    if (was_passed_over(*sequence, stream, new_cells)) sequence->is_passed_over = true;
  }
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence->batch != batch_ && is_of_no_use(*sequence);
  });
  while (!refill_) {
    size_t held = 0;
    auto doubtful = sequences_.end();
    for (auto it = sequences_.begin(); it != sequences_.end(); ++it) {
      held += (*it)->tokens.size();
      if ((*it)->batch == batch_ || (*it)->is_passed_over || !is_dead_everywhere(**it)) continue;
      if (doubtful == sequences_.end() || (*it)->batch < (*doubtful)->batch) doubtful = it;
    }
    if (doubtful == sequences_.end() || held <= size_t{cells_.streams()} * cells_.cells()) break;
    sequences_.erase(doubtful);
  }
  while (sequences_.size() > most_) {
    const auto oldest =
        std::min_element(sequences_.begin(), sequences_.end(),
                         [](const auto& a, const auto& b) { return a->batch < b->batch; });
    if ((*oldest)->batch == batch_) return;
    sequences_.erase(oldest);
  }
}

Sequences::Place Sequences::find(uint32_t stream, uint32_t cell) const {
  const size_t cells = cells_.cells();
  if (places_.empty() || placed_ != cells_.changes()) {
    placed_ = cells_.changes();
    places_.assign(cells_.streams() * cells, {});
    for (const auto& sequence : sequences_) {
      // Of a sequence that the batch under way goes on with, the list is longer than what its session has to be read.
      const size_t held = std::min<size_t>(sequence->tokens.size(), sequence->session->tokens(0));
      for (size_t i = 0; i < held; ++i) {
        const Token& token = sequence->tokens[i];
        for (uint32_t s = 0; s < cells_.streams(); ++s) {
          if (!cells_.holds(s, token)) continue;
          places_[s * cells + token.cell] = {sequence.get(), static_cast<uint32_t>(i)};
        }
      }
    }
  }
  return places_[stream * cells + cell];
}

/// Of a sequence whose tokens lie in other streams, too, a copy for each of these, where the shift tells them apart and
/// the stream has no sequence of its own with these tokens.
void Sequences::keep_for_copies(size_t number, std::span<const int32_t> by) {
  const Sequence& sequence = *sequences_[number];
  const auto is_moved = [&](uint32_t stream) {
    return std::any_of(sequence.tokens.begin(), sequence.tokens.end(), [&](const Token& token) {
      return cells_.holds(stream, token) && by[size_t{stream} * cells_.cells() + token.cell] != 0;
    });
  };
  const bool moves = is_moved(sequence.stream);
  for (uint32_t stream = 0; stream < cells_.streams(); ++stream) {
    if (stream == sequence.stream || (!moves && !is_moved(stream))) continue;
    std::vector<Token> here;
    std::copy_if(sequence.tokens.begin(), sequence.tokens.end(), std::back_inserter(here),
                 [&](const Token& token) { return cells_.holds(stream, token); });
    const auto has_these = [&](const auto& other) {
      size_t at = 0;
      for (const Token& token : other->tokens) {
        if (at < here.size() && here[at].stamp == token.stamp) ++at;
      }
      return other->stream == stream && at == here.size();
    };
    if (here.empty() || std::any_of(sequences_.begin(), sequences_.end(), has_these)) continue;
    auto copy = std::make_unique<Sequence>();
    copy->stream = stream;
    copy->tokens = sequence.tokens;
    copy->turns = sequence.turns;
    copy->unbuilt = sequence.unbuilt;
    copy->is_refilled = sequence.is_refilled;
    copy->batch = sequence.batch;
    copy->session = sequence.session->fork();
    sequences_.push_back(std::move(copy));
  }
}

}  // namespace keyhole::llama_cpp
