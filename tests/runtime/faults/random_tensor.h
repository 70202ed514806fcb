// Tensors as a caller may hold them: in any dtype, with any gap between rows, heads in any order of strides.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/half.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

/// A tensor of random form with the numbers that it was given, which every dtype holds exactly. Gaps are NaN.
class RandomTensor {
 public:
  /// Holds numbers `[tokens, heads, dim]`; as_step: as the tensor of one token, `[heads, dim]`.
  RandomTensor(const std::vector<float>& numbers, int64_t tokens, int64_t heads, int64_t dim,
               Numbers& random, bool as_step)
      : tokens_(tokens), heads_(heads), dim_(dim) {
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    const int64_t gap = random.below(3) == 0 ? random.below(5) : 0;
    const bool heads_first = random.below(3) == 0;
    head_stride_ = heads_first ? tokens * (dim + gap) : dim + gap;
    token_stride_ = heads_first ? dim + gap : heads * (dim + gap);
    tensor.dtype = kTypes[random.below(3)];
    const size_t size = tensor.dtype == KEYHOLE_F32 ? 4 : 2;
    bytes_.resize(static_cast<size_t>(tokens * heads * (dim + gap)) * size, std::byte{0xFF});
    tensor.data = bytes_.data();
    tensor.memory = KEYHOLE_HOST;
    tensor.rank = as_step ? 2 : 3;
    const int64_t shape[] = {tokens, heads, dim}, strides[] = {token_stride_, head_stride_, 1};
    std::copy(shape + (as_step ? 1 : 0), shape + 3, tensor.shape);
    std::copy(strides + (as_step ? 1 : 0), strides + 3, tensor.strides);
    set(numbers);
  }
  RandomTensor(RandomTensor&&) = default;
  RandomTensor& operator=(RandomTensor&&) = default;

  /// Replaces the numbers in place.
  void set(const std::vector<float>& numbers) {
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t i = 0; i < dim_; ++i) {
          put(static_cast<size_t>(t * token_stride_ + h * head_stride_ + i),
              numbers[static_cast<size_t>((t * heads_ + h) * dim_ + i)]);
        }
      }
    }
  }

  keyhole_tensor tensor{};

 private:
  void put(size_t at, float x) {
    if (tensor.dtype == KEYHOLE_F32) {
      std::memcpy(bytes_.data() + at * 4, &x, 4);
      return;
    }
    const uint16_t half = tensor.dtype == KEYHOLE_F16
                              ? cpu::f32_to_f16(x)
                              : static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    std::memcpy(bytes_.data() + at * 2, &half, 2);
  }
  int64_t tokens_, heads_, dim_, head_stride_ = 0, token_stride_ = 0;
  std::vector<std::byte> bytes_;
};

}  // namespace keyhole::test
