// Causal attention of a whole prompt, one layer of an 8B shape (32 query and 8 KV heads of 128), K and V on the device,
// 4096 queries (or CHUNK) at a time: all rows, by the kernel of all devices (of numbers in f32, too) and by Hopper's;
// lists of all blocks; lists of a share of them, chosen at random beside the first block and the newest ones. Of more
// than 200,000 tokens dense attention, the first and the newest tokens, and the patterns. Patterns have two times: that
// of the choice, where next to nothing of what it finds is attended, and what attention takes beside it. Numbers are
// random, so that a mass takes about its share of the blocks, and thresholds pass over all or nothing. Patterns that
// differ in a stride alone are left out there. heads=24/4/256: so many query and KV heads of so many components;
// `dense`: dense attention in 16 bits alone.
//
//   gpu_attention_bench [heads=Q/KV/D] [dense] [tokens[/CHUNK] ..]
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/device.h"
#include "gpu/prompt.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

struct Layer {
  uint32_t q_heads = 32, kv_heads = 8, dim = 128;
  bool dense = false;  ///< what is timed
};
Layer layer;  // NOLINT: main() fills it in

void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

template <class T>
T* allocate(size_t n) {
  T* p = nullptr;
  check(cudaMalloc(reinterpret_cast<void**>(&p), n * sizeof(T)), "device memory");
  return p;
}

/// Normally distributed fp16 or bf16 numbers, a pattern of them again and again.
void fill(uint16_t* to, size_t n, DType dtype, uint32_t seed) {
  constexpr size_t kPattern = size_t{1} << 22U;
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(std::min(n, kPattern + 64));
  for (uint16_t& y : x) {
    const float f = normal(rng);
    if (dtype == DType::f16) {
      const __half h = __float2half_rn(f);
      y = *reinterpret_cast<const uint16_t*>(&h);
    } else {
      const __nv_bfloat16 h = __float2bfloat16_rn(f);
      y = *reinterpret_cast<const uint16_t*>(&h);
    }
  }
  for (size_t at = 0; at < n; at += x.size()) {
    check(cudaMemcpy(to + at, x.data(), std::min(x.size(), n - at) * 2, cudaMemcpyHostToDevice),
          "copy");
  }
}

struct Lists {
  std::vector<uint32_t> counts;
  std::vector<uint16_t> blocks;
  uint32_t capacity = 0;
  double share = 0.0;  // of all that are seen
};

/// Random lists for a chunk of n queries from `first` on.
Lists lists_of(uint32_t first, uint32_t n, double share, std::mt19937& rng) {
  Lists l;
  const uint32_t tiles = (n + kListQueries - 1) / kListQueries;
  l.capacity = (first + n + kListRows - 1) / kListRows;
  l.counts.resize(size_t{layer.q_heads} * tiles);
  l.blocks.resize(l.counts.size() * l.capacity);
  size_t all = 0, taken = 0;
  std::uniform_real_distribution<double> uniform;
  for (size_t i = 0; i < l.counts.size(); ++i) {
    const uint32_t last =
        (first + static_cast<uint32_t>(i % tiles + 1) * kListQueries + kListRows - 1) / kListRows;
    for (uint32_t b = 0; b < last; ++b) {
      if (b != 0 && b + 4 < last && uniform(rng) >= share) continue;
      l.blocks[i * l.capacity + l.counts[i]++] = static_cast<uint16_t>(b);
    }
    all += last;
    taken += l.counts[i];
  }
  l.share = static_cast<double>(taken) / static_cast<double>(all);
  return l;
}

/// Lists of random blocks take the host long beyond this, and the general kernel minutes.
constexpr uint32_t kManyTokens = 200000;
int repetitions(uint32_t tokens) { return tokens > kManyTokens ? 1 : 3; }

