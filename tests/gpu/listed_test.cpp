// Many new tokens by lists of blocks of rows that lie in several places, beside double precision over the blocks that
// are due, and beside a prompt whose rows all lie on the device.
#include "gpu/listed.h"

#include <string>
#include <vector>

#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/new_tokens.h"
#include "gpu/listed_layout.h"
#include "tests/gpu/exact_attention.h"
#include "tests/gpu/prompt_layer.h"
#include "tests/list_truth.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;

enum class Kind : uint8_t { device, pinned, pageable, int8, pinned_int8 };
/// How many tokens lie where.
struct Place {
  Kind kind;
  uint32_t tokens;
};

PromptPattern a_shape(uint32_t first, uint32_t near) {
  PromptPattern p;
  p.dense = false;
  p.first_rows = first;
  p.near_rows = near;
  return p;
}
constexpr PromptChoice kChoices[] = {PromptChoice::sampled, PromptChoice::pooled,
                                     PromptChoice::vertical_slash};
/// One KV head at a time, and all at once.
constexpr size_t kLots[] = {1, kListedLotBytes};

class ListedTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    KEYHOLE_NEEDS_GPU();
    const Case& c = GetParam();
    shape_ = {c.kv_heads * c.group, c.kv_heads, c.dim, c.dtype, true};
    logits_.scale = 1.0F / std::sqrt(static_cast<float>(c.dim));
    logits_.softcap = c.softcap;
    resident_ = make_cuda_resident(small_shape(c.dim, c.dtype, c.group, c.kv_heads), {});
    check(cudaStreamCreate(&stream_), "stream");
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] std::unique_ptr<ListedAttention> make(size_t lot_bytes) const {
    return make_cuda_listed(resident_->place(), shape_, lot_bytes);
  }
  [[nodiscard]] size_t token() const { return size_t{shape_.kv_heads} * shape_.head_dim; }

  /// n new tokens behind those of the places, all random; some keys are larger, so that weights differ.
  void fill(const std::vector<Place>& places, uint32_t n, DType q_dtype) {
    n_ = n;
    q_dtype_ = q_dtype;
    before_ = 0;
    for (const Place& p : places) before_ += p.tokens;
    q_ = random_floats(rng_, size_t{n} * shape_.q_heads * shape_.head_dim);
    for (float& x : q_) x = rounded(x, q_dtype);
    k_ = random_floats(rng_, (before_ + n) * token());
    v_ = random_floats(rng_, k_.size());
    for (uint32_t i = 0; i < before_ + n; i += 37) {
      for (size_t j = 0; j < token(); ++j) k_[i * token() + j] *= 2.5F;
    }
    for (auto* x : {&k_, &v_}) {
      for (float& y : *x) y = rounded(y, shape_.dtype);
    }
  }
  /// Puts the rows where they are said to be; those in int8 get other values.
  void place(const std::vector<Place>& places) {
    rows_.clear();
    uint32_t first = 0;
    for (const Place& p : places) {
      const bool packed = p.kind == Kind::int8 || p.kind == Kind::pinned_int8;
      rows_.push_back(packed ? place_int8(p, first) : place_same(p, first));
      first += p.tokens;
    }
  }
  KvView place_same(const Place& p, uint32_t first) {
    const size_t d = shape_.head_dim, head = p.tokens * d, plane = head * shape_.kv_heads;
    std::vector<float> x(2 * plane);
    for (size_t h = 0; h < shape_.kv_heads; ++h) {
      for (size_t i = 0; i < p.tokens; ++i) {
        const size_t from = (first + i) * token() + h * d, to = h * head + i * d;
        std::copy_n(k_.begin() + from, d, x.begin() + to);
        std::copy_n(v_.begin() + from, d, x.begin() + plane + to);
      }
    }
    const Memory memory = p.kind == Kind::device   ? Memory::device
                          : p.kind == Kind::pinned ? Memory::pinned
                                                   : Memory::host;
    return head_by_head(keep(as_bytes(x, shape_.dtype), p.kind), p.tokens, shape_.dtype, memory);
  }
  KvView place_int8(const Place& p, uint32_t first) {
    const size_t d = shape_.head_dim, head = p.tokens * d, plane = head * shape_.kv_heads;
    const size_t blocks = (p.tokens + kScaleRows - 1) / kScaleRows;
    std::vector<std::byte> levels(2 * plane);
    std::vector<float> scales(blocks * token() * 2);
    for (float& s : scales)
      s = rounded(0.004F + 0.00001F * static_cast<float>(rng_() % 1000), DType::bf16);
    for (size_t h = 0; h < shape_.kv_heads; ++h) {
      for (size_t i = 0; i < head; ++i) {
        for (const size_t which : {0, 1}) {
          const auto level = static_cast<int8_t>(static_cast<int>(rng_() % 255) - 127);
          levels[which * plane + h * head + i] = static_cast<std::byte>(level);
          const size_t block = i / d / kScaleRows;
          const float scale = scales[((block * shape_.kv_heads + h) * 2 + which) * d + i % d];
          (which == 0 ? k_ : v_)[(first + i / d) * token() + h * d + i % d] =
              rounded(static_cast<float>(level) * scale, shape_.dtype);
        }
      }
    }
    const Kind kind = p.kind == Kind::int8 ? Kind::pageable : Kind::pinned;
    KvView r = head_by_head(keep(levels, kind), p.tokens, DType::i8,
                            kind == Kind::pinned ? Memory::pinned : Memory::host);
    const auto* const kept =
        reinterpret_cast<const uint16_t*>(keep(as_bytes(scales, DType::bf16), kind));
    r.keys.scales = {kept, 2 * token(), 0, static_cast<ptrdiff_t>(2 * d)};
    r.values.scales = {kept + d, 2 * token(), 0, static_cast<ptrdiff_t>(2 * d)};
    return r;
  }
  /// K and V at `data`, `[2, kv_heads, n, head_dim]`.
  [[nodiscard]] KvView head_by_head(const std::byte* data, uint32_t n, DType dtype,
                                    Memory memory) const {
    TensorView rows = dense_tensor(data, n, shape_.kv_heads, shape_.head_dim, dtype, memory);
    rows.token_stride = shape_.head_dim;
    rows.head_stride = ptrdiff_t{n} * shape_.head_dim;
    TensorView values = rows;
    values.data += shape_.kv_heads * n * rows.row_bytes();
    return {{rows}, {values}};
  }
  const std::byte* keep(const std::vector<std::byte>& bytes, Kind kind) {
    if (kind == Kind::device) return upload(bytes);
    if (kind == Kind::pageable) return pageable_.emplace_back(bytes).data();
    PinnedBuffer& p = pinned_.emplace_back(std::max<size_t>(bytes.size(), 1));
    std::copy(bytes.begin(), bytes.end(), p.data());
    return p.data();
  }
  [[nodiscard]] TensorOut tokens(const std::vector<float>& x, uint32_t heads, DType dtype) {
    return dense_tensor(upload(as_bytes(x, dtype)), x.size() / heads / shape_.head_dim, heads,
                        shape_.head_dim, dtype, Memory::device);
  }
  std::vector<float> newest(const std::vector<float>& x) const {
    return {x.begin() + static_cast<ptrdiff_t>(before_ * token()), x.end()};
  }

  struct Answer {
    std::vector<float> o, lse;
    bool operator==(const Answer&) const = default;
  };
  ListedTurn turn(const TensorOut& out, float* lse) {
    ListedTurn t;
    t.q = tokens(q_, shape_.q_heads, q_dtype_);
    t.k = tokens(newest(k_), shape_.kv_heads, DType::f32);
    t.v = tokens(newest(v_), shape_.kv_heads, shape_.dtype);
    t.out = out;
    t.lse = lse;
    t.n = n_;
    t.layer = {logits_, sinks_.empty() ? nullptr : sinks_.data()};
    t.before = rows_;
    return t;
  }
  Answer attend(ListedAttention& listed, std::span<const PromptPattern> patterns) {
    Answer a{std::vector<float>(q_.size(), NAN), std::vector<float>(n_ * shape_.q_heads, NAN)};
    float* const lse = upload(a.lse);
    const TensorOut out = tokens(a.o, shape_.q_heads, DType::f32);
    listed.attend(turn(out, lse), patterns, stream_);
    EXPECT_FALSE(listed.saw_bad_queries(stream_));
    return {download(reinterpret_cast<const float*>(out.data), a.o.size()),
            download(lse, a.lse.size())};
  }
  Answer attend(ListedAttention& listed, const PromptPattern& pattern) {
    return attend(listed, std::span(&pattern, 1));
  }
  /// The answer for the same tokens as a prompt that lies on the device, with queries in the shape's dtype.
  Answer of_prompt(PromptAttention& prompt, std::span<const PromptPattern> patterns) {
    Answer a{std::vector<float>(q_.size(), NAN), std::vector<float>(n_ * shape_.q_heads, NAN)};
    PromptStretch s;
    s.q = tokens(q_, shape_.q_heads, shape_.dtype);
    s.k = tokens(k_, shape_.kv_heads, shape_.dtype);
    s.v = tokens(v_, shape_.kv_heads, shape_.dtype);
    s.out = tokens(a.o, shape_.q_heads, DType::f32);
    s.lse = upload(a.lse);
    s.n = n_;
    s.rows = before_ + n_;
    s.logits = logits_;
    s.sinks = sinks_.empty() ? nullptr : sinks_.data();
    prompt.attend(s, patterns, stream_);
    check(cudaStreamSynchronize(stream_), "a prompt");
    return {download(reinterpret_cast<const float*>(s.out.data), a.o.size()),
            download(s.lse, a.lse.size())};
  }

  [[nodiscard]] double logit(uint32_t t, uint32_t head, uint32_t row) const {
    const size_t d = shape_.head_dim;
    return ExactAttention(logits_, &q_[(t * size_t{shape_.q_heads} + head) * d], d)
        .logit(&k_[row * token() + head / GetParam().group * d]);
  }
  /// Some tokens' answers are attention over those tokens up to their own that sees(position of the tile's first,
  /// token) says.
  template <class Sees>
  void expect_truth(const Answer& a, const Sees& sees) {
    const size_t d = shape_.head_dim;
    constexpr double kBound = 2e-3;
    double worst = 0.0, worst_sum = 0.0;
    for (uint32_t t = 0; t < n_; t += 1 + rng_() % (n_ / 12 + 1)) {
      const uint32_t tile = before_ + t / kListQueries * kListQueries;
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        const size_t at = t * size_t{shape_.q_heads} + h, head = h / GetParam().group * d;
        ExactAttention truth(logits_, &q_[at * d], d);
        for (uint32_t row = 0; row <= before_ + t; ++row) {
          if (sees(tile, row)) truth.add(&k_[row * token() + head], &v_[row * token() + head]);
        }
        if (!sinks_.empty()) truth.add_sink(sinks_[h]);
        raise(worst, relative_error(&a.o[at * d], truth.o()));
        raise(worst_sum, std::abs(double{a.lse[at]} - truth.lse()));
      }
    }
    EXPECT_LT(worst, kBound);
    EXPECT_LT(worst_sum, 2e-3);
  }
  void forget_uploads() {
    upload.clear();
    pinned_.clear();
    pageable_.clear();
  }

  std::mt19937 rng_{testing::UnitTest::GetInstance()->random_seed() + 13U};
  BlockedShape shape_;
  LogitParams logits_;
  std::vector<float> sinks_;  // learned; empty: none
  std::unique_ptr<Resident> resident_;
  cudaStream_t stream_ = nullptr;
  uint32_t n_ = 0, before_ = 0;
  DType q_dtype_ = DType::f32;
  std::vector<float> q_, k_, v_;  // `[n, q_heads, dim]`; `[before + n, kv_heads, dim]`
  std::vector<KvView> rows_;
  Uploads upload;
  std::deque<PinnedBuffer> pinned_;
  std::deque<std::vector<std::byte>> pageable_;
};

