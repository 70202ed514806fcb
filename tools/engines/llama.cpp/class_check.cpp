// Answers of small random models of many classes, with the cache in Keyhole and with llama.cpp alone: prompts in
// batches, steps of two sequences, drafts of which some are taken back, a copied sequence.
//   llama-class-check [-v] [--codes] [--on-cpu WEIGHTS] [NAME|FILE.gguf ...]
// NAME is one of the built-in classes (default: all of them), FILE.gguf any model. GGML_BACKEND_PATH names the
// backend, KEYHOLE_GGML its settings; a backend for cards has the first one; llama.cpp alone computes on the CPU.
// WEIGHTS, a regular expression, names weights that llama.cpp computes with on the CPU then. An answer's error is
// the root mean square of what its logits differ by, over their own spread; printed is the largest. Beside it are
// those of llama.cpp alone: `threads`, with one thread in the place of two; `batch`, with others; `flash`, of flash
// attention, whose sums are in f16; `past`, where the first tokens of the prompts are other ones. Exact attention
// may have an error as large as that of flash attention (half as much again where llama.cpp attends in some layers),
// or 0.0025 where llama.cpp has no other way to compare that with. --codes: codes may have an eighth of `past`, and
// no error that exact attention might have, as then nothing is attended by them; heads of the built-in classes are
// flat, since in sharp ones of so few tokens codes cannot tell which weigh, and all are read exactly. Exits with 1
// where an error is not so, where fewer or more layers lie in Keyhole than the class has for it, or where no line of
// the log says why layers are left to llama.cpp.
#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/random_models.h"

