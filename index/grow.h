// Vectors that grow to a size, each by what it holds itself: an allocation that fails between two of them leaves none that
// claims to be larger than it is, in whatever order they grow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace keyhole::index {

/// At least n elements, what is there kept.
template <class T, class Allocator>
void grow(std::vector<T, Allocator>& v, size_t n) {
  if (v.size() < n) v.resize(n);
}

/// Capacity for `more` further elements, which are appended without throwing then.
template <class T, class Allocator>
void make_room(std::vector<T, Allocator>& v, size_t more) {
  const size_t needed = v.size() + more;
  if (needed > v.capacity()) v.reserve(std::max(needed, 2 * v.capacity()));
}

}  // namespace keyhole::index
