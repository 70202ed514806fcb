// The filters, tests and methods of values in templates.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "tools/tokenizer/jinja/value.h"

namespace keyhole::tools::jinja {

/// The arguments of a call, by place and by name.
struct Arguments {
  std::vector<Value> values;
  std::vector<std::pair<std::string, Value>> named;

  /// The argument at a place or with a name; undefined where there is neither.
  [[nodiscard]] Value get(size_t place, std::string_view name) const;
};

/// Computes `value | name(arguments)`. Throws std::runtime_error for a value or an argument that the filter does not
/// take.
[[nodiscard]] Value apply_filter(std::string_view name, const Value& value,
                                 const Arguments& arguments);
/// Computes `value is name(arguments)`.
[[nodiscard]] bool apply_test(std::string_view name, const Value& value,
                              const Arguments& arguments);
/// Computes `value.name(arguments)`. Throws std::runtime_error for a method that is not built in.
[[nodiscard]] Value call_method(const Value& value, std::string_view name,
                                const Arguments& arguments);

/// The elements of a list, the keys of a dictionary, the characters of a text; none for an undefined value. Throws
/// for others.
[[nodiscard]] List elements_of(const Value& value);
/// Returns value[index], undefined where there is nothing.
[[nodiscard]] Value item_of(const Value& value, const Value& index);
/// Returns value[from:to:step]; null where nothing was written.
[[nodiscard]] Value slice_of(const Value& value, const Value* from, const Value* to,
                             const Value* step);

}  // namespace keyhole::tools::jinja
