// Time of a layer's attention over codes on the device, beside a read of the same bytes: 32 layers in a graph, 8 KV
// heads of 4 query heads, d = 128. Arguments, in any order: `single`, rows are chosen by one thread block per KV head,
// as on GPUs without clusters; `d=256` or another head dimension; `kv=4` or another number of KV heads; `g=16` or
// another number of query heads of a KV head; `t=4` or another number of tokens of a step, whose exact rows are N for
// each part of it; `p=2` or another number of tokens of a part, instead of what the device takes; `b=4` or another
// number of bits, instead of 2 and 4; `n=131072` or another number of rows, instead of four; `r=48` or another number
// of exact rows, instead of 64; `resident`, 640 resident tokens are attended, too; `wide` or `few`, the pass is the one
// for many query rows, or that for few, also where the other is taken.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

#include "bench/gpu/step_timing.h"
#include "cpu/half.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/kernel_generation.h"

namespace {

using namespace keyhole;       // NOLINT
using namespace keyhole::gpu;  // NOLINT

template <class T>
T* device(size_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(p);
}

/// Random codes, factors about 0.5; no two rows alike, as equal weights take longer to choose from.
std::vector<std::byte> random_blocks(const CodeShape& shape, size_t blocks) {
  uint64_t state = 88172645463325252ULL;
  const auto draw = [&] {
    state ^= state << 13U;
    state ^= state >> 7U;
    state ^= state << 17U;
    return state;
  };
  std::vector<uint16_t> factors(1000), means(1000);
  for (uint32_t i = 0; i < 1000; ++i) {
    factors[i] = cpu::f32_to_f16(0.45F + 0.0001F * static_cast<float>(i));
    means[i] = cpu::f32_to_f16(0.001F * static_cast<float>(i) - 0.5F);
  }
  std::vector<std::byte> data(blocks * shape.block_bytes());
  for (size_t b = 0; b < blocks; ++b) {
    std::byte* block = data.data() + b * shape.block_bytes();
    for (size_t i = 0; i < shape.factors_at(); i += 8) {
      const uint64_t x = draw();
      std::memcpy(block + i, &x, 8);
    }
    auto* to = reinterpret_cast<uint16_t*>(block + shape.factors_at());
    for (uint32_t i = 0; i < 2 * kCodeBlock; ++i) to[i] = factors[draw() % 1000];
    to = reinterpret_cast<uint16_t*>(block + shape.key_mean_at());
    for (uint32_t i = 0; i < 2 * shape.dim; ++i) to[i] = means[draw() % 1000];
    const float noise = 0.4F;
    std::memcpy(block + shape.noise_at(), &noise, 4);
  }
  return data;
}

double time_graph(cudaStream_t stream, const std::vector<CodesStep>& steps, bool finish) {
  const cudaGraphExec_t graph = captured(stream, [&] {
    for (const CodesStep& s : steps) {
      check(attend_codes(s, stream, false), "attend");
      if (finish) check(finish_codes(s, stream, true), "finish");
    }
  });
  const double us = median_us(stream, graph, 10);
  check(cudaGraphExecDestroy(graph), "destroy");
  return us / static_cast<double>(steps.size());
}

constexpr uint32_t kResident = 640;

/// Resident tokens of zeros, the newest of which are the step's own.
void attend_resident(CodesStep& s, uint32_t heads) {
  const size_t row = s.shape.dim * size_t{2};
  const std::vector<RingState> states(s.kv_heads, RingState{1, 128, 0, kResident - 128});
  auto* const on_device = device<RingState>(states.size());
  check(cudaMemcpy(on_device, states.data(), states.size() * sizeof(RingState),
                   cudaMemcpyHostToDevice),
        "copy");
  const auto zeros = [&](size_t bytes) {
    auto* const p = device<std::byte>(bytes);
    check(cudaMemset(p, 0, bytes), "zeros");
    return p;
  };
  s.has_resident = true;
  StepParams& r = s.resident;
  r.ring = {128, kResident - 128, kResident - 129};
  r.logits = s.logits;
  r.kv_heads = s.kv_heads;
  r.group = heads;
  r.states = on_device;
  r.kv = zeros(s.kv_heads * 2 * kResident * row);
  r.tokens = s.tokens;
  r.q = s.q;
  r.k = r.v = dense_tensor(zeros(s.tokens * s.kv_heads * row), s.tokens, s.kv_heads, s.shape.dim,
                           DType::f16, Memory::device);
  r.drafts = s.tokens > 1 ? s.tokens : 0;
  for (uint32_t i = 0; i < s.tokens; ++i) r.sees[i] = (uint64_t{2} << i) - 1;
  r.counts = false;
}

}  // namespace

