// What the balanced space promises: keys with channels many times as wide as the others, and queries as much narrower
// there, or with a constant offset, which change no softmax, are found and estimated as the plain ones are.
#include "index/scan/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "index/tail/tail_estimate.h"
#include "index/types/factory.h"
#include "tests/index/disguise.h"
#include "tests/index/tails.h"
#include "tests/normal.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kBalancedNearest = 100;
constexpr Disguise kPlain = {1.0F, 0.0F};

/// One head whose every channel j has keys times a_j plus b_j, and queries divided by a_j.
struct ScaledHead {
  /// Always the same data but for the disguise: keys of topics, which do not show in its 6 channels.
  explicit ScaledHead(const Disguise& d) : kv(kHeadRows, kHeadDim, DType::f32) {
    std::mt19937 random(5);
    std::vector<float> keys = attention_keys(kHeadRows, kHeadDim, random);
    std::vector<uint32_t> channels(kHeadDim);
    for (uint32_t j = 0; j < kHeadDim; ++j) channels[j] = j;
    std::shuffle(channels.begin(), channels.end(), random);
    keyhole::test::Normal<float> normal;
    for (size_t c = 0; c < 6; ++c) {
      for (size_t i = channels[c]; i < keys.size(); i += kHeadDim) keys[i] = normal(random);
    }
    const auto row = [&](size_t i, float* out) { std::copy_n(&keys[i * kHeadDim], kHeadDim, out); };
    training = attention_queries(kHeadTraining, kHeadDim, kHeadRows, row, random);
    asked = attention_queries(kHeadGroups * kHeadGroup, kHeadDim, kHeadRows, row, random);
    d.put_on(channels, keys, {&training, &asked});
    kv.add(keys, gaussian(kHeadRows, kHeadDim, random));
  }
  [[nodiscard]] RowsView queries() const {
    return dense_rows(training.data(), kHeadTraining, kHeadDim, DType::f32);
  }
  [[nodiscard]] Balance balance() const {
    return learn_balance(*context().kernels, kv.view(), queries());
  }

  KvRows kv;
  std::vector<float> training, asked;
};

/// Recall@100 of an index of the head; balance null: its own.
double balanced_recall(const std::string& spec, const ScaledHead& head,
                       const Balance* balance = nullptr) {
  const auto index = make_index(spec, kHeadDim, DType::f32, context());
  BuildInput input;
  input.keys = head.kv.keys.view();
  input.queries.rows = head.queries();
  input.balance = balance;
  index->build(input, {});
  double sum = 0.0;
  for (size_t g = 0; g < kHeadGroups; ++g) {
    const std::vector<float> group(&head.asked[g * kHeadGroup * kHeadDim],
                                   &head.asked[g * kHeadGroup * kHeadDim] + kHeadGroup * kHeadDim);
    const Answer answer = search(*index, group, kHeadDim, kBalancedNearest);
    for (size_t h = 0; h < kHeadGroup; ++h) {
      sum += recall(answer.heads[h], head.kv.keys, group.data() + h * kHeadDim, kBalancedNearest);
    }
  }
  return sum / (kHeadGroups * kHeadGroup);
}

struct TailFigure {
  double missing = 0.0;  ///< mean of what the tail takes for unread
  double error = 0.0;    ///< mean |o - o*| / |o*|
};