struct NamedPattern {
  std::string name;
  PromptPattern pattern;
  PromptPattern choice;  ///< alone; dense: there is none
};
std::vector<NamedPattern> patterns(uint32_t tokens) {
  std::vector<NamedPattern> all;
  const bool many = tokens > kManyTokens;
  const auto add = [&](const std::string& name, PromptPattern p) {
    if (many && (p.dense || (p.choice == PromptChoice::sampled && p.stride == 8))) return;
    NamedPattern n{name, p, {}};
    if (!p.dense && (p.choice != PromptChoice::sampled || p.stride != 0)) {
      n.choice = p;
      n.choice.mass = 0.0F;
      n.choice.blocks = std::min(n.choice.blocks, 1U);
      n.choice.columns = n.choice.slashes = 1;
    }
    all.push_back(n);
  };
  PromptPattern p;
  p.skip = 64.0F;  // of no block
  add("dense:skip=64", p);
  p.skip = 1.0F;
  add("dense:skip=1", p);
  p = {};
  p.dense = false;
  p.first_rows = 1024;
  p.near_rows = 8192;
  add("a-shape:first=1024,near=8192", p);
  p.first_rows = p.near_rows = 64;
  p.mass = 0.1F;
  for (const uint32_t stride : {32U, 16U, 8U}) {
    p.stride = stride;
    add("sampled:mass=100,stride=" + std::to_string(stride), p);
  }
  p.choice = PromptChoice::pooled;
  for (const uint32_t blocks : {32U, 128U}) {
    p.blocks = blocks;
    add("pooled:blocks=" + std::to_string(blocks), p);
  }
  p.choice = PromptChoice::vertical_slash;
  for (const auto& [columns, slashes] : {std::pair{1024U, 64U}, std::pair{4096U, 16U}}) {
    p.columns = columns;
    p.slashes = slashes;
    add("vertical-slash:columns=" + std::to_string(columns) + ",slashes=" + std::to_string(slashes),
        p);
  }
  return all;
}

/// Times patterns that choose, by the time of finding and that of attending; first with one pattern for all heads,
/// then with all patterns among the heads.
void time_patterns(const TensorView& k, const TensorView& v, const TensorView& q,
                   const TensorOut& out, uint32_t tokens, uint32_t chunk) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  const auto prompt = make_cuda_device({})->make_prompt({layer.q_heads, layer.kv_heads, layer.dim});
  const auto time = [&](std::span<const PromptPattern> of_heads) {
    float best = 1e9F;
    // The first takes memory.
    for (int i = 0; i <= repetitions(tokens); ++i) {
      check(cudaEventRecord(begin), "record");
      for (uint32_t first = 0; first < tokens; first += chunk) {
        PromptStretch s;
        s.q = q, s.k = k, s.v = v, s.out = out;
        s.n = std::min(chunk, tokens - first);
        s.rows = first + s.n;
        s.logits.scale = 1.0F / std::sqrt(static_cast<float>(layer.dim));
        prompt->attend(s, of_heads, nullptr);
      }
      check(cudaEventRecord(end), "record");
      check(cudaDeviceSynchronize(), "attention");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
      if (i > 0) best = std::min(best, ms);
    }
    return double{best};
  };
  const auto report = [&](const std::string& name, double choice,
                          std::span<const PromptPattern> of_heads) {
    const PromptBlocks before = prompt->blocks();
    const double all = time(of_heads);
    const PromptBlocks after = prompt->blocks();
    const uint64_t seen = after.seen - before.seen;
    std::printf("%8u %6s %-44s %8.3f %9.2f %9.2f\n", tokens, dtype_name(k.dtype), name.c_str(),
                seen == 0 ? 1.0
                          : static_cast<double>(after.attended - before.attended) /
                                static_cast<double>(seen),
                choice, all - choice);
    std::fflush(stdout);
  };
  std::printf("%8s %6s %-44s %8s %9s %9s\n", "tokens", "dtype", "pattern", "blocks", "choice ms",
              "rest ms");
  std::vector<PromptPattern> in_turn;
  double choices = 0;
  for (const NamedPattern& p : patterns(tokens)) {
    const double choice = p.choice.dense ? 0.0 : time(std::span(&p.choice, 1));
    report(p.name, choice, std::span(&p.pattern, 1));
    if (p.pattern.dense) continue;
    in_turn.push_back(p.pattern);
    choices += choice;
  }
  // Each pattern chooses for some of the heads.
  if (tokens <= kManyTokens) {
    const double share = 1.0 / static_cast<double>(in_turn.size());
    std::vector<PromptPattern> of_heads;
    for (uint32_t h = 0; h < layer.q_heads; ++h) of_heads.push_back(in_turn[h % in_turn.size()]);
    report("heads by all of these in turn", share * choices, of_heads);
  }
  check(cudaEventDestroy(begin), "destroy");
  check(cudaEventDestroy(end), "destroy");
}

