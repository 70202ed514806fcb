// Estimates of what was not read, against the same formula and against exact attention, both in double over the
// rows that were not read.
#include <set>

#include "tests/index/tail_step.h"

namespace keyhole::index::test {
namespace {

// What the estimate documents: shares of a head's mass below it are given the mean value of all.
constexpr double kLeastShare = 1e-3;
// So few coarse partitions are all divided, unless they are certain.
constexpr size_t kAllDivided = 16;

// ---- Exactness -----------------------------------------------------------------------------------

// Whatever was read, each row counts once: with partitions of equal keys, what was read and the tail together are
// exact attention.
TEST(TailEstimate, NothingIsCountedTwiceOrForgotten) {
  for (uint32_t seed = 0; seed < cases(40); ++seed) {
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const DType dtype = key_dtypes()[random() % 3];
    const uint32_t group = keyhole::test::some_group(random());
    // From a handful of coarse partitions, all divided, to many, few of which are.
    const size_t blocks = 1 + random() % (seed % 8 == 0 ? 250 : 12);
    const EqualBlocks rows(blocks, 1 + random() % 300, dim, dtype,
                           {4 + static_cast<uint32_t>(random() % 30)}, random);
    for (const TailLevel* level : {&rows.tree.fine(), &rows.tree.coarse()}) {
      for (const float v : level->variances) ASSERT_EQ(v, 0.0F);
    }
    Step step{rows.kv, rows.tree, group, {}};
    step.queries = exact_queries(rows.tree, group, random);
    step.logits.scale = scale_for(step, 0.5 + 0.1 * static_cast<double>(random() % 20));
    step.logits.softcap = random() % 3 == 0 ? 3.0F : 0.0F;
    step.mode = random() % 2 == 0 ? TailMode::second : TailMode::centroid;
    add_resident(step, 0.1 + static_cast<double>(random() % 3));
    step.read = random_read_set(rows.tree, random);
    const bool alone = random() % 5 == 0;  // nothing is read, and nothing lies elsewhere
    if (alone) {
      step.read.clear();
      step.resident.assign(group, -INFINITY);
    }
    SCOPED_TRACE(testing::Message()
                 << "seed " << seed << " dim " << dim << " " << dtype_name(dtype) << " group "
                 << group << " rows " << rows.kv.count() << " read " << step.read.size()
                 << " coarse " << rows.tree.coarse().count());
    TailEstimate estimate;
    step.begin(estimate);
    const Tail tail(estimate, step);
    const double most = largest_value(rows.kv);
    std::vector<char> is_read(rows.kv.count(), 0);
    for (const uint32_t row : step.read) is_read[row] = 1;
    for (uint32_t h = 0; h < group; ++h) {
      const Exact truth = step.attend(h, step.all_rows());
      const Exact got = merged(tail.head(h), step.attend(h, step.read));
      // Residual values are differences of sums over a partition, of at most 300 rows; and small partitions are
      // given the mean value of all.
      double small = 0.0;
      double rounding = 0.0;
      // Masses are shares of the rows': e to the power of a logit may be no number.
      const double all = std::exp(step.resident[h] - truth.lse) + 1.0;
      for (size_t f = 0; f < rows.tree.fine().count(); ++f) {
        double mass = 0.0;
        double left = 0.0;
        for (const uint32_t row : rows.tree.rows_of(f)) {
          if (is_read[row] != 0) continue;
          mass += std::exp(logit_of(step.score(h, row), step.logits) - truth.lse);
          ++left;
        }
        if (left == 0.0) continue;
        if (mass < 1.01 * kLeastShare * all) small += mass;
        rounding += mass * rows.tree.coarse().sizes[rows.tree.parent(f)] / left;
      }
      expect_state_near(got, truth, 3e-4 + 1e-6 * std::fabs(truth.lse),
                        2.0 * most * small + 2.0 * most * rounding_of(dtype) * rounding + 1e-3, h);
      if (HasFatalFailure()) return;
      const double missing = std::exp(tail.lse[h] - add_logs(tail.lse[h], step.seen[h]));
      EXPECT_NEAR(estimate.missing(h), missing, 1e-5);
    }
  }
}

TEST(TailEstimate, IsEmptyWhereEverythingWasRead) {
  std::mt19937 random(201);
  for (const size_t n : {1, 2, 50, 1000}) {
    KvRows kv(n, 64, DType::f16);
    kv.add(attention_keys(n, 64, random), gaussian(n, 64, random));
    TailTree tree(context(), 64, DType::f16, {});
    tree.build(kv.view(), {});
    for (const TailMode mode : {TailMode::mean, TailMode::centroid, TailMode::second}) {
      Step step{kv, tree, 3, {0.1F, 0.0F}, mode};
      step.queries = attention_queries(3, 64, kv.keys, random);
      step.resident.assign(3, -INFINITY);
      step.read = step.all_rows();
      std::shuffle(step.read.begin(), step.read.end(), random);
      TailEstimate estimate;
      step.begin(estimate);
      const Tail tail(estimate, step);
      for (uint32_t h = 0; h < 3; ++h) {
        EXPECT_EQ(tail.lse[h], kMinusInf);
        EXPECT_EQ(estimate.missing(h), 0.0F);
        EXPECT_EQ(estimate.error(h, 1.0F), 0.0F);
      }
      for (const float o : tail.o) EXPECT_EQ(o, 0.0F);
      const std::vector<float> norms(3, 1.0F);
      const ReadGoal goal{.error = 1e-9F, .mass = 1.0F, .min_rows = 10, .max_rows = 100000};
      EXPECT_TRUE(estimate.next_rows(goal, n, norms.data()).empty());
    }
  }
}

TEST(TailEstimate, ATreeWithoutRowsHasNoTail) {
  KvRows kv(1, 64, DType::f16);
  const TailTree never(context(), 64, DType::f16, {});
  TailTree empty(context(), 64, DType::f16, {});
  empty.build(kv.view(), {});
  for (const TailTree* tree : {&never, static_cast<const TailTree*>(&empty)}) {
    for (const double resident : {-double{INFINITY}, 2.0}) {
      Step step{kv, *tree, 2, {}};
      step.queries.assign(128, 1.0F);
      step.resident.assign(2, resident);
      TailEstimate estimate;
      step.begin(estimate);
      const Tail tail(estimate, step);
      EXPECT_EQ(tail.lse[0], kMinusInf);
      const std::vector<float> norms(2, 1.0F);
      EXPECT_TRUE(estimate.next_rows({.mass = 0.9F, .max_rows = 10}, 0, norms.data()).empty());
    }
  }
}

// ---- The formula ---------------------------------------------------------------------------------

/// The tail of a tree whose coarse partitions are all divided unless they are certain, by the formula; and how
/// far fp32 may be from it.
struct Formula {
  Exact state;
  double lse_bound = 0.0, o_bound = 0.0;
};

std::vector<Formula> by_formula(const Step& step) {
  const TailTree& tree = step.tree;
  const uint32_t dim = tree.dim();
  const CodeScales scales = scales_of(tree);
  std::vector<char> is_read(tree.count(), 0);
  for (const uint32_t row : step.read) is_read[row] = 1;
  struct Partition {
    double left = 0.0, whole = 0.0;
    std::vector<double> mean, weights, offs;  // mean value of the rows that are left
    double mean_off = 0.0;
  };
  const auto make = [&](const TailLevel& level, size_t i, const std::vector<uint32_t>& rows) {
    Partition p;
    p.whole = static_cast<double>(rows.size());
    p.mean.assign(dim, 0.0);
    double magnitude = 0.0;
    for (const uint32_t row : rows) {
      const auto v = decoded(step.kv.values.view(), row);
      for (uint32_t j = 0; j < dim; ++j) {
        if (is_read[row] == 0) p.mean[j] += v[j];
        magnitude = std::max(magnitude, std::fabs(v[j]));
      }
      p.left += is_read[row] == 0 ? 1.0 : 0.0;
    }
    for (double& x : p.mean) x /= std::max(p.left, 1.0);
    const double ratio = p.whole / std::max(p.left, 1.0);
    p.mean_off = magnitude * (ratio * (rounding_of(tree.dtype()) + 1e-6) + 1e-6);
    const auto key = decoded_mean(level, scales, i);
    for (uint32_t h = 0; h < step.group; ++h) {
      const float* q = step.queries.data() + size_t{h} * dim;
      double removed = 0.0;
      double removed_size = 0.0;
      for (const uint32_t row : rows) {
        if (is_read[row] == 0) continue;
        removed += step.score(h, row);
        removed_size += std::fabs(step.score(h, row));
      }
      const double mean_score = dot(key, q);
      double size = 0.0;
      for (uint32_t j = 0; j < dim; ++j) size += std::fabs(key[j] * q[j]);
      const double left = std::max(p.left, 1.0);
      double score = (p.whole * mean_score - removed) / left;
      const double cap =
          std::min<double>(step.seen[h], step.caps.empty() ? INFINITY : step.caps[h]);
      const double margin = 4.0 * tree.codes().error_spread(q) * step.logits.scale;
      if (left < p.whole && step.logits.softcap == 0.0F) {
        score = std::min(score, (cap + margin) / step.logits.scale);
      }
      const double score_off =
          4e-7 * (p.whole * size + removed_size * 3.0) / left * step.logits.scale;
      double square_norm = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        square_norm += std::pow(double{q[j]} / tree.key_scale()[j], 2.0);
      }
      const double x = score * step.logits.scale;
      double mean = x;
      double slope = step.logits.scale;
      if (step.logits.softcap > 0.0F) {
        const double share = std::tanh(x / step.logits.softcap);
        mean = step.logits.softcap * share;
        slope *= 1.0 - share * share;
      }
      const double t = slope * slope * square_norm * level.variances[i];
      const double second = step.mode == TailMode::centroid ? 0.0 : t / 2;
      const double w = p.left * std::exp(std::max(mean - margin, std::min(mean + second, cap)) -
                                         static_cast<double>(step.seen[h]));
      const bool counts = p.left > 0.0 && w > p.left * std::exp(-60.0);
      p.weights.push_back(counts ? w : 0.0);
      p.offs.push_back(p.weights.back() * std::expm1(score_off * (1.0 + t) + 2e-5 * (1.0 + t)));
    }
    return p;
  };
  std::vector<Partition> parts;
  EXPECT_LE(tree.coarse().count(), kAllDivided);
  for (size_t c = 0; c < tree.coarse().count(); ++c) {
    if (tree.coarse().variances[c] == 0.0F) {
      parts.push_back(make(tree.coarse(), c, rows_of_coarse(tree, c)));
      continue;
    }
    for (uint32_t f = tree.fine_begin(c); f < tree.fine_begin(c + 1); ++f) {
      parts.push_back(make(tree.fine(), f, {tree.rows_of(f).begin(), tree.rows_of(f).end()}));
    }
  }
  std::vector<double> unread(step.group, 0.0);
  for (const Partition& p : parts) {
    for (uint32_t h = 0; h < step.group; ++h) unread[h] += p.weights[h];
  }
  const auto position = [&](const Partition& p,
                            double slack) {  // does any head give it its own mean
    for (uint32_t h = 0; h < step.group; ++h) {
      if (p.weights[h] > slack * kLeastShare * (1.0 + unread[h])) return true;
    }
    return false;
  };
  std::vector<Formula> out(step.group);
  for (uint32_t h = 0; h < step.group; ++h) {
    Formula& f = out[h];
    f.state.o.assign(dim, 0.0);
    if (unread[h] == 0.0) continue;
    f.state.lse = static_cast<double>(step.seen[h]) + std::log(unread[h]);
    double off = 0.0;
    for (const Partition& p : parts) {
      const bool own = step.mode != TailMode::mean && position(p, 1.0);
      const bool unsure = step.mode != TailMode::mean && position(p, 0.99) != position(p, 1.01);
      const double share = p.weights[h] / unread[h];
      double widest = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double common = tree.mean_value()[j];
        const double value = own ? p.mean[j] : common;
        f.state.o[j] += share * value;
        widest = std::max(widest, std::max(std::fabs(p.mean[j]), std::fabs(common)));
      }
      off += p.offs[h] / unread[h];
      f.o_bound += share * (own ? p.mean_off : 1e-6 * widest) +
                   2.0 * widest * p.offs[h] / unread[h] + (unsure ? 2.0 * share * widest : 0.0);
    }
    f.lse_bound = 1.5 * off + 1e-5 + 1e-6 * std::fabs(f.state.lse);
    f.o_bound = 1.5 * f.o_bound + 1e-5;
  }
  return out;
}