TEST_P(ListedTest, RowsOfAllPlacesComeInOrder) {
  const std::vector<std::vector<Place>> cases = {
      {},
      {{Kind::device, 70}, {Kind::pinned, 512}, {Kind::pageable, 300}, {Kind::device, 33}},
      {{Kind::pageable, 1}, {Kind::device, 5}, {Kind::device, 64}},
      {{Kind::device, 3}, {Kind::pinned_int8, 512}, {Kind::int8, 512}, {Kind::device, 90}},
      {{Kind::pinned, 640}}};
  for (const size_t lot : kLots) {
    const auto listed = make(lot);
    for (size_t i = 0; i < cases.size(); ++i) {
      // Queries of the shape's dtype go by Hopper's kernels where there are any.
      for (const DType q : {DType::f32, shape_.dtype}) {
        SCOPED_TRACE("lots of " + std::to_string(lot) + " bytes, case " + std::to_string(i) +
                     ", queries in " + dtype_name(q));
        fill(cases[i], i % 2 == 0 ? 300 : 129, q);
        place(cases[i]);
        sinks_ = i == 1 ? random_floats(rng_, shape_.q_heads) : std::vector<float>();
        expect_truth(attend(*listed, a_shape(99999, 0)), [](uint32_t, uint32_t) { return true; });
        expect_truth(attend(*listed, a_shape(64, 128)), [](uint32_t first, uint32_t row) {
          return row < 64 || row / 64 + 2 >= first / 64;
        });
        if (HasFailure()) return;
        forget_uploads();
      }
    }
  }
}

