// Where tokens lie, against a list of them: after any order of appends, truncations and copies,
// each token is in one place, with its own K and V.
#include "runtime/kv/sequence.h"

#include <gtest/gtest.h>

#include <deque>
#include <sstream>

#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

using test::Numbers;

constexpr uint32_t kLayers = 2, kHeads = 3, kDim = 64;
constexpr uint32_t kSink = 5, kWindow = 12, kFlush = 7, kMax = 600;

/// What an element of K of a token is; of V one more. Different for all tokens, layers and heads
/// that a test has.
float element(uint32_t serial, uint32_t layer, uint32_t head) {
  return static_cast<float>((serial * 7 + layer * 3 + head) % 2000);
}

/// The rule, one token after the other: the window falls back to its newest when a call does not
/// fit.
struct Place {
  std::vector<uint32_t> sink, rows;
  std::deque<uint32_t> window;

  void append(uint32_t first, uint32_t n) {
    for (; n != 0 && sink.size() < kSink; --n) sink.push_back(first++);
    const bool overflows = window.size() + n > kWindow + kFlush;
    for (; n != 0; --n) window.push_back(first++);
    while (overflows && window.size() > kWindow) {
      rows.push_back(window.front());
      window.pop_front();
    }
  }
  void drop_newest() {
    if (window.empty()) {
      sink.pop_back();
    } else {
      window.pop_back();
    }
  }
  [[nodiscard]] uint32_t tokens() const {
    return static_cast<uint32_t>(sink.size() + rows.size() + window.size());
  }
  void truncate(uint32_t n) {
    while (tokens() > n && !window.empty()) window.pop_back();
    while (tokens() > n && !rows.empty()) rows.pop_back();
    while (tokens() > n) sink.pop_back();
  }
};

class SequenceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto ec = test::small_engine(2);
    ec.layers = kLayers;
    ec.kv_heads = kHeads;
    ec.q_heads = kHeads;
    ec.kv_dtype = KEYHOLE_F16;
    engine_ = std::make_unique<Engine>(ec);
    auto sc = test::small_session();
    sc.max_tokens = kMax;
    sc.sink = kSink;
    sc.window = kWindow;
    sc.flush_block = kFlush;
    params_ = check_session(sc, engine_->model());
  }
  void append(Sequence& sequence, uint32_t layer, uint32_t n) {
    std::vector<float> k, v;
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < kHeads; ++h) {
        k.insert(k.end(), kDim, element(serial_ + t, layer, h));
        v.insert(v.end(), kDim, element(serial_ + t, layer, h) + 1.0F);
      }
    }
    const auto rows = [&](const std::vector<float>& values) {
      return dense_tensor(reinterpret_cast<const std::byte*>(values.data()), n, kHeads, kDim,
                          DType::f32);
    };
    sequence.append(layer, rows(k), rows(v));
    places_[layer].append(serial_, n);
    serial_ += n;
  }
  void expect_elements(const std::byte* row, float value) const {
    std::vector<float> seen(kDim);
    engine_->kernels().to_f32[static_cast<int>(DType::f16)](row, seen.data(), kDim);
    for (const float x : seen) ASSERT_EQ(value, x);
  }
  void expect_places(Sequence& sequence) const {
    for (uint32_t l = 0; l < kLayers; ++l) {
      const Place& place = places_[l];
      ASSERT_EQ(place.sink.size(), sequence.sink(l));
      ASSERT_EQ(place.rows.size(), sequence.rows(l));
      ASSERT_EQ(place.window.size(), sequence.window(l));
      ASSERT_EQ(place.tokens(), sequence.tokens(l));
      ASSERT_EQ(place.window.size() == kWindow + kFlush, sequence.window_is_full(l));
      for (uint32_t h = 0; h < kHeads; ++h) {
        const KvView kv = sequence.view(l, h);
        ASSERT_EQ(place.rows.size(), kv.keys.tokens);
        for (size_t r = 0; r < place.rows.size(); ++r) {
          expect_elements(kv.keys.row(r), element(place.rows[r], l, h));
          expect_elements(kv.values.row(r), element(place.rows[r], l, h) + 1.0F);
        }
      }
      std::vector<uint32_t> resident = place.sink;
      resident.insert(resident.end(), place.window.begin(), place.window.end());
      const size_t row = kDim * 2;
      std::vector<std::byte> k(resident.size() * kHeads * row), v(k.size());
      sequence.resident().read(l, k.data(), v.data());
      for (size_t t = 0; t < resident.size(); ++t) {
        for (uint32_t h = 0; h < kHeads; ++h) {
          expect_elements(&k[(t * kHeads + h) * row], element(resident[t], l, h));
          expect_elements(&v[(t * kHeads + h) * row], element(resident[t], l, h) + 1.0F);
        }
      }
    }
  }

  std::unique_ptr<Engine> engine_;
  SessionParams params_;
  std::vector<Place> places_{kLayers};
  uint32_t serial_ = 0;
};

