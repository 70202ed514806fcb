// Growth of vectors whose own sizes say what they hold: when an allocation between two of them fails, none claims to
// be larger than it is, in whatever order they grow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace keyhole::index {

/// Makes the vector at least n elements long and keeps what it holds.
template <class T, class Allocator>
void grow(std::vector<T, Allocator>& v, size_t n) {
  if (v.size() < n) v.resize(n);
}

/// Reserves room for `more` further elements, which can then be appended without throwing.
template <class T, class Allocator>
void make_room(std::vector<T, Allocator>& v, size_t more) {
  const size_t needed = v.size() + more;
  if (needed > v.capacity()) v.reserve(std::max(needed, 2 * v.capacity()));
}

}  // namespace keyhole::index
