#include "tools/rivals/lsh_sampling.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

#include "tools/rivals/rivals.h"

namespace keyhole::tools {

double lsh_probability(double cosine, size_t bits, size_t tables) {
  const double u = 1 - std::acos(std::clamp(cosine, -1.0, 1.0)) / std::numbers::pi;
  const double a = std::pow(u, static_cast<double>(bits));
  const auto n = static_cast<double>(tables);
  // 1 - (nearly 1) loses all digits where a is small; two terms of the binomial sum from two tables on are exact to
  // (n a)^2 / 12 there.
  if (n * a < 1e-3) {
    const double pairs = n * (n - 1) / 2 * a * a;
    return pairs * (1 - (n - 2) * a * 2 / 3);
  }
  return 1 - std::pow(1 - a, n - 1) * (1 - a + n * a);
}

namespace {

enum Param : size_t { kTables, kBits, kSeed };
constexpr RivalParam kParams[] = {
    {"tables", RivalStage::build, 150, 2, 4096, "hash tables"},
    {"bits", RivalStage::build, 10, 1, 16, "random projections of each table"},
    {"seed", RivalStage::build, 1, 0, 1 << 30, "of the projections"},
};

// One thread's tables over one KV head.
class LshSampling : public Rival {
 public:
  explicit LshSampling(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    const size_t n = data.shape.rows;
    dim_ = data.shape.dim;
    stored_ = data.stored;
    draw_planes();
    centre(data.keys, n);
    const size_t tables = spec_.size(kTables);
    const size_t buckets = size_t{1} << spec_.size(kBits);
    std::vector<uint16_t> codes(n * tables);
    std::vector<float> centred(dim_);
    norms_.resize(n);
    for (size_t row = 0; row < n; ++row) {
      double squares = 0;
      for (size_t c = 0; c < dim_; ++c) {
        centred[c] = data.keys[row * dim_ + c] - mean_[c];
        squares += double{centred[c]} * centred[c];
      }
      norms_[row] = static_cast<float>(std::sqrt(squares));
      hash(centred.data(), codes.data() + row * tables);
    }
    // Buckets of a table one after the other: begins_[b]..begins_[b + 1] of its rows.
    begins_.assign(tables * (buckets + 1), 0);
    rows_.resize(tables * n);
    for (size_t t = 0; t < tables; ++t) {
      uint32_t* begins = begins_.data() + t * (buckets + 1);
      for (size_t row = 0; row < n; ++row) ++begins[codes[row * tables + t] + 1];
      for (size_t b = 0; b < buckets; ++b) begins[b + 1] += begins[b];
      std::vector<uint32_t> next(begins, begins + buckets);
      for (size_t row = 0; row < n; ++row) {
        rows_[t * n + next[codes[row * tables + t]]++] = static_cast<uint32_t>(row);
      }
    }
    collisions_.assign(n, 0);
    query_codes_.resize(tables);
  }
  void set_spec(const RivalSpec& spec) override { spec_ = spec; }

  void search(const float* queries, size_t group, size_t /*k*/, RivalAnswer& answer) override {
    answer.own_rows = true;
    answer.bytes_read = planes_.size() * sizeof(float);  // once for all heads
    for (size_t j = 0; j < group; ++j) {
      const float* query = queries + j * dim_;
      answer.bytes_read += sample(query, answer.heads[j]);
      weigh(query, answer.heads[j]);
    }
  }

  [[nodiscard]] uint64_t bytes() const override {
    return (planes_.size() + mean_.size() + norms_.size()) * sizeof(float) +
           (begins_.size() + rows_.size()) * sizeof(uint32_t);
  }

 private:
  void draw_planes() {
    std::mt19937_64 random(spec_.size(kSeed));
    std::normal_distribution<float> normal;
    planes_.resize(spec_.size(kTables) * spec_.size(kBits) * dim_);
    for (float& component : planes_) component = normal(random);
    projections_.resize(spec_.size(kTables) * spec_.size(kBits));
  }

