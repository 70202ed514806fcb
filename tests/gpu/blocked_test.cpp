// Attention of many tokens at once beside double precision: shapes, dtypes, numbers of tokens around tiles and pieces,
// rows of every place, masks, int8.
#include "gpu/blocked.h"

#include "gpu/blocked_layout.h"
#include "tests/gpu/exact_attention.h"
#include "tests/gpu/prompt_layer.h"
#include "tests/scoped_variable.h"

namespace keyhole::gpu {
namespace {

using namespace test;  // NOLINT

using Case = PromptCase;

/// Rows `[kv_heads][n, dim]`, rounded to the dtype.
struct HeadRows {
  std::vector<float> k, v;
  uint32_t n = 0;
};

class BlockedTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    KEYHOLE_NEEDS_GPU();
    shape_ = {c.kv_heads * c.group, c.kv_heads, c.dim, c.dtype};
    logits_.scale = 1.3F / std::sqrt(static_cast<float>(c.dim));
    logits_.softcap = c.softcap;
    shape_.rows_in_int8 = true;
    ResidentShape r = small_shape(c.dim, c.dtype, c.group, c.kv_heads);
    resident_ = make_cuda_resident(r, {});
    blocked_ = make_cuda_blocked(*resident_, shape_);
    check(cudaStreamCreate(&stream_), "stream");
  }
  void TearDown() override {
    blocked_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  HeadRows rows(uint32_t n, DType dtype) {
    HeadRows r;
    r.n = n;
    r.k = random_floats(rng_, size_t{shape_.kv_heads} * n * shape_.head_dim);
    r.v = random_floats(rng_, r.k.size());
    for (auto* x : {&r.k, &r.v}) {
      for (float& y : *x) y = rounded(y, dtype);
    }
    return r;
  }
  /// `[n, heads, dim]` from `[heads][n, dim]`.
  static std::vector<float> by_token(const std::vector<float>& x, uint32_t heads, uint32_t n,
                                     uint32_t dim) {
    std::vector<float> y(x.size());
    for (uint32_t h = 0; h < heads; ++h) {
      for (uint32_t t = 0; t < n; ++t) {
        std::copy_n(x.begin() + (size_t{h} * n + t) * dim, dim,
                    y.begin() + (size_t{t} * heads + h) * dim);
      }
    }
    return y;
  }

  /// Query head h of token t over all rows of `all`, and of the last of them those that `sees` says.
  template <class Sees>
  void expect_truth(const std::vector<float>& q, uint32_t n, const std::vector<HeadRows>& all,
                    const HeadRows& own, const Sees& sees, const std::vector<float>& out,
                    const std::vector<float>& lse) {
    const uint32_t d = shape_.head_dim, group = shape_.q_heads / shape_.kv_heads;
    const double bound = shape_.dtype == DType::f16 ? 1e-3 : 2e-4;
    double worst = 0.0, worst_sum = 0.0;
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t h = 0; h < shape_.q_heads; ++h) {
        const size_t at = size_t{t} * shape_.q_heads + h;
        ExactAttention truth(logits_, &q[at * d], d);
        const auto add = [&](const HeadRows& r, uint32_t i) {
          const size_t row = (size_t{h / group} * r.n + i) * d;
          truth.add(&r.k[row], &r.v[row]);
        };
        for (const HeadRows& r : all) {
          for (uint32_t i = 0; i < r.n; ++i) add(r, i);
        }
        for (uint32_t i = 0; i < own.n; ++i) {
          if (sees(t, i)) add(own, i);
        }
        if (!sinks_.empty()) truth.add_sink(sinks_[h]);
        raise(worst, relative_error(&out[at * d], truth.o()));
        raise(worst_sum, std::abs(double{lse[at]} - truth.lse()));
      }
    }
    EXPECT_LT(worst, bound);
    EXPECT_LT(worst_sum, 1e-3);
  }

  TensorView tokens(const std::vector<float>& x, uint32_t heads, DType dtype) {
    const std::byte* const data = upload(as_bytes(x, dtype));
    return dense_tensor(data, x.size() / heads / shape_.head_dim, heads, shape_.head_dim, dtype,
                        Memory::device);
  }
  /// n rows of each head, one head behind the other.
  [[nodiscard]] KvView head_by_head(const std::byte* k, const std::byte* v, uint32_t n,
                                    Memory memory) const {
    TensorView rows = dense_tensor(k, n, shape_.kv_heads, shape_.head_dim, shape_.dtype, memory);
    rows.token_stride = shape_.head_dim;
    rows.head_stride = ptrdiff_t{n} * shape_.head_dim;
    TensorView values = rows;
    values.data = v;
    return {{rows}, {values}};
  }

  /// The answers of n tokens with queries of `q_dtype` over rows of the host, of the device, and their own.
  void run(uint32_t n, uint32_t on_host, uint32_t on_device, DType q_dtype,
           const uint64_t* mask = nullptr) {
    SCOPED_TRACE(std::to_string(n) + " tokens, " + std::to_string(on_host) + " rows of the host, " +
                 std::to_string(on_device) + " of the device, queries in " + dtype_name(q_dtype));
    const uint32_t d = shape_.head_dim;
    std::vector<float> q = random_floats(rng_, size_t{n} * shape_.q_heads * d);
    for (float& x : q) x = rounded(x, q_dtype);
    const HeadRows host = rows(on_host, shape_.dtype), device = rows(on_device, shape_.dtype);
    const HeadRows own = rows(n, shape_.dtype);
    const auto host_k = as_bytes(host.k, shape_.dtype), host_v = as_bytes(host.v, shape_.dtype);
    PinnedBuffer pinned(std::max<size_t>(host_k.size() * 2, 1));
    std::copy(host_k.begin(), host_k.end(), pinned.data());
    std::copy(host_v.begin(), host_v.end(), pinned.data() + host_k.size());

    blocked_->begin(tokens(q, shape_.q_heads, q_dtype),
                    {logits_, sinks_.empty() ? nullptr : sinks_.data()}, stream_);
    blocked_->attend(head_by_head(pinned.data(), pinned.data() + host_k.size(), on_host,
                                  on_host % 2 == 0 ? Memory::pinned : Memory::host),
                     stream_);
    if (on_device != 0) {
      blocked_->attend(
          head_by_head(upload(as_bytes(device.k, shape_.dtype)),
                       upload(as_bytes(device.v, shape_.dtype)), on_device, Memory::device),
          stream_);
    }
    blocked_->attend_new(
        tokens(by_token(own.k, shape_.kv_heads, n, d), shape_.kv_heads, DType::f32),
        tokens(by_token(own.v, shape_.kv_heads, n, d), shape_.kv_heads, shape_.dtype), mask,
        stream_);
    float* const device_out = upload(std::vector<float>(q.size()));
    float* const device_lse = upload(std::vector<float>(size_t{n} * shape_.q_heads));
    blocked_->finish(dense_tensor(reinterpret_cast<std::byte*>(device_out), n, shape_.q_heads, d,
                                  DType::f32, Memory::device),
                     device_lse, stream_);
    EXPECT_FALSE(blocked_->saw_bad_queries(stream_));
    const auto out = download(device_out, q.size());
    const auto lse = download(device_lse, size_t{n} * shape_.q_heads);
    expect_truth(
        q, n, {host, device}, own,
        [&](uint32_t t, uint32_t i) { return mask == nullptr ? i <= t : (mask[t] >> i & 1U) != 0; },
        out, lse);
    upload.clear();
  }

  std::mt19937 rng_{7};
  BlockedShape shape_;
  LogitParams logits_;
  std::vector<float> sinks_;  // learned; empty: none
  std::unique_ptr<Resident> resident_;
  std::unique_ptr<BlockedAttention> blocked_;
  cudaStream_t stream_ = nullptr;
  Uploads upload;
};

