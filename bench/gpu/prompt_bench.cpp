// What codes on the device add to handing over a prompt with K and V in device memory, in chunks, shape of Llama-3-8B
// (32 layers, 8 KV heads with 4 query heads each, 128 components, f16): a session with codes beside one without, whose
// offloaded tokens the host attends. First the time of the calls, then that of waiting until all is encoded.
//
//   gpu_prompt_bench [tokens] [layers] [kv_heads]
#include <cuda_runtime_api.h>
#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/session_rows.h"

namespace {

using namespace keyhole::bench;  // NOLINT

using Clock = std::chrono::steady_clock;

constexpr uint32_t kGroup = 4;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void prompt(keyhole_engine* engine, const keyhole_engine_config& model, uint32_t tokens,
            uint32_t chunk, bool layer_by_layer, keyhole_placement placement) {
  const uint32_t layers = model.layers;
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = tokens + 1024;
  c.index = "codes:k=2,v=2";
  c.offload_placement = placement;
  keyhole_session* session = nullptr;
  must(keyhole_session_create(engine, &c, &session) == KEYHOLE_OK, "session");
  const Rows k(chunk, model.kv_heads), v(chunk, model.kv_heads), q(chunk, model.q_heads);
  const keyhole_tensor tk = k.tensor(), tv = v.tensor(), tq = q.tensor();
  const auto begin = Clock::now();
  double longest = 0;
  const auto hand_over = [&](uint32_t layer, uint32_t first) {
    const auto at = Clock::now();
    must(keyhole_session_append(session, layer, &tk, &tv, first == 0 ? &tq : nullptr) == KEYHOLE_OK,
         "prefill");
    longest = std::max(longest, seconds_since(at));
  };
  if (layer_by_layer) {
    for (uint32_t l = 0; l < layers; ++l) {
      for (uint32_t t = 0; t < tokens; t += chunk) hand_over(l, t);
    }
  } else {
    for (uint32_t t = 0; t < tokens; t += chunk) {
      for (uint32_t l = 0; l < layers; ++l) hand_over(l, t);
    }
  }
  const double calls = seconds_since(begin);
  const auto rest = Clock::now();
  must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
  must(cudaDeviceSynchronize() == cudaSuccess, "wait");
  const double after = seconds_since(rest);
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  must(keyhole_session_get_statistics(session, &s) == KEYHOLE_OK, "statistics");
  std::printf(
      "  chunks of %6u, %s, %s: calls %6.3f s (longest %6.1f ms), then %6.3f s; %2u layers, "
      "pinned %5.2f GiB\n",
      chunk, layer_by_layer ? "layer by layer" : "all layers    ",
      placement == KEYHOLE_PLACE_HOST ? "no codes" : "codes   ", calls, longest * 1e3, after,
      s.code_layers, static_cast<double>(s.pinned_bytes) / (1U << 30U));
  std::fflush(stdout);
  const auto end = Clock::now();
  keyhole_session_destroy(session);
  std::printf("      ended in %.3f s\n", seconds_since(end));
}

}  // namespace

int main(int argc, char** argv) {
  const auto tokens = static_cast<uint32_t>(argc > 1 ? std::atoi(argv[1]) : 131072);
  keyhole_engine_config c;
  keyhole_engine_config_init(&c);
  c.layers = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 32);
  c.kv_heads = static_cast<uint32_t>(argc > 3 ? std::atoi(argv[3]) : 8);
  c.q_heads = c.kv_heads * kGroup;
  c.head_dim = kDim;
  c.device = KEYHOLE_DEVICE_CUDA;
  keyhole_engine* engine = nullptr;
  must(keyhole_engine_create(&c, &engine) == KEYHOLE_OK, "engine");
  std::printf("%u tokens, %u layers, %u KV heads\n", tokens, c.layers, c.kv_heads);
  for (const uint32_t chunk : {2048U, 16384U}) {
    for (const bool layer_by_layer : {false, true}) {
      for (const keyhole_placement placement : {KEYHOLE_PLACE_HOST, KEYHOLE_PLACE_DEVICE}) {
        prompt(engine, c, tokens, chunk, layer_by_layer, placement);
      }
    }
  }
  keyhole_engine_destroy(engine);
  return 0;
}
