// Random operations on llama.cpp's memory, done twice: in a context whose cache lies in Keyhole, and in one of
// llama.cpp alone. After each the answers are compared. GGML_BACKEND_PATH names the backend, KEYHOLE_GGML its settings.
//   llama-memory-check MODEL TEXT OPERATIONS SEED unified|streams [ALLOWED [all]]
//     OPERATIONS 0: a restored sequence rests while the next prompt comes, and one is shifted that has used few cells.
//     ALLOWED: the largest divergence of an answer, 1e-4 where it is not said.
//     all: some operations are that one sequence alone is kept, and that positions are divided; of each there has to be
//     one at least.
//     TEXT is followed by random tokens where the model makes few of it.
//   llama-memory-check --f32 MODEL    converts the model, and that is all
// The model is converted to f32 first, into MODEL.f32: products of quantised weights with quantised activations turn
// the last bits of attention into divergences of 0.01. The other context attends without flash attention, whose sums
// are in f16. Behind an operation some sequences go on and others rest, which are saved now and then: bit for bit as
// the time before. Exits with 1 where answers differ by more than rounding does or none came, a saved state is not what
// it was, or a call fails in one context alone.
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/divergence.h"

namespace {

using keyhole::llama_cpp::Divergence;
using keyhole::llama_cpp::divergence;

constexpr int kSequences = 3;
constexpr int kContext = 768;  // of each sequence
constexpr int kBatch = 96;
constexpr int kMostDivided =
    256;  // tokens of a sequence whose positions are divided: they stay in their cells
constexpr size_t kFewestTokens = 2000;  // that batches choose from

/// A model and its context: one with Keyhole, one without.
struct Side {
  llama_model* model = nullptr;
  llama_context* context = nullptr;
  std::vector<uint8_t> saved;
};

struct Worst {
  double divergence = 0;
  int compared = 0;
  int other_best = 0;

  void add(const Divergence& one) {
    divergence = std::max(divergence, one.nats);
    other_best += one.same_best ? 0 : 1;
    ++compared;
  }
};

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

/// context: cells of each sequence.
Side open(const std::string& path, bool keyhole, bool unified, int context) {
  Side side;
  llama_model_params model = llama_model_default_params();
  // Where there are cards, both are on the first one.
  ggml_backend_dev_t card = ggml_backend_dev_by_name("KEYHOLE0");
  std::array<ggml_backend_dev_t, 2> devices{};
  if (keyhole) {
    devices[0] = card != nullptr ? card : ggml_backend_dev_by_name("KEYHOLE");
    if (devices[0] == nullptr) fail("GGML_BACKEND_PATH names no libggml-keyhole.so");
  } else if (card != nullptr) {
    devices[0] = ggml_backend_dev_by_name("CUDA0");
  }
  model.devices = devices.data();
  side.model = llama_model_load_from_file(path.c_str(), model);
  if (side.model == nullptr) fail(path + " cannot be loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(kSequences * context);
  params.n_batch = params.n_ubatch = kBatch;
  params.n_seq_max = kSequences;
  params.kv_unified = unified;
  params.n_threads = params.n_threads_batch = 2;
  params.flash_attn_type = keyhole ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  side.context = llama_init_from_model(side.model, params);
  if (side.context == nullptr) fail("no context");
  return side;
}

/// The model with weights in f32.
std::string in_f32(const std::string& path) {
  const std::string converted = path + ".f32";
  if (std::ifstream(converted).good()) return converted;
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  const std::string part = converted + ".part";
  if (llama_model_quantize(path.c_str(), part.c_str(), &params) != 0 ||
      std::rename(part.c_str(), converted.c_str()) != 0) {
    fail(path + " cannot be converted to f32");
  }
  return converted;
}

class Check {
 public:
  Check(const std::string& path, const std::string& text, uint32_t seed, bool unified, bool all)
      : random_(seed),
        unified_(unified),
        all_(all),
        sides_{open(path, true, unified, kContext + (all ? kMostDivided : 0)),
               open(path, false, unified, kContext + (all ? kMostDivided : 0))} {
    const llama_vocab* vocab = llama_model_get_vocab(sides_[0].model);
    words_ = llama_vocab_n_tokens(vocab);
    if (llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE) {
      tokens_.resize(text.size() + 8);
      const int n =
          llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens_.data(),
                         static_cast<int32_t>(tokens_.size()), false, true);
      tokens_.resize(static_cast<size_t>(std::max(n, 0)));
    }
    while (tokens_.size() < kFewestTokens) tokens_.push_back(below(words_));
    batch_ = llama_batch_init(kBatch, 0, 1);
  }
  ~Check() {
    llama_batch_free(batch_);
    for (Side& side : sides_) {
      llama_free(side.context);
      llama_model_free(side.model);
    }
  }
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;

  void operation() {
    last_ = "a step";
    const int s = below(kSequences);
    const int other = (s + 1 + below(kSequences - 1)) % kSequences;
    switch (below(all_ ? 16 : 13)) {
      case 0:
      case 1:
      case 2: return extend(s, 1 + below(kBatch));
      case 3: return remove_end(s);
      case 4: return remove_middle(s);
      case 5: return remove_beginning(s);
      case 6: return shift(s);
      case 7: return copy(s, other);
      case 8: return save_and_restore(s, other);
      case 9: return below(8) == 0 ? (below(2) == 0 ? clear() : begin_anew(s)) : step_some();
      case 10: return drafts(s);
      case 13: return below(3) == 0 ? keep_alone(s) : step_some();
      case 14: return divide(s);
      default: return step_some();
    }
  }
  /// What becomes of sequences that rest.
  void rest() {
    for (int s = 0; s < kSequences; ++s) {
      if (!kept_[static_cast<size_t>(s)].empty() || below(3) == 0) keep(s);
    }
  }
  /// A restored sequence rests while a prompt is filled into the cells of the one before it.
  void restore_and_begin() {
    for (int i = 0; i < 3; ++i) extend(0, kBatch);
    step(1);
    restore(0, 1);
    remove(0, -1, -1);
    extend(0, kBatch / 2);
    note("a step of both");
    step(3);
  }
  /// A sequence is shifted before most of the cells have been used.
  void begin_and_shift() {
    clear();
    extend(0, kBatch);
    step(1);
    shift(0);
    extend(0, kBatch / 2);
  }
  /// All sequences go on, and what rested until then is compared.
  void end() {
    note("a last step of all");
    step(~0U);
  }
  [[nodiscard]] const Worst& worst() const { return worst_; }
  [[nodiscard]] const std::string& last() const { return last_; }
  [[nodiscard]] int rested() const { return rested_; }
  [[nodiscard]] int kept_alone() const { return kept_alone_; }
  [[nodiscard]] int divided() const { return divisions_; }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }
  int next(int s) { return llama_memory_seq_pos_max(llama_get_memory(sides_[0].context), s) + 1; }
  /// What is done, before it is.
  void note(const std::string& what) {
    last_ = what;
    std::printf("%s\n", what.c_str());
    std::fflush(stdout);
  }

