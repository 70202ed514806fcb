// Estimates for a card beside what was measured on two cards, and what a plan is told of a card.
#include "tools/commands/plan/speed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tools/commands/plan/cards.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

CardLayer shape(uint32_t q_heads, uint32_t kv_heads, uint32_t dim, uint64_t tokens, uint32_t bits) {
  CardLayer s;
  s.q_heads = q_heads;
  s.kv_heads = kv_heads;
  s.head_dim = dim;
  s.kv_bytes = tokens * kv_heads * dim * 2 * 2;
  // A scale and an offset of 16 bits for K's row and V's row.
  s.code_bytes = tokens * kv_heads * (2 * (dim * bits / 8) + 8);
  s.code_bits = bits;
  s.row_bytes = uint64_t{2} * 2 * dim;
  return s;
}

struct Measured {
  const char* card;
  CardLayer shape;
  double codes, full;  ///< microseconds of a layer in a token; 0: not measured
};

/// bench/RESULTS.md, "Codes in sessions", "Several new tokens" and "Kernels of older devices"; full attention of the same shapes.
TEST(CardSpeed, IsWithin15PercentOfWhatWasMeasured) {
  constexpr double kAllowed = 0.15;
  constexpr uint64_t k128 = 131072, k262 = 262144, k1M = 1048576;
  const Measured all[] = {
      {"H200", shape(32, 8, 128, k128, 4), 63.1, 140},
      {"H200", shape(32, 8, 128, k128, 2), 45.0, 140},
      {"H200", shape(32, 8, 128, k128 / 4, 4), 32.0, 43},
      {"H200", shape(32, 8, 128, k128 / 4, 2), 27.6, 43},
      {"H100", shape(32, 8, 128, k128, 4), 78.5, 194},
      {"H100", shape(32, 8, 128, k128, 2), 55.0, 194},
      {"H100", shape(24, 4, 256, k262, 4), 148.5, 389},
      {"H100", shape(24, 4, 256, k262, 2), 101, 389},
      {"H100", shape(16, 2, 256, k262, 4), 103, 215},
      {"H100", shape(16, 2, 256, k262, 2), 80, 215},
      {"H100", shape(32, 8, 128, k1M, 4), 473, 1480},
      {"H100", shape(32, 8, 128, k1M, 2), 279, 1480},
      {"H100", shape(32, 4, 512, k128, 4), 181.4, 0},
      {"H200", shape(32, 4, 512, k128, 4), 182.3, 0},
      {"H200", shape(32, 4, 512, k128, 2), 138.5, 0},
      {"H200", shape(32, 2, 512, k128, 4), 167.0, 0},
  };
  for (const Measured& m : all) {
    SCOPED_TRACE(std::string(m.card) + ", " + std::to_string(m.shape.kv_heads) + " KV heads of " +
                 std::to_string(m.shape.head_dim) + ", " + std::to_string(m.shape.code_bits) +
                 " bits, " + std::to_string(m.shape.kv_bytes) + " bytes");
    const Card card = find_card(m.card);
    EXPECT_NEAR(seconds_of_codes(card, m.shape) * 1e6, m.codes, kAllowed * m.codes);
    if (m.full == 0.0) continue;
    EXPECT_NEAR(seconds_of_full(card, m.shape) * 1e6, m.full, kAllowed * m.full);
  }
}

/// bench/RESULTS.md, "Lists of codes on a device": with the rule by a head's output, where no head has more read.
TEST(CardSpeed, OfListsIsWithin15PercentOfWhatWasMeasured) {
  struct Lists {
    CardLayer shape;
    double us;
  };
  const Card card = find_card("H100");
  for (const Lists& m :
       {Lists{shape(32, 8, 128, 131072, 4), 50.4}, Lists{shape(32, 8, 128, 262144, 4), 72.9},
        Lists{shape(32, 8, 128, 1048576, 4), 212.5}, Lists{shape(24, 4, 256, 262144, 4), 101.1},
        Lists{shape(24, 4, 256, 131072, 2), 60.3}}) {
    EXPECT_NEAR(seconds_of_lists(card, m.shape) * 1e6, m.us, 0.15 * m.us) << m.us;
  }
  // A step reads all codes where that is faster.
  const CardLayer few = shape(32, 8, 128, 16384, 4);
  EXPECT_EQ(seconds_of_lists(card, few), seconds_of_codes(card, few));
  const CardLayer none = shape(32, 8, 128, 8192, 4);
  EXPECT_EQ(seconds_of_lists(card, none), seconds_of_codes(card, none));
}

/// Tokens a second of 14 GiB of weights in 16 bits with 32 layers behind 131,072 tokens.
TEST(CardSpeed, OfWholeTokensIsWithin15PercentOfWhatWasMeasured) {
  constexpr double kAllowed = 0.15;
  constexpr uint64_t kWeights = uint64_t{14} << 30U, kTokens = 131072;
  struct Token {
    const char* card;
    uint32_t bits;
    double rate;
  };
  for (const Token& t : {Token{"H200", 4, 172}, Token{"H200", 2, 194}, Token{"H100", 4, 127}}) {
    const Card card = find_card(t.card);
    const double token = seconds_of_weights(card, kWeights) +
                         32 * seconds_of_codes(card, shape(32, 8, 128, kTokens, t.bits));
    EXPECT_NEAR(1.0 / token, t.rate, kAllowed * t.rate) << t.card << ' ' << t.bits;
  }
}

