// What generators draw: numbers without repetition, orders, UUIDs; and templates filled in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/tasks/random.h"

namespace keyhole::tools::ruler {

/// Brings `items` into a random order (Fisher-Yates).
template <class T>
void shuffle(Random& random, std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

/// Draws `count` different numbers below `bound`, in random order; count is at most bound.
[[nodiscard]] std::vector<size_t> distinct(Random& random, size_t count, size_t bound);

/// A number of [first, end), in decimal digits.
[[nodiscard]] std::string decimal(Random& random, uint64_t first, uint64_t end);

/// `count` different pairs of an adjective and a noun with a dash between them, in random order.
[[nodiscard]] std::vector<std::string> distinct_pairs(Random& random, size_t count);

/// A random UUID, version 4, in lower case.
[[nodiscard]] std::string uuid(Random& random);

/// `text` with every `from` replaced by `to`, from left to right.
[[nodiscard]] std::string replaced(std::string_view text, std::string_view from,
                                   std::string_view to);

/// A template with each `{name}` of `fields` filled in, in one pass: braces in what is filled in mean nothing.
[[nodiscard]] std::string filled(
    std::string_view text,
    std::initializer_list<std::pair<std::string_view, std::string_view>> fields);

/// The items with `separator` between them.
[[nodiscard]] std::string joined(const std::vector<std::string>& items, std::string_view separator);

}  // namespace keyhole::tools::ruler
