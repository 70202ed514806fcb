// One sequence being decoded: owns its parts and orders the calls to them.
//
//     sequence_  which token lies where               kv/sequence.h
//     keeper_    what is indexed, builds, appends     indexing/index_keeper.h
//     step_      the host's part of one step          decode_step.h
//     audits_    steps computed again exactly         audit/session_audits.h
//     codes_     what the device has of the rows      stream/device_codes.h
//     stream_    steps in the order of a stream       stream/stream_runner.h
//
// Every token is resident, indexed or pending, in exactly one of the three: resident or offloaded
// by the sequence, and of the offloaded rows of a head [0, indexed) are in its index, all later
// ones pending.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/blocked.h"
#include "gpu/listed.h"
#include "runtime/audit/session_audits.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/resident_truth.h"
#include "runtime/kv/sequence.h"
#include "runtime/prefill/host_prompt.h"
#include "runtime/session/identity.h"
#include "runtime/step/chosen_tokens.h"
#include "runtime/step/common_pass.h"
#include "runtime/step/decode_step.h"
#include "runtime/step/token_search.h"
#include "runtime/stream/device_codes.h"
#include "runtime/stream/device_rows.h"
#include "runtime/stream/stream_runner.h"

namespace keyhole::runtime {

/// The tensors of keyhole_extend, all in host memory or all on the device: q and out have as many tokens as k.
struct ExtendArgs {
  RowsIn q, k, v;
  const uint64_t* mask = nullptr;
  RowsOut out;
  float* lse = nullptr;
};
/// Tokens [begin, begin + n) of `args`.
[[nodiscard]] ExtendArgs slice(const ExtendArgs& args, uint32_t begin, uint32_t n);

class Session {
 public:
  /// copied: that copy_from() comes for; null: none.
  Session(std::shared_ptr<const Engine> engine, SessionParams params,
          const Session* copied = nullptr);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] const Engine& engine() const { return *engine_; }
  [[nodiscard]] const std::shared_ptr<const Engine>& shared_engine() const { return engine_; }
  [[nodiscard]] const SessionParams& params() const { return params_; }

  /// See keyhole_prefill, keyhole_build, keyhole_attend_begin/end, keyhole_truncate. All throw
  /// Error and then have changed nothing, except where the public header says so.
  /// q: of all tokens, or those of some of them that the index's sample may want (RowsIn::step).
  void prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  void build(const BuildProgress& progress);
  void attend_begin(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v);
  void attend_end(const RowsOut& out, float* lse);
  void truncate(uint32_t tokens);
  /// Each layer to its own number of tokens; the identity stays.
  void truncate_layers(std::span<const uint32_t> tokens);
  /// See Sequence::read().
  void read_tokens(uint32_t layer, std::span<const uint32_t> tokens, std::byte* k,
                   std::byte* v) const {
    sequence_.read(layer, tokens, k, v);
  }
  // session_states.cpp: for engines with attention of their own. Nothing is appended, no step is under way.
  /// See keyhole_attend_offloaded, keyhole_attend_tokens, keyhole_search_tokens (found: all but first_token). q and out of the
  /// first two may lie in device memory, both of them and lse with them.
  void attend_offloaded(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse);
  void attend_tokens(uint32_t layer, const RowsIn& q, const TokenChoice& choice, const RowsOut& out,
                     float* lse);
  void search_tokens(uint32_t layer, const RowsIn& q, TokenSearch::Found found);
  /// Ends a step without a result (before the session goes).
  void abandon_step() noexcept;

