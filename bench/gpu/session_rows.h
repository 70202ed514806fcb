// What benchmarks of sessions on a device share: rows in its memory, and ending a program whose calls fail.
#pragma once

#include <cuda_runtime_api.h>
#include <keyhole/keyhole.h>
#include <keyhole/stream.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace keyhole::bench {

inline constexpr uint32_t kHeads = 32, kKvHeads = 8, kDim = 128;  // Llama-3-8B

/// Heads of a layer's attention.
struct Heads {
  uint32_t heads = kHeads, kv_heads = kKvHeads, dim = kDim;
};
inline constexpr uint32_t kChunk = 8192;  // tokens of a prompt at once

inline void must(bool is_well, const char* what) {
  if (is_well) return;
  std::printf("failed: %s: %s, %s\n", what, keyhole_last_error(),
              cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}

/// Rows `[tokens, heads, dim]` f16 in device memory, between -2 and 2.
class Rows {
 public:
  /// Number of tensors of the same numbers that begin elsewhere, so that no row of one is a row of another.
  static constexpr uint32_t kShifts = 256;

  Rows(uint32_t tokens, uint32_t heads, uint32_t dim = kDim)
      : tokens_(tokens), heads_(heads), dim_(dim) {
    std::vector<uint16_t> numbers(size_t{tokens} * heads * dim + kShifts * kShift);
    std::mt19937 rng(1);
    for (uint16_t& x : numbers) x = static_cast<uint16_t>((rng() & 0x83ffU) | 0x3800U);
    must(cudaMalloc(&data_, numbers.size() * 2) == cudaSuccess, "memory");
    must(cudaMemcpy(data_, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice) ==
             cudaSuccess,
         "copy");
  }
  ~Rows() { (void)cudaFree(data_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  /// A tensor of the first `tokens` tokens.
  [[nodiscard]] keyhole_tensor tensor(uint32_t tokens, uint32_t shift = 0) const {
    const int64_t shape[] = {tokens, heads_, dim_};
    auto* const first = static_cast<uint16_t*>(data_) + size_t{shift % kShifts} * kShift;
    keyhole_tensor t = keyhole_tensor_host(first, KEYHOLE_F16, 3, shape);
    t.memory = KEYHOLE_DEVICE;
    return t;
  }
  [[nodiscard]] keyhole_tensor tensor() const { return tensor(tokens_); }

 private:
  static constexpr uint32_t kShift = 8;  // numbers: rows stay aligned to 16 bytes

  uint32_t tokens_, heads_, dim_;
  void* data_ = nullptr;
};

/// Makes an engine of this many layers on the device.
inline keyhole_engine* make_engine(uint32_t layers, const Heads& heads = {}) {
  keyhole_engine_config e;
  keyhole_engine_config_init(&e);
  e.layers = layers;
  e.q_heads = heads.heads;
  e.kv_heads = heads.kv_heads;
  e.head_dim = heads.dim;
  e.device = KEYHOLE_DEVICE_CUDA;
  keyhole_engine* engine = nullptr;
  must(keyhole_engine_create(&e, &engine) == KEYHOLE_OK, "engine");
  return engine;
}

/// Makes a session for up to most_tokens tokens whose index lies on the device.
inline keyhole_session* make_session(keyhole_engine* engine, uint32_t most_tokens,
                                     const std::string& spec) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = most_tokens;
  c.index = spec.c_str();
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  keyhole_session* session = nullptr;
  must(keyhole_session_create(engine, &c, &session) == KEYHOLE_OK, "session");
  return session;
}
/// The spec for "2": codes of 2 bits of keys and of values.
inline std::string codes_spec(const std::string& bits) { return "codes:k=" + bits + ",v=" + bits; }

/// Hands the session `tokens` tokens in every layer, and builds. k and v are those of kChunk tokens, shifted in each
/// chunk, because the heaviest of many equal rows take longer to choose; q goes with them.
inline void fill(keyhole_session* session, uint32_t layers, uint32_t tokens, const Rows& q,
                 const Rows& k, const Rows& v) {
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t at = 0; at < tokens; at += kChunk) {
      const uint32_t n = std::min(kChunk, tokens - at);
      const uint32_t shift = at / kChunk;
      const keyhole_tensor tk = k.tensor(n, shift), tv = v.tensor(n, shift), tq = q.tensor(n);
      must(keyhole_session_append(session, l, &tk, &tv, &tq) == KEYHOLE_OK, "prefill");
    }
  }
  must(keyhole_session_build(session, nullptr, nullptr) == KEYHOLE_OK, "build");
  must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
}

}  // namespace keyhole::bench
