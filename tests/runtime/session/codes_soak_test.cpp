// Long decoding with flushes, truncations, forks and builds: the codes that a session has are, bit for bit, those that
// the reference makes of the same keys and values, on the host and on the test's device, and memory stays flat.
//
// KEYHOLE_SOAK_STEPS: decoding steps of each case, 400 where it is not set. By hand 200000.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "runtime/session/session.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kMost = 1500;      // tokens of a sequence
constexpr uint32_t kFlatFrom = 5000;  // steps after which memory has to be flat

uint32_t soak_steps() {
  const char* text = std::getenv("KEYHOLE_SOAK_STEPS");
  return text == nullptr ? 400 : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
}

/// Bytes of this process in memory.
uint64_t resident_bytes() {
  uint64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

class CodesSoak : public StreamTest {
 protected:
  CodesSoak() {
    engine_config_ = small_engine(1);
    engine_config_.q_heads = engine_config_.kv_heads = 2;
    rows_.resize(engine_config_.layers);
  }
  static keyhole_session_config coded(uint32_t flush_block) {
    keyhole_session_config c = small_session();
    c.index = "codes:k=2,v=2";
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.flush_block = flush_block;
    return c;
  }
  [[nodiscard]] uint32_t tokens() const {
    return static_cast<uint32_t>(rows_[0].k.size() / row_size());
  }

  void prefill_some(keyhole_session* s, uint32_t n) {
    for (Rows& rows : rows_) {
      const auto l = static_cast<uint32_t>(&rows - rows_.data());
      const auto k = numbers_.many(n * row_size()), v = numbers_.many(n * row_size());
      const auto q = numbers_.many(static_cast<size_t>(n * hq() * d()));
      const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
      const keyhole_tensor tq = tensor(q, {n, hq(), d()});
      ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
      rows.add(k, v);
    }
  }
  void step(keyhole_session* s, bool streams) {
    for (Rows& rows : rows_) {
      const auto l = static_cast<uint32_t>(&rows - rows_.data());
      const Token t = token();
      std::vector<float> lse(engine_config_.q_heads, NAN);
      if (streams) {
        std::vector<float> out(t.q.size());
        ASSERT_OK(enqueue(s, l, t, out, lse.data()));
        ASSERT_OK(keyhole_session_synchronize(s));
      } else {
        (void)attend_host(s, l, t, lse.data());
      }
      for (const float x : lse) ASSERT_TRUE(std::isfinite(x));
      rows.add(t.k, t.v);
    }
  }
  /// A random call that changes which tokens there are, or which session has them.
  void change(SessionPtr& s) {
    const uint32_t kind = tokens() >= kMost ? 0 : numbers_.below(6);
    if (kind < 2) {
      const uint32_t n = tokens() / 3 + numbers_.below(tokens() * 2 / 3);
      ASSERT_OK(keyhole_session_truncate(s.get(), n));
      for (Rows& rows : rows_) rows.truncate(n * row_size());
      ++truncations_;
    } else if (kind < 4) {
      s = fork_of(s.get());
      ++forks_;
    } else if (kind == 4) {
      ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    } else {
      prefill_some(s.get(), 1 + numbers_.below(300));
    }
  }
  /// Block `b` of a head, encoded from the rows as the caller gave them.
  std::vector<std::byte> fresh(uint32_t layer, uint32_t head, size_t b,
                               const index::Balance& balance) const {
    const auto view = [&](const std::vector<float>& x) {
      RowsView rows =
          dense_rows(x.data() + small_session().sink * row_size() + head * d(),
                     tokens() - small_session().sink, static_cast<uint32_t>(d()), DType::f32);
      rows.token_stride = static_cast<ptrdiff_t>(row_size());
      return rows;
    };
    const CodeShape shape{static_cast<uint32_t>(d()), 2, 2};
    std::vector<std::byte> out(shape.block_bytes());
    index::encode_block(shape, balance, cpu::select_kernels(),
                        {view(rows_[layer].k), view(rows_[layer].v)}, b * kCodeBlock, out.data());
    return out;
  }

  /// Runs the steps; check(session) after every change.
  template <class Check>
  void soak(SessionPtr s, bool streams, Check check) {
    const uint32_t steps = soak_steps();
    prefill_some(s.get(), 700);
    uint64_t flat = 0, most = 0, device = 0;
    const uint32_t between = steps < kFlatFrom ? 40 : 400;  // changes, at most
    uint32_t until = 1 + numbers_.below(between);
    for (uint32_t i = 0; i < steps; ++i) {
      step(s.get(), streams);
      if (HasFatalFailure()) return;
      if (--until != 0 && tokens() < kMost) continue;
      SCOPED_TRACE("step " + std::to_string(i));
      check(s.get());
      change(s);
      check(s.get());
      if (HasFatalFailure()) return;
      until = 1 + numbers_.below(between);
      const uint64_t now = resident_bytes();
      if (i < kFlatFrom) flat = std::max(flat, now);
      most = std::max(most, now);
      const uint64_t bytes = statistics(s.get()).device_bytes;
      if (device == 0) device = bytes;
      ASSERT_EQ(bytes, device);
    }
    check(s.get());
    RecordProperty("steps", std::to_string(steps));
    RecordProperty("truncations", std::to_string(truncations_));
    RecordProperty("forks", std::to_string(forks_));
    RecordProperty("blocks_compared", std::to_string(blocks_));
    RecordProperty("device_bytes", std::to_string(device));
    RecordProperty("resident_bytes_early", std::to_string(flat));
    RecordProperty("resident_bytes_most", std::to_string(most));
    EXPECT_GT(blocks_, 0U);
    EXPECT_GT(truncations_, 0U);
    EXPECT_GT(forks_, 0U);
    if (!kSanitized && steps > 2 * kFlatFrom) {
      EXPECT_LT(most, flat + (uint64_t{8} << 20));
    }
  }

  struct Rows {
    std::vector<float> k, v;
    void add(const std::vector<float>& more_k, const std::vector<float>& more_v) {
      k.insert(k.end(), more_k.begin(), more_k.end());
      v.insert(v.end(), more_v.begin(), more_v.end());
    }
    void truncate(size_t n) {
      k.resize(std::min(k.size(), n));
      v.resize(std::min(v.size(), n));
    }
  };
  [[nodiscard]] size_t row_size() const { return static_cast<size_t>(hkv() * d()); }

  std::vector<Rows> rows_;  // [layers]
  uint32_t truncations_ = 0, forks_ = 0;
  uint64_t blocks_ = 0;  // compared
};

TEST_F(CodesSoak, CodesOfTheHostAreThoseOfTheRows) {
  const EnginePtr engine = make_engine(engine_config_);
  soak(make_session(engine.get(), coded(8)), false, [&](keyhole_session* s) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      for (uint32_t h = 0; h < engine_config_.kv_heads; ++h) {
        const auto& session = static_cast<const runtime::Session&>(*s->session);
        const index::Index* index = session.keeper().head(l, h).index.get();
        if (index == nullptr || index->codes() == nullptr) continue;
        const index::KvCodes& codes = *index->codes();
        ASSERT_EQ(codes.blocks(), index->count() / kCodeBlock);
        for (size_t b = 0; b < codes.blocks(); ++b, ++blocks_) {
          const auto expected = fresh(l, h, b, codes.balance());
          ASSERT_EQ(0, std::memcmp(codes.block(b), expected.data(), expected.size()))
              << "layer " << l << ", head " << h << ", block " << b;
        }
      }
    }
  });
}

TEST_F(CodesSoak, CodesOfTheDeviceAreThoseOfTheRows) {
  StreamEngine device(engine_config_);
  device.codes_rest = true;  // what it would attend takes 10 ms a step
  keyhole_session_config config = coded(kCodeBlock);
  config.offload_placement = KEYHOLE_PLACE_DEVICE;
  soak(make_session(device.handle.get(), config), true, [&](keyhole_session* s) {
    ASSERT_OK(keyhole_session_synchronize(s));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      ASSERT_EQ(device.codes->count(l), layer_tokens(s, l).indexed / kCodeBlock);
      for (uint32_t h = 0; h < engine_config_.kv_heads; ++h) {
        for (uint32_t b = 0; b < device.codes->count(l); ++b, ++blocks_) {
          const auto expected = fresh(l, h, b, device.codes->balance(l, h));
          std::vector<std::byte> seen(expected.size());
          device.codes->read(l, h, b, seen.data());
          ASSERT_EQ(seen, expected) << "layer " << l << ", head " << h << ", block " << b;
        }
      }
    }
  });
}

}  // namespace
}  // namespace keyhole::test
