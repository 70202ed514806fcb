// What each way to attend takes of a search, against brute force in double: every index type, random shapes.
#include "runtime/step/selection.h"

#include <set>

#include "index/types/factory.h"
#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

using test::Numbers;

constexpr uint32_t kDim = 64;
constexpr const char* kSpecs[] = {"flat",
                                  "ivf:C=20,probe=5,segment=200,iters=2",
                                  "hnsw:M=8,ef=30,efc=40",
                                  "flat:codec=int8",
                                  "roargraph:M=6,ef=8,codec=none",
                                  "roargraph:M=6,ef=8",
                                  "sparq:r=8"};

RowsView view_of(const std::vector<float>& rows) {
  return dense_rows(rows.data(), rows.size() / kDim, kDim, DType::f32);
}

/// Scores that a codec would give: off by up to 2 %, and said to be so.
class Coarse final : public index::Index {
 public:
  explicit Coarse(std::unique_ptr<index::Index> inner) : inner_(std::move(inner)) {}
  using Index::search;
  void build(const index::BuildInput& input, const index::Progress& p) override {
    inner_->build(input, p);
  }
  [[nodiscard]] std::unique_ptr<index::Addition> prepare_append(
      const RowsView& keys, const index::Progress& p) const override {
    return inner_->prepare_append(keys, p);
  }
  std::unique_ptr<index::Addition> commit_append(std::unique_ptr<index::Addition> a) override {
    return inner_->commit_append(std::move(a));
  }
  void truncate(size_t n) override { inner_->truncate(n); }
  [[nodiscard]] size_t count() const override { return inner_->count(); }
  [[nodiscard]] uint32_t dim() const override { return inner_->dim(); }
  [[nodiscard]] std::unique_ptr<index::Scratch> make_scratch(uint32_t g,
                                                             uint32_t k) const override {
    return inner_->make_scratch(g, k);
  }
  void reserve_explore(index::Scratch& s) const override { inner_->reserve_explore(s); }
  void search(const index::SearchArgs& a, index::Scratch& s, index::Hits& h) const override {
    position = a.position;
    inner_->search(a, s, h);
  }
  void explore(const index::SearchArgs& a, index::Scratch& s,
               index::Scored& scored) const override {
    position = a.position;
    inner_->explore(a, s, scored);
    for (uint32_t h = 0; h < a.group; ++h) {
      for (size_t i = 0; i < scored.rows.size(); ++i) {
        scored.scores[h * scored.stride + i] *= i % 2 == 0 ? 0.98F : 1.02F;
      }
    }
    scored.exact = false;
  }
  [[nodiscard]] const index::TypeDecl& type() const override { return inner_->type(); }
  [[nodiscard]] index::Sharing sharing() const override { return inner_->sharing(); }
  [[nodiscard]] bool same_in_parts() const override { return inner_->same_in_parts(); }
  [[nodiscard]] index::IndexInfo info() const override { return inner_->info(); }
  void set_search_params(std::string_view spec) override { inner_->set_search_params(spec); }
  [[nodiscard]] size_t bytes() const override { return inner_->bytes(); }
  [[nodiscard]] size_t bytes_of_others() const override { return inner_->bytes_of_others(); }
  [[nodiscard]] std::unique_ptr<Index> share(const RowsView& keys) const override {
    return inner_->share(keys);
  }
  void save(std::ostream& out) const override { inner_->save(out); }
  void load(std::istream& in, const RowsView& keys) override { inner_->load(in, keys); }

  mutable uint32_t position = 0;  ///< of the last search

 private:
  std::unique_ptr<index::Index> inner_;
};

struct Case {
  Case(const char* spec, uint64_t seed, bool coarse = false) : numbers(seed) {
    n = 1 + numbers.below(700);
    group = test::some_group(numbers.below(1000));
    k = 1 + numbers.below(20);
    logits = {0.02F * static_cast<float>(1 + numbers.below(8)), seed % 3 == 0 ? 8.0F : 0.0F};
    keys = numbers.many(size_t{n} * kDim);
    values = numbers.many(size_t{n} * kDim);
    queries = numbers.many(size_t{group} * kDim);
    index = index::make_index(spec, kDim, DType::f32, {&kernels, &pool});
    if (coarse) index = std::make_unique<Coarse>(std::move(index));
    index::BuildInput input;
    input.keys = view_of(keys);
    index->build(input, nullptr);
  }

