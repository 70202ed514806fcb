// libFuzzer: any bytes are either a file of log-probabilities, all of whose chunks can be read then, or refused by an
// exception with a text.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "tools/io/kld_base_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = [&](uint64_t offset, std::span<std::byte> to) {
    if (offset > size || to.size() > size - offset) std::abort();
    if (!to.empty()) std::memcpy(to.data(), data + offset, to.size());
  };
  try {
    keyhole::tools::KldBaseFile file("input", size, read);
    std::vector<float> row(file.vocabulary());
    for (uint32_t chunk = 0; chunk < file.chunks(); ++chunk) {
      for (const uint32_t token : file.tokens(chunk)) {
        if (token >= file.vocabulary()) std::abort();
      }
      for (uint32_t i = 0; i < file.rows(); ++i) {
        file.read_row(chunk, i, row);
        for (const float x : row) {
          if (!std::isfinite(x) || x > 0.01F) std::abort();
        }
      }
    }
  } catch (const std::runtime_error& e) {
    if (*e.what() == '\0') std::abort();
  }
  return 0;
}