TEST_F(SequenceTest, HoldsEveryTokenInOnePlace) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Numbers numbers(seed);
    places_.assign(kLayers, {});
    auto sequence = std::make_unique<Sequence>(*engine_, params_);
    for (int i = 0; i < 150; ++i) {
      const uint32_t operation = numbers.below(12);
      const uint32_t layer = numbers.below(kLayers);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", operation " + std::to_string(i) + ": " +
                   std::to_string(operation));
      const uint32_t held = sequence->tokens(layer);
      if (operation < 6) {
        append(*sequence, layer, std::min(numbers.below(8), kMax - held));
      } else if (operation < 8) {
        append(*sequence, layer, std::min(numbers.below(120), kMax - held));
      } else if (operation == 8 && held != 0 && (sequence->window(layer) != 0 || held <= kSink)) {
        sequence->drop_newest(layer);
        places_[layer].drop_newest();
      } else if (operation == 9) {
        const uint32_t n = numbers.below(held + 3);
        sequence->truncate(layer, n);
        places_[layer].truncate(n);
      } else if (operation == 10) {
        auto copy = std::make_unique<Sequence>(*engine_, params_);
        copy->copy_from(*sequence);
        sequence = std::move(copy);
      } else if (operation == 11) {
        std::stringstream file;
        ChecksumWriter out(file);
        sequence->save(out);
        out.finish();
        auto copy = std::make_unique<Sequence>(*engine_, params_);
        const std::string bytes = file.str();
        const MemorySource source(bytes);
        ChecksumReader in(source, &engine_->pool());
        copy->load(in);
        in.finish();
        sequence = std::move(copy);
      }
      expect_places(*sequence);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SequenceTest, SplitsAsTruncateDoes) {
  Sequence sequence(*engine_, params_);
  append(sequence, 0, 100);
  for (const uint32_t n : {100U, 95U, 80U, 50U, 6U, 5U, 3U, 0U}) {
    const Sequence::Split split = sequence.split(0, n);
    ASSERT_EQ(n, split.sink + split.rows + split.window);
    sequence.truncate(0, n);
    ASSERT_EQ(split.sink, sequence.sink(0));
    ASSERT_EQ(split.rows, sequence.rows(0));
    ASSERT_EQ(split.window, sequence.window(0));
  }
}

TEST_F(SequenceTest, TakesWhatADeviceHasEvicted) {
  Sequence sequence(*engine_, params_);
  append(sequence, 0, kSink + kWindow);
  const KvView before = sequence.view(0, 1);
  const size_t bytes = size_t{kHeads} * kDim * 2;
  for (size_t i = 0; i < 3 * bytes; ++i) {
    sequence.staging_k()[i] = static_cast<std::byte>(i / (kDim * 2));
    sequence.staging_v()[i] = static_cast<std::byte>(100 + i / (kDim * 2));
  }
  sequence.store_staged(0, 3);
  ASSERT_EQ(3U, sequence.rows(0));
  EXPECT_EQ(before.keys.data, sequence.view(0, 1).keys.data) << "rows stay where they are";
  for (uint32_t t = 0; t < 3; ++t) {
    for (uint32_t h = 0; h < kHeads; ++h) {
      EXPECT_EQ(static_cast<std::byte>(t * kHeads + h), *sequence.view(0, h).keys.row(t));
      EXPECT_EQ(static_cast<std::byte>(100 + t * kHeads + h), *sequence.view(0, h).values.row(t));
    }
  }
}

TEST_F(SequenceTest, RefusesCountsThatNoSequenceHas) {
  const auto load = [&](std::initializer_list<uint32_t> counts) {
    std::stringstream file;
    ChecksumWriter out(file);
    for (const uint32_t c : counts) out.value(c);
    out.finish();
    Sequence sequence(*engine_, params_);
    const std::string bytes = file.str();
    const MemorySource source(bytes);
    ChecksumReader in(source);
    sequence.load(in);
  };
  for (const auto& counts : {std::initializer_list<uint32_t>{kSink + 1, 0, 0},
                             {kSink, 0, kWindow + kFlush + 1},
                             {kSink - 1, 1, 0},
                             {kSink - 1, 0, 1},
                             {kSink, kMax, 0},
                             {kSink, 0xFFFFFFFF, 5},
                             {1, 0xFFFFFFFF, 1}}) {
    EXPECT_THROW(load(counts), Error);
  }
}

}  // namespace
}  // namespace keyhole::runtime
