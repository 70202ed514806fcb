// One thread's pass over the codes of a KV head, and the memory that it takes.
#pragma once

#include <cstdint>
#include <span>

#include "index/scan/code_scan.h"

namespace keyhole::bench {

struct CodePass {
  index::CodeParts parts;
  index::CodeScan scan;

  CodePass(const CodeShape& shape, uint32_t group, uint32_t exact_rows) {
    parts.reserve(shape, group, exact_rows);
    scan.reserve(shape, group, exact_rows);
  }
  /// Reads all codes and returns the rows that weigh most.
  std::span<const uint32_t> choose(const index::CodeSearch& search) {
    parts.begin();
    for (uint32_t p = 0; p < search.rows.parts(); ++p) scan.scan(search, p, {}, parts);
    return scan.choose(search, parts);
  }
};

}  // namespace keyhole::bench