  void centre(const float* keys, size_t n) {
    std::vector<double> sum(dim_);
    for (size_t i = 0; i < n * dim_; ++i) sum[i % dim_] += keys[i];
    mean_.clear();
    for (const double s : sum) mean_.push_back(static_cast<float>(s / static_cast<double>(n)));
  }

  // The bucket of x in each table.
  void hash(const float* x, uint16_t* codes) {
    const size_t bits = spec_.size(kBits);
    matrix_vector(planes_.data(), dim_, x, 0, projections_.size(), projections_.data());
    for (size_t t = 0; t < spec_.size(kTables); ++t) {
      uint32_t code = 0;
      for (size_t b = 0; b < bits; ++b) code = 2 * code + (projections_[t * bits + b] > 0 ? 1 : 0);
      codes[t] = static_cast<uint16_t>(code);
    }
  }

  // The keys that share at least two buckets with the query; returns the bytes of the buckets.
  uint64_t sample(const float* query, RivalRows& out) {
    const size_t n = norms_.size();
    const size_t buckets = size_t{1} << spec_.size(kBits);
    hash(query, query_codes_.data());
    uint64_t met = 0;
    const auto bucket = [&](size_t t) {
      const uint32_t* begins = begins_.data() + t * (buckets + 1) + query_codes_[t];
      return std::span<const uint32_t>(rows_.data() + t * n + begins[0], begins[1] - begins[0]);
    };
    for (size_t t = 0; t < query_codes_.size(); ++t) {
      for (const uint32_t row : bucket(t)) {
        if (++collisions_[row] == 2) out.rows.push_back(row);
      }
      met += bucket(t).size();
    }
    // Clearing what was met is cheaper than clearing all, unless the buckets hold more than all.
    if (met > n) {
      std::fill(collisions_.begin(), collisions_.end(), uint16_t{0});
    } else {
      for (size_t t = 0; t < query_codes_.size(); ++t) {
        for (const uint32_t row : bucket(t)) collisions_[row] = 0;
      }
    }
    return met * sizeof(uint32_t);
  }

  void weigh(const float* query, RivalRows& out) {
    double norm = 0;
    double with_mean = 0;
    for (size_t c = 0; c < dim_; ++c) {
      norm += double{query[c]} * query[c];
      with_mean += double{query[c]} * mean_[c];
    }
    norm = std::sqrt(norm);
    for (const uint32_t row : out.rows) {
      float product = 0;
      stored_->keys.products(query, row, row + size_t{1}, &product);
      const double lengths = norm * norms_[row];
      // A key at the mean itself has no direction: its signs are those of 0, and what it is hashed to says nothing.
      const double cosine = lengths > 0 ? (product - with_mean) / lengths : 0;
      // A key at an angle of nearly pi can be met by rounding alone: its weight stays finite.
      const double p = lsh_probability(cosine, spec_.size(kBits), spec_.size(kTables));
      out.log_weights.push_back(static_cast<float>(-std::log(std::max(p, 1e-30))));
    }
  }

  RivalSpec spec_;
  size_t dim_ = 0;
  const StoredRows* stored_ = nullptr;
  std::vector<float> planes_;         // `[tables, bits, d]`
  std::vector<float> mean_;           // `[d]` of the keys
  std::vector<float> norms_;          // `[rows]` of the centred keys
  std::vector<uint32_t> begins_;      // `[tables, buckets + 1]`
  std::vector<uint32_t> rows_;        // `[tables, rows]` by bucket
  std::vector<uint16_t> collisions_;  // `[rows]` 0 between searches
  std::vector<uint16_t> query_codes_;
  std::vector<float> projections_;
};

}  // namespace

const RivalType kLshSampling = {
    .name = "lsh",
    .meaning =
        "an estimate from keys that collide with the query in two hash tables, each weighted by "
        "1/probability (MagicPIG, arXiv 2410.16179)",
    .params = kParams,
    .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
      return std::make_unique<LshSampling>(spec);
    }};

}  // namespace keyhole::tools