TEST_P(BlockedTest, EqualsDoublePrecision) {
  for (const uint32_t n : {1U, 5U, 64U, 65U, 150U}) run(n, 0, 0, DType::f32);
  run(3, 1, 0, DType::f32);
  run(70, 63, 65, DType::f32);
  run(70, 200, 1, GetParam().dtype);
  run(2, 1000, 700, DType::f32);
}

/// Of heads of 512 with fewer queries in a thread block, as on GPUs for desktops: of one number, and of two.
TEST_P(BlockedTest, In99KiBToo) {
  if (GetParam().dim <= 256) GTEST_SKIP() << "takes no more on any device";
  const keyhole::test::ScopedVariable forced("KEYHOLE_CUDA_CAPABILITY", "8.6");
  for (const DType dtype : {GetParam().dtype, DType::f32}) {
    for (const uint32_t n : {1U, 31U, 33U}) run(n, 0, 0, dtype);
    run(70, 200, 65, dtype);
  }
}

TEST_P(BlockedTest, RowsOfTheHostComeInPieces) {
  const uint32_t piece = BlockedLayout(shape_, 1).piece_rows;
  if (piece > 9000) GTEST_SKIP() << "double precision would take long over " << piece << " rows";
  run(3, 2 * piece + 77, 10, DType::f32);
}

