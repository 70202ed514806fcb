#include "tools/commands/bench_step/run.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tools/commands/bench_step/comparisons.h"
#include "tools/commands/bench_step/context.h"
#include "tools/commands/bench_step/index_build.h"
#include "tools/commands/bench_step/meter.h"
#include "tools/commands/bench_step/report.h"
#include "tools/llama/team.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

TokenStreamShape stream_shape(const StepPlan& plan) {
  const StepShape& s = plan.shape;
  TokenStreamShape shape;
  shape.layers = s.layers;
  shape.q_heads = s.q_heads;
  shape.kv_heads = s.kv_heads;
  shape.head_dim = s.head_dim;
  shape.tokens = plan.tokens();
  shape.ordinal = static_cast<int>(plan.device_ordinal);
  shape.weights = plan.weights;
  // The proportions of Llama-3-8B, whose hidden size is 4096.
  shape.hidden = s.q_heads * s.head_dim;
  shape.intermediate = shape.hidden * 7 / 2;
  shape.vocabulary = 128256;
  return shape;
}

// Device memory of the session, which shares the cap with the weights; 0: no cap.
uint64_t device_limit(const StepPlan& plan) {
  if (plan.device_cap == 0) return 0;
  const uint64_t weights = weight_bytes(stream_shape(plan));
  if (weights >= plan.device_cap) {
    throw UsageError("--device-cap " + format_bytes(plan.device_cap) +
                     " leaves nothing beside the weights, which are " + format_bytes(weights));
  }
  return plan.device_cap - weights;
}

StepResult result_of(const StepRun& run, const BudgetChoice& budget) {
  StepResult result;
  result.series = run.series;
  result.index = run.index;
  result.attend = budget.attend.text();
  result.tail = budget.tail.text();
  result.target = budget.target.text();
  result.name = run.index + " " + budget.text();
  if (!budget.target.any() && budget.target.min_keys != 0) {
    result.min_keys = budget.target.min_keys;
  }
  return result;
}

}  // namespace

class StepBench::Impl {
 public:
  Impl(const HeadSource& source, StepPlan plan, StepListener listener)
      : source_(source),
        plan_(std::move(plan)),
        listener_(std::move(listener)),
        team_(std::min(plan_.threads, 64U)) {
    make_engine_of_plan();
    refuse_what_needs_a_stream();
    std::vector<BudgetChoice> budgets;
    for (StepRun& run : plan_.runs) {
      budgets.insert(budgets.end(), run.budgets.begin(), run.budgets.end());
      // Budgets that need partitions come last: those before them are measured without any in memory.
      std::stable_sort(run.budgets.begin(), run.budgets.end(),
                       [](const BudgetChoice& a, const BudgetChoice& b) {
                         return !a.needs_partitions() && b.needs_partitions();
                       });
      if (run.index == kAutoIndex) continue;
      try {
        (void)make_index(engine_, run.index, 0, 0);
      } catch (const LibraryError& e) {
        if (e.status() != KEYHOLE_INVALID_ARGUMENT) throw;
        throw UsageError("--index " + run.index + ": " + e.what());
      }
    }
    partition_ = common_partition(budgets);
    // Audits at least one head made of each head of the source, where there are so many.
    const uint32_t kv = plan_.shape.kv_heads;
    audited_layers_ = std::min(plan_.shape.layers, (source.heads() + kv - 1) / kv);
  }

