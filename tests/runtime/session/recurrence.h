// Numbers that are the same in every language and with every library; the files in golden/ are made of them.
#pragma once

#include <cstdint>
#include <vector>

namespace keyhole::test {

/// The numbers of golden/make_attention.py, and of the saved sessions beside it.
class Recurrence {
 public:
  explicit Recurrence(uint32_t seed) : state_(seed) {}
  std::vector<float> many(size_t n) {
    std::vector<float> out(n);
    for (float& x : out) {
      state_ = 1664525U * state_ + 1013904223U;
      x = (static_cast<float>((state_ >> 16U) % 129U) - 64.0F) / 16.0F;
    }
    return out;
  }

 private:
  uint32_t state_;
};

}  // namespace keyhole::test
