// Estimates for a card beside what was measured on two cards, and what a plan is told of a card.
#include "tools/commands/plan/speed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

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
  // A factor of 16 bits for K's row and V's row, and for 256 rows a mean of 16 bits for each component.
  s.code_bytes = tokens * kv_heads * (2 * (dim * bits / 8) + 4 + dim / 64);
  s.code_bits = bits;
  s.row_bytes = uint64_t{2} * 2 * dim;
  return s;
}

struct Measured {
  const char* card;
  CardLayer shape;
  double us;  ///< of a layer in a token
};

constexpr uint64_t k32k = 32768, k128k = 131072, k256k = 262144, k1M = 1048576;

template <class Estimate>
void expect_within(double allowed, const std::vector<Measured>& all, const Estimate& estimate) {
  for (const Measured& m : all) {
    EXPECT_NEAR(estimate(find_card(m.card), m.shape) * 1e6, m.us, allowed * m.us)
        << m.card << ", " << m.shape.q_heads << " / " << m.shape.kv_heads << " of "
        << m.shape.head_dim << ", " << m.shape.code_bits << " bits, " << m.shape.kv_bytes
        << " bytes";
  }
}

double of_codes(const Card& card, const CardLayer& s) { return seconds_of_codes(card, s); }
double of_lists(const Card& card, const CardLayer& s) { return seconds_of_lists(card, s); }
double of_full(const Card& card, const CardLayer& s) { return seconds_of_full(card, s); }

/// bench/RESULTS.md, "Codes of all keys and values": the tree in which codes leave the L2 cache first.
TEST(CardSpeed, OfCodesIsWithin5PercentOfWhatWasMeasured) {
  expect_within(0.05,
                {{"H100", shape(32, 8, 128, k128k, 4), 70.0},
                 {"H100", shape(32, 8, 128, k128k, 2), 48.5},
                 {"H100", shape(24, 4, 256, k256k, 4), 130.8},
                 {"H100", shape(24, 4, 256, k256k, 2), 85.8},
                 {"H100", shape(32, 8, 128, k1M, 4), 420},
                 {"H100", shape(32, 8, 128, k1M, 2), 245}},
                of_codes);
}

/// bench/RESULTS.md, "Lists of codes on a device": the same tree, steps that read 12 % of the rows.
TEST(CardSpeed, OfListsIsWithin5PercentOfWhatWasMeasured) {
  expect_within(0.05,
                {{"H100", shape(32, 8, 128, k128k, 4), 43.8},
                 {"H100", shape(32, 8, 128, k128k, 2), 42.4},
                 {"H100", shape(24, 4, 256, k256k, 4), 75.9},
                 {"H100", shape(32, 8, 128, k1M, 4), 126.6}},
                of_lists);
}

/// bench/RESULTS.md, "Codes of all keys and values" (heads of 512), "Kernels of older devices", "Lists of codes on a
/// device" and "Codes in sessions": kernels whose codes did not leave the L2 cache first, which took 4 to 13 % longer
/// on an H100.
TEST(CardSpeed, IsWithin15PercentOfWhatOlderKernelsTook) {
  expect_within(0.15,
                {{"H100", shape(32, 8, 128, k32k, 4), 32.1},
                 {"H100", shape(32, 8, 128, k32k, 2), 26.5},
                 {"H100", shape(24, 4, 256, k32k, 4), 50.1},
                 {"H100", shape(32, 4, 128, k128k, 4), 51.5},
                 {"H100", shape(16, 2, 256, k256k, 4), 96.4},
                 {"H100", shape(16, 2, 256, k256k, 2), 73.5},
                 {"H100", shape(32, 4, 512, k128k, 4), 181.4},
                 {"H200", shape(32, 8, 128, k32k, 4), 32.0},
                 {"H200", shape(32, 8, 128, k32k, 2), 27.6},
                 {"H200", shape(32, 8, 128, k128k, 4), 63.1},
                 {"H200", shape(32, 8, 128, k128k, 2), 45.0},
                 {"H200", shape(32, 8, 128, k1M, 4), 316.9},
                 {"H200", shape(24, 4, 256, k256k, 4), 117.4},
                 {"H200", shape(32, 4, 512, k128k, 4), 182.3},
                 {"H200", shape(32, 4, 512, k128k, 2), 138.5},
                 {"H200", shape(32, 2, 512, k128k, 4), 167.0}},
                of_codes);
  expect_within(0.15,
                {{"H100", shape(32, 8, 128, 2 * k32k, 4), 36.3},
                 {"H100", shape(32, 8, 128, k256k, 4), 63.4},
                 {"H100", shape(24, 4, 256, 2 * k32k, 4), 45.0},
                 {"H100", shape(24, 4, 256, k128k, 4), 57.3},
                 {"H100", shape(32, 4, 128, k128k, 4), 41.7},
                 {"H100", shape(16, 2, 256, k128k, 4), 51.5},
                 {"H100", shape(16, 2, 256, k256k, 4), 65.5}},
                of_lists);
}

