// For tests of the kernels of codes: a layer's codes, rows and queries on the device, and the right result of a step
// in double precision.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/half.h"
#include "cpu/quantise.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/device.h"
#include "gpu/step.h"
#include "index/scan/kv_codes.h"
#include "tests/normal.h"

namespace keyhole::gpu::test {

template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(size_t n) : n_(n) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(n, 1) * sizeof(T)), cudaSuccess);
  }
  explicit DeviceVector(const std::vector<T>& from) : DeviceVector(from.size()) { write(from); }
  ~DeviceVector() { cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;
  [[nodiscard]] T* get() const { return static_cast<T*>(data_); }
  void write(const std::vector<T>& from) const {
    EXPECT_EQ(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> out(n_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t n_;
};

/// Pinned memory that the device reads where it lies.
class Pinned {
 public:
  explicit Pinned(const std::vector<std::byte>& from) {
    EXPECT_EQ(cudaHostAlloc(&data_, from.size(), cudaHostAllocDefault), cudaSuccess);
    std::memcpy(data_, from.data(), from.size());
  }
  ~Pinned() { cudaFreeHost(data_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  [[nodiscard]] const std::byte* get() const { return static_cast<const std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

struct Case {
  uint32_t dim = 128, bits = 2, group = 4, blocks = 1;
  float scale = 1.0F;  ///< of logits, times 1 / sqrt(dim)
  float softcap = 0.0F;
  DType rows = DType::f16, q = DType::f32, out = DType::f32;
  bool resident = false;
  uint32_t spare = 0;  ///< blocks that there is space for beside
  float q_size = 1.0F;
  bool cluster = true;  ///< the rows are chosen by a cluster, or by one thread block
  uint32_t twin = 0;    ///< layers that differ in it alone have the same rows, and other queries
  uint32_t tokens = 1;  ///< whose query heads the group has
  uint32_t part_tokens = 0;  ///< CodesStep::part_tokens

  [[nodiscard]] CodeShape shape() const { return {dim, bits, bits}; }
};

/// Whether the device has clusters, and launches ahead.
inline bool has_clusters() { return kernels_major(0) >= 9; }

inline constexpr uint32_t kKvHeads = 2;

/// The host's data of a KV head.
struct Head {
  index::KvCodes codes;
  std::vector<float> k, v, q;  ///< as the device sees them, rounded
};

/// Replaces values by what `dtype` makes of them, and returns their bytes.
inline std::vector<std::byte> round_to(DType dtype, std::vector<float>& x) {
  const cpu::Kernels& kernels = cpu::select_kernels();
  std::vector<std::byte> bytes(x.size() * (dtype == DType::f32 ? 4 : 2));
  if (dtype == DType::f32) {
    std::memcpy(bytes.data(), x.data(), bytes.size());
    return bytes;
  }
  kernels.from_f32[static_cast<size_t>(dtype)](x.data(), bytes.data(), x.size());
  kernels.to_f32[static_cast<size_t>(dtype)](bytes.data(), x.data(), x.size());
  return bytes;
}

/// round_to() for int8, with the scales of a head's K or V in `scales`, where CodesStep has those of all heads.
inline std::vector<std::byte> round_to_int8(std::vector<float>& x, uint32_t dim, uint16_t* scales) {
  std::vector<std::byte> bytes(x.size());
  const size_t rows = x.size() / dim;
  for (size_t first = 0; first < rows; first += kScaleRows) {
    uint16_t* own = scales + first / kScaleRows * kKvHeads * 2 * dim;
    cpu::ChannelQuantiser quantiser(dim);
    for (size_t i = first; i < first + kScaleRows; ++i) quantiser.look(x.data() + i * dim);
    quantiser.choose_scales(std::numeric_limits<float>::max(), own);
    for (size_t i = first; i < first + kScaleRows; ++i) {
      auto* to = reinterpret_cast<int8_t*>(bytes.data()) + i * dim;
      quantiser.write(x.data() + i * dim, to);
      for (uint32_t j = 0; j < dim; ++j) {
        x[i * dim + j] = cpu::bf16_to_f32(own[j]) * static_cast<float>(to[j]);
      }
    }
  }
  return bytes;
}

/// What of a case's step says which kernels it takes, with room for so many blocks.
inline CodesStep step_of(const Case& c, uint32_t block_capacity) {
  CodesStep step;
  step.shape = c.shape();
  step.part_tokens = c.part_tokens;
  step.kv_heads = kKvHeads;
  step.group = c.group;
  step.tokens = c.tokens;
  step.wide = codes_are_wide(c.shape(), c.group, shared_memory_of(0).of_block, c.tokens);
  step.block_capacity = block_capacity;
  step.cluster = c.cluster;
  return step;
}

class Layer {
 public:
  explicit Layer(const Case& c)
      : case_(c),
        shape_{c.shape()},
        logits_{c.scale / std::sqrt(static_cast<float>(c.dim)), c.softcap} {
    std::mt19937_64 rng(c.dim * 131 + c.bits * 17 + c.group + c.blocks);
    keyhole::test::Normal<float> normal;
    const auto draw = [&](size_t n, float size, float middle) {
      std::vector<float> x(n);
      for (float& y : x) y = size * normal(rng) + middle;
      return x;
    };
    const size_t rows = size_t{c.blocks} * kCodeBlock;
    const size_t width = dtype_size(c.rows);
    std::vector<uint16_t> row_scales(size_t{c.blocks} * kKvHeads * 2 * c.dim);
    std::vector<std::byte> blocks, keys, values, q(q_heads() * c.dim * dtype_size(c.q));
    std::vector<float> key_scale, value_scale;
    for (uint32_t kv = 0; kv < kKvHeads; ++kv) {
      std::vector<float> k = draw(rows * c.dim, 1.0F, 0.0F), v = draw(rows * c.dim, 3.0F, 1.0F);
      std::vector<float> heads = draw(size_t{c.group} * c.dim, c.q_size, 0.0F);
      std::mt19937_64 own(c.twin * 1000 + kv);
      for (float& x : heads) {
        if (c.twin != 0) x = c.q_size * normal(own);
      }
      // The balance is learned from many queries: from one alone, a channel that it hardly has would outweigh all
      // others of the next query, by a factor of 1,510 where 16 is usual.
      std::vector<float> some = draw(size_t{64} * c.dim, 1.0F, 0.0F);
      for (const auto& [from, to] : {std::pair{&k, &keys}, std::pair{&v, &values}}) {
        const std::vector<std::byte> bytes =
            c.rows == DType::i8
                ? round_to_int8(*from, c.dim,
                                row_scales.data() + (2 * kv + (from == &v ? 1 : 0)) * c.dim)
                : round_to(c.rows, *from);
        to->insert(to->end(), bytes.begin(), bytes.end());
        to->resize(to->size() + c.spare * kCodeBlock * c.dim * width, std::byte{0xFF});
      }
      const std::vector<std::byte> bytes = round_to(c.q, heads);
      const size_t row = bytes.size() / c.group;
      for (uint32_t h = 0; h < c.group; ++h) {
        std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(h * row), row,
                    q.begin() + static_cast<ptrdiff_t>(number_of(kv, h) * row));
      }
      const auto view = [&](const std::vector<float>& x) {
        return dense_rows(x.data(), x.size() / c.dim, c.dim, DType::f32);
      };
      const KvView kv_view{view(k), view(v)};
      const cpu::Kernels& kernels = cpu::select_kernels();
      index::KvCodes codes(shape_, index::learn_balance(kernels, kv_view, view(some)));
      codes.extend(kernels, kv_view);
      blocks.insert(blocks.end(), codes.block(0), codes.block(0) + c.blocks * shape_.block_bytes());
      blocks.resize(blocks.size() + c.spare * shape_.block_bytes(), std::byte{0xFF});
      key_scale.insert(key_scale.end(), codes.balance().key_scale.begin(),
                       codes.balance().key_scale.end());
      value_scale.push_back(codes.balance().value_scale);
      heads_.push_back({std::move(codes), std::move(k), std::move(v), std::move(heads)});
    }
    resident_o_ = draw(q_heads() * c.dim, 1.0F, 0.0F);
    resident_lse_ = draw(q_heads(), 2.0F, 8.0F);
    step_ = step_of(c, c.blocks + c.spare);
    step_.splits =
        code_splits(shape_, kKvHeads, c.group, step_.block_capacity, 16, SIZE_MAX, 0, step_.wide);
    step_.logits = logits_;
    step_.block_stride = shape_.block_bytes();
    step_.head_stride = step_.block_capacity * shape_.block_bytes();
    step_.dtype = c.rows;
    step_.row_stride = c.dim * width;
    step_.kv_head_stride = step_.block_capacity * kCodeBlock * step_.row_stride;
    EXPECT_EQ(prepare_codes(step_, 0), cudaSuccess);
    EXPECT_EQ(step_.cluster, c.cluster);
    step_.block_count = keep<uint32_t>(std::vector<uint32_t>{c.blocks});
    count_ = const_cast<uint32_t*>(step_.block_count);
    step_.blocks = keep(blocks);
    step_.key_scale = keep(key_scale);
    if (c.rows == DType::i8) step_.row_scales = keep(row_scales);
    step_.value_scale = keep(value_scale);
    const uint32_t heads = kKvHeads * c.group / c.tokens;
    step_.q = dense_tensor(keep(q), c.tokens, heads, c.dim, c.q, Memory::device);
    pinned_.push_back(std::make_unique<Pinned>(keys));
    step_.keys = pinned_.back()->get();
    pinned_.push_back(std::make_unique<Pinned>(values));
    step_.values = pinned_.back()->get();
    if (c.resident) {
      step_.resident_o = keep(resident_o_);
      step_.resident_lse = keep(resident_lse_);
    }
    step_.work = keep(std::vector<std::byte>(codes_work_bytes(step_), std::byte{0xFF}));
    step_.out = dense_tensor(out_.emplace(q_heads() * (c.dim + 8) * 4).get(), c.tokens, heads,
                             c.dim, c.out, Memory::device);
    step_.out.head_stride = c.dim + 8;
    step_.out.token_stride = heads * step_.out.head_stride;
    step_.lse = lse_.emplace(q_heads()).get();
    step_.chosen = chosen_.emplace(size_t{parts().count} * kKvHeads * kMostDeviceRows).get();
  }

  [[nodiscard]] size_t q_heads() const { return size_t{kKvHeads} * case_.group; }
  /// The parts whose rows are chosen together.
  [[nodiscard]] StepParts parts() const {
    return parts_of_tokens(step_.tokens, step_.wide ? step_.part_tokens : step_.tokens);
  }
  /// Where number h of a KV head's group lies among all query heads of all tokens.
  [[nodiscard]] size_t number_of(uint32_t kv, uint32_t h) const {
    const uint32_t heads = case_.group / case_.tokens;
    return (size_t{h / heads} * kKvHeads + kv) * heads + h % heads;
  }
  CodesStep& step() { return step_; }
  [[nodiscard]] const Case& of() const { return case_; }
  [[nodiscard]] CodesShape codes_shape() const {
    CodesShape s;
    s.layers = 1;
    s.q_heads = static_cast<uint32_t>(q_heads());
    s.kv_heads = kKvHeads;
    s.code = shape_;
    s.dtype = case_.rows;
    s.blocks = step_.block_capacity;
    s.exact_rows = step_.exact_rows;
    s.logits = logits_;
    s.rows_by_host = true;
    return s;
  }
  void set_count(uint32_t blocks) const {
    EXPECT_EQ(cudaMemcpy(count_, &blocks, 4, cudaMemcpyHostToDevice), cudaSuccess);
  }
  void enqueue(cudaStream_t stream, bool ahead) const {
    ASSERT_EQ(attend_codes(step_, stream, false), cudaSuccess);
    ASSERT_EQ(finish_codes(step_, stream, ahead && has_clusters()), cudaSuccess);
  }
  void run(uint32_t exact_rows, bool ahead = true) {
    step_.exact_rows = exact_rows;
    enqueue(nullptr, ahead);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  [[nodiscard]] std::vector<std::byte> out() const { return out_->read(); }
  [[nodiscard]] std::vector<float> lse() const { return lse_->read(); }
  void clear_out() const { out_->write(std::vector<std::byte>(out_->read().size())); }

  /// The rows that the last run read exactly for a part of the step, rising.
  std::vector<uint32_t> chosen(uint32_t kv, uint32_t part = 0) const {
    const std::vector<uint32_t> seen = chosen_->read();
    const auto* from = seen.data() + (size_t{part} * kKvHeads + kv) * step_.exact_rows;
    std::vector<uint32_t> rows(from, from + step_.exact_rows);
    std::sort(rows.begin(), rows.end());
    return rows;
  }

  /// Checks the results of the last run, with `blocks` blocks of codes.
  void check(uint32_t blocks) {
    SCOPED_TRACE("blocks " + std::to_string(blocks) + ", exact rows " +
                 std::to_string(step_.exact_rows));
    const Case& c = case_;
    const std::vector<std::byte> bytes = out_->read();
    const std::vector<float> seen_lse = lse_->read();
    for (uint32_t kv = 0; kv < kKvHeads; ++kv) {
      const Head& head = heads_[kv];
      index::KvCodes codes = head.codes;
      codes.truncate(size_t{blocks} * kCodeBlock);
      const uint32_t each = parts().tokens * (c.group / c.tokens);
      for (uint32_t part = 0; part < parts().count; ++part) {
        SCOPED_TRACE("KV head " + std::to_string(kv) + ", part " + std::to_string(part));
        const uint32_t first = part * each, count = std::min(each, c.group - first);
        const float* const q = &head.q[size_t{first} * c.dim];
        const index::CodeQueries queries = codes.queries(q, count);
        std::vector<uint32_t> rows;
        if (blocks != 0 && step_.exact_rows != 0) {
          rows = chosen(kv, part);
          check_choice(codes, queries, count, rows);
        }
        std::vector<float> o(size_t{count} * c.dim), lse(count);
        codes.attend(queries, logits_, rows, {o.data(), lse.data()});
        for (uint32_t h = 0; h < count; ++h) {
          const size_t number = number_of(kv, first + h);
          std::vector<double> truth;
          const double true_lse =
              state(head, first + h, rows, &o[size_t{h} * c.dim], lse[h], number, truth);
          std::vector<float> seen(c.dim);
          const size_t width = c.out == DType::f32 ? 4 : 2;
          const std::byte* from = bytes.data() + number * (c.dim + 8) * width;
          if (c.out == DType::f32) {
            std::memcpy(seen.data(), from, c.dim * 4);
          } else {
            cpu::select_kernels().to_f32[static_cast<size_t>(c.out)](from, seen.data(), c.dim);
          }
          double difference = 0.0, norm = 1e-30;
          for (uint32_t j = 0; j < c.dim; ++j) {
            difference += (seen[j] - truth[j]) * (seen[j] - truth[j]);
            norm += truth[j] * truth[j];
          }
          const double rounding = c.out == DType::bf16 ? 4e-3 : c.out == DType::f16 ? 5e-4 : 0.0;
          EXPECT_LT(std::sqrt(difference / norm), 2e-3 + 1.5e-3 * c.scale + rounding)
              << "head " << first + h;
          if (std::isinf(true_lse)) {
            EXPECT_EQ(seen_lse[number], kMinusInf);
          } else {
            EXPECT_NEAR(seen_lse[number], true_lse, 2e-3 + 2e-3 * c.scale) << "head " << first + h;
          }
        }
      }
    }
  }

 private:
  template <class T>
  T* keep(const std::vector<T>& from) {
    auto memory = std::make_shared<DeviceVector<T>>(from);
    kept_.push_back(memory);
    return memory->get();
  }
  [[nodiscard]] double cap(double x) const {
    return case_.softcap > 0.0F ? case_.softcap * std::tanh(x / case_.softcap) : x;
  }

  /// Checks that the weights by code of the rows that were chosen for `heads` queries are the largest there are, up to
  /// the rounding of q and what the noise takes off.
  void check_choice(const index::KvCodes& codes, const index::CodeQueries& queries, uint32_t heads,
                    const std::vector<uint32_t>& rows) const {
    ASSERT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end()) << "a row twice";
    ASSERT_LT(rows.back(), codes.count());
    const size_t n = codes.count();
    std::vector<float> scores(n * heads), o(heads * case_.dim), lse(heads);
    codes.score(queries, scores.data(), n);
    codes.attend(queries, logits_, {}, {o.data(), lse.data()});
    std::vector<double> weights(n, double{kMinusInf});
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t h = 0; h < heads; ++h) {
        weights[i] = std::max(weights[i], cap(double{scores[h * n + i]} * logits_.scale) - lse[h]);
      }
    }
    std::vector<double> sorted = weights;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const double noise = std::min(0.25 * case_.scale * case_.scale, double{kMostNoiseBias});
    for (const uint32_t row : rows) {
      EXPECT_GT(weights[row], sorted[rows.size() - 1] - 0.15 - noise) << "row " << row;
    }
  }

  /// Merges the codes' state (o, lse), `rows` exactly, and the resident state: o in `out`; returns the lse.
  double state(const Head& head, uint32_t h, const std::vector<uint32_t>& rows, const float* o,
               double lse, size_t number, std::vector<double>& out) const {
    const uint32_t dim = case_.dim;
    std::vector<double> logits{lse};
    std::vector<std::function<double(uint32_t)>> values{[&](uint32_t j) { return double{o[j]}; }};
    for (const uint32_t row : rows) {
      double dot = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        dot += double{head.q[size_t{h} * dim + j]} * head.k[size_t{row} * dim + j];
      }
      logits.push_back(cap(dot * logits_.scale));
      values.emplace_back([&, row](uint32_t j) { return double{head.v[size_t{row} * dim + j]}; });
    }
    if (case_.resident) {
      logits.push_back(resident_lse_[number]);
      values.emplace_back([&](uint32_t j) { return double{resident_o_[number * dim + j]}; });
    }
    out.assign(dim, 0.0);
    const double top = *std::max_element(logits.begin(), logits.end());
    if (std::isinf(top)) return top;
    double sum = 0.0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double w = std::exp(logits[i] - top);
      if (w == 0.0) continue;
      sum += w;
      for (uint32_t j = 0; j < dim; ++j) out[j] += w * values[i](j);
    }
    for (double& x : out) x /= sum;
    return top + std::log(sum);
  }

  Case case_;
  CodeShape shape_;
  LogitParams logits_;
  CodesStep step_;
  std::vector<Head> heads_;
  std::vector<float> resident_o_, resident_lse_;
  uint32_t* count_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<std::unique_ptr<Pinned>> pinned_;
  std::optional<DeviceVector<std::byte>> out_;
  std::optional<DeviceVector<float>> lse_;
  std::optional<DeviceVector<uint32_t>> chosen_;
};

}  // namespace keyhole::gpu::test