/// Times dense attention of numbers in f32.
void time_f32(uint32_t tokens, uint32_t chunk) {
  const size_t kv = size_t{tokens} * layer.kv_heads * layer.dim,
               of_chunk = size_t{chunk} * layer.q_heads * layer.dim;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(std::max(kv, of_chunk));
  for (float& x : numbers) x = normal(rng);
  const auto tensor = [&](size_t n, uint32_t heads) {
    auto* const data = allocate<float>(n);
    check(cudaMemcpy(data, numbers.data(), n * sizeof(float), cudaMemcpyHostToDevice), "copy");
    return dense_tensor(reinterpret_cast<std::byte*>(data), n / heads / layer.dim, heads, layer.dim,
                        DType::f32, Memory::device);
  };
  PromptStretch s;
  s.q = tensor(of_chunk, layer.q_heads), s.out = tensor(of_chunk, layer.q_heads);
  s.k = tensor(kv, layer.kv_heads), s.v = tensor(kv, layer.kv_heads);
  s.logits.scale = 1.0F / std::sqrt(static_cast<float>(layer.dim));
  const auto prompt = make_cuda_device({})->make_prompt({layer.q_heads, layer.kv_heads, layer.dim});
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  float best = 1e9F;
  // The first takes memory.
  for (int i = 0; i <= repetitions(tokens); ++i) {
    check(cudaEventRecord(begin), "record");
    for (uint32_t first = 0; first < tokens; first += chunk) {
      s.n = std::min(chunk, tokens - first);
      s.rows = first + s.n;
      prompt->attend(s, PromptPattern{}, nullptr);
    }
    check(cudaEventRecord(end), "record");
    check(cudaDeviceSynchronize(), "attention");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i > 0) best = std::min(best, ms);
  }
  const double cells = 0.5 * tokens * tokens;
  std::printf("%8u %6s %-8s %8.3f %10.2f %9.0f\n", tokens, "f32", "general", 1.0, double{best},
              4.0 * cells * layer.q_heads * layer.dim / double{best} * 1e-9);
  const std::byte* const tensors[] = {s.q.data, s.k.data, s.v.data, s.out.data};
  for (const std::byte* data : tensors) check(cudaFree(const_cast<std::byte*>(data)), "free");
  check(cudaEventDestroy(begin), "destroy");
  check(cudaEventDestroy(end), "destroy");
}

}  // namespace

