// A step of a layer over several ranks, each with a GPU: context parallel and tensor parallel, by the default index and
// by full attention (all tokens resident) split likewise, for an 8B model's shape (32 query heads, 8 KV heads, 128
// components, f16). Beside them a rank's share with nobody to wait for, and the gather and merge alone. Steps are
// enqueued one by one, and as graphs of 32 of them.
//
//   gpu_ranks_bench RANKS [TOKENS ...]
//
// Ranks are threads over NCCL. With fewer GPUs than ranks they share them, which NCCL 2.30 and newer does
// (NCCL_MULTI_RANK_GPU_ENABLE): then the ranks do not step together, as one GPU would do all their work, and what
// remains are a rank's share alone, and the gather and the merge. Two share a GPU at most: with four NCCL waits for
// itself.
#include <keyhole/attention.h>
#include <keyhole/nccl.h>
#include <nccl.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <thread>

#include "bench/gpu/session_rows.h"

namespace {

using namespace keyhole::bench;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kLayers =
    4;  // so that one layer's host part runs beside the next ones, as in a model
constexpr uint32_t kGraphTokens =
    8;  // in one graph: with the layers above as many steps as one token of a model of 32 layers
constexpr uint32_t kSteps = 6 * kGraphTokens, kWarmUp = kGraphTokens;

/// The means with which one rank measures.
struct Rank {
  uint32_t rank = 0, size = 1;
  uint32_t gpus = 1;
  int device = 0;
  cudaStream_t stream = nullptr;
  keyhole_communicator* ranks = nullptr;
};

/// How a session is divided.
struct Way {
  bool by_context = false;  ///< over the communicator; else it is an ordinary one
  uint32_t heads_part = 1;  ///< of the heads, one in so many
  bool full = false;        ///< everything is resident
};

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// Microseconds of a layer's step: enqueued call by call, and in graphs of as many as a deep model has.
struct StepUs {
  double calls = 0, graph = 0;
};

/// Steps of all layers as a graph, captured again where the session says so.
class StepGraph {
 public:
  explicit StepGraph(cudaStream_t stream) : stream_(stream) {}
  ~StepGraph() { forget(); }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  template <class Enqueue>
  void launch(keyhole_session* session, const Enqueue& enqueue) {
    keyhole_status status =
        ready_ == nullptr ? KEYHOLE_INVALID_ARGUMENT : keyhole_session_announce(session);
    if (status == KEYHOLE_INVALID_ARGUMENT) {
      forget();
      must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
           "capture");
      enqueue();
      must(cudaStreamEndCapture(stream_, &graph_) == cudaSuccess, "capture");
      must(cudaGraphInstantiate(&ready_, graph_, 0) == cudaSuccess, "graph");
      status = keyhole_session_announce(session);
    }
    must(status == KEYHOLE_OK, "announce");
    must(cudaGraphLaunch(ready_, stream_) == cudaSuccess, "launch");
  }

