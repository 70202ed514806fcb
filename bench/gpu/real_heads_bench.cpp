// Errors of a device's steps over codes on recorded heads of a real model: codes of blocks beside codes in lists, whose
// centres are the means of near rows. A trace as tests/runtime/session/golden/cut_heads.py writes it: one KV head a
// layer; here all are KV heads of one layer. The steps are those of the recorded queries over the complete blocks
// before them, beside attention to the same rows in double precision.
//
//   gpu_real_heads_bench FILE [rows]    rows: read exactly of each KV head (16)
//
//   error   |o - o*| / |o*| over all (step, query head): median, p95, p99, mean
//   read    percent of the rows that a step reads in lists at least; those of other lists count by their means
//   asked   with a second look where codes cannot tell which rows weigh, as sessions take it
//           (gpu/cuda/codes/settle.cuh)
//   heads   KV heads in doubt, percent; rows: read beside, by a head in doubt
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "gpu/code_lists.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/memory.h"
#include "index/scan/balance.h"
#include "runtime/files/safetensors.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

/// K or V of all heads, `[kv_heads, rows, dim]`, in pinned memory.
class PinnedRows {
 public:
  PinnedRows(const std::vector<std::vector<float>>& heads, uint32_t rows, uint32_t dim) {
    const size_t each = size_t{rows} * dim;
    check(cudaHostAlloc(&data_, heads.size() * each * 2, cudaHostAllocDefault), "pinned");
    for (size_t h = 0; h < heads.size(); ++h) {
      cpu::select_kernels().from_f32[static_cast<size_t>(DType::f16)](
          heads[h].data(), static_cast<std::byte*>(data_) + h * each * 2, each);
    }
  }
  ~PinnedRows() { (void)cudaFreeHost(data_); }
  PinnedRows(const PinnedRows&) = delete;
  PinnedRows& operator=(const PinnedRows&) = delete;
  [[nodiscard]] const std::byte* data() const { return static_cast<const std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

struct Trace {
  explicit Trace(const char* path) {
    const SafetensorsFile file(path);
    dim = static_cast<uint32_t>(std::stoul(file.metadata().at("head_dim")));
    group = static_cast<uint32_t>(std::stoul(file.metadata().at("q_heads")));
    for (const auto& [name, tensor] : file.tensors()) {
      if (!name.ends_with(".keys")) continue;
      const std::string head = name.substr(0, name.size() - 4);
      keys.push_back(tensor.to_f32());
      values.push_back(file.tensor(head + "values").to_f32());
      queries.push_back(file.tensor(head + "queries").to_f32());
      training.push_back(file.tensor(head + "training_queries").to_f32());
    }
    const StoredTensor& at = file.tensor("query_positions");
    steps = static_cast<uint32_t>(at.elements());
    uint32_t first = 0;
    std::memcpy(&first, at.bytes.data(), sizeof first);
    rows = first / kCodeBlock * kCodeBlock;
  }
  [[nodiscard]] uint32_t heads() const { return static_cast<uint32_t>(keys.size()); }

  uint32_t dim = 0, group = 0, steps = 0, rows = 0;
  std::vector<std::vector<float>> keys, values, queries, training;  ///< of each KV head
};

/// Exact attention of a query head to all rows.
std::vector<double> truth_of(const Trace& t, uint32_t head, const float* q) {
  std::vector<double> weights(t.rows), o(t.dim);
  const double scale = 1.0 / std::sqrt(static_cast<double>(t.dim));
  for (uint32_t i = 0; i < t.rows; ++i) {
    const float* const key = &t.keys[head][size_t{i} * t.dim];
    for (uint32_t j = 0; j < t.dim; ++j) weights[i] += scale * q[j] * key[j];
  }
  const double top = *std::max_element(weights.begin(), weights.end());
  double sum = 0.0;
  for (double& w : weights) sum += w = std::exp(w - top);
  for (uint32_t i = 0; i < t.rows; ++i) {
    const float* const value = &t.values[head][size_t{i} * t.dim];
    for (uint32_t j = 0; j < t.dim; ++j) o[j] += weights[i] / sum * value[j];
  }
  return o;
}

struct Way {
  uint32_t bits, list_rows, percent;  ///< list_rows: 0: blocks
  bool asks;
};

class Bench {
 public:
  Bench(const char* path, uint32_t exact_rows)
      : t_(path),
        exact_rows_(exact_rows),
        keys_(t_.keys, t_.rows, t_.dim),
        values_(t_.values, t_.rows, t_.dim) {
    for (uint32_t i = 0; i < t_.steps; ++i) {
      for (uint32_t h = 0; h < heads(); ++h) {
        truths_.push_back(truth_of(t_, h / t_.group, query(i, h)));
      }
    }
    std::printf("%u steps of %u query heads, %u KV heads of %u, %u rows, %u of them exactly\n",
                t_.steps, heads(), t_.heads(), t_.dim, t_.rows, exact_rows);
    std::printf("%4s %5s %4s %5s %8s %8s %8s %8s %6s %6s\n", "bits", "lists", "read", "asked",
                "p50", "p95", "p99", "mean", "heads", "rows");
  }

  void run(const Way& way) const {
    CodesShape shape;
    shape.layers = 1;
    shape.kv_heads = t_.heads();
    shape.q_heads = heads();
    shape.code = {t_.dim, way.bits, way.bits};
    shape.blocks = t_.rows / kCodeBlock;
    shape.exact_rows = exact_rows_;
    shape.asks_doubt = way.asks;
    shape.logits.scale = 1.0F / std::sqrt(static_cast<float>(t_.dim));
    shape.list_rows = way.list_rows;
    shape.list_share = {static_cast<float>(way.percent) / 100.0F, 1, 0.0F, 1e9F, 0};
    shape.lists_from = 1;
    CudaCodes codes(shape);
    tell(codes);
    codes.encode(0, 0, shape.blocks, {});
    for (uint32_t at = 0; way.list_rows != 0 && at < t_.rows; at += kListStretch) {
      if (!codes.make_lists(0, at, std::min(kListStretch, t_.rows - at))) {
        std::printf("%4u %5u: no lists on this device\n", way.bits, way.list_rows);
        return;
      }
      check(cudaDeviceSynchronize(), "lists");
      codes.use_lists(0, {});
    }
    check(cudaDeviceSynchronize(), "codes");
    std::vector<double> errors;
    for (uint32_t i = 0; i < t_.steps; ++i) step(codes, i, errors);
    std::sort(errors.begin(), errors.end());
    const auto at = [&](double share) {
      return errors[static_cast<size_t>(share * static_cast<double>(errors.size() - 1))];
    };
    double mean = 0.0;
    for (const double x : errors) mean += x / static_cast<double>(errors.size());
    const CodesDoubts doubts = codes.doubts();
    const auto doubted = static_cast<double>(doubts.doubted);
    std::printf("%4u %5u %4u %5s %8.4f %8.4f %8.4f %8.4f %6.1f %6.0f\n", way.bits, way.list_rows,
                way.percent, way.asks ? "yes" : "no", at(0.5), at(0.95), at(0.99), mean,
                100.0 * doubted / (t_.steps * t_.heads()),
                doubted == 0.0 ? 0.0 : static_cast<double>(doubts.rows) / doubted);
    std::fflush(stdout);
  }

 private:
  [[nodiscard]] uint32_t heads() const { return t_.heads() * t_.group; }
  [[nodiscard]] const float* query(uint32_t step, uint32_t head) const {
    const size_t at = size_t{step} * t_.group + head % t_.group;
    return &t_.queries[head / t_.group][at * t_.dim];
  }
  void tell(CudaCodes& codes) const {
    for (uint32_t h = 0; h < t_.heads(); ++h) {
      const auto rows_of = [&](const std::vector<float>& x, size_t rows) {
        return dense_rows(x.data(), rows, t_.dim, DType::f32);
      };
      const index::Balance balance = index::learn_balance(
          cpu::select_kernels(), {rows_of(t_.keys[h], t_.rows), rows_of(t_.values[h], t_.rows)},
          rows_of(t_.training[h], t_.training[h].size() / t_.dim));
      codes.set_balance(0, h, balance.key_scale.data(), balance.value_scale);
    }
    const auto view = [&](const PinnedRows& rows) {
      return RowsView{{.data = rows.data(),
                       .token_stride = t_.dim,
                       .head_stride = static_cast<ptrdiff_t>(size_t{t_.rows} * t_.dim),
                       .tokens = t_.rows,
                       .heads = t_.heads(),
                       .dim = t_.dim,
                       .dtype = DType::f16}};
    };
    codes.set_rows(0, {view(keys_), view(values_)});
  }
  void step(const CudaCodes& codes, uint32_t number, std::vector<double>& errors) const {
    const size_t bytes = size_t{heads()} * t_.dim * sizeof(float);
    DeviceBuffer q(bytes), out(bytes);
    for (uint32_t h = 0; h < heads(); ++h) {
      check(cudaMemcpy(q.as<float>() + size_t{h} * t_.dim, query(number, h), t_.dim * sizeof(float),
                       cudaMemcpyHostToDevice),
            "copy");
    }
    const auto tensor = [&](DeviceBuffer& x) {
      return dense_tensor(x.data(), 1, heads(), t_.dim, DType::f32, Memory::device);
    };
    CodesStep s = codes.describe(0, tensor(q));
    s.out = tensor(out);
    check(attend_codes(s, nullptr, codes.launches_ahead()), "attend");
    check(finish_codes(s, nullptr, codes.launches_ahead()), "finish");
    check(settle_codes(s, nullptr), "settle");
    check(cudaDeviceSynchronize(), "step");
    std::vector<float> seen(size_t{heads()} * t_.dim);
    check(cudaMemcpy(seen.data(), out.data(), bytes, cudaMemcpyDeviceToHost), "copy");
    for (uint32_t h = 0; h < heads(); ++h) {
      const std::vector<double>& right = truths_[size_t{number} * heads() + h];
      double difference = 0.0, norm = 1e-30;
      for (uint32_t j = 0; j < t_.dim; ++j) {
        const double x = seen[size_t{h} * t_.dim + j] - right[j];
        difference += x * x;
        norm += right[j] * right[j];
      }
      errors.push_back(std::sqrt(difference / norm));
    }
  }

  Trace t_;
  uint32_t exact_rows_;
  PinnedRows keys_, values_;
  std::vector<std::vector<double>> truths_;  ///< `[steps, query heads]`
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "gpu_real_heads_bench FILE [rows]\n");
    return 1;
  }
  try {
    check(cudaSetDevice(0), "device");
    const Bench bench(argv[1], argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 16);
    for (const uint32_t bits : {2U, 4U}) {
      bench.run({bits, 0, 100, false});
      for (const uint32_t lists : {64U, 16U}) {
        for (const uint32_t percent : {100U, 25U, 12U}) bench.run({bits, lists, percent, false});
      }
      bench.run({bits, 0, 100, true});
      bench.run({bits, 64, 100, true});
      bench.run({bits, 64, 12, true});
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
