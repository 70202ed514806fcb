// libFuzzer: any bytes are either a valid safetensors file or refused by an exception with a text.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "runtime/files/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    keyhole::validate_safetensors(std::as_bytes(std::span(data, size)));
  } catch (const std::runtime_error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}
