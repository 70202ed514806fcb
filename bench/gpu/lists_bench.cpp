// Time of a layer's attention over lists of codes on the device, beside that over all codes and the least time that
// each's bytes take: layers in a graph. Arguments, in any order: `d=128`, `g=4` query heads of a KV head, `kv=8` KV
// heads, `b=4` bits, `t=131072` tokens, `new=1` tokens of a step, whose queries have one choice, `rows=64` rows of a
// list on average, `layers=8`, `share=12` percent of the rows that a step reads, `miss=0` percent of a head's output
// that unread lists may hold (ListShare::miss), `middle=0` the mean of values, in percent of what they deviate from it:
// with 0 outputs are short, and heads with `miss` read next to all lists, from some 200 on they read no more, `wide=0`
// KV heads whose values have no mean, `spread=60` percent of a nat by which lists' logits deviate, several with commas,
// `blocks=0` thread blocks of a KV head that choose (CodesLists::blocks), `most=90` percent of the rows from which on a
// KV head reads all blocks (ListShare::most). With `miss` there are three times: of lists however many, of steps that
// choose and read what is faster then, and of those that remember what that was (ListShare::keeps). `memory`: steps
// with lists go as on a device without clusters of thread blocks, whatever the device has: those that choose tell each
// other by memory (CodesLists::by_memory), and one thread block of a KV head chooses the heaviest rows. Those without
// lists go as the device has it. KEYHOLE_CUDA_CAPABILITY=8.6 in the environment runs both as on 8.6, in its 99 KiB of
// shared memory.
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
#include "gpu/code_lists.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/codes/params.h"
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
template <class T>
T* device(const std::vector<T>& from) {
  T* p = device<T>(from.size());
  check(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return p;
}

struct Random {
  uint64_t state = 88172645463325252ULL;
  uint64_t operator()() {
    state ^= state << 13U;
    state ^= state >> 7U;
    state ^= state << 17U;
    return state;
  }
  uint16_t half(float size, float middle) {
    return cpu::f32_to_f16(middle + size * (static_cast<float>((*this)() % 1000) * 0.001F - 0.5F));
  }
};

void fill(Random& draw, std::byte* to, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t x = draw();
    std::memcpy(to + i, &x, 8);
  }
}

/// Reads "spread=A,B,..".
bool read_spreads(const char* text, std::vector<uint32_t>& to) {
  constexpr const char* kName = "spread=";
  if (std::strncmp(text, kName, std::strlen(kName)) != 0) return false;
  to.clear();
  for (const char* at = text + std::strlen(kName) - 1; at != nullptr; at = std::strchr(at, ',')) {
    char* end = nullptr;
    to.push_back(static_cast<uint32_t>(std::strtoul(++at, &end, 10)));
    if (end == at) return false;
  }
  return true;
}

enum class Part { choice, pass, all };

/// Whether the next steps read all blocks.
bool is_kept(const ListMemory* memory) {
  ListMemory now;
  check(cudaMemcpy(&now, memory, sizeof(now), cudaMemcpyDeviceToHost), "copy");
  return now.left != 0;
}

double time_graph(cudaStream_t stream, const std::vector<CodesStep>& steps, Part part) {
  const bool ahead = kernels_have_clusters(0);  // as CudaCodes::launches_ahead()
  const cudaGraphExec_t graph = captured(stream, [&] {
    for (const CodesStep& s : steps) {
      if (part == Part::choice) {
        check(choose_lists(s, stream, ahead), "choose");
        continue;
      }
      check(attend_codes(s, stream, ahead), "attend");
      if (part == Part::all) check(finish_codes(s, stream, ahead), "finish");
    }
  });
  const double us = median_us(stream, graph, 20);
  check(cudaGraphExecDestroy(graph), "destroy");
  return us / static_cast<double>(steps.size());
}

}  // namespace

