// What one context costs a decoder: the time of a prompt, of the first step behind it (with Keyhole on a card the cache
// goes to its sessions there), and of steps of several tokens, as drafts have them; and the device's memory that is in
// use, and the process's on the host without the files that it maps. Of long prompts each eighth is printed when it is
// done.
//   llama-steps-bench MODEL DEVICE TOKENS[:SECONDS] [BATCH [STEPS [N ...]]] [seqs=S]
//   llama-steps-bench MODEL DEVICE fill:TOKENS[,TOKENS ...] [BATCH [STEPS [N ...]]] [seqs=S]
// DEVICE: CUDA0, KEYHOLE0, ..., CPU, or several with commas between, over which layers are split. TOKENS: of the
// prompt, which ends after so many seconds as well. BATCH: of the prompt at once (default: 2048). STEPS: of each number
// of tokens N (default: 64 of 1, 2, 3, 5 and 9). Tokens are random; drafts are kept. fill: there is no prompt. K and V
// of so many tokens are random numbers, as large as those of a few real tokens (zeros with a device that is not
// Keyhole's); behind the steps the time of batches of BATCH tokens is told: each by itself, and in a row, as a prompt
// has them. On a card the settings have to say card=0, so that the cache is in sessions from its second step on; on the
// CPU copy=off. seqs: how many sequences there are, as a server's slots, each behind TOKENS tokens; or, with commas
// between, behind how many tokens each is (then TOKENS is not looked at). In a step each has N tokens (default: 1 and
// 2); no batches are timed behind the steps. GGML_BACKEND_PATH names the backend, KEYHOLE_GGML its settings.
// LLAMA_ARG_CACHE_TYPE_K and _V, as of llama.cpp's programs, name the types of llama.cpp's own cache (default: f16),
// LLAMA_ARG_CTX_SIZE a context that is longer than it has to be, of each sequence. With LLAMA_ARG_KV_UNIFIED=1 all
// sequences have their cells in one stream, else each has its own.
#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/filled_state.h"

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

/// The type of ggml's that an environment variable names.
ggml_type cache_type(const char* variable) {
  const char* name = std::getenv(variable);
  if (name == nullptr) return GGML_TYPE_F16;
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const char* known = ggml_type_name(static_cast<ggml_type>(type));
    if (known != nullptr && std::string(known) == name) return static_cast<ggml_type>(type);
  }
  fail(std::string(variable) + ": there is no type " + name);
}