  [[nodiscard]] double logit(uint32_t h, uint32_t row) const {
    const double sum =
        keyhole::test::exact_dot(&queries[h * kDim], &keys[size_t{row} * kDim], kDim);
    return softcapped(logits.scale * sum);
  }
  [[nodiscard]] double softcapped(double x) const {
    return logits.softcap > 0 ? logits.softcap * std::tanh(x / logits.softcap) : x;
  }

  [[nodiscard]] index::Scored explore(index::Scratch& scratch) const {
    index::Scored scored;
    index->explore({.queries = queries.data(), .group = group, .k = k}, scratch, scored);
    return scored;
  }

  [[nodiscard]] GroupQuery query(uint32_t position = index::kUnknownPosition) const {
    return {.kernels = &kernels,
            .kv = {view_of(keys), view_of(values)},
            .queries = queries.data(),
            .group = group,
            .logits = logits,
            .position = position};
  }
  [[nodiscard]] SearchStates out() { return {{o.data(), lse.data()}}; }

  StepCost attend(const SearchParams& params, uint32_t position = index::kUnknownPosition) {
    selection.reserve(*index, group, k, params.attend);
    o.assign(size_t{group} * kDim, NAN);
    lse.assign(group, NAN);
    return selection.search_and_attend(*index, query(position), params, {}, out());
  }

  /// The state must be exactly that of the rows that Selection says it attended.
  void expect_state() const {
    const auto rows = selection.attended();
    for (uint32_t h = 0; h < group; ++h) {
      double top = -INFINITY;
      double sum = 0.0;
      for (const uint32_t row : rows) top = std::max(top, logit(h, row));
      for (const uint32_t row : rows) sum += std::exp(logit(h, row) - top);
      if (rows.empty()) {
        EXPECT_EQ(lse[h], kMinusInf);
      } else {
        ASSERT_NEAR(lse[h], top + std::log(sum), 2e-4);
      }
      for (uint32_t j = 0; j < kDim; ++j) {
        double expected = 0.0;
        for (const uint32_t row : rows) {
          expected += std::exp(logit(h, row) - top) / sum * values[size_t{row} * kDim + j];
        }
        ASSERT_NEAR(o[h * kDim + j], expected, 1e-3);
      }
    }
  }

  const cpu::Kernels& kernels = cpu::select_kernels();
  cpu::Pool pool{cpu::PoolConfig{1, false, 0}};
  Numbers numbers;
  uint32_t n = 0, group = 0, k = 0;
  LogitParams logits;
  std::vector<float> keys, values, queries, o, lse;
  std::unique_ptr<index::Index> index;
  Selection selection;
};

std::set<uint32_t> as_set(std::span<const uint32_t> rows) { return {rows.begin(), rows.end()}; }

/// Of an attended row V, and K where the scores at hand are not those of the stored keys.
size_t row_bytes(const index::Scored& scored) {
  return (scored.exact ? 1 : 2) * kDim * sizeof(float);
}

class SelectionModes : public ::testing::TestWithParam<const char*> {};

