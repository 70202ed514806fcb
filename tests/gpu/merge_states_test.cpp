// The merge of states in device memory, compared with sums in double precision: any number of states, sizes, dtypes and
// both bases; empty states and NaN; in place; in a captured graph.
#include "gpu/states.h"

#include <gtest/gtest.h>

#include "tests/captured_graph.h"
#include "tests/gpu/stream_fixture.h"

namespace keyhole::gpu::test {
namespace {

constexpr double kLn2Double = 0.69314718055994530942;

/// n states of `rows` rows in device memory, and as the device has them.
struct Merge {
  Merge(std::mt19937& rng, uint32_t states, uint32_t n_rows, uint32_t n_dim, DType of, bool log2)
      : rows(n_rows), dim(n_dim), dtype(of), base2(log2) {
    std::uniform_real_distribution<float> lses(-20.0F, 90.0F);
    for (uint32_t i = 0; i < states; ++i) {
      o.push_back(random_floats(rng, size_t{rows} * dim));
      for (float& x : o.back()) x = rounded(x, dtype);
      lse.emplace_back(rows);
      for (uint32_t r = 0; r < rows; ++r) {
        // Some rows have their states close together, so that many of them count.
        lse.back()[r] = r % 3 == 0 ? lses(rng) : lses(rng) * 0.02F;
        if (rng() % 5 == 0) make_empty(i, r);
      }
    }
    for (uint32_t i = 0; i < states && rows > 1; ++i) make_empty(i, 1);
  }
  /// What lies in o of an empty state must not matter.
  void make_empty(uint32_t state, uint32_t row) {
    lse[state][row] = -INFINITY;
    std::fill_n(o[state].begin() + size_t{row} * dim, dim, NAN);
  }
  void to_device() {
    for (size_t i = 0; i < o.size(); ++i) {
      device_o.push_back(std::make_unique<DeviceArray>(rows, dim, dtype));
      device_o.back()->write(o[i]);
      device_lse.push_back(std::make_unique<DeviceArray>(1, rows, DType::f32));
      device_lse.back()->write(lse[i]);
      o_at.push_back(device_o.back()->rows().data);
      lse_at.push_back(device_lse.back()->floats());
    }
  }
  void enqueue(void* out, DType out_dtype, float* out_lse, Stream stream) const {
    merge_states({.o = o_at.data(),
                  .lse = lse_at.data(),
                  .count = static_cast<uint32_t>(o.size()),
                  .rows = rows,
                  .dim = dim,
                  .dtype = dtype,
                  .base2 = base2,
                  .out = out,
                  .out_dtype = out_dtype,
                  .out_lse = out_lse},
                 stream);
  }
  [[nodiscard]] States truth() const {
    const double unit = base2 ? kLn2Double : 1.0;  // of a lse, in natural logarithms
    States all;
    all.o.assign(size_t{rows} * dim, 0.0);
    all.lse.assign(rows, -INFINITY);
    for (uint32_t r = 0; r < rows; ++r) {
      double top = -INFINITY, sum = 0.0;
      for (const auto& l : lse) top = std::max(top, unit * double{l[r]});
      if (top == -INFINITY) continue;
      for (size_t i = 0; i < o.size(); ++i) {
        if (lse[i][r] == -INFINITY) continue;
        const double w = std::exp(unit * double{lse[i][r]} - top);
        sum += w;
        for (uint32_t d = 0; d < dim; ++d) {
          all.o[size_t{r} * dim + d] += w * double{o[i][size_t{r} * dim + d]};
        }
      }
      for (uint32_t d = 0; d < dim; ++d) all.o[size_t{r} * dim + d] /= sum;
      all.lse[r] = (top + std::log(sum)) / unit;
    }
    return all;
  }

