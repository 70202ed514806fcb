// For tests of a Codes on the device: offloaded rows in host memory (pinned, except where the host reads them), and
// the reference for them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "cpu/half.h"
#include "cpu/quantise.h"
#include "cpu/row_access.h"
#include "gpu/codes.h"
#include "gpu/cuda/common/host_pin.h"
#include "index/scan/kv_codes.h"
#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {

/// Pages that are mapped and not pinned.
class Pages {
 public:
  explicit Pages(size_t bytes)
      : bytes_((bytes + kPinAlignment - 1) / kPinAlignment * kPinAlignment),
        data_(static_cast<std::byte*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::byte* data_;
};

/// K and V of a layer's offloaded rows, `[kv_heads, capacity, dim]`, and the host's codes of them.
class OffloadedLayer {
 public:
  OffloadedLayer(const CodesShape& shape, uint32_t capacity_rows)
      : shape_(shape),
        row_bytes_(shape.code.dim * dtype_size(shape.dtype)),
        head_stride_(capacity_rows * row_bytes_),
        keys_(shape.kv_heads * head_stride_),
        values_(shape.kv_heads * head_stride_),
        scales_(capacity_rows / kCodeBlock * block_scales() * sizeof(uint16_t) + 1) {
    if (!shape.rows_by_host) {
      pin_.add(keys_.data(), keys_.bytes());
      pin_.add(values_.data(), values_.bytes());
      if (is_int8()) pin_.add(scales_.data(), scales_.bytes());
    }
    if (!is_int8()) return;
    given_.resize(2 * shape.kv_heads * size_t{capacity_rows} * shape.code.dim);
  }

  /// Adds row `rows()` of all heads: k and v `[kv_heads, dim]`.
  void append(const std::vector<float>& k, const std::vector<float>& v) {
    write(rows_, k, v);
    ++rows_;
  }
  void write(uint32_t row, const std::vector<float>& k, const std::vector<float>& v) {
    const uint32_t dim = shape_.code.dim;
    if (is_int8()) return write_int8(row, k, v);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const size_t at = h * head_stride_ + row * row_bytes_;
      const auto bytes = [&](const std::vector<float>& x) {
        return as_bytes({x.begin() + h * dim, x.begin() + (h + 1) * dim}, shape_.dtype);
      };
      const auto key = bytes(k), value = bytes(v);
      std::copy(key.begin(), key.end(), keys_.data() + at);
      std::copy(value.begin(), value.end(), values_.data() + at);
    }
  }
  void cut(uint32_t rows) {
    rows_ = rows;
    for (auto& codes : codes_) codes.truncate(rows);
  }

  /// Brings back rows that cut() dropped, as write() has left them.
  void uncut(uint32_t rows) { rows_ = rows; }