  void run() {
    floors_.layer_bytes = 2 * sizeof(uint16_t) * plan_.context * plan_.shape.kv_elements();
    Session session = make_session(engine_, config(false));
    Session audited;
    if (plan_.audit_steps != 0) audited = make_session(engine_, config(true));
    make_stream();
    ContextFeed context(source_, plan_, team_);
    fill(context, session, audited);
    meter_.emplace(plan_, inputs_, stream_.get());
    measure_floors();
    for (const StepRun& run : plan_.runs) measure_run(session, audited, run);
    audited.reset();
    const StepComparisons comparisons(plan_, *meter_, stream_.get(), floors_, listener_);
    const std::string share = plan_.ranks.share_of_comparison();
    if (plan_.compare_resident) {
      comparisons.attend_by(KEYHOLE_MODE_RESIDENT, session, "resident tokens alone",
                            "an attend whose search is empty: what the hand-off costs" +
                                (share.empty() ? "" : "; " + share));
    }
    if (plan_.compare_full && !stream_) {
      comparisons.attend_by(KEYHOLE_MODE_EXACT, session, "full attention, host", share);
    }
    if (plan_.compare_pcie) comparisons.copy_over_pcie();
    for (const KvFormat format : plan_.compare_formats) comparisons.format_floor(format);
    session.reset();
    if (plan_.compare_full && stream_) {
      comparisons.attend_on_device(engine_, config(false), context);
    }
  }

  [[nodiscard]] bool stream_steps() const {
    return effective_.device == KEYHOLE_DEVICE_CUDA && !plan_.blocking;
  }
  [[nodiscard]] const StepPlan& plan() const { return plan_; }
  [[nodiscard]] const StepFloors& floors() const { return floors_; }
  [[nodiscard]] std::string cpu_level() const { return effective_.cpu_level; }
  [[nodiscard]] uint32_t context_block() const { return effective_.context_block; }

 private:
  void make_engine_of_plan() {
    keyhole_engine_config config;
    keyhole_engine_config_init(&config);
    const StepShape shape = plan_.own_shape();
    config.layers = shape.layers;
    config.q_heads = shape.q_heads;
    config.kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    plan_.ranks.put_into(config);
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
    plan_.ranks.check_context(plan_.context, effective_.context_block,
                              uint64_t{plan_.sink} + plan_.window);
  }

  // A rank's audit sees the rank's tokens alone.
  [[nodiscard]] bool audits() const { return !plan_.ranks.by_tokens(); }

  // The config of the session to be timed, or of the one that is audited: an audit would take the time that is
  // measured.
  [[nodiscard]] keyhole_session_config config(bool audited) const {
    keyhole_session_config config;
    keyhole_session_config_init(&config);
    config.max_tokens = static_cast<uint32_t>(plan_.context + plan_.tokens());
    config.sink = plan_.sink;
    config.window = plan_.window;
    config.index = plan_.runs.front().index.c_str();
    config.training_queries = plan_.training_queries;
    config.tail_partition = partition_;
    config.host_memory_limit = audited ? 0 : plan_.host_cap;
    config.device_memory_limit = audited ? 0 : device_limit(plan_);
    config.pinned_memory_limit = audited ? 0 : plan_.pinned_cap;
    config.kv_host = plan_.kv_host;
    if (audited && audits()) config.audit_share = 1;
    apply_settings(plan_.settings, &config);
    return config;
  }

  /// Refuses options that mean nothing in steps of the host, which results would name as if they had been done.
  void refuse_what_needs_a_stream() const {
    if (stream_steps()) return;
    const bool on_cuda = effective_.device == KEYHOLE_DEVICE_CUDA;
    const char* option = plan_.weights                                     ? "--weights"
                         : plan_.graph                                     ? "--graph"
                         : plan_.signal != KEYHOLE_SIGNAL_AUTO && !on_cuda ? "--signal"
                                                                           : nullptr;
    if (option == nullptr) return;
    throw UsageError(std::string(option) + " is of steps on a CUDA stream, and these are " +
                     (on_cuda ? "calls that wait (--blocking)" : "the host's (--device)") +
                     "; allowed: with a CUDA device and without --blocking");
  }

  void make_stream() {
    if (!stream_steps()) return;
    const Clock::time_point start = Clock::now();
    const TokenStreamShape shape = stream_shape(plan_);
    stream_ = make_token_stream(shape);
    floors_.device = stream_->device();
    floors_.weight_bytes = weight_bytes(shape);
    if (plan_.weights) listener_.phase({"weights", seconds_since(start)});
  }