static int run(int argc, char** argv) {
  uint32_t dim = 128, group = 4, kv_heads = 8, bits = 4, tokens = 131072, rows = 64, layers = 8,
           percent = 12, miss = 0, middle = 0, wide = 0, choosers = 0, most = 90, news = 1;
  bool by_memory = false;
  std::vector<uint32_t> spreads{60};
  for (int i = 1; i < argc; ++i) {
    const bool known =
        std::sscanf(argv[i], "d=%u", &dim) == 1 || std::sscanf(argv[i], "g=%u", &group) == 1 ||
        std::sscanf(argv[i], "kv=%u", &kv_heads) == 1 || std::sscanf(argv[i], "b=%u", &bits) == 1 ||
        std::sscanf(argv[i], "t=%u", &tokens) == 1 || std::sscanf(argv[i], "new=%u", &news) == 1 ||
        std::sscanf(argv[i], "rows=%u", &rows) == 1 ||
        std::sscanf(argv[i], "layers=%u", &layers) == 1 ||
        std::sscanf(argv[i], "share=%u", &percent) == 1 ||
        std::sscanf(argv[i], "miss=%u", &miss) == 1 ||
        std::sscanf(argv[i], "middle=%u", &middle) == 1 || read_spreads(argv[i], spreads) ||
        std::sscanf(argv[i], "blocks=%u", &choosers) == 1 ||
        std::sscanf(argv[i], "wide=%u", &wide) == 1 ||
        std::sscanf(argv[i], "most=%u", &most) == 1 || std::strcmp(argv[i], "memory") == 0;
    by_memory = by_memory || std::strcmp(argv[i], "memory") == 0;
    if (!known) {
      std::fprintf(
          stderr,
          "%s: allowed are d, g, kv, b, t, new, rows, layers, share, miss, middle, wide, spread, "
          "blocks, most, memory\n",
          argv[i]);
      return 1;
    }
  }
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, 0), "device");
  const auto processors = static_cast<uint32_t>(prop.multiProcessorCount);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  const CodeShape shape{dim, bits, bits};
  const uint32_t blocks = tokens / kCodeBlock;
  const ListSizes sizes(blocks, rows);
  Random draw;

  // One layer's blocks and lists; layers have copies of both.
  std::vector<std::byte> block_data(size_t{kv_heads} * blocks * shape.block_bytes());
  for (size_t b = 0; b < size_t{kv_heads} * blocks; ++b) {
    std::byte* block = block_data.data() + b * shape.block_bytes();
    fill(draw, block, shape.factors_at());
    auto* to = reinterpret_cast<uint16_t*>(block + shape.factors_at());
    for (uint32_t i = 0; i < 2 * kCodeBlock; ++i) to[i] = draw.half(0.1F, 0.5F);
    to = reinterpret_cast<uint16_t*>(block + shape.key_mean_at());
    for (uint32_t i = 0; i < 2 * dim; ++i) to[i] = draw.half(1.0F, 0.0F);
    const float noise = 0.02F;
    std::memcpy(block + shape.noise_at(), &noise, 4);
  }
  const size_t pair_bytes = list_pair_bytes(shape);
  std::vector<std::byte> pairs(kv_heads * sizes.pairs * pair_bytes);
  std::vector<uint32_t> ids(size_t{kv_heads} * sizes.pairs * kPairRows);
  std::vector<ListPlace> places(size_t{kv_heads} * sizes.lists);
  std::vector<ListFigures> figures(size_t{kv_heads} * sizes.lists);
  std::vector<uint16_t> key_means(size_t{kv_heads} * sizes.lists * dim),
      value_means(key_means.size());
  std::vector<uint32_t> counts(kv_heads);
  const size_t factors_at = pair_bytes - kPairRows * 4;
  for (uint32_t h = 0; h < kv_heads; ++h) {
    uint32_t pair = 0, row = 0, list = 0;
    for (; row < tokens; ++list) {
      // From a half of the average to one and a half, as clusters differ.
      const uint32_t wanted = std::min(static_cast<uint32_t>(rows / 2 + draw() % (rows + 1)), 256U);
      const uint32_t n = std::min(std::max(wanted, 1U), tokens - row);
      places[size_t{h} * sizes.lists + list] = {pair, n};
      figures[size_t{h} * sizes.lists + list] = {0.05F, 0.2F, 0.02F,
                                                 std::log(static_cast<float>(n))};
      for (uint32_t i = 0; i < n; i += kPairRows, ++pair) {
        if (pair >= sizes.pairs) return std::fprintf(stderr, "too many pairs\n"), 1;
        std::byte* const to = pairs.data() + (size_t{h} * sizes.pairs + pair) * pair_bytes;
        fill(draw, to, factors_at);
        auto* factors = reinterpret_cast<uint16_t*>(to + factors_at);
        for (uint32_t k = 0; k < kPairRows; ++k) {
          factors[2 * k] = draw.half(0.1F, 0.5F);
          factors[2 * k + 1] = draw.half(0.1F, 0.5F);
          ids[(size_t{h} * sizes.pairs + pair) * kPairRows + k] = draw() % tokens;
        }
      }
      row += n;
    }
    counts[h] = list;
  }
  for (uint16_t& x : key_means) x = draw.half(1.0F, 0.0F);
  for (size_t i = 0; i < value_means.size(); ++i) {
    const bool has_middle = i >= size_t{wide} * sizes.lists * dim;
    value_means[i] = draw.half(1.0F, has_middle ? 0.01F * static_cast<float>(middle) : 0.0F);
  }

  const size_t kept_bytes = size_t{4} << 30U;
  std::byte* pinned = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&pinned), kept_bytes, cudaHostAllocDefault),
        "cudaHostAlloc");
  // Products with mean keys, whose components deviate by 0.29, deviate by as much of a query's.
  const auto queries = [&](uint32_t spread) {
    std::vector<float> q(size_t{kv_heads} * group * news * dim);
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    for (float& x : q) x = 0.01F * static_cast<float>(spread) / 0.29F * normal(rng);
    return q;
  };
  CodesStep s;
  s.shape = shape;
  s.kv_heads = kv_heads;
  s.group = group * news;
  s.tokens = news;
  s.block_capacity = blocks;
  const SharedMemory shared = shared_memory_of(0);
  s.wide = codes_are_wide(shape, s.group, shared.of_block, news);
  s.splits = code_splits(shape, kv_heads, s.group, blocks, processors, shared.of_multiprocessor, 0,
                         s.wide);
  s.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  s.head_stride = shape.block_bytes();
  s.block_stride = kv_heads * s.head_stride;
  s.key_scale = device(std::vector<float>(size_t{kv_heads} * dim, 1.0F));
  s.value_scale = s.key_scale;
  s.block_count = device(std::vector<uint32_t>{blocks});
  const auto heads_of = [&](float* x) {
    return dense_tensor(reinterpret_cast<std::byte*>(x), news, kv_heads * group, dim, DType::f32,
                        Memory::device);
  };
  float* const q = device(queries(spreads[0]));
  s.q = heads_of(q);
  s.out = heads_of(device<float>(size_t{kv_heads} * s.group * dim));
  s.row_stride = dim * 2;
  s.kv_head_stride = size_t{tokens} * s.row_stride;
  CodesStep with = s;
  with.wide = false;
  with.narrow = codes_are_narrow(shape, s.group, shared.of_block);
  with.splits = code_splits(shape, kv_heads, s.group, blocks, processors, shared.of_multiprocessor,
                            0, false, with.narrow);
  with.cluster = !by_memory;
  with.lists.by_memory = by_memory;
  with.lists.list_capacity = sizes.lists;
  with.lists.pair_capacity = sizes.pairs;
  with.lists.share.share = 0.01F * static_cast<float>(percent);
  with.lists.share.miss = 0.01F * static_cast<float>(miss);  // and without it below
  with.lists.blocks = choosers;
  check(prepare_codes(s, 0), "prepare");
  check(prepare_codes(with, 0), "prepare");
  if (with.lists.blocks == 0) {
    return std::fprintf(stderr, "the device does not choose among lists of this shape\n"), 1;
  }
  s.work = with.work = device<std::byte>(std::max(codes_work_bytes(s), codes_work_bytes(with)));
  with.lists.listed = device(std::vector<uint32_t>{blocks});
  with.lists.counts = device(counts);
  std::vector<CodesStep> all, chosen;
  for (uint32_t l = 0; l < layers; ++l) {
    s.blocks = device(block_data);
    with.blocks = s.blocks;
    with.lists.pairs = device(pairs);
    with.lists.ids = device(ids);
    with.lists.places = device(places);
    with.lists.figures = device(figures);
    with.lists.key_means = device(key_means);
    with.lists.value_means = device(value_means);
    auto* tiles = device<uint32_t>(value_means.size() / 2);
    for (uint32_t h = 0; h < kv_heads; ++h) {
      const size_t at = size_t{h} * sizes.lists * dim;
      check(lay_out_means({dim, bits, with.lists.value_means + at, 0, counts[h], tiles + at / 2},
                          stream),
            "means");
    }
    with.lists.mean_tiles = tiles;
    with.lists.memory = device(std::vector<ListMemory>(1));
    with.lists.arrivals = device(std::vector<uint32_t>(kv_heads));
    const size_t layer_rows = kv_heads * s.kv_head_stride;
    const size_t at =
        layer_rows >= kept_bytes / 2 ? 0 : l * 2 * layer_rows % (kept_bytes - 2 * layer_rows);
    s.keys = with.keys = pinned + at;
    s.values = with.values = pinned + (layer_rows >= kept_bytes / 2 ? 0 : at + layer_rows);
    if (layer_rows >= kept_bytes)
      s.kv_head_stride = with.kv_head_stride = kept_bytes / kv_heads / 2;
    all.push_back(s);
    chosen.push_back(with);
  }
  const auto time = [&](std::vector<CodesStep> steps, uint32_t exact, Part part) {
    for (CodesStep& step : steps) {
      // As sessions have them: so many for each token that is chosen for together.
      const uint32_t together = step.wide ? step.part_tokens : step.tokens;
      step.exact_rows = std::min(exact * together, kMostDeviceRows);
      // What is remembered is for whole steps.
      if (part == Part::choice) step.lists.memory = nullptr;
    }
    return time_graph(stream, steps, part);
  };
  // Copies move every byte twice.
  const size_t block_bytes = block_data.size();
  auto* half = device<std::byte>(block_bytes / 2);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  float best = 1e9F;
  for (int i = 0; i < 5; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    for (const CodesStep& step : all) {
      check(cudaMemcpyAsync(half, step.blocks, block_bytes / 2, cudaMemcpyDeviceToDevice, stream),
            "copy");
    }
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "synchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    best = std::min(best, ms / static_cast<float>(layers));
  }
  const double rate = static_cast<double>(block_bytes) / (1000.0 * best);  // bytes a us
  // What lists read at least: all means, the codes of their share of the rows without padding, figures and places.
  const double read_rows =
      std::min<double>(tokens, std::max<double>(0.01 * percent * tokens, ListShare{}.least));
  double lists = 0.0;
  for (const uint32_t n : counts) lists += n;
  const double list_bytes = lists * (4.0 * dim + sizeof(ListFigures) + sizeof(ListPlace)) +
                            kv_heads * read_rows * static_cast<double>(pair_bytes) / kPairRows;
  const double list_floor = list_bytes / rate, all_floor = static_cast<double>(block_bytes) / rate;
  const double all16 = time(all, 16, Part::all), all64 = time(all, 64, Part::all);
  const double all_pass = time(all, 16, Part::pass);
  std::vector<CodesStep> more = chosen;
  for (CodesStep& step : chosen) step.lists.share.miss = 0.0F;
  const double choice = time(chosen, 16, Part::choice), pass = time(chosen, 16, Part::pass);
  const double lists0 = time(chosen, 0, Part::all), lists16 = time(chosen, 16, Part::all),
               lists64 = time(chosen, 64, Part::all);
  std::printf(
      "%s | %u/%u of %u, %u bits, %u tokens behind %u, %.2f TB/s | all: floor %.1f pass %.1f N=16 "
      "%.1f (%.0f "
      "%%) N=64 %.1f "
      "| lists by %u blocks %s, rows by %s%s: floor %.1f choice %.1f pass %.1f N=0 %.1f N=16 %.1f "
      "(%.0f %%) N=64 %.1f\n",
      prop.name, kv_heads * group, kv_heads, dim, bits, news, tokens, rate * 1e-6, all_floor,
      all_pass, all16, 100.0 * all_floor / all16, all64, with.lists.blocks,
      with.lists.by_memory ? "by memory" : "in clusters", with.cluster ? "clusters" : "one block",
      with.narrow ? ", some heads at a time" : "", list_floor, choice, pass, lists0, lists16,
      100.0 * list_floor / lists16, lists64);
  if (miss == 0) return 0;
  // What the rule by a head's output takes, and how many of the pairs of tiles it reads.
  codes::CodesParams params;
  (void)codes::lay_out(more[0], codes::kernels_of(more[0]), params);
  std::vector<codes::ChosenLists> ends(kv_heads);
  const auto ways = [&](float most_rows, bool remembers) {
    for (CodesStep& step : more) {
      step.lists.share.most = most_rows;
      step.lists.share.keeps = remembers ? UINT32_MAX : 0;
      check(cudaMemset(step.lists.memory, 0, sizeof(ListMemory)), "memory");
    }
  };
  for (const uint32_t spread : spreads) {
    const std::vector<float> x = queries(spread);
    check(cudaMemcpy(q, x.data(), x.size() * sizeof(x[0]), cudaMemcpyHostToDevice), "copy");
    ways(1e9F, false);
    std::printf(
        "  by %u blocks: miss=%u, middle=%u, wide=%u, spread=%u: choice %.1f pass %.1f N=16 %.1f |",
        with.lists.blocks, miss, middle, wide, spread, time(more, 16, Part::choice),
        time(more, 16, Part::pass), time(more, 16, Part::all));
    (void)time(more, 16, Part::choice);
    check(cudaMemcpy(ends.data(), params.list_ends, ends.size() * sizeof(ends[0]),
                     cudaMemcpyDeviceToHost),
          "copy");
    double largest = 0.0, sum = 0.0;
    for (const auto& e : ends) sum += e.pairs, largest = std::max<double>(largest, e.pairs);
    std::printf(" %.1f %% of the pairs, of one KV head %.1f |",
                100.0 * sum / kv_heads * kPairRows / tokens, 100.0 * largest * kPairRows / tokens);
    ways(0.01F * static_cast<float>(most), false);
    std::printf(" most=%u: pass %.1f N=16 %.1f |", most, time(more, 16, Part::pass),
                time(more, 16, Part::all));
    ways(0.01F * static_cast<float>(most), true);
    std::printf(" remembered: pass %.1f N=16 %.1f N=64 %.1f, %s\n", time(more, 16, Part::pass),
                time(more, 16, Part::all), time(more, 64, Part::all),
                is_kept(more[0].lists.memory) ? "blocks" : "lists");
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