  /// Learns balances from the rows that are there and q `[kv_heads, each, dim]`; each: 0 for the heads of a group.
  void learn(const std::vector<float>& q, uint32_t each = 0) {
    const uint32_t group = each == 0 ? shape_.q_heads / shape_.kv_heads : each;
    const uint32_t dim = shape_.code.dim;
    codes_.clear();
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const RowsView queries =
          dense_rows(q.data() + size_t{h} * group * dim, group, dim, DType::f32);
      codes_.emplace_back(shape_.code, index::learn_balance(kernels(), head(h), queries));
    }
  }
  /// Tells the device the balances and rows.
  void tell(Codes& codes, uint32_t layer) const {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const index::Balance& balance = codes_[h].balance();
      codes.set_balance(layer, h, balance.key_scale.data(), balance.value_scale);
    }
    codes.set_rows(layer, all());
  }
  /// Makes the host's codes of all complete blocks.
  void extend() {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) codes_[h].extend(kernels(), head(h));
  }

  [[nodiscard]] const std::byte* keys() const { return keys_.data(); }
  [[nodiscard]] const std::byte* values() const { return values_.data(); }
  /// The scales of the rows; null where rows are not int8.
  [[nodiscard]] const uint16_t* scales() const {
    return is_int8() ? reinterpret_cast<const uint16_t*>(scales_.data()) : nullptr;
  }
  /// The number of elements that a block has in scales().
  [[nodiscard]] size_t block_scales() const {
    return size_t{2} * shape_.kv_heads * shape_.code.dim;
  }
  [[nodiscard]] size_t head_stride() const { return head_stride_; }
  [[nodiscard]] uint32_t rows() const { return rows_; }
  [[nodiscard]] const index::KvCodes& codes(uint32_t kv_head) const { return codes_[kv_head]; }
  [[nodiscard]] KvView head(uint32_t h) const { return all().head(h); }
  [[nodiscard]] KvView all() const {
    const auto view = [&](const Pages& pages, uint32_t which) {
      RowsView rows{{.data = pages.data(),
                     .token_stride = shape_.code.dim,
                     .head_stride = static_cast<ptrdiff_t>(head_stride_ / dtype_size(shape_.dtype)),
                     .tokens = rows_,
                     .heads = shape_.kv_heads,
                     .dim = shape_.code.dim,
                     .dtype = shape_.dtype}};
      if (is_int8()) {
        rows.scales = {scales() + which * shape_.code.dim, block_scales(), 0,
                       ptrdiff_t{2} * shape_.code.dim};
      }
      return rows;
    };
    return {view(keys_, 0), view(values_, 1)};
  }
  [[nodiscard]] std::vector<float> row(const RowsView& rows, size_t i) const {
    std::vector<float> x(rows.dim);
    cpu::read_row(kernels(), rows, i, x.data());
    return x;
  }

  /// The state of all encoded rows as a step computes it: the N heaviest of each KV head exactly, the others by their
  /// codes. close: which query heads have a row N + 1 that weighs as much as row N, so that rounding may choose the
  /// other.
  [[nodiscard]] States attend(const std::vector<float>& q, std::vector<bool>& close) const {
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const uint32_t dim = shape_.code.dim;
    States out;
    close.assign(shape_.q_heads, false);
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const float* head_q = q.data() + size_t{h} * group * dim;
      const std::vector<uint32_t> exact = heaviest(h, head_q, close);
      std::vector<float> o(size_t{group} * dim), lse(group);
      const index::KvCodes& codes = codes_[h];
      codes.attend(codes.queries(head_q, group), shape_.logits, exact, {o.data(), lse.data()});
      for (uint32_t g = 0; g < group; ++g) {
        States one;
        one.o.assign(o.begin() + g * dim, o.begin() + (g + 1) * dim);
        one.lse = {double{lse[g]}};
        for (uint32_t row_number : exact)
          one = merged(one, of_row(h, row_number, head_q + g * dim));
        out.o.insert(out.o.end(), one.o.begin(), one.o.end());
        out.lse.push_back(one.lse[0]);
      }
    }
    return out;
  }

  /// Exact attention to all encoded rows.
  [[nodiscard]] States attend_exactly(const std::vector<float>& q) const {
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const uint32_t dim = shape_.code.dim;
    States out;
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      std::vector<States> rows;
      double top = -INFINITY, sum = 0.0;
      for (size_t i = 0; i < codes_[h / group].count(); ++i) {
        rows.push_back(of_row(h / group, static_cast<uint32_t>(i), q.data() + size_t{h} * dim));
        top = std::max(top, rows.back().lse[0]);
      }
      std::vector<double> o(dim, 0.0);
      for (const States& row : rows) {
        const double weight = std::exp(row.lse[0] - top);
        sum += weight;
        for (uint32_t j = 0; j < dim; ++j) o[j] += weight * row.o[j];
      }
      for (double& x : o) x /= sum;
      out.o.insert(out.o.end(), o.begin(), o.end());
      out.lse.push_back(top + std::log(sum));
    }
    return out;
  }

 private:
  [[nodiscard]] bool is_int8() const { return shape_.dtype == DType::i8; }
  /// Writes a row as int8: the last row of a block makes the block int8, with scales of its own.
  void write_int8(uint32_t row, const std::vector<float>& k, const std::vector<float>& v) {
    const size_t dim = shape_.code.dim;
    const size_t capacity = head_stride_ / row_bytes_;
    for (uint32_t which = 0; which < 2; ++which) {
      for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
        float* given = given_.data() + (which * shape_.kv_heads + h) * capacity * dim;
        std::copy_n((which == 0 ? k : v).begin() + static_cast<ptrdiff_t>(h * dim), dim,
                    given + row * dim);
        if ((row + 1) % kCodeBlock != 0) continue;
        const size_t first = row + 1 - kCodeBlock;
        cpu::ChannelQuantiser quantiser(shape_.code.dim);
        for (size_t i = first; i <= row; ++i) quantiser.look(given + i * dim);
        quantiser.choose_scales(std::numeric_limits<float>::max(),
                                reinterpret_cast<uint16_t*>(scales_.data()) +
                                    first / kCodeBlock * block_scales() + (2 * h + which) * dim);
        auto* to =
            reinterpret_cast<int8_t*>((which == 0 ? keys_ : values_).data()) + h * head_stride_;
        for (size_t i = first; i <= row; ++i) quantiser.write(given + i * dim, to + i * dim);
      }
    }
  }
  static const cpu::Kernels& kernels() { return cpu::select_kernels(); }

  [[nodiscard]] double capped(double logit) const {
    const double cap = shape_.logits.softcap;
    return cap > 0.0 ? cap * std::tanh(logit / cap) : logit;
  }

  [[nodiscard]] States of_row(uint32_t h, uint32_t number, const float* q) const {
    const auto k = row(head(h).keys, number), v = row(head(h).values, number);
    double dot = 0.0;
    for (size_t j = 0; j < k.size(); ++j) dot += double{q[j]} * double{k[j]};
    return {{v.begin(), v.end()}, {capped(dot * double{shape_.logits.scale})}};
  }

  /// The heaviest rows, rising.
  [[nodiscard]] std::vector<uint32_t> heaviest(uint32_t h, const float* q,
                                               std::vector<bool>& close) const {
    const uint32_t group = shape_.q_heads / shape_.kv_heads;
    const uint32_t dim = shape_.code.dim;
    const index::KvCodes& codes = codes_[h];
    const size_t n = codes.count();
    const size_t wanted = std::min<size_t>(shape_.exact_rows, n);
    if (wanted == 0) return {};
    const index::CodeQueries queries = codes.queries(q, group);
    std::vector<float> scores(n * group), o(size_t{group} * dim), lse(group);
    codes.score(queries, scores.data(), n);
    codes.attend(queries, shape_.logits, {}, {o.data(), lse.data()});
    std::vector<double> weights(n, -INFINITY);
    for (uint32_t g = 0; g < group; ++g) {
      double norm = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        norm += double{queries.rows[g * dim + j]} * double{queries.rows[g * dim + j]};
      }
      for (size_t i = 0; i < n; ++i) {
        const std::byte* block = codes.block(i / kCodeBlock);
        uint16_t factor;
        std::memcpy(&factor, block + shape_.code.factors_at() + i % kCodeBlock * 4, 2);
        float noise;
        std::memcpy(&noise, block + shape_.code.noise_at(), 4);
        const double f = double{cpu::f16_to_f32(factor)};
        const double scale = double{shape_.logits.scale};
        const double logit = scale * double{scores[g * n + i]};
        double slope = scale;
        if (shape_.logits.softcap > 0.0F) {
          const double t = std::tanh(logit / double{shape_.logits.softcap});
          slope *= 1.0 - t * t;
        }
        const double bias = 0.5 * slope * slope * norm * f * f * double{noise};
        const double weight = capped(logit) - std::min(bias, double{kMostNoiseBias});
        weights[i] = std::max(weights[i], weight - double{lse[g]});
      }
    }
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return weights[a] > weights[b]; });
    // A part of q's components has few bits on the device, where codes lie high in their bytes: scores by 2-bit codes
    // are right to about 0.005 here.
    const double is_close = shape_.code.key_bits == 2 ? 0.03 : 0.01;
    if (wanted < n && weights[order[wanted - 1]] - weights[order[wanted]] < is_close) {
      std::fill_n(close.begin() + h * group, group, true);
    }
    order.resize(wanted);
    std::sort(order.begin(), order.end());
    return order;
  }

  CodesShape shape_;
  size_t row_bytes_, head_stride_;
  Pages keys_, values_, scales_;
  HostPin pin_;
  std::vector<float> given_;  ///< before int8: `[2, kv_heads, capacity, dim]`
  uint32_t rows_ = 0;
  std::vector<index::KvCodes> codes_;
};

}  // namespace keyhole::gpu::test
