// A sequence that is spread over ranks (keyhole/parallel.h): an ordinary session holds this rank's tokens, and knows nothing of
// others; here it is decided which of a call's tokens are its own, and the states of all ranks are merged.
//
// Of every token it is known from its place in the text alone whose it is (ranks/blocks.h). A layer holds the first
// tokens(layer) of the text, on all ranks together: that number is the same on every rank, and with it what each of them
// holds. Whatever fails on one rank is taken back on all. Sliding layers are whole on every rank.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/rank_states.h"
#include "runtime/engine/engine.h"
#include "runtime/parallel/spread_graph.h"
#include "runtime/ranks/blocks.h"
#include "runtime/ranks/communicator.h"
#include "runtime/session/session.h"
#include "runtime/stream/device_rows.h"

namespace keyhole::runtime {

class SpreadSession {
 public:
  /// Of a session that outlives it and holds this rank's share of the first tokens[layer] tokens of each layer.
  SpreadSession(Session& own, std::vector<uint32_t> tokens);

  /// Makes this rank's session, and finds out whether all ranks have made theirs alike. Throws what `make` throws on any rank,
  /// Error(unsupported) for index types that need the tokens' places.
  [[nodiscard]] static std::unique_ptr<Session> make_own(
      Communicator& ranks, const std::function<std::unique_ptr<Session>()>& make);

  // As those of Session, collective but for truncate() and accept(). Tensors of prefill() and extend() lie in either memory, those of
  // attend_begin() and attend_end() in host memory.
  void prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  void build(const BuildProgress& progress);
  void attend_begin(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v);
  void attend_end(const RowsOut& out, float* lse);
  void extend(uint32_t layer, const ExtendArgs& args);
  void accept(uint32_t m, const uint32_t* path);
  void truncate(uint32_t n);
  void set_index(const std::string& spec);

  // Steps with tensors in device memory, spread_steps.cpp: on the session's stream this rank's step, the gather of all ranks'
  // states and their merge. The first waits for all ranks, the others for none. Where this rank's part fails, all ranks'
  // answers are NaN from then on, and the next call that waits for all of them throws the error on all.
  /// A whole step, or with out null its first half.
  void enqueue(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v,
               const RowsOut* out, float* lse);
  void enqueue_end(const RowsOut& out, float* lse);
  /// Announces one launch of the graph that was captured last on the stream. Throws Error(invalid_argument) where nothing was
  /// captured or this rank has to capture again, and then has done nothing: the other ranks' streams wait for it. Where
  /// this rank cannot make the graph's steps, it enqueues what enqueue() would in their place, and throws why.
  void announce();
  void set_stream(gpu::Stream stream) {
    stream_ = stream;
    graph_ = {};
  }
  /// Collective: all steps that were enqueued are done on all ranks, or it throws the first error.
  void synchronize();
  /// Collective. Before other calls: the same, where any was enqueued since; throws what has ended the session's steps.
  void settle();
  /// Throws why this rank takes no more steps, if it does not.
  void check_failure() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  /// Returns when the stream has done what was enqueued. Throws Error(timeout) where ranks have not come in time: then they are
  /// lost, and nothing is left on the stream that waits for them.
  void wait_for_stream();

  /// Of the whole text.
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return tokens_[layer]; }
  [[nodiscard]] const std::vector<uint32_t>& all_tokens() const { return tokens_; }
  [[nodiscard]] uint32_t most_tokens() const;
  [[nodiscard]] Communicator& ranks() const { return *ranks_; }
  /// Between attend_begin() and attend_end().
  [[nodiscard]] bool in_step() const { return step_.under_way; }
  [[nodiscard]] uint32_t step_layer() const { return step_.layer; }
  [[nodiscard]] bool step_is_on_device() const { return step_.on_device; }

  /// What this rank holds of the first tokens[layer] tokens of each layer.
  [[nodiscard]] static std::vector<uint32_t> shares(const Engine& engine,
                                                    const std::vector<uint32_t>& tokens);
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
  [[nodiscard]] bool slides(uint32_t layer) const { return own_->engine().model().slides(layer); }
  [[nodiscard]] bool is_own(uint32_t token) const { return blocks_.owner(token) == ranks_->rank(); }
  /// What this rank does in a step of a layer that holds so many tokens of the text.
  [[nodiscard]] RankPart part_of(uint32_t layer, uint32_t held, bool appends) const;
  /// Names the call's layer and how many tokens this rank believes it to hold.
  [[nodiscard]] Communicator::Call call(const char* what, uint32_t layer, Wait wait) const;
  void check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const;
  /// The same but for their values.
  void check_room(uint32_t layer, const RowsIn& k, const RowsIn& v) const;
  static void check_holds(uint32_t layer, uint32_t tokens);
  /// Runs `part` on all ranks; throws what it threw on any, or why one of them takes no more steps.
  void together(const Communicator::Call& call, const std::function<void()>& part);
  /// The own session lets go of tokens beyond those left[layer] of the text.
  void shorten(const std::vector<uint32_t>& left);
  /// The own session gives back what it has beyond its share of tokens_.
  void take_back() noexcept;
  void prefill_rows(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  void append_own(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  /// Of tensors in host memory.
  void extend_rows(uint32_t layer, const ExtendArgs& args);
  void extend_from_device(uint32_t layer, const ExtendArgs& args);
  void extend_in_block(uint32_t layer, const ExtendArgs& args);
  /// Merges the ranks' states of n tokens, that of this rank in states_, and writes the result.
  void merge(const Communicator::Call& call, uint32_t layer, uint32_t n,
             const std::exception_ptr& error, const RowsOut& out, float* lse);
  [[nodiscard]] RowsOut own_rows(uint32_t layer, uint32_t n);
  [[nodiscard]] float* own_lse(uint32_t layer, uint32_t n);

  // spread_steps.cpp
  /// Throws Error where nothing can be enqueued; the first time takes the memory, on all ranks together, but in a capture.
  void open_device(uint32_t layer, const RowsOut* out, bool is_captured);
  /// Runs a step's launches, or its first half's; what they throw is kept in step_.
  void launch(const RowsIn& q, const RowsIn* k, const RowsIn* v, const RowsOut* out, float* lse);
  /// Where this rank's state of a layer's step goes: o, and its lse.
  [[nodiscard]] RowsOut own_state(const LayerShape& shape) const;
  [[nodiscard]] float* own_sums(const LayerShape& shape) const;
  /// Ends the step under way. is_half: its first half was enqueued before.
  void finish_step(bool is_half, const RowsOut& out, float* lse);
  // spread_graph.cpp. Throw Error(invalid_argument):
  /// as all ranks do: the graph's tokens have no place in the text.
  void check_graph_room() const;
  /// where this rank would do another thing now than when the graph was captured.
  void check_graph_parts() const;
  /// announce() of this rank; where the graph is to be captured again, the session is made ready for that.
  void announce_own();
  /// Gathers and merges on the stream; own state is NaN where this rank's step has failed.
  void merge_on_stream(uint32_t layer, bool failed, const RowsOut& out, float* lse);
  /// The same by way of host memory, for transports that gather nothing else; throws the errors of all ranks.
  void merge_by_host(const Step& step, const RowsOut& out, float* lse);
  [[nodiscard]] DeviceRowsReader& device_rows();

  Session* own_;
  Communicator* ranks_;
  TextBlocks blocks_;
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
