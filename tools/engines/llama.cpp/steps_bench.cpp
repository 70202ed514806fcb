// What one context costs a decoder: the time of a prompt, of the first step behind it (with Keyhole on a card the cache goes to
// its sessions there), and of steps of several tokens, as drafts have them; and the device's memory that is in use, and the
// process's on the host without the files that it maps. Of long prompts each eighth is printed when it is done.
//   llama-steps-bench MODEL DEVICE TOKENS[:SECONDS] [BATCH [STEPS [N ...]]]
// DEVICE: CUDA0, KEYHOLE0, ... or CPU. TOKENS: of the prompt, which ends after so many seconds as well. BATCH: of the prompt at once (default: 2048). STEPS: of each number
// of tokens N (default: 64 of 1, 2, 3, 5 and 9). Tokens are random; drafts are kept.
// GGML_BACKEND_PATH names the backend, KEYHOLE_GGML its settings.
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

class Bench {
 public:
  Bench(const char* path, const char* device, uint32_t context, uint32_t batch) {
    llama_model_params params = llama_model_default_params();
    std::array<ggml_backend_dev_t, 2> devices{};
    if (std::string(device) != "CPU") {
      devices[0] = ggml_backend_dev_by_name(device);
      if (devices[0] == nullptr) fail(std::string("there is no device ") + device);
    }
    device_ = devices[0];
    params.devices = devices.data();
    params.n_gpu_layers = 999;
    model_ = llama_model_load_from_file(path, params);
    if (model_ == nullptr) fail(std::string(path) + " cannot be loaded");
    llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = context;
    wanted.n_batch = batch;
    wanted.n_ubatch = batch;
    wanted.n_seq_max = 1;
    wanted.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context_ = llama_init_from_model(model_, wanted);
    if (context_ == nullptr) fail("no context");
    words_ = static_cast<uint32_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_)));
    batch_ = llama_batch_init(static_cast<int32_t>(batch), 0, 1);
  }
  ~Bench() {
    llama_batch_free(batch_);
    llama_free(context_);
    llama_model_free(model_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// Seconds that `n` more tokens in one batch take, until their logits can be read.
  double decode(uint32_t n, bool all_answer) {
    batch_.n_tokens = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(batch_.n_tokens++);
      batch_.token[at] = static_cast<llama_token>(random_() % words_);
      batch_.pos[at] = position_++;
      batch_.n_seq_id[at] = 1;
      batch_.seq_id[at][0] = 0;
      batch_.logits[at] = static_cast<int8_t>(all_answer || i + 1 == n);
    }
    const auto begin = std::chrono::steady_clock::now();
    if (llama_decode(context_, batch_) != 0) fail("llama_decode failed");
    llama_synchronize(context_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  [[nodiscard]] double gib_in_use() const {
    if (device_ == nullptr) return 0;
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device_, &free, &total);
    return static_cast<double>(total - free) / (1U << 30U);
  }

 private:
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  ggml_backend_dev_t device_ = nullptr;
  llama_batch batch_{};
  uint32_t words_ = 0;
  llama_pos position_ = 0;
  std::mt19937 random_{3};
};

/// Of this process, without mapped files.
double host_gib() {
  std::ifstream figures("/proc/self/status");
  double kib = 0;
  for (std::string line; std::getline(figures, line);) {
    unsigned long long part = 0;
    if (std::sscanf(line.c_str(), "RssAnon: %llu kB", &part) == 1 ||
        std::sscanf(line.c_str(), "RssShmem: %llu kB", &part) == 1) {
      kib += static_cast<double>(part);
    }
  }
  return kib / (1U << 20U);
}

uint32_t number(const char* text) { return static_cast<uint32_t>(std::strtoul(text, nullptr, 10)); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) fail("llama-steps-bench MODEL DEVICE TOKENS [BATCH [STEPS [N ...]]]");
  const uint32_t tokens = number(argv[3]);
  const char* colon = std::strchr(argv[3], ':');
  const double seconds = colon != nullptr ? number(colon + 1) : 1e9;
  const uint32_t batch = argc > 4 ? number(argv[4]) : 2048;
  const uint32_t steps = argc > 5 ? number(argv[5]) : 64;
  std::vector<uint32_t> tokens_of_step{1, 2, 3, 5, 9};
  if (argc > 6) {
    tokens_of_step.clear();
    for (int i = 6; i < argc; ++i) tokens_of_step.push_back(number(argv[i]));
  }
  uint32_t of_all = 0;
  for (const uint32_t n : tokens_of_step) {
    if (n == 0 || n > batch) fail("N: from 1 to BATCH");
    of_all += n;
  }
  if (tokens == 0 || steps == 0) fail("TOKENS and STEPS: at least 1");
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR || std::string(text).starts_with("keyhole:"))
          std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  const uint32_t room = tokens + 1 + (steps + 4) * of_all;
  Bench bench(argv[1], argv[2], room, batch);
  double prompt = 0;
  double most = bench.gib_in_use();
  constexpr uint32_t kLong = 200000;
  uint32_t told = 0;
  uint32_t done = 0;
  while (done < tokens && prompt < seconds) {
    const uint32_t n = std::min(batch, tokens - done);
    prompt += bench.decode(n, false);
    most = std::max(most, bench.gib_in_use());
    done += n;
    if (tokens < kLong || done - told < tokens / 8 || done == tokens) continue;
    told = done;
    std::printf("%s: %u tokens %.2f s, %.1f GiB at most, host %.1f GiB\n", argv[2], done, prompt,
                most, host_gib());
    std::fflush(stdout);
  }
  std::printf("%s: prompt of %u tokens %.2f s, %.0f tokens/s, %.1f GiB at most, host %.1f GiB\n",
              argv[2], done, prompt, done / prompt, most, host_gib());
  const double first = bench.decode(1, true);
  std::printf("  first step %.1f ms, %.1f GiB behind it\n", first * 1e3, bench.gib_in_use());
  std::fflush(stdout);
  double one = 0;  // of the first N
  for (const uint32_t n : tokens_of_step) {
    std::vector<double> times;
    for (uint32_t i = 0; i < 4; ++i)
      bench.decode(n, true);  // graphs are captured at a step's second time
    double sum = 0;
    for (uint32_t i = 0; i < steps; ++i) {
      times.push_back(bench.decode(n, true));
      sum += times.back();
    }
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    if (one == 0) one = median;
    std::printf("  steps of %u: median %.2f ms, mean %.2f, %.2f times the first; %.1f tokens/s\n",
                n, median * 1e3, sum / steps * 1e3, median / one, n / median);
    std::fflush(stdout);
  }
  return 0;
}