TEST(TailEstimate, IsTheFormulaOverTheRowsNotRead) {
  for (uint32_t seed = 0; seed < cases(60); ++seed) {
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const DType dtype = key_dtypes()[random() % 3];
    const uint32_t group = keyhole::test::some_group(random());
    const size_t n = 1 + random() % 1200;
    KvRows kv(n, dim, dtype);
    kv.add(attention_keys(n, dim, random), gaussian(n, dim, random));
    TailTree tree(context(), dim, dtype, {4 + static_cast<uint32_t>(random() % 30)});
    tree.build(kv.view(), {});
    if (tree.coarse().count() > kAllDivided) continue;
    Step step{kv, tree, group, {}};
    step.queries = exact_queries(tree, group, random);
    step.logits.scale = scale_for(step, 0.5 + 0.2 * static_cast<double>(random() % 20));
    step.logits.softcap = random() % 3 == 0 ? 4.0F : 0.0F;
    const TailMode modes[] = {TailMode::mean, TailMode::centroid, TailMode::second};
    step.mode = modes[random() % 3];
    add_resident(step, static_cast<double>(random() % 6) - 2.0);
    step.read = random_read_set(tree, random);
    step.see();
    if (random() % 2 == 0) {
      for (uint32_t h = 0; h < group; ++h) {
        step.caps.push_back(step.seen[h] + 1.0F - static_cast<float>(random() % 4));
      }
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed << " dim " << dim << " " << dtype_name(dtype)
                                    << " group " << group << " rows " << n << " read "
                                    << step.read.size() << " mode " << static_cast<int>(step.mode));
    TailEstimate estimate;
    step.begin(estimate);
    const Tail tail(estimate, step);
    const auto truth = by_formula(step);
    for (uint32_t h = 0; h < group; ++h) {
      expect_state_near(tail.head(h), truth[h].state, truth[h].lse_bound, truth[h].o_bound, h);
      if (HasFatalFailure()) return;
    }
  }
}

