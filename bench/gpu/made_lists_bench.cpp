// Time in which the device puts a layer's rows in lists of codes, by part, beside the time in which it encodes their
// blocks and the least time that their bytes take over the bus; and how near clusters are by the number of k-means
// iterations. Arguments, in any order: `d=128`, `kv=8` KV heads, `b=4` bits, `t=131072` tokens, `rows=64` rows of a
// list on average, `together=16384` rows that are clustered together.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

#include "cpu/half.h"
#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/codes/make_lists.h"
#include "gpu/cuda/common/check.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

template <class T>
T* device(size_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
  check(cudaMemset(p, 0, n * sizeof(T)), "cudaMemset");
  return static_cast<T*>(p);
}

/// The fastest of five, in ms, with all that it enqueues anywhere.
template <class F>
double time(F&& f) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    check(cudaDeviceSynchronize(), "synchronize");
    const auto begin = std::chrono::steady_clock::now();
    f();
    check(cudaDeviceSynchronize(), "synchronize");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

/// Rows about centres that drift: as of a text whose subject changes. `[rows, dim]` fp16.
std::vector<uint16_t> draw_rows(uint32_t rows, uint32_t dim) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  constexpr uint32_t kCentres = 300;
  std::vector<float> centres(size_t{kCentres} * dim), drift(dim);
  for (float& x : centres) x = normal(rng);
  std::vector<uint16_t> out(size_t{rows} * dim);
  for (uint32_t i = 0; i < rows; ++i) {
    if (i % 512 == 0) {
      for (float& x : drift) x = 0.8F * x + 0.4F * normal(rng);
    }
    const float* const centre = centres.data() + rng() % kCentres * dim;
    for (uint32_t j = 0; j < dim; ++j) {
      out[size_t{i} * dim + j] = cpu::f32_to_f16(centre[j] + drift[j] + 0.7F * normal(rng));
    }
  }
  return out;
}

}  // namespace

