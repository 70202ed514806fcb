// Floors: the least that a kernel must do to memory, as bare single-purpose loops. Each is written for one
// instruction set and one shape, with nothing of the library in it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::bench {

/// Loads every byte of [data, data + bytes) and does next to nothing with it; bytes % 256 == 0.
uint64_t read_all(const std::byte* data, size_t bytes);

/// Loads every byte of the rows `ids` of keys and of values, prefetching `ahead` ids in advance; row_bytes % 256 ==
/// 0.
uint64_t gather_read(const std::byte* keys, const std::byte* values, size_t row_bytes,
                     const uint32_t* ids, size_t count, size_t ahead);

/// gather_read() of the rows of one array.
uint64_t gather_read(const std::byte* rows, size_t row_bytes, const uint32_t* ids, size_t count,
                     size_t ahead);

/// True if this machine runs the gather floors (AVX-512 with VNNI).
bool has_gather_floors();

/// Scores rows of 128 elements, `ids` of them, for `group` queries; scores[h*count + i]. Prefetches whole rows
/// `ahead` ids in advance, then computes plain dot products of one row with each query.
void gather_dot_f16(const std::byte* keys, const uint32_t* ids, size_t count, const float* queries,
                    uint32_t group, size_t ahead, float* scores);
void gather_dot_i8(const int8_t* keys, const uint32_t* ids, size_t count, const int8_t* queries,
                   uint32_t group, size_t ahead, float* scores);

}  // namespace keyhole::bench
