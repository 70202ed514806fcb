// decode --interactive: a person and the model speak in turns, and the session is kept between them.
#pragma once

#include "tools/commands/decode/conversation.h"
#include "tools/commands/decode/turns.h"

namespace keyhole::tools {

struct InteractiveOptions {
  Stops stops;  ///< of each answer
  bool answer_first =
      false;  ///< what was taken before is a message: it is answered before the first line is read
  SavedSession about;  ///< what /save says of the model
};

/// Reads lines of standard input until /quit or its end, and writes answers to standard output, with prompt
/// characters only where both are a terminal. On a terminal the error of a failed turn is shown and the conversation
/// goes on; with a pipe it is thrown. Ctrl-C ends the answer, or the line that is being typed.
void interact(Conversation& conversation, const Tokenizer& tokenizer, const Turns& turns,
              const InteractiveOptions& options);

}  // namespace keyhole::tools