// Keys that spread alike in all directions around their mean: there the second order is nearly exact, and the
// mean alone is a lower bound.
TEST(TailEstimate, SecondOrderFindsTheMassOfIsotropicPartitions) {
  std::mt19937 random(205);
  KvRows kv(3000, 64, DType::f32);
  kv.add(gaussian(3000, 64, random), gaussian(3000, 64, random));
  TailTree tree(context(), 64, DType::f32, {1024});
  tree.build(kv.view(), {});
  Step step{kv, tree, 4, {}};
  step.queries = gaussian(4, 64, random);
  step.logits.scale = scale_for(step, 1.0);
  add_resident(step, 1.0);
  double lse[2];
  for (const TailMode mode : {TailMode::centroid, TailMode::second}) {
    step.mode = mode;
    TailEstimate estimate;
    step.begin(estimate);
    const Tail tail(estimate, step);
    lse[mode == TailMode::second ? 1 : 0] = tail.lse[0];
  }
  const double truth = step.attend(0, step.all_rows()).lse;
  EXPECT_LT(lse[0], truth - 0.2);
  EXPECT_NEAR(lse[1], truth, 0.1);
}

// ---- Extremes ------------------------------------------------------------------------------------

// Whatever the keys: finite, and no more mass than there can be (checked in Tail).
TEST(TailEstimate, AdversarialKeysStayWithinBounds) {
  for (uint32_t seed = 0; seed < cases(90); ++seed) {
    std::mt19937 random(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const DType dtype = key_dtypes()[random() % 3];
    const size_t n = 1 + random() % 3000;
    auto k = gaussian(n, 64, random);
    auto v = gaussian(n, 64, random);
    const float huge = dtype == DType::f16 ? 1e4F : (random() % 2 == 0 ? 1e10F : 1e30F);
    switch (seed % 5) {
      case 0:
        for (size_t i = 0; i < k.size(); ++i) k[i] *= i / 64 % 101 == 7 ? huge / 8 : 1.0F;
        break;
      case 1:  // one far cluster
        for (size_t i = 0; i < k.size(); ++i) k[i] += i / 64 % 3 == 0 ? huge / 2 : 0.0F;
        break;
      case 2:
        std::fill(k.begin(), k.end(), 1.0F);
        std::fill(v.begin(), v.end(), -2.0F);
        break;
      case 3:
        for (size_t i = 64; i < k.size(); ++i) k[i] = k[i % 64 + 64 * (i / 64 % 3)];
        break;
      default:
        for (size_t i = 0; i < k.size(); ++i) k[i] = std::clamp(k[i], -4.0F, 4.0F) * huge / 8;
        for (float& x : v) x = std::clamp(x, -4.0F, 4.0F) * huge / 8;
    }
    KvRows kv(n, 64, dtype);
    kv.add(k, v);
    TailTree tree(context(), 64, dtype, {4 + static_cast<uint32_t>(random() % 30)});
    tree.build(kv.view(), {});
    const uint32_t group = 1 + random() % 8;
    Step step{kv, tree, group, {0.125F, random() % 3 == 0 ? 20.0F : 0.0F}};
    const TailMode modes[] = {TailMode::mean, TailMode::centroid, TailMode::second};
    step.mode = modes[random() % 3];
    step.queries = gaussian(group, 64, random);
    const float wide = random() % 4 == 0 ? 1e9F : 1.0F;
    for (float& q : step.queries) q *= wide;
    step.resident.assign(group, random() % 3 == 0 ? -INFINITY : 3.0);
    if (random() % 2 == 0) step.caps.assign(group, random() % 2 == 0 ? -1.0F : INFINITY);
    step.read = random_read_set(tree, random);
    TailEstimate estimate;
    step.begin(estimate);
    static_cast<void>(Tail(estimate, step));
    // And reading on ends.
    const std::vector<float> norms(group, random() % 2 == 0 ? 1.0F : 0.0F);
    const ReadGoal goal{.error = random() % 2 == 0 ? 0.01F : 0.0F,
                        .mass = random() % 2 == 0 ? 0.999F : 0.0F,
                        .min_rows = static_cast<uint32_t>(random() % (n + 1)),
                        .max_rows = static_cast<uint32_t>(random() % (2 * n + 1))};
    size_t rounds = 0;
    for (;; ++rounds) {
      ASSERT_LE(rounds, n);
      const auto more = estimate.next_rows(goal, step.read_now().size(), norms.data());
      if (more.empty()) break;
      step.later.insert(step.later.end(), more.begin(), more.end());
      ASSERT_LE(step.read_now().size(), goal.max_rows);
      const auto all = step.read_now();
      ASSERT_EQ(std::set<uint32_t>(all.begin(), all.end()).size(), all.size())
          << "a row came twice";
      // Not the true states, which overflow here: any number must do.
      for (float& x : step.seen) x += 0.01F;
      estimate.take_in(step.seen.data());
    }
    std::vector<float> o(size_t{group} * 64);
    std::vector<float> lse(group);
    estimate.state(kv.values.view(), {o.data(), lse.data()});
    for (const float x : o) ASSERT_TRUE(std::isfinite(x));
    for (const float x : lse) ASSERT_FALSE(std::isnan(x));
    if (HasFailure()) return;
  }
}

// Nothing is seen, under a soft-cap that saturates: the tail is all there is.
TEST(TailEstimate, TheTailAloneUnderASoftCap) {
  std::mt19937 random(206);
  const EqualBlocks rows(20, 40, 64, DType::f16, {}, random);
  Step step{rows.kv, rows.tree, 2, {}};
  step.queries = exact_queries(rows.tree, 2, random);
  step.logits = {scale_for(step, 500.0), 5.0F};
  step.resident.assign(2, -INFINITY);
  TailEstimate estimate;
  step.begin(estimate);
  const Tail tail(estimate, step);
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_NEAR(tail.lse[h], step.attend(h, step.all_rows()).lse, 1e-3);
    EXPECT_EQ(estimate.missing(h), 1.0F);
  }
}

