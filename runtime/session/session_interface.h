// A session as the C API calls it: one on its own (session.h), or one of ranks over which a sequence is spread
// (parallel/spread_session.h), which refuses what ranks cannot do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "gpu/prompt.h"
#include "keyhole/inspect.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/indexing/full_build.h"
#include "runtime/session/extend_args.h"
#include "runtime/session/identity.h"
#include "runtime/session/memory_figures.h"
#include "runtime/step/chosen_tokens.h"
#include "runtime/step/token_search.h"

namespace keyhole::runtime {

class Session;

/// What a call needs of the session's steps.
enum class Needs {
  nothing,  ///< it reads counts and figures: waits for steps on a stream, during a capture for their host's part only
  no_step,  ///< it changes the session: refused inside a step and during a capture, waits for steps on a stream
  copy,  ///< it reads what no step may change meanwhile: as no_step, but also after stream steps have failed
  stream,  ///< it may come while a stream has steps under way
  end,     ///< it ends a step
  /// Another thread than the caller's reads figures: waits for the host's part of steps on a stream, for no stream.
  look
};

/// One call at a time. Layers are below model().layers, tensors have the shapes of their layer, and lie in device
/// memory only where engine().has_streams(): who calls has checked that. Calls throw Error and then have changed
/// nothing, except where the public header says so.
class SessionInterface {
 public:
  SessionInterface() = default;
  virtual ~SessionInterface() = default;
  SessionInterface(const SessionInterface&) = delete;
  SessionInterface& operator=(const SessionInterface&) = delete;

  [[nodiscard]] virtual const Engine& engine() const = 0;
  [[nodiscard]] virtual const SessionParams& params() const = 0;

  /// Before any other call: waits until the session is as the call needs it; throws Error(busy) where it cannot be, and
  /// the failure of earlier steps where the call changes the session.
  virtual void enter(Needs needs) = 0;
  /// A call has thrown: where the device has failed, the session takes no more steps or changes.
  virtual void keep_device_failure(const Error& e) = 0;
  /// Ends a step that is under way, before the session is destroyed. Throws what waiting for other ranks throws.
  virtual void end() = 0;

  // Settings, see keyhole_session_set_index and so on. layer and kv_head may be KEYHOLE_ALL.
  virtual void set_index(const std::string& spec) = 0;
  virtual void set_mode(keyhole_mode mode, uint32_t top_k) = 0;
  virtual void set_attend(keyhole_attend_mode attend, float min_weight) = 0;
  virtual void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) = 0;
  [[nodiscard]] virtual Budget budget(uint32_t layer, uint32_t kv_head) const = 0;

  // Tokens. Tensors of a call lie in host or device memory.
  virtual void prefill(uint32_t layer, const TensorView& k, const TensorView& v,
                       const TensorView* q) = 0;
  virtual void build(const BuildProgress& progress) = 0;
  virtual void truncate(uint32_t tokens) = 0;
  /// What takes the session's place where tokens [first, first + count) go and keys behind them are turned by `shift`
  /// positions; null: nothing changes. The session stays as it is. See keyhole_session_remove.
  [[nodiscard]] virtual std::unique_ptr<SessionInterface> without(uint32_t first, uint32_t count,
                                                                  int32_t shift) = 0;

  // Steps of one token, all of whose tensors lie in the same memory. k and v are null where nothing is appended.
  virtual void attend(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                      const TensorOut& out, float* lse) = 0;
  virtual void attend_begin(uint32_t layer, const TensorView& q, const TensorView* k,
                            const TensorView* v) = 0;
  /// The step between attend_begin() and attend_end().
  struct OpenStep {
    uint32_t layer = 0;
    bool on_device = false;  ///< where its tensors lie
  };
  [[nodiscard]] virtual std::optional<OpenStep> open_step() const = 0;
  virtual void attend_end(const TensorOut& out, float* lse) = 0;

  // Several tokens.
  virtual void extend(uint32_t layer, const ExtendArgs& args) = 0;
  virtual void accept(uint32_t tokens, const uint32_t* path) = 0;
  virtual void set_extend_pattern(const char* pattern, uint32_t tokens) = 0;
  virtual void set_prompt_chunk(uint32_t tokens) = 0;
  [[nodiscard]] virtual gpu::PromptBlocks extend_blocks() const = 0;
  /// The answers of what the layer holds to queries whose tokens are not appended: q and out in host memory, equally
  /// many tokens.
  virtual void attend_queries(uint32_t layer, const TensorView& q, const TensorOut& out,
                              float* lse) = 0;
  /// The session as a member of keyhole_session_extend_batch.
  [[nodiscard]] virtual Session& batch_member() = 0;

  // States for engines with attention of their own.
  /// Throws Error(unsupported) where the session refuses `call`, one of those below, whatever its arguments are.
  virtual void check_takes([[maybe_unused]] const char* call) const {}
  virtual void attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out,
                                float* lse) = 0;
  virtual void attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                             const TensorOut& out, float* lse) = 0;
  /// found: all but first_token.
  virtual void search_tokens(uint32_t layer, const TensorView& q,
                             const TokenSearch::Found& found) = 0;
  /// Copies n tokens of a layer, from `first` on, to k and v; null: not wanted. See keyhole_session_get_rows.
  virtual void read_rows(uint32_t layer, uint32_t first, uint32_t n, const TensorOut* k,
                         const TensorOut* v) = 0;

  // Streams.
  virtual void set_stream(gpu::Stream stream) = 0;
  /// graph: the number of one that was captured; 0: of the last one.
  virtual void announce(uint64_t graph) = 0;
  /// 0: none was captured.
  [[nodiscard]] virtual uint64_t last_graph() = 0;
  virtual void synchronize() = 0;

  // Copies.
  [[nodiscard]] virtual std::unique_ptr<SessionInterface> fork() = 0;
  virtual void save(const std::string& path) = 0;
  [[nodiscard]] virtual Identity& identity() = 0;

  // Figures.
  [[nodiscard]] virtual keyhole_layer_tokens layer_tokens(uint32_t layer) const = 0;
  [[nodiscard]] virtual keyhole_statistics statistics() const = 0;
  [[nodiscard]] virtual MemoryFigures memory() const = 0;
  virtual void reset_statistics() = 0;
  /// Waits for audits under way.
  [[nodiscard]] virtual keyhole_audit audit(uint32_t layer, uint32_t kv_head) = 0;
};

/// Throws Error(invalid_argument) for a layer that the model does not have.
void check_layer(const ModelShape& model, uint32_t layer);
/// Throws Error(busy): the call cannot come inside a step.
[[noreturn]] void throw_in_step();

}  // namespace keyhole::runtime