 private:
  void forget() {
    if (ready_ != nullptr) (void)cudaGraphExecDestroy(ready_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    ready_ = nullptr;
    graph_ = nullptr;
  }
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

/// Times of a step of a session with `tokens` tokens.
StepUs step_us(const Rank& r, const Way& way, uint32_t tokens) {
  keyhole_engine_config e;
  keyhole_engine_config_init(&e);
  e.layers = kLayers;
  e.q_heads = kHeads / way.heads_part;
  e.kv_heads = kKvHeads / way.heads_part;
  e.head_dim = kDim;
  e.device = KEYHOLE_DEVICE_CUDA;
  e.device_ordinal = static_cast<uint32_t>(r.device);
  e.threads = std::max(1U, std::thread::hardware_concurrency() / r.size);
  if (way.by_context) e.communicator = r.ranks;
  keyhole_engine* engine = nullptr;
  must(keyhole_engine_create(&e, &engine) == KEYHOLE_OK, "engine");
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = tokens + 2 * (kSteps + kWarmUp);
  if (way.full) {
    c.mode = KEYHOLE_MODE_RESIDENT;
    c.window = c.max_tokens;
  }
  keyhole_session* session = nullptr;
  must(keyhole_session_create(engine, &c, &session) == KEYHOLE_OK, "session");
  must(keyhole_session_set_stream(session, r.stream) == KEYHOLE_OK, "stream");
  const Rows q(kChunk, e.q_heads), k(kChunk, e.kv_heads), v(kChunk, e.kv_heads), out(1, e.q_heads);
  fill(session, kLayers, tokens, q, k, v);
  const auto token = [&](uint32_t i) {
    const keyhole_tensor tq = q.tensor(1, i), tk = k.tensor(1, i), tv = v.tensor(1, i);
    const keyhole_tensor to = out.tensor(1);
    for (uint32_t l = 0; l < kLayers; ++l) {
      must(keyhole_session_attend(session, l, &tq, &tk, &tv, &to, nullptr) == KEYHOLE_OK, "attend");
    }
  };
  StepUs us;
  {
    StepGraph graph(r.stream);
    const auto run = [&](uint32_t steps, bool by_graph) {
      const auto begin = Clock::now();
      for (uint32_t i = 0; i < steps && !by_graph; ++i) token(i);
      for (uint32_t i = 0; i < steps && by_graph; i += kGraphTokens) {
        graph.launch(session, [&] {
          for (uint32_t t = 0; t < kGraphTokens; ++t) token(t);
        });
      }
      must(keyhole_session_synchronize(session) == KEYHOLE_OK, "synchronize");
      return us_since(begin) / steps / kLayers;
    };
    (void)run(kWarmUp, false);
    us.calls = run(kSteps, false);
    (void)run(kWarmUp, true);
    us.graph = run(kSteps, true);
  }
  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  return us;
}

/// Microseconds of a gather of all ranks' states on the stream and of their merge, `[32, 129]` floats of each rank; of
/// the merge; and of both in a graph, where no launch counts.
struct Merge {
  double both = 0, merge = 0, in_graph = 0;
};
Merge merge_us(const Rank& r, std::barrier<>& meet) {
  constexpr uint32_t kState = kHeads * (kDim + 1), kRuns = 500;
  float* memory = nullptr;
  must(cudaMalloc(&memory, (r.size + 2) * kState * sizeof(float)) == cudaSuccess, "memory");
  must(cudaMemset(memory, 0, (r.size + 2) * kState * sizeof(float)) == cudaSuccess, "memory");
  float *const own = memory, *const all = memory + kState, *const out = all + r.size * kState;
  std::vector<const void*> o;
  std::vector<const float*> lse;
  for (uint32_t i = 0; i < r.size; ++i) {
    o.push_back(all + i * kState);
    lse.push_back(all + i * kState + kHeads * kDim);
  }
  const auto enqueue = [&](uint32_t runs, bool gathers) {
    for (uint32_t i = 0; i < runs; ++i) {
      if (gathers) {
        must(keyhole_communicator_gather_on_stream(r.ranks, own, all, kState * sizeof(float),
                                                   r.stream) == KEYHOLE_OK,
             "gather");
      }
      must(keyhole_merge_states_device(r.size, o.data(), lse.data(), kHeads, kDim, KEYHOLE_F32,
                                       KEYHOLE_LSE_NATURAL, out, KEYHOLE_F32, out + kHeads * kDim,
                                       r.stream) == KEYHOLE_OK,
           "merge");
    }
  };
  const auto run = [&](uint32_t runs, bool gathers) {
    const auto begin = Clock::now();
    enqueue(runs, gathers);
    must(cudaStreamSynchronize(r.stream) == cudaSuccess, "synchronize");
    return us_since(begin) / runs;
  };
  // Ranks that share a GPU: while one loads a kernel or makes a graph, none may wait in a gather, as that can wait for
  // the GPU.
  (void)run(1, false);
  meet.arrive_and_wait();
  (void)run(kRuns, true);
  meet.arrive_and_wait();
  Merge us{run(kRuns, true), run(kRuns, false), 0};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  must(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
       "capture");
  enqueue(kRuns, true);
  must(cudaStreamEndCapture(r.stream, &graph) == cudaSuccess, "capture");
  must(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess, "graph");
  must(cudaGraphUpload(ready, r.stream) == cudaSuccess, "graph");
  must(cudaStreamSynchronize(r.stream) == cudaSuccess, "synchronize");
  meet.arrive_and_wait();
  for (int i = 0; i < 2; ++i) {
    const auto begin = Clock::now();
    must(cudaGraphLaunch(ready, r.stream) == cudaSuccess, "launch");
    must(cudaStreamSynchronize(r.stream) == cudaSuccess, "synchronize");
    us.in_graph = us_since(begin) / kRuns;
  }
  meet.arrive_and_wait();  // what is destroyed waits for the GPU
  must(cudaGraphExecDestroy(ready) == cudaSuccess, "graph");
  must(cudaGraphDestroy(graph) == cudaSuccess, "graph");
  must(cudaFree(memory) == cudaSuccess, "memory");
  return us;
}

/// Runs f(rank) on a thread for each.
void on_ranks(uint32_t size, const std::function<void(const Rank&)>& f) {
  int gpus = 0;
  must(cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0, "GPUs");
  must(size <= 2 * static_cast<uint32_t>(gpus), "more than two ranks for each GPU");
  if (static_cast<uint32_t>(gpus) < size) (void)setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  ncclUniqueId id;
  must(ncclGetUniqueId(&id) == ncclSuccess, "NCCL");
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < size; ++i) {
    threads.emplace_back([=, &f] {
      Rank r{i, size, static_cast<uint32_t>(gpus), static_cast<int>(i) % gpus, nullptr, nullptr};
      must(cudaSetDevice(r.device) == cudaSuccess, "device");
      must(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking) == cudaSuccess, "stream");
      ncclComm_t comm = nullptr;
      must(ncclCommInitRank(&comm, static_cast<int>(size), id, static_cast<int>(i)) == ncclSuccess,
           "ncclCommInitRank");
      must(keyhole_communicator_from_nccl(&comm, nullptr, &r.ranks) == KEYHOLE_OK, "communicator");
      f(r);
      keyhole_communicator_destroy(r.ranks);
      must(ncclCommDestroy(comm) == ncclSuccess, "ncclCommDestroy");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t size = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 1;
  std::vector<uint32_t> contexts;
  for (int i = 2; i < argc; ++i) contexts.push_back(static_cast<uint32_t>(std::atoi(argv[i])));
  if (contexts.empty()) contexts = {131072};
  must(size >= 1 && kKvHeads % size == 0, "ranks: 1, 2, 4 or 8");
  std::barrier<> meet(static_cast<std::ptrdiff_t>(size));
  std::vector<StepUs> together[2] = {std::vector<StepUs>(size), std::vector<StepUs>(size)};
  on_ranks(size, [&](const Rank& r) {
    // The first session loads kernels and raises clocks.
    if (r.rank == 0) (void)step_us(r, {false, 1, false}, 65536);
    meet.arrive_and_wait();
    const Merge merge = merge_us(r, meet);
    meet.arrive_and_wait();
    if (r.rank == 0) {
      std::printf(
          "%u ranks on %u GPUs: gather and merge %.1f us a layer, in a graph %.1f us, the merge "
          "alone %.1f us\n",
          size, r.gpus, merge.both, merge.in_graph, merge.merge);
      std::printf("%9s %-9s %-7s %10s %10s %10s | %12s %12s\n", "tokens", "attention", "steps",
                  "one rank", "context", "tensor", "its context", "its heads");
    }
    for (const uint32_t tokens : contexts) {
      for (const bool full : {false, true}) {
        // Steps with nobody to wait for: with the whole, with a rank's tokens, with a rank's heads.
        StepUs alone[3];
        if (r.rank == 0) {
          alone[0] = step_us(r, {false, 1, full}, tokens);
          alone[1] = step_us(r, {false, 1, full}, tokens / size);
          alone[2] = step_us(r, {false, size, full}, tokens);
        }
        meet.arrive_and_wait();
        if (r.gpus >= size) {
          together[0][r.rank] = step_us(r, {true, 1, full}, tokens);
          meet.arrive_and_wait();
          together[1][r.rank] = step_us(r, {false, size, full}, tokens);
          meet.arrive_and_wait();
        }
        if (r.rank != 0) continue;
        for (double StepUs::*const us : {&StepUs::calls, &StepUs::graph}) {
          const auto slowest = [&](const std::vector<StepUs>& of) -> std::string {
            if (r.gpus < size) return "-";
            double most = 0;
            for (const StepUs& its : of) most = std::max(most, its.*us);
            char text[32];
            (void)std::snprintf(text, sizeof text, "%.1f", most);
            return text;
          };
          std::printf("%9u %-9s %-7s %10.1f %10s %10s | %12.1f %12.1f\n", tokens,
                      full ? "full" : "default", us == &StepUs::calls ? "calls" : "graph",
                      alone[0].*us, slowest(together[0]).c_str(), slowest(together[1]).c_str(),
                      alone[1].*us, alone[2].*us);
        }
        (void)std::fflush(stdout);
      }
    }
  });
  return 0;
}
