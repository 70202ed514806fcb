// sparq against the paper's algorithm in double precision: which components, which keys, what they cost, and
// how much of the softmax they are thought to hold.
#include <set>

#include "index/scan/balance.h"
#include "index/scan/component_blocks.h"
#include "index/scan/component_choice.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

struct Answered {
  Answer answer;
  std::vector<float> coverage;
};

Answered search_with_coverage(const Index& index, const std::vector<float>& queries, uint32_t dim,
                              uint32_t k) {
  const auto group = static_cast<uint32_t>(queries.size() / dim);
  const auto scratch = index.make_scratch(group, k);
  Answered out{search(index, queries, dim, k, *scratch), std::vector<float>(group, -7.0F)};
  std::vector<uint32_t> ids(size_t{group} * k);
  std::vector<float> scores(size_t{group} * k);
  std::vector<uint32_t> counts(group);
  Hits hits{ids.data(), scores.data(), counts.data()};
  hits.coverage = out.coverage.data();
  index.search(queries.data(), group, k, *scratch, hits);
  // To ask for it changes nothing else.
  EXPECT_EQ(hits.keys_scored, out.answer.keys_scored);
  EXPECT_EQ(hits.bytes_read, out.answer.bytes_read);
  for (uint32_t h = 0; h < group; ++h) {
    const uint32_t* begin = ids.data() + size_t{h} * k;
    EXPECT_EQ(std::vector<uint32_t>(begin, begin + counts[h]), out.answer.heads[h].ids);
  }
  return out;
}

// The paper's algorithm for one group, in double.
struct Paper {
  std::set<uint32_t> components;
  std::vector<std::vector<double>> approximate;  // [head][row]
  std::vector<double> logit_scale;               // [head]

  Paper(const Keys& keys, const std::vector<float>& queries, uint32_t r, double scale) {
    const uint32_t dim = keys.dim();
    const size_t group = queries.size() / dim;
    std::vector<std::pair<double, uint32_t>> sums;
    for (uint32_t j = 0; j < dim; ++j) {
      double sum = 0.0;
      for (size_t h = 0; h < group; ++h) sum += std::fabs(queries[h * dim + j]);
      sums.emplace_back(-sum, j);
    }
    std::sort(sums.begin(), sums.end());
    for (uint32_t c = 0; c < std::min(r, dim); ++c) components.insert(sums[c].second);
    for (size_t h = 0; h < group; ++h) {
      std::vector<float> some(dim, 0.0F);
      double all = 0.0;
      double chosen = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        const float q = queries[h * dim + j];
        all += std::fabs(q);
        if (!components.contains(j)) continue;
        some[j] = q;
        chosen += std::fabs(q);
      }
      approximate.emplace_back();
      for (size_t i = 0; i < keys.count(); ++i) {
        approximate.back().push_back(keys.score(i, some.data()));
      }
      // 1 / tau, where tau = sqrt(d |q_r| / |q|) for the usual scale 1 / sqrt(d).
      logit_scale.push_back(scale * std::sqrt(all / chosen));
    }
  }

  [[nodiscard]] double coverage(size_t h, const std::set<uint32_t>& rows, double softcap) const {
    std::vector<double> logits;
    for (const double s : approximate[h]) {
      const double x = s * logit_scale[h];
      logits.push_back(softcap > 0.0 ? softcap * std::tanh(x / softcap) : x);
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double all = 0.0;
    double found = 0.0;
    for (uint32_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - top);
      all += weight;
      if (rows.contains(i)) found += weight;
    }
    return found / all;
  }
};

