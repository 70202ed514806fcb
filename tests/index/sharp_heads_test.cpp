// Codes where logits differ by much more than a code's error: the sweep over their spread, with and without a bias of
// the keys, against attention in double; and when a step reads more rows than it was told to.
#include "tests/index/sharp_heads.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <sstream>

#include "cpu/half.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr float kDeviations[] = {0.5F, 1.0F, 2.0F, 5.0F, 8.0F, 20.0F, 60.0F, 500.0F};
constexpr uint32_t kGroupOfTwo = 2;

/// What holds where exact attention has 0.9 of its weight on 16 rows or fewer.
double allowed_error(uint32_t bits) { return bits == 4 ? 0.02 : 0.1; }
/// Elsewhere, what codes without any doubt leave at most.
double allowed_elsewhere(uint32_t bits) { return bits == 4 ? 0.3 : 0.9; }

std::unique_ptr<Index> coded(SharpHead& head, uint32_t bits, const std::string& more) {
  const std::string b = std::to_string(bits);
  auto index = make_index("codes:k=" + b + ",v=" + b + more, head.dim(), DType::f16, context());
  const std::vector<float> train = head.queries(64, 1.0);
  BuildInput input;
  input.keys = head.kv().keys;
  input.values = head.kv().values;
  input.queries.rows = dense_rows(train.data(), 64, head.dim(), DType::f32);
  index->build(input, {});
  return index;
}

/// Chooses among lists where there are some.
SharpAnswer answer(const Index& index, const SharpHead& head, const cpu::Kernels& kernels,
                   const std::vector<float>& q, const LogitParams& logits, uint32_t wanted = 16) {
  const auto group = static_cast<uint32_t>(q.size() / head.dim());
  ListChoice choice;
  CodeSearch s{&kernels, CodedRows::of(index), q.data(), group, logits, wanted, nullptr};
  s.rows.goal.least = 1;
  if (s.rows.lists != nullptr) {
    s.choice = &choice;
    choice.begin(*s.rows.lists, kernels, q.data(), group, logits);
    for (uint32_t p = 0; p < ListChoice::rank_parts(s.rows.lists->lists()); ++p) choice.rank(p);
    choice.choose(s.rows.goal);
  }
  return attend_by_codes(s, head.kv());
}

LogitParams logits_for(uint32_t dim, float softcap) {
  return {1.0F / std::sqrt(static_cast<float>(dim)), softcap};
}

class SharpHeads : public testing::TestWithParam<const char*> {};

