// Errors of a device's steps on recorded heads of a real model: codes of blocks beside codes in lists, whose means are
// centres of near rows. A trace as tests/runtime/session/golden/cut_heads.py writes it: heads of 64 components, one KV
// head a layer; here all are KV heads of one layer. The steps are those of the recorded queries, beside attention to all
// tokens in double precision.
//
//   gpu_real_heads_bench FILE [sink]    sink: first tokens that are attended exactly (4)
//
//   error   |o - o*| / |o*| over all (step, query head): median, p95, p99, the largest; sharp: the same of heads whose 16
//           heaviest tokens have 0.9 of the weight, flat: of the others
//   coded   tokens in codes; of lists all are read, as they are fewer than 8,192: what differs is the centres
#include <cuda_runtime_api.h>
#include <keyhole/keyhole.h>
#include <keyhole/stream.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "bench/gpu/session_rows.h"
#include "runtime/files/safetensors.h"

namespace {

using keyhole::SafetensorsFile;
using keyhole::StoredTensor;
using keyhole::bench::must;

constexpr uint32_t kWindow = 64, kBlock = 256, kWarmUps = 200;

struct Trace {
  explicit Trace(const char* path) {
    const SafetensorsFile file(path);
    dim = static_cast<uint32_t>(std::stoul(file.metadata().at("head_dim")));
    group = static_cast<uint32_t>(std::stoul(file.metadata().at("q_heads")));
    for (const auto& [name, tensor] : file.tensors()) {
      if (!name.ends_with(".keys")) continue;
      const std::string head = name.substr(0, name.size() - 4);
      keys.push_back(tensor.to_f32());
      values.push_back(file.tensor(head + "values").to_f32());
      queries.push_back(file.tensor(head + "queries").to_f32());
      training.push_back(file.tensor(head + "training_queries").to_f32());
    }
    query_at = positions(file.tensor("query_positions"));
    training_at = positions(file.tensor("training_positions"));
  }
  [[nodiscard]] uint32_t heads() const { return static_cast<uint32_t>(keys.size()); }
  /// Rows [first, first + count) of all heads side by side, `[count, heads, width]`.
  [[nodiscard]] static std::vector<float> rows(const std::vector<std::vector<float>>& heads,
                                               uint32_t first, uint32_t count, uint32_t width) {
    std::vector<float> out;
    for (uint32_t i = first; i < first + count; ++i) {
      for (const std::vector<float>& head : heads) {
        const auto from = head.begin() + static_cast<std::ptrdiff_t>(size_t{i} * width);
        out.insert(out.end(), from, from + width);
      }
    }
    return out;
  }

  uint32_t dim = 0, group = 0;
  std::vector<std::vector<float>> keys, values, queries, training;  // of each head
  std::vector<uint32_t> query_at, training_at;

