// libFuzzer: any text is either the spec of an index or refused by an exception with a text.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cpu/types.h"
#include "index/types/factory.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    keyhole::index::check_spec(std::string(reinterpret_cast<const char*>(data), size));
  } catch (const keyhole::Error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}
