// Conversions: all 65536 values of both 16-bit formats, and rounding to nearest even against arithmetic in
// double.
#include <bit>

#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {
namespace {

struct Format {
  DType dtype;
  int mantissa_bits;
  int bias;
  uint16_t infinity;  // its bits
};
constexpr Format kF16 = {DType::f16, 10, 15, 0x7C00};
constexpr Format kBf16 = {DType::bf16, 7, 127, 0x7F80};

/// The format's bits nearest to x, ties to even: by scaling x to units of its last place.
uint16_t nearest(double x, const Format& f) {
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const double magnitude = std::fabs(x);
  if (std::isinf(magnitude)) return sign | f.infinity;
  if (magnitude == 0.0) return sign;
  const int smallest = 1 - f.bias;  // exponent of the smallest normal number
  const int exponent = std::max(std::ilogb(magnitude), smallest);
  const double units = std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent));
  // Subnormals have no implicit one; a carry out of the mantissa raises the exponent by itself.
  const int above = exponent - smallest;
  const double bits = units + std::ldexp(above, f.mantissa_bits);
  return sign | static_cast<uint16_t>(std::min(bits, static_cast<double>(f.infinity)));
}

bool is_nan(uint16_t bits, const Format& f) { return (bits & 0x7FFF) > f.infinity; }

class Convert : public EveryLevel {
 protected:
  void expect_rounded(const std::vector<float>& in, const Format& f) {
    const GuardedArray<uint16_t> out(in.size());
    kernels.from_f32[index_of(f.dtype)](in.data(), reinterpret_cast<std::byte*>(out.data()),
                                        in.size());
    for (size_t i = 0; i < in.size(); ++i) {
      if (std::isnan(in[i])) {
        ASSERT_TRUE(is_nan(out[i], f)) << in[i];
      } else {
        ASSERT_EQ(out[i], nearest(in[i], f)) << dtype_name(f.dtype) << " of " << in[i];
      }
    }
  }
};

TEST_P(Convert, AllValuesToF32AndBack) {
  for (const Format& f : {kF16, kBf16}) {
    const GuardedArray<uint16_t> in(65536);
    std::iota(in.begin(), in.end(), uint16_t{0});
    const auto* bytes = reinterpret_cast<const std::byte*>(in.data());
    const GuardedArray<float> out(65536);
    kernels.to_f32[index_of(f.dtype)](bytes, out.data(), in.size());
    const GuardedArray<uint16_t> back(65536);
    kernels.from_f32[index_of(f.dtype)](out.data(), reinterpret_cast<std::byte*>(back.data()),
                                        65536);
    for (size_t i = 0; i < in.size(); ++i) {
      const double exact = decode_half(in[i], f.dtype);
      if (std::isnan(exact)) {
        ASSERT_TRUE(std::isnan(out[i])) << i;
        ASSERT_TRUE(is_nan(back[i], f)) << i;
      } else {
        ASSERT_EQ(out[i], exact) << i;
        ASSERT_EQ(std::signbit(out[i]), (i & 0x8000) != 0) << i;
        ASSERT_EQ(back[i], i);
      }
    }
  }
}

// Halfway between neighbours, and one fp32 step to either side of it: the hardest cases for rounding.
TEST_P(Convert, TiesGoToEven) {
  for (const Format& f : {kF16, kBf16}) {
    const auto value = [&](uint32_t bits) {
      return decode_half(static_cast<uint16_t>(bits), f.dtype);
    };
    std::vector<float> in;
    for (uint32_t bits = 0; bits < f.infinity; ++bits) {
      const double low = value(bits);
      // Above the largest finite value the step stays what it was.
      const double high = bits + 1 < f.infinity ? value(bits + 1) : 2.0 * low - value(bits - 1);
      const auto middle = static_cast<float>((low + high) / 2.0);
      for (const float x :
           {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, INFINITY)}) {
        in.push_back(x);
        in.push_back(-x);
      }
    }
    expect_rounded(in, f);
  }
}

