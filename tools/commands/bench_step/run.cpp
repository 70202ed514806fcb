#include "tools/commands/bench_step/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "tools/commands/bench_step/step_runner.h"
#include "tools/llama/team.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens that are made and handed over at once: 16 MiB of keys and values of 8 heads of 128, 32 MiB of queries.
constexpr uint64_t kChunk = 4096;
// Of the ring that layers are streamed from: four times what a last-level cache holds, and two layers at 128k.
constexpr uint64_t kRing = uint64_t{1} << 30U;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct BuildBar {
  Progress bar;
  static int32_t callback(void* user, double fraction, const char* /*what*/) {
    static_cast<BuildBar*>(user)->bar.update(fraction);
    return interrupted() ? 1 : 0;
  }
};

keyhole_tensor tokens_tensor(const uint16_t* data, size_t tokens, uint32_t heads, uint32_t dim) {
  const int64_t shape[] = {static_cast<int64_t>(tokens), heads, dim};
  return keyhole_tensor_host(data, KEYHOLE_F16, 3, shape);
}

}  // namespace

Latency latency_of(std::vector<double> sample) {
  if (sample.empty()) return {};
  std::sort(sample.begin(), sample.end());
  const auto quantile = [&](double p) {
    const auto rank = static_cast<size_t>(std::ceil(p * static_cast<double>(sample.size())));
    return sample[std::max<size_t>(rank, 1) - 1];
  };
  const double sum = std::accumulate(sample.begin(), sample.end(), 0.0);
  return {sum / static_cast<double>(sample.size()), quantile(0.5), quantile(0.95), quantile(0.99)};
}

class StepBench::Impl {
 public:
  Impl(const HeadSource& source, StepPlan plan, StepListener listener)
      : source_(source),
        plan_(std::move(plan)),
        listener_(std::move(listener)),
        team_(std::min(plan_.threads, 64U)) {
    make_engine_of_plan();
    for (const std::string& spec : plan_.indexes) {
      try {
        (void)make_index(engine_, spec, 0, 0);
      } catch (const LibraryError& e) {
        if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
        throw UsageError("--index " + spec + ": " + e.what());
      }
    }
    partition_ = common_partition(plan_.budgets);
    // Budgets that need partitions come last: those before them are measured without any in memory.
    std::stable_sort(plan_.budgets.begin(), plan_.budgets.end(),
                     [](const BudgetChoice& a, const BudgetChoice& b) {
                       return !a.needs_partitions() && b.needs_partitions();
                     });
    // Of every head of the source one that is audited at least, where there are so many.
    const uint32_t kv = plan_.shape.kv_heads;
    audited_layers_ = std::min(plan_.shape.layers, (source.heads() + kv - 1) / kv);
  }

  void run() {
    floors_.layer_bytes = 2 * sizeof(uint16_t) * plan_.context * plan_.shape.kv_elements();
    Session session = create(config(false));
    Session audited;
    if (plan_.audit_steps != 0) audited = create(config(true));
    make_stream();
    fill(session, audited);
    make_runner();
    measure_floors();
    for (const std::string& index : plan_.indexes) measure_index(session, audited, index);
    audited.reset();
    compare(session);
    session.reset();
    if (plan_.compare_full && stream_) compare_full();
  }

  const HeadSource& source_;
  StepPlan plan_;
  StepListener listener_;
  StepFloors floors_;
  keyhole_engine_config effective_{};

  [[nodiscard]] bool stream_steps() const {
    return effective_.device == KEYHOLE_DEVICE_CUDA && !plan_.blocking;
  }

 private:
  // ---- Preparation ---------------------------------------------------------------------------------

  void make_engine_of_plan() {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    config.layers = plan_.shape.layers;
    config.q_heads = plan_.shape.q_heads;
    config.kv_heads = plan_.shape.kv_heads;
    config.head_dim = plan_.shape.head_dim;
    config.kv_dtype = KEYHOLE_F16;
    config.scale = source_.scale();
    config.softcap = source_.softcap();
    config.device = plan_.device;
    config.device_ordinal = plan_.device_ordinal;
    config.signal = plan_.signal;
    config.threads = plan_.threads;
    config.log = [](void* user, int32_t level, const char* text) {
      if (level >= KEYHOLE_LOG_WARNING) static_cast<Impl*>(user)->listener_.log(text);
    };
    config.log_user = this;
    engine_ = make_engine(config);
    keyhole_engine_config_init(&effective_);
    check(keyhole_engine_get_config(engine_.get(), &effective_));
  }