  uint32_t rows, dim;
  DType dtype;
  bool base2;
  std::vector<std::vector<float>> o, lse;
  std::vector<std::unique_ptr<DeviceArray>> device_o, device_lse;
  std::vector<const void*> o_at;
  std::vector<const float*> lse_at;
};

double allowed(DType dtype) {
  return dtype == DType::f32 ? 2e-6 : (dtype == DType::f16 ? 1e-3 : 8e-3);
}

TEST(MergeStatesOnDevice, IsTheSumOfAllStates) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 rng(7);
  const OwnedStream stream;
  for (const uint32_t states : {0U, 1U, 2U, 3U, 33U, 240U, 241U, 2000U}) {
    for (const uint32_t dim : {1U, 64U, 80U, 128U, 257U, 512U}) {
      const DType dtype = std::array{DType::f32, DType::f16, DType::bf16}[rng() % 3];
      const DType out_dtype = std::array{DType::f32, DType::f16, DType::bf16}[rng() % 3];
      const uint32_t rows = states > 240 ? 6 : std::array{1U, 5U, 32U, 131U}[rng() % 4];
      Merge m(rng, states, rows, dim, dtype, rng() % 2 == 0);
      SCOPED_TRACE(std::to_string(states) + " states of " + std::to_string(rows) + " x " +
                   std::to_string(dim) + " in " + dtype_name(dtype) + " to " +
                   dtype_name(out_dtype) + (m.base2 ? ", log2" : ", ln"));
      m.to_device();
      const DeviceArray out(rows, dim, out_dtype), out_lse(1, rows, DType::f32);
      // What was set on the default stream, for which the test's does not wait.
      check(cudaDeviceSynchronize(), "setting up");
      m.enqueue(out.rows().data, out_dtype, out_lse.floats(), stream.get());
      check(cudaStreamSynchronize(stream.get()), "the merge");
      const States truth = m.truth();
      EXPECT_LE(worst_error(out.read(), truth), allowed(out_dtype));
      EXPECT_LE(worst_lse(out_lse.read(), truth), 4e-5);
    }
  }
}

TEST(MergeStatesOnDevice, MayWriteToOneOfItsInputs) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 rng(8);
  const OwnedStream stream;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const uint32_t which : {0U, 2U}) {
      Merge m(rng, 3, 37, 200, dtype, false);
      m.to_device();
      check(cudaDeviceSynchronize(), "setting up");
      m.enqueue(m.device_o[which]->rows().data, dtype, m.device_lse[which]->floats(), stream.get());
      check(cudaStreamSynchronize(stream.get()), "the merge");
      const States truth = m.truth();
      EXPECT_LE(worst_error(m.device_o[which]->read(), truth), allowed(dtype));
      EXPECT_LE(worst_lse(m.device_lse[which]->read(), truth), 4e-5);
    }
  }
}

TEST(MergeStatesOnDevice, NaNIsNotHidden) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 rng(9);
  Merge m(rng, 3, 4, 64, DType::f32, false);
  for (uint32_t i = 0; i < 3; ++i) {
    for (uint32_t r = 0; r < 4; ++r) {
      m.lse[i][r] = 1.0F;
      for (uint32_t d = 0; d < 64; ++d) m.o[i][r * 64 + d] = 1.0F;
    }
  }
  m.lse[1][2] = NAN;  // a weight that is not known
  m.o[2][3 * 64 + 5] = NAN;
  m.to_device();
  const DeviceArray out(4, 64, DType::f32), out_lse(1, 4, DType::f32);
  m.enqueue(out.rows().data, DType::f32, out_lse.floats(), nullptr);
  check(cudaDeviceSynchronize(), "the merge");
  const auto o = out.read(), lse = out_lse.read();
  EXPECT_FALSE(std::isnan(lse[0]) || std::isnan(lse[1]) || std::isnan(lse[3]));
  EXPECT_TRUE(std::isnan(lse[2]));
  EXPECT_FALSE(std::isnan(o[0]) || std::isnan(o[64]));
  EXPECT_TRUE(std::isnan(o[2 * 64]) && std::isnan(o[2 * 64 + 63]));
  EXPECT_TRUE(std::isnan(o[3 * 64 + 5]));
  EXPECT_FALSE(std::isnan(o[3 * 64 + 6]));
}

TEST(MergeStatesOnDevice, IsReplayedByAGraph) {
  KEYHOLE_NEEDS_GPU();
  std::mt19937 rng(10);
  const OwnedStream stream;
  for (const uint32_t states : {3U, 300U}) {
    Merge m(rng, states, 9, 128, DType::f16, true);
    m.to_device();
    const DeviceArray out(9, 128, DType::f32), out_lse(1, 9, DType::f32);
    check(cudaDeviceSynchronize(), "setting up");
    const CapturedGraph graph(stream.get(), cudaStreamCaptureModeGlobal, [&] {
      m.enqueue(out.rows().data, DType::f32, out_lse.floats(), stream.get());
    });
    for (int launch = 0; launch < 2; ++launch) {
      // Other numbers in the same places.
      for (float& x : m.lse[0]) x = 3.0F + static_cast<float>(launch);
      for (float& x : m.o[0]) x = rounded(0.5F * static_cast<float>(launch + 1), DType::f16);
      m.device_lse[0]->write(m.lse[0]);
      m.device_o[0]->write(m.o[0]);
      graph.run();
      const States truth = m.truth();
      EXPECT_LE(worst_error(out.read(), truth), allowed(DType::f32));
      EXPECT_LE(worst_lse(out_lse.read(), truth), 4e-5);
    }
  }
}

}  // namespace
}  // namespace keyhole::gpu::test