static int run(int argc, char** argv) {
  bool cluster = true;
  bool resident = false, wide = false, few = false;
  uint32_t dim = 128, kv_heads = 8, heads = 4, step_tokens = 1, part_tokens = 0, only = 0,
           only_tokens = 0;
  uint32_t most_rows = 64;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "single") == 0) {
      cluster = false;
    } else if (std::strcmp(argv[i], "resident") == 0) {
      resident = true;
    } else if (std::strcmp(argv[i], "wide") == 0) {
      wide = true;
    } else if (std::strcmp(argv[i], "few") == 0) {
      few = true;
    } else if (std::sscanf(argv[i], "d=%u", &dim) != 1 &&
               std::sscanf(argv[i], "kv=%u", &kv_heads) != 1 &&
               std::sscanf(argv[i], "g=%u", &heads) != 1 &&
               std::sscanf(argv[i], "t=%u", &step_tokens) != 1 &&
               std::sscanf(argv[i], "p=%u", &part_tokens) != 1 &&
               std::sscanf(argv[i], "b=%u", &only) != 1 &&
               std::sscanf(argv[i], "n=%u", &only_tokens) != 1 &&
               std::sscanf(argv[i], "r=%u", &most_rows) != 1) {
      std::fprintf(
          stderr,
          "%s: allowed are single, resident, wide, few, d=<components>, kv=<KV heads>, g=<query "
          "heads>, t=<tokens>, p=<tokens of a part>, b=<bits>, n=<rows>, r=<exact rows>\n",
          argv[i]);
      return 1;
    }
  }
  const std::vector<uint32_t> all_bits =
      only != 0 ? std::vector<uint32_t>{only} : std::vector<uint32_t>{2, 4};
  const std::vector<uint32_t> all_tokens =
      only_tokens != 0 ? std::vector<uint32_t>{only_tokens}
                       : std::vector<uint32_t>{32768, 131072, 524288, 1048576};
  const uint32_t group = heads * step_tokens;
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, 0), "device");
  const SharedMemory memory = shared_memory_of(0);
  std::printf("%s, %d multiprocessors, %zu KiB of shared memory a thread block\n", prop.name,
              prop.multiProcessorCount, memory.of_block >> 10U);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::printf("%8s %6s %10s %10s %11s %10s %10s   N=%2u us %8s\n", "tokens", "bits", "MB/layer",
              "copy us", "attend us", "N=0 us", "N=16 us", most_rows, "TB/s");
  const size_t pinned_bytes =
      only_tokens != 0 ? size_t{8} * kv_heads * only_tokens * dim : size_t{9} << 30;
  std::byte* pinned = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&pinned), pinned_bytes, cudaHostAllocDefault),
        "cudaHostAlloc");
  for (const uint32_t bits : all_bits) {
    const CodeShape shape{dim, bits, bits};
    for (const uint32_t tokens : all_tokens) {
      const uint32_t blocks = tokens / kCodeBlock;
      const uint32_t layers = tokens > 131072 ? 4 : tokens > 32768 ? 8 : 32;
      const size_t layer_bytes = kv_heads * blocks * shape.block_bytes();
      auto* data = device<std::byte>(layers * layer_bytes);
      const std::vector<std::byte> sample = random_blocks(shape, size_t{kv_heads} * blocks);
      for (uint32_t l = 0; l < layers; ++l) {
        check(
            cudaMemcpy(data + l * layer_bytes, sample.data(), layer_bytes, cudaMemcpyHostToDevice),
            "copy");
      }
      std::vector<float> ones(kv_heads * dim, 1.0F), q(kv_heads * group * dim);
      std::mt19937 rng(2);
      std::normal_distribution<float> normal;
      for (float& x : q) x = normal(rng);
      CodesStep s;
      s.shape = shape;
      s.kv_heads = kv_heads;
      s.group = group;
      s.tokens = step_tokens;
      s.part_tokens = part_tokens;
      s.wide = wide || (!few && codes_are_wide(shape, group, memory.of_block, step_tokens));
      s.block_capacity = blocks;
      s.splits = code_splits(shape, kv_heads, group, blocks,
                             static_cast<uint32_t>(prop.multiProcessorCount),
                             memory.of_multiprocessor, resident ? kResident : 0, s.wide);
      s.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim));
      s.head_stride = shape.block_bytes();
      s.block_stride = kv_heads * s.head_stride;
      s.cluster = cluster;
      check(prepare_codes(s, 0), "prepare");
      auto* scales = device<float>(kv_heads * dim);
      check(cudaMemcpy(scales, ones.data(), ones.size() * 4, cudaMemcpyHostToDevice), "copy");
      s.key_scale = scales;
      s.value_scale = scales;
      auto* count = device<uint32_t>(1);
      check(cudaMemcpy(count, &blocks, 4, cudaMemcpyHostToDevice), "copy");
      s.block_count = count;
      auto* dq = device<float>(q.size());
      check(cudaMemcpy(dq, q.data(), q.size() * 4, cudaMemcpyHostToDevice), "copy");
      const auto heads_of = [&](float* x) {
        return dense_tensor(reinterpret_cast<std::byte*>(x), step_tokens, kv_heads * heads, dim,
                            DType::f32, Memory::device);
      };
      s.q = heads_of(dq);
      if (resident) attend_resident(s, heads);
      s.work = device<std::byte>(codes_work_bytes(s));
      auto* out = device<float>(q.size());
      s.out = heads_of(out);
      std::vector<CodesStep> steps;
      for (uint32_t l = 0; l < layers; ++l) {
        s.blocks = data + l * layer_bytes;
        steps.push_back(s);
      }
      // The heaviest rows from pinned host memory, each layer's from another part.
      const auto with_rows = [&](uint32_t exact_rows) {
        for (size_t l = 0; l < steps.size(); ++l) {
          CodesStep& e = steps[l];
          e.exact_rows = exact_rows;
          e.row_stride = dim * 2;
          e.kv_head_stride = size_t{tokens} * e.row_stride;
          const size_t all = 2 * kv_heads * e.kv_head_stride;
          e.keys = pinned + l * all % (pinned_bytes - all + 1) / all * all;
          e.values = e.keys + kv_heads * e.kv_head_stride;
        }
        return time_graph(stream, steps, true);
      };
      const double none = with_rows(0), sixteen = with_rows(16), all = with_rows(most_rows);
      const double attend = time_graph(stream, steps, false);
      // A copy moves every byte twice.
      auto* half = device<std::byte>(layer_bytes / 2);
      cudaEvent_t begin, end;
      check(cudaEventCreate(&begin), "event");
      check(cudaEventCreate(&end), "event");
      float best = 1e9F;
      for (int i = 0; i < 5; ++i) {
        check(cudaEventRecord(begin, stream), "record");
        for (uint32_t l = 0; l < layers; ++l) {
          check(cudaMemcpyAsync(half, data + l * layer_bytes, layer_bytes / 2,
                                cudaMemcpyDeviceToDevice, stream),
                "copy");
        }
        check(cudaEventRecord(end, stream), "record");
        check(cudaStreamSynchronize(stream), "synchronize");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
        best = std::min(best, ms);
      }
      std::printf("%8u %6u %10.1f %10.1f %11.1f %10.1f %10.1f %10.1f %8.2f\n", tokens, bits,
                  static_cast<double>(layer_bytes) * 1e-6, 1000.0 * best / layers, attend, none,
                  sixteen, all, static_cast<double>(layer_bytes) / attend * 1e-6);
      std::fflush(stdout);
      for (void* p : {static_cast<void*>(data), static_cast<void*>(scales), static_cast<void*>(dq),
                      static_cast<void*>(count), static_cast<void*>(s.work),
                      static_cast<void*>(out), static_cast<void*>(half)}) {
        check(cudaFree(p), "free");
      }
    }
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
