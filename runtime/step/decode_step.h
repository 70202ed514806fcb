// One step of one layer on the host: resident attention (A), index search and attention over what it found (B), exact
// attention over pending or dense tokens, all as tasks of one parallel-for, then the merge of A and B by log-sum-exp.
//
// step/step_plan.h plans which task computes what. States are merged in a fixed order (step/head_states.h), so that
// the result has the same bits for any number of threads. It goes to a sink (step/result_sink.h), each KV head as
// soon as the last of its states is there.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/pool.h"
#include "runtime/engine/engine.h"
#include "runtime/step/cost.h"
#include "runtime/step/head_states.h"
#include "runtime/step/head_work.h"
#include "runtime/step/part_hits.h"
#include "runtime/step/query.h"
#include "runtime/step/resident_part.h"
#include "runtime/step/result_sink.h"
#include "runtime/step/selection.h"
#include "runtime/step/step_plan.h"

namespace keyhole::runtime {

class DecodeStep {
 public:
  /// How many tokens one step answers.
  enum class Tokens : uint8_t {
    one,
    several  ///< as one group of tokens times a layer's group, up to kJointHeads
  };
  explicit DecodeStep(const Engine& engine, Tokens tokens = Tokens::one);
  DecodeStep(const DecodeStep&) = delete;
  DecodeStep& operator=(const DecodeStep&) = delete;

  /// Makes every worker large enough for searches of k results in indexes of these types, up to these sizes. Strong
  /// guarantee: an allocation that fails leaves all workers as they were.
  void reserve(std::span<const Selection::Use> uses, uint32_t k);
  [[nodiscard]] bool fits(const Selection::Use& use) const {
    return workers_.front().selection.fits(use);  // all workers are alike, see reserve()
  }
  /// The most results that a search may have; a HeadWork's k is cut to it.
  [[nodiscard]] uint32_t capacity_k() const { return capacity_k_; }

  /// The most tokens that one step answers, for a layer; below, for any layer.
  [[nodiscard]] uint32_t most_tokens(uint32_t layer) const {
    return tokens_of(tokens_, engine_->model().of(layer).group());
  }
  [[nodiscard]] uint32_t most_tokens() const { return most_.tokens; }
  /// Where the caller writes q `[kv_heads, tokens, group, head_dim]` fp32, of the layer's shape, and the work of each
  /// of its KV heads, before start().
  [[nodiscard]] float* queries() { return queries_.data(); }
  [[nodiscard]] HeadWork& work(uint32_t kv_head) { return work_[kv_head]; }

  /// Plans the step of these new tokens, so that plan_of() says how it is cut; for a CommonPass, before start(). From
  /// then on queries and work belong to the step, except HeadWork::common.
  void plan(uint32_t layer, const NewTokens& fresh);
  [[nodiscard]] const HeadPlan& plan_of(uint32_t kv_head) const { return plan_.head(kv_head); }
  /// The query of a KV head in the step that is planned or under way.
  [[nodiscard]] GroupQuery query_of(uint32_t kv_head) const;
  /// Begins the choice of lists of a head that has lists. Any thread may then rank its parts (HeadPlan::ranks).
  void begin_choice(uint32_t kv_head);
  [[nodiscard]] index::ListChoice& choice(uint32_t kv_head) { return choices_[kv_head]; }
  /// Where the states of a head's parts go; below, those of its chunks.
  [[nodiscard]] index::CodeParts& code_parts(uint32_t kv_head) { return code_parts_[kv_head]; }
  [[nodiscard]] StateView chunk(uint32_t kv_head, uint32_t number) {
    return slots_.chunk(kv_head, number);
  }
  /// Adds the step's share of work that was done for several steps together to what finish() returns next.
  void add_common_cost(const StepCost& cost) { common_cost_ += cost; }

  /// Hands the step to the pool and returns. queries() and the resident part belong to the step until finish().
  /// Results go to o() and lse(). codes, where not null: the device attends the offloaded rows, too, see
  /// gpu::Resident::attend_begin().
  void start(uint32_t layer, gpu::Resident& resident, gpu::Codes* codes = nullptr) {
    start(layer, resident, codes, nullptr);
  }
  /// start() with new tokens, which stay valid until finish(): the step answers those that ask, see
  /// ResidentPart::begin().
  void start(uint32_t layer, gpu::Resident& resident, gpu::Codes* codes, const NewTokens* fresh);
  /// start() without resident tokens: results go to `sink`, and records and targets are relative to the offloaded
  /// tokens and the learned sinks. q `[q_heads, head_dim]` stays valid until finish().
  void start(uint32_t layer, const float* q, ResultSink& sink);
  /// start() over the offloaded tokens alone, without learned sinks, by queries(); results go to o() and lse().
  void start_offloaded(uint32_t layer);

