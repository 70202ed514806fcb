// Normally distributed numbers, equal to those of libstdc++'s std::normal_distribution, but without its two
// logarithms in long double for every number, in which tests of kernels spent seven tenths of their time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace keyhole::test {

/// Marsaglia's polar method. It has state, because two numbers are drawn at once.
template <class Float>
class Normal {
 public:
  explicit Normal(Float mean = 0, Float deviation = 1) : mean_(mean), deviation_(deviation) {}

  template <class Rng>
  Float operator()(Rng& rng) {
    if (has_second_) {
      has_second_ = false;
      return second_ * deviation_ + mean_;
    }
    Float x, y, square;
    do {
      x = 2 * uniform(rng) - 1;
      y = 2 * uniform(rng) - 1;
      square = x * x + y * y;
    } while (square > 1 || square == 0);
    const Float factor = std::sqrt(-2 * std::log(square) / square);
    second_ = x * factor;
    has_second_ = true;
    return y * factor * deviation_ + mean_;
  }

 private:
  /// A number in [0, 1), made of as many words as Float has digits for.
  template <class Rng>
  static Float uniform(Rng& rng) {
    static_assert(Rng::min() == 0);
    constexpr int kWord = Rng::max() == std::numeric_limits<uint64_t>::max() ? 64 : 32;
    static_assert(kWord == 64 || Rng::max() == std::numeric_limits<uint32_t>::max());
    Float sum = 0;
    Float unit = 1;
    for (int digits = 0; digits < std::numeric_limits<Float>::digits; digits += kWord) {
      sum += static_cast<Float>(rng()) * unit;
      unit *= kWord == 64 ? Float{0x1p64} : Float{0x1p32};
    }
    return std::min(sum / unit, std::nextafter(Float{1}, Float{0}));
  }

  Float mean_, deviation_, second_ = 0;
  bool has_second_ = false;
};

}  // namespace keyhole::test
