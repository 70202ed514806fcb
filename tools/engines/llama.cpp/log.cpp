#include "tools/engines/llama.cpp/log.h"

#include <ggml.h>

#include <cstdint>
#include <string>

namespace keyhole::llama_cpp {

void log(Level level, const std::string& text) {
  ggml_log_callback callback = nullptr;
  void* user = nullptr;
  ggml_log_get(&callback, &user);
  if (callback == nullptr) return;
  const std::string line = "keyhole: " + text + "\n";
  switch (level) {
    case Level::kDebug: return callback(GGML_LOG_LEVEL_DEBUG, line.c_str(), user);
    case Level::kInfo: return callback(GGML_LOG_LEVEL_INFO, line.c_str(), user);
    case Level::kWarning: return callback(GGML_LOG_LEVEL_WARN, line.c_str(), user);
    case Level::kError: return callback(GGML_LOG_LEVEL_ERROR, line.c_str(), user);
  }
}

std::string mib(uint64_t bytes) { return std::to_string((bytes + (1U << 19U)) >> 20U) + " MiB"; }

}  // namespace keyhole::llama_cpp
