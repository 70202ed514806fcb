#include <algorithm>
#include <string>
#include <utility>

#include "gpu/cuda/blocked/block_choice.h"
#include "gpu/cuda/blocked/blocked_kernels.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/prompt.h"

namespace keyhole::gpu {
namespace {

// Weights of tiles that are chosen for together: no more than this, but whole tiles of 128 samples of one query in 16.
constexpr size_t kMostWeightBytes = size_t{128} << 20U;
constexpr uint32_t kLeastTiles = 16;
// Lists name blocks by 16 bits.
constexpr uint32_t kMostRows = 65535 * kListRows;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "attention of a prompt: " + text);
}

uint32_t blocks_of(uint32_t rows) { return (rows + kListRows - 1) / kListRows; }

/// Rows that kernels read or write 16 bytes at a time.
void check_aligned(const DeviceTokens& t, const char* name, size_t bytes) {
  const size_t element = dtype_size(t.dtype);
  if (reinterpret_cast<uintptr_t>(t.data) % bytes != 0 || t.token_stride * element % bytes != 0 ||
      t.head_stride * element % bytes != 0) {
    refuse(std::string("rows of ") + name + " are not aligned to " + std::to_string(bytes) +
           " bytes");
  }
}

class CudaPrompt final : public PromptAttention {
 public:
  CudaPrompt(int ordinal, const PromptShape& shape) : ordinal_(ordinal), shape_(shape) {
    if (const std::string why = why_no_prompt(shape); !why.empty()) {
      throw Error(Status::unsupported, "attention of a prompt on a CUDA device: " + why);
    }
    const DeviceScope device(ordinal_);
    const BesideCapture beside;
    has_hopper_ = hopper_kernels_run_on(ordinal_);
    finished_ = std::make_unique<Event>();
  }
  ~CudaPrompt() override { (void)cudaEventSynchronize(finished_->get()); }
  CudaPrompt(const CudaPrompt&) = delete;
  CudaPrompt& operator=(const CudaPrompt&) = delete;

  void attend(const PromptStretch& s, const PromptPattern& pattern, Stream stream) override {
    check(s, pattern);
    if (s.n == 0) return;
    const DeviceScope device(ordinal_);
    auto* const to = static_cast<cudaStream_t>(stream);
    BlockedParams p = params(s);
    gpu::check(cudaStreamWaitEvent(to, finished_->get()),
               "attention of a prompt");  // of another stream
    if (s.sinks != nullptr) p.final.sinks = copy_sinks(s.sinks, to);
    const bool dense = pattern.dense || s.window != 0 || s.rows <= pattern.dense_rows;
    if (dense) {
      launch_blocked(p, s.q.dtype, shape_.head_dim, has_hopper_, to);
    } else {
      attend_chosen(p, s, pattern, to);
    }
    if (!dense || s.sinks != nullptr) finished_->record(to);
  }

  PromptBlocks blocks() const override {
    if (totals_.bytes() == 0) return {};
    const DeviceScope device(ordinal_);
    const BesideCapture beside;
    finished_->wait("attention of a prompt");
    unsigned long long both[2] = {};
    gpu::check(cudaMemcpy(both, totals_.data(), sizeof both, cudaMemcpyDeviceToHost),
               "blocks of a prompt");
    return {both[0], both[1]};
  }

  size_t bytes() const override {
    return weights_.bytes() + counts_.bytes() + lists_.bytes() + totals_.bytes() + sinks_.bytes();
  }

 private:
  void check(const PromptStretch& s, const PromptPattern& pattern) const {
    if (s.q.dtype != DType::f16 && s.q.dtype != DType::bf16) {
      refuse(std::string("q in ") + dtype_name(s.q.dtype) + ", allowed: f16, bf16");
    }
    for (const DeviceTokens* t : {&s.k, &s.v}) {
      if (t->dtype == s.q.dtype) continue;
      refuse(std::string(t == &s.k ? "k" : "v") + " in " + dtype_name(t->dtype) +
             ", needed: as q, " + dtype_name(s.q.dtype));
    }
    if (s.n > s.rows) {
      refuse(std::to_string(s.n) + " queries of " + std::to_string(s.rows) +
             " tokens, allowed: no more than these");
    }
    if (s.rows > kMostRows) {
      refuse(std::to_string(s.rows) + " tokens, allowed: " + std::to_string(kMostRows));
    }
    if (!pattern.dense &&
        (pattern.stride > kListQueries || !(pattern.mass >= 0.0F && pattern.mass <= 1.0F))) {
      refuse("a stride of " + std::to_string(pattern.stride) + " and a mass of " +
             std::to_string(pattern.mass) + ", allowed: 0.." + std::to_string(kListQueries) +
             " and 0..1");
    }
    constexpr size_t kRowBytes = 16, kOutBytes = 8;
    check_aligned(s.q, "q", kRowBytes);
    check_aligned(s.k, "k", kRowBytes);
    check_aligned(s.v, "v", kRowBytes);
    check_aligned(s.out, "out", kOutBytes);
  }

