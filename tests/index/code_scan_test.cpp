// The pass over codes on every level of the machine against KvCodes, the reference in double sums; and exact rows
// beside codes against attention in double.
#include "index/scan/code_scan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "cpu/attention.h"
#include "tests/index/keys.h"
#include "tests/normal.h"
#include "tests/relative_error.h"
#include "tests/sanitized.h"

namespace keyhole::index {
namespace {

using keyhole::test::relative_error;

const cpu::Kernels& scalar() { return *cpu::kernels_for(cpu::Level::scalar); }

struct ScannedHead {
  ScannedHead(uint32_t d, size_t n, uint64_t seed) : dim(d), rng(seed), keys(n * d), values(n * d) {
    keyhole::test::Normal<float> normal;
    std::vector<float> offset(d);
    for (float& x : offset) x = normal(rng);
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t j = 0; j < d; ++j) {
        keys[i * d + j] = offset[j] + normal(rng);
        values[i * d + j] = 0.5F * offset[j] + normal(rng);
      }
    }
    queries.resize(size_t{kMaxGroup} * d);
    for (float& x : queries) x = normal(rng);
  }
  [[nodiscard]] RowsView view(const std::vector<float>& x) const {
    return dense_rows(x.data(), x.size() / dim, dim, DType::f32);
  }
  [[nodiscard]] KvView kv() const { return {view(keys), view(values)}; }
  [[nodiscard]] KvCodes codes(uint32_t key_bits, uint32_t value_bits) const {
    KvCodes out({dim, key_bits, value_bits}, learn_balance(scalar(), kv(), view(queries)));
    out.extend(scalar(), kv());
    return out;
  }

  uint32_t dim;
  std::mt19937_64 rng;
  std::vector<float> keys, values, queries;
};

struct ScannedState {
  ScannedState(uint32_t group, uint32_t dim) : o(size_t{group} * dim), lse(group) {}
  [[nodiscard]] StateView view() { return {o.data(), lse.data()}; }
  std::vector<float> o, lse;
};

struct ScanAnswer {
  std::vector<uint32_t> rows;
  ScannedState coded, exact;
};

/// All parts one after the other, then the end, as a step does it.
ScanAnswer run(const CodeSearch& s, const KvView& kv, bool backwards = false) {
  const uint32_t dim = s.shape().dim;
  CodeParts parts;
  parts.reserve(s.shape(), s.group, s.wanted);
  const uint32_t n = s.rows.parts();
  for (uint32_t i = 0; i < n; ++i) {
    CodeScan other;
    other.scan(s, backwards ? n - 1 - i : i, {}, parts);
  }
  CodeScan scan;
  const auto rows = scan.choose(s, parts);
  ScanAnswer out{{rows.begin(), rows.end()}, {s.group, dim}, {s.group, dim}};
  cpu::attend_ids(*s.kernels, kv, rows, s.queries, s.group, s.logits, out.exact.view());
  scan.finish(s, out.exact.lse.data(), parts, out.coded.view());
  return out;
}

/// Every level, all shapes: the state by codes alone is the reference's.
TEST(CodeScan, EveryLevelGivesTheReferencesState) {
  std::random_device seed;
  const uint64_t start = seed();
  SCOPED_TRACE("seed " + std::to_string(start));
  uint64_t number = start;
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    ScannedHead head(dim, 6400, number++);  // 25 blocks: two parts
    for (const uint32_t key_bits : {1U, 2U, 4U}) {
      for (const uint32_t value_bits : {0U, 1U, 2U, 4U}) {
        if (number % test::unless_sanitized(7, 29) != 0) {
          ++number;
          continue;
        }
        const KvCodes codes = head.codes(key_bits, value_bits);
        const auto group = keyhole::test::some_group(number++);
        const float softcap = number % 3 == 0 ? 8.0F : 0.0F;
        // Logits of long rows stay as large as those of 256 components: what rounding moves a score by grows with it.
        const LogitParams logits{dim > 256 ? 1.6F / std::sqrt(static_cast<float>(dim)) : 0.1F,
                                 softcap};
        const CodeQueries q = codes.queries(head.queries.data(), group);
        ScannedState truth(group, dim);
        codes.attend(q, logits, {}, truth.view());
        for (const cpu::Level level : cpu::available_levels()) {
          SCOPED_TRACE(std::string(cpu::level_name(level)) + " d " + std::to_string(dim) + " k " +
                       std::to_string(key_bits) + " v " + std::to_string(value_bits) + " g " +
                       std::to_string(group));
          const CodeSearch s{
              cpu::kernels_for(level), {&codes}, head.queries.data(), group, logits, 0};
          const ScanAnswer seen = run(s, head.kv());
          EXPECT_TRUE(seen.rows.empty());
          for (uint32_t h = 0; h < group; ++h) {
            // Queries of 1 and 2 bits are rounded to 8 bits, and so are weights in light blocks. The largest error of
            // many heads is larger.
            const double wide = dim > 256 || group > 16 ? 2.0 : 1.0;
            EXPECT_NEAR(seen.coded.lse[h], truth.lse[h],
                        wide * (key_bits == 4   ? 3e-4
                                : key_bits == 2 ? 6e-3
                                                : 1.2e-2));
            EXPECT_LT(relative_error(seen.coded.o.data() + h * dim, truth.o.data() + h * dim, dim),
                      wide * (key_bits != 4     ? 1.5e-2
                              : value_bits == 4 ? 3e-3
                                                : 6e-3));
          }
        }
      }
    }
  }
}