static int run(int argc, char** argv) {
  uint32_t dim = 128, kv_heads = 8, bits = 4, tokens = 131072, rows = 64, together = kListStretch;
  for (int i = 1; i < argc; ++i) {
    const bool known =
        std::sscanf(argv[i], "d=%u", &dim) == 1 || std::sscanf(argv[i], "kv=%u", &kv_heads) == 1 ||
        std::sscanf(argv[i], "b=%u", &bits) == 1 || std::sscanf(argv[i], "t=%u", &tokens) == 1 ||
        std::sscanf(argv[i], "rows=%u", &rows) == 1 ||
        std::sscanf(argv[i], "together=%u", &together) == 1;
    if (!known) {
      std::fprintf(stderr, "%s: allowed are d, kv, b, t, rows, together\n", argv[i]);
      return 1;
    }
  }
  CodesShape shape;
  shape.layers = 1;
  shape.q_heads = 4 * kv_heads;
  shape.kv_heads = kv_heads;
  shape.code = {dim, bits, bits};
  shape.blocks = tokens / kCodeBlock;
  shape.exact_rows = 16;
  shape.list_rows = rows;
  tokens = shape.blocks * kCodeBlock;
  const uint32_t stretch = std::min({tokens, together / kCodeBlock * kCodeBlock, kListStretch});
  const size_t row_bytes = size_t{dim} * 2, layer_bytes = 2 * row_bytes * tokens * kv_heads;

  std::byte* pinned = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&pinned), layer_bytes, cudaHostAllocDefault),
        "cudaHostAlloc");
  const std::vector<uint16_t> drawn = draw_rows(stretch, dim);
  for (size_t at = 0; at < layer_bytes; at += stretch * row_bytes) {
    std::memcpy(pinned + at, drawn.data(), std::min(stretch * row_bytes, layer_bytes - at));
  }
  RowsView view = dense_rows(pinned, tokens, dim, DType::f16);
  view.heads = kv_heads;
  view.head_stride = static_cast<ptrdiff_t>(size_t{tokens} * dim);
  RowsView values = view;
  values.data += layer_bytes / 2;

  CudaCodes codes(shape);
  const std::vector<float> ones(dim, 1.0F);
  for (uint32_t h = 0; h < kv_heads; ++h) codes.set_balance(0, h, ones.data(), 1.0F);
  codes.set_rows(0, {view, values});
  const double encoding = time([&] { codes.encode(0, 0, shape.blocks, {}); });
  const double making = time([&] {
    codes.truncate(0, 0, {});
    codes.encode(0, 0, shape.blocks, {});
    for (uint32_t begin = 0; begin < tokens; begin += stretch) {
      while (!codes.make_lists(0, begin, std::min(stretch, tokens - begin))) {
      }
    }
  });
  auto* half = device<std::byte>(layer_bytes / 8);
  const double bus =
      8 * time([&] {
        check(cudaMemcpyAsync(half, pinned, layer_bytes / 8, cudaMemcpyHostToDevice), "copy");
      });

  // One stretch, by part.
  const ListWorkLayout work(shape);
  const ListSizes sizes(shape.blocks, rows);
  auto* const at = device<std::byte>(work.bytes);
  MakeLists p;
  p.shape = shape.code;
  p.row_bytes = static_cast<uint32_t>(row_bytes);
  p.pair_bytes = static_cast<uint32_t>(list_pair_bytes(shape.code));
  p.rows = stretch;
  p.kv_heads = kv_heads;
  p.heads = work.heads;
  p.stretch = ListStretch(stretch, rows);
  p.host_keys = view.data;
  p.host_values = values.data;
  p.rows_stride = size_t{tokens} * row_bytes;
  auto* scales = device<float>(size_t{kv_heads} * dim);
  check(cudaMemcpy(scales, std::vector<float>(size_t{kv_heads} * dim, 1.0F).data(),
                   size_t{kv_heads} * dim * 4, cudaMemcpyHostToDevice),
        "copy");
  p.key_scale = p.value_scale = scales;
  find_work(p, work, at);
  p.list_capacity = sizes.lists;
  p.pair_capacity = sizes.pairs;
  p.pairs = device<std::byte>(size_t{kv_heads} * sizes.pairs * p.pair_bytes);
  p.ids = device<uint32_t>(size_t{kv_heads} * sizes.pairs * kPairRows);
  p.places = device<ListPlace>(size_t{kv_heads} * sizes.lists);
  p.figures = device<ListFigures>(size_t{kv_heads} * sizes.lists);
  p.key_means = device<uint16_t>(size_t{kv_heads} * sizes.lists * dim);
  p.value_means = device<uint16_t>(size_t{kv_heads} * sizes.lists * dim);
  p.mean_tiles = device<uint32_t>(size_t{kv_heads} * sizes.lists * dim / 2);
  p.before = device<ListTotals>(kv_heads);
  p.after = device<ListTotals>(kv_heads);
  // All KV heads, as many at a time as there is memory for; all stretches.
  const auto time_of = [&](void (*launch)(const MakeLists&, cudaStream_t)) {
    const double of_stretch = time([&] {
      for (p.first_head = 0; p.first_head < kv_heads; p.first_head += work.heads) {
        p.heads = std::min(work.heads, kv_heads - p.first_head);
        launch(p, {});
      }
    });
    return double(tokens) / stretch * of_stretch;
  };
  const double copying = time_of(launch_copy_rows);
  std::printf("%u x %u x %u, %u bits, lists of %u, one layer, ms\n", tokens, kv_heads, dim, bits,
              rows);
  std::printf("blocks encoded %.2f, with lists %.2f; bytes over the bus %.2f\n", encoding, making,
              bus);
  std::printf("copies %.2f\n", copying);
  for (const uint32_t iterations : {0U, 1U, 2U, 3U, 4U, 5U, 6U, 8U, 12U, 20U}) {
    p.iterations = iterations;
    const double clustering = time_of(launch_cluster_rows);
    p.kept_rows = 0;
    const double coding_again = time_of(launch_encode_lists);
    p.kept_rows = kept_list_rows(dim);
    const double coding = time_of(launch_encode_lists);
    std::vector<ListFigures> figures(p.stretch.lists);
    std::vector<ListPlace> places(p.stretch.lists);
    ListTotals totals;
    check(cudaMemcpy(&totals, p.after, sizeof totals, cudaMemcpyDeviceToHost), "copy");
    check(cudaMemcpy(figures.data(), p.figures, totals.lists * sizeof(ListFigures),
                     cudaMemcpyDeviceToHost),
          "copy");
    check(cudaMemcpy(places.data(), p.places, totals.lists * sizeof(ListPlace),
                     cudaMemcpyDeviceToHost),
          "copy");
    double spread = 0.0;
    uint32_t most = 0;
    for (uint32_t l = 0; l < totals.lists; ++l) {
      spread += double(figures[l].spread) * places[l].rows / stretch;
      most = std::max(most, places[l].rows);
    }
    std::printf(
        "%2u iterations: clustering %.2f, codes %.2f (%.2f); spread %.4f, %u lists of %u rows at "
        "most, %u pairs\n",
        iterations, clustering, coding, coding_again, spread, totals.lists, most, totals.pairs);
  }
  return 0;
}

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