TEST_P(Convert, RandomBitPatternsRoundToNearest) {
  Rng rng(21);
  std::vector<float> in(200001);  // odd: with a tail
  for (float& x : in) x = std::bit_cast<float>(static_cast<uint32_t>(rng()));
  in[0] = INFINITY;
  in[1] = -INFINITY;
  in[2] = 65519.996F;  // the last that rounds to 65504
  in[3] = 65520.0F;    // the first that rounds to Inf
  in[4] = std::numeric_limits<float>::max();
  in[5] = std::numeric_limits<float>::denorm_min();
  for (const Format& f : {kF16, kBf16}) expect_rounded(in, f);
}

TEST_P(Convert, F32IsCopiedBitForBit) {
  Rng rng(22);
  const GuardedArray<uint32_t> in(77);
  for (uint32_t& x : in) x = static_cast<uint32_t>(rng());
  const GuardedArray<uint32_t> to(77);
  const GuardedArray<uint32_t> from(77);
  kernels.to_f32[0](reinterpret_cast<const std::byte*>(in.data()),
                    reinterpret_cast<float*>(to.data()), 77);
  kernels.from_f32[0](reinterpret_cast<const float*>(in.data()),
                      reinterpret_cast<std::byte*>(from.data()), 77);
  EXPECT_TRUE(std::equal(in.begin(), in.end(), to.begin()));
  EXPECT_TRUE(std::equal(in.begin(), in.end(), from.begin()));
}

TEST_P(Convert, EveryLengthReadsAndWritesExactlyItsElements) {
  Rng rng(23);
  for (const DType dtype : kDTypes) {
    const size_t size = dtype_size(dtype);
    for (size_t n = 0; n <= 70; ++n) {
      const TestRows rows(n > 0 ? 1 : 0, static_cast<uint32_t>(n), dtype, 0, gaussian(rng));
      const GuardedArray<float> wide(n);
      kernels.to_f32[index_of(dtype)](rows.view.data, wide.data(), n);
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(wide[i], rows.exact[i]);
      const GuardedArray<std::byte> back(n * size);
      kernels.from_f32[index_of(dtype)](wide.data(), back.data(), n);
      ASSERT_TRUE(std::equal(back.begin(), back.end(), rows.view.data));
      ASSERT_TRUE(kernels.all_finite[index_of(dtype)](rows.view.data, n));
    }
  }
}

TEST_P(Convert, Int8TimesItsScaleIsExact) {
  Rng rng(25);
  for (size_t n = 1; n <= 70; ++n) {
    const TestRows rows(1, static_cast<uint32_t>(n), DType::i8, 0, gaussian(rng));
    const GuardedArray<float> wide(n);
    kernels.i8_to_f32(rows.view.data, rows.view.scales.row(0), wide.data(), n);
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(wide[i], rows.exact[i]);
  }
}

TEST_P(Convert, AllFiniteFindsASingleInfOrNanAnywhere) {
  Rng rng(24);
  for (const DType dtype : kDTypes) {
    for (const size_t n : {1, 7, 16, 33, 100}) {
      for (size_t bad = 0; bad < n; ++bad) {
        for (const float poison : {INFINITY, -INFINITY, std::nanf("")}) {
          const TestRows rows(1, static_cast<uint32_t>(n), dtype, 1,
                              [&](size_t, uint32_t j) { return j == bad ? poison : 1e4F; });
          ASSERT_FALSE(kernels.all_finite[index_of(dtype)](rows.view.data, n))
              << dtype_name(dtype) << " " << poison << " at " << bad << " of " << n;
        }
      }
    }
    // The largest finite values of both signs are finite.
    const double largest = dtype == DType::f16    ? 65504.0
                           : dtype == DType::bf16 ? 0x1.FEp127
                                                  : std::numeric_limits<float>::max();
    const TestRows rows(1, 50, dtype, 0,
                        [&](size_t, uint32_t j) { return j % 2 == 0 ? largest : -largest; });
    EXPECT_TRUE(kernels.all_finite[index_of(dtype)](rows.view.data, 50));
  }
}

KEYHOLE_FOR_EVERY_LEVEL(Convert);

}  // namespace
}  // namespace keyhole::cpu::test
