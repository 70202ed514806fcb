// Sliding layers on the device of the tests, as its header says.
#include "tests/runtime/fake_windows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "tests/runtime/exact_sums.h"

namespace keyhole::test {

void FakeWindows::fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
                       const std::byte* v) {
  on_call();
  if (n > shape_.layers[layer].slots) throw Error(Status::internal, "more than there are slots");
  Layer& l = layers_[layer];
  l.first = first;
  l.tokens.clear();
  for (uint32_t i = 0; i < n; ++i) {
    Row row{std::vector<std::byte>(k + i * token_bytes(), k + (i + 1) * token_bytes()),
            std::vector<std::byte>(v + i * token_bytes(), v + (i + 1) * token_bytes())};
    l.tokens.push_back(std::move(row));
  }
}

void FakeWindows::keep(uint32_t layer, uint32_t first, uint32_t n) {
  on_call();
  Layer& l = layers_[layer];
  check_holds(l, first, n);
  l.tokens.erase(l.tokens.begin(), l.tokens.begin() + (n == 0 ? 0 : first - l.first));
  l.tokens.resize(n);
  l.first = first;
}

void FakeWindows::read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k,
                       std::byte* v) const {
  on_call();
  const Layer& l = layers_[layer];
  check_holds(l, first, n);
  for (uint32_t i = 0; i < n; ++i) {
    const Row& row = l.tokens[first - l.first + i];
    std::copy(row.k.begin(), row.k.end(), k + i * token_bytes());
    std::copy(row.v.begin(), row.v.end(), v + i * token_bytes());
  }
}

void FakeWindows::append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
                         const TensorView& v, gpu::Stream) {
  on_call();
  const auto n = static_cast<uint32_t>(k.tokens);
  Layer& l = layers_[layer];
  if (n > kept || kept > shape_.layers[layer].slots ||
      (n != kept && first != l.first + l.tokens.size())) {
    throw Error(Status::internal, "tokens that are not those behind the ones there");
  }
  push_([this, &l, k, v, first, n, kept] {
    if (n == kept) l.tokens.clear();
    for (uint32_t i = 0; i < n; ++i) {
      l.tokens.push_back({stored(k.slice(i, 1), "k"), stored(v.slice(i, 1), "v")});
    }
    while (l.tokens.size() > kept) l.tokens.pop_front();
    l.first = first + n - kept;
  });
  wait_();
}

bool FakeWindows::are_finite(uint32_t /*layer*/, const TensorView& rows, DType as, gpu::Stream) {
  on_call();
  wait_();
  for (uint32_t i = 0; i < rows.tokens; ++i) {
    std::vector<float> x = read_rows(rows.slice(i, 1));
    std::vector<std::byte> bytes(x.size() * dtype_size(as));
    kernels_->from_f32[static_cast<int>(as)](x.data(), bytes.data(), x.size());
    kernels_->to_f32[static_cast<int>(as)](bytes.data(), x.data(), x.size());
    if (!std::all_of(x.begin(), x.end(), [](float e) { return std::isfinite(e); })) return false;
  }
  return true;
}

void FakeWindows::step(uint32_t layer, const TensorView& q, const TensorView* k,
                       const TensorView* v, const gpu::SeenDrafts& drafts, const TensorOut& out,
                       float* lse, gpu::Stream stream) {
  begin_among(layer, q, k, v, drafts);
  end(layer, out, lse, stream);
}

void FakeWindows::begin(uint32_t layer, const TensorView& q, const TensorView* k,
                        const TensorView* v, gpu::Stream) {
  begin_among(layer, q, k, v, {});
}

void FakeWindows::begin_among(uint32_t layer, const TensorView& q, const TensorView* k,
                              const TensorView* v, const gpu::SeenDrafts& drafts) {
  launch();
  const bool appends = k != nullptr;
  const TensorView rk = appends ? *k : TensorView{}, rv = appends ? *v : TensorView{};
  push_([this, layer, q, rk, rv, drafts, appends] { run(layer, q, rk, rv, drafts, appends); });
}

void FakeWindows::end(uint32_t layer, const TensorOut& out, float* lse, gpu::Stream) {
  launch();
  push_([this, layer, out, lse] {
    const Layer& l = layers_[layer];
    for (uint32_t h = 0; h < shape_.q_heads; ++h) {
      kernels_->from_f32[static_cast<int>(out.dtype)](l.o.data() + size_t{h} * shape_.head_dim,
                                                      out.row(0, h), shape_.head_dim);
    }
    if (lse != nullptr) std::copy(l.lse.begin(), l.lse.end(), lse);
  });
}

void FakeWindows::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                              std::span<const uint32_t> kept, gpu::Stream) {
  launch();
  if (of > gpu::kMostDrafts) throw Error(Status::internal, "too many drafts");
  push_([this, layers = std::vector<uint32_t>(layers.begin(), layers.end()), of,
         kept = std::vector<uint32_t>(kept.begin(), kept.end())] {
    for (const uint32_t layer : layers) {
      Layer& l = layers_[layer];
      const size_t first = l.tokens.size() - of;
      std::deque<Row> rows(l.tokens.begin(), l.tokens.begin() + static_cast<ptrdiff_t>(first));
      for (const uint32_t number : kept) rows.push_back(l.tokens.at(first + number));
      l.tokens = std::move(rows);
    }
  });
}