namespace keyhole::llama_cpp {
namespace {

constexpr uint32_t kSeed = 20261126;
constexpr int kContext = 1024;  // of each sequence
constexpr int kBatch = 512;
/// How many times the error of flash attention exact attention may have. It has half of it at most where all layers are
/// Keyhole's, three quarters where llama.cpp attends in some, by flash attention.
constexpr double kWhole = 1;
constexpr double kParts = 1.5;
/// The error that exact attention may have where llama.cpp attends by flash attention alone, so that nobody knows what
/// error that has.
constexpr double kUnknown = 0.0025;
/// The part of what forgetting the past costs that codes may.
constexpr double kCodes = 8;

/// What the log has said: lines of Keyhole's, and those that say why something failed.
struct Log {
  std::set<std::string> lines;
  std::string errors;
  bool loud = false;
};

void take_line(ggml_log_level level, const char* text, void* user) {
  Log& log = *static_cast<Log*>(user);
  std::string line = text;
  if (log.loud) std::fputs(text, stderr);
  if (level == GGML_LOG_LEVEL_ERROR) log.errors += line;
  if (!line.starts_with("keyhole: ")) return;
  line.erase(0, 9);
  line.erase(line.find_last_not_of('\n') + 1);
  log.lines.insert(line);
}

/// How llama.cpp is asked to work.
struct Way {
  bool keyhole = false;
  int threads = 2;
  int batch = 128;  // tokens that are computed at once
  bool flash = true;
  bool unified = false;
  bool other_beginning = false;
  bool whole_texts = false;  // two batches, as where texts are embedded, in the place of all others
  bool causal = true;        // else every token of a batch sees all of them
  float spread = kSharp;     // of the scores of attention
  const char* on_cpu = nullptr;  // the weights that stay there, by a regular expression; NULL: none
};

/// On the first card; where there is none, the device on the CPU. NULL: the backend was not loaded.
ggml_backend_dev_t keyhole_device() {
  ggml_backend_dev_t card = ggml_backend_dev_by_name("KEYHOLE0");
  return card != nullptr ? card : ggml_backend_dev_by_name("KEYHOLE");
}

using Answers = std::vector<std::vector<float>>;

class Model {
 public:
  Model(const std::string& name, const Way& way) : way_(way) {
    llama_model_params params = llama_model_default_params();
    std::array<ggml_backend_dev_t, 2> devices{way.keyhole ? keyhole_device() : nullptr, nullptr};
    if (way.keyhole && devices[0] == nullptr) {
      throw std::runtime_error("GGML_BACKEND_PATH names no libggml-keyhole.so");
    }
    params.devices = devices.data();
    const std::array<llama_model_tensor_buft_override, 2> on_cpu{
        {{way.on_cpu, ggml_backend_cpu_buffer_type()}, {nullptr, nullptr}}};
    if (way.keyhole && way.on_cpu != nullptr) params.tensor_buft_overrides = on_cpu.data();
    const auto classes = model_classes();
    const auto known = std::find_if(classes.begin(), classes.end(),
                                    [&](const ModelClass& c) { return name == c.name; });
    model_ = known != classes.end() ? make_random_model(*known, kSeed, way.spread, params)
                                    : llama_model_load_from_file(name.c_str(), params);
    if (model_ == nullptr) throw std::runtime_error("the model cannot be made");
    llama_context_params c = llama_context_default_params();
    c.n_ctx = 2 * kContext;
    c.n_batch = kBatch;
    c.n_ubatch = static_cast<uint32_t>(way.batch);
    c.n_seq_max = 2;
    c.kv_unified = way.unified;
    c.swa_full = false;  // as programs have it
    c.n_threads = c.n_threads_batch = way.threads;
    if (!way.causal) c.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    c.flash_attn_type = way.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context_ = llama_init_from_model(model_, c);
    if (context_ == nullptr) {
      llama_model_free(model_);
      throw std::runtime_error("no context");
    }
    words_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    batch_ = llama_batch_init(kBatch, 0, 1);
  }
  ~Model() {
    llama_batch_free(batch_);
    llama_free(context_);
    llama_model_free(model_);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  /// The whole course of calls. All ways make the same.
  Answers run() {
    if (way_.whole_texts) return run_whole_texts();
    std::mt19937 beginning(way_.other_beginning ? 2 : 1);
    random_ = &beginning;
    prompt(0, 250, false);
    prompt(1, 100, false);
    std::mt19937 rest(3);
    random_ = &rest;
    prompt(0, 150, true);
    prompt(1, 60, true);
    for (int i = 0; i < 6; ++i) step({0, 1});
    drafts(0, 5, 3);
    for (int i = 0; i < 3; ++i) step({0});
    copy(0, 1);
    for (int i = 0; i < 4; ++i) step({0, 1});
    prompt(1, 140, true);
    for (int i = 0; i < 3; ++i) step({1, 0});
    return std::move(answers_);
  }

 private:
  Answers run_whole_texts() {
    std::mt19937 texts(4);
    random_ = &texts;
    prompt(0, 120, true);
    prompt(1, 90, true);
    return std::move(answers_);
  }
  llama_memory_t memory() { return llama_get_memory(context_); }

  void add(int sequence, bool output) {
    const int i = batch_.n_tokens++;
    batch_.token[i] = static_cast<llama_token>((*random_)() % static_cast<uint32_t>(words_));
    batch_.pos[i] = next_[static_cast<size_t>(sequence)]++;
    batch_.n_seq_id[i] = 1;
    batch_.seq_id[i][0] = sequence;
    batch_.logits[i] = static_cast<int8_t>(output);
  }
  void decode() {
    const int result = llama_decode(context_, batch_);
    if (result != 0) throw std::runtime_error("llama_decode returned " + std::to_string(result));
    for (int i = 0; i < batch_.n_tokens; ++i) {
      if (batch_.logits[i] == 0) continue;
      const float* logits = llama_get_logits_ith(context_, i);
      answers_.emplace_back(logits, logits + words_);
    }
    batch_.n_tokens = 0;
  }
  void prompt(int sequence, int tokens, bool output) {
    for (int i = 0; i < tokens; ++i) add(sequence, output && i + 1 == tokens);
    decode();
  }
  void step(std::initializer_list<int> sequences) {
    for (const int sequence : sequences) add(sequence, true);
    decode();
  }
  void drafts(int sequence, int tokens, int taken_back) {
    for (int i = 0; i < tokens; ++i) add(sequence, true);
    decode();
    int& next = next_[static_cast<size_t>(sequence)];
    // Models with a recurrent state cannot go back.
    if (llama_memory_seq_rm(memory(), sequence, next - taken_back, -1)) next -= taken_back;
  }
  void copy(int from, int to) {
    llama_memory_seq_rm(memory(), to, -1, -1);
    llama_memory_seq_cp(memory(), from, to, -1, -1);
    next_[static_cast<size_t>(to)] = next_[static_cast<size_t>(from)];
  }

  Way way_;
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  int words_ = 0;
  llama_batch batch_{};
  std::array<int, 2> next_{};
  std::mt19937* random_ = nullptr;
  Answers answers_;
};

/// The largest error of an answer. Infinity where one has a NaN or another length.
double error_of(const Answers& answers, const Answers& right) {
  double worst = answers.size() == right.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(answers.size(), right.size()); ++i) {
    const std::vector<float>& a = answers[i];
    const std::vector<float>& b = right[i];
    double sum = 0;
    double squares = 0;
    double differences = 0;
    for (size_t j = 0; j < b.size(); ++j) {
      sum += b[j];
      squares += double{b[j]} * b[j];
      differences += (double{a[j]} - b[j]) * (double{a[j]} - b[j]);
    }
    const auto n = static_cast<double>(b.size());
    const double error = std::sqrt(differences / (squares - sum * sum / n));
    worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
  }
  return worst;
}

/// Layers that Keyhole has taken, from its lines.
int attended_layers(const Log& log) {
  int layers = 0;
  for (const std::string& line : log.lines) {
    int n = 0;
    int length = 0;
    if (std::sscanf(line.c_str(), "%d layers, %n", &n, &length) == 1 && length > 0) layers += n;
  }
  return layers;
}

Answers answers_of(const std::string& name, const Way& way, Log* log) {
  Log unheard;
  Log& used = log != nullptr ? *log : unheard;
  llama_log_set(take_line, &used);
  std::string failure;
  Answers answers;
  try {
    answers = Model(name, way).run();
  } catch (const std::runtime_error& error) {
    failure = error.what();
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  if (!failure.empty()) throw std::runtime_error(failure + "\n" + used.errors);
  return answers;
}

/// What is wrong with batches whose mask is not causal; "": llama.cpp attends with its own answers, or where there is
/// no copy of the cache it may be refused, with that reason.
std::string error_of_whole_texts(const std::string& name, float spread, bool has_copy,
                                 double largest) {
  const Answers right =
      answers_of(name, {.whole_texts = true, .causal = false, .spread = spread}, nullptr);
  const Answers others = answers_of(name, {.whole_texts = true, .spread = spread}, nullptr);
  if (!(error_of(right, others) > 0.05)) return " THE SAME WITH A CAUSAL MASK";
  try {
    const Way way{.keyhole = true, .whole_texts = true, .causal = false, .spread = spread};
    const double ours = error_of(answers_of(name, way, nullptr), right);
    return ours <= largest ? "" : " WHOLE TEXTS " + std::to_string(ours);
  } catch (const std::runtime_error& problem) {
    const bool is_told = std::strstr(problem.what(), "the mask is not causal") != nullptr;
    return !has_copy && is_told ? "" : std::string(" WHOLE TEXTS ") + problem.what();
  }
}

/// What is asked of all models.
struct Asked {
  bool codes = false;
  bool loud = false;
  const char* on_cpu = nullptr;
  [[nodiscard]] float spread() const { return codes ? kFlat : kSharp; }
};

/// What is known of a model's answers.
struct Errors {
  double ours = 0;     // with Keyhole, a stream of the cache for each sequence
  double unified = 0;  // with Keyhole, one stream for all
  double threads = 0;  // llama.cpp's
  double batch = 0;
  double flash = 0;  // the larger one of both layouts
  double past = 0;
  bool flash_alone = false;  // llama.cpp attends in no other way
};

/// What was said in the runs with Keyhole.
struct Logs {
  Log streams, unified;
};

bool any_line(const Log& log, const char* part) {
  return std::any_of(log.lines.begin(), log.lines.end(),
                     [&](const std::string& line) { return line.find(part) != std::string::npos; });
}

/// `by_flash`: llama.cpp's answers as programs have them.
Errors measure(const std::string& name, const Asked& asked, const Answers& by_flash, Logs& logs) {
  const float spread = asked.spread();
  const auto alone = [&](Way way) {
    way.spread = spread;
    return answers_of(name, way, nullptr);
  };
  bool flash = false;  // sums of flash attention are in f16, so the other way is the more exact one
  Answers right;
  try {
    right = alone({.flash = false});
  } catch (const std::runtime_error&) {  // some classes attend in one way alone
    flash = true;
    right = by_flash;
  }
  const Answers right_unified = alone({.flash = flash, .unified = true});
  Errors e;
  e.flash_alone = flash;
  Way ours{.keyhole = true, .spread = spread, .on_cpu = asked.on_cpu};
  e.ours = error_of(answers_of(name, ours, &logs.streams), right);
  ours.unified = true;
  e.unified = error_of(answers_of(name, ours, &logs.unified), right_unified);
  e.threads = error_of(alone({.threads = 1, .flash = flash}), right);
  e.batch = error_of(alone({.batch = 48, .flash = flash}), right);
  e.flash = std::max(error_of(by_flash, right), error_of(alone({.unified = true}), right_unified));
  e.past = error_of(alone({.flash = flash, .other_beginning = true}), right);
  return e;
}

/// Whether all is as it has to be; prints a line.
bool check(const std::string& name, const Asked& asked) {
  const auto classes = model_classes();
  const auto known = std::find_if(classes.begin(), classes.end(),
                                  [&](const ModelClass& c) { return name == c.name; });
  Answers by_flash;
  try {
    by_flash = answers_of(name, {.spread = asked.spread()}, nullptr);
  } catch (const std::runtime_error& error) {
    std::printf("%-24s llama.cpp alone: %s\n", name.c_str(), error.what());
    return known == classes.end();  // of files there are some that llama.cpp itself cannot run so
  }
  Logs logs;
  logs.streams.loud = logs.unified.loud = asked.loud;
  std::string said;
  try {
    const Errors e = measure(name, asked, by_flash, logs);
    const int layers = attended_layers(logs.streams);
    if (attended_layers(logs.unified) != layers) said += " OTHER LAYERS WHERE UNIFIED";
    // Without a copy a layer that lends its cells to another one is llama.cpp's.
    const char* settings = std::getenv("KEYHOLE_GGML");
    const bool fewer = settings != nullptr && std::strstr(settings, "copy=off") != nullptr;
    if (known != classes.end() &&
        (layers > known->attended || (layers < known->attended && !fewer))) {
      said += " EXPECTED " + std::to_string(known->attended) + " LAYERS";
    }
    const bool left = any_line(logs.streams, "llama.cpp attends");
    if (known != classes.end() && !left && layers != known->cached) {
      said += " NOTHING SAYS WHY";
    }
    for (const Log* log : {&logs.streams, &logs.unified}) {
      if (layers > 0 && !any_line(*log, "several sequences attended together")) {
        said += log == &logs.unified ? " NONE TOGETHER WHERE UNIFIED" : " NONE TOGETHER";
      }
    }
    const bool whole = known != classes.end() && layers == known->cached;
    const double exact = e.flash_alone ? kUnknown : (whole ? kWhole : kParts) * e.flash;
    const double allowed = asked.codes ? std::max(e.past / kCodes, exact) : exact;
    if (!(e.ours <= allowed && e.unified <= allowed)) said += " TOO LARGE";
    if (asked.codes && layers > 0 && std::min(e.ours, e.unified) <= exact) said += " NO CODES";
    if (known != classes.end() && e.past < 0.05) said += " NO PAST";
    if (name == "llama") said += error_of_whole_texts(name, asked.spread(), !fewer, allowed);
    std::printf(
        "%-24s %2d layers  error %.1e, unified %.1e; threads %.1e, batch %.1e, flash %.1e, past "
        "%.1e%s\n",
        name.c_str(), layers, e.ours, e.unified, e.threads, e.batch, e.flash, e.past, said.c_str());
  } catch (const std::runtime_error& problem) {
    said = problem.what();
    std::printf("%-24s %s\n", name.c_str(), said.c_str());
  }
  std::set<std::string> lines = logs.streams.lines;
  lines.merge(logs.unified.lines);
  for (const std::string& line : lines) {
    if (line.find("llama.cpp attends") != std::string::npos) std::printf("    %s\n", line.c_str());
  }
  std::fflush(stdout);
  return said.empty();
}

int run(int argc, char** argv) {
  Asked asked;
  int first = 1;
  for (; first < argc && argv[first][0] == '-'; ++first) {
    const std::string option = argv[first];
    if (option == "-v") {
      asked.loud = true;
    } else if (option == "--codes") {
      asked.codes = true;
    } else if (option == "--on-cpu" && first + 1 < argc) {
      asked.on_cpu = argv[++first];
    } else {
      std::puts("llama-class-check [-v] [--codes] [--on-cpu WEIGHTS] [NAME|FILE.gguf ...]");
      return 2;
    }
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  ggml_backend_load_all();
  llama_backend_init();
  std::vector<std::string> names(argv + first, argv + argc);
  if (names.empty()) {
    for (const ModelClass& c : model_classes()) names.emplace_back(c.name);
  }
  int failed = 0;
  for (const std::string& name : names) {
    failed += static_cast<int>(!check(name, asked));
  }
  std::printf("%zu models, %d of them not as they have to be\n", names.size(), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace keyhole::llama_cpp

int main(int argc, char** argv) { return keyhole::llama_cpp::run(argc, argv); }