TEST_P(SelectionModes, ScoredAttendsWhatTheSearchScoredAndReadsValuesOnly) {
  for (uint64_t seed = 0; seed < test::few_cases(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(GetParam(), seed);
    const auto cost = c.attend({.k = c.k, .attend = KEYHOLE_ATTEND_SCORED});
    const auto scratch = c.index->make_scratch(c.group, c.k);
    const index::Scored scored = c.explore(*scratch);
    EXPECT_EQ(as_set(c.selection.attended()), as_set(scored.rows));
    EXPECT_EQ(cost.keys_attended, c.group * scored.rows.size());
    EXPECT_EQ(cost.keys_scored, scored.keys_scored);
    EXPECT_EQ(cost.bytes_read, scored.bytes_read + scored.rows.size() * row_bytes(scored));
    c.expect_state();
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(SelectionModes, WeightAttendsTheScoredKeysAboveIt) {
  size_t kept = 0;
  size_t dropped = 0;
  for (uint64_t seed = 0; seed < test::few_cases(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(GetParam(), seed);
    const float weights[] = {1e-6F, 1e-4F, 1e-3F, 1e-2F, 0.1F, 0.9F};
    const float weight = weights[seed % 6];
    const auto cost = c.attend({.k = c.k, .attend = KEYHOLE_ATTEND_WEIGHT, .min_weight = weight});
    const auto scratch = c.index->make_scratch(c.group, c.k);
    const index::Scored scored = c.explore(*scratch);
    const auto seen = as_set(c.selection.attended());
    EXPECT_EQ(seen.size(), c.selection.attended().size());
    // The filter works on fp32 logits: within 0.1 % of the bound either is right. int8 codes move a logit
    // by a few hundredths.
    const double slack = scored.exact ? 1.001 : 1.5;
    std::vector<double> largest(scored.rows.size(), 0.0);
    std::set<uint32_t> heaviest;  // of a head that has none above the bound, about
    for (uint32_t h = 0; h < c.group; ++h) {
      double sum = 0.0, most = 0.0, most_seen = 0.0;
      for (const uint32_t row : scored.rows) sum += std::exp(c.logit(h, row));
      std::vector<double> shares;
      for (const uint32_t row : scored.rows) {
        shares.push_back(std::exp(c.logit(h, row)) / sum);
        most = std::max(most, shares.back());
        if (seen.contains(row)) most_seen = std::max(most_seen, shares.back());
      }
      EXPECT_GE(most_seen * slack, most) << "the heaviest key of head " << h;
      for (size_t i = 0; i < shares.size(); ++i) {
        largest[i] = std::max(largest[i], shares[i]);
        if (most < weight * slack && shares[i] * slack >= most) heaviest.insert(scored.rows[i]);
      }
    }
    for (size_t i = 0; i < scored.rows.size(); ++i) {
      if (largest[i] > slack * weight) {
        EXPECT_TRUE(seen.contains(scored.rows[i]));
      } else if (largest[i] < weight / slack && !heaviest.contains(scored.rows[i])) {
        EXPECT_FALSE(seen.contains(scored.rows[i]));
      }
    }
    EXPECT_LE(seen.size(), scored.rows.size());
    EXPECT_EQ(cost.keys_attended, c.group * seen.size());
    EXPECT_EQ(cost.bytes_read, scored.bytes_read + seen.size() * row_bytes(scored));
    kept += seen.size();
    dropped += scored.rows.size() - seen.size();
    c.expect_state();
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(kept, 0U);
  EXPECT_GT(dropped, 0U);
}

// Scores of another precision say which rows, never how much: the state is that of the stored keys.
TEST_P(SelectionModes, ApproximateScoresAreNotAttendedBy) {
  for (uint64_t seed = 0; seed < test::few_cases(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const keyhole_attend_mode mode : {KEYHOLE_ATTEND_SCORED, KEYHOLE_ATTEND_WEIGHT}) {
      Case c(GetParam(), seed, true);
      const auto cost = c.attend({.k = c.k, .attend = mode, .min_weight = 1e-3F});
      const auto scratch = c.index->make_scratch(c.group, c.k);
      const index::Scored scored = c.explore(*scratch);
      EXPECT_EQ(cost.bytes_read,
                scored.bytes_read + c.selection.attended().size() * 2 * kDim * sizeof(float));
      c.expect_state();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Parts are searched one after the other here, in any order, each with the scratch of the one before.
TEST_P(SelectionModes, PartsTogetherAttendWhatOneSearchAttends) {
  for (uint64_t seed = 0; seed < test::few_cases(40); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case c(GetParam(), seed);
    const auto whole = c.attend({.k = c.k});
    const std::vector<float> o = c.o;
    const std::vector<float> lse = c.lse;
    const uint32_t parts = 1 + c.numbers.below(kMaxParts);
    struct Found {
      std::vector<uint32_t> ids, counts;
      std::vector<float> scores;
    };
    std::vector<Found> found(parts);
    std::vector<index::Hits> hits(parts);
    uint64_t scored = 0;
    for (uint32_t i = 0; i < parts; ++i) {
      const uint32_t p = (i + static_cast<uint32_t>(seed)) % parts;
      const index::Hits& one =
          c.selection.search(*c.index, c.query(), {.k = c.k}, {.number = p, .count = parts});
      Found& f = found[p];
      f.ids.assign(one.ids, one.ids + size_t{c.group} * c.k);
      f.scores.assign(one.scores, one.scores + size_t{c.group} * c.k);
      f.counts.assign(one.counts, one.counts + c.group);
      hits[p] = {f.ids.data(), f.scores.data(), f.counts.data(), 0, 0};
      scored += one.keys_scored;
    }
    if (c.index->sharing() == index::Sharing::rows) {
      EXPECT_EQ(whole.keys_scored, scored);
    }
    c.o.assign(c.o.size(), NAN);
    c.lse.assign(c.lse.size(), NAN);
    const auto cost = c.selection.attend_parts(hits, c.query(), {.k = c.k}, c.out());
    EXPECT_EQ(cost.keys_attended, c.group * as_set(c.selection.attended()).size());
    if (c.index->same_in_parts()) {
      EXPECT_EQ(whole.keys_attended, cost.keys_attended);
      EXPECT_EQ(o, c.o);
      EXPECT_EQ(lse, c.lse);
    }
    c.expect_state();
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(SelectionModes, PartsScoreEveryKeyOfTheWholeOnce) {
  for (uint64_t seed = 0; seed < test::few_cases(20); ++seed) {
    Case c(GetParam(), seed);
    if (c.index->sharing() != index::Sharing::rows) return;
    const auto scratch = c.index->make_scratch(c.group, c.k);
    const auto whole = as_set(c.explore(*scratch).rows);
    const uint32_t parts = 1 + c.numbers.below(kMaxParts);
    std::vector<uint32_t> rows;
    for (uint32_t p = 0; p < parts; ++p) {
      index::Scored scored;
      c.index->explore(
          {.queries = c.queries.data(), .group = c.group, .k = c.k, .part = p, .parts = parts},
          *scratch, scored);
      rows.insert(rows.end(), scored.rows.begin(), scored.rows.end());
    }
    EXPECT_EQ(whole, as_set(rows));
    EXPECT_EQ(whole.size(), rows.size());
    index::Scored scored;
    EXPECT_THROW(c.index->explore({.queries = c.queries.data(),
                                   .group = c.group,
                                   .k = c.k,
                                   .part = parts,
                                   .parts = parts},
                                  *scratch, scored),
                 Error);
  }
}

TEST_P(SelectionModes, ModesMayAlternate) {
  Case c(GetParam(), 3);
  c.selection.reserve(*c.index, c.group, c.k, KEYHOLE_ATTEND_TOPK);
  c.o.assign(size_t{c.group} * kDim, NAN);
  c.lse.assign(c.group, NAN);
  for (const keyhole_attend_mode mode :
       {KEYHOLE_ATTEND_SCORED, KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_WEIGHT, KEYHOLE_ATTEND_TOPK}) {
    (void)c.selection.search_and_attend(
        *c.index, c.query(), {.k = c.k, .attend = mode, .min_weight = 1e-3F}, {}, c.out());
    c.expect_state();
  }
}

TEST_P(SelectionModes, ThePositionReachesTheIndex) {
  Case c(GetParam(), 4, true);
  const auto& seen = dynamic_cast<const Coarse&>(*c.index).position;
  for (const keyhole_attend_mode mode :
       {KEYHOLE_ATTEND_TOPK, KEYHOLE_ATTEND_SCORED, KEYHOLE_ATTEND_WEIGHT}) {
    const uint32_t position = 1000 + static_cast<uint32_t>(mode);
    (void)c.attend({.k = c.k, .attend = mode, .min_weight = 1e-3F}, position);
    EXPECT_EQ(seen, position);
    (void)c.attend({.k = c.k, .attend = mode, .min_weight = 1e-3F});
    EXPECT_EQ(seen, index::kUnknownPosition);
  }
}

// Inner products beyond fp32: scores are infinite, so K is read after all.
TEST_P(SelectionModes, OverflowedScoresFallBackToTheKeys) {
  Case c(GetParam(), 5);
  c.logits = {1.0F, 0.0F};
  for (float& x : c.queries) x *= 5e37F;
  for (const keyhole_attend_mode mode : {KEYHOLE_ATTEND_SCORED, KEYHOLE_ATTEND_WEIGHT}) {
    (void)c.attend({.k = c.k, .attend = mode, .min_weight = 1e-3F});
    for (const float x : c.o) ASSERT_TRUE(std::isfinite(x));
    for (const float x : c.lse) ASSERT_TRUE(std::isfinite(x));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SelectionModes, ::testing::ValuesIn(kSpecs), [](const auto& p) {
  const std::string spec = p.param;
  const size_t codec = spec.find("codec=");
  const std::string suffix = codec == std::string::npos ? "" : "_" + spec.substr(codec + 6);
  return spec.substr(0, spec.find(':')) + suffix;
});

}  // namespace
}  // namespace keyhole::runtime