Status FakeWindows::failure(std::string& text) {
  const std::lock_guard lock(mutex_);
  text = std::exchange(failure_text_, {});
  return text.empty() ? Status::ok : Status::not_finite;
}

size_t FakeWindows::token_bytes() const {
  return size_t{shape_.kv_heads} * shape_.head_dim * dtype_size(shape_.dtype);
}

void FakeWindows::launch() const {
  if (fails != nullptr && *fails) throw Error(Status::device_error, "planted: a launch failed");
  on_call();
}

void FakeWindows::check_holds(const Layer& l, uint32_t first, uint32_t n) {
  if (n == 0 || (first >= l.first && first + n <= l.first + l.tokens.size())) return;
  throw Error(Status::internal, "tokens " + std::to_string(first) + ".." +
                                    std::to_string(first + n) + " of " + std::to_string(l.first) +
                                    ".." + std::to_string(l.first + l.tokens.size()));
}

std::vector<float> FakeWindows::read_rows(const TensorView& rows) const {
  std::vector<float> x(size_t{rows.heads} * shape_.head_dim);
  for (uint32_t h = 0; h < rows.heads; ++h) {
    kernels_->to_f32[static_cast<int>(rows.dtype)](
        rows.row(0, h), x.data() + size_t{h} * shape_.head_dim, shape_.head_dim);
  }
  return x;
}

std::vector<std::byte> FakeWindows::stored(const TensorView& rows, const char* name) {
  const std::vector<float> x = read_rows(rows);
  std::vector<std::byte> bytes(token_bytes());
  kernels_->from_f32[static_cast<int>(shape_.dtype)](x.data(), bytes.data(), x.size());
  check_finite(numbers(bytes), name);
  return bytes;
}

std::vector<float> FakeWindows::numbers(const std::vector<std::byte>& bytes) const {
  std::vector<float> x(bytes.size() / dtype_size(shape_.dtype));
  kernels_->to_f32[static_cast<int>(shape_.dtype)](bytes.data(), x.data(), x.size());
  return x;
}

void FakeWindows::check_finite(const std::vector<float>& x, const char* name) {
  if (std::all_of(x.begin(), x.end(), [](float e) { return std::isfinite(e); })) return;
  const std::lock_guard lock(mutex_);
  failure_text_ = std::string("tensor ") + name + " of a sliding layer's step: a NaN";
}

void FakeWindows::run(uint32_t layer, const TensorView& q, const TensorView& k, const TensorView& v,
                      const gpu::SeenDrafts& drafts, bool appends) {
  Layer& l = layers_[layer];
  const gpu::WindowsShape::Layer& own = shape_.layers[layer];
  if (appends) {
    if (l.tokens.size() == own.slots) {
      l.tokens.pop_front();
      l.first += 1;
    }
    l.tokens.push_back({stored(k, "k"), stored(v, "v")});
  }
  const std::vector<float> queries = read_rows(q);
  check_finite(queries, "q");
  const uint32_t d = shape_.head_dim, group = shape_.q_heads / shape_.kv_heads;
  l.o.assign(queries.size(), 0.0F);
  l.lse.assign(shape_.q_heads, 0.0F);
  std::vector<std::vector<float>> keys, values;
  const size_t before = l.tokens.size() - drafts.drafts;
  for (size_t i = l.tokens.size(); i-- > 0 && keys.size() < own.window;) {
    if (drafts.drafts != 0 && i >= before && (drafts.sees >> (i - before) & 1) == 0) continue;
    keys.push_back(numbers(l.tokens[i].k));
    values.push_back(numbers(l.tokens[i].v));
  }
  for (uint32_t h = 0; h < shape_.q_heads; ++h) {
    const size_t at = size_t{h / group} * d;
    const double sink = shape_.sinks.empty()
                            ? -std::numeric_limits<double>::infinity()
                            : double{shape_.sinks[size_t{layer} * shape_.q_heads + h]};
    std::vector<double> logits;
    double top = sink;
    for (const auto& key : keys) {
      const double x =
          exact_dot(queries.data() + h * d, key.data() + at, d) * double{own.logits.scale};
      const double cap = double{own.logits.softcap};
      logits.push_back(cap > 0 ? cap * std::tanh(x / cap) : x);
      top = std::max(top, logits.back());
    }
    double sum = std::exp(sink - top);
    std::vector<double> o(d);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double w = std::exp(logits[i] - top);
      sum += w;
      add_weighted(o.data(), w, values[i].data() + at, d);
    }
    for (uint32_t j = 0; j < d; ++j) l.o[h * d + j] = static_cast<float>(o[j] / sum);
    l.lse[h] = static_cast<float>(top + std::log(sum));
  }
}

}  // namespace keyhole::test