  template <class Do>
  void both(const Do& call) {
    std::array<int, 2> results{};
    for (size_t i = 0; i < 2; ++i) results[i] = static_cast<int>(call(sides_[i]));
    if (results[0] != results[1]) {
      fail(last_ + ": " + std::to_string(results[0]) + " with Keyhole, " +
           std::to_string(results[1]) + " without");
    }
  }
  void add(int s, int position, bool output) {
    kept_[static_cast<size_t>(s)].clear();
    const int i = batch_.n_tokens++;
    batch_.token[i] = tokens_[static_cast<size_t>(below(static_cast<int>(tokens_.size())))];
    batch_.pos[i] = position;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = s;
    batch_.logits[i] = static_cast<int8_t>(output);
  }
  void decode() {
    if (batch_.n_tokens == 0) return;
    both([&](Side& side) { return llama_decode(side.context, batch_); });
    for (int i = 0; i < batch_.n_tokens; ++i) {
      if (batch_.logits[i] == 0) continue;
      worst_.add(divergence(llama_get_logits_ith(sides_[1].context, i),
                            llama_get_logits_ith(sides_[0].context, i), words_));
    }
    batch_.n_tokens = 0;
  }
  void extend(int s, int n) {
    n = std::min(n, kContext - 8 - next(s));
    note("extend " + std::to_string(s) + " by " + std::to_string(n));
    const int at = next(s);
    const int from = below(static_cast<int>(tokens_.size()) - kBatch);
    for (int i = 0; i < n; ++i) {
      add(s, at + i, i + 1 == n);
      batch_.token[i] = tokens_[static_cast<size_t>(from + i)];
    }
    decode();
  }
  /// A token for each of these sequences that has any.
  void step(uint32_t which) {
    for (int s = 0; s < kSequences; ++s) {
      if ((which >> static_cast<uint32_t>(s) & 1U) == 0) continue;
      if (next(s) > 0 && next(s) < kContext - 8) add(s, next(s), true);
    }
    decode();
  }
  /// A token for some, at least one: llama.cpp turns shifted keys when the next batch comes, whosever it is.
  void step_some() {
    uint32_t there = 0;
    for (int s = 0; s < kSequences; ++s) {
      if (next(s) > 0 && next(s) < kContext - 8) there |= 1U << static_cast<uint32_t>(s);
    }
    uint32_t which = 0;
    while (there != 0 && (which & there) == 0)
      which = static_cast<uint32_t>(below(1 << kSequences));
    std::printf("  steps of sequences %x\n", which);
    step(which);
  }
  /// Some tokens at once, of which the first few are kept.
  void drafts(int s) {
    if (next(s) == 0 || next(s) > kContext - 16) return;
    const int at = next(s);
    note("drafts of " + std::to_string(s));
    for (int i = 0; i < 5; ++i) add(s, at + i, true);
    decode();
    remove(s, at + 1 + below(5), -1);
  }
  void remove(int s, int from, int to) {
    kept_[static_cast<size_t>(s)].clear();
    if (from < 0 && to < 0) divided_[static_cast<size_t>(s)] = false;
    both([&](Side& side) {
      return llama_memory_seq_rm(llama_get_memory(side.context), s, from, to);
    });
  }
  /// In one stream all other sequences are removed; in several, where each has its own, nothing is.
  void keep_alone(int s) {
    if (next(s) == 0) return;
    note("keep " + std::to_string(s) + " alone");
    ++kept_alone_;
    for (std::vector<uint8_t>& kept : kept_) kept.clear();
    for (int other = 0; other < kSequences && unified_; ++other) {
      if (other != s) divided_[static_cast<size_t>(other)] = false;
    }
    both([&](Side& side) {
      llama_memory_seq_keep(llama_get_memory(side.context), s);
      return 0;
    });
    step_some();
  }
  /// Positions of all tokens, or of the second half, are divided by a number. None of the sequences that are there
  /// then, which all may be copies, is divided again before it has been removed as a whole.
  void divide(int s) {
    if (next(s) < 16 || next(s) > kMostDivided || divided_[static_cast<size_t>(s)]) return;
    const int from = below(2) * next(s) / 2;
    const int by = 2 + below(3);
    note("divide the positions of " + std::to_string(s) + " from " + std::to_string(from) +
         " on by " + std::to_string(by));
    ++divisions_;
    divided_.fill(true);  // copies may share cells
    for (std::vector<uint8_t>& kept : kept_) kept.clear();
    both([&](Side& side) {
      llama_memory_seq_div(llama_get_memory(side.context), s, from, -1, by);
      return 0;
    });
    step_some();
  }
  void remove_end(int s) {
    if (next(s) < 2) return;
    note("remove the end of " + std::to_string(s));
    remove(s, 1 + below(next(s) - 1), -1);
    step_some();
  }
  void remove_middle(int s) {
    if (next(s) < 40) return;
    note("remove from the middle of " + std::to_string(s));
    const int from = 1 + below(next(s) - 20);
    remove(s, from, from + 1 + below(8));
    step_some();
  }
  /// On a card fewer than those whose cells, filled again, are the sign of a sequence that is gone.
  void remove_beginning(int s) {
    if (next(s) < 120) return;
    note("remove the beginning of " + std::to_string(s));
    remove(s, 0, 1 + below(on_card_ ? 31 : 80));
    step_some();
  }
  void shift(int s) {
    if (next(s) < 64) return;
    const int keep = below(8);
    const int n = 8 + below(next(s) / 2);
    note("shift " + std::to_string(s) + " by " + std::to_string(n));
    remove(s, keep, keep + n);
    for (std::vector<uint8_t>& kept : kept_) kept.clear();  // copies may share cells
    both([&](Side& side) {
      llama_memory_seq_add(llama_get_memory(side.context), s, keep + n, -1, -n);
      return 0;
    });
    step_some();
  }
  void copy(int from, int to) {
    if (next(from) == 0) return;
    note("copy " + std::to_string(from) + " to " + std::to_string(to));
    remove(to, -1, -1);
    divided_[static_cast<size_t>(to)] = divided_[static_cast<size_t>(from)];
    both([&](Side& side) {
      llama_memory_seq_cp(llama_get_memory(side.context), from, to, -1, -1);
      return 0;
    });
    step_some();
  }
  void save_and_restore(int from, int to) {
    if (next(from) == 0) return;
    restore(from, to);
    step_some();
  }
  void restore(int from, int to) {
    note("restore the saved " + std::to_string(from) + " as " + std::to_string(to));
    both([&](Side& side) {
      side.saved.resize(llama_state_seq_get_size(side.context, from));
      const size_t n =
          llama_state_seq_get_data(side.context, side.saved.data(), side.saved.size(), from);
      llama_memory_seq_rm(llama_get_memory(side.context), to, -1, -1);
      return n == side.saved.size() &&
             llama_state_seq_set_data(side.context, side.saved.data(), n, to) == n &&
             saved(side, to) == side.saved;
    });
    kept_[static_cast<size_t>(to)].clear();
    divided_[static_cast<size_t>(to)] = divided_[static_cast<size_t>(from)];
  }
  [[nodiscard]] static std::vector<uint8_t> saved(const Side& side, int s) {
    std::vector<uint8_t> bytes(llama_state_seq_get_size(side.context, s));
    bytes.resize(llama_state_seq_get_data(side.context, bytes.data(), bytes.size(), s));
    return bytes;
  }
  /// Saves a sequence, and compares with what was saved of it before, where it has rested since.
  void keep(int s) {
    if (next(s) == 0) return;
    std::vector<uint8_t>& before = kept_[static_cast<size_t>(s)];
    std::vector<uint8_t> now = saved(sides_[0], s);
    if (!before.empty() && before != now) {
      fail(last_ + ": the state of " + std::to_string(s) + ", which rested, has changed");
    }
    rested_ += before.empty() ? 0 : 1;
    before = std::move(now);
  }
  /// All sequences are removed, and one begins.
  void begin_anew(int s) {
    note("begin anew");
    for (int each = 0; each < kSequences; ++each) remove(each, -1, -1);
    extend(s, 1 + below(kBatch));
  }
  void clear() {
    note("clear");
    divided_.fill(false);
    for (std::vector<uint8_t>& kept : kept_) kept.clear();
    both([](Side& side) {
      llama_memory_clear(llama_get_memory(side.context), true);
      return 0;
    });
  }

