// One token of several sequences at once (keyhole_session_extend_batch) with codes on the device, shape of Llama-3-8B
// (8 KV heads with 4 query heads each, 128 components, f16), captured in one graph: all sessions on one stream, whose
// steps go by one launch of each kernel; one after the other on that stream (keyhole_session_extend); or each on a
// stream of its own; beside the time of reading all K and V at the rate at which the card copies, the floor of full
// attention. Sequences are built one by one, or are forks of one. Microseconds a layer for all sequences together;
// tokens reach a session from one buffer of 8192.
//
//   gpu_batch_bench [layers] [bits] [weights] [SEQUENCESxTOKENS | SEQUENCESfTOKENS ...]    f: forks
//   e.g. 16x32768 16f131072
//
// weights: the products of a layer are in the graph, too; in the place of the other ways stand tokens a second of 32
// layers with the logits, and those with full attention at its floor.
#include <cuda_runtime_api.h>
#include <keyhole/batch.h>
#include <keyhole/inspect.h>
#include <keyhole/keyhole.h>
#include <keyhole/save.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/layer_products.h"
#include "bench/gpu/session_rows.h"

namespace {

using namespace keyhole::bench;  // NOLINT

using Clock = std::chrono::steady_clock;
constexpr uint32_t kReserve = 512;
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// The bytes that a copy within the card moves: it reads and writes as many.
double copied_bytes_per_us() {
  constexpr size_t kBytes = size_t{256} << 20;
  void *from = nullptr, *to = nullptr;
  must(cudaMalloc(&from, kBytes) == cudaSuccess && cudaMalloc(&to, kBytes) == cudaSuccess,
       "memory");
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "event");
  float best = 1e12F;
  for (int i = 0; i < 5; ++i) {
    (void)cudaEventRecord(begin);
    (void)cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice);
    (void)cudaEventRecord(end);
    must(cudaEventSynchronize(end) == cudaSuccess, "copy");
    float ms = 0;
    (void)cudaEventElapsedTime(&ms, begin, end);
    best = std::min(best, ms);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  (void)cudaFree(from);
  (void)cudaFree(to);
  return 2.0 * kBytes / (1000.0 * static_cast<double>(best));  // read and written
}

enum class Way {
  together,    ///< one call, one stream
  one_by_one,  ///< a call for each on that stream
  own_streams  ///< one call, a stream of each
};

struct Shape {
  uint32_t layers;
  std::string bits;
};

/// Sequences of one length, and the tensors of a step.
class Sequences {
 public:
  Sequences(keyhole_engine* engine, const Shape& shape, uint32_t count, uint32_t tokens,
            bool are_forks)
      : layers_(shape.layers),
        q_(std::max(count, kChunk), kHeads),
        k_(std::max(count, kChunk), kKvHeads),
        v_(std::max(count, kChunk), kKvHeads),
        out_(count, kHeads) {
    for (uint32_t i = 0; i <= count; ++i) starts_.push_back(i);
    streams_.resize(count);
    for (cudaStream_t& s : streams_) must(cudaStreamCreate(&s) == cudaSuccess, "stream");
    for (uint32_t i = 0; i < count; ++i) {
      keyhole_session* session = nullptr;
      const auto begin = Clock::now();
      if (are_forks && i > 0) {
        must(keyhole_session_fork(sessions_[0], &session) == KEYHOLE_OK, "fork");
        must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
        fork_us_ += us_since(begin) / (count - 1);
      } else {
        session = make_session(engine, tokens + kReserve, codes_spec(shape.bits));
      }
      sessions_.push_back(session);
      must(keyhole_session_set_stream(session, streams_[i]) == KEYHOLE_OK, "stream");
      if (!are_forks || i == 0) fill(session, layers_, tokens, q_, k_, v_);
    }
  }
  ~Sequences() {
    for (size_t i = sessions_.size(); i-- > 0;) keyhole_session_destroy(sessions_[i]);
    for (cudaStream_t s : streams_) (void)cudaStreamDestroy(s);
  }
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  [[nodiscard]] cudaStream_t stream() const { return streams_[0]; }
  [[nodiscard]] double fork_us() const { return fork_us_; }

  /// Device and host memory of all sessions; what they share counts once.
  [[nodiscard]] std::pair<double, double> gib() const {
    double device = 0, host = 0;
    for (keyhole_session* session : sessions_) {
      keyhole_statistics stats;
      keyhole_statistics_init(&stats);
      must(keyhole_session_get_statistics(session, &stats) == KEYHOLE_OK, "statistics");
      device += static_cast<double>(stats.device_bytes) / kGiB;
      host += static_cast<double>(stats.host_bytes - stats.shared_bytes) / kGiB;
    }
    return {device, host};
  }

