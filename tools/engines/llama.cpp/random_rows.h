// For benches: what is restored into a cache becomes random numbers, in next to no memory, so that a long context is
// there without a prompt.
#pragma once

#include <cstddef>

namespace keyhole::llama_cpp {

/// From now on rows that are restored, in f16, are normal numbers of these standard deviations, as keys and as values,
/// whatever was saved; 0 and 0: what was saved. Programs find it as "keyhole_random_rows" among the backend's
/// functions. Any thread.
void set_random_rows(float k, float v);

/// Whether rows that are restored are to be random.
[[nodiscard]] bool rows_are_random();

/// Address space that shows random numbers, the same 256 MiB over and over; it is munmap()'s. Throws std::runtime_error
/// where there is none.
[[nodiscard]] std::byte* map_random_rows(bool values, size_t bytes);

}  // namespace keyhole::llama_cpp
