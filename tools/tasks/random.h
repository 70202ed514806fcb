// Random numbers that are the same on every platform and compiler (the standard's distributions are not).
#pragma once

#include <cstdint>
#include <string>

namespace keyhole::tools {

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, one output per addition.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15U);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }

  /// A number uniform in [0, bound), bound > 0: values of the incomplete last round are drawn again.
  uint64_t below(uint64_t bound) {
    const uint64_t unfair = (0 - bound) % bound;  // 2^64 mod bound
    uint64_t value = next();
    while (value < unfair) value = next();
    return value % bound;
  }

  /// True with probability percent / 100.
  bool chance(uint32_t percent) { return below(100) < percent; }

  std::string letters(size_t count) { return draw(count, 'a', 26); }
  std::string digits(size_t count) { return draw(count, '0', 10); }

 private:
  std::string draw(size_t count, char first, uint64_t kinds) {
    std::string text(count, first);
    for (char& c : text) c = static_cast<char>(first + below(kinds));
    return text;
  }

  uint64_t state_;
};

}  // namespace keyhole::tools