TEST(TailEstimate, CapacityGrowsWithGroupAndTree) {
  std::mt19937 random(207);
  KvRows kv(3000, 64, DType::f16);
  kv.add(attention_keys(200, 64, random), gaussian(200, 64, random));
  TailTree tree(context(), 64, DType::f16, {4});
  tree.build(kv.view(), {});
  TailEstimate estimate;
  TailEstimate fresh;
  const auto compare = [&](uint32_t group) {
    Step step{kv, tree, group, {0.05F, 0.0F}};
    step.queries = attention_queries(group, 64, kv.keys, random);
    step.resident.assign(group, 1.0);
    step.read = random_read_set(tree, random);
    step.begin(estimate);
    const Tail a(estimate, step);
    fresh = {};
    step.begin(fresh);
    const Tail b(fresh, step);
    EXPECT_EQ(a.o, b.o);  // the capacity is no part of the result
    EXPECT_EQ(a.lse, b.lse);
  };
  for (const uint32_t group : {1U, 16U, 3U}) compare(group);
  kv.add(attention_keys(2500, 64, random), gaussian(2500, 64, random));
  tree.commit_append(*tree.prepare_append(kv.view(), {}));
  for (const uint32_t group : {2U, 16U}) compare(group);
  tree.truncate(100, kv.view());
  kv.cut(100);
  for (const uint32_t group : {16U, 5U}) compare(group);
}

}  // namespace
}  // namespace keyhole::index::test