  // Fills both sessions, the second one's first layers only, and notes the input of the steps.
  void fill(ContextFeed& context, const Session& session, const Session& audited) {
    const Clock::time_point start = Clock::now();
    const double making =
        context.hand_over("prefill", &inputs_,
                          [&](uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
                              const keyhole_tensor* q) {
                            check(keyhole_session_append(session.get(), layer, &k, &v, q));
                            if (audited && layer < audited_layers_) {
                              check(keyhole_session_append(audited.get(), layer, &k, &v, q));
                            }
                          });
    listener_.phase({"data", making});
    listener_.phase({"prefill", seconds_since(start) - making});
  }

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
      if (round >= 2) times.push_back(token);  // the first two warm up
    }
    floors_.dense = latency_of(times);
  }

  void measure_run(const Session& session, const Session& audited, const StepRun& run) {
    std::string failure;
    double build_seconds = 0;
    try {
      // First without partitions, so that the two builds are timed apart.
      const BudgetChoice first = for_index(run.budgets.front(), run.index);
      build_seconds = build_indexes(plan_.ranks, session, &run.index,
                                    first.needs_partitions() ? without_partitions(first) : first);
    } catch (const std::runtime_error& e) {
      if (interrupted()) throw;
      failure = e.what();
    }
    bool audit_built = false;
    for (const BudgetChoice& choice : run.budgets) {
      // With several indexes, --tail codes is meant for those that have codes.
      if (choice.reads_codes() && !has_codes(run.index) && plan_.runs.size() > 1) continue;
      const BudgetChoice budget = for_index(choice, run.index);
      StepResult result = result_of(run, budget);
      result.build_seconds = std::exchange(build_seconds, 0);
      result.note = failure;
      if (failure.empty()) measure_budget(session, audited, budget, audit_built, result);
      listener_.result(result);
    }
  }

  void measure_budget(const Session& session, const Session& audited, const BudgetChoice& budget,
                      bool& audit_built, StepResult& result) {
    try {
      result.tail_seconds = build_indexes(plan_.ranks, session, nullptr, budget);
      result.timing = meter_->time(session);
      result.codes_floor =
          codes_floor(result.timing->statistics, plan_.shape.layers, floors_.copy_bandwidth);
      if (audited) {
        (void)build_indexes(plan_.ranks, audited, audit_built ? nullptr : &result.index, budget);
        audit_built = true;
        if (audits()) result.audit = meter_->audit(audited, audited_layers_);
        if (stream_ || plan_.ranks.any()) {
          result.written_error = meter_->written_error(audited, audited_layers_);
        }
      }
    } catch (const std::exception& e) {
      if (interrupted()) throw;
      result.note = e.what();
      // What a failed step has left goes away; a failure of this call says nothing new.
      for (keyhole_session* failed : {session.get(), audited.get()}) {
        if (failed == nullptr) continue;
        const keyhole_status status =
            keyhole_session_truncate(failed, static_cast<uint32_t>(plan_.context));
        (void)status;
      }
    }
  }

  const HeadSource& source_;
  StepPlan plan_;
  StepListener listener_;
  StepFloors floors_;
  keyhole_engine_config effective_{};
  Engine engine_;
  Team team_;
  std::unique_ptr<TokenStream> stream_;
  StepInputs inputs_;
  std::optional<StepMeter> meter_;
  uint32_t partition_ = 0;
  uint32_t audited_layers_ = 0;
};

StepBench::StepBench(const HeadSource& source, StepPlan plan, StepListener listener)
    : impl_(std::make_unique<Impl>(source, std::move(plan), std::move(listener))) {}
StepBench::~StepBench() = default;

void StepBench::run() { impl_->run(); }
const StepPlan& StepBench::plan() const { return impl_->plan(); }
const StepFloors& StepBench::floors() const { return impl_->floors(); }
std::string StepBench::cpu_level() const { return impl_->cpu_level(); }
bool StepBench::stream_steps() const { return impl_->stream_steps(); }
uint32_t StepBench::context_block() const { return impl_->context_block(); }

}  // namespace keyhole::tools