TEST_P(SharpHeads, ErrorsStaySmallWhateverTheSpreadOfLogits) {
  const auto levels = cpu::available_levels();
  uint64_t seed = 100;
  size_t sharp = 0, number = 0;
  for (const uint32_t dim : {64U, 128U, 256U}) {
    for (const Bias bias : {Bias::none, Bias::all, Bias::few, Bias::turned}) {
      const float norm = std::vector{1.0F, 30.0F, 1000.0F}[seed % 3];
      const bool uneven = seed % 2 == 0;
      SharpHead head({dim, 2048, bias, norm, uneven}, ++seed);
      for (const uint32_t bits : {2U, 4U}) {
        const auto index = coded(head, bits, GetParam());
        for (const float deviation : kDeviations) {
          const float softcap = number++ % 3 == 0 ? 30.0F : 0.0F;
          const cpu::Level level = levels[number % levels.size()];
          std::ostringstream what;
          what << "seed " << seed << ", d " << dim << ", bias " << bias_name(bias) << ", norm "
               << norm << ", " << bits << " bits, deviation " << deviation << ", soft-cap "
               << softcap << ", " << cpu::level_name(level);
          SCOPED_TRACE(what.str());
          const std::vector<float> q = head.queries(kGroupOfTwo, deviation);
          const LogitParams logits = logits_for(dim, softcap);
          const SharpAnswer seen = answer(*index, head, *cpu::kernels_for(level), q, logits);
          for (uint32_t h = 0; h < kGroupOfTwo; ++h) {
            const SharpTruth truth(head, q.data() + h * dim, logits);
            const double error = truth.error(seen.o.data() + h * dim);
            if (truth.is_sharp()) {
              ++sharp;
              EXPECT_LE(error, allowed_error(bits));
              EXPECT_NEAR(seen.lse[h], truth.lse, 0.1);
            } else if (std::strlen(GetParam()) == 0) {
              EXPECT_LE(error, allowed_elsewhere(bits));
            }
          }
        }
      }
    }
  }
  EXPECT_GT(sharp, 150U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, SharpHeads, testing::Values("", ",lists=64,read=12,miss=0"),
                         [](const auto& test) { return test.index == 0 ? "blocks" : "lists"; });

TEST(CodesInDoubt, HeadsThatAreNotSharpReadWhatTheyWereTold) {
  for (const uint32_t bits : {2U, 4U}) {
    for (const Bias bias : {Bias::none, Bias::all, Bias::few}) {
      SharpHead head({128, 4096, bias, 30.0F, false}, 7);
      const auto index = coded(head, bits, "");
      for (const float deviation : {0.5F, 1.0F, 2.0F}) {
        const SharpAnswer seen = answer(*index, head, cpu::select_kernels(),
                                        head.queries(4, deviation), logits_for(128, 0.0F));
        EXPECT_FALSE(seen.doubt.any) << bits << " " << bias_name(bias) << " " << deviation;
        EXPECT_EQ(seen.exact_rows, 16U);
      }
    }
  }
}

// 2 bits of logits that differ by 20 nats: hundreds of 4,096 rows might weigh most, 16 are not enough.
TEST(CodesInDoubt, SharpHeadsReadAsManyRowsAsTheSpreadDemands) {
  SharpHead head({128, 4096, Bias::none, 1.0F, false}, 8);
  const auto coarse = coded(head, 2, ""), fine = coded(head, 4, "");
  const std::vector<float> q = head.queries(1, 20.0F);
  const LogitParams logits = logits_for(128, 0.0F);
  const SharpAnswer two = answer(*coarse, head, cpu::select_kernels(), q, logits);
  EXPECT_TRUE(two.doubt.any);
  EXPECT_FALSE(two.doubt.all);
  EXPECT_GT(two.exact_rows, 32U);
  EXPECT_LT(two.exact_rows, 512U);
  EXPECT_LT(answer(*fine, head, cpu::select_kernels(), q, logits).exact_rows, two.exact_rows);
  // Who asks for no exact rows gets none.
  EXPECT_FALSE(answer(*coarse, head, cpu::select_kernels(), q, logits, 0).doubt.any);
}

// A quarter of the rows may be the heaviest: codes cannot say which.
TEST(CodesInDoubt, WhereCodesCannotTellAllRowsAreRead) {
  SharpHead head({64, 2048, Bias::none, 1.0F, false}, 9);
  const auto index = coded(head, 1, "");
  const std::vector<float> q = head.queries(2, 100.0F);
  const LogitParams logits = logits_for(64, 0.0F);
  for (const cpu::Level level : cpu::available_levels()) {
    const SharpAnswer seen = answer(*index, head, *cpu::kernels_for(level), q, logits);
    EXPECT_TRUE(seen.doubt.all);
    EXPECT_EQ(seen.exact_rows, 2048U);
    for (uint32_t h = 0; h < 2; ++h) {
      const SharpTruth truth(head, q.data() + h * 64, logits);
      EXPECT_LT(truth.error(seen.o.data() + h * 64), 1e-3);
      EXPECT_NEAR(seen.lse[h], truth.lse, 1e-2);
    }
  }
}

// Tokens of a draft are heads of one group: one of them is in doubt, and none is worse for it.
TEST(CodesInDoubt, OneSharpHeadOfADraft) {
  SharpHead head({128, 4096, Bias::turned, 300.0F, false}, 10);
  for (const uint32_t bits : {2U, 4U}) {
    const auto index = coded(head, bits, "");
    std::vector<float> q = head.queries(7, 1.0F);
    const std::vector<float> sharp = head.queries(1, 80.0F);
    q.insert(q.begin() + 3 * 128, sharp.begin(), sharp.end());
    const LogitParams logits = logits_for(128, 0.0F);
    const SharpAnswer seen = answer(*index, head, cpu::select_kernels(), q, logits);
    for (uint32_t h = 0; h < 8; ++h) {
      const SharpTruth truth(head, q.data() + h * 128, logits);
      EXPECT_LT(truth.error(seen.o.data() + h * 128),
                h == 3 ? allowed_error(bits) : allowed_elsewhere(bits));
    }
  }
}

// A query that no integers stand for has none, in place of numbers that are not defined.
TEST(CodesInDoubt, QueriesThatAreNoNumbersHaveNoCodes) {
  const CodeShape shape{96, 2, 2};
  std::vector<int8_t> parts(cpu::code_query_bytes(shape), 1);
  const std::vector<float> nan(96, NAN);
  const cpu::CodeQueryScales scales = cpu::prepare_code_query(shape, nan.data(), parts.data());
  EXPECT_EQ(scales.of[0].scale, 0.0F);
  EXPECT_TRUE(std::all_of(parts.begin(), parts.end(), [](int8_t x) { return x == 0; }));
}

// Queries of any size: from 1e15 on, where the balance has divided them, logits by code are no numbers in fp32, and all
// rows are read exactly; of queries near 0 all rows weigh alike.
TEST(CodesInDoubt, QueriesOfAnySizeAreAnswered) {
  const auto levels = cpu::available_levels();
  size_t number = 0;
  for (const uint32_t bits : {1U, 2U, 4U}) {
    for (const char* more : {"", ",lists=64"}) {
      // Keys of norm 1000: the balance makes them small, and queries large.
      SharpHead head({96, 512, Bias::none, 1000.0F, false}, bits);
      const auto index = coded(head, bits, more);
      for (const float size : {1e-45F, 1e-38F, 1e-30F, 1e10F, 1e18F, 1e30F, 1e36F, 3e38F}) {
        std::vector<float> q = head.queries(2, 1.0F);
        const float largest = std::abs(*std::max_element(
            q.begin(), q.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
        for (float& x : q) x = x / largest * size;
        // Infinities of both signs beside each other in the balance, which the rotation would make NaN.
        if (size == 3e38F) q[1] = -(q[0] = size);
        for (const float softcap : {0.0F, 30.0F}) {
          for (const uint32_t wanted : {16U, 0U}) {
            const cpu::Level level = levels[number++ % levels.size()];
            SCOPED_TRACE(std::to_string(bits) + " bits" + more + ", size " + std::to_string(size) +
                         ", soft-cap " + std::to_string(softcap) + ", rows " +
                         std::to_string(wanted) + ", " + cpu::level_name(level));
            const LogitParams logits = logits_for(96, softcap);
            const SharpAnswer seen =
                answer(*index, head, *cpu::kernels_for(level), q, logits, wanted);
            if (size > 1e15F) {
              EXPECT_TRUE(seen.doubt.all);
            }
            for (uint32_t h = 0; h < 2; ++h) {
              const SharpTruth truth(head, q.data() + h * 96, logits);
              ASSERT_TRUE(std::isfinite(seen.lse[h]));
              for (uint32_t j = 0; j < 96; ++j) ASSERT_TRUE(std::isfinite(seen.o[h * 96 + j]));
              if (wanted == 0 && size <= 1e15F && size > 1.0F) continue;  // codes alone
              // What is beyond fp32 is the largest number.
              constexpr double kMost = std::numeric_limits<float>::max();
              const double lse = std::clamp(truth.lse, -kMost, kMost);
              EXPECT_NEAR(seen.lse[h], lse, 0.1 + 1e-4 * std::abs(lse));
              if (!truth.is_sharp() && size <= 1e15F) continue;
              EXPECT_LE(truth.error(seen.o.data() + h * 96), bits == 4 ? 0.02 : 0.1);
            }
          }
        }
      }
    }
  }
}

// A search for tokens takes such queries in the order of their scores.
TEST(CodesInDoubt, SearchesForQueriesOfAnySizeFindTheBest) {
  for (const char* more : {"", ",lists=64"}) {
    SharpHead head({96, 2048, Bias::none, 1000.0F, false}, 5);
    const auto index = coded(head, 4, more);
    const std::vector<float> q = head.queries(2, 1.0F);
    std::vector<float> huge = q;
    const float largest = std::abs(*std::max_element(
        q.begin(), q.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    for (float& x : huge) x = x / largest * 1e35F;
    const Answer usual = search(*index, q, 96, 10), seen = search(*index, huge, 96, 10);
    for (size_t h = 0; h < 2; ++h) EXPECT_EQ(seen.heads[h].ids, usual.heads[h].ids);
  }
}

// A device whose rows the host reads asks the same question, counts, and reads no more. What is counted is not silent:
// every sharp head whose answer without more rows is beyond the limits is in doubt.
TEST(CodesInDoubt, EverySharpHeadThatNeedsMoreRowsIsCounted) {
  size_t beyond = 0, sharp = 0;
  for (const Bias bias : {Bias::none, Bias::turned}) {
    for (const bool uneven : {false, true}) {
      SharpHead head({64, 2048, bias, 30.0F, uneven}, 77);
      for (const uint32_t bits : {2U, 4U}) {
        const auto index = coded(head, bits, "");
        for (const float deviation : {1.0F, 5.0F, 8.0F, 12.0F, 20.0F}) {
          for (const float softcap : {0.0F, 30.0F}) {
            const std::vector<float> q = head.queries(1, deviation);
            const LogitParams logits = logits_for(64, softcap);
            const SharpTruth truth(head, q.data(), logits);
            if (!truth.is_sharp()) continue;
            const cpu::Kernels& kernels = cpu::select_kernels();
            const CodeSearch s{&kernels, CodedRows::of(*index), q.data(), 1, logits, 4, nullptr};
            const SharpAnswer told = attend_by_codes(s, head.kv(), false);
            const bool is_beyond = truth.error(told.o.data()) > allowed_error(bits) ||
                                   std::abs(told.lse[0] - truth.lse) > 0.1;
            ++sharp;
            beyond += is_beyond ? 1 : 0;
            EXPECT_TRUE(!is_beyond || attend_by_codes(s, head.kv()).doubt.any)
                << bits << " bits, bias " << bias_name(bias) << ", deviation " << deviation
                << ", soft-cap " << softcap;
          }
        }
      }
    }
  }
  EXPECT_GT(beyond, 5U);
  EXPECT_GT(sharp, beyond);
}

// Where lists stand for rows by their means: a mean at a soft-cap says more than half of its rows weigh, and the one
// row that outweighs all others may lie in a list whose logits spread little. Heads of such keys, of which some were
// missed.
TEST(CodesInDoubt, ListsHideNoRowThatOutweighsAllOthers) {
  struct Case {
    uint32_t dim, bits;
    Bias bias;
    float deviation, softcap;
    uint64_t seeds[2];
  };
  constexpr Case kCases[] = {{64, 2, Bias::none, 12.0F, 30.0F, {1, 2}},
                             {64, 2, Bias::turned, 20.0F, 30.0F, {5, 7}},
                             {256, 2, Bias::none, 8.0F, 30.0F, {1, 2}},
                             {64, 4, Bias::turned, 1.0F, 0.0F, {14, 35}}};
  for (const Case& c : kCases) {
    for (const uint64_t seed : c.seeds) {
      SharpHead head({c.dim, 2048, c.bias, 30.0F, true}, seed);
      const auto index = coded(head, c.bits, ",lists=64,read=12,miss=0");
      const std::vector<float> q = head.queries(8, c.deviation);
      const LogitParams logits = logits_for(c.dim, c.softcap);
      const std::string what = "d " + std::to_string(c.dim) + ", deviation " +
                               std::to_string(c.deviation) + ", seed " + std::to_string(seed);
      size_t sharp = 0;
      for (uint32_t h = 0; h < 8; ++h) {
        const std::vector<float> one(q.begin() + h * c.dim, q.begin() + (h + 1) * c.dim);
        const SharpTruth truth(head, one.data(), logits);
        if (!truth.is_sharp()) continue;
        ++sharp;
        const SharpAnswer seen = answer(*index, head, cpu::select_kernels(), one, logits);
        EXPECT_LE(truth.error(seen.o.data()), allowed_error(c.bits)) << what << ", query " << h;
        EXPECT_NEAR(seen.lse[0], truth.lse, 0.1) << what << ", query " << h;
      }
      EXPECT_GT(sharp, 0U) << what;
    }
  }
}

// A sink: most weight lies on a row whose value is short, so that the output is short, and rows that weigh little count
// for as much as their values are longer. Before doubt knew the output's length, 33 of these heads were beyond the
// limits.
TEST(CodesInDoubt, ShortValuesOfHeavyRowsLetLightRowsCount) {
  size_t sharp = 0;
  for (const float length : {0.02F, 0.08F, 1.0F}) {
    SharpShape shape{64, 2048, Bias::none, 8.0F, false};
    shape.first_value = length;
    SharpHead head(shape, 31);
    for (const uint32_t bits : {2U, 4U}) {
      const auto index = coded(head, bits, "");
      const LogitParams logits = logits_for(64, 0.0F);
      for (const double deviation : {0.5, 1.0, 2.0, 3.0}) {
        for (const double weight : {0.9, 0.95, 0.99, 0.999}) {
          for (int time = 0; time < 3; ++time) {
            const std::vector<float> q = head.query_of_first(deviation, weight);
            const SharpTruth truth(head, q.data(), logits);
            if (!truth.is_sharp()) continue;
            ++sharp;
            const SharpAnswer seen = answer(*index, head, cpu::select_kernels(), q, logits);
            EXPECT_LE(truth.error(seen.o.data()), allowed_error(bits))
                << bits << " bits, value " << length << ", deviation " << deviation << ", weight "
                << weight;
          }
        }
      }
    }
  }
  EXPECT_GT(sharp, 200U);
}

// The correction for a code's noise is bounded at every level, before and behind a soft-cap.
TEST(CodesInDoubt, TheNoiseTakesNoMoreThanItsBound) {
  ASSERT_EQ(kMostNoiseBias, 1.0F);
  for (const uint32_t bits : {1U, 2U, 4U}) {
    SharpHead head({96, 256, Bias::none, 10.0F, true}, bits);
    const auto index = coded(head, bits, "");
    const KvCodes& codes = *index->codes();
    const CodeShape& shape = codes.shape();
    const CodeRun run = codes.run(0);
    constexpr uint32_t kGroup = 5;
    const std::vector<float> q = codes.queries(head.queries(kGroup, 3.0F).data(), kGroup).rows;
    std::vector<int8_t> parts(kGroup * cpu::code_query_bytes(shape));
    std::vector<cpu::CodeQueryScales> scales(kGroup);
    for (uint32_t h = 0; h < kGroup; ++h) {
      scales[h] = cpu::prepare_code_query(shape, q.data() + h * 96,
                                          parts.data() + h * cpu::code_query_bytes(shape));
    }
    for (const float softcap : {0.0F, 20.0F}) {
      for (const cpu::Level level : cpu::available_levels()) {
        const std::vector<float> none(kGroup, 0.0F), offsets(kGroup, 0.5F);
        const std::vector<float> noises = {1e-3F, 1.0F, 30.0F, 1e6F, 1e12F};
        std::vector<float> plain(kGroup * 256), seen(kGroup * 256), maxima(kGroup);
        float widest = -1.0F;
        cpu::ScoreCodesArgs args{shape.key_bits,
                                 shape.key_words(),
                                 run.keys,
                                 run.factors,
                                 16,
                                 2,
                                 parts.data(),
                                 scales.data(),
                                 kGroup,
                                 offsets.data(),
                                 none.data(),
                                 logits_for(96, softcap),
                                 plain.data(),
                                 256,
                                 maxima.data(),
                                 nullptr,
                                 0,
                                 nullptr,
                                 nullptr,
                                 0};
        cpu::kernels_for(level)->score_codes(args);
        args.noises = noises.data();
        args.scores = seen.data();
        args.widest = &widest;
        cpu::kernels_for(level)->score_codes(args);
        double most = 0.0;
        for (uint32_t i = 0; i < 256; ++i) {
          const double f = double{CodeRunReader(shape, run).key_factor(i)};
          most = std::max(most, f);
          for (uint32_t h = 0; h < kGroup; ++h) {
            const double share =
                softcap > 0.0F ? double{plain[h * 256 + i]} / double{softcap} : 0.0;
            const double slope = (1.0 - share * share) * double{args.logits.scale};
            const double bias = std::min(0.5 * slope * slope * f * f * double{noises[h]}, 1.0);
            const double rounding = 1e-5 * (100.0 + std::abs(double{plain[h * 256 + i]}));
            ASSERT_NEAR(plain[h * 256 + i] - seen[h * 256 + i], bias, rounding)
                << cpu::level_name(level) << " " << bits << " " << softcap << " " << noises[h];
          }
        }
        EXPECT_EQ(widest, static_cast<float>(most));
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
