// Makes index types from strings in the manner of Faiss: "flat", "ivf:C=1024,probe=32", "hnsw:M=32,ef=128".
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "index/index.h"
#include "index/types/codes.h"

namespace keyhole::index {

/// Makes an empty index for keys `[*, dim]` of `dtype`. Throws Error(invalid_argument) that names what
/// was wrong in the spec (type, parameter or value) and what is allowed.
[[nodiscard]] std::unique_ptr<Index> make_index(std::string_view spec, uint32_t dim, DType dtype,
                                                const Context& context);

/// Checks a spec without making anything; throws as make_index does. also: what the caller takes beside the types, for
/// the text of an error.
void check_spec(std::string_view spec, std::string_view also = {});

/// The bits per element of the codes of rows (Index::codes()) that an index of this spec has where it is built with
/// values; nothing: it has no codes. Throws as make_index does.
[[nodiscard]] std::optional<CodeBits> code_bits(std::string_view spec);
/// The lists of such an index; no rows: it has none. Throws likewise.
[[nodiscard]] CodeListing code_listing(std::string_view spec);
[[nodiscard]] inline bool has_codes(std::string_view spec) { return code_bits(spec).has_value(); }

/// The number of rows from which an index of this spec is worth building: attending fewer exactly takes no longer. 0:
/// any number. Throws as make_index does.
[[nodiscard]] uint32_t first_rows(std::string_view spec);

/// Whether an index of this spec undoes RoPE because its parameters say so (rope=undo). Throws as make_index does.
[[nodiscard]] bool undoes_rope(std::string_view spec);

/// The bytes that an index over `count` keys will hold beside K and V, estimated before anything is built (within
/// about 10 %). Throws as make_index does.
[[nodiscard]] size_t estimate_bytes(std::string_view spec, size_t count, uint32_t dim, DType dtype);

/// For help texts: each type with its parameters, defaults and allowed values.
struct ParamHelp {
  std::string name, default_value, allowed, meaning;
};
struct TypeHelp {
  std::string name, meaning;
  std::vector<ParamHelp> params;
};
[[nodiscard]] const std::vector<TypeHelp>& index_types();

}  // namespace keyhole::index