  // Several tokens, session_extend.cpp and session_accept.cpp; see keyhole_extend, keyhole_session_accept, keyhole_extend_batch.
  void extend(uint32_t layer, const ExtendArgs& args);
  /// With tensors in device memory, session_extend_stream.cpp: on the session's stream.
  void extend_on_device(uint32_t layer, const ExtendArgs& args);
  /// The states of what the layer holds, (0, -inf) for nothing, for tokens that are not appended: q and out `[n, q_heads, ..]`, lse
  /// `[n, q_heads]` or null, in host memory. Not of a sliding layer.
  void answer(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse);
  void accept(uint32_t tokens, const uint32_t* path);
  /// See keyhole_session_set_extend_pattern and keyhole_session_extend_blocks, session_extend_lists.cpp.
  void set_extend_pattern(const char* pattern, uint32_t tokens);
  [[nodiscard]] gpu::PromptBlocks extend_blocks() const { return extend_blocks_; }
  struct BatchMember {
    Session* session = nullptr;
    ExtendArgs args;
    std::exception_ptr error = nullptr;  ///< why it has failed; the session has not changed then
  };
  /// Different sessions of one engine, all tensors in host memory or all on the device; members with an error or without tokens
  /// are left alone. Throws nothing that is a member's.
  static void extend_batch(uint32_t layer, std::span<BatchMember> members);

  // Stream steps, see the public header. All throw Error(unsupported) on a host device.
  /// q, k, v and out in device memory; with out null the first half of a step, else all of it.
  void enqueue(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v,
               const RowsOut* out, float* lse);
  void enqueue_end(const RowsOut& out, float* lse);
  [[nodiscard]] bool in_stream_step() const;
  void set_stream(gpu::Stream stream);
  void announce();
  void synchronize();
  void prefill_from_device(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q);
  /// Whether the session's stream records a graph: then steps can be enqueued and counts be read, no more.
  [[nodiscard]] bool is_capturing() const;
  /// The number of that capture (gpu::StreamSteps::capture_id), 0: none. Of a step that is about to be enqueued: throws
  /// Error(busy) where none can be.
  [[nodiscard]] uint64_t capture_id() const;
  [[nodiscard]] uint64_t capture_of_step() const;
  /// Throws Error(busy) during a capture.
  void check_not_capturing() const;
  /// Waits until no step is under way on the stream: nothing else touches the session then. Not during a capture.
  void wait_idle();
  /// Waits until the host's part of all steps is done, without touching the stream: also during a capture.
  void wait_for_host();
  /// Throws the first error of stream steps, or of the device.
  void check_failure();
  /// What a call has thrown: where the device failed, nothing is known of its tokens any more, and the session takes no
  /// more steps or changes. During a capture only the graph is lost.
  void keep_device_failure(const Error& e);

