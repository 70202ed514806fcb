// A sequence that is spread over ranks (keyhole/parallel.h), as one session: an ordinary session holds this rank's
// tokens, and knows nothing of others; here it is decided which of a call's tokens are its own, and the states of all
// ranks are merged.
//
// Of every token it is known from its place in the text alone whose it is (parallel/layer_shares.h). A layer holds the
// first tokens(layer) of the text, on all ranks together: that number is the same on every rank, and with it what each
// of them holds. Whatever fails on one rank is taken back on all. Sliding layers are whole on every rank.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu/rank_states.h"
#include "runtime/engine/engine.h"
#include "runtime/parallel/layer_shares.h"
#include "runtime/parallel/spread_graph.h"
#include "runtime/ranks/communicator.h"
#include "runtime/session/session.h"
#include "runtime/stream/device_rows.h"

namespace keyhole::runtime {

/// Throws the Error(unsupported) of a call that sessions over several ranks refuse.
[[noreturn]] void refuse_call(const char* call);

class SpreadSession final : public SessionInterface {
 public:
  /// own holds this rank's share of the first tokens[layer] tokens of each layer.
  SpreadSession(std::unique_ptr<Session> own, std::vector<uint32_t> tokens);

  /// Makes this rank's session, and finds out whether all ranks have made theirs alike. Throws what `make` throws on
  /// any rank, Error(unsupported) for index types that need the tokens' places.
  [[nodiscard]] static std::unique_ptr<Session> make_own(
      Communicator& ranks, const std::function<std::unique_ptr<Session>()>& make);

  // See SessionInterface.
  const Engine& engine() const override { return own_->engine(); }
  const SessionParams& params() const override { return own_->params(); }
  /// Waits for the stream, too. The failure of this rank's steps is told by a collective call, to all ranks alike.
  void enter(Needs needs) override;
  void keep_device_failure(const Error& e) override { own_->keep_device_failure(e); }
  void end() override;
  void set_mode(keyhole_mode mode, uint32_t top_k) override { own_->set_mode(mode, top_k); }
  void set_attend(keyhole_attend_mode attend, float min_weight) override {
    own_->set_attend(attend, min_weight);
  }
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) override {
    own_->set_budget(layer, kv_head, budget);
  }
  Budget budget(uint32_t layer, uint32_t kv_head) const override {
    return own_->budget(layer, kv_head);
  }
  Identity& identity() override { return own_->identity(); }
  keyhole_layer_tokens layer_tokens(uint32_t layer) const override;
  keyhole_statistics statistics() const override;
  /// Of this rank.
  MemoryFigures memory() const override { return own_->memory(); }
  void reset_statistics() override { own_->reset_statistics(); }
  keyhole_audit audit(uint32_t layer, uint32_t kv_head) override {
    return own_->audit(layer, kv_head);
  }

  // Collective.
  void set_index(const std::string& spec) override;
  void prefill(uint32_t layer, const TensorView& k, const TensorView& v,
               const TensorView* q) override;
  void build(const BuildProgress& progress) override;
  void extend(uint32_t layer, const ExtendArgs& args) override;
  std::unique_ptr<SessionInterface> fork() override;
  void save(const std::string& path) override;
  /// Collective: synchronises the streams of all ranks, or throws the first error.
  void synchronize() override;

  // Not collective, but all ranks make these calls alike.
  void accept(uint32_t m, const uint32_t* path) override;
  void truncate(uint32_t n) override;
  /// Throws Error(unsupported).
  std::unique_ptr<SessionInterface> without(uint32_t first, uint32_t count, int32_t shift) override;

  // Steps. Those with tensors in host memory are collective. Those with tensors in device memory, spread_steps.cpp, are
  // this rank's step, the gather of all ranks' states and their merge, on the session's stream. The first waits for all
  // ranks, the others for none. Where this rank's part fails, all ranks' answers are NaN from then on, and the next
  // call that waits for all of them throws the error on all.
  void attend(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
              const TensorOut& out, float* lse) override;
  void attend_begin(uint32_t layer, const TensorView& q, const TensorView* k,
                    const TensorView* v) override;
  std::optional<OpenStep> open_step() const override;
  void attend_end(const TensorOut& out, float* lse) override;
  /// Announces one launch of the graph that was captured last on the stream. Throws Error(invalid_argument) where
  /// nothing was captured or this rank has to capture again, and then has done nothing: the other ranks' streams wait
  /// for it. Where this rank cannot make the graph's steps, it enqueues what enqueue() would in their place, and throws
  /// why.
  void announce(uint64_t graph) override;
  [[nodiscard]] uint64_t last_graph() override;
  void set_stream(gpu::Stream stream) override {
    own_->set_stream(stream);
    stream_ = stream;
    graph_ = {};
  }