  std::mt19937 random_;
  bool unified_;
  bool all_;
  std::array<bool, kSequences>
      divided_{};  // positions of a sequence, or of one that it may be a copy of
  std::array<Side, 2> sides_;
  std::vector<llama_token> tokens_;
  bool on_card_ = ggml_backend_dev_by_name("KEYHOLE0") != nullptr;
  int words_ = 0;
  llama_batch batch_{};
  Worst worst_;
  std::string last_;
  std::array<std::vector<uint8_t>, kSequences>
      kept_;        // states of sequences that have not changed since
  int rested_ = 0;  // of these that were compared
  int kept_alone_ = 0, divisions_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--f32") == 0) {
    llama_backend_init();
    (void)in_f32(argv[2]);
    return 0;
  }
  if (argc < 6 || argc > 8 || (argc == 8 && std::strcmp(argv[7], "all") != 0)) {
    fail("llama-memory-check MODEL TEXT OPERATIONS SEED unified|streams [ALLOWED [all]]");
  }
  constexpr double kAllowed = 1e-4;
  const double allowed = argc >= 7 ? std::atof(argv[6]) : kAllowed;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        const bool is_told = level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT;
        if (is_told || std::strncmp(text, "keyhole: ", 9) == 0) std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  std::ifstream file(argv[2]);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const int operations = std::atoi(argv[3]);
  const auto seed = static_cast<uint32_t>(std::atoi(argv[4]));
  Check check(in_f32(argv[1]), text, seed, std::strcmp(argv[5], "unified") == 0, argc == 8);
  double before = 0;
  for (int i = 0; i <= operations; ++i) {
    if (operations == 0) {
      check.restore_and_begin();
      check.begin_and_shift();
    } else if (i < operations) {
      check.operation();
      check.rest();
    } else {
      check.end();
    }
    const Worst& worst = check.worst();
    if (worst.divergence > before) {
      before = worst.divergence;
      std::printf("%4d %-36s divergence %.1e\n", i, check.last().c_str(), before);
    }
    if (before > allowed) fail("answers differ");
  }
  if (check.worst().compared == 0) fail("no answer was compared, which checks nothing");
  std::printf(
      "%d operations, %d answers, worst divergence %.1e, %d with another best token, %d states as "
      "before\n",
      operations, check.worst().compared, before, check.worst().other_best, check.rested());
  if (argc == 8 && (check.kept_alone() == 0 || check.divided() == 0)) {
    fail(std::to_string(check.kept_alone()) + " times one sequence was kept alone, and " +
         std::to_string(check.divided()) +
         " times positions were divided; needed: each at least once");
  }
  return 0;
}