class Bench {
 public:
  /// context: of each of `sequences` sequences.
  Bench(const char* path, const char* device, uint32_t context, uint32_t batch, uint32_t sequences)
      : positions_(sequences) {
    llama_model_params params = llama_model_default_params();
    if (std::string(device) != "CPU") {
      std::istringstream names(device);
      for (std::string name; std::getline(names, name, ',');) {
        devices_.push_back(ggml_backend_dev_by_name(name.c_str()));
        if (devices_.back() == nullptr) fail("there is no device " + name);
      }
    }
    devices_.push_back(nullptr);
    params.devices = devices_.data();
    params.n_gpu_layers = 999;
    model_ = llama_model_load_from_file(path, params);
    if (model_ == nullptr) fail(std::string(path) + " cannot be loaded");
    llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = context * sequences;
    wanted.n_batch = batch;
    wanted.n_ubatch = batch;
    wanted.n_seq_max = sequences;
    const char* unified = std::getenv("LLAMA_ARG_KV_UNIFIED");
    wanted.kv_unified = sequences == 1 || (unified != nullptr && std::string(unified) == "1");
    wanted.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    wanted.type_k = cache_type("LLAMA_ARG_CACHE_TYPE_K");
    wanted.type_v = cache_type("LLAMA_ARG_CACHE_TYPE_V");
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

  [[nodiscard]] uint32_t sequences() const { return static_cast<uint32_t>(positions_.size()); }

  /// Enqueues `n` more tokens of a sequence in one batch, of which none answers.
  void enqueue(uint32_t n, uint32_t sequence = 0) {
    batch_.n_tokens = 0;
    add(sequence, n, [](uint32_t) { return false; });
    if (llama_decode(context_, batch_) != 0) fail("llama_decode failed");
  }
  void wait() { llama_synchronize(context_); }

  /// Seconds that `n` more tokens of each sequence in one batch take, until their logits can be read; queued: until
  /// llama.cpp has enqueued all work.
  double step(uint32_t n, double& queued) {
    batch_.n_tokens = 0;
    for (uint32_t s = 0; s < sequences(); ++s) {
      add(s, n, [](uint32_t) { return true; });
    }
    return decode(queued);
  }
  double step(uint32_t n) {
    double queued = 0;
    return step(n, queued);
  }
  /// The same of `n` tokens of one sequence, of which the last answers.
  double decode_last(uint32_t n, uint32_t sequence = 0) {
    batch_.n_tokens = 0;
    add(sequence, n, [&](uint32_t i) { return i + 1 == n; });
    double queued = 0;
    return decode(queued);
  }

  /// A sequence holds `tokens` tokens that were never computed, whatever it held before. Returns the seconds that it
  /// takes to say so: the next batch brings them to where they belong.
  double fill(uint32_t tokens, uint32_t sequence = 0) {
    if (few_.empty()) {
      for (const uint32_t n : {8U, 1U, 1U}) decode_last(n);
      few_.resize(llama_state_seq_get_size(context_, 0));
      if (llama_state_seq_get_data(context_, few_.data(), few_.size(), 0) != few_.size())
        fail("the state of a few tokens cannot be had");
    }
    const auto begin = std::chrono::steady_clock::now();
    const keyhole::llama_cpp::FilledState state(few_, tokens);
    set_random_rows(state.keys(), state.values());
    if (llama_state_seq_set_data(context_, state.data(), state.size(),
                                 static_cast<llama_seq_id>(sequence)) != state.size())
      fail("a state of " + std::to_string(tokens) + " tokens cannot be restored");
    positions_[sequence] = static_cast<llama_pos>(tokens);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  [[nodiscard]] double gib_in_use() const {
    size_t in_use = 0;
    for (ggml_backend_dev_t device : devices_) {
      size_t free = 0;
      size_t total = 0;
      if (device != nullptr) ggml_backend_dev_memory(device, &free, &total);
      in_use += total - free;
    }
    return static_cast<double>(in_use) / (1U << 30U);
  }

 private:
  double decode(double& queued) {
    const auto begin = std::chrono::steady_clock::now();
    if (llama_decode(context_, batch_) != 0) fail("llama_decode failed");
    queued = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    llama_synchronize(context_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  /// Adds tokens of a sequence to the batch.
  template <class Answers>
  void add(uint32_t sequence, uint32_t n, const Answers& answers) {
    for (uint32_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(batch_.n_tokens++);
      batch_.token[at] = static_cast<llama_token>(random_() % words_);
      batch_.pos[at] = positions_[sequence]++;
      batch_.n_seq_id[at] = 1;
      batch_.seq_id[at][0] = static_cast<llama_seq_id>(sequence);
      batch_.logits[at] = static_cast<int8_t>(answers(i));
    }
  }

  /// What is restored from now on is as large as that.
  static void set_random_rows(float keys, float values) {
    ggml_backend_reg_t keyhole = ggml_backend_reg_by_name("KEYHOLE");
    if (keyhole == nullptr) return;
    auto* set = reinterpret_cast<void (*)(float, float)>(
        ggml_backend_reg_get_proc_address(keyhole, "keyhole_random_rows"));
    if (set != nullptr) set(keys, values);
  }

  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  std::vector<ggml_backend_dev_t> devices_;  // NULL behind the last
  llama_batch batch_{};
  uint32_t words_ = 0;
  std::vector<llama_pos> positions_;  // of each sequence's next token
  std::mt19937 random_{3};
  std::vector<uint8_t> few_;  // the state of a few tokens
};

/// Batches behind a filled context that nobody waits for.
constexpr uint32_t kInARow = 2;

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

struct Arguments {
  std::vector<uint32_t> tokens;  // of prompts, each by itself
  bool fills = false;
  double seconds = 1e9;
  uint32_t batch = 2048;
  uint32_t steps = 64;
  std::vector<uint32_t> tokens_of_step{1, 2, 3, 5, 9};
  uint32_t of_all = 0;
  std::vector<uint32_t> depths;  // of several sequences; empty: there is one
};

/// Numbers with commas between.
std::vector<uint32_t> numbers(const std::string& text) {
  std::vector<uint32_t> all;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) all.push_back(number(part.c_str()));
  return all;
}

Arguments parse(std::vector<char*> all) {
  Arguments a;
  std::string sequences;
  std::erase_if(all, [&](const char* text) {
    const bool is_it = std::string(text).starts_with("seqs=");
    if (is_it) sequences = text + 5;
    return is_it;
  });
  const auto argc = static_cast<int>(all.size());
  char** argv = all.data();
  if (argc < 4) fail("llama-steps-bench MODEL DEVICE TOKENS [BATCH [STEPS [N ...]]] [seqs=S]");
  const std::string tokens = argv[3];
  a.fills = tokens.starts_with("fill:");
  if (a.fills) {
    a.tokens = numbers(tokens.substr(5));
  } else {
    a.tokens.push_back(number(argv[3]));
    if (const size_t colon = tokens.find(':'); colon != std::string::npos) {
      a.seconds = number(argv[3] + colon + 1);
    }
  }
  if (argc > 4) a.batch = number(argv[4]);
  if (argc > 5) a.steps = number(argv[5]);
  if (argc > 6) {
    a.tokens_of_step.clear();
    for (int i = 6; i < argc; ++i) a.tokens_of_step.push_back(number(argv[i]));
  } else if (!sequences.empty()) {
    a.tokens_of_step = {1, 2};
  }
  if (!sequences.empty()) {
    a.depths = numbers(sequences);
    constexpr uint32_t kMostSequences = 256;  // of llama.cpp
    if (a.depths.front() == 0 || a.depths.size() > kMostSequences ||
        (a.depths.size() == 1 && a.depths.front() > kMostSequences)) {
      fail("seqs: from 1 to 256");
    }
    if (a.depths.size() == 1) a.depths.assign(a.depths.front(), a.tokens.front());
    a.tokens = a.depths;
  }
  for (const uint32_t n : a.tokens_of_step) {
    if (n == 0 || n * std::max<size_t>(a.depths.size(), 1) > a.batch) {
      fail("N: at least 1, and of all sequences together at most BATCH");
    }
    a.of_all += n;
  }
  if (*std::min_element(a.tokens.begin(), a.tokens.end()) == 0 || a.steps == 0) {
    fail("TOKENS and STEPS: at least 1");
  }
  return a;
}

/// A prompt, batch behind batch as programs of llama.cpp compute it: nobody waits for a batch before the last one,
/// which alone answers. Of a long one each eighth is told, and waited for.
void run_prompt(Bench& bench, const char* device, const Arguments& a, uint32_t sequence) {
  const uint32_t tokens = a.tokens[sequence];
  constexpr uint32_t kLong = 200000;
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  double most = bench.gib_in_use();
  uint32_t told = 0;
  uint32_t done = 0;
  while (done < tokens && seconds() < a.seconds) {
    const uint32_t n = std::min(a.batch, tokens - done);
    const bool is_last = done + n == tokens;
    is_last ? (void)bench.decode_last(n, sequence) : bench.enqueue(n, sequence);
    most = std::max(most, bench.gib_in_use());
    done += n;
    if (tokens < kLong || done - told < tokens / 8 || is_last) continue;
    told = done;
    bench.wait();
    std::printf("%s: %u tokens %.2f s, %.1f GiB at most, host %.1f GiB\n", device, done, seconds(),
                most, host_gib());
    std::fflush(stdout);
  }
  bench.wait();
  const double prompt = seconds();
  std::printf("%s: prompt of %u tokens %.2f s, %.0f tokens/s, %.1f GiB at most, host %.1f GiB\n",
              device, done, prompt, done / prompt, most, host_gib());
}

void run_steps(Bench& bench, const Arguments& a) {
  const double first = bench.step(1);
  std::printf("  first step %.1f ms, %.1f GiB behind it, host %.1f GiB\n", first * 1e3,
              bench.gib_in_use(), host_gib());
  std::fflush(stdout);
  double one = 0;  // of the first N
  for (const uint32_t n : a.tokens_of_step) {
    std::vector<double> times;
    std::vector<double> queued(a.steps);
    for (uint32_t i = 0; i < 4; ++i) bench.step(n);  // graphs are captured at a step's second time
    double sum = 0;
    for (uint32_t i = 0; i < a.steps; ++i) {
      times.push_back(bench.step(n, queued[i]));
      sum += times.back();
    }
    std::sort(times.begin(), times.end());
    std::sort(queued.begin(), queued.end());
    const double median = times[times.size() / 2];
    if (one == 0) one = median;
    const uint32_t of = bench.sequences();
    const std::string each = of == 1 ? "" : " for each of " + std::to_string(of) + " sequences";
    std::printf(
        "  steps of %u%s: median %.2f ms, mean %.2f, queued after %.2f, %.2f times the first; %.1f "
        "tokens/s\n",
        n, each.c_str(), median * 1e3, sum / a.steps * 1e3, queued[queued.size() / 2] * 1e3,
        median / one, n * of / median);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments a = parse({argv, argv + argc});
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR || std::string(text).starts_with("keyhole:"))
          std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  const uint32_t most = *std::max_element(a.tokens.begin(), a.tokens.end());
  const uint32_t needed =
      most + 16 + (a.steps + 4) * a.of_all + (a.fills ? (2 + kInARow) * a.batch : 0);
  const char* wanted = std::getenv("LLAMA_ARG_CTX_SIZE");
  Bench bench(argv[1], argv[2], wanted != nullptr ? std::max(needed, number(wanted)) : needed,
              a.batch, static_cast<uint32_t>(std::max<size_t>(a.depths.size(), 1)));
  if (!a.fills) {
    for (uint32_t s = 0; s < bench.sequences(); ++s) run_prompt(bench, argv[2], a, s);
    run_steps(bench, a);
    return 0;
  }
  if (!a.depths.empty()) {
    for (uint32_t s = 0; s < bench.sequences(); ++s) {
      const double seconds = bench.fill(a.depths[s], s);
      std::printf("%s: %u tokens without a prompt, %.2f s\n", argv[2], a.depths[s], seconds);
    }
    run_steps(bench, a);
    return 0;
  }
  for (const uint32_t tokens : a.tokens) {
    const double seconds = bench.fill(tokens);
    std::printf("%s: %u tokens without a prompt, %.2f s\n", argv[2], tokens, seconds);
    run_steps(bench, a);
    const double before = bench.decode_last(a.batch);
    const double batch = bench.decode_last(a.batch);
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < kInARow; ++i) bench.enqueue(a.batch);
    bench.wait();
    const double each =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kInARow;
    std::printf(
        "  batches of %u behind them %.3f and %.3f s, %u in a row %.3f s each, %.0f tokens/s, %.1f "
        "GiB, host %.1f GiB\n",
        a.batch, before, batch, kInARow, each, a.batch / each, bench.gib_in_use(), host_gib());
    std::fflush(stdout);
  }
  return 0;
} catch (const std::exception& error) {
  fail(error.what());
}
