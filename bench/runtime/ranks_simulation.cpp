// What a step of a layer costs over many ranks: the real code on one rank's real share of the tokens, beside a modelled
// network.
//
// Only one rank is there. Its share is timed by itself, and again as a rank of a transport whose other ranks are alike:
// they answer with its own message, after latency * ceil(log2 ranks) + (ranks - 1) * bytes / bandwidth. Keys are
// random. With one KV head 1M tokens fit a small machine; the times of a share and of a merge are of the heads that are
// there.
//     ranks_simulation [TOKENS_IN_ALL [LATENCY_US [GBYTE_PER_S [KV_HEADS]]]]      16777216, 5, 12.5, 1
#include <keyhole/parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr uint32_t kGroup = 4, kDim = 128;
constexpr uint32_t kMostRanks = 1024;
constexpr uint32_t kChunk = 16384;
constexpr uint32_t kMostShare =
    1U << 20;  // of a rank: K and V in fp16 and codes of 4 bits of one head are less than 1 GiB
constexpr int kSteps = 200;

using Clock = std::chrono::steady_clock;

struct Network {
  uint32_t ranks = 1, kv_heads = 1;
  double latency_us = 5.0, gbyte_per_s = 12.5;
  double waited_us = 0.0;
  uint64_t messages = 0, bytes = 0;  // received

  [[nodiscard]] double microseconds(size_t message) const {
    if (ranks == 1) return 0.0;
    return latency_us * std::ceil(std::log2(ranks)) +
           (ranks - 1) * static_cast<double>(message) / (gbyte_per_s * 1e3);
  }
};

keyhole_status gather(void* context, const void* own, void* all, size_t bytes, uint32_t, char*) {
  auto& network = *static_cast<Network*>(context);
  const auto begin = Clock::now();
  const double us = network.microseconds(bytes);
  for (uint32_t r = 0; r < network.ranks; ++r) {
    std::memcpy(static_cast<char*>(all) + r * bytes, own, bytes);
  }
  while (std::chrono::duration<double, std::micro>(Clock::now() - begin).count() < us) {
  }
  network.waited_us += us;
  ++network.messages;
  network.bytes += uint64_t{network.ranks - 1} * bytes;
  return KEYHOLE_OK;
}

void check(keyhole_status status) {
  if (status == KEYHOLE_OK) return;
  std::fprintf(stderr, "%s\n", keyhole_last_error());
  std::exit(1);
}

struct Figures {
  double step_us = 0.0, network_us = 0.0;
  uint64_t bytes = 0;
};

