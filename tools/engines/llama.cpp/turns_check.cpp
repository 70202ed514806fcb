// A model with Keyhole and without it, side by side: the same tokens go to both, and each answer is compared, over
// prompts, steps, drafts, later turns, removed ends, several sequences and copies of them. GGML_BACKEND_PATH names the
// backend, KEYHOLE_GGML its settings. Where there are cards, both are on the first one, or their layers are
// split over the first CARDS ones.
//   llama-turns-check MODEL TOKENS ALLOWED [CARDS]
// TOKENS: of the first prompt. ALLOWED: the largest mean divergence of a part that passes. The model needs no
// vocabulary.
// Exits with 1 where a part fails; goes on with the others.
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tools/engines/llama.cpp/divergence.h"

namespace {

using keyhole::llama_cpp::Divergence;
using keyhole::llama_cpp::divergence;

struct Side {
  llama_model* model = nullptr;
  llama_context* context = nullptr;
};

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

/// With its layers split over `names`; none: on the CPU.
llama_model* load(const char* path, const std::vector<std::string>& names) {
  llama_model_params params = llama_model_default_params();
  std::vector<ggml_backend_dev_t> devices;
  for (const std::string& name : names) {
    devices.push_back(ggml_backend_dev_by_name(name.c_str()));
    if (devices.back() == nullptr) fail("there is no device " + name);
  }
  devices.push_back(nullptr);
  params.devices = devices.data();
  params.n_gpu_layers = 999;
  llama_model* model = llama_model_load_from_file(path, params);
  if (model == nullptr) fail(std::string(path) + " cannot be loaded");
  return model;
}

/// Divergence of the answers of one part.
struct Figures {
  double sum = 0;
  double worst = 0;
  int count = 0;
  int other_best = 0;

  void add(const Divergence& one) {
    sum += one.nats;
    worst = std::max(worst, one.nats);
    other_best += one.same_best ? 0 : 1;
    ++count;
  }
};

class Check {
 public:
  Check(Side with, Side without, uint32_t sequences, bool unified, uint32_t context, double allowed)
      : sides_{with, without}, allowed_(allowed) {
    words_ = llama_vocab_n_tokens(llama_model_get_vocab(with.model));
    batch_ = llama_batch_init(kBatch, 0, 1);
    for (Side& side : sides_) {
      llama_context_params params = llama_context_default_params();
      params.n_ctx = context * (unified ? 1 : sequences);
      params.n_batch = kBatch;
      params.n_ubatch = 512;
      params.n_seq_max = sequences;
      params.kv_unified = unified;
      params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
      side.context = llama_init_from_model(side.model, params);
      if (side.context == nullptr) fail("no context");
    }
  }
  ~Check() {
    llama_batch_free(batch_);
    for (Side& side : sides_) llama_free(side.context);
  }
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;

  /// Ends a part: says how its answers were.
  void report(const char* what) {
    const double mean = figures_.sum / std::max(figures_.count, 1);
    const bool good = failed_.empty() && figures_.count > 0 && mean <= allowed_;
    std::printf(
        "%s  %-34s %4d answers, mean divergence %.1e, worst %.1e, %d with another best token%s%s\n",
        good ? "ok    " : "FAILED", what, figures_.count, mean, figures_.worst, figures_.other_best,
        failed_.empty() ? "" : ": ", failed_.c_str());
    std::fflush(stdout);
    failures_ += good ? 0 : 1;
    figures_ = {};
    failed_.clear();
  }
  [[nodiscard]] int failures() const { return failures_; }