/// Second-order tails beside the exact best 20 keys of each head.
TailFigure tail_of(const ScaledHead& head, std::vector<float> scale) {
  TailTree tree(context(), kHeadDim, DType::f32, {}, std::move(scale));
  tree.build(head.kv.view(), {});
  TailEstimate estimate;
  estimate.reserve(tree, 1);
  TailFigure figure;
  const float logit_scale = 1.0F / std::sqrt(float{kHeadDim});
  const size_t n = kHeadGroups * kHeadGroup;
  for (size_t i = 0; i < n; ++i) {
    const float* q = &head.asked[i * kHeadDim];
    const auto all = truth(head.kv.keys, q);
    std::vector<uint32_t> rows;
    std::vector<float> scores;
    const double top = all[0].first * logit_scale;
    double seen = 0.0, whole = 0.0;
    std::vector<double> best(kHeadDim, 0.0), exact(kHeadDim, 0.0);
    for (size_t r = 0; r < all.size(); ++r) {
      const double weight = std::exp(all[r].first * logit_scale - top);
      const std::vector<double> v = decoded(head.kv.values.view(), all[r].second);
      whole += weight;
      for (uint32_t j = 0; j < kHeadDim; ++j) exact[j] += weight * v[j];
      if (r >= 20) continue;
      seen += weight;
      for (uint32_t j = 0; j < kHeadDim; ++j) best[j] += weight * v[j];
      rows.push_back(all[r].second);
      scores.push_back(static_cast<float>(all[r].first));
    }
    const auto seen_lse = static_cast<float>(std::log(seen) + top);
    estimate.begin(tree, *context().kernels,
                   {.queries = q,
                    .group = 1,
                    .logits = {.scale = logit_scale, .softcap = 0.0F},
                    .mode = TailMode::second,
                    .seen_lse = &seen_lse},
                   {.rows = rows, .scores = scores.data(), .stride = scores.size()});
    figure.missing += double{estimate.missing(0)} / n;
    std::vector<float> o(kHeadDim);
    float lse = 0.0F;
    estimate.state(head.kv.values.view(), {o.data(), &lse});
    const double tail = std::exp(double{lse} - top);
    double off = 0.0, length = 0.0;
    for (uint32_t j = 0; j < kHeadDim; ++j) {
      const double x = (best[j] + tail * o[j]) / (seen + tail) - exact[j] / whole;
      off += x * x;
      length += exact[j] / whole * (exact[j] / whole);
    }
    figure.error += std::sqrt(off / length) / n;
  }
  return figure;
}

constexpr Disguise kDisguises[] = {{4.0F, 0.0F}, {16.0F, 0.0F}, {64.0F, 0.0F}, {16.0F, 300.0F}};

const std::vector<float> kNoScale(kHeadDim, 1.0F);

class Balanced : public ::testing::TestWithParam<const char*> {};

TEST_P(Balanced, FindsAsMuchWhateverTheChannels) {
  const double plain = balanced_recall(GetParam(), ScaledHead(kPlain));
  EXPECT_GT(plain, 0.3);
  for (const Disguise& d : kDisguises) {
    EXPECT_NEAR(balanced_recall(GetParam(), ScaledHead(d)), plain, 0.1 * plain)
        << "times " << d.factor << " plus " << d.offset;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Balanced,
                         ::testing::Values("flat:codec=int8", "ivf:C=64,probe=8",
                                           "ivf:C=64,probe=8,metric=ip,codec=none",
                                           "hnsw:M=8,efc=60,ef=100",
                                           "roargraph:M=8,ef=32,beam=40,Nq=40", "saap:C=64,probe=8",
                                           "sparq:r=24", "sparq:r=24,codec=int8"),
                         [](const auto& p) {
                           std::string name;
                           for (const char c : std::string(p.param)) {
                             if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
                           }
                           return name;
                         });

TEST(Balanced, WithoutItWideChannelsDecideWhatIsFound) {
  // Else the tests here would pass without it.
  const Balance none = {.key_scale = kNoScale};
  const ScaledHead wide({64.0F, 0.0F});
  for (const char* spec : {"ivf:C=64,probe=8", "saap:C=64,probe=8", "hnsw:M=8,efc=60,ef=100"}) {
    EXPECT_LT(balanced_recall(spec, wide, &none), 0.8 * balanced_recall(spec, wide)) << spec;
  }
  EXPECT_GT(tail_of(ScaledHead({64.0F, 0.0F}), kNoScale).error,
            2.0 * tail_of(ScaledHead(kPlain), kNoScale).error);
}

TEST(Balanced, TailsEstimateAsMuchWhateverTheChannels) {
  const ScaledHead head(kPlain);
  const TailFigure plain = tail_of(head, head.balance().key_scale);
  for (const Disguise& d : kDisguises) {
    SCOPED_TRACE(testing::Message() << "times " << d.factor << " plus " << d.offset);
    const ScaledHead other(d);
    const TailFigure figure = tail_of(other, other.balance().key_scale);
    EXPECT_NEAR(figure.missing, plain.missing, 0.1 * plain.missing);
    EXPECT_NEAR(figure.error, plain.error, 0.1 * plain.error);
  }
}

TEST(Balanced, ScalesUndoTheChannels) {
  const Balance plain = ScaledHead(kPlain).balance();
  const Balance wide = ScaledHead({16.0F, 0.0F}).balance();
  size_t changed = 0;
  for (uint32_t j = 0; j < kHeadDim; ++j) {
    const float ratio = plain.key_scale[j] / wide.key_scale[j];
    EXPECT_TRUE(std::fabs(ratio - 1.0F) < 1e-4F || std::fabs(ratio - 16.0F) < 2e-3F) << ratio;
    changed += ratio > 2.0F ? 1 : 0;
  }
  EXPECT_EQ(changed, 6U);
}

// What rounding a key costs grows with the size of the query that it meets, in this space.
TEST(Balanced, OneQueryLeavesTheNextOnesAsLargeAsMany) {
  std::mt19937 random(9);
  const std::vector<float> keys = gaussian(1024, kHeadDim, random);
  KvRows kv(1024, kHeadDim, DType::f32);
  kv.add(keys, keys);
  const std::vector<float> others = gaussian(64, kHeadDim, random);
  const auto size_of_others = [&](size_t queries) {
    const std::vector<float> known = gaussian(queries, kHeadDim, random);
    const RowsView view = dense_rows(known.data(), queries, kHeadDim, DType::f32);
    const Balance b = learn_balance(*context().kernels, kv.view(), view);
    double squares = 0.0;
    for (size_t i = 0; i < others.size(); ++i) {
      const double x = others[i] / b.key_scale[i % kHeadDim];
      squares += x * x;
    }
    return squares;
  };
  const double of_many = size_of_others(4096);
  for (int i = 0; i < 20; ++i) {
    for (const size_t few : {1, 2, 5}) EXPECT_LT(size_of_others(few), 1.5 * of_many);
  }
}

TEST(Balanced, WithoutQueriesOnlyOutliersAreNarrowed) {
  std::mt19937 random(6);
  std::vector<float> keys = gaussian(1024, kHeadDim, random);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i % kHeadDim == 3) keys[i] *= 64.0F;
    if (i % kHeadDim == 5) keys[i] *= 2.0F;
  }
  KvRows kv(1024, kHeadDim, DType::f32);
  kv.add(keys, keys);
  const Balance b = learn_balance(*context().kernels, kv.view(), {});
  ASSERT_TRUE(b.is_sound());
  for (uint32_t j = 0; j < kHeadDim; ++j) {
    if (j != 3) {
      EXPECT_EQ(b.key_scale[j], b.key_scale[0]);
    }
  }
  EXPECT_NEAR(b.key_scale[3] / b.key_scale[0], 4.0 / 64.0, 0.01);
}

