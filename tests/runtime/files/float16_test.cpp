#include "runtime/files/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <stdexcept>

#include "runtime/files/element.h"
#include "tests/normal.h"

namespace keyhole {
namespace {

// A format's value by its definition: sign, exponent with a bias, fraction.
double value_of(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const auto exponent = static_cast<int>((bits >> fraction_bits) & ((1U << exponent_bits) - 1));
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? NAN : sign * INFINITY;
  const double scaled = std::ldexp(fraction, -fraction_bits);
  return sign *
         (exponent == 0 ? std::ldexp(scaled, 1 - bias) : std::ldexp(1 + scaled, exponent - bias));
}

struct Format {
  const char* name;
  int exponent_bits, fraction_bits;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
  [[nodiscard]] double value(uint32_t bits) const {
    return value_of(bits, exponent_bits, fraction_bits);
  }
};

const Format kFormats[] = {{"f16", 5, 10, f16_to_f32, f32_to_f16},
                           {"bf16", 8, 7, bf16_to_f32, f32_to_bf16}};

class Float16 : public testing::TestWithParam<Format> {};

TEST_P(Float16, WidensEveryValueAndBringsItBack) {
  const Format& format = GetParam();
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = format.value(bits);
    const float widened = format.widen(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
      ASSERT_TRUE(std::isnan(format.value(format.narrow(widened)))) << bits;
      continue;
    }
    ASSERT_EQ(widened, expected) << bits;
    ASSERT_EQ(std::signbit(widened), bits >= 32768) << bits;
    ASSERT_EQ(format.narrow(widened), bits);
  }
}

TEST_P(Float16, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format& format = GetParam();
  for (uint32_t bits = 0; bits + 1 < 32768; ++bits) {
    const double low = format.value(bits);
    const double high = format.value(bits + 1);
    if (!std::isfinite(high)) break;
    const auto middle = static_cast<float>((low + high) / 2);  // exact: one more bit of fraction
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(format.narrow(middle), even) << bits;
    ASSERT_EQ(format.narrow(std::nextafter(middle, 0.0F)), bits) << bits;
    ASSERT_EQ(format.narrow(std::nextafter(middle, INFINITY)), bits + 1) << bits;
    ASSERT_EQ(format.narrow(-middle), even | 32768U) << bits;
  }
}

TEST_P(Float16, BecomesInfiniteHalfAStepAboveTheLargest) {
  const Format& format = GetParam();
  const uint32_t infinity = ((1U << format.exponent_bits) - 1) << format.fraction_bits;
  const double largest = format.value(infinity - 1);
  const double step = largest - format.value(infinity - 2);
  const auto limit = static_cast<float>(largest + step / 2);
  EXPECT_EQ(format.narrow(limit), infinity);
  EXPECT_EQ(format.narrow(std::nextafter(limit, 0.0F)), infinity - 1);
  EXPECT_EQ(format.narrow(INFINITY), infinity);
  EXPECT_EQ(format.narrow(-INFINITY), infinity | 32768U);
}

INSTANTIATE_TEST_SUITE_P(Formats, Float16, testing::ValuesIn(kFormats),
                         [](const auto& test) { return test.param.name; });

TEST(Elements, ConvertUnalignedBytes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  keyhole::test::Normal<float> normal;
  for (const ElementType type : {ElementType::f32, ElementType::f16, ElementType::bf16}) {
    std::vector<float> in(257);
    for (float& x : in) x = normal(random);
    std::vector<std::byte> bytes(in.size() * element_size(type) + 1);
    const std::span odd = std::span(bytes).subspan(1);
    elements_from_f32(type, in, odd);
    std::vector<float> out(in.size());
    elements_to_f32(type, odd, out);
    const double relative = type == ElementType::f32   ? 0
                            : type == ElementType::f16 ? 0x1p-11
                                                       : 0x1p-8;
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_NEAR(out[i], in[i], std::abs(in[i]) * relative + 1e-7 * (relative != 0)) << i;
    }
  }
}

TEST(Elements, RefuseIntegers) {
  std::vector<float> values(2);
  std::vector<std::byte> bytes(8);
  EXPECT_THROW(elements_to_f32(ElementType::i32, bytes, values), std::runtime_error);
  EXPECT_THROW(elements_from_f32(ElementType::u8, values, bytes), std::runtime_error);
}

}  // namespace
}  // namespace keyhole