  /// The median time of a layer in a graph; `host_us`, of the calls that enqueue it.
  double us(Way way, double& host_us, LayerProducts* products = nullptr) {
    const bool on_own_streams = way == Way::own_streams;
    for (size_t i = 0; i < sessions_.size(); ++i) {
      must(keyhole_session_set_stream(sessions_[i], streams_[on_own_streams ? i : 0]) == KEYHOLE_OK,
           "stream");
    }
    cudaStream_t first = streams_[0];
    cudaEvent_t begin, end, fork, join;
    for (cudaEvent_t* e : {&begin, &end, &fork, &join}) {
      must(cudaEventCreate(e) == cudaSuccess, "event");
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "capture");
    host_us = 1e12;
    const auto at = Clock::now();
    for (uint32_t l = 0; l < layers_; ++l) {
      // As in a model, all sequences' rows of a layer are there at once, and its product waits for all outputs.
      (void)cudaEventRecord(fork, first);
      for (size_t i = 1; i < sessions_.size() && on_own_streams; ++i) {
        (void)cudaStreamWaitEvent(streams_[i], fork, 0);
      }
      const auto n = static_cast<uint32_t>(sessions_.size());
      if (products != nullptr) products->before(n, first);
      extend(l, way);
      if (products != nullptr) products->after(n, first);
      for (size_t i = 1; i < sessions_.size() && on_own_streams; ++i) {
        (void)cudaEventRecord(join, streams_[i]);
        (void)cudaStreamWaitEvent(first, join, 0);
      }
    }
    host_us = us_since(at) / layers_;
    must(cudaStreamEndCapture(first, &graph) == cudaSuccess, "capture");
    must(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess, "graph");
    std::vector<float> times;
    for (int i = 0; i < 25; ++i) {
      for (keyhole_session* s : sessions_) {
        must(keyhole_session_announce(s) == KEYHOLE_OK, "announce");
      }
      (void)cudaEventRecord(begin, first);
      must(cudaGraphLaunch(exec, first) == cudaSuccess, "launch");
      (void)cudaEventRecord(end, first);
      for (keyhole_session* s : sessions_) {
        must(keyhole_session_synchronize(s) == KEYHOLE_OK, "synchronize");
      }
      must(cudaStreamSynchronize(first) == cudaSuccess, "synchronize");
      float ms = 0;
      (void)cudaEventElapsedTime(&ms, begin, end);
      if (i >= 5) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    for (cudaEvent_t e : {begin, end, fork, join}) (void)cudaEventDestroy(e);
    return 1000.0 * static_cast<double>(times[times.size() / 2]) / layers_;
  }

 private:
  void extend(uint32_t layer, Way way) {
    const auto n = static_cast<uint32_t>(sessions_.size());
    const keyhole_tensor q = q_.tensor(n), k = k_.tensor(n), v = v_.tensor(n), o = out_.tensor();
    if (way != Way::one_by_one) {
      must(keyhole_session_extend_batch(sessions_.data(), n, layer, &q, &k, &v, starts_.data(), &o,
                                        nullptr, nullptr) == KEYHOLE_OK,
           "extend_batch");
      return;
    }
    for (uint32_t i = 0; i < n; ++i) {
      const auto row = [&](keyhole_tensor t) {
        t.data = static_cast<char*>(t.data) + size_t{i} * t.shape[1] * t.shape[2] * 2;
        t.shape[0] = 1;
        return t;
      };
      const keyhole_tensor rq = row(q), rk = row(k), rv = row(v), ro = row(o);
      must(keyhole_session_extend(sessions_[i], layer, &rq, &rk, &rv, nullptr, &ro, nullptr) ==
               KEYHOLE_OK,
           "extend");
    }
  }

  uint32_t layers_;
  Rows q_, k_, v_, out_;
  std::vector<uint32_t> starts_;
  std::vector<cudaStream_t> streams_;
  std::vector<keyhole_session*> sessions_;
  double fork_us_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const Shape shape = {argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 4,
                       argc > 2 ? argv[2] : "2"};
  std::vector<std::string> cases(argv + std::min(argc, 3), argv + argc);
  const bool has_weights = !cases.empty() && cases[0] == "weights";
  if (has_weights) cases.erase(cases.begin());
  if (cases.empty()) cases = {"1x32768", "4x32768", "16x32768", "1x131072", "4x131072"};
  const double bytes_per_us = copied_bytes_per_us();
  keyhole_engine* const engine = make_engine(shape.layers);
  std::printf("%u layers, codes of %s bits; us a layer, GiB of all layers\n", shape.layers,
              shape.bits.c_str());
  if (has_weights) {
    std::printf("%12s %11s %11s %11s %11s %11s %11s\n", "sequences", "products", "attention",
                "K, V read", "together", "tokens/s", "full, most");
  } else {
    std::printf("%12s %11s %11s %11s %11s %8s %8s %8s %8s\n", "sequences", "one launch",
                "one by one", "own streams", "K, V read", "enqueue", "device", "host", "fork ms");
  }
  for (const std::string& text : cases) {
    const size_t mark = text.find_first_of("xf");
    must(mark != std::string::npos, "a case is SEQUENCESxTOKENS or SEQUENCESfTOKENS");
    const bool are_forks = text[mark] == 'f';
    const auto count = static_cast<uint32_t>(std::atoi(text.c_str()));
    const auto tokens = static_cast<uint32_t>(std::atoi(text.c_str() + mark + 1));
    double enqueue = 0, of_others = 0;
    Sequences codes(engine, shape, count, tokens, are_forks);
    const double kv_us = 2.0 * 2.0 * kKvHeads * kDim * tokens * count / bytes_per_us;
    if (has_weights) {
      LayerProducts products(count);
      const LayerProducts::Times alone = products.times(count, codes.stream());
      const double attention = codes.us(Way::together, enqueue);
      const double all = codes.us(Way::together, enqueue, &products);
      std::printf("%12s %11.1f %11.1f %11.1f %11.1f %11.1f %11.1f\n", text.c_str(), alone.layer,
                  attention, kv_us, all, tokens_per_second(count, all, alone.head),
                  tokens_per_second(count, alone.layer + kv_us, alone.head));
      std::fflush(stdout);
      continue;
    }
    const auto [device, host] = codes.gib();
    const double one = codes.us(Way::together, enqueue),
                 turns = codes.us(Way::one_by_one, of_others),
                 own = codes.us(Way::own_streams, of_others);
    std::printf("%12s %11.1f %11.1f %11.1f %11.1f %8.1f %8.2f %8.2f %8.2f\n", text.c_str(), one,
                turns, own, kv_us, enqueue, device, host, codes.fork_us() / 1000.0);
    std::fflush(stdout);
  }
  keyhole_engine_destroy(engine);
  return 0;
}