  // What a stream step asks of the session that it belongs to.
  /// What the KV heads of a layer do in a step whose token is at `position`.
  void prepare_work(uint32_t layer, uint32_t position) { prepare_work(step_, layer, position, 1); }
  [[nodiscard]] bool append_is_due(uint32_t layer) const { return keeper_.append_is_due(layer); }
  /// The same after the layer's steps that were enqueued: waits for the host's part of them.
  [[nodiscard]] bool append_will_be_due(uint32_t layer);
  /// Takes a block of pending rows in, or begins one, if a step of the layer is to. Logs what
  /// fails.
  void advance_append(uint32_t layer);
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return sequence_.tokens(layer); }
  /// What a head has indexed on the host, null for nothing: as long as no call changes the session.
  [[nodiscard]] const index::Index* index_of(uint32_t layer, uint32_t kv_head) const {
    return keeper_.head(layer, kv_head).index.get();
  }
  /// Throws Error(out_of_memory) where so many bytes more would pass host_memory_limit.
  void check_memory(uint64_t more_bytes, const char* what) const;
  void add_cost(const StepCost& cost, uint32_t tokens = 1);

  // session/session_settings.cpp
  void set_index(const std::string& spec);
  /// top_k: 1..max_tokens, or 0 to keep it.
  void set_mode(keyhole_mode mode, uint32_t top_k);
  void set_attend(keyhole_attend_mode attend, float min_weight);
  /// See keyhole_session_set_budget; layer and kv_head may be KEYHOLE_ALL.
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget);
  [[nodiscard]] Budget budget(uint32_t layer, uint32_t kv_head) const;

  [[nodiscard]] bool in_step() const { return in_step_; }
  /// Of the step that is under way, or of the last on the host.
  [[nodiscard]] uint32_t step_layer() const;
  [[nodiscard]] keyhole_layer_tokens layer_tokens(uint32_t layer) const;
  /// Reads nothing that workers write: also between attend_begin() and attend_end().
  [[nodiscard]] keyhole_statistics statistics() const;
  void reset_statistics();

  /// What audits have found of one head or several (KEYHOLE_ALL); waits for those under way.
  [[nodiscard]] keyhole_audit audit(uint32_t layer, uint32_t kv_head);
  /// Waits for audits under way. After it the session can be copied.
  void finish_audits() { audits_.finish(); }

  [[nodiscard]] Identity& identity() { return identity_; }
  [[nodiscard]] const Identity& identity() const { return identity_; }
  /// Of the longest layer.
  [[nodiscard]] uint32_t most_tokens() const;

  // Copies, see session_file.h. No step and no audit may be under way; load() and copy_from() are
  // for a new session with the parameters, and the settings of heads, of the one that was saved or
  // is copied.
  [[nodiscard]] std::vector<const HeadParams*> head_params() const;
  void save(ChecksumWriter& out) const;
  /// Reads to the end of the file. Throws Error(corrupt | io).
  void load(ChecksumReader& in);
  void copy_from(const Session& from);

  /// Throws Error(invalid_argument) for a layer that the model does not have.
  void check_layer(uint32_t layer) const;

 private:
  /// Of a step that answers `tokens` tokens, the first of which is at `position`.
  void prepare_work(DecodeStep& step, uint32_t layer, uint32_t position, uint32_t tokens);
  void prepare_codes(DecodeStep& step, HeadWork& work, const HeadIndex& head, uint32_t position,
                     uint32_t tokens);
  void check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const;
  /// Throws Error where max_tokens or host_memory_limit have no room for n tokens more.
  void check_room(uint32_t layer, uint32_t n) const;
  /// Drops the layer's tokens >= n; there are more.
  void truncate_layer(uint32_t layer, uint32_t n);
  /// Throws Error(invalid_argument) where a sliding layer no longer holds its window before its token to[layer].
  void check_truncation(std::span<const uint32_t> to) const;
  /// The same for indexes, with what searches in them take.
  void check_index_memory(uint64_t more_bytes, const char* what) const;
  /// What searches will take once there is a first index; 0 after that.
  [[nodiscard]] uint64_t first_search_bytes() const;
  /// host_bytes() and what first indexes under way will add to it: what host_memory_limit is about.
  [[nodiscard]] uint64_t accounted_bytes() const;
  void begin_audits(uint32_t layer);
  /// The step whose offloaded tokens the device has attended by their codes is over: its records know its answer and the
  /// resident tokens.
  void end_coded_audits();

  /// The heads that a layer and KV head, each perhaps KEYHOLE_ALL, name; throws
  /// Error(invalid_argument).
  [[nodiscard]] std::vector<size_t> named_heads(uint32_t layer, uint32_t kv_head) const;
  /// What set_mode(), set_attend() and set_budget() change.
  struct Settings {
    keyhole_mode mode;
    Budget common;
    std::vector<Budget> heads;  ///< by their HeadNumbers
  };
  [[nodiscard]] Settings settings() const;
  /// Strong guarantee. `anew`: searches need memory of another shape.
  void change(const Settings& settings, bool anew);
  /// Reserves memory for searches in the indexes that there are; `anew`: even where it seems to
  /// suffice.
  void reserve_searches(bool anew);
  void count_step_bytes() {
    step_bytes_ = step_.bytes() + (joint_step_ == nullptr ? 0 : joint_step_->bytes()) +
                  (common_pass_ == nullptr ? 0 : common_pass_->bytes());
  }

  // session_extend.cpp, session_accept.cpp
  class Extension;  // extension.h
  /// The tokens that a layer's last keyhole_extend has appended.
  struct Extended {
    uint32_t before = 0;     ///< tokens that there were
    uint32_t tokens = 0;     ///< 0: none
    bool changed = false;    ///< another call has changed the layer's tokens since
    bool on_stream = false;  ///< enqueued: not all of it may have been done
  };
  /// Whether the tensors have as many tokens, and the mask is one.
  static void check_counts(const ExtendArgs& args);
  void check_extend(uint32_t layer, const ExtendArgs& args) const;
  /// Throws Error(not_finite) for queries of the host.
  void check_queries(const RowsIn& q) const;
  static void check_as_many(const RowsIn& q, const RowsIn& k);
  /// Throws Error(invalid_argument) where a sliding layer no longer holds its window before new token `prefix`, or the
  /// tokens that move up.
  void check_rings(const Extended& e, uint32_t prefix, std::span<const uint32_t> moved) const;
  /// Whether all sliding layers that took part have so many of the newest tokens on the device.
  [[nodiscard]] bool windows_hold(uint32_t newest) const;
  void accept_on_host(const Extended& e, uint32_t m, const uint32_t* path);
  void accept_on_stream(const Extended& e, uint32_t m, const uint32_t* path);
  /// What answers several tokens of the layer as one group; null: its tokens are answered one by one, because they may not
  /// be searched for together, or there is no memory for it.
  [[nodiscard]] DecodeStep* joint_step(uint32_t layer);
  /// The tokens of the layer change otherwise than by keyhole_extend.
  void forget_extended(uint32_t layer) { extended_[layer].changed = true; }
  /// The extend of all layers that took part; throws Error(invalid_argument) where they do not agree.
  [[nodiscard]] Extended agreed_extended() const;

  // session_extend_lists.cpp
  /// Whether the pattern that was set is about such an extend: with tensors in host memory it attends by it.
  [[nodiscard]] bool extends_by_pattern(uint32_t layer, const ExtendArgs& args) const;
  /// Of the layer's query heads.
  [[nodiscard]] std::span<const gpu::PromptPattern> extend_patterns_of(uint32_t layer) const;
  /// Of the offloaded keys, for all query heads of n tokens, the share that the blocks attended have of those seen.
  [[nodiscard]] uint64_t keys_in_blocks(uint32_t layer, uint32_t n,
                                        const gpu::PromptBlocks& blocks) const;
  /// Writes the answers; the new tokens are not appended.
  void extend_by_pattern(uint32_t layer, const ExtendArgs& args, const NewTokens& fresh);
  /// K, or V, of all tokens of a layer that does not slide, where they lie on the host.
  [[nodiscard]] cpu::RowRuns rows_before(uint32_t layer, bool values);
  /// Gives back what prompts alone need.
  void release_prompt();

  // session_extend_listed.cpp
  /// Whether an extend with tensors in device memory attends by the pattern that was set: by lists, or all rows where it is dense.
  [[nodiscard]] bool extends_by_pattern_there(uint32_t layer, const ExtendArgs& args) const;
  /// And by lists, with so many tokens before.
  [[nodiscard]] bool extends_by_lists(uint32_t layer, const ExtendArgs& args) const;
  /// Attends by lists, and appends. No step is under way.
  void extend_listed(uint32_t layer, const ExtendArgs& args);

  // session_extend_stream.cpp
  [[nodiscard]] gpu::BlockedShape blocked_shape(uint32_t layer) const;
  /// Attention of blocks, and of lists of them, of layers of one shape.
  struct Blocked {
    LayerShape shape;
    std::unique_ptr<gpu::BlockedAttention> attention{};  ///< null: not used yet
    std::unique_ptr<gpu::ListedAttention> listed{};      ///< likewise
  };
  [[nodiscard]] Blocked& blocked_parts(uint32_t layer);
  [[nodiscard]] gpu::BlockedAttention& blocked_of(uint32_t layer);
  [[nodiscard]] gpu::ListedAttention& listed_of(uint32_t layer);
  /// Whether the device attends all rows, or lists of them, at once; not in a capture.
  [[nodiscard]] bool attends_at_once(uint32_t layer) const;
  /// The offloaded rows of a layer, those that are pinned and all behind them.
  [[nodiscard]] std::array<gpu::KvRows, 2> offloaded_rows(uint32_t layer);
  /// Offloaded rows of a layer, the first ones, that are pinned for the device.
  [[nodiscard]] uint32_t pinned_rows(uint32_t layer) const;
  /// Whether n new tokens are attended by blocks, or a few at a time by steps.
  [[nodiscard]] bool attends_blocked(uint32_t layer, uint32_t n, bool masked) const;
  /// Of a sliding layer: a step for each.
  void extend_window(uint32_t layer, const ExtendArgs& args);
  /// What new token i of a sliding layer sees by the mask. Throws Error(invalid_argument) where the ring is too short for it.
  [[nodiscard]] gpu::SeenDrafts drafts_seen(uint32_t layer, const uint64_t* mask, uint32_t i) const;
  /// group: where the last step may wait for those of other sessions, see StreamRunner::enqueue().
  void extend_by_steps(uint32_t layer, const ExtendArgs& args, gpu::StepGroup* group = nullptr);
  /// Enqueues a step of the tokens from `first` on; returns how many it took.
  [[nodiscard]] uint32_t enqueue_some(uint32_t layer, const ExtendArgs& args, uint32_t first,
                                      gpu::StepGroup* group);
  /// Exactly, and appends them. No step is under way.
  void extend_blocked(uint32_t layer, const ExtendArgs& args);

  // session_batch_on_host.cpp
  class HostBatch;
  /// Whether both hold enough of a layer's offloaded rows, or of their codes, in the same memory to read them together.
  [[nodiscard]] bool is_copy(uint32_t layer, const Session& other) const;
  /// Whether enough of a layer's codes lies in the same memory for both.
  [[nodiscard]] bool has_codes_of(uint32_t layer, const Session& other) const;
  /// The first offloaded row that a step attends exactly, but for those of a block that has no codes yet.
  [[nodiscard]] size_t exact_from(uint32_t layer, uint32_t kv_head) const;

  // session_extend_batch.cpp
  static void extend_batch_on_device(uint32_t layer, std::span<BatchMember> members);
  /// Whether one step over codes on the device answers the new tokens. Waits for the host's part of the steps before.
  [[nodiscard]] bool takes_one_step(uint32_t layer, const ExtendArgs& args);
  /// Waits for what the step waits for, without enqueuing it.
  void prepare_step(uint32_t layer, const ExtendArgs& args);
  /// Enqueues the step or adds it to the group: after prepare_step().
  void extend_in_group(uint32_t layer, const ExtendArgs& args, gpu::StepGroup& group);
  /// It was added and could not be launched: throws `error`, with the session as after an extend that failed.
  [[noreturn]] void fail_in_group(uint32_t layer, const std::exception_ptr& error);

  // session_states.cpp
  [[nodiscard]] size_t token_call_bytes() const;
  /// Checks q and puts it where a step reads it. Throws Error(unsupported) of a sliding layer.
  void take_queries(uint32_t layer, const RowsIn& q);
  /// Writes o and lse `[q_heads, head_dim]`, `[q_heads]` to the caller's; throws Error(internal) for what is not finite.
  void give_state(uint32_t layer, const float* o, const float* lse, const RowsOut& out,
                  float* out_lse) const;

  // session_stream.cpp
  class Client;
  class Rows;
  void make_stream_runner(const Session* copied);
  /// Device memory for codes where the session holds `held` bytes of them.
  [[nodiscard]] uint64_t code_room(const gpu::ResidentShape& shape, size_t held) const;
  /// Heads, budgets or what lies where have changed: decides anew which layers have codes on the device.
  void place_codes();
  /// Which layers have codes on the device.
  void tell_keeper_of_codes();
  /// After a change that failed. Throws nothing: the first error is the one to tell, the next step finds this one again.
  void place_codes_again() noexcept;
  /// Begins to pin the rows of a session that was loaded or copied.
  void pin_all_codes();
  /// The codes that a step attends on the device in place of the offloaded rows; null: none.
  [[nodiscard]] gpu::Codes* codes_of_step(uint32_t layer) const {
    const bool attends = codes_ != nullptr && params_.mode == KEYHOLE_MODE_INDEXED;
    return attends ? codes_->of_layer(layer) : nullptr;
  }
  [[nodiscard]] StreamRunner& runner(const char* what);
  [[nodiscard]] DeviceRowsReader& device_rows_reader();
  /// Runs call(q, out, lse) with rows in host memory, between which and the caller's they are copied where these are a device's.
  template <class Call>
  void by_way_of_host(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse,
                      const Call& call);
  void attend_offloaded_on_host(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse);
  void attend_tokens_on_host(uint32_t layer, const RowsIn& q, const TokenChoice& choice,
                             const RowsOut& out, float* lse);
  /// A prompt's tokens of a sliding layer, on the device; false: they are to come by way of host memory.
  [[nodiscard]] bool prefill_window(uint32_t layer, const RowsIn& k, const RowsIn& v,
                                    const RowsIn* q);
  [[nodiscard]] uint64_t device_bytes() const;

  [[nodiscard]] uint64_t host_bytes() const;

  std::shared_ptr<const Engine> engine_;
  SessionParams params_;
  Sequence sequence_;
  DecodeStep step_;
  std::unique_ptr<DecodeStep> joint_step_;  ///< null: there was no use for it yet
  std::unique_ptr<CommonPass>
      common_pass_;  ///< of a batch, one of whose members has it; null likewise
  // Last, so that they end before anything that they read.
  IndexKeeper keeper_;
  SessionAudits audits_;

  Identity identity_;

  bool in_step_ = false;
  uint32_t step_layer_ = 0;
  bool step_appended_ = false;
  std::chrono::steady_clock::time_point step_began_;
  double step_append_seconds_ = 0.0;
  std::atomic<uint64_t> step_bytes_ =
      0;  ///< of the steps when no worker wrote to them; read by any thread

  std::vector<Extended> extended_;                   ///< [layer]
  std::vector<std::byte> new_rows_;                  ///< K and V of an extension under way
  std::vector<gpu::PromptPattern> extend_patterns_;  ///< `[layers, q_heads]`; empty: none is set
  uint32_t extend_pattern_from_ = 0;                 ///< new tokens; 0: as the library chooses
  std::unique_ptr<HostPrompt> extend_prompt_;        ///< null: not used since the last step
  LayerShape extend_prompt_shape_;                   ///< of it
  gpu::PromptBlocks extend_blocks_;

  keyhole_statistics totals_{};
  uint64_t host_bytes_peak_ = 0;
  mutable uint64_t promised_search_bytes_ = 0;     ///< see first_search_bytes()
  std::unique_ptr<DeviceRowsReader> device_rows_;  ///< null: nothing came from device memory
  RowBuffer prompt_rows_[3];  ///< k, v and q of a chunk, until a step or a build
  // Null: no call has needed it.
  std::unique_ptr<ChosenTokens> chosen_tokens_;
  std::unique_ptr<TokenSearch> token_search_;
  // Null where the device has no streams.
  std::unique_ptr<ResidentTruth> resident_truth_;
  std::unique_ptr<CodeSource> code_source_;
  std::unique_ptr<DeviceCodes> codes_;
  std::vector<Blocked> blocked_;  ///< those that were used
  std::unique_ptr<StreamClient> stream_client_;
  std::unique_ptr<StreamRunner> stream_;  ///< the last: its thread reads all of the above
};

}  // namespace keyhole::runtime