  /// Random tokens, the last of which answers.
  void prompt(int sequence, int n) {
    for (int done = 0; done < n;) {
      const int count = std::min(n - done, kBatch);
      for (int i = 0; i < count; ++i) add(sequence, random_token(), done + i + 1 == n);
      decode();
      done += count;
    }
  }
  /// One token of each sequence at a time: the best one of the answer without Keyhole.
  void steps(const std::vector<int>& sequences, int n) {
    for (int i = 0; i < n; ++i) {
      for (const int s : sequences) add(s, best_[static_cast<size_t>(s)], true);
      decode();
    }
  }
  /// Drafts of which the first few are kept.
  void drafts(int sequence, int rounds, int count) {
    for (int i = 0; i < rounds; ++i) {
      const int at = next(sequence);
      for (int j = 0; j < count; ++j)
        add(sequence, j == 0 ? best_[static_cast<size_t>(sequence)] : random_token(), true);
      decode();
      remove(sequence, at + 1 + i % count, -1);
    }
  }
  /// Drafts of several sequences in one batch, of which each has another number, in turn; the first few are kept.
  void drafts_of(const std::vector<int>& sequences, int rounds) {
    for (int i = 0; i < rounds; ++i) {
      std::vector<int> at;
      const auto all = static_cast<int>(sequences.size());
      const auto count_of = [&](int place) { return 1 + (i + place) % all; };
      for (const int s : sequences) {
        const int count = count_of(static_cast<int>(at.size()));
        at.push_back(next(s));
        for (int j = 0; j < count; ++j)
          add(s, j == 0 ? best_[static_cast<size_t>(s)] : random_token(), true);
      }
      decode();
      for (int place = 0; place < all; ++place) {
        const auto j = static_cast<size_t>(place);
        remove(sequences[j], at[j] + 1 + i % count_of(place), -1);
      }
    }
  }
  /// Prompts of several sequences, token by token side by side.
  void mixed_prompt(const std::vector<int>& sequences, int n) {
    for (int i = 0; i < n; ++i) {
      for (const int s : sequences) add(s, random_token(), i + 1 == n);
    }
    decode();
  }
  void remove(int sequence, int from, int to) {
    for (Side& side : sides_) {
      if (!llama_memory_seq_rm(llama_get_memory(side.context), sequence, from, to))
        failed_ = "no removal";
    }
  }
  void shift(int sequence, int from, int by) {
    for (Side& side : sides_) {
      llama_memory_seq_add(llama_get_memory(side.context), sequence, from, -1, by);
    }
  }
  void copy(int from, int to) {
    for (Side& side : sides_) {
      llama_memory_seq_rm(llama_get_memory(side.context), to, -1, -1);
      llama_memory_seq_cp(llama_get_memory(side.context), from, to, -1, -1);
    }
    best_[static_cast<size_t>(to)] = best_[static_cast<size_t>(from)];
  }
  void clear(bool data) {
    for (Side& side : sides_) llama_memory_clear(llama_get_memory(side.context), data);
  }
  /// Both sides' states of a sequence, saved and restored.
  void save_and_restore(int sequence) {
    for (Side& side : sides_) {
      std::vector<uint8_t> state(llama_state_seq_get_size(side.context, sequence));
      const size_t n = llama_state_seq_get_data(side.context, state.data(), state.size(), sequence);
      llama_memory_seq_rm(llama_get_memory(side.context), sequence, -1, -1);
      if (llama_state_seq_set_data(side.context, state.data(), n, sequence) != n)
        failed_ = "no state";
    }
  }

 private:
  static constexpr int kBatch = 2048;

  llama_token random_token() {
    return static_cast<llama_token>(random_() % static_cast<uint32_t>(words_));
  }
  int next(int s) { return llama_memory_seq_pos_max(llama_get_memory(sides_[1].context), s) + 1; }
  void add(int s, llama_token token, bool output) {
    const int i = batch_.n_tokens++;
    int already = 0;
    for (int j = 0; j < i; ++j) already += batch_.seq_id[j][0] == s ? 1 : 0;
    batch_.token[i] = token;
    batch_.pos[i] = next(s) + already;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = s;
    batch_.logits[i] = static_cast<int8_t>(output);
  }
  void decode() {
    std::array<int, 2> results{};
    for (size_t i = 0; i < 2; ++i) results[i] = llama_decode(sides_[i].context, batch_);
    if (results[0] != 0 || results[1] != 0) {
      failed_ = "llama_decode returned " + std::to_string(results[0]) + " with Keyhole, " +
                std::to_string(results[1]) + " without";
    } else {
      for (int i = 0; i < batch_.n_tokens; ++i) {
        if (batch_.logits[i] == 0) continue;
        const float* plain = llama_get_logits_ith(sides_[1].context, i);
        figures_.add(divergence(plain, llama_get_logits_ith(sides_[0].context, i), words_));
        if (plain == nullptr) continue;
        best_[static_cast<size_t>(batch_.seq_id[i][0])] =
            static_cast<llama_token>(std::max_element(plain, plain + words_) - plain);
      }
    }
    batch_.n_tokens = 0;
  }

