#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/prompt_lists.h"
#include "gpu/prompt.h"

namespace keyhole::gpu {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "attention of a prompt: " + text);
}

/// Rows that kernels read or write 16 bytes at a time.
void check_aligned(const TensorView& t, const char* name, ptrdiff_t bytes) {
  const auto element = static_cast<ptrdiff_t>(dtype_size(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % bytes != 0 || t.token_stride * element % bytes != 0 ||
      t.head_stride * element % bytes != 0) {
    refuse(std::string("rows of ") + name + " are not aligned to " + std::to_string(bytes) +
           " bytes");
  }
}

class CudaPrompt final : public CudaPromptAttention {
 public:
  CudaPrompt(int ordinal, const PromptShape& shape, const SliceLimits& limits)
      : ordinal_(ordinal), shape_(shape) {
    if (const std::string why = why_no_prompt(shape); !why.empty()) {
      throw Error(Status::unsupported, "attention of a prompt on a CUDA device: " + why);
    }
    const DeviceScope device(ordinal_);
    const BesideCapture beside;
    has_hopper_ = hopper_kernels_run_on(ordinal_);
    finished_ = std::make_unique<Event>();
    lists_ = std::make_unique<PromptLists>(shape, has_hopper_, *finished_, limits);
  }
  ~CudaPrompt() override { (void)cudaEventSynchronize(finished_->get()); }
  CudaPrompt(const CudaPrompt&) = delete;
  CudaPrompt& operator=(const CudaPrompt&) = delete;

  using PromptAttention::attend;
  void attend(const PromptStretch& given, std::span<const PromptPattern> patterns,
              Stream stream) override {
    check(given, patterns);
    if (given.n == 0) return;
    const DeviceScope device(ordinal_);
    auto* const to = static_cast<cudaStream_t>(stream);
    gpu::check(cudaStreamWaitEvent(to, finished_->get()),
               "attention of a prompt");  // of another stream
    const std::vector<PatternHeads> groups = group_patterns(patterns, given.rows);
    const bool dense = given.window != 0 || attends_all(groups);
    const bool in_f32 = given.q.dtype == DType::f32;
    const PromptStretch s = in_f32 ? split(given, dense, to) : given;
    BlockedParams p = params(s);
    if (s.sinks != nullptr) p.final.sinks = copy_sinks(s.sinks, to);
    if (dense) {
      if (s.window == 0 && is_dense(groups)) p.skip = groups[0].pattern.skip;
      launch(p, s.q.dtype, to);
    } else {
      attend_chosen(p, s, groups, to);
    }
    if (!dense || in_f32 || s.sinks != nullptr) finished_->record(to);
  }

  PromptBlocks blocks() const override {
    if (lists_->totals() == nullptr) return {};
    const DeviceScope device(ordinal_);
    const BesideCapture beside;
    finished_->wait("attention of a prompt");
    unsigned long long both[2] = {};
    gpu::check(cudaMemcpy(both, lists_->totals(), sizeof both, cudaMemcpyDeviceToHost),
               "blocks of a prompt");
    return {both[0], both[1]};
  }

  size_t bytes() const override { return lists_->bytes() + sinks_.bytes() + halves_.bytes(); }

  void reserve(uint32_t n, uint32_t rows, DType dtype,
               std::span<const PromptPattern> patterns) override {
    const std::vector<PatternHeads> groups = group_patterns(patterns, rows);
    if (attends_all(groups)) return;
    const DeviceScope device(ordinal_);
    lists_->reserve(n, rows, dtype, groups);
  }
  size_t bytes_for(uint32_t n, uint32_t rows, DType dtype,
                   std::span<const PromptPattern> patterns) const override {
    const std::vector<PatternHeads> groups = group_patterns(patterns, rows);
    if (attends_all(groups)) return bytes();
    return lists_->bytes_for(n, rows, dtype, groups) + sinks_.bytes() + halves_.bytes();
  }

 private:
  void check(const PromptStretch& s, std::span<const PromptPattern> patterns) const {
    if (s.q.dtype != DType::f32 && s.q.dtype != DType::f16 && s.q.dtype != DType::bf16) {
      refuse(std::string("q in ") + dtype_name(s.q.dtype) + ", allowed: f32, f16, bf16");
    }
    for (const TensorView* t : {&s.k, &s.v}) {
      if (t->dtype == s.q.dtype) continue;
      refuse(std::string(t == &s.k ? "k" : "v") + " in " + dtype_name(t->dtype) +
             ", needed: as q, " + dtype_name(s.q.dtype));
    }
    if (s.n > s.rows) {
      refuse(std::to_string(s.n) + " queries of " + std::to_string(s.rows) +
             " tokens, allowed: no more than these");
    }
    if (s.rows > kMostPromptRows) {
      refuse(std::to_string(s.rows) + " tokens, allowed: " + std::to_string(kMostPromptRows));
    }
    if (patterns.size() != 1 &&
        (patterns.size() != shape_.q_heads || shape_.q_heads > HeadSet::kMost)) {
      refuse(std::to_string(patterns.size()) + " patterns of " + std::to_string(shape_.q_heads) +
             " query heads, allowed: 1, or one for each of up to " +
             std::to_string(HeadSet::kMost));
    }
    for (const PromptPattern& pattern : patterns) check(pattern);
    constexpr ptrdiff_t kRowBytes = 16, kOutBytes = 8;
    check_aligned(s.q, "q", kRowBytes);
    check_aligned(s.k, "k", kRowBytes);
    check_aligned(s.v, "v", kRowBytes);
    check_aligned(s.out, "out", kOutBytes);
  }

  static void check(const PromptPattern& p) {
    if (!(p.skip >= 0.0F && std::isfinite(p.skip))) {
      refuse("skip " + std::to_string(p.skip) + ", allowed: 0 or more octaves");
    }
    if (p.dense) return;
    if (!(p.mass >= 0.0F && p.mass <= 1.0F)) {
      refuse("a mass of " + std::to_string(p.mass) + ", allowed: 0..1");
    }
    if (p.block_rows != kListRows && p.block_rows != 2 * kListRows) {
      refuse("blocks of " + std::to_string(p.block_rows) + " rows, allowed: 64, 128");
    }
    switch (p.choice) {
      case PromptChoice::sampled:
        if (p.stride <= kListQueries) return;
        refuse("a stride of " + std::to_string(p.stride) + ", allowed: 0.." +
               std::to_string(kListQueries));
      case PromptChoice::vertical_slash:
        if (p.columns <= kMostColumns && p.slashes <= kMostSlashes && p.queries >= 1 &&
            p.queries <= kMostLineQueries)
          return;
        refuse(std::to_string(p.columns) + " columns and " + std::to_string(p.slashes) +
               " diagonals of " + std::to_string(p.queries) + " queries, allowed: 0.." +
               std::to_string(kMostColumns) + ", 0.." + std::to_string(kMostSlashes) + " and 1.." +
               std::to_string(kMostLineQueries));
      case PromptChoice::pooled: return;
    }
  }

  [[nodiscard]] bool attends_all(std::span<const PatternHeads> groups) const {
    return is_dense(groups) || !patterns_choose(shape_.head_dim);
  }
  static bool is_dense(std::span<const PatternHeads> groups) {
    return groups.size() == 1 && groups[0].pattern.dense;
  }
  void launch(const BlockedParams& p, DType dtype, cudaStream_t stream) const {
    launch_blocked(p, dtype, shape_.head_dim, has_hopper_ && p.q_low == nullptr, stream);
  }

  [[nodiscard]] BlockedParams params(const PromptStretch& s) const {
    BlockedParams p;
    p.q = s.q.data;
    p.q_low = s.q_low;
    p.keys_low = s.k_low;
    p.values_low = s.v_low;
    p.q_token_stride = s.q.token_stride;
    p.q_head_stride = s.q.head_stride;
    p.n = s.n;
    p.q_heads = shape_.q_heads;
    p.kv_heads = shape_.kv_heads;
    p.logits = s.logits;
    p.keys = s.k.data;
    p.values = s.v.data;
    // Kernels have one pair of strides for both.
    p.row_stride = s.k.token_stride;
    p.head_stride = s.k.head_stride;
    if (s.v.token_stride != s.k.token_stride || s.v.head_stride != s.k.head_stride) {
      refuse("strides of v are " + std::to_string(s.v.token_stride) + " and " +
             std::to_string(s.v.head_stride) + ", needed: those of k, " +
             std::to_string(s.k.token_stride) + " and " + std::to_string(s.k.head_stride));
    }
    p.rows = s.rows;
    p.causal = true;
    p.first = s.rows - s.n;
    p.window = s.window;
    p.is_first = true;
    p.final.data = s.out.data;
    p.final.token_stride = s.out.token_stride;
    p.final.head_stride = s.out.head_stride;
    p.final.dtype = s.out.dtype;
    p.final.lse = s.lse;
    return p;
  }

  /// The stretch, whose numbers are f32, with sums of two fp16 in their place, and with single
  /// ones of K and V where it is not dense.
  PromptStretch split(PromptStretch s, bool dense, cudaStream_t stream) {
    const size_t dim = shape_.head_dim, parts = dense ? 2 : 1;
    const size_t queries = size_t{s.n} * shape_.q_heads * dim;
    const size_t rows = size_t{s.rows} * shape_.kv_heads * dim;
    const size_t bytes = (2 * queries + 2 * parts * rows) * dtype_size(DType::f16);
    if (halves_.bytes() < bytes) {
      const BesideCapture beside;
      finished_->wait("attention of a prompt");
      (void)halves_.reserve(bytes);
    }
    auto* next = halves_.as<uint16_t>();
    const auto split_rows = [&](TensorView& t, uint32_t n, uint32_t heads, bool is_sum) {
      const size_t size = size_t{n} * heads * dim;
      uint16_t* const high = std::exchange(next, next + size);
      uint16_t* const low = is_sum ? std::exchange(next, next + size) : nullptr;
      launch_split_rows(t.slice(0, n), DType::f16, high, low, nullptr, stream);
      t = dense_tensor(reinterpret_cast<const std::byte*>(high), n, heads, shape_.head_dim,
                       DType::f16, Memory::device);
      return low;
    };
    s.q_low = split_rows(s.q, s.n, shape_.q_heads, true);
    s.k_low = split_rows(s.k, s.rows, shape_.kv_heads, dense);
    s.v_low = split_rows(s.v, s.rows, shape_.kv_heads, dense);
    return s;
  }

  const float* copy_sinks(const float* sinks, cudaStream_t stream) {
    const size_t bytes = shape_.q_heads * sizeof(float);
    if (sinks_.bytes() == 0) {
      const BesideCapture beside;
      sinks_ = DeviceBuffer(bytes);
    }
    // Pageable: it has been read when the call returns.
    gpu::check(cudaMemcpyAsync(sinks_.data(), sinks, bytes, cudaMemcpyHostToDevice, stream),
               "learned sinks");
    return sinks_.as<float>();
  }

  /// Attends by slices of queries for whose lists there is memory, from the end back, so that all but the first take
  /// whole tiles.
  void attend_chosen(const BlockedParams& p, const PromptStretch& s,
                     std::span<const PatternHeads> groups, cudaStream_t stream) {
    const uint32_t at_once = lists_->begin(p, s.q.dtype, groups, stream);
    for (uint32_t end = s.n; end > 0;) {
      const uint32_t n = std::min(at_once, end), begin = end - n;
      attend_slice(p, s, begin, n, stream);
      end = begin;
    }
  }
  void attend_slice(BlockedParams p, const PromptStretch& s, uint32_t begin, uint32_t n,
                    cudaStream_t stream) {
    p.q = s.q.row(begin);
    if (s.q_low != nullptr) {
      p.q_low = static_cast<const std::byte*>(s.q_low) + (s.q.row(begin) - s.q.data);
    }
    p.n = n;
    p.first += begin;
    p.rows = p.first + n;
    p.final.data = s.out.row(begin);
    if (s.lse != nullptr) p.final.lse = s.lse + size_t{begin} * shape_.q_heads;
    const std::optional<BlockedParams> second = lists_->choose(p, stream);
    launch(p, s.q.dtype, stream);
    if (second) launch(*second, s.q.dtype, stream);
  }

  int ordinal_;
  PromptShape shape_;
  bool has_hopper_ = false;
  DeviceBuffer sinks_;
  ScratchBuffer halves_;  // of stretches in f32
  std::unique_ptr<Event> finished_;
  std::unique_ptr<PromptLists> lists_;
};

}  // namespace

std::unique_ptr<CudaPromptAttention> make_cuda_prompt(int ordinal, const PromptShape& shape,
                                                      const SliceLimits& limits) {
  return std::make_unique<CudaPrompt>(ordinal, shape, limits);
}

}  // namespace keyhole::gpu