TEST(CodeScan, EveryLevelGivesTheReferencesScores) {
  for (const uint32_t dim : keyhole::test::kHeadDims) {
    ScannedHead head(dim, 256, dim);
    for (const uint32_t bits : {1U, 2U, 4U}) {
      const KvCodes codes = head.codes(bits, 0);
      const CodeShape& shape = codes.shape();
      for (const uint32_t group : {1U, 5U, 16U}) {
        const CodeQueries q = codes.queries(head.queries.data(), group);
        std::vector<float> truth(group * 256), seen(group * 256), offsets(group);
        codes.score(q, truth.data(), 256);
        // What one part has of the queries.
        CodeQueries rounded = q;
        for (uint32_t h = 0; h < group; ++h) {
          double most = 0.0;
          for (uint32_t j = 0; j < dim; ++j)
            most = std::max(most, std::abs(double{q.rows[h * dim + j]}));
          const double unit = most / 32639.0;
          for (uint32_t j = 0; j < dim; ++j) {
            float& x = rounded.rows[h * dim + j];
            x = static_cast<float>(std::floor((std::nearbyint(x / unit) + 128.0) / 256.0) * 256.0 *
                                   unit);
          }
        }
        std::vector<float> coarse_truth(group * 256);
        codes.score(rounded, coarse_truth.data(), 256);
        std::vector<int8_t> queries(group * cpu::code_query_bytes(shape));
        std::vector<cpu::CodeQueryScales> scales(group);
        for (uint32_t h = 0; h < group; ++h) {
          scales[h] = cpu::prepare_code_query(shape, q.rows.data() + h * dim,
                                              queries.data() + h * cpu::code_query_bytes(shape));
        }
        const std::vector<float> noises(group, 0.0F);
        std::vector<float> maxima(group), floors(group, 0.5F);
        std::vector<uint16_t> above(group * kCodeTiles);
        for (const cpu::Level level : cpu::available_levels()) {
          const cpu::Kernels& kernels = *cpu::kernels_for(level);
          for (const uint32_t parts : {1U, 2U}) {
            const CodeQueries& of = parts == 1 ? rounded : q;
            kernels.score[1]({of.rows.data(), group,
                              dense_rows(codes.block(0) + shape.key_mean_at(), 1, dim, DType::f16),
                              nullptr, 1, offsets.data(), 1});
            kernels.score_codes({shape.key_bits,
                                 shape.key_words(),
                                 codes.block(0),
                                 codes.block(0) + shape.factors_at(),
                                 kCodeTiles,
                                 parts,
                                 queries.data(),
                                 scales.data(),
                                 group,
                                 offsets.data(),
                                 noises.data(),
                                 {1.0F, 0.0F},
                                 seen.data(),
                                 256,
                                 maxima.data(),
                                 floors.data(),
                                 17,
                                 above.data(),
                                 nullptr,
                                 0});
            const std::vector<float>& expected = parts == 1 ? coarse_truth : truth;
            EXPECT_LT(relative_error(seen.data(), expected.data(), seen.size()), 3e-5)
                << cpu::level_name(level) << " " << dim << " x " << bits << " group " << group
                << " parts " << parts;
            for (uint32_t h = 0; h < group; ++h) {
              EXPECT_EQ(maxima[h],
                        *std::max_element(seen.begin() + h * 256, seen.begin() + (h + 1) * 256));
            }
            for (uint32_t i = 0; i < group * 256; ++i) {
              ASSERT_EQ(above[i / 16] >> i % 16 & 1, seen[i] < 0.5F ? 0 : 1) << i;
            }
          }
        }
      }
    }
  }
}