  /// Helps with the tasks, waits, and takes the resident part in. Rethrows what a task threw; the step is over in any
  /// case.
  StepCost finish();
  /// The results of the last step that had no sink: o `[kv_heads, tokens, group, head_dim]`, lse the same without
  /// head_dim.
  [[nodiscard]] const float* o() const { return results_.o(); }
  [[nodiscard]] const float* lse() const { return results_.lse(); }
  /// See ResidentPart::fresh_state(). Valid until the next start().
  [[nodiscard]] StateView fresh_state(uint32_t kv_head) { return resident_.fresh_state(kv_head); }

  /// Bytes of memory that it holds, counted at the end of steps, so that it may be asked for while one is under way.
  [[nodiscard]] size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct alignas(64) Worker {
    Selection selection;
    StepCost cost;
  };
  /// The progress of a KV head in the step under way.
  struct alignas(64) Progress {
    std::atomic<uint32_t> parts{0};  ///< of the search or the codes, still missing for the merge
    std::atomic<uint32_t> ranks{0};  ///< of the choice among lists, still missing
    std::atomic<bool> has_chosen{false};  ///< among lists, or will never
    std::atomic<uint32_t> states{0};      ///< tasks that are not done, and the resident part
    std::atomic<bool> failed{false};
  };

  /// The largest sizes of steps over the model's layers, for which memory is taken.
  struct Sizes {
    uint32_t fewest_heads = UINT32_MAX, most_heads = 0;  ///< KV heads
    uint32_t group = 0;                                  ///< of all tokens
    uint32_t tokens = 0;
    size_t states = 0, numbers = 0;  ///< of all KV heads and tokens, and components of these
  };
  [[nodiscard]] static Sizes sizes_of(const ModelShape& model, Tokens tokens);
  /// The number of tokens that one step answers for a group of `group` query heads.
  [[nodiscard]] static uint32_t tokens_of(Tokens tokens, uint32_t group) {
    return tokens == Tokens::one ? 1 : std::max(1U, kJointHeads / group);
  }
  /// Sets the shape of the step that is about to begin.
  void set_shape(uint32_t layer, uint32_t tokens);
  void plan_tasks();
  void begin_records();
  void start_tasks(ResultSink& sink);
  void start_without_resident(ResultSink& sink, const float* learned_sinks);
  void run_task(uint32_t task, Worker& worker);
  void run_task(const StepTask& task, Worker& worker);
  void run_search(uint32_t kv_head, uint32_t part, Worker& worker);
  void run_ranks(uint32_t kv_head, uint32_t part, Worker& worker);
  void run_codes(uint32_t kv_head, uint32_t part, Worker& worker);
  void run_chunk(uint32_t kv_head, uint32_t chunk, Worker& worker);
  /// Keeps the hits of a part. Returns true to the last part of a head, which merges all.
  [[nodiscard]] bool keep_hits(uint32_t kv_head, SearchPart part, Worker& worker);
  /// The parameters of the search, relative to the resident state where there is a target.
  [[nodiscard]] SearchParams params_of(uint32_t kv_head, Worker& worker);
  void record_search(uint32_t kv_head, const SearchParams& params, const Selection& selection);
  /// Counts a finished task of a head, or its resident part. The last one merges and delivers.
  void end_state(uint32_t kv_head);
  [[nodiscard]] HeadStates states_of(uint32_t kv_head);
  void count_bytes();

  const Engine* engine_;
  Tokens tokens_;
  Sizes most_;
  // Shape of the step under way:
  uint32_t kv_heads_ = 0, group_ = 0, dim_ = 0, value_dim_ = 0;
  std::vector<float> queries_;
  std::vector<HeadWork> work_;  // [most heads]
  std::vector<Worker> workers_;
  std::vector<PartHits> part_hits_;           // [most heads]; empty where no search has parts
  std::vector<index::CodeParts> code_parts_;  // [most heads]; empty where no head has codes
  std::vector<index::ListChoice> choices_;    // [most heads]; likewise
  uint32_t capacity_k_ = 0;
  ResultArrays results_;
  StateSlots slots_;
  std::atomic<size_t> bytes_{0};
  size_t fixed_bytes_ = 0;  // of bytes_: all but what searches make grow

  // Members of the step under way:
  StepPlan plan_;
  StepCost common_cost_;
  uint32_t layer_ = 0;
  const float* q_ = nullptr;
  ResultSink* sink_ = nullptr;
  ResidentPart resident_;
  std::unique_ptr<Progress[]> progress_;  // [most heads]
  cpu::Job job_;  // last: its end waits for tasks, which use all of the above
};

}  // namespace keyhole::runtime
