// Lines in llama.cpp's log.
#pragma once

#include <string>

namespace keyhole::llama_cpp {

enum class Level { kDebug, kInfo, kWarning, kError };

/// Hands "keyhole: text" to whoever has set ggml's log. May be called from any thread.
void log(Level level, const std::string& text);

}  // namespace keyhole::llama_cpp
