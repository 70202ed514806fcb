// Weights of blocks for groups of queries against double precision, as the device's test has them.
#include "cpu/group_weights.h"

#include "tests/cpu/prompt_fixture.h"
#include "tests/sanitized.h"

namespace keyhole::cpu::test {
namespace {

using keyhole::test::cases;

class GroupWeightsTest : public EveryLevel {};

PromptCase random_group_case(Rng& rng) {
  PromptCase c{};
  c.kv_heads = 1 + rng() % 3;
  c.group = 1 + rng() % 3;
  c.dim = some_head_dim(rng());
  if (c.group * c.dim > 1024) c.dim = 80;
  // A single query, ragged ends, whole tiles, more groups and rows than a product has.
  const uint32_t lengths[] = {1, 5, 63, 64, 128, 200, 300, 700};
  c.n = lengths[rng() % std::size(lengths)];
  c.rows = c.n + (rng() % 2 == 0 ? 0 : static_cast<uint32_t>(rng() % 1300));
  c.dtype = kDTypes[rng() % 3];
  c.logits.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));
  c.logits.softcap = rng() % 4 == 0 ? 3.0F : 0.0F;
  return c;
}

std::vector<uint32_t> some_heads(Rng& rng, uint32_t q_heads) {
  std::vector<uint32_t> heads;
  for (uint32_t h = 0; h < q_heads; ++h) {
    if (rng() % 3 != 0 || (heads.empty() && h + 1 == q_heads)) heads.push_back(h);
  }
  return heads;
}

class Truth {
 public:
  explicit Truth(const TestPrompt& prompt) : t_(prompt), p_(prompt.piece) {}

  /// e^logit of a block for group i.
  [[nodiscard]] double by_means(uint32_t i, uint32_t head, uint32_t block) const {
    const uint32_t q0 = i * kMeanQueries, q1 = std::min(q0 + kMeanQueries, p_.n);
    if (block * kPromptRows > p_.position(q1 - 1)) return 0;
    const uint32_t k0 = block * kPromptRows, k1 = std::min(k0 + kPromptRows, p_.rows);
    double sum = 0;
    for (uint32_t j = 0; j < p_.head_dim; ++j) {
      double q = 0, k = 0;
      for (uint32_t t = q0; t < q1; ++t) q += t_.q.row(t, head)[j] / (q1 - q0);
      for (uint32_t t = k0; t < k1; ++t) k += t_.k.row(t, head / p_.group())[j] / (k1 - k0);
      sum += q * k;
    }
    return std::exp(logit_of(sum));
  }

 private:
  [[nodiscard]] double logit_of(double product) const {
    const double x = product * double{p_.logits.scale}, cap = double{p_.logits.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }

  const TestPrompt& t_;
  const PromptPiece& p_;
};

TEST_P(GroupWeightsTest, AreThoseOfMeans) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  Pool pool({.threads = 2});
  GroupWeights weights(kernels, pool);
  for (uint32_t number = 0; number < cases(12); ++number) {
    Rng rng(seed * 1000 + number);
    const PromptCase c = random_group_case(rng);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(number) + ": " +
                 std::to_string(c.n) + " of " + std::to_string(c.rows) + ", " +
                 std::to_string(c.kv_heads) + " x " + std::to_string(c.group) + " heads of " +
                 std::to_string(c.dim));
    const TestPrompt prompt(rng, c, 20.0);
    const Truth truth(prompt);
    const std::vector<uint32_t> heads = some_heads(rng, prompt.piece.q_heads);
    const uint32_t blocks = prompt.piece.blocks(), groups = (c.n + kMeanQueries - 1) / kMeanQueries;
    GuardedArray<float> got(heads.size() * groups * blocks);
    std::fill(got.begin(), got.end(), NAN);
    weights.means(prompt.piece, heads, got.data());
    const size_t some = 1 + heads.size() * groups * blocks / 3000;  // of the weights
    for (size_t at = rng() % some; at < heads.size() * groups * blocks; at += some) {
      const auto block = static_cast<uint32_t>(at % blocks);
      const auto group = static_cast<uint32_t>(at / blocks % groups);
      const uint32_t head = heads[at / blocks / groups];
      const double w = truth.by_means(group, head, block);
      if (w == 0) {
        ASSERT_EQ(got[at], kMinusInf) << "group " << group << ", block " << block;
      } else {
        ASSERT_NEAR(got[at], std::log(w), 5e-5 * (1 + std::fabs(std::log(w))))
            << "head " << head << ", group " << group << ", block " << block;
      }
    }
  }
}

KEYHOLE_FOR_EVERY_LEVEL(GroupWeightsTest);

}  // namespace
}  // namespace keyhole::cpu::test