/// bench/RESULTS.md, "Kernels of older devices": an H200 that says it is of compute capability 8.6, which has no
/// clusters and 99 KiB of shared memory. Heads of 256 are left out: there its pass for many query rows takes longer
/// than their bytes, which no card of 8.6 has so fast.
TEST(CardSpeed, IsWithin15PercentOfWhatKernelsWithoutClustersTook) {
  const char* card = "141GiB,4800GB,55GB,8.6";
  expect_within(0.15,
                {{card, shape(32, 8, 128, k128k, 4), 66.0},
                 {card, shape(32, 4, 512, k128k, 4), 235.6},
                 {card, shape(32, 4, 512, k128k, 2), 202.6}},
                of_codes);
}

/// bench/RESULTS.md, "Lists of codes on a device": the same H200 as a card of 8.6, and of 12.0.
TEST(CardSpeed, OfListsIsWithin15PercentOfWhatOtherCardsWaysTook) {
  const char* card = "141GiB,4800GB,55GB,8.6";
  expect_within(0.15,
                {{card, shape(32, 8, 128, 2 * k32k, 4), 40.3},
                 {card, shape(32, 8, 128, k128k, 4), 48.1},
                 {card, shape(32, 8, 128, k128k, 2), 46.0},
                 {card, shape(32, 8, 128, k1M, 4), 148.9},
                 {card, shape(24, 4, 256, k256k, 4), 99.7},
                 {card, shape(24, 4, 256, k256k, 2), 86.9},
                 {card, shape(16, 2, 256, k256k, 4), 84.8},
                 {"141GiB,4800GB,55GB,12.0", shape(32, 8, 128, k128k, 4), 45.5},
                 {"141GiB,4800GB,55GB,12.0", shape(24, 4, 256, k256k, 4), 92.7},
                 {"141GiB,4800GB,55GB,12.0", shape(16, 2, 256, k256k, 4), 69.7}},
                of_lists);
}

/// bench/RESULTS.md, "Codes in sessions", "Codes of all keys and values" and "Ranks".
TEST(CardSpeed, OfFullAttentionIsWithin5PercentOfWhatWasMeasured) {
  expect_within(0.05,
                {{"H100", shape(32, 8, 128, k1M, 4), 1471.3},
                 {"H200", shape(32, 8, 128, k1M, 4), 1030},
                 {"H200", shape(32, 8, 128, k128k, 4), 140},
                 {"H200", shape(32, 8, 128, k32k, 4), 43}},
                of_full);
}

/// The same where it is known to have multiprocessors for 16 thread blocks of a KV head.
TEST(CardSpeed, OfListsIsWithin15PercentOfWhatMoreThreadBlocksTook) {
  Card card = find_card("141GiB,4800GB,55GB,8.6");
  const std::pair<CardLayer, double> measured[] = {{shape(32, 8, 128, k128k, 4), 44.7},
                                                   {shape(32, 8, 128, k1M, 4), 122.4},
                                                   {shape(24, 4, 256, k256k, 4), 89.4},
                                                   {shape(16, 2, 256, k256k, 4), 72.3}};
  for (const auto& [layer, measured_us] : measured) {
    card.multiprocessors = 132;
    const double us = 1e6 * seconds_of_lists(card, layer);
    EXPECT_NEAR(us, measured_us, 0.15 * measured_us);
    card.multiprocessors = 16 * layer.kv_heads - 1;
    EXPECT_GT(1e6 * seconds_of_lists(card, layer), us) << "8 score mean keys";
  }
}

