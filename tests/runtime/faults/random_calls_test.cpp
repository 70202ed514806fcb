// Random sequences of calls of the whole C API, legal and not, on random shapes, dtypes, specs, budgets and settings,
// beside exact attention in double precision: every answer is the truth, and an illegal call changes nothing.
//   KEYHOLE_RANDOM_SEEDS=N    sequences of calls (default 60)
//   KEYHOLE_RANDOM_FIRST=N    the first one's seed (default 1)
#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include <bit>
#include <cstring>

#include "cpu/half.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

uint64_t heads_checked = 0;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Effort that covers every key: whatever is indexed, the answer is exact attention's.
constexpr const char* kSpecs[] = {"flat",
                                  "flat:codec=int8",
                                  "ivf:C=4,probe=16777216",
                                  "ivf:C=8,probe=16777216,rope=undo",
                                  "hnsw:M=6,ef=100000,efc=20",
                                  "roargraph:M=8,ef=100000,Nq=10,beam=12",
                                  "sparq:r=256"};

/// Numbers as a caller may hold them: any dtype, any gap between tokens, heads in any order of strides.
class Given {
 public:
  Given(const std::vector<float>& numbers, int64_t tokens, int64_t heads, int64_t dim,
        Numbers& random, bool as_step) {
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    const keyhole_dtype type = kTypes[random.below(3)];
    const size_t size = type == KEYHOLE_F32 ? 4 : 2;
    const int64_t gap = random.below(3) == 0 ? random.below(5) : 0;
    const bool heads_first = random.below(3) == 0;
    const int64_t head_stride = heads_first ? tokens * (dim + gap) : dim + gap;
    const int64_t token_stride = heads_first ? dim + gap : heads * (dim + gap);
    bytes_.resize(static_cast<size_t>(tokens * heads * (dim + gap)) * size,
                  std::byte{0xFF});  // gaps are NaN
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < dim; ++i) {
          const float x = numbers[static_cast<size_t>((t * heads + h) * dim + i)];
          put(type, static_cast<size_t>(t * token_stride + h * head_stride + i), x);
        }
      }
    }
    tensor.data = bytes_.data();
    tensor.dtype = type;
    tensor.memory = KEYHOLE_HOST;
    tensor.rank = as_step ? 2 : 3;
    const int64_t shape[] = {tokens, heads, dim}, strides[] = {token_stride, head_stride, 1};
    std::copy(shape + (as_step ? 1 : 0), shape + 3, tensor.shape);
    std::copy(strides + (as_step ? 1 : 0), strides + 3, tensor.strides);
  }

  keyhole_tensor tensor{};

 private:
  void put(keyhole_dtype type, size_t at, float x) {
    if (type == KEYHOLE_F32) {
      std::memcpy(bytes_.data() + at * 4, &x, 4);
      return;
    }
    const uint16_t half = type == KEYHOLE_F16
                              ? cpu::f32_to_f16(x)
                              : static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    std::memcpy(bytes_.data() + at * 2, &half, 2);
  }
  std::vector<std::byte> bytes_;
};

/// One sequence of calls.
class Driver {
 public:
  explicit Driver(uint64_t seed) : random_(seed) {
    constexpr uint32_t kDims[] = {64, 80, 96, 128, 256};
    constexpr keyhole_dtype kTypes[] = {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16};
    ec_ = small_engine(1 + random_.below(3));
    ec_.layers = 1 + random_.below(3);
    ec_.head_dim = kDims[random_.below(5)];
    ec_.kv_heads = 1 + random_.below(3);
    ec_.q_heads = ec_.kv_heads * (1 + random_.below(6));
    ec_.kv_dtype = kTypes[random_.below(3)];
    ec_.softcap = random_.below(3) == 0 ? 10.0F : 0.0F;
    ec_.scale = 0.05F;
    ec_.rope_theta = 10000.0F;
    engine_ = make_engine(ec_);
    sc_ = small_session();
    sc_.max_tokens = 1500;
    sc_.index = pick_spec();
    sc_.sink = random_.below(9);
    sc_.window = 1 + random_.below(24);
    sc_.flush_block = 1 + random_.below(16);
    sc_.append_block = 1 + random_.below(40);
    sc_.append_mode = random_.below(2) == 0 ? KEYHOLE_APPEND_BACKGROUND : KEYHOLE_APPEND_IN_STEP;
    sc_.audit_share = random_.below(3) == 0 ? 0.2 : 0.0;
    sc_.training_queries = random_.below(2) == 0 ? 32 : 0;
    sequences_.reserve(kMostSequences);  // references stay valid
    sequences_.push_back({make_session(engine_.get(), sc_), Model(ec_)});
  }