  [[nodiscard]] uint32_t context() const { return static_cast<uint32_t>(plan_.context); }
  [[nodiscard]] uint32_t tokens() const { return plan_.warmup + plan_.steps; }

  // The session to be timed, or the one that is audited: an audit would take the time that is measured.
  [[nodiscard]] keyhole_session_config config(bool audited) const {
    keyhole_session_config config;
    keyhole_session_config_init(&config);
    config.max_tokens = static_cast<uint32_t>(plan_.context + tokens());
    config.sink = plan_.sink;
    config.window = plan_.window;
    config.index = plan_.indexes.front().c_str();
    config.training_queries = plan_.training_queries;
    config.tail_partition = partition_;
    config.host_memory_limit = audited ? 0 : plan_.host_cap;
    config.partitions = plan_.partitions;
    if (audited) config.audit_share = 1;
    if (plan_.device_cap != 0 && !audited) {
      const uint64_t weights = weight_bytes(stream_shape());
      if (weights >= plan_.device_cap) {
        throw UsageError("--device-cap " + format_bytes(plan_.device_cap) +
                         " has no room beside the weights, " + format_bytes(weights));
      }
      config.device_memory_limit = plan_.device_cap - weights;
    }
    return config;
  }

  [[nodiscard]] Session create(const keyhole_session_config& config) const {
    return make_session(engine_, config);
  }

  [[nodiscard]] TokenStreamShape stream_shape() const {
    const StepShape& s = plan_.shape;
    TokenStreamShape shape;
    shape.layers = s.layers;
    shape.q_heads = s.q_heads;
    shape.kv_heads = s.kv_heads;
    shape.head_dim = s.head_dim;
    shape.tokens = tokens();
    shape.ordinal = static_cast<int>(plan_.device_ordinal);
    shape.weights = plan_.weights;
    // The proportions of Llama-3-8B, whose hidden size is 4096.
    shape.hidden = s.q_heads * s.head_dim;
    shape.intermediate = shape.hidden * 7 / 2;
    shape.vocabulary = 128256;
    return shape;
  }

  void make_stream() {
    if (!stream_steps()) return;
    const auto start = Clock::now();
    stream_ = make_token_stream(stream_shape());
    floors_.device = stream_->device();
    floors_.weight_bytes = weight_bytes(stream_shape());
    if (plan_.weights) tell("weights", start);
  }

  void make_runner() {
    host_runner_ = make_host_runner(inputs_);
    runner_ = stream_ ? make_stream_runner(inputs_, *stream_) : make_host_runner(inputs_);
  }

  void tell(const std::string& phase, Clock::time_point start) const {
    listener_.phase({phase, seconds_since(start)});
  }

  // Fills both sessions, the second one's first layers, and notes what the steps will bring.
  void fill(const Session& session, const Session& audited) {
    const auto start = Clock::now();
    inputs_.shape = plan_.shape;
    inputs_.tokens = tokens();
    inputs_.rows.resize(size_t{tokens()} * plan_.shape.layers * plan_.shape.token_elements());
    double making = 0;
    Progress bar("prefill");
    for (uint32_t layer = 0; layer < plan_.shape.layers; ++layer) {
      const auto begin = Clock::now();
      LayerData data = layer_data(layer);
      for (uint32_t token = 0; token < tokens(); ++token) {
        data.step(token, inputs_.at(token, layer));
      }
      making += seconds_since(begin);
      making += fill_layer(
          data, true,
          [&](const keyhole_tensor& k, const keyhole_tensor& v, const keyhole_tensor* q) {
            check(keyhole_prefill(session.get(), layer, &k, &v, q));
            if (audited && layer < audited_layers_) {
              check(keyhole_prefill(audited.get(), layer, &k, &v, q));
            }
          });
      bar.update(static_cast<double>(layer + 1) / plan_.shape.layers);
    }
    listener_.phase({"data", making});
    listener_.phase({"prefill", seconds_since(start) - making});
  }