  // Of what a rank has no part of its own; all throw Error(unsupported), but for extend_blocks(), which are this
  // rank's.
  void set_extend_pattern(const char* pattern, uint32_t tokens) override;
  void set_prompt_chunk(uint32_t tokens) override;
  void attend_queries(uint32_t layer, const TensorView& q, const TensorOut& out,
                      float* lse) override;
  gpu::PromptBlocks extend_blocks() const override { return own_->extend_blocks(); }
  Session& batch_member() override;
  void check_takes(const char* call) const override;
  void read_rows(uint32_t layer, uint32_t first, uint32_t n, const TensorOut* k,
                 const TensorOut* v) override;
  void attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out,
                        float* lse) override;
  void attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                     const TensorOut& out, float* lse) override;
  void search_tokens(uint32_t layer, const TensorView& q, const TokenSearch::Found& found) override;

  /// Collective. Before other calls: all steps that were enqueued are done on all ranks, where any was since all ranks
  /// met last; throws what has ended the session's steps.
  void settle();
  /// Throws why this rank takes no more steps, if it does not.
  void check_failure() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  /// Returns when the stream has done what was enqueued. Throws Error(timeout) where ranks have not come in time: then
  /// they are lost, and nothing is left on the stream that waits for them.
  void wait_for_stream();

  /// Of the whole text, `[layers]`.
  [[nodiscard]] const std::vector<uint32_t>& all_tokens() const { return tokens_; }
  [[nodiscard]] Communicator& ranks() const { return *ranks_; }

  /// Throws Error(unsupported) where an index of the session undoes RoPE.
  static void check_indexes(const Session& session);

 private:
  struct Step {
    bool under_way = false;
    uint32_t layer = 0;
    bool appends = false;  ///< on the rank that the token is of
    RankPart part;         ///< asks: the session has a step under way, or would have
    std::exception_ptr error;
    bool on_device = false;
    uint64_t capture = 0;  ///< in which it is recorded; 0: none
  };
  struct Extended {
    uint32_t before = 0, tokens = 0;  ///< 0: none
  };
  /// What this rank does in a step of a layer that holds so many tokens of the text.
  [[nodiscard]] RankPart part_of(uint32_t layer, uint32_t held, bool appends) const;
  /// Names the call's layer and how many tokens this rank believes it to hold.
  [[nodiscard]] Communicator::Call call(const char* what, uint32_t layer, Wait wait) const;
  void check_append(uint32_t layer, const TensorView& k, const TensorView& v) const;
  /// The same but for their values.
  void check_room(uint32_t layer, const TensorView& k, const TensorView& v) const;
  static void check_holds(uint32_t layer, uint32_t tokens);
  /// Runs `part` on all ranks; throws what it threw on any, or why one of them takes no more steps.
  void together(const Communicator::Call& call, const std::function<void()>& part);
  /// The own session lets go of tokens beyond those left[layer] of the text.
  void shorten(const std::vector<uint32_t>& left);
  /// The own session gives back what it has beyond its share of tokens_.
  void take_back() noexcept;
  void append_own(uint32_t layer, const TensorView& k, const TensorView& v, const TensorView* q);

  // spread_answers.cpp
  /// Of tensors in host memory.
  void extend_rows(uint32_t layer, const ExtendArgs& args);
  void extend_in_block(uint32_t layer, const ExtendArgs& args);
  /// Merges the ranks' states of n tokens, that of this rank in states_, and writes the result.
  void merge(const Communicator::Call& call, uint32_t layer, uint32_t n,
             const std::exception_ptr& error, const TensorOut& out, float* lse);
  [[nodiscard]] TensorOut own_rows(uint32_t layer, uint32_t n);
  [[nodiscard]] float* own_lse(uint32_t layer, uint32_t n);

  /// attend_begin() and attend_end() with tensors in host memory.
  void begin_on_host(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v);
  void end_on_host(const TensorOut& out, float* lse);

  // spread_steps.cpp
  void extend_from_device(uint32_t layer, const ExtendArgs& args);
  /// A whole step, or with out null its first half.
  void enqueue(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
               const TensorOut* out, float* lse);
  void enqueue_end(const TensorOut& out, float* lse);
  /// Throws Error where nothing can be enqueued; the first time takes the memory, on all ranks together, but in a
  /// capture.
  void open_device(uint32_t layer, const TensorOut* out, bool is_captured);
  /// Runs a step's launches, or its first half's; what they throw is kept in step_.
  void launch(const TensorView& q, const TensorView* k, const TensorView* v, const TensorOut* out,
              float* lse);
  /// Where this rank's state of a layer's step goes: o, and its lse.
  [[nodiscard]] TensorOut own_state(const LayerShape& shape) const;
  [[nodiscard]] float* own_sums(const LayerShape& shape) const;
  /// Ends the step under way. is_half: its first half was enqueued before.
  void finish_step(bool is_half, const TensorOut& out, float* lse);
  // spread_graph.cpp. Throw Error(invalid_argument):
  /// as all ranks do: the graph's tokens have no place in the text.
  void check_graph_room() const;
  /// where this rank would do another thing now than when the graph was captured.
  void check_graph_parts() const;
  /// announce() of this rank; where the graph is to be captured again, the session is made ready for that.
  void announce_own();
  /// Gathers and merges on the stream; own state is NaN where this rank's step has failed.
  void merge_on_stream(uint32_t layer, bool failed, const TensorOut& out, float* lse);
  /// The same by way of host memory, for transports that gather nothing else; throws the errors of all ranks.
  void merge_by_host(const Step& step, const TensorOut& out, float* lse);
  [[nodiscard]] DeviceRowsReader& device_rows();

  std::unique_ptr<Session> own_;
  Communicator* ranks_;
  LayerShares shares_;
  std::vector<uint32_t> tokens_;  ///< [layer], of the text
  std::vector<Extended> extended_;
  Step step_;
  std::vector<float> states_, merged_;  ///< o of all tokens and heads, then lse

  gpu::Stream stream_ = nullptr;
  std::unique_ptr<gpu::RankStates> on_device_;  ///< null: no step was enqueued yet
  std::unique_ptr<DeviceRowsReader> device_rows_;
  RowBuffer rows_[4];  ///< of q, k, v and out
  SpreadGraph graph_;
  bool is_enqueued_ = false;    ///< something, since all ranks met last
  std::exception_ptr failure_;  ///< why this rank takes no more steps
  bool has_ended_ = false;      ///< all ranks know of a failure, which is failure_
};

}  // namespace keyhole::runtime