TEST(CodeScan, ChoosesTheHeaviestRowsOfTheGroup) {
  ScannedHead head(64, 6400, 5);
  const KvCodes codes = head.codes(2, 2);
  const uint32_t group = 5;
  const LogitParams logits{0.2F, 0.0F};
  const CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), group, logits, 24};
  const ScanAnswer seen = run(s, head.kv());
  ASSERT_EQ(seen.rows.size(), 24U);
  // The reference's weight of one row: the state of that row alone.
  ScannedState all(group, 64);
  const CodeQueries q = codes.queries(head.queries.data(), group);
  codes.attend(q, logits, {}, all.view());
  std::vector<float> scores(group * 6400);
  codes.score(q, scores.data(), 6400);
  std::vector<std::pair<double, uint32_t>> ranked;
  ScannedState others(group, 64);
  for (uint32_t i = 0; i < 6400; ++i) {
    double best = -1e30;
    for (uint32_t h = 0; h < group; ++h) {
      const std::byte* block = codes.block(i / 256);
      uint16_t f16;
      std::memcpy(&f16, block + codes.shape().factors_at() + i % 256 * 4, 2);
      float f, noise;
      scalar().to_f32[1](reinterpret_cast<const std::byte*>(&f16), &f, 1);
      std::memcpy(&noise, block + codes.shape().noise_at(), 4);
      double norm = 0.0;
      for (uint32_t j = 0; j < 64; ++j) norm += double{q.rows[h * 64 + j]} * q.rows[h * 64 + j];
      const double x = 0.2 * scores[h * 6400 + i] - 0.5 * 0.04 * norm * f * f * noise;
      best = std::max(best, x - all.lse[h]);
    }
    ranked.emplace_back(-best, i);
  }
  std::sort(ranked.begin(), ranked.end());
  size_t found = 0;
  for (size_t i = 0; i < 24; ++i) {
    found += static_cast<size_t>(std::count(seen.rows.begin(), seen.rows.end(), ranked[i].second));
  }
  EXPECT_GE(found, 23U);  // two of nearly the same weight may change places
}

TEST(CodeScan, ChosenRowsLeaveTheState) {
  for (const uint32_t wanted : {1U, 16U, 100U}) {
    ScannedHead head(128, 4864, 7 + wanted);
    const KvCodes codes = head.codes(2, 2);
    const CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), 4,
                       {0.1F, 0.0F},           wanted};
    const ScanAnswer seen = run(s, head.kv());
    std::vector<uint32_t> rows = seen.rows;
    std::sort(rows.begin(), rows.end());
    EXPECT_EQ(std::unique(rows.begin(), rows.end()), rows.end());
    EXPECT_EQ(rows.size(), wanted);
    ScannedState truth(4, 128);
    codes.attend(codes.queries(head.queries.data(), 4), s.logits, rows, truth.view());
    for (uint32_t h = 0; h < 4; ++h) {
      EXPECT_NEAR(seen.coded.lse[h], truth.lse[h], 2e-3);
      EXPECT_LT(relative_error(seen.coded.o.data() + h * 128, truth.o.data() + h * 128, 128), 3e-3);
    }
  }
}

TEST(CodeScan, ARowThatOutweighsAllOthersLeavesThemWhole) {
  // By its code the first row weighs e^30 times all others together; it is short in truth, so that they matter.
  ScannedHead head(64, 2048, 11);
  KvCodes codes = head.codes(4, 2);
  const LogitParams logits{1.0F, 0.0F};
  std::vector<float> scores(2048);
  codes.score(codes.queries(head.queries.data(), 1), scores.data(), 2048);
  const auto heaviest =
      static_cast<uint32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  std::vector<float> keys = head.keys;
  std::fill_n(keys.begin() + heaviest * 64, 64, 0.0F);  // what is read exactly
  CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), 1, logits, 1};
  for (const float scale : {0.5F, 1.0F, 3.0F, 6.0F}) {
    s.logits.scale = scale;
    const ScanAnswer seen = run(s, {head.view(keys), head.view(head.values)});
    ASSERT_EQ(seen.rows.size(), 1U);
    ScannedState truth(1, 64);
    codes.attend(codes.queries(head.queries.data(), 1), s.logits, seen.rows, truth.view());
    const double kept = std::exp(double{truth.lse[0]}) + std::exp(double{seen.exact.lse[0]});
    const double share = std::exp(double{truth.lse[0]}) / kept;
    EXPECT_LT(share * relative_error(seen.coded.o.data(), truth.o.data(), 64), 1e-2) << scale;
    EXPECT_LT(share * std::abs(seen.coded.lse[0] - truth.lse[0]), 1e-2) << scale;
  }
}

