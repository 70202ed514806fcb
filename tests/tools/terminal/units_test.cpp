#include "tools/terminal/units.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

TEST(Units, FormatBytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes((1U << 20U) - 1), "1 MiB");
  EXPECT_EQ(format_bytes(uint64_t{16} << 30U), "16 GiB");
  EXPECT_EQ(format_bytes(UINT64_MAX), "16 EiB");
}

TEST(Units, FormatDurations) {
  EXPECT_EQ(format_duration(0), "0 us");
  EXPECT_EQ(format_duration(412e-6), "412 us");
  EXPECT_EQ(format_duration(1.25e-3), "1.25 ms");
  EXPECT_EQ(format_duration(3.14159), "3.1 s");
  EXPECT_EQ(format_duration(59.9), "1 min 00 s");
  EXPECT_EQ(format_duration(125), "2 min 05 s");
  EXPECT_EQ(format_duration(3720), "1 h 02 min");
  EXPECT_EQ(format_duration(NAN), "-");
}

TEST(Units, FormatNumbers) {
  EXPECT_EQ(format_number(0), "0");
  EXPECT_EQ(format_number(0.123456), "0.123");
  EXPECT_EQ(format_number(0.00123456), "0.00123");
  EXPECT_EQ(format_number(1.23456), "1.23");
  EXPECT_EQ(format_number(12.3456), "12.3");
  EXPECT_EQ(format_number(123456), "123456");
  EXPECT_EQ(format_number(2), "2");
  EXPECT_EQ(format_number(100), "100");
  EXPECT_EQ(format_number(1.5e-7), "1.50e-07");
  EXPECT_EQ(format_number(NAN), "-");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(131072), "131,072");
  EXPECT_EQ(format_count(1234567890), "1,234,567,890");
}

TEST(Units, ParseBytes) {
  constexpr uint64_t kGib = uint64_t{1} << 30U;
  EXPECT_EQ(parse_bytes("0"), 0U);
  EXPECT_EQ(parse_bytes("17179869184"), 16 * kGib);
  EXPECT_EQ(parse_bytes("16GiB"), 16 * kGib);
  EXPECT_EQ(parse_bytes("16 gib"), 16 * kGib);
  EXPECT_EQ(parse_bytes("24G"), 24 * kGib);
  EXPECT_EQ(parse_bytes("1.5K"), 1536U);
  EXPECT_EQ(parse_bytes("80GB"), 80'000'000'000U);
  EXPECT_EQ(parse_bytes("2kB"), 2000U);
  EXPECT_EQ(parse_bytes("1T"), 1024 * kGib);
  for (const char* wrong : {"", "GiB", "-1", "+1", "1X", "1GiBs", "1 G i x", "nan", "inf", "0x10",
                            "1e400", "9000000T", "16,5G"}) {
    EXPECT_THROW((void)parse_bytes(wrong), UsageError) << wrong;
  }
}

TEST(Units, ParseTokens) {
  EXPECT_EQ(parse_tokens("131072"), 131072U);
  EXPECT_EQ(parse_tokens("128k"), 131072U);
  EXPECT_EQ(parse_tokens("1M"), 1048576U);
  for (const char* wrong : {"", "k", "-1", "1G", "128kB"}) {
    EXPECT_THROW((void)parse_tokens(wrong), UsageError) << wrong;
  }
}

}  // namespace
}  // namespace keyhole::tools
