// The command as it was given, for results that should be repeatable.
#pragma once

#include <string>

namespace keyhole::tools {

/// "keyhole compare --trace 'my trace.safetensors'": quoted for a shell where that is needed. "" where the system does not
/// tell.
[[nodiscard]] std::string command_line();

/// `word` as a POSIX shell reads it back.
[[nodiscard]] std::string shell_word(const std::string& word);

}  // namespace keyhole::tools