TEST(CodeScan, AllRowsExactIsExactAttention) {
  ScannedHead head(80, 512, 13);
  const KvCodes codes = head.codes(1, 1);
  const CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), 3, {0.1F, 0.0F}, 5000};
  const ScanAnswer seen = run(s, head.kv());
  EXPECT_EQ(seen.rows.size(), 512U);
  for (uint32_t h = 0; h < 3; ++h) EXPECT_EQ(seen.coded.lse[h], kMinusInf);
  ScannedState truth(3, 80);
  cpu::attend_range(scalar(), head.kv(), head.queries.data(), 3, s.logits, truth.view());
  for (size_t i = 0; i < truth.o.size(); ++i) EXPECT_NEAR(seen.exact.o[i], truth.o[i], 1e-5);
}

TEST(CodeScan, TheOrderOfPartsChangesNoBit) {
  ScannedHead head(128, 20480, 17);
  const KvCodes codes = head.codes(2, 2);
  const CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), 4, {0.1F, 0.0F}, 16};
  ASSERT_GT(code_cut(codes.blocks()).parts, 2U);
  const ScanAnswer a = run(s, head.kv()), b = run(s, head.kv(), true);
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_EQ(a.coded.o, b.coded.o);
  EXPECT_EQ(a.coded.lse, b.coded.lse);
}

// Whoever asks beside it, an asker gets the bits that it gets alone; also where its codes end behind the part.
TEST(CodeScan, AskersTogetherGetWhatEachGetsAlone) {
  for (uint32_t seed = 1; seed <= test::cases(6); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = random() % 2 == 0 ? 64 : 128;
    ScannedHead head(dim, 13312, seed);  // 52 blocks: three parts
    // A heavy row or two for some of the heads alone: others round the block's weights more coarsely.
    for (uint32_t h = 0; h < 3; ++h) {
      const size_t row = random() % 13312;
      for (uint32_t j = 0; j < dim; ++j) {
        head.keys[row * dim + j] += 2.0F * head.queries[(7 * h) * dim + j];
      }
    }
    const uint32_t bits = 1U << random() % 3;
    const KvCodes codes = head.codes(bits, random() % 4 == 0 ? 0 : bits);
    KvCodes shorter = codes;
    shorter.truncate(12800);  // 50 blocks: their last part is another one
    const uint32_t wanted = random() % 3 == 0 ? 0 : 1 + random() % 40;
    const auto levels = cpu::available_levels();
    CodeSearch s{cpu::kernels_for(levels[random() % levels.size()]),
                 {&codes},
                 nullptr,
                 0,
                 {0.1F, random() % 3 == 0 ? 6.0F : 0.0F},
                 wanted};
    std::vector<uint32_t> groups(2 + random() % 4);
    std::vector<CodeParts> parts(groups.size());
    std::vector<CodeAsker> askers(groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      groups[i] = 1 + random() % 5;
      askers[i] = {head.queries.data() + size_t{s.group} * dim, groups[i], &parts[i]};
      parts[i].reserve(codes.shape(), groups[i], wanted);
      s.group += groups[i];
    }
    CodeScan scan;
    ASSERT_EQ(code_cut(codes.blocks()).parts, 3U);
    for (const uint32_t part : {0U, 1U, 2U}) scan.scan(s, part, {}, askers);
    for (size_t i = 0; i < groups.size(); ++i) {
      SCOPED_TRACE("asker " + std::to_string(i));
      CodeSearch own = s;
      own.queries = askers[i].queries;
      own.group = groups[i];
      const ScanAnswer alone = run(own, head.kv());
      const auto rows = scan.choose(own, parts[i]);
      EXPECT_TRUE(std::equal(rows.begin(), rows.end(), alone.rows.begin(), alone.rows.end()));
      ScannedState coded(groups[i], dim);
      scan.finish(own, alone.exact.lse.data(), parts[i], coded.view());
      EXPECT_EQ(coded.o, alone.coded.o);
      EXPECT_EQ(coded.lse, alone.coded.lse);
      // Its codes are a copy that ends elsewhere: the first two parts together, the last by itself.
      own.rows = {&shorter};
      CodeParts both;
      both.reserve(codes.shape(), groups[i], wanted);
      const CodeAsker with_others[] = {{own.queries, groups[i], &both},
                                       askers[(i + 1) % groups.size()]};
      s.group = with_others[0].group + with_others[1].group;
      for (const uint32_t part : {0U, 1U}) scan.scan(s, part, {}, with_others);
      scan.scan(own, 2, {}, both);
      const ScanAnswer cut = run(own, head.kv());
      const auto chosen = scan.choose(own, both);
      EXPECT_TRUE(std::equal(chosen.begin(), chosen.end(), cut.rows.begin(), cut.rows.end()));
      scan.finish(own, cut.exact.lse.data(), both, coded.view());
      EXPECT_EQ(coded.o, cut.coded.o);
      EXPECT_EQ(coded.lse, cut.coded.lse);
    }
  }
}

