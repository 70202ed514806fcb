// A head of Gemma 3, recorded (golden/cut_heads.py), whose keys have norms above 100, most of it in a channel that all
// keys share: codes of 4 and of 2 bits, and searches with a tail, in steps of a session beside attention in double. The
// error of a code grows with such keys, so codes have to notice where they cannot tell which rows weigh, and read these
// exactly.
#include <algorithm>
#include <cmath>
#include <string>

#include "runtime/files/safetensors.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/session/recorded_heads.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kWide = 256, kQueries = 4;

/// The one head of the file.
struct LongKeys {
  std::vector<float> keys, values;  ///< `[tokens, kWide]`
  std::vector<float> queries;       ///< `[step, kQueries, kWide]`; the steps are the last tokens
  uint32_t tokens = 0, first_query = 0;

  LongKeys() {
    const SafetensorsFile file(KEYHOLE_GOLDEN_FOLDER "/long_keys.safetensors");
    for (const auto& [name, tensor] : file.tensors()) {
      if (name.ends_with(".keys")) keys = tensor.to_f32();
      if (name.ends_with(".values")) values = tensor.to_f32();
      if (name.ends_with(".queries")) queries = tensor.to_f32();
    }
    tokens = static_cast<uint32_t>(keys.size() / kWide);
    first_query = tokens - static_cast<uint32_t>(queries.size() / (kQueries * kWide));
  }
  [[nodiscard]] std::vector<float> rows(const std::vector<float>& of, uint32_t first,
                                        uint32_t count) const {
    return {of.begin() + static_cast<ptrdiff_t>(first * kWide),
            of.begin() + static_cast<ptrdiff_t>((first + count) * kWide)};
  }
};

const LongKeys& long_keys() {
  static const LongKeys head;
  return head;
}

/// The output errors of a session that decodes the last tokens, of each step and query head, beside how sharp these
/// are.
struct LongKeysErrors {
  std::vector<double> all;    ///< ascending
  std::vector<double> sharp;  ///< of these, where 16 rows have nine tenths of the weight
  uint64_t doubted = 0;       ///< heads of a step in which codes could not tell which rows weigh

  LongKeysErrors(const char* index, uint32_t sink, keyhole_tail_mode tail, uint32_t top_k) {
    const LongKeys& h = long_keys();
    const EnginePtr engine = make_engine(heads_engine(kQueries, 1, kWide));
    const SessionPtr session = make_session(engine.get(), heads_session(index, sink, tail, top_k));
    const auto prompt_k = h.rows(h.keys, 0, h.first_query);
    const auto prompt_v = h.rows(h.values, 0, h.first_query);
    const auto tpk = tensor(prompt_k, {h.first_query, 1, kWide});
    const auto tpv = tensor(prompt_v, {h.first_query, 1, kWide});
    EXPECT_OK(keyhole_session_append(session.get(), 0, &tpk, &tpv, nullptr));
    EXPECT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    for (uint32_t t = h.first_query; t < h.tokens; ++t) {
      const auto k = h.rows(h.keys, t, 1), v = h.rows(h.values, t, 1);
      const auto q = h.rows(h.queries, (t - h.first_query) * kQueries, kQueries);
      std::vector<float> o(size_t{kQueries} * kWide);
      const auto tk = tensor(k, {1, kWide}), tv = tensor(v, {1, kWide});
      const auto tq = tensor(q, {kQueries, kWide}), to = tensor(o, {kQueries, kWide});
      EXPECT_OK(keyhole_session_attend(session.get(), 0, &tq, &tk, &tv, &to, nullptr));
      for (uint32_t j = 0; j < kQueries; ++j) {
        const HeadTruth truth(&q[size_t{j} * kWide], h.keys, h.values, t + 1, kWide);
        all.push_back(truth.error(&o[size_t{j} * kWide]));
        if (truth.is_sharp()) sharp.push_back(all.back());
      }
    }
    std::sort(all.begin(), all.end());
    std::sort(sharp.begin(), sharp.end());
    doubted = statistics(session.get()).codes_doubted;
  }
};

TEST(LongKeysFile, HasKeysOfNormsAboveAHundred) {
  const LongKeys& h = long_keys();
  ASSERT_EQ(h.tokens, 488U);
  ASSERT_EQ(h.first_query, 464U);
  std::vector<double> mean(kWide, 0.0);
  for (uint32_t t = 0; t < h.tokens; ++t) {
    const float* k = &h.keys[size_t{t} * kWide];
    EXPECT_GT(std::sqrt(exact_dot(k, k, kWide)), 100.0);
    for (uint32_t j = 0; j < kWide; ++j) mean[j] += std::abs(k[j]) / h.tokens;
  }
  EXPECT_GT(*std::max_element(mean.begin(), mean.end()), 70.0);
}

TEST(LongKeysByCodes, KnowThatTheyCannotTell) {
  for (const char* index :
       {"codes:k=4,v=4", "codes:k=2,v=2", "codes:k=4,v=4,lists=8", "codes:k=2,v=2,lists=8"}) {
    const bool fine = index[8] == '4';
    for (const uint32_t sink : {0U, 4U}) {
      SCOPED_TRACE(std::string(index) + ", sink " + std::to_string(sink));
      const LongKeysErrors errors(index, sink, KEYHOLE_TAIL_CODES, 16);
      EXPECT_GT(errors.doubted, 0U);
      ASSERT_FALSE(errors.sharp.empty());
      EXPECT_LE(errors.sharp.back(), fine ? 0.02 : 0.1);
      EXPECT_LE(quantile(errors.all, 0.95), fine ? 0.02 : 0.1);
    }
  }
}

/// The best 50 keys with a second-order tail: all types are as good as `flat` (median 0.093, p95 0.21).
TEST(LongKeysByIndex, ErrorsAreThoseOfTheBestKeysWithATail) {
  for (const char* index : {"flat", "ivf", "hnsw", "roargraph", "sparq"}) {
    SCOPED_TRACE(index);
    const LongKeysErrors errors(index, 4, KEYHOLE_TAIL_SECOND, 50);
    EXPECT_LE(quantile(errors.all, 0.5), 0.14);
    EXPECT_LE(quantile(errors.all, 0.95), 0.32);
  }
}

}  // namespace
}  // namespace keyhole::test