TEST(Balanced, ScalesOfTinyAndHugeValuesHaveAnInverse) {
  std::mt19937 random(6);
  for (const float size : {1e-44F, 1e-39F, 1e-30F, 1.0F, 1e30F, 1e37F}) {
    KvRows kv(kHeadRows, kHeadDim, DType::f32);
    std::vector<float> values = gaussian(kHeadRows, kHeadDim, random);
    for (float& x : values) x *= size;
    kv.add(gaussian(kHeadRows, kHeadDim, random), values);
    const Balance balance = learn_balance(*cpu::kernels_for(cpu::Level::scalar), kv.view(), {});
    EXPECT_TRUE(balance.is_sound()) << size;
    EXPECT_TRUE(std::isnormal(1.0F / balance.value_scale)) << size;
  }
}

// A saved index goes on in the space that it was built in, whatever comes later.
TEST(Balanced, AppendsAfterALoadAreThoseOfTheIndexThatWasSaved) {
  const ScaledHead head({16.0F, 0.0F});
  for (const char* spec : {"ivf:C=32,probe=4,segment=1024", "hnsw:M=6,efc=30,ef=20",
                           "roargraph:M=6,ef=12,beam=20,Nq=20", "saap:C=32,probe=4", "sparq:r=8"}) {
    SCOPED_TRACE(spec);
    const auto index = make_index(spec, kHeadDim, DType::f32, context());
    BuildInput input;
    input.keys = head.kv.keys.view(2000);
    input.queries.rows = head.queries();
    index->build(input, {});
    std::stringstream file;
    index->save(file);
    const auto loaded = make_index(spec, kHeadDim, DType::f32, context());
    loaded->load(file, head.kv.keys.view());
    for (Index* i : {index.get(), loaded.get()}) i->append(head.kv.keys.view(2600), {});
    for (size_t g = 0; g < 4; ++g) {
      const std::vector<float> group(
          &head.asked[g * kHeadGroup * kHeadDim],
          &head.asked[g * kHeadGroup * kHeadDim] + kHeadGroup * kHeadDim);
      EXPECT_EQ(search(*index, group, kHeadDim, 20).heads,
                search(*loaded, group, kHeadDim, 20).heads);
    }
    std::stringstream again, first;
    index->save(first);
    loaded->save(again);
    EXPECT_EQ(first.str().size(), again.str().size());
  }
}

}  // namespace
}  // namespace keyhole::index::test