// All values of a block are a unit vector of its own here, so that answers show which blocks a tile has attended:
// lists hold the mass of the sampled queries, whose weights are known in double precision.
TEST_P(ListedTest, ListsAreThoseOfSampledQueries) {
  const uint32_t d = shape_.head_dim;
  const std::vector<Place> places = {{Kind::device, 40},
                                     {Kind::pinned, 512},
                                     {Kind::pageable, d * 64 - 512 - 300 - 130},
                                     {Kind::device, 90}};
  constexpr uint32_t kNew = 300;
  for (const size_t lot : kLots) {
    fill(places, kNew, shape_.dtype);
    for (uint32_t row = 0; row < before_ + n_; ++row) {
      for (size_t j = 0; j < token(); ++j) v_[row * token() + j] = j % d == row / 64 ? 1.0F : 0.0F;
    }
    place(places);
    ASSERT_EQ(before_ + n_, d * 64);
    PromptPattern pattern = pattern_of(PromptChoice::sampled);
    pattern.near_rows = 128;
    const auto listed = make(lot);
    const Answer a = attend(*listed, pattern);
    uint64_t attended = 0, seen = 0;
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      for (uint32_t first = 0; first < n_; first += kListQueries) {
        const uint32_t last = std::min(first + kListQueries, n_) - 1;
        const uint32_t end = (before_ + last) / 64 + 1;
        std::vector<double> share(end);
        uint32_t samples = 0;
        for (uint32_t t = (n_ - 1) % pattern.stride; t <= last; t += pattern.stride) {
          if (t < first) continue;
          ++samples;
          std::vector<double> w(end);
          double sum = 0;
          for (uint32_t row = 0; row <= before_ + t; ++row) {
            const double x = std::exp(logit(t, h, row));
            w[row / 64] += x;
            sum += x;
          }
          for (uint32_t b = 0; b < end; ++b) share[b] += w[b] / sum;
        }
        for (double& x : share) x /= samples;
        std::vector<uint32_t> list;
        for (uint32_t b = 0; b < end; ++b) {
          if (a.o[(last * size_t{shape_.q_heads} + h) * d + b] > 0.0F) list.push_back(b);
        }
        keyhole::test::expect_heaviest(list.data(), static_cast<uint32_t>(list.size()), share,
                                       {.first = 1,
                                        .near = 2,
                                        .own = (before_ + first) / 64,
                                        .mass = double{pattern.mass},
                                        .error = 2e-3,
                                        .close = 1.11});
        if (HasFatalFailure()) return;
        attended += list.size();
        seen += end;
      }
    }
    EXPECT_EQ(listed->blocks().attended, attended);
    EXPECT_EQ(listed->blocks().seen, seen);
    EXPECT_LT(attended, seen);
    forget_uploads();
  }
}