  [[nodiscard]] LayerData layer_data(uint32_t layer) {
    return LayerData(source_, plan_.shape, plan_.turn, plan_.seed, layer, plan_.context, team_);
  }

  // Hands a layer over chunk by chunk; returns the seconds that making it took.
  template <class Take>
  double fill_layer(LayerData& data, bool with_queries, Take&& take) {
    const StepShape& shape = plan_.shape;
    k_.resize(kChunk * shape.kv_elements());
    v_.resize(kChunk * shape.kv_elements());
    if (with_queries) q_.resize(kChunk * shape.q_elements());
    double making = 0;
    for (uint64_t first = 0; first < plan_.context; first += kChunk) {
      throw_if_interrupted();
      const size_t n = std::min(kChunk, plan_.context - first);
      const auto begin = Clock::now();
      data.rows(first, n, k_.data(), v_.data());
      const bool has_queries =
          with_queries && plan_.training_queries != 0 && data.queries(first, n, q_.data());
      making += seconds_since(begin);
      const keyhole_tensor k = tokens_tensor(k_.data(), n, shape.kv_heads, shape.head_dim);
      const keyhole_tensor v = tokens_tensor(v_.data(), n, shape.kv_heads, shape.head_dim);
      const keyhole_tensor q = tokens_tensor(q_.data(), n, shape.q_heads, shape.head_dim);
      take(k, v, has_queries ? &q : nullptr);
    }
    return making;
  }

  // ---- Measurements --------------------------------------------------------------------------------

  void measure_floors() {
    if (!stream_) return;
    floors_.copy_bandwidth = stream_->copy_bandwidth();
    if (!plan_.weights) return;
    std::vector<double> times;
    for (uint32_t round = 0; round < 12; ++round) {
      stream_->begin_token();
      for (uint32_t layer = 0; layer < plan_.shape.layers; ++layer) {
        (void)stream_->begin_layer(0, layer);
        stream_->end_layer(layer);
      }
      stream_->end_token();
      stream_->synchronize();
      std::vector<float> attends(plan_.shape.layers);
      float token = 0;
      stream_->read_clocks(plan_.shape.layers, attends.data(), token);
      if (round >= 2) times.push_back(token);
    }
    floors_.dense = latency_of(times);
  }

  void measure_index(const Session& session, const Session& audited, const std::string& index) {
    bool built = false;
    std::string failure;
    double build_seconds = 0;
    try {
      build_seconds = build(
          session, &index,
          plan_.budgets.front().needs_partitions() ? without_partitions() : plan_.budgets.front());
      built = true;
    } catch (const LibraryError& e) {
      if (interrupted()) throw;
      failure = e.what();
    }
    bool audit_built = false;
    for (const BudgetChoice& budget : plan_.budgets) {
      StepResult result;
      result.index = index;
      result.attend = budget.attend.text();
      result.tail = budget.tail.text();
      result.target = budget.target.text();
      result.name = index + " " + budget.text();
      if (!budget.target.any() && budget.target.min_keys != 0) {
        result.min_keys = budget.target.min_keys;
        result.name += " min=" + std::to_string(result.min_keys);
      }
      result.build_seconds = std::exchange(build_seconds, 0);
      result.note = failure;
      if (built) measure_budget(session, audited, budget, index, audit_built, result);
      listener_.result(result);
    }
  }

  void measure_budget(const Session& session, const Session& audited, const BudgetChoice& budget,
                      const std::string& index, bool& audit_built, StepResult& result) {
    try {
      result.tail_seconds = build(session, nullptr, budget);
      result.timing = measure(session);
      if (audited) {
        (void)build(audited, audit_built ? nullptr : &index, budget);
        audit_built = true;
        result.audit = audit(audited);
        if (stream_) result.stream_error = stream_error(audited);
      }
    } catch (const std::exception& e) {
      if (interrupted()) throw;
      result.note = e.what();
      // What a failed step left behind goes; a failure of this says nothing new.
      for (keyhole_session* failed : {session.get(), audited.get()}) {
        if (failed == nullptr) continue;
        const keyhole_status status = keyhole_truncate(failed, context());
        (void)status;
      }
    }
  }