  void run() {
    for (int i = 0; i < 60 && !::testing::Test::HasFailure(); ++i) {
      const uint32_t what = random_.below(20);
      SCOPED_TRACE("call " + std::to_string(i) + ", of kind " + std::to_string(what));
      Sequence& s = sequences_[random_.below(static_cast<uint32_t>(sequences_.size()))];
      call(what, s);
      check(s);
    }
  }

 private:
  static constexpr uint32_t kMostSequences = 4;
  struct Sequence {
    SessionPtr session;
    Model model;
  };

  const char* pick_spec() { return kSpecs[random_.below(std::size(kSpecs))]; }

  void call(uint32_t what, Sequence& s) {
    switch (what) {
      case 0:
      case 1:
      case 2: return prefill(s);
      case 3:
      case 4:
      case 5:
      case 6:
      case 7: return step(s);
      case 8: ASSERT_OK(keyhole_build(s.session.get(), nullptr, nullptr)); return;
      case 9:
      case 10: {
        const uint32_t n = random_.below(s.model.tokens(0) + 4);
        ASSERT_OK(keyhole_truncate(s.session.get(), n));
        s.model.truncate(n);
        return;
      }
      case 11: return copy(s, true);
      case 12: return copy(s, false);
      case 13: ASSERT_OK(keyhole_session_set_index(s.session.get(), pick_spec())); return;
      case 14: {
        constexpr keyhole_mode kModes[] = {KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT};
        ASSERT_OK(
            keyhole_session_set_mode(s.session.get(), kModes[random_.below(2)], sc_.max_tokens));
        return;
      }
      case 15: return set_budget(s);
      default: return break_a_rule(s);
    }
  }