TEST(CodeScan, EqualKeysAreOneKey) {
  ScannedHead head(128, 1024, 19);
  for (size_t i = 1; i < 1024; ++i) {
    std::copy_n(head.keys.begin(), 128, head.keys.begin() + static_cast<long>(i * 128));
  }
  const KvCodes codes = head.codes(2, 4);
  for (const uint32_t wanted : {0U, 16U}) {
    const CodeSearch s{&cpu::select_kernels(), {&codes}, head.queries.data(), 2,
                       {0.1F, 0.0F},           wanted};
    ScanAnswer seen = run(s, head.kv());
    const StateView both[] = {seen.exact.view(), seen.coded.view()};
    ScannedState merged(2, 128), truth(2, 128);
    cpu::merge_states(both, 2, 128, merged.view());
    cpu::attend_range(scalar(), head.kv(), head.queries.data(), 2, s.logits, truth.view());
    for (uint32_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(merged.lse[h], truth.lse[h], 1e-2);
      EXPECT_LT(relative_error(merged.o.data() + h * 128, truth.o.data() + h * 128, 128), 0.05);
    }
  }
}

TEST(CodeScan, OfRowsThatWeighAlikeTheSmallerIsChosen) {
  ScannedHead head(64, 6400, 21);
  std::fill(head.keys.begin(), head.keys.end(), 0.0F);
  const KvCodes codes = head.codes(2, 2);
  for (const cpu::Level level : cpu::available_levels()) {
    const CodeSearch s{cpu::kernels_for(level), {&codes}, head.queries.data(), 3, {0.1F, 0.0F}, 16};
    std::vector<uint32_t> first(16);
    std::iota(first.begin(), first.end(), 0U);
    EXPECT_EQ(run(s, head.kv()).rows, first);
  }
}

TEST(CodeScan, ZeroAndHugeRowsStayFinite) {
  ScannedHead head(96, 768, 23);
  std::fill_n(head.keys.begin(), 96, 0.0F);
  std::fill_n(head.keys.begin() + 300 * 96, 96, 6e4F);
  std::fill_n(head.values.begin() + 400 * 96, 96, 6e4F);
  std::fill_n(head.queries.begin(), 96, 0.0F);
  std::fill_n(head.queries.begin() + 96, 96, 1e-40F);
  for (const cpu::Level level : cpu::available_levels()) {
    for (const uint32_t bits : {1U, 2U, 4U}) {
      const KvCodes codes = head.codes(bits, bits);
      const CodeSearch s{
          cpu::kernels_for(level), {&codes}, head.queries.data(), 4, {0.1F, 0.0F}, 8};
      const ScanAnswer seen = run(s, head.kv());
      for (const float x : seen.coded.o) EXPECT_TRUE(std::isfinite(x));
      for (const float x : seen.coded.lse) EXPECT_TRUE(std::isfinite(x) || x == kMinusInf);
      EXPECT_NEAR(seen.coded.lse[0], std::log(760.0), 1e-3);  // q = 0: every row weighs 1
    }
  }
}

}  // namespace
}  // namespace keyhole::index