TEST_P(BlockedTest, TreesOfDrafts) {
  uint64_t mask[64];
  for (uint32_t i = 0; i < 64; ++i)
    mask[i] = (uint64_t{rng_()} << 32U | rng_()) % (2ULL << i | uint64_t{i == 63}) | 1ULL << i;
  mask[63] |= 1ULL << 63U;
  run(64, 40, 30, DType::f32, mask);
  run(7, 0, 30, DType::f32, mask);
}

TEST_P(BlockedTest, LearnedSinks) {
  sinks_ = random_floats(rng_, shape_.q_heads);
  for (float& sink : sinks_) sink *= 8.0F;
  sinks_[0] = -INFINITY;
  run(70, 63, 65, DType::f32);
  run(1, 0, 0, DType::f32);
}

TEST_P(BlockedTest, RowsInInt8) {
  const uint32_t n = 9, rows = 256 * 3, d = shape_.head_dim;
  std::vector<int8_t> k(size_t{shape_.kv_heads} * rows * d), v(k.size());
  for (auto* x : {&k, &v}) {
    for (int8_t& y : *x) y = static_cast<int8_t>(static_cast<int>(rng_() % 255) - 127);
  }
  std::vector<__nv_bfloat16> scales(size_t{3} * shape_.kv_heads * 2 * d);
  for (auto& s : scales)
    s = __float2bfloat16_rn(0.002F + 0.00001F * static_cast<float>(rng_() % 1000));
  HeadRows meant;
  meant.n = rows;
  for (uint32_t which = 0; which < 2; ++which) {
    for (size_t i = 0; i < k.size(); ++i) {
      const size_t head = i / d / rows, row = i / d % rows;
      const float s =
          __bfloat162float(scales[((row / 256 * shape_.kv_heads + head) * 2 + which) * d + i % d]);
      (which == 0 ? meant.k : meant.v)
          .push_back(rounded(static_cast<float>((which == 0 ? k : v)[i]) * s, shape_.dtype));
    }
  }
  const std::vector<float> q = random_floats(rng_, size_t{n} * shape_.q_heads * d);
  const HeadRows own = this->rows(n, shape_.dtype);
  blocked_->begin(tokens(q, shape_.q_heads, DType::f32), {logits_}, stream_);
  // Pageable memory.
  KvView packed = head_by_head(reinterpret_cast<const std::byte*>(k.data()),
                               reinterpret_cast<const std::byte*>(v.data()), rows, Memory::host);
  for (RowsView* part : {&packed.keys, &packed.values}) {
    const auto* const first = reinterpret_cast<const uint16_t*>(scales.data());
    part->dtype = DType::i8;
    part->scales = {part == &packed.keys ? first : first + d, size_t{2} * shape_.kv_heads * d, 0,
                    ptrdiff_t{2} * d};
  }
  blocked_->attend(packed, stream_);
  blocked_->attend_new(tokens(by_token(own.k, shape_.kv_heads, n, d), shape_.kv_heads, DType::f32),
                       tokens(by_token(own.v, shape_.kv_heads, n, d), shape_.kv_heads, DType::f32),
                       nullptr, stream_);
  float* const device_out = upload(std::vector<float>(q.size()));
  float* const device_lse = upload(std::vector<float>(size_t{n} * shape_.q_heads));
  blocked_->finish(dense_tensor(reinterpret_cast<std::byte*>(device_out), n, shape_.q_heads, d,
                                DType::f32, Memory::device),
                   device_lse, stream_);
  check(cudaStreamSynchronize(stream_), "stream");
  const auto out = download(device_out, q.size());
  const auto lse = download(device_lse, size_t{n} * shape_.q_heads);
  expect_truth(
      q, n, {meant}, own, [](uint32_t t, uint32_t i) { return i <= t; }, out, lse);
}