  std::mt19937 random_{7};
  std::array<Side, 2> sides_;
  double allowed_;
  int words_ = 0;
  llama_batch batch_{};
  std::array<llama_token, 16> best_{};
  Figures figures_;
  std::string failed_;
  int failures_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) fail("llama-turns-check MODEL TOKENS ALLOWED [CARDS]");
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        const std::string line = text;
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) std::fputs(text, stderr);
        if (level == GGML_LOG_LEVEL_INFO && line.starts_with("keyhole:")) std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  const int n = std::atoi(argv[2]);
  const double allowed = std::atof(argv[3]);
  const bool has_card = ggml_backend_dev_by_name("KEYHOLE0") != nullptr;
  std::vector<std::string> ours;
  std::vector<std::string> theirs;
  const int cards = argc > 4 ? std::atoi(argv[4]) : 1;
  for (int i = 0; i < cards && has_card; ++i) {
    ours.push_back("KEYHOLE" + std::to_string(i));
    theirs.push_back("CUDA" + std::to_string(i));
  }
  if (!has_card) ours.emplace_back("KEYHOLE");
  const Side with{load(argv[1], ours), nullptr};
  const Side without{load(argv[1], theirs), nullptr};
  // The state of a recurrent layer holds all tokens, and none can be taken out of it.
  const bool can_go_back =
      !llama_model_is_hybrid(with.model) && !llama_model_is_recurrent(with.model);
  int failures = 0;
  {
    Check one(with, without, 1, true, static_cast<uint32_t>(2 * n + 4096), allowed);
    one.prompt(0, n);
    one.report("a prompt");
    one.save_and_restore(0);
    one.steps({0}, 1);
    one.report("saved and restored, a step");
    one.steps({0}, 150);
    one.report("steps");
    if (can_go_back) {
      one.drafts(0, 12, 4);
      one.report("drafts of 4");
      one.steps({0}, 20);
      one.report("steps behind them");
    }
    one.prompt(0, 700);
    one.report("a second turn");
    one.steps({0}, 40);
    one.report("steps behind it");
    if (can_go_back) {
      one.remove(0, n / 2, -1);
      one.prompt(0, 3);
      one.steps({0}, 20);
      one.report("the end removed, steps");
      one.remove(0, n / 4, n / 4 + 10);
      one.steps({0}, 20);
      one.report("ten removed from the middle, steps");
      one.remove(0, 0, 3);
      one.steps({0}, 20);
      one.report("three removed from the beginning, steps");
      one.remove(0, 4, n / 4);
      one.shift(0, n / 4 + 10, 4 - n / 4);
      one.steps({0}, 20);
      one.drafts(0, 4, 4);
      one.report("a context shift, steps and drafts");
      one.prompt(0, 300);
      one.steps({0}, 20);
      one.report("a turn behind it");
    }
    one.clear(false);
    one.prompt(0, n / 2);
    one.steps({0}, 20);
    one.report("another text");
    one.clear(true);
    one.prompt(0, n / 3);
    one.steps({0}, 20);
    one.report("another one, cleared");
    failures += one.failures();
  }
  for (const bool unified : {true, false}) {
    Check many(with, without, 4, unified, static_cast<uint32_t>(4 * n + 4096), allowed);
    many.prompt(2, n / 8);
    many.steps({2}, 3);
    many.report("a short text");
    many.prompt(0, n);
    many.prompt(1, n / 2);
    many.report(unified ? "two prompts" : "two prompts, streams");
    many.steps({0, 1}, 20);
    many.report("steps of both");
    // In another order llama.cpp alone gives a hybrid's sequences answers that change from run to run.
    many.steps(can_go_back ? std::vector<int>{1, 2, 0} : std::vector<int>{0, 1, 2}, 20);
    many.report("and of the short one");
    many.remove(2, -1, -1);
    many.steps({0, 1}, 3);
    many.report("it has ended, steps of the others");
    many.mixed_prompt({2, 3}, 100);
    many.steps({2, 3}, 10);
    many.report("two short ones side by side");
    many.copy(0, 2);
    many.steps({0, 1, 2}, 20);
    many.report("a copy, steps of three");
    many.prompt(1, 300);
    many.steps({1, 2}, 20);
    many.report("a turn of one, steps of two");
    if (can_go_back) {
      many.drafts_of({0, 1, 2}, 12);
      many.report("drafts of three at once");
      many.remove(0, 0, 1);  // others' steps take its cell
      many.steps({1, 2}, 3);
      many.steps({0, 1}, 10);
      many.report("one without its first token, steps of both");
      many.remove(0, 8, n / 2);
      many.shift(0, n / 2, 8 - n / 2);
      many.steps({0, 1}, 20);
      many.report("one shifted, steps of both");
    }
    failures += many.failures();
  }
  llama_model_free(with.model);
  llama_model_free(without.model);
  std::printf("%d parts failed\n", failures);
  return failures == 0 ? 0 : 1;
}