 private:
  static std::vector<uint32_t> positions(const StoredTensor& tensor) {
    std::vector<uint32_t> out(tensor.elements());
    std::copy_n(tensor.bytes.data(), tensor.bytes.size(), reinterpret_cast<std::byte*>(out.data()));
    return out;
  }
};

/// Exact attention of one query head to the first `tokens` tokens.
struct Truth {
  Truth(const Trace& t, uint32_t head, const float* q, uint32_t tokens) : o(t.dim, 0.0) {
    std::vector<double> weights(tokens);
    const double scale = 1.0 / std::sqrt(static_cast<double>(t.dim));
    for (uint32_t i = 0; i < tokens; ++i) {
      const float* const key = &t.keys[head][size_t{i} * t.dim];
      for (uint32_t j = 0; j < t.dim; ++j) weights[i] += scale * q[j] * key[j];
    }
    const double top = *std::max_element(weights.begin(), weights.end());
    double sum = 0.0;
    for (double& w : weights) sum += w = std::exp(w - top);
    for (uint32_t i = 0; i < tokens; ++i) {
      weights[i] /= sum;
      const float* const value = &t.values[head][size_t{i} * t.dim];
      for (uint32_t j = 0; j < t.dim; ++j) o[j] += weights[i] * value[j];
    }
    const auto heaviest = weights.begin() + std::min<std::ptrdiff_t>(16, tokens);
    std::partial_sort(weights.begin(), heaviest, weights.end(), std::greater<>());
    is_sharp = std::accumulate(weights.begin(), heaviest, 0.0) >= 0.9;
  }
  std::vector<double> o;
  bool is_sharp = false;
};

struct DeviceRows {
  explicit DeviceRows(const std::vector<float>& from) : bytes(from.size() * sizeof(float)) {
    must(cudaMalloc(&data, bytes) == cudaSuccess, "memory");
    must(cudaMemcpy(data, from.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  }
  ~DeviceRows() { (void)cudaFree(data); }
  DeviceRows(const DeviceRows&) = delete;
  DeviceRows& operator=(const DeviceRows&) = delete;
  [[nodiscard]] keyhole_tensor tensor(int64_t heads, int64_t dim) const {
    const int64_t shape[] = {heads, dim};
    keyhole_tensor t = keyhole_tensor_host(data, KEYHOLE_F32, 2, shape);
    t.memory = KEYHOLE_DEVICE;
    return t;
  }
  void* data = nullptr;
  size_t bytes;
};

/// The outputs of all steps, `[step][query head, dim]`.
std::vector<std::vector<float>> decode(const Trace& t, const std::string& index, uint32_t sink) {
  const uint32_t hkv = t.heads(), hq = hkv * t.group;
  keyhole_engine_config ec;
  keyhole_engine_config_init(&ec);
  ec.layers = 1;
  ec.kv_heads = hkv;
  ec.q_heads = hq;
  ec.head_dim = t.dim;
  ec.kv_dtype = KEYHOLE_F16;
  ec.device = KEYHOLE_DEVICE_CUDA;
  keyhole_engine* engine = nullptr;
  must(keyhole_engine_create(&ec, &engine) == KEYHOLE_OK, "engine");
  keyhole_session_config sc;
  keyhole_session_config_init(&sc);
  sc.max_tokens = 4096;
  sc.sink = sink;
  sc.window = kWindow;
  sc.flush_block = 8;
  sc.append_block = kBlock;
  sc.index = index.c_str();
  sc.budget.top_k = 16;
  sc.budget.tail = KEYHOLE_TAIL_CODES;
  sc.offload_placement = KEYHOLE_PLACE_DEVICE;
  keyhole_session* session = nullptr;
  must(keyhole_session_create(engine, &sc, &session) == KEYHOLE_OK, "session");
  const auto append = [&](uint32_t first, uint32_t count, std::vector<float> q) {
    std::vector<float> k = Trace::rows(t.keys, first, count, t.dim),
                       v = Trace::rows(t.values, first, count, t.dim);
    const int64_t kv[] = {count, hkv, t.dim}, queries[] = {count, hq, t.dim};
    const keyhole_tensor tk = keyhole_tensor_host(k.data(), KEYHOLE_F32, 3, kv),
                         tv = keyhole_tensor_host(v.data(), KEYHOLE_F32, 3, kv),
                         tq = keyhole_tensor_host(q.data(), KEYHOLE_F32, 3, queries);
    must(keyhole_session_append(session, 0, &tk, &tv, q.empty() ? nullptr : &tq) == KEYHOLE_OK,
         "append");
  };
  uint32_t done = 0;
  for (uint32_t i = 0; i < t.training_at.size(); ++i) {
    if (t.training_at[i] > done) append(done, t.training_at[i] - done, {});
    append(t.training_at[i], 1, Trace::rows(t.training, i, 1, t.group * t.dim));
    done = t.training_at[i] + 1;
  }
  if (t.query_at.front() > done) append(done, t.query_at.front() - done, {});
  must(keyhole_session_build(session, nullptr, nullptr) == KEYHOLE_OK, "build");
  std::vector<std::vector<float>> out;
  const auto step = [&](uint32_t i, bool is_new) {
    const DeviceRows q(Trace::rows(t.queries, i, 1, t.group * t.dim)),
        k(Trace::rows(t.keys, t.query_at[i], 1, t.dim)),
        v(Trace::rows(t.values, t.query_at[i], 1, t.dim)),
        o(std::vector<float>(size_t{hq} * t.dim, NAN));
    const keyhole_tensor tq = q.tensor(hq, t.dim), tk = k.tensor(hkv, t.dim),
                         tv = v.tensor(hkv, t.dim), to = o.tensor(hq, t.dim);
    must(keyhole_session_attend(session, 0, &tq, is_new ? &tk : nullptr, is_new ? &tv : nullptr,
                                &to, nullptr) == KEYHOLE_OK,
         "attend");
    must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
    std::vector<float> seen(size_t{hq} * t.dim);
    must(cudaMemcpy(seen.data(), o.data, o.bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
    return seen;
  };
  // Lists are made beside steps, and found by one of the next.
  for (uint32_t i = 0; i < kWarmUps; ++i) (void)step(0, false);
  for (uint32_t i = 0; i < t.query_at.size(); ++i) out.push_back(step(i, true));
  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  return out;
}

void print(const char* what, std::vector<double> errors) {
  if (errors.empty()) return;
  std::sort(errors.begin(), errors.end());
  const auto at = [&](double share) {
    return errors[static_cast<size_t>(share * static_cast<double>(errors.size() - 1))];
  };
  std::printf("  %s %.2g %.2g %.2g %.2g", what, at(0.5), at(0.95), at(0.99), errors.back());
}

void run(const char* path, uint32_t sink) {
  const Trace t(path);
  const uint32_t coded = (t.query_at.front() - sink - kWindow) / kBlock * kBlock;
  std::vector<Truth> truths;
  for (uint32_t i = 0; i < t.query_at.size(); ++i) {
    for (uint32_t h = 0; h < t.heads() * t.group; ++h) {
      const float* const q = &t.queries[h / t.group][(size_t{i} * t.group + h % t.group) * t.dim];
      truths.emplace_back(t, h / t.group, q, t.query_at[i] + 1);
    }
  }
  std::printf("%zu steps of %u heads behind %u tokens, sink %u, coded %u; p50 p95 p99 largest\n",
              t.query_at.size(), t.heads() * t.group, t.query_at.front(), sink, coded);
  for (const uint32_t bits : {2U, 4U}) {
    for (const uint32_t lists : {0U, 64U, 32U, 16U}) {
      std::string index = "codes:k=" + std::to_string(bits) + ",v=" + std::to_string(bits);
      if (lists != 0) {
        index += ",lists=" + std::to_string(lists) + ",from=" + std::to_string(coded);
      }
      const auto seen = decode(t, index, sink);
      std::vector<double> all, sharp, flat;
      for (size_t n = 0; n < truths.size(); ++n) {
        const size_t heads = size_t{t.heads()} * t.group;
        const float* const o = &seen[n / heads][n % heads * t.dim];
        double difference = 0.0, norm = 1e-30;
        for (uint32_t j = 0; j < t.dim; ++j) {
          difference += (o[j] - truths[n].o[j]) * (o[j] - truths[n].o[j]);
          norm += truths[n].o[j] * truths[n].o[j];
        }
        all.push_back(std::sqrt(difference / norm));
        (truths[n].is_sharp ? sharp : flat).push_back(all.back());
      }
      std::printf("%-32s", index.c_str());
      print("all", all), print("sharp", sharp), print("flat", flat);
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "gpu_real_heads_bench FILE [sink]\n");
    return 1;
  }
  try {
    run(argv[1], argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 4);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
