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

/// Of a sequence that was removed as a whole the next prompt takes the cells from the first on; where its first tokens alone were
/// removed, others take theirs, and no more. So a sequence is given up when this many of its first tokens were written over.
constexpr size_t kFirst = 32;

}  // namespace

/// Whether somebody may have a token that the run of a stream's batch does not see. Where there are several streams each is one
/// sequence's.
bool Sequences::is_wanted(const Token& token, uint32_t stream) const {
  if (cells_.streams() == 1) return cells_.holds(stream, token);
  for (uint32_t other = 0; other < cells_.streams(); ++other) {
    if (other != stream && cells_.holds(other, token)) return true;
  }
  return false;
}

/// Whether the session is a stream's to go on with: its own, or one that its own stream has given up, of which this one has a copy.
bool Sequences::is_free(const Sequence& sequence, uint32_t stream) const {
  return sequence.batch != batch_ &&
         (sequence.stream == stream || is_dead(sequence, sequence.stream));
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

/// Whether the sequence can never go on in a stream: its first tokens were written over, of which one is enough where none can be
/// taken out. A shifted one may lack its beginning.
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
  for (uint32_t stream = 0; stream < cells_.streams(); ++stream) {
    if (!is_dead(sequence, stream)) return false;
  }
  return true;
}

/// Sequences of no use go, and of the others the oldest.
void Sequences::drop_useless() {
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence->batch != batch_ && is_of_no_use(*sequence);
  });
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
      for (size_t i = 0; i < sequence->tokens.size(); ++i) {
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

/// Of a sequence whose tokens lie in other streams, too, a copy for each of these, where the shift tells them apart and the stream
/// has no sequence of its own with these tokens.
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
    copy->batch = sequence.batch;
    copy->session = sequence.session->fork();
    sequences_.push_back(std::move(copy));
  }
}

}  // namespace keyhole::llama_cpp