  // Indexes built first have no partitions, so that the two are timed apart.
  [[nodiscard]] BudgetChoice without_partitions() const {
    BudgetChoice choice;
    choice.attend = plan_.budgets.front().attend;
    if (choice.attend.mode == KEYHOLE_ATTEND_NONE) choice.attend.mode = KEYHOLE_ATTEND_TOPK;
    return choice;
  }

  // Gives all heads the index (null: that which they have) and the budget; returns the seconds that it takes to
  // build what is missing.
  static double build(const Session& session, const std::string* index,
                      const BudgetChoice& budget) {
    const auto start = Clock::now();
    if (index != nullptr) check(keyhole_session_set_index(session.get(), index->c_str()));
    const keyhole_budget values = budget.budget();
    check(keyhole_session_set_budget(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &values));
    BuildBar bar{Progress("build")};
    const keyhole_status status = keyhole_build(session.get(), BuildBar::callback, &bar);
    throw_if_interrupted();
    check(status);
    return seconds_since(start);
  }

  StepTiming measure(const Session& session) {
    StepTiming timing;
    std::vector<double> layers;
    std::vector<double> tokens_on_host;
    std::vector<double> tokens_on_device;
    runner_->use(session.get());
    const uint32_t n = plan_.shape.layers;
    // A graph's first launches are slower, too.
    const uint32_t captured_at = plan_.graph ? plan_.warmup / 2 : tokens();
    for (uint32_t token = 0; token < tokens(); ++token) {
      throw_if_interrupted();
      if (token == captured_at) runner_->capture(session.get(), n);
      if (token == plan_.warmup) check(keyhole_reset_statistics(session.get()));
      const TokenTimes times = runner_->run(session.get(), token, n);
      if (token < plan_.warmup) continue;
      layers.insert(layers.end(), times.layers.begin(), times.layers.end());
      tokens_on_host.push_back(times.token);
      if (times.device != 0) tokens_on_device.push_back(times.device);
    }
    check_outputs(*runner_, n);
    timing.layer = latency_of(std::move(layers));
    timing.token = latency_of(std::move(tokens_on_host));
    timing.token_on_device = latency_of(std::move(tokens_on_device));
    keyhole_statistics_init(&timing.statistics);
    check(keyhole_get_statistics(session.get(), &timing.statistics));
    check(keyhole_truncate(session.get(), context()));
    return timing;
  }

  [[nodiscard]] uint32_t audited_tokens() const { return std::min(plan_.audit_steps, tokens()); }

  // Steps on a stream are not audited, but those with tensors in host memory do the same.
  keyhole_audit audit(const Session& session) {
    check(keyhole_reset_statistics(session.get()));
    for (uint32_t token = 0; token < audited_tokens(); ++token) {
      throw_if_interrupted();
      (void)host_runner_->run(session.get(), token, audited_layers_);
    }
    keyhole_audit figures;
    keyhole_audit_init(&figures);
    check(keyhole_get_audit(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &figures));
    check(keyhole_truncate(session.get(), context()));
    return figures;
  }

  // All but the choice of partitions on a device, and its arithmetic: hence these.
  Latency stream_error(const Session& session) {
    runner_->use(session.get());
    std::vector<double> errors;
    for (uint32_t token = 0; token < audited_tokens(); ++token) {
      throw_if_interrupted();
      (void)runner_->run(session.get(), token, audited_layers_);
      for (uint32_t layer = 0; layer < audited_layers_; ++layer) {
        for (const double error : output_errors(*runner_, inputs_, session.get(), token, layer)) {
          errors.push_back(error);
        }
      }
    }
    check(keyhole_truncate(session.get(), context()));
    return latency_of(std::move(errors));
  }

  // ---- Comparisons ---------------------------------------------------------------------------------