  [[nodiscard]] BlockedParams params(const PromptStretch& s) const {
    BlockedParams p;
    p.q = s.q.data;
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
    p.final = {s.out.data, s.out.token_stride, s.out.head_stride, s.out.dtype, s.lse, nullptr};
    return p;
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

  /// Tiles of queries whose weights and lists there is memory for.
  void attend_chosen(BlockedParams p, const PromptStretch& s, const PromptPattern& pattern,
                     cudaStream_t stream) {
    const uint32_t blocks = blocks_of(s.rows);
    const uint32_t samples =
        pattern.stride == 0 ? 0 : sampled_queries(kListQueries, pattern.stride);
    const size_t of_tile =
        size_t{shape_.q_heads} * blocks * (samples * sizeof(float) + sizeof(uint16_t));
    const auto all = static_cast<size_t>((s.n + kListQueries - 1) / kListQueries);
    const auto tiles = static_cast<uint32_t>(
        std::min<size_t>(std::max<size_t>(kMostWeightBytes / of_tile, kLeastTiles), all));
    reserve(size_t{tiles} * shape_.q_heads, blocks, samples);
    // From the end back, so that all but the first take whole tiles of queries.
    for (uint32_t end = s.n; end > 0;) {
      const uint32_t n = std::min(tiles * kListQueries, end), begin = end - n;
      attend_slice(p, s, pattern, begin, n, stream);
      end = begin;
    }
  }
  void attend_slice(BlockedParams p, const PromptStretch& s, const PromptPattern& pattern,
                    uint32_t begin, uint32_t n, cudaStream_t stream) {
    const size_t element = dtype_size(s.q.dtype);
    p.q = static_cast<const std::byte*>(s.q.data) + begin * s.q.token_stride * element;
    p.n = n;
    p.first += begin;
    p.rows = p.first + n;
    p.final.data =
        static_cast<std::byte*>(s.out.data) + begin * s.out.token_stride * dtype_size(s.out.dtype);
    if (s.lse != nullptr) p.final.lse = s.lse + size_t{begin} * shape_.q_heads;
    SampledWeights w;
    w.blocks = blocks_of(p.rows);
    if (pattern.stride != 0) {
      w.stride = pattern.stride;
      w.samples = sampled_queries(n, pattern.stride);
      w.weights = weights_.as<float>();
      launch_sample_weights(p, w, s.q.dtype, shape_.head_dim, has_hopper_, stream);
    }
    BlockChoice choice;
    choice.first_blocks = blocks_of(pattern.first_rows);
    choice.near_blocks = blocks_of(pattern.near_rows);
    choice.mass = pattern.mass;
    choice.counts = counts_.as<uint32_t>();
    choice.lists = lists_.as<uint16_t>();
    choice.totals = totals_.as<unsigned long long>();
    if (pattern.stride != 0 && pattern.lookups < 1.0F) {
      choice.lookups = pattern.lookups;
      choice.looked_up = choice.totals + 2;
      gpu::check(
          cudaMemsetAsync(choice.looked_up, 0, shape_.q_heads * sizeof(unsigned long long), stream),
          "the choice of blocks");
    }
    launch_choose_blocks(p, w, choice, stream);
    p.lists = {choice.counts, choice.lists, w.blocks};
    launch_blocked(p, s.q.dtype, shape_.head_dim, has_hopper_, stream);
  }

  /// For so many lists of tiles and heads.
  void reserve(size_t lists, uint32_t blocks, uint32_t samples) {
    const BesideCapture beside;
    const size_t of_list = size_t{blocks} * sizeof(float);
    if (weights_.bytes() < lists * samples * of_list ||
        counts_.bytes() < lists * sizeof(uint32_t) ||
        lists_.bytes() < lists * blocks * sizeof(uint16_t)) {
      finished_->wait("attention of a prompt");
    }
    (void)weights_.reserve(lists * samples * of_list);
    (void)counts_.reserve(lists * sizeof(uint32_t));
    (void)lists_.reserve(lists * blocks * sizeof(uint16_t));
    if (totals_.bytes() != 0) return;
    totals_ = DeviceBuffer((2 + size_t{shape_.q_heads}) * sizeof(unsigned long long));
    totals_.clear(0, totals_.bytes());
  }

  int ordinal_;
  PromptShape shape_;
  bool has_hopper_ = false;
  ScratchBuffer weights_, counts_, lists_;
  DeviceBuffer totals_, sinks_;
  std::unique_ptr<Event> finished_;
};

}  // namespace

std::unique_ptr<PromptAttention> make_cuda_prompt(int ordinal, const PromptShape& shape) {
  return std::make_unique<CudaPrompt>(ordinal, shape);
}

}  // namespace keyhole::gpu