  void prefill(Sequence& s) {
    const uint32_t n = random_.below(4) == 0 ? random_.below(150) : random_.below(12);
    if (s.model.tokens(0) + n + 20 > sc_.max_tokens) return;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto k = random_.many(shape().kv(n)), v = random_.many(k.size()),
                 q = random_.many(shape().q(n));
      const Given gk(k, n, ec_.kv_heads, ec_.head_dim, random_, false),
          gv(v, n, ec_.kv_heads, ec_.head_dim, random_, false),
          gq(q, n, ec_.q_heads, ec_.head_dim, random_, false);
      ASSERT_OK(keyhole_prefill(s.session.get(), l, &gk.tensor, &gv.tensor,
                                random_.below(2) == 0 ? &gq.tensor : nullptr));
      s.model.append(l, k, v);
    }
  }

  void step(Sequence& s) {
    if (s.model.tokens(0) + 20 > sc_.max_tokens) return;
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto k = random_.many(shape().kv(1)), v = random_.many(k.size()),
                 q = random_.many(shape().q(1));
      const Given gk(k, 1, ec_.kv_heads, ec_.head_dim, random_, true),
          gv(v, 1, ec_.kv_heads, ec_.head_dim, random_, true),
          gq(q, 1, ec_.q_heads, ec_.head_dim, random_, true);
      Answer a{std::vector<float>(q.size()), std::vector<float>(ec_.q_heads)};
      const keyhole_tensor out = tensor(a.o, {ec_.q_heads, ec_.head_dim});
      if (random_.below(2) == 0) {
        ASSERT_OK(keyhole_attend(s.session.get(), l, &gq.tensor, &gk.tensor, &gv.tensor, &out,
                                 a.lse.data()));
      } else {
        ASSERT_OK(keyhole_attend_begin(s.session.get(), l, &gq.tensor, &gk.tensor, &gv.tensor));
        ASSERT_EQ(keyhole_truncate(s.session.get(), 0), KEYHOLE_BUSY) << "inside a step";
        ASSERT_OK(keyhole_attend_end(s.session.get(), &out, a.lse.data()));
      }
      s.model.append(l, k, v);
      expect_truth(s, l, q, a);
    }
  }

  void copy(Sequence& s, bool in_memory) {
    keyhole_session* made = nullptr;
    if (in_memory) {
      ASSERT_OK(keyhole_fork(s.session.get(), &made));
    } else {
      const std::string path = folder_ / "session";
      ASSERT_OK(keyhole_save(s.session.get(), path.c_str()));
      ASSERT_OK(keyhole_load(engine_.get(), path.c_str(), &made));
    }
    Sequence other{SessionPtr(made), s.model};
    check(other);
    if (sequences_.size() < kMostSequences) {
      sequences_.push_back(std::move(other));
    } else {
      sequences_[random_.below(kMostSequences)] = std::move(other);
    }
  }

  void set_budget(Sequence& s) {
    keyhole_budget b;
    keyhole_budget_init(&b);
    b.top_k = sc_.max_tokens;
    if (random_.below(3) == 0) {
      b.tail = KEYHOLE_TAIL_SECOND;
      b.min_keys = sc_.max_tokens;  // all are read, and the tail is empty
    }
    const uint32_t layer = random_.below(2) == 0 ? KEYHOLE_ALL : random_.below(ec_.layers);
    const uint32_t head = random_.below(2) == 0 ? KEYHOLE_ALL : random_.below(ec_.kv_heads);
    ASSERT_OK(keyhole_session_set_budget(s.session.get(), layer, head, &b));
  }

  /// A call that must be refused.
  void break_a_rule(Sequence& s) {
    keyhole_session* const session = s.session.get();
    const auto n = static_cast<int64_t>(1 + random_.below(5));
    auto k = random_.many(shape().kv(static_cast<uint32_t>(n)));
    const auto v = random_.many(k.size()), q = random_.many(shape().q(1));
    keyhole_tensor tk = tensor(k, {n, ec_.kv_heads, ec_.head_dim}),
                   tv = tensor(v, {n, ec_.kv_heads, ec_.head_dim}),
                   tq = tensor(q, {ec_.q_heads, ec_.head_dim});
    std::vector<float> o(q.size());
    const keyhole_tensor out = tensor(o, {ec_.q_heads, ec_.head_dim});
    keyhole_status status = KEYHOLE_OK;
    switch (random_.below(10)) {
      case 0: status = keyhole_prefill(session, ec_.layers, &tk, &tv, nullptr); break;
      case 1:
        tk.shape[1] += 1;
        status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
        break;
      case 2:
        tv.shape[0] -= 1;
        status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
        break;
      case 3:
        k[random_.below(static_cast<uint32_t>(k.size()))] = random_.below(2) == 0 ? NAN : INFINITY;
        status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
        EXPECT_EQ(status, KEYHOLE_NOT_FINITE);
        break;
      case 4:
        tq.shape[1] /= 2;
        status = keyhole_attend(session, 0, &tq, nullptr, nullptr, &out, nullptr);
        break;
      case 5: status = keyhole_attend_end(session, &out, nullptr); break;
      case 6: status = keyhole_session_set_index(session, "ivf:C=0x"); break;
      case 7: status = keyhole_session_set_mode(session, 7, 0); break;
      case 8: {
        keyhole_budget b;
        keyhole_budget_init(&b);
        b.error_target = 2.0F;
        status = keyhole_session_set_budget(session, KEYHOLE_ALL, KEYHOLE_ALL, &b);
        break;
      }
      default: {
        const int64_t many = sc_.max_tokens + 1;
        const std::vector<float> all(shape().kv(static_cast<uint32_t>(many)));
        tk = tv = tensor(all, {many, ec_.kv_heads, ec_.head_dim});
        status = keyhole_prefill(session, 0, &tk, &tv, nullptr);
      }
    }
    EXPECT_NE(status, KEYHOLE_OK);
    EXPECT_NE(status, KEYHOLE_INTERNAL) << keyhole_last_error();
  }

  void check(Sequence& s) {
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const keyhole_layer_tokens t = layer_tokens(s.session.get(), l);
      ASSERT_EQ(t.total, s.model.tokens(l));
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      if (t.total == 0) continue;
      const auto q = random_.many(shape().q(1));
      expect_truth(s, l, q, attend_only(s.session.get(), shape(), l, q));
    }
  }
  void expect_truth(const Sequence& s, uint32_t layer, const std::vector<float>& q,
                    const Answer& a) {
    std::vector<double> lse;
    const auto o = s.model.attend_all(layer, q, lse);
    expect_near(a, o, lse);
    heads_checked += ec_.q_heads;
  }
  [[nodiscard]] Shape shape() const { return Shape(ec_); }

  Numbers random_;
  keyhole_engine_config ec_;
  keyhole_session_config sc_;
  EnginePtr engine_;
  std::vector<Sequence> sequences_;
  TemporaryFolder folder_;
};

TEST(RandomCalls, EveryAnswerIsTheTruth) {
  const uint64_t first = from_environment("KEYHOLE_RANDOM_FIRST", 1);
  const uint64_t seeds = from_environment("KEYHOLE_RANDOM_SEEDS", unless_sanitized(60, 8));
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Driver(seed).run();
    if (HasFailure()) return;
  }
  std::printf("%" PRIu64 " heads checked\n", heads_checked);
}

}  // namespace
}  // namespace keyhole::test