/// The median step of a rank that holds `share` tokens, with this network; ranks 1: without one.
Figures measure(uint32_t share, Network network) {
  const uint32_t kv_heads = network.kv_heads, q_heads = kGroup * kv_heads;
  keyhole_transport transport;
  keyhole_transport_init(&transport);
  transport.context = &network;
  transport.size = network.ranks;
  transport.all_gather = gather;
  keyhole_communicator* ranks = nullptr;
  if (network.ranks > 1) check(keyhole_communicator_create(&transport, nullptr, &ranks));
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  config.layers = 1;
  config.q_heads = q_heads;
  config.kv_heads = kv_heads;
  config.head_dim = kDim;
  config.device = KEYHOLE_DEVICE_HOST;
  config.communicator = ranks;
  // One block for all: the share is this rank's, and the rest of the text would only be skipped.
  config.context_block = 1U << 30;
  keyhole_engine* engine = nullptr;
  check(keyhole_engine_create(&config, &engine));
  keyhole_session_config sc;
  keyhole_session_config_init(&sc);
  sc.max_tokens = share + kSteps;
  keyhole_session* session = nullptr;
  check(keyhole_session_create(engine, &sc, &session));

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> k(size_t{kChunk} * kv_heads * kDim), q(size_t{q_heads} * kDim), out(q.size());
  for (uint32_t done = 0; done < share;) {
    const int64_t n = std::min(kChunk, share - done);
    for (float& x : k) x = normal(random);
    const int64_t shape[] = {n, kv_heads, kDim};
    const keyhole_tensor t = keyhole_tensor_host(k.data(), KEYHOLE_F32, 3, shape);
    check(keyhole_session_append(session, 0, &t, &t, nullptr));
    done += static_cast<uint32_t>(n);
  }
  check(keyhole_session_build(session, nullptr, nullptr));
  network.waited_us = 0.0;
  network.messages = network.bytes = 0;
  std::vector<double> times;
  const int64_t q_shape[] = {q_heads, kDim}, kv_shape[] = {kv_heads, kDim};
  for (int step = 0; step < kSteps; ++step) {
    for (float& x : q) x = normal(random);
    const keyhole_tensor tq = keyhole_tensor_host(q.data(), KEYHOLE_F32, 2, q_shape);
    const keyhole_tensor tk = keyhole_tensor_host(q.data(), KEYHOLE_F32, 2, kv_shape);
    const keyhole_tensor to = keyhole_tensor_host(out.data(), KEYHOLE_F32, 2, q_shape);
    const auto begin = Clock::now();
    check(keyhole_session_attend(session, 0, &tq, &tk, &tk, &to, nullptr));
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + kSteps / 2, times.end());
  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  keyhole_communicator_destroy(ranks);
  return {times[kSteps / 2], network.waited_us / kSteps, network.bytes / kSteps};
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t tokens = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : uint64_t{16} << 20;
  Network network;
  if (argc > 2) network.latency_us = std::atof(argv[2]);
  if (argc > 3) network.gbyte_per_s = std::atof(argv[3]);
  if (argc > 4) network.kv_heads = static_cast<uint32_t>(std::atoi(argv[4]));
  if (tokens < 1024 || !(network.latency_us >= 0) || !(network.gbyte_per_s > 0) ||
      network.kv_heads < 1 || network.kv_heads > 64) {
    std::fprintf(stderr,
                 "usage: ranks_simulation [TOKENS >= 1024 [LATENCY_US >= 0 [GBYTE_PER_S > 0 "
                 "[KV_HEADS 1..64]]]]\n");
    return 2;
  }
  std::printf(
      "%llu tokens in all, %u query heads on %u KV heads of %u components, auto index, %u threads\n"
      "modelled network: %.1f us a message, %.1f GB/s into a rank; all else is measured\n\n",
      static_cast<unsigned long long>(tokens), kGroup * network.kv_heads, network.kv_heads, kDim,
      std::thread::hardware_concurrency(), network.latency_us, network.gbyte_per_s);
  std::printf("%6s %12s %12s %12s %14s %12s %10s\n", "ranks", "tokens each", "share alone",
              "network", "merge and rest", "step", "received");
  uint32_t best = 0;
  double best_us = 0.0;
  for (uint32_t ranks = 1; ranks <= kMostRanks; ranks *= 2) {
    const uint64_t share = tokens / ranks;
    if (share > kMostShare || share < 1024) continue;
    network.ranks = 1;
    const Figures alone = measure(static_cast<uint32_t>(share), network);
    network.ranks = ranks;
    const Figures spread = ranks == 1 ? alone : measure(static_cast<uint32_t>(share), network);
    std::printf("%6u %12llu %9.1f us %9.1f us %11.1f us %9.1f us %8.1f KB\n", ranks,
                static_cast<unsigned long long>(share), alone.step_us, spread.network_us,
                spread.step_us - alone.step_us - spread.network_us, spread.step_us,
                static_cast<double>(spread.bytes) / 1e3);
    std::fflush(stdout);
    if (best == 0 || spread.step_us < best_us) {
      best = ranks;
      best_us = spread.step_us;
    }
  }
  std::printf("\nShares of 1024 to %u tokens are measured. A step is shortest on %u ranks.\n",
              kMostShare, best);
  return 0;
}
