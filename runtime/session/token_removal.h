// Tokens taken out of the middle of a sequence: a copy of the session, which shares what lies before them, is cut there
// and takes what lies behind them again, with keys turned to other positions where that is wanted. What was asked of
// stays as it is until the copy is whole.
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/partitions/rope_undo.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/session_tokens.h"

namespace keyhole::runtime {

/// Tokens [first, first + count) go, as far as there are any; keys behind them are turned by `shift` positions.
struct Removal {
  uint32_t first = 0, count = 0;
  int32_t shift = 0;

  [[nodiscard]] bool changes_nothing() const { return count == 0 && shift == 0; }
  /// How many of a layer's tokens go.
  [[nodiscard]] uint32_t removed_of(uint32_t tokens) const {
    return std::min(count, tokens - std::min(tokens, first));
  }
};

/// Throws Error(invalid_argument) where the engine has no RoPE to turn keys by, or a sliding layer no longer has what
/// its window holds after the removal.
void check_removal(const Engine& engine, const Sequence& sequence, const Removal& removal);

/// How the keys and queries of a layer are turned; changes() is false where they stay.
[[nodiscard]] index::RopeUndo turn_of(const Engine& engine, uint32_t layer, const Removal& removal);

/// Does so in one layer of `copy`, which holds the tokens of `from` until then. check_removal() has let it pass. Throws
/// Error; then the copy must not be used any more.
void remove_tokens(const Engine& engine, uint32_t layer, const Removal& removal,
                   const Sequence& from, Sequence& copy, SessionTokens& copy_tokens);

}  // namespace keyhole::runtime
