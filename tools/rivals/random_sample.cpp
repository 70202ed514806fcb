// random: a uniform sample of the keys without replacement, the yardstick of every way that chooses by more than luck.
//
// With m of n keys, each stands for n / m: the sums of exp(logit) and of exp(logit) v over the sample, times n / m, are
// unbiased estimates of those over all keys (Horvitz and Thompson, 1952). All heads of a step attend the same sample,
// which costs the least reading.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tools/rivals/rival.h"
#include "tools/rivals/rivals.h"

namespace keyhole::tools {
namespace {

enum Param : size_t { kBudget, kSeed };
constexpr RivalParam kParams[] = {
    {"budget", RivalStage::search, 256, 1, 1 << 30,
     "keys that a step samples for all of its heads"},
    {"seed", RivalStage::build, 1, 0, 1 << 30, "of the random numbers"},
};

class RandomSample : public Rival {
 public:
  explicit RandomSample(const RivalSpec& spec) : spec_(spec), random_(spec.size(kSeed)) {}

  void build(const RivalData& data) override {
    ids_.resize(data.shape.rows);
    std::iota(ids_.begin(), ids_.end(), 0U);
  }
  void set_spec(const RivalSpec& spec) override { spec_ = spec; }

  void search(const float* /*queries*/, size_t /*group*/, size_t /*k*/,
              RivalAnswer& answer) override {
    const size_t n = ids_.size();
    const size_t m = std::min(spec_.size(kBudget), n);
    // The first m steps of a shuffle, from whatever order the last step left.
    for (size_t i = 0; i < m; ++i) {
      std::uniform_int_distribution<size_t> rest(i, n - 1);
      std::swap(ids_[i], ids_[rest(random_)]);
    }
    const auto log_weight =
        static_cast<float>(std::log(static_cast<double>(n) / static_cast<double>(m)));
    answer.own_rows = true;
    for (RivalRows& head : answer.heads) {
      head.rows.assign(ids_.begin(), ids_.begin() + static_cast<ptrdiff_t>(m));
      head.log_weights.assign(m, log_weight);
    }
  }

  // A sampler needs no list of all ids; this one keeps it to draw without rejection.
  [[nodiscard]] uint64_t bytes() const override { return 0; }

 private:
  RivalSpec spec_;
  std::mt19937_64 random_;
  std::vector<uint32_t> ids_;
};

}  // namespace

const RivalType kRandomSample = {
    .name = "random",
    .meaning = "uniform sample of the keys, each weighted by n/m: a yardstick",
    .params = kParams,
    .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
      return std::make_unique<RandomSample>(spec);
    }};

}  // namespace keyhole::tools
