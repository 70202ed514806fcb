// A program for mpirun: a session over the ranks answers as an ordinary one of each process does; and where a rank is
// killed, the others get a status in time.
//     mpirun -n N mpi_ranks FOLDER              answers
//     mpirun -n N mpi_ranks FOLDER prefill|step|save   the last rank is killed there
#include <keyhole/mpi.h>
#include <keyhole/save.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/normal.h"

namespace {

constexpr uint32_t kTimeoutMs = 1500;
constexpr int64_t kTokens = 300, kQueryHeads = 4, kKvHeads = 2, kDim = 64;
std::string dies_in;  // NOLINT: of this program's one run
uint32_t rank = 0, size = 1;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "rank %u: %s\n", rank, text.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

void check(keyhole_status status, const char* what) {
  if (status != KEYHOLE_OK) fail(std::string(what) + ": " + keyhole_last_error());
}

void die_in(const char* where) {
  if (dies_in == where && rank + 1 == size) raise(SIGKILL);
}

/// Ends a run in which a rank dies, if the call has failed as it should.
void expect(keyhole_status status, const char* where, std::chrono::steady_clock::time_point begin) {
  if (dies_in.empty() || dies_in != where) return check(status, where);
  const auto took = std::chrono::steady_clock::now() - begin;
  if (status != KEYHOLE_TIMEOUT && status != KEYHOLE_RANK_FAILED) {
    fail(std::string(where) + ": status " + std::to_string(status) + " although a rank was killed");
  }
  if (took > std::chrono::milliseconds(10 * kTimeoutMs)) fail(std::string(where) + ": too late");
  std::printf("rank %u: %s\n", rank, keyhole_last_error());
  std::fflush(nullptr);
  std::_Exit(0);  // MPI_Finalize would wait for the rank that is gone
}

keyhole_engine* make_engine(keyhole_communicator* c) {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  config.layers = 1;
  config.q_heads = kQueryHeads;
  config.kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.threads = 1;
  config.device = KEYHOLE_DEVICE_HOST;
  config.communicator = c;
  config.context_block = 16;
  keyhole_engine* engine = nullptr;
  check(keyhole_engine_create(&config, &engine), "engine");
  return engine;
}

keyhole_session* make_session(keyhole_engine* engine) {
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  config.max_tokens = 4096;
  config.sink = 4;
  config.window = 16;
  config.index = "flat";
  config.budget.top_k = 4096;
  keyhole_session* session = nullptr;
  check(keyhole_session_create(engine, &config, &session), "session");
  return session;
}

struct Data {
  explicit Data(int64_t tokens) : n(tokens) {
    std::mt19937 random(7);
    keyhole::test::Normal<float> normal;
    k.resize(static_cast<size_t>(n * kKvHeads * kDim));
    v.resize(k.size());
    q.resize(static_cast<size_t>(n * kQueryHeads * kDim));
    for (auto* all : {&k, &v, &q}) {
      for (float& x : *all) x = normal(random);
    }
  }
  int64_t n;
  std::vector<float> k, v, q;
};

keyhole_tensor rows(const std::vector<float>& all, int64_t heads, int64_t first, int64_t n) {
  const int64_t shape[] = {n, heads, kDim};
  return keyhole_tensor_host(all.data() + first * heads * kDim, KEYHOLE_F32, 3, shape);
}

/// The answers of the last tokens: some at once, some one by one.
std::vector<float> converse(keyhole_session* s, const Data& data, int64_t from) {
  std::vector<float> out(static_cast<size_t>((data.n - from) * kQueryHeads * kDim));
  const int64_t together = 30;
  const auto k = rows(data.k, kKvHeads, from, together), v = rows(data.v, kKvHeads, from, together);
  const auto q = rows(data.q, kQueryHeads, from, together), o = rows(out, kQueryHeads, 0, together);
  check(keyhole_session_extend(s, 0, &q, &k, &v, nullptr, &o, nullptr), "extend");
  for (int64_t t = from + together; t < data.n; ++t) {
    const auto k1 = rows(data.k, kKvHeads, t, 1), v1 = rows(data.v, kKvHeads, t, 1);
    const auto q1 = rows(data.q, kQueryHeads, t, 1), o1 = rows(out, kQueryHeads, t - from, 1);
    if (t == data.n - 1) die_in("step");
    const auto begin = std::chrono::steady_clock::now();
    const keyhole_status status = keyhole_session_attend(s, 0, &q1, &k1, &v1, &o1, nullptr);
    expect(status, t == data.n - 1 ? "step" : "", begin);
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("usage: mpi_ranks FOLDER [prefill|step|save]");
  const std::string path = std::string(argv[1]) + "/session";
  if (argc > 2) dies_in = argv[2];
  MPI_Init(nullptr, nullptr);
  keyhole_communicator_config timeouts;
  keyhole_communicator_config_init(&timeouts);
  timeouts.timeout_ms = timeouts.long_timeout_ms = dies_in.empty() ? 60000 : kTimeoutMs;
  keyhole_communicator* ranks = nullptr;
  check(keyhole_communicator_from_mpi(nullptr, &timeouts, &ranks), "communicator");
  rank = keyhole_communicator_get_rank(ranks);
  size = keyhole_communicator_get_size(ranks);
  uint32_t local_rank = 0, local_size = 0;
  check(keyhole_mpi_local_ranks(nullptr, &local_rank, &local_size), "local ranks");
  if (local_rank >= local_size || local_size > size) fail("local ranks");

  keyhole_engine* engine = make_engine(ranks);
  keyhole_session* s = make_session(engine);
  const Data data(kTokens + 60);
  const auto k = rows(data.k, kKvHeads, 0, kTokens), v = rows(data.v, kKvHeads, 0, kTokens);
  die_in("prefill");
  auto begin = std::chrono::steady_clock::now();
  keyhole_status status = keyhole_session_append(s, 0, &k, &v, nullptr);
  expect(status, "prefill", begin);
  check(keyhole_session_build(s, nullptr, nullptr), "build");
  check(keyhole_session_save(s, path.c_str()), "save");
  const std::vector<float> seen = converse(s, data, kTokens);
  die_in("save");
  begin = std::chrono::steady_clock::now();
  status = keyhole_session_save(s, path.c_str());
  expect(status, "save", begin);
  keyhole_session_destroy(s);
  check(keyhole_session_load(engine, path.c_str(), nullptr, &s), "load");

  // The same calls in this process alone.
  keyhole_engine* alone = make_engine(nullptr);
  keyhole_session* whole = make_session(alone);
  check(keyhole_session_append(whole, 0, &k, &v, nullptr), "prefill alone");
  check(keyhole_session_build(whole, nullptr, nullptr), "build alone");
  dies_in.clear();
  const std::vector<float> truth = converse(whole, data, kTokens);
  for (size_t i = 0; i < truth.size(); ++i) {
    if (std::fabs(seen[i] - truth[i]) < 1e-5F) continue;
    fail("number " + std::to_string(i) + " is " + std::to_string(seen[i]) + ", alone it is " +
         std::to_string(truth[i]));
  }
  // All ranks have the same bits.
  std::vector<float> all(seen.size() * size);
  check(keyhole_communicator_gather(ranks, seen.data(), all.data(), seen.size() * sizeof(float)),
        "gather");
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] != seen[i % seen.size()]) fail("ranks have different bits");
  }
  keyhole_session_destroy(s);
  keyhole_session_destroy(whole);
  keyhole_engine_destroy(engine);
  keyhole_engine_destroy(alone);
  keyhole_communicator_destroy(ranks);
  MPI_Finalize();
  if (rank == 0) std::printf("%u ranks answer as one process\n", size);
  return 0;
}
