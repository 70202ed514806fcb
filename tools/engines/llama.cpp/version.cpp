#include "tools/engines/llama.cpp/version.h"

namespace keyhole::llama_cpp {

std::string version_error(std::string_view built_for, std::string_view running) {
  if (built_for.empty() || built_for == running) return {};
  return "the backend was built for ggml " + std::string(built_for) + ", and a program with ggml " +
         std::string(running) +
         " has loaded it, whose structs may differ: it has to be built with that llama.cpp "
         "(-DKEYHOLE_LLAMA_CPP=<its source tree>)";
}

}  // namespace keyhole::llama_cpp
