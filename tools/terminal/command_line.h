// The command line as it was given, for results that should be repeatable.
#pragma once

#include <string>

namespace keyhole::tools {

/// The command line, quoted for a shell where that is needed: "keyhole compare --trace 'my trace.safetensors'". ""
/// where the system does not tell.
[[nodiscard]] std::string command_line();

/// `word`, quoted so that a POSIX shell reads it back.
[[nodiscard]] std::string shell_word(const std::string& word);

}  // namespace keyhole::tools