int main(int argc, char** argv) {
  struct Length {
    uint32_t tokens, chunk;
  };
  std::vector<Length> lengths;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "dense") == 0) {
      layer.dense = true;
      continue;
    }
    if (std::sscanf(argv[i], "heads=%u/%u/%u", &layer.q_heads, &layer.kv_heads, &layer.dim) == 3) {
      continue;
    }
    const char* const slash = std::strchr(argv[i], '/');
    const int tokens = std::atoi(argv[i]), chunk = slash == nullptr ? 4096 : std::atoi(slash + 1);
    if (tokens < 1 || chunk < 1) {
      std::fprintf(stderr, "%s: allowed are heads=Q/KV/D, dense, tokens[/CHUNK], both at least 1\n",
                   argv[i]);
      return 2;
    }
    lengths.push_back({static_cast<uint32_t>(tokens), static_cast<uint32_t>(chunk)});
  }
  if (lengths.empty()) lengths = {{8192, 4096}, {32768, 4096}, {131072, 4096}};
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::printf("%8s %6s %-8s %8s %10s %9s\n", "tokens", "dtype", "kernel", "blocks", "ms",
              "TFLOP/s");
  for (const auto [tokens, chunk] : lengths) {
    if (tokens <= kManyTokens && !layer.dense) time_f32(tokens, chunk);
    for (const DType dtype : {DType::f16, DType::bf16}) {
      if (tokens > kManyTokens && dtype == DType::bf16) continue;
      const size_t kv = size_t{tokens} * layer.kv_heads * layer.dim,
                   of_chunk = size_t{chunk} * layer.q_heads * layer.dim;
      auto *const k = allocate<uint16_t>(kv), *const v = allocate<uint16_t>(kv),
                  *const q = allocate<uint16_t>(of_chunk);
      fill(k, kv, dtype, 1), fill(v, kv, dtype, 2), fill(q, of_chunk, dtype, 3);
      BlockedParams p;
      p.q = q, p.q_token_stride = size_t{layer.q_heads} * layer.dim, p.q_head_stride = layer.dim,
      p.q_heads = layer.q_heads, p.kv_heads = layer.kv_heads;
      p.logits.scale = 1.0F / std::sqrt(static_cast<float>(layer.dim));
      p.keys = k, p.values = v, p.head_stride = layer.dim,
      p.row_stride = size_t{layer.kv_heads} * layer.dim;
      p.causal = true, p.is_first = true;
      p.o = allocate<float>(of_chunk), p.sums = allocate<float2>(size_t{chunk} * layer.q_heads);
      // Lists of the last chunk's size, made for each chunk beforehand.
      const auto time = [&](bool hopper, double share) {
        std::vector<BlockLists> device;
        double computed = 0, shares = 0;
        std::mt19937 rng(5);
        for (uint32_t first = 0; first < tokens; first += chunk) {
          const uint32_t n = std::min(chunk, tokens - first);
          double part = 1.0;
          if (share > 0.0) {
            const Lists l = lists_of(first, n, share, rng);
            auto* const counts = allocate<uint32_t>(l.counts.size());
            auto* const blocks = allocate<uint16_t>(l.blocks.size());
            check(cudaMemcpy(counts, l.counts.data(), l.counts.size() * 4, cudaMemcpyHostToDevice),
                  "copy");
            check(cudaMemcpy(blocks, l.blocks.data(), l.blocks.size() * 2, cudaMemcpyHostToDevice),
                  "copy");
            device.push_back({counts, blocks, l.capacity});
            part = l.share;
          }
          const double cells = static_cast<double>(n) * (first + n / 2.0);
          computed += part * cells;
          shares += cells;
        }
        float best = 1e9F;
        for (int i = 0; i < repetitions(tokens); ++i) {
          check(cudaEventRecord(begin), "record");
          for (uint32_t first = 0; first < tokens; first += chunk) {
            p.n = std::min(chunk, tokens - first);
            p.first = first;
            p.rows = first + p.n;
            p.lists = share > 0.0 ? device[first / chunk] : BlockLists{};
            launch_blocked(p, dtype, layer.dim, hopper, nullptr);
          }
          check(cudaEventRecord(end), "record");
          check(cudaDeviceSynchronize(), "attention");
          float ms = 0;
          check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
          best = std::min(best, ms);
        }
        for (const BlockLists& l : device) {
          check(cudaFree(const_cast<uint32_t*>(l.counts)), "free");
          check(cudaFree(const_cast<uint16_t*>(l.blocks)), "free");
        }
        std::printf("%8u %6s %-8s %8.3f %10.2f %9.0f\n", tokens, dtype_name(dtype),
                    hopper ? "hopper" : "general", computed / shares, double{best},
                    4.0 * computed * layer.q_heads * layer.dim / double{best} * 1e-9);
        std::fflush(stdout);
      };
      const bool has_hopper = hopper_kernels_run_on(0) && layer.dim <= kMostHopperDim;
      const bool many = tokens > kManyTokens;
      if (!many || !has_hopper) time(false, 0.0);
      if (has_hopper) time(true, 0.0);
      for (const double share : {1.0, 0.3, 0.1, 0.03}) {
        if (!many && !layer.dense) time(has_hopper, share);
      }
      const auto rows = [&](const void* data, uint32_t heads, DType of) {
        return dense_tensor(static_cast<std::byte*>(const_cast<void*>(data)), tokens, heads,
                            layer.dim, of, Memory::device);
      };
      if (!layer.dense)
        time_patterns(rows(k, layer.kv_heads, dtype), rows(v, layer.kv_heads, dtype),
                      rows(q, layer.q_heads, dtype), rows(p.o, layer.q_heads, DType::f32), tokens,
                      chunk);
      for (void* x : {static_cast<void*>(k), static_cast<void*>(v), static_cast<void*>(q),
                      static_cast<void*>(p.o), static_cast<void*>(p.sums)}) {
        check(cudaFree(x), "free");
      }
    }
  }
  return 0;
}
