// libFuzzer: any bytes are either a file of budgets or refused by an exception with a text.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "runtime/files/budgets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    (void)keyhole::parse_budgets(std::as_bytes(std::span(data, size)));
  } catch (const std::runtime_error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}