/// 99 KiB hold 4 heads of 256 or 8 of 128 with 4 bits, and all 16 with 2.
TEST(CardSpeed, OfListsCountsCodesThatAreReadAgain) {
  const auto passes = [](const char* card, uint32_t group, uint32_t dim, uint32_t bits) {
    return passes_of_lists(find_card(card), shape(2 * group, 2, dim, k128k, bits));
  };
  for (const char* card : {"RTX 4090", "RTX 5090"}) {
    EXPECT_EQ(passes(card, 4, 256, 4), 1U) << card;
    EXPECT_EQ(passes(card, 5, 256, 4), 2U) << card;
    EXPECT_EQ(passes(card, 8, 256, 4), 2U) << card;
    EXPECT_EQ(passes(card, 16, 256, 4), 4U) << card;
    EXPECT_EQ(passes(card, 5, 256, 2), 1U) << card;
    EXPECT_EQ(passes(card, 16, 256, 2), 1U) << card;
    EXPECT_EQ(passes(card, 8, 128, 4), 1U) << card;
    EXPECT_EQ(passes(card, 16, 128, 4), 2U) << card;
    EXPECT_EQ(passes(card, 16, 64, 4), 1U) << card;
  }
  EXPECT_EQ(passes("A100 80GB", 16, 256, 4), 1U);
  EXPECT_EQ(passes("H100", 16, 256, 4), 1U);
}

/// gpu/codes_layout.cpp, chooses_among_lists(): of a cluster 16 heads of 256 take 117 KiB.
TEST(CardSpeed, KnowsHowListsAreChosen) {
  struct Choice {
    const char* card;
    uint32_t q_heads, kv_heads, dim;
    uint32_t wanted;  ///< multiprocessors; 0: clusters choose
    bool has_them;
  };
  for (const Choice& c :
       {Choice{"L4", 32, 8, 128, 64, false}, Choice{"L4", 32, 7, 128, 56, true},
        Choice{"A10", 32, 8, 128, 64, true}, Choice{"24GiB,300GB,25GB,8.9", 32, 8, 128, 64, true},
        Choice{"RTX 5070", 64, 8, 256, 0, true}, Choice{"RTX 5070", 72, 8, 256, 64, false},
        Choice{"RTX 5080", 72, 8, 256, 64, true}, Choice{"RTX 5070", 72, 8, 128, 0, true},
        Choice{"H100", 72, 8, 256, 0, true}, Choice{"H20", 320, 32, 256, 0, true}}) {
    const Card card = find_card(c.card);
    const CardLayer s = shape(c.q_heads, c.kv_heads, c.dim, k128k, 4);
    EXPECT_EQ(multiprocessors_of_lists(card, s), c.wanted) << c.card << ' ' << c.q_heads;
    EXPECT_EQ(is_too_small_for_lists(card, s), !c.has_them) << c.card << ' ' << c.q_heads;
    const CardShares shares;
    EXPECT_EQ(rate_of_mean_keys(card, s),
              c.wanted == 0 ? shares.lists_scored : shares.grid_lists_scored)
        << c.card << ' ' << c.q_heads;
    if (!c.has_them) {
      EXPECT_EQ(seconds_of_lists(card, s), seconds_of_codes(card, s)) << c.card;
    }
  }
}

TEST(CardSpeed, OfFewRowsInListsIsThatOfAllCodes) {
  const Card card = find_card("H100");
  for (const uint64_t tokens : {8192, 16384}) {
    const CardLayer few = shape(32, 8, 128, tokens, 4);
    EXPECT_EQ(seconds_of_lists(card, few), seconds_of_codes(card, few)) << tokens;
  }
}

/// Tokens a second of 14 GiB of weights in 16 bits with 32 layers behind 131,072 tokens: bench/RESULTS.md, "Codes in
/// sessions" and "Models of transformers".
TEST(CardSpeed, OfWholeTokensIsWithin10PercentOfWhatWasMeasured) {
  constexpr double kAllowed = 0.10;
  constexpr uint64_t kWeights = uint64_t{14} << 30U, kTokens = 131072;
  struct Token {
    const char* card;
    uint32_t bits;
    double rate;
  };
  for (const Token& t : {Token{"H200", 4, 172}, Token{"H200", 2, 194}, Token{"H100", 4, 123.4}}) {
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

/// Cores of NVIDIA's data sheets: 128 of a multiprocessor of 8.6 and later, 64 of one of 8.0.
TEST(Cards, KnowTheirMultiprocessors) {
  struct Known {
    const char* card;
    uint32_t cores, of_one;
  };
  for (const Known& k :
       {Known{"3090", 10496, 128}, Known{"4090", 16384, 128}, Known{"4060 Ti 16GB", 4352, 128},
        Known{"L4", 7424, 128}, Known{"A30", 3584, 64}, Known{"A100 40GB", 6912, 64},
        Known{"5090", 21760, 128}, Known{"H100", 16896, 128}}) {
    EXPECT_EQ(find_card(k.card).multiprocessors, k.cores / k.of_one) << k.card;
  }
  EXPECT_EQ(find_card("24GiB,1008GB,25GB,8.9").multiprocessors, 0U) << "not known";
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