TEST_P(ListedTest, ChoosesAsAPromptOnTheDevice) {
  const std::vector<Place> places = {
      {Kind::device, 70}, {Kind::pinned, 768}, {Kind::int8, 256}, {Kind::device, 33}};
  fill(places, 700, shape_.dtype);
  place(places);
  const uint32_t heads = shape_.q_heads;
  std::vector<std::vector<PromptPattern>> cases;
  for (const PromptChoice choice : kChoices) cases.push_back({pattern_of(choice)});
  // Heads of their own; of some lots all are dense.
  cases.emplace_back();
  for (uint32_t h = 0; h < heads; ++h) {
    const bool dense = h / GetParam().group % 2 == 1;
    cases.back().push_back(dense ? PromptPattern{} : pattern_of(kChoices[h % 4]));
  }
  cases.emplace_back(heads, pattern_of(PromptChoice::sampled));
  cases.push_back({PromptPattern{}});
  for (const size_t lot : kLots) {
    const auto listed = make(lot);
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("lots of " + std::to_string(lot) + " bytes, case " + std::to_string(i));
      const auto prompt = make_cuda_prompt(0, {heads, shape_.kv_heads, shape_.head_dim});
      const PromptBlocks before = listed->blocks();
      const Answer wanted = of_prompt(*prompt, cases[i]);
      const Answer a = attend(*listed, cases[i]);
      EXPECT_LE(relative_error(a.o.data(), wanted.o), 1e-5);
      for (size_t j = 0; j < a.lse.size(); ++j) ASSERT_NEAR(a.lse[j], wanted.lse[j], 1e-4);
      EXPECT_EQ(listed->blocks().attended - before.attended, prompt->blocks().attended);
      EXPECT_EQ(listed->blocks().seen - before.seen, prompt->blocks().seen);
    }
    EXPECT_GT(listed->bytes(), ListedLayout(shape_, 700, before_ + 700, false, lot).bytes);
  }
}

