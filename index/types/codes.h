// Codes of all keys, and of all values where the build is given them: 1 to 4 bits an element. A search scores every
// key by its code and the best again exactly. Its main use is Index::codes(): a step attends the heaviest rows
// exactly and all others by their codes (index/scan/code_scan.h). Of 64 kv questions at 128k, 2 bits answered 61
// (exact attention: 60), 2 bits without exact rows 46, 1 bit 57.
//
// Rows of the last, incomplete block of 256 have no code and are scored exactly.
#pragma once

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kCodesType;

struct CodeBits {
  uint32_t keys = 0, values = 0;  ///< bits per element
  bool operator==(const CodeBits&) const = default;
};
/// The bits of a spec of this type.
[[nodiscard]] CodeBits code_bits(const Spec& spec);
/// The lists that a spec of this type asks for.
struct CodeListing {
  uint32_t rows = 0;    ///< of a list on average; 0: there are none
  float share = 0.12F;  ///< of the rows that a step reads
  float miss = 0.0F;    ///< ListGoal::miss
  uint32_t from = 0;    ///< first_rows()
  bool operator==(const CodeListing&) const = default;
};
[[nodiscard]] CodeListing code_listing(const Spec& spec);
/// The parameter `from` of a spec of this type.
[[nodiscard]] uint32_t first_rows(const Spec& spec);

[[nodiscard]] std::unique_ptr<Index> make_codes(const Spec& spec, uint32_t dim, DType dtype,
                                                const Context& context);
[[nodiscard]] size_t estimate_codes(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
