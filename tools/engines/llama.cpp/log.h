// Lines in llama.cpp's log.
#pragma once

#include <cstdint>
#include <string>

namespace keyhole::llama_cpp {

enum class Level { kDebug, kInfo, kWarning, kError };

/// Hands "keyhole: text" to whoever has set ggml's log. May be called from any thread.
void log(Level level, const std::string& text);

/// "12 MiB", rounded.
[[nodiscard]] std::string mib(uint64_t bytes);

}  // namespace keyhole::llama_cpp