TEST(CardSpeed, FollowsMemoryAndBus) {
  const CardLayer s = shape(32, 8, 128, 131072, 4);
  Card card = find_card("RTX 4090");
  const double before = seconds_of_codes(card, s);
  card.bandwidth *= 2;
  EXPECT_LT(seconds_of_codes(card, s), before);
  EXPECT_NEAR(seconds_of_full(card, s), 10e-6 + (seconds_of_full(find_card("4090"), s) - 10e-6) / 2,
              1e-9);
  card = find_card("RTX 4090");
  CardLayer many = s;
  many.exact_rows += 1000;
  // 1000 rows of 512 bytes of 8 KV heads over the bus.
  EXPECT_NEAR(seconds_of_codes(card, many) - before, 1000 * 8 * 512 / card.bus, 1e-9);
}

/// Sink and window are read from the card's memory as full attention reads K and V.
TEST(CardSpeed, CountsTokensThatAreResident) {
  const Card card = find_card("H200");
  CardLayer s = shape(32, 8, 128, 131072, 4);
  const double before = seconds_of_codes(card, s);
  s.resident_bytes = s.kv_bytes / 2;
  EXPECT_NEAR(seconds_of_codes(card, s) - before, (seconds_of_full(card, s) - 10e-6) / 2, 1e-9);
}

TEST(Cards, AreFoundByWhatPeopleCallThem) {
  for (const char* name : {"RTX 4090", "4090", "rtx4090", "NVIDIA GeForce RTX 4090"}) {
    EXPECT_EQ(find_card(name).name, "RTX 4090") << name;
  }
  EXPECT_EQ(find_card("h100").name, "H100");
  EXPECT_EQ(find_card("H100 PCIE").name, "H100 PCIe");
  EXPECT_EQ(find_card("4080").name, "RTX 4080");
  EXPECT_EQ(find_card("4070").memory, uint64_t{12} << 30U);
  EXPECT_EQ(find_card("h20").name, "H20");
}

TEST(Cards, OfOnesOwnAreRead) {
  const Card card = find_card("24GiB,1008GB,25GB");
  EXPECT_EQ(card.memory, uint64_t{24} << 30U);
  EXPECT_EQ(card.bandwidth, 1008e9);
  EXPECT_EQ(card.bus, 25e9);
  EXPECT_EQ(card.capability(), "8.0");
  EXPECT_EQ(find_card("24GiB,1008GB,25GB,12.1").capability(), "12.1");
}

/// What the device says of itself: cudaDevAttrMaxSharedMemoryPerBlockOptin.
TEST(Cards, KnowWhatThreadBlocksMayDo) {
  struct Known {
    const char* card;
    const char* capability;
    bool has_clusters;
    uint64_t kib;
  };
  for (const Known& k : {Known{"3090", "8.6", false, 99}, Known{"4090", "8.9", false, 99},
                         Known{"L4", "8.9", false, 99}, Known{"A30", "8.0", false, 163},
                         Known{"A100 80GB", "8.0", false, 163}, Known{"H100", "9.0", true, 227},
                         Known{"H20", "9.0", true, 227}, Known{"5090", "12.0", true, 99},
                         Known{"180GiB,8000GB,55GB,10.0", "10.0", true, 227}}) {
    const Card card = find_card(k.card);
    EXPECT_EQ(card.capability(), k.capability) << k.card;
    EXPECT_EQ(card.has_clusters(), k.has_clusters) << k.card;
    EXPECT_EQ(card.shared_bytes(), k.kib * 1024) << k.card;
  }
}

std::string refusal(const char* text) {
  try {
    (void)find_card(text);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Cards, ThatAreNotKnownAreRefusedWithThoseThatAre) {
  EXPECT_NE(refusal("Voodoo 2").find("RTX 3090"), std::string::npos);
  EXPECT_NE(refusal("").find("RTX 3090"), std::string::npos);
  const std::string several = refusal("50");
  EXPECT_NE(several.find("like it"), std::string::npos);
  EXPECT_NE(several.find("RTX 5090"), std::string::npos);
  EXPECT_EQ(several.find("RTX 3090"), std::string::npos);
  EXPECT_NE(refusal("24GiB,1008GB").find("2 parts"), std::string::npos);
  EXPECT_NE(refusal("24GiB,0,25GB").find("is 0"), std::string::npos);
  for (const char* capability : {"7.5", "9", "9.", "8.x", "8.12", ""}) {
    const std::string text = refusal(("24GiB,1008GB,25GB," + std::string(capability)).c_str());
    EXPECT_NE(text.find("8.0 on"), std::string::npos) << capability << ": " << text;
  }
  EXPECT_FALSE(refusal("24GiB,fast,25GB").empty());
}

}  // namespace
}  // namespace keyhole::tools