TEST_P(BlockedTest, TellsOfQueriesThatAreNotFinite) {
  std::vector<float> q = random_floats(rng_, size_t{2} * shape_.q_heads * shape_.head_dim);
  q.back() = NAN;
  blocked_->begin(tokens(q, shape_.q_heads, DType::f32), {logits_}, stream_);
  EXPECT_TRUE(blocked_->saw_bad_queries(stream_));
  q.back() = 1.0F;
  blocked_->begin(tokens(q, shape_.q_heads, DType::f32), {logits_}, stream_);
  EXPECT_FALSE(blocked_->saw_bad_queries(stream_));
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockedTest,
                         testing::Values(Case{64, 2, 1, DType::f16}, Case{80, 1, 3, DType::bf16},
                                         Case{96, 2, 2, DType::f16}, Case{128, 8, 4, DType::f16},
                                         Case{128, 2, 4, DType::bf16, 20.0F},
                                         Case{256, 1, 16, DType::f16, 30.0F},
                                         Case{256, 2, 2, DType::bf16}, Case{64, 1, 7, DType::bf16},
                                         Case{512, 1, 8, DType::f16}, Case{512, 2, 4, DType::bf16},
                                         Case{512, 2, 1, DType::f16, 20.0F}),
                         name_of);

TEST(Blocked, MemoryStaysWithinTheLimit) {
  KEYHOLE_NEEDS_GPU();
  const BlockedShape shape{8, 2, 128, DType::f16};
  ResidentShape r = small_shape(128, DType::f16, 4);
  const auto resident =
      make_cuda_resident(r, {}, cuda_resident_bytes(r) + blocked_bytes(shape, 100));
  const auto blocked = make_cuda_blocked(*resident, shape);
  DeviceBuffer q(size_t{200} * 8 * 128 * 4);
  q.clear();
  const auto rows = [&](uint32_t n) {
    return dense_tensor(q.data(), n, 8, 128, DType::f32, Memory::device);
  };
  EXPECT_EQ(blocked->bytes(), 0U);
  blocked->begin(rows(100), {}, nullptr);
  EXPECT_EQ(blocked->bytes(), blocked_bytes(shape, 100));
  try {
    blocked->begin(rows(200), {}, nullptr);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_device_memory);
  }
  blocked->begin(rows(100), {}, nullptr);
  blocked->release();
  EXPECT_EQ(blocked->bytes(), 0U);
}

TEST(Blocked, ShapesWithoutKernels) {
  EXPECT_NE(why_no_blocked({8, 2, 128, DType::f32}), "");
  EXPECT_NE(why_no_blocked({8, 2, 112, DType::f16}), "");
  EXPECT_EQ(why_no_blocked({8, 2, 80, DType::bf16}), "");
}

}  // namespace
}  // namespace keyhole::gpu