TEST_P(ListedTest, AnswersMayTakeThePlaceOfQueries) {
  const std::vector<Place> places = {{Kind::pinned, 512}, {Kind::device, 100}};
  for (const size_t lot : kLots) {
    fill(places, 260, shape_.dtype);
    place(places);
    const PromptPattern pattern = pattern_of(PromptChoice::sampled);
    const auto listed = make(lot);
    const auto read = [&](const TensorView& x) { return download(x.data, q_.size() * 2); };
    ListedTurn apart = turn(tokens(q_, shape_.q_heads, shape_.dtype), nullptr);
    listed->attend(apart, std::span(&pattern, 1), stream_);
    EXPECT_FALSE(listed->saw_bad_queries(stream_));
    ListedTurn in_place = apart;
    in_place.out = tokens(q_, shape_.q_heads, shape_.dtype);
    in_place.q = in_place.out;
    listed->attend(in_place, std::span(&pattern, 1), stream_);
    EXPECT_FALSE(listed->saw_bad_queries(stream_));
    EXPECT_EQ(read(apart.out), read(in_place.out));
    // As does a query that is not finite.
    q_[5] = NAN;
    ListedTurn bad = turn(apart.out, nullptr);
    listed->attend(bad, std::span(&pattern, 1), stream_);
    EXPECT_TRUE(listed->saw_bad_queries(stream_));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ListedTest,
                         testing::Values(Case{64, 2, 2, DType::f16}, Case{128, 4, 1, DType::f16},
                                         Case{128, 2, 4, DType::bf16},
                                         Case{80, 3, 1, DType::bf16, 20.0F},
                                         Case{256, 1, 3, DType::f16}),
                         name_of);

TEST(Listed, MemoryStaysWithinTheLimit) {
  KEYHOLE_NEEDS_GPU();
  const BlockedShape shape{8, 2, 128, DType::f16};
  const ResidentShape r = small_shape(128, DType::f16, 4);
  constexpr uint32_t kNew = 100;
  const size_t own = ListedLayout(shape, kNew, kNew, false).bytes;
  DeviceBuffer rows(size_t{4 * kNew} * 8 * 128 * 2);
  rows.clear();
  const auto tokens = [&](size_t at, uint32_t n, uint32_t heads) {
    return dense_tensor(rows.as<std::byte>(at), n, heads, 128, DType::f16, Memory::device);
  };
  const PromptPattern pattern = pattern_of(PromptChoice::sampled);
  const auto attend = [&](ListedAttention& listed, uint32_t n) {
    ListedTurn t;
    t.q = tokens(0, n, 8);
    t.k = t.v = tokens(0, n, 2);
    t.out = tokens(rows.bytes() / 2, n, 8);
    t.n = n;
    t.layer.logits.scale = 0.1F;
    listed.attend(t, std::span(&pattern, 1), nullptr);
    EXPECT_FALSE(listed.saw_bad_queries(nullptr));
  };
  // Not for the lists.
  const auto narrow = make_cuda_resident(r, {}, cuda_resident_bytes(r) + own);
  const auto refused = make_cuda_listed(*narrow, shape);
  EXPECT_EQ(refused->bytes(), 0U);
  try {
    attend(*refused, kNew);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_device_memory);
  }
  refused->release();
  EXPECT_EQ(refused->bytes(), 0U);
  const auto resident =
      make_cuda_resident(r, {}, cuda_resident_bytes(r) + own + (size_t{1} << 20U));
  const auto listed = make_cuda_listed(*resident, shape);
  for (int round = 0; round < 3; ++round) {
    attend(*listed, kNew);
    EXPECT_GT(listed->bytes(), own);
    EXPECT_LE(listed->bytes(), own + (size_t{1} << 20U));
    EXPECT_THROW(attend(*listed, 2 * kNew + 5000), Error);
    attend(*listed, 10);
    listed->release();
    EXPECT_EQ(listed->bytes(), 0U);
  }
  EXPECT_EQ(listed->blocks().attended, listed->blocks().seen);
  EXPECT_EQ(listed->blocks().seen, 3U * 8 * (2 + 1));
}

