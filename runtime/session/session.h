// One sequence being decoded: a facade that owns the session's parts, in an order in which each knows only those before
// it, and orders the calls to them. Every token is resident, indexed or pending, in exactly one of the three: resident
// or offloaded by the sequence, and of the offloaded rows of a head [0, indexed) are in its index, all later ones
// pending.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/session/acceptance.h"
#include "runtime/session/code_placement.h"
#include "runtime/session/device_blocks.h"
#include "runtime/session/device_extender.h"
#include "runtime/session/device_prompts.h"
#include "runtime/session/extend_patterns.h"
#include "runtime/session/extended_tokens.h"
#include "runtime/session/head_settings.h"
#include "runtime/session/host_extends.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/host_stepper.h"
#include "runtime/session/host_steps.h"
#include "runtime/session/offloaded_states.h"
#include "runtime/session/prompt_memory.h"
#include "runtime/session/session_indexing.h"
#include "runtime/session/session_interface.h"
#include "runtime/session/session_tokens.h"
#include "runtime/session/step_audits.h"
#include "runtime/session/step_totals.h"
#include "runtime/session/step_work.h"
#include "runtime/session/stream_stepper.h"

namespace keyhole::runtime {

class Session final : public SessionInterface {
 public:
  /// copied: that copy_from() comes for; null: none.
  Session(std::shared_ptr<const Engine> engine, SessionParams params,
          const Session* copied = nullptr);
  ~Session() override = default;

  const Engine& engine() const override { return *engine_; }
  const SessionParams& params() const override { return params_; }
  void enter(Needs needs) override;
  void keep_device_failure(const Error& e) override { stream_.keep_device_failure(e); }
  void end() override;
  void set_index(const std::string& spec) override { settings_.set_index(spec); }
  void set_mode(keyhole_mode mode, uint32_t top_k) override { settings_.set_mode(mode, top_k); }
  void set_attend(keyhole_attend_mode attend, float min_weight) override;
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) override;
  Budget budget(uint32_t layer, uint32_t kv_head) const override;
  void prefill(uint32_t layer, const TensorView& k, const TensorView& v,
               const TensorView* q) override;
  void build(const BuildProgress& progress) override;
  void truncate(uint32_t tokens) override;
  std::unique_ptr<SessionInterface> without(uint32_t first, uint32_t count, int32_t shift) override;
  void attend(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
              const TensorOut& out, float* lse) override;
  void attend_begin(uint32_t layer, const TensorView& q, const TensorView* k,
                    const TensorView* v) override;
  std::optional<OpenStep> open_step() const override;
  void attend_end(const TensorOut& out, float* lse) override;
  void extend(uint32_t layer, const ExtendArgs& args) override;
  void accept(uint32_t m, const uint32_t* path) override {
    identity_.truncate(acceptance_.accept(m, path));
  }
  void set_extend_pattern(const char* pattern, uint32_t tokens) override;
  void set_prompt_chunk(uint32_t tokens) override { patterns_.set_prompt_chunk(tokens); }
  void attend_queries(uint32_t layer, const TensorView& q, const TensorOut& out,
                      float* lse) override;
  gpu::PromptBlocks extend_blocks() const override { return patterns_.blocks(); }
  Session& batch_member() override { return *this; }
  void read_rows(uint32_t layer, uint32_t first, uint32_t n, const TensorOut* k,
                 const TensorOut* v) override;
  void attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out,
                        float* lse) override;
  void attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                     const TensorOut& out, float* lse) override;
  void search_tokens(uint32_t layer, const TensorView& q, const TokenSearch::Found& found) override;
  void set_stream(gpu::Stream stream) override { stream_.set_stream(stream); }
  void announce(uint64_t graph) override { stream_.announce(graph); }
  [[nodiscard]] uint64_t last_graph() override { return stream_.last_graph(); }
  void synchronize() override { stream_.synchronize(); }
  std::unique_ptr<SessionInterface> fork() override;
  void save(const std::string& path) override;
  Identity& identity() override { return identity_; }
  keyhole_layer_tokens layer_tokens(uint32_t layer) const override;
  keyhole_statistics statistics() const override;
  MemoryFigures memory() const override;
  void reset_statistics() override;
  keyhole_audit audit(uint32_t layer, uint32_t kv_head) override;

  struct BatchMember {
    Session* session = nullptr;
    ExtendArgs args;
    std::exception_ptr error = nullptr;  ///< why it has failed; the session has not changed then
  };
  /// Different sessions of one engine, all tensors in host memory or all on the device; members with an error or
  /// without tokens are left alone. Throws nothing that is a member's.
  static void extend_batch(uint32_t layer, std::span<BatchMember> members);

  // For files (session_file.h) and ranks (parallel/spread_session.h).
  [[nodiscard]] const std::shared_ptr<const Engine>& shared_engine() const { return engine_; }
  [[nodiscard]] HostStepper& host() { return host_; }
  [[nodiscard]] HostExtends& host_extends() { return host_extends_; }
  [[nodiscard]] StreamStepper& stream() { return stream_; }
  /// As enter(), but for the failure of earlier steps.
  void wait_until(Needs needs);
  /// Whether a step of the layer, after those that were enqueued, takes a block of pending rows in, or begins one.
  /// Waits for the host's part of the steps before.
  [[nodiscard]] bool append_will_be_due(uint32_t layer);
  [[nodiscard]] const Sequence& sequence() const { return sequence_; }
  [[nodiscard]] const IndexKeeper& keeper() const { return keeper_; }
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return sequence_.tokens(layer); }
  [[nodiscard]] uint32_t most_tokens() const;  ///< of the longest layer
  /// Each layer to its own number of tokens; the identity stays.
  void truncate_layers(std::span<const uint32_t> tokens) { tokens_.truncate(tokens); }
  [[nodiscard]] std::vector<const HeadParams*> head_params() const { return keeper_.head_params(); }
  [[nodiscard]] const Identity& identity() const { return identity_; }
  /// Waits for audits under way. After it, and without a step, the session can be copied.
  void finish_audits() { audits_.finish(); }
  void save(ChecksumWriter& out) const;
  /// The session is new, and has the parameters, and the settings of heads, of the one that was saved. Reads to the end
  /// of the file. Throws Error(corrupt | io).
  void load(ChecksumReader& in);
  void copy_from(const Session& from);  ///< of a new session, with the parameters of `from`
  /// Goes on with the figures of a session that this one takes the place of.
  void take_figures(const Session& from);

 private:
  [[nodiscard]] HostParts host_parts();
  void count_memory();
  [[nodiscard]] uint64_t device_bytes() const;

  std::shared_ptr<const Engine> engine_;
  SessionParams params_;
  Identity identity_;
  HostMemory memory_;
  PromptMemory prompt_memory_;
  StepTotals totals_;
  Sequence sequence_;
  IndexKeeper keeper_;    // Its blocks in the background read sequence_ until it ends.
  SessionAudits audits_;  // They read rows of sequence_ until they end.
  CodePlacement codes_;
  HostSteps steps_;
  StepWork work_;
  StepAudits step_audits_;
  SessionIndexing indexing_;
  ExtendedTokens extended_;
  ExtendPatterns patterns_;
  DeviceBlocks blocks_;
  StreamStepper stream_;  // Its thread reads all of the above, and nothing below.
  SessionTokens tokens_;
  HeadSettings settings_;
  HostStepper host_;
  HostExtends host_extends_;
  DevicePrompts prompts_;
  DeviceExtender device_extends_;
  Acceptance acceptance_;
  OffloadedStates states_;
};

}  // namespace keyhole::runtime