  void compare(const Session& session) {
    if (plan_.compare_resident) {
      compare_mode(session, "resident tokens alone", KEYHOLE_MODE_RESIDENT,
                   "an attend whose search is empty: what the hand-off costs");
    }
    if (plan_.compare_full && !stream_) {
      compare_mode(session, "full attention, host", KEYHOLE_MODE_EXACT, "");
    }
    if (plan_.compare_pcie) compare_pcie();
  }

  void compare_mode(const Session& session, const std::string& name, keyhole_mode mode,
                    const std::string& note) {
    StepResult result;
    result.name = name;
    result.comparison = true;
    result.note = note;
    try {
      check(keyhole_session_set_mode(session.get(), mode, 0));
      result.timing = measure(session);
      check(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 0));
    } catch (const std::exception& e) {
      if (interrupted()) throw;
      result.note = std::string("not measured: ") + e.what();
    }
    listener_.result(result);
  }

  void compare_pcie() {
    StepResult result;
    result.name = "K and V over PCIe";
    result.comparison = true;
    if (!stream_) {
      result.note = "not measured: no stream steps on a CUDA device";
      listener_.result(result);
      return;
    }
    try {
      floors_.host_copy_bandwidth = stream_->host_copy_bandwidth(floors_.layer_bytes, kRing);
    } catch (const std::exception& e) {
      result.note = std::string("not measured: ") + e.what();
      listener_.result(result);
      return;
    }
    const double us = 1e6 * static_cast<double>(floors_.layer_bytes) / floors_.host_copy_bandwidth;
    StepTiming timing;
    timing.layer = {us, us, us, us};
    const double token = us * plan_.shape.layers;
    timing.token = {token, token, token, token};
    keyhole_statistics_init(&timing.statistics);
    result.timing = timing;
    result.note = format_bytes(floors_.layer_bytes) + " a layer from pinned memory at " +
                  format_number(1e-9 * floors_.host_copy_bandwidth) +
                  " GB/s; the copies alone, without attention to them and without weights";
    listener_.result(result);
  }

  // A session whose window holds all: attended on the device, exactly.
  void compare_full() {
    StepResult result;
    result.name = "full attention, " + floors_.device;
    result.comparison = true;
    try {
      keyhole_session_config config = this->config(false);
      config.sink = 0;
      config.window = config.max_tokens;
      config.mode = KEYHOLE_MODE_EXACT;
      config.training_queries = 0;
      config.device_memory_limit = 0;
      config.host_memory_limit = 0;
      const Session session = create(config);
      const auto start = Clock::now();
      {
        Progress bar("prefill of full attention");
        for (uint32_t layer = 0; layer < plan_.shape.layers; ++layer) {
          LayerData data = layer_data(layer);
          (void)fill_layer(
              data, false,
              [&](const keyhole_tensor& k, const keyhole_tensor& v, const keyhole_tensor*) {
                check(keyhole_prefill(session.get(), layer, &k, &v, nullptr));
              });
          bar.update(static_cast<double>(layer + 1) / plan_.shape.layers);
        }
      }
      tell("prefill of full attention", start);
      result.timing = measure(session);
    } catch (const std::exception& e) {
      if (interrupted()) throw;
      result.note = std::string("not measured: ") + e.what();
    }
    listener_.result(result);
  }

  Engine engine_;
  Team team_;
  std::unique_ptr<TokenStream> stream_;
  StepInputs inputs_;
  std::unique_ptr<StepRunner> runner_, host_runner_;
  std::vector<uint16_t> k_, v_, q_;  // a chunk
  uint32_t partition_ = 0;
  uint32_t audited_layers_ = 0;
};

StepBench::StepBench(const HeadSource& source, StepPlan plan, StepListener listener)
    : impl_(std::make_unique<Impl>(source, std::move(plan), std::move(listener))) {}
StepBench::~StepBench() = default;

void StepBench::run() { impl_->run(); }
const StepPlan& StepBench::plan() const { return impl_->plan_; }
const StepFloors& StepBench::floors() const { return impl_->floors_; }
std::string StepBench::cpu_level() const { return impl_->effective_.cpu_level; }
bool StepBench::stream_steps() const { return impl_->stream_steps(); }

}  // namespace keyhole::tools