TEST(Listed, RefusesWhatItCannotDo) {
  KEYHOLE_NEEDS_GPU();
  const auto resident = make_cuda_resident(small_shape(128, DType::f16, 4), {});
  EXPECT_THROW((void)make_cuda_listed(*resident, {8, 2, 128, DType::f32}), Error);
  EXPECT_THROW((void)make_cuda_listed(*resident, {8, 2, 112, DType::f16}), Error);
  const auto listed = make_cuda_listed(*resident, {8, 2, 128, DType::f16});
  const auto says = [&](uint32_t n, size_t patterns, const KvView& rows) -> std::string {
    const std::vector<PromptPattern> some(patterns, pattern_of(PromptChoice::sampled));
    ListedTurn t;
    t.n = n;
    t.before = std::span(&rows, 1);
    try {
      listed->attend(t, some, nullptr);
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      return e.what();
    }
    return "";
  };
  KvView rows;
  EXPECT_NE(says(0, 1, rows).find("0 tokens"), std::string::npos);
  EXPECT_NE(says(1, 3, rows).find("3 patterns of 8 query heads"), std::string::npos);
  rows.keys.dtype = DType::f16;
  rows.keys.tokens = kMostListedRows;
  EXPECT_NE(says(1, 1, rows).find("allowed: 4194240"), std::string::npos);
  rows.keys.tokens = 1;
  rows.keys.dtype = DType::bf16;
  EXPECT_NE(says(1, 1, rows).find("rows in bf16 of a shape in f16"), std::string::npos);
  rows.keys.dtype = DType::i8;
  EXPECT_NE(says(1, 1, rows).find("rows in i8"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::gpu
