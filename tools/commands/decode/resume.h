// The beginning of a conversation: with an empty session, or with one that was saved.
#pragma once

#include <memory>
#include <optional>

#include "tools/commands/decode/conversation.h"
#include "tools/commands/decode/options.h"
#include "tools/generation/saved_session.h"

namespace keyhole::tools {

/// Reads the session of --load-session and checks that it is of this model, before anything of the model except its
/// config is read; returns nothing without the option. Puts the session's kv_dtype in place of the option's. Throws
/// std::runtime_error for a file that is no session, or one of another model or vocabulary.
[[nodiscard]] std::optional<SavedSession> find_session(DecodeOptions& options);

/// Begins a conversation with an empty session for `capacity` tokens.
[[nodiscard]] std::unique_ptr<Conversation> begin(const DecodeOptions& options, Runner& runner,
                                                  uint32_t capacity);
/// Goes on with `saved` as it was saved, except for another index or budget where one was given, which is then built.
/// The options become what is in effect.
[[nodiscard]] std::unique_ptr<Conversation> resume(DecodeOptions& options, Runner& runner,
                                                   const SavedSession& saved);

/// The facts that a session is saved with, without its tokens. The model's files are read for them only where a
/// session may be saved.
[[nodiscard]] SavedSession about_session(const DecodeOptions& options);

}  // namespace keyhole::tools