TEST(Sparq, IsThePapersAlgorithm) {
  for (uint32_t seed = 0; seed < cases(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const DType dtype = key_dtypes()[random() % 3];
    const size_t n = 2 + random() % 900;
    const uint32_t group = keyhole::test::some_group(random());
    const uint32_t k = 1 + random() % (n - 1);
    const uint32_t r = 1 + random() % dim;
    Keys keys(n, dim, dtype);
    keys.put(0, attention_keys(n, dim, random));
    const auto queries = attention_queries(group, dim, keys, random);

    Context ctx = context();
    if (seed % 3 == 1) ctx.logits = {.scale = 0.05F, .softcap = 20.0F};
    const double scale = seed % 3 == 1 ? 0.05 : 1.0 / std::sqrt(dim);
    const double softcap = seed % 3 == 1 ? 20.0 : 0.0;
    const auto index = make_index("sparq:r=" + std::to_string(r), dim, dtype, ctx);
    BuildInput input;
    input.keys = keys.view();
    // The paper's choice is by |q|: channels as they are.
    const Balance as_they_are{std::vector<float>(dim, 1.0F)};
    input.balance = &as_they_are;
    index->build(input, {});
    const auto [answer, coverage] = search_with_coverage(*index, queries, dim, k);

    // What the index reads whole are the rows that it logs.
    const auto scratch = index->make_scratch(group, k);
    Scored scored;
    index->explore({.queries = queries.data(), .group = group, .k = k}, *scratch, scored);
    EXPECT_TRUE(scored.exact);
    const std::set<uint32_t> rows(scored.rows.begin(), scored.rows.end());
    EXPECT_EQ(scored.keys_scored, group * rows.size());

    const Paper paper(keys, queries, r, scale);
    std::set<uint32_t> best;
    for (uint32_t h = 0; h < group; ++h) {
      std::vector<double> sorted = paper.approximate[h];
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      const double kth = sorted[k - 1];
      const double slack = 1e-4 * (1.0 + std::fabs(kth));
      size_t clear = 0;
      for (uint32_t i = 0; i < n; ++i) {
        if (paper.approximate[h][i] <= kth + slack) continue;
        ++clear;
        EXPECT_TRUE(rows.contains(i)) << "head " << h << " row " << i;
      }
      EXPECT_LE(clear, k);
      for (uint32_t i = 0; i < n; ++i) {
        if (paper.approximate[h][i] >= kth - slack) best.insert(i);
      }
      const float* query = queries.data() + size_t{h} * dim;
      expect_sound(answer.heads[h], keys, query);
      ASSERT_EQ(answer.heads[h].ids.size(), k);
      // The best k of all that was read, by exact scores.
      std::vector<double> exact;
      for (const uint32_t row : rows) exact.push_back(keys.score(row, query));
      std::sort(exact.begin(), exact.end(), std::greater<>());
      for (size_t i = 0; i < k; ++i) {
        EXPECT_NEAR(answer.heads[h].scores[i], exact[i], 1e-3 * (1.0 + std::fabs(exact[i])));
      }
      EXPECT_NEAR(coverage[h], paper.coverage(h, rows, softcap), 1e-3) << "head " << h;
    }
    for (const uint32_t row : rows) EXPECT_TRUE(best.contains(row)) << "row " << row;
  }
}

// Equation 11: a search and the attention over what it found transfer S r + 2 k d + 4 d elements of a head, of
// which the search reads all but the values of the k keys (k d), the new token's key and value that are
// written (2 d), and the mean value that is read and written (2 d).
TEST(Sparq, ReadsWhatThePaperTransfers) {
  std::mt19937 random(91);
  for (const uint32_t dim : head_dims()) {
    for (const DType dtype : key_dtypes()) {
      const size_t n = 600;
      Keys keys(n, dim, dtype);
      keys.put(0, attention_keys(n, dim, random));
      const auto queries = attention_queries(1, dim, keys, random);
      for (const uint32_t r : {8U, 32U, 64U}) {
        const uint32_t k = 64;
        const uint64_t elements = n * r + 2 * k * dim + 4 * dim;
        const uint64_t outside = k * dim + 4 * dim;
        const auto index = built("sparq:r=" + std::to_string(r), keys);
        const Answer answer = search(*index, queries, dim, k);
        EXPECT_EQ(answer.bytes_read, (elements - outside) * dtype_size(dtype));
        EXPECT_EQ(answer.keys_scored, k);
        // Components of codes are bytes.
        const auto coded = built("sparq:codec=int8,r=" + std::to_string(r), keys);
        EXPECT_EQ(search(*coded, queries, dim, k).bytes_read, n * r + k * dim * dtype_size(dtype));
      }
    }
  }
}

TEST(Sparq, AGroupReadsKeysOfEachHeadAndComponentsOnce) {
  std::mt19937 random(92);
  Keys keys(3000, 128, DType::f16);
  keys.put(0, attention_keys(3000, 128, random));
  const auto index = built("sparq:r=32", keys);
  const auto queries = attention_queries(4, 128, keys, random);
  const Answer answer = search(*index, queries, 128, 50);
  const uint64_t whole = answer.bytes_read - 3000 * 32 * 2;
  EXPECT_EQ(whole % 256, 0U);
  EXPECT_GE(whole / 256, 50U);
  EXPECT_LE(whole / 256, 200U);
  EXPECT_EQ(answer.keys_scored, 4 * whole / 256);
}

TEST(Sparq, WithAllComponentsCoverageIsTheTrueShare) {
  std::mt19937 random(93);
  Keys keys(2000, 64, DType::f16);
  keys.put(0, attention_keys(2000, 64, random));
  const auto queries = attention_queries(1, 64, keys, random);
  for (const char* spec : {"sparq:r=64", "sparq:r=64,codec=int8"}) {
    const auto [answer, coverage] = search_with_coverage(*built(spec, keys), queries, 64, 30);
    double all = 0.0;
    double found = 0.0;
    for (uint32_t i = 0; i < keys.count(); ++i) {
      const double weight = std::exp(keys.score(i, queries.data()) / 8.0);
      all += weight;
      const auto& ids = answer.heads[0].ids;
      if (std::find(ids.begin(), ids.end(), i) != ids.end()) found += weight;
    }
    // int8: an error of a hundredth in a logit is one of a hundredth in a weight.
    EXPECT_NEAR(coverage[0], found / all, 0.02) << spec;
  }
}

TEST(Sparq, CoverageStaysAShare) {
  std::mt19937 random(94);
  std::vector<float> ordinary = gaussian(700, 64, random);
  std::vector<float> huge = ordinary;
  for (float& x : huge) x *= 2e4F;
  std::vector<float> outlier = ordinary;
  for (size_t j = 0; j < 64; ++j) outlier[123 * 64 + j] *= 1e4F;
  std::vector<float> overflowing = ordinary;
  for (size_t i = 0; i < overflowing.size(); i += 64) overflowing[i] = 3e38F;
  const std::vector<float> zero(ordinary.size(), 0.0F);
  std::vector<float> queries = gaussian(3, 64, random);
  std::fill_n(queries.begin() + 64, 64, 0.0F);  // a head that asks for nothing
  for (const auto& values : {ordinary, huge, outlier, overflowing, zero}) {
    Keys keys(700, 64, DType::f32);
    keys.put(0, values);
    for (const char* spec : {"sparq", "sparq:codec=int8", "sparq:r=1", "sparq:local=9"}) {
      const auto [answer, coverage] = search_with_coverage(*built(spec, keys), queries, 64, 20);
      for (uint32_t h = 0; h < 3; ++h) {
        EXPECT_EQ(answer.heads[h].ids.size(), 20U);
        EXPECT_GE(coverage[h], 0.0F);
        EXPECT_LE(coverage[h], 1.0F);
      }
    }
  }
}

TEST(Sparq, CoverageOfAllIsOneAndOfNothingIsLeftAlone) {
  std::mt19937 random(95);
  Keys keys(50, 64, DType::f16);
  keys.put(0, attention_keys(50, 64, random));
  const auto queries = attention_queries(2, 64, keys, random);
  const auto sparq = built("sparq", keys);
  EXPECT_EQ(search_with_coverage(*sparq, queries, 64, 50).coverage, (std::vector<float>{1, 1}));
  EXPECT_EQ(search_with_coverage(*sparq, queries, 64, 99).coverage, (std::vector<float>{1, 1}));
  sparq->truncate(0);
  EXPECT_EQ(search_with_coverage(*sparq, queries, 64, 5).coverage, (std::vector<float>{-7, -7}));
  for (const char* other : {"flat", "flat:codec=int8", "ivf", "hnsw", "roargraph", "saap"}) {
    EXPECT_EQ(search_with_coverage(*built(other, keys), queries, 64, 5).coverage,
              (std::vector<float>{-7, -7}))
        << other;
  }
}

TEST(Sparq, LocalRowsAreInEveryAnswer) {
  for (uint32_t seed = 0; seed < cases(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const size_t n = 20 + random() % 700;
    const uint32_t k = 1 + random() % 19;
    const uint32_t local = random() % 25;
    Keys keys(n, 64, key_dtypes()[seed % 3]);
    keys.put(0, attention_keys(n, 64, random));
    const auto queries = attention_queries(3, 64, keys, random);
    const std::string spec = "sparq:r=64,local=" + std::to_string(local);
    const Answer answer = search(*built(spec, keys), queries, 64, k);
    const size_t forced = std::min(local, k);
    for (uint32_t h = 0; h < 3; ++h) {
      const Found& found = answer.heads[h];
      const float* query = queries.data() + size_t{h} * 64;
      expect_sound(found, keys, query);
      ASSERT_EQ(found.ids.size(), k);
      std::set<uint32_t> ids(found.ids.begin(), found.ids.end());
      for (size_t row = n - forced; row < n; ++row) {
        EXPECT_EQ(ids.erase(static_cast<uint32_t>(row)), 1U) << "row " << row;
      }
      // The others are the best of those that are left.
      std::vector<double> exact;
      for (size_t i = 0; i < n - forced; ++i) exact.push_back(keys.score(i, query));
      std::sort(exact.begin(), exact.end(), std::greater<>());
      for (const uint32_t id : ids) {
        EXPECT_GE(keys.score(id, query), exact[k - forced - 1] - 1e-3) << "row " << id;
      }
    }
  }
}

TEST(Sparq, BytesGrowByBlocks) {
  std::mt19937 random(96);
  constexpr size_t kBlock = ComponentBlocks::kRows;
  Keys keys(3 * kBlock, 64, DType::f16);
  keys.put(0, gaussian(3 * kBlock, 64, random));
  for (const bool coded : {false, true}) {
    const char* spec = coded ? "sparq:codec=int8" : "sparq";
    const size_t block_bytes = kBlock * 64 * (coded ? 1 : 2);
    const size_t scales = coded ? 2 * 64 * sizeof(float) : 0;
    const auto index = make_index(spec, 64, DType::f16, context());
    EXPECT_EQ(index->bytes(), 0U);
    for (const auto& [rows, blocks] :
         {std::pair<size_t, size_t>{1, 1}, {kBlock, 1}, {kBlock + 1, 2}, {3 * kBlock, 3}}) {
      index->append(keys.view(rows), {});
      EXPECT_EQ(index->bytes(), blocks * block_bytes + scales) << rows;
      EXPECT_EQ(index->bytes(), estimate_bytes(spec, rows, 64, DType::f16));
    }
    index->truncate(kBlock);
    EXPECT_EQ(index->bytes(), block_bytes + scales);
  }
}

TEST(ComponentChoice, TakesTheLargestSumsOfTheGroup) {
  //            head 0: 1 0 -3 2 ...; head 1: 0 -2 0 2 ...
  std::vector<float> queries(2 * 64, 0.0F);
  queries[0] = 1.0F;
  queries[2] = -3.0F;
  queries[3] = 2.0F;
  queries[64 + 1] = -2.0F;
  queries[64 + 3] = 2.0F;
  std::vector<float> scale;
  const auto chosen = [&](uint32_t r) {
    std::vector<uint32_t> components(r);
    choose_components(queries.data(), 2, 64, scale, r, components.data());
    return components;
  };
  EXPECT_EQ(chosen(1), (std::vector<uint32_t>{3}));
  EXPECT_EQ(chosen(3), (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_EQ(chosen(6), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));  // of equal ones the first
  EXPECT_EQ(chosen(64).back(), 63U);
  EXPECT_FLOAT_EQ(softmax_sharpening(queries.data(), 64, scale, chosen(1)), std::sqrt(6.0F / 2.0F));
  EXPECT_FLOAT_EQ(softmax_sharpening(queries.data(), 64, scale, chosen(64)), 1.0F);
  const std::vector<float> zero(64, 0.0F);
  EXPECT_EQ(softmax_sharpening(zero.data(), 64, scale, chosen(3)), 1.0F);
  // The same queries times a scale, in the space of that scale.
  const std::vector<uint32_t> three = chosen(3);
  scale.assign(64, 1.0F);
  scale[0] = 64.0F;
  scale[3] = 0.125F;
  for (size_t i = 0; i < queries.size(); ++i) queries[i] *= scale[i % 64];
  EXPECT_EQ(chosen(3), three);
  EXPECT_EQ(chosen(1), (std::vector<uint32_t>{3}));
  EXPECT_FLOAT_EQ(softmax_sharpening(queries.data(), 64, scale, chosen(1)), std::sqrt(6.0F / 2.0F));
}

// Growth over several chunks, cuts and regrowth: every row of every block holds its key's components.
TEST(ComponentBlocks, HoldTheirKeysWhateverCameBefore) {
  for (uint32_t seed = 0; seed < cases(6); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const DType dtype = key_dtypes()[seed % 3];
    const bool coded = seed % 2 == 1;
    constexpr size_t kCapacity = 20000;  // the first chunk has room for 4096 rows
    Keys keys(kCapacity, 64, dtype);
    ComponentBlocks blocks(*context().kernels, 64, dtype, coded);
    ComponentBlocks::Queries queries;
    queries.group = 2;
    queries.chosen = 3;
    for (int step = 0; step < 14; ++step) {
      const size_t count = keys.count();
      if (step % 5 == 4) {
        keys.poison(random() % (count + 1));
        blocks.truncate(keys.count());
      } else {
        const size_t most = step < 4 ? 300 : 6000;
        // The first rows, from which codes take their range, hold every value that will come.
        const size_t n = std::min(count == 0 ? 300 : 1 + random() % most, kCapacity - count);
        if (n == 0) continue;
        keys.put(count, integers(n, 64, random));
        ComponentBlocks::Growth growth = blocks.grow(keys.view(), nullptr, {});
        EXPECT_EQ(blocks.count(), count);
        blocks.take(growth);
      }
      ASSERT_EQ(blocks.count(), keys.count());
      for (uint32_t c = 0; c < 3; ++c) queries.components[c] = (seed + 7 * c + step) % 64;
      const auto q = gaussian(2, 64, random);
      blocks.encode_queries(q.data(), queries);
      std::vector<float> some(2 * 64, 0.0F);
      for (uint32_t h = 0; h < 2; ++h) {
        for (uint32_t c = 0; c < 3; ++c) {
          const size_t at = h * 64 + queries.components[c];
          some[at] = q[at];
        }
      }
      constexpr size_t kPiece = 512;
      float scores[2 * kPiece];
      for (size_t first = 0; first < blocks.count(); first += kPiece) {
        const size_t n = std::min(kPiece, blocks.count() - first);
        blocks.score(queries, first, n, scores, kPiece);
        for (size_t i = 0; i < n; ++i) {
          for (uint32_t h = 0; h < 2; ++h) {
            const double exact = keys.score(first + i, some.data() + size_t{h} * 64);
            // Codes: half a step of 1/127 of a component's range, for each.
            ASSERT_NEAR(scores[h * kPiece + i] + queries.shift[h], exact, coded ? 0.5 : 1e-4)
                << "row " << first + i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
