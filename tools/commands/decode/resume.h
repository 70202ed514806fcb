// Where a conversation begins: with an empty session, or with one that was saved.
#pragma once

#include <memory>
#include <optional>

#include "tools/commands/decode/conversation.h"
#include "tools/commands/decode/options.h"
#include "tools/generation/saved_session.h"

namespace keyhole::tools {

/// The session of --load-session, of this model, before anything of the model but its config is read; nothing without the
/// option. Puts what the session keeps (kv_dtype) in place of the options. Throws std::runtime_error for a file that is no
/// session, or one of another model or vocabulary.
[[nodiscard]] std::optional<SavedSession> find_session(DecodeOptions& options);

/// A conversation with an empty session for `capacity` tokens.
[[nodiscard]] std::unique_ptr<Conversation> begin(const DecodeOptions& options, Runner& runner,
                                                  uint32_t capacity);
/// One that goes on with `saved`: as it was saved, but for another index or budget where one was given, which is then
/// built. The options become what is in effect.
[[nodiscard]] std::unique_ptr<Conversation> resume(DecodeOptions& options, Runner& runner,
                                                   const SavedSession& saved);

/// What a session is saved with, without its tokens. The model is read for it only where a session may be saved.
[[nodiscard]] SavedSession about_session(const DecodeOptions& options);

}  // namespace keyhole::tools
