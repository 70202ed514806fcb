// Several new tokens of one layer of one session, with tensors in host memory: their K and V in the dtype in which they
// will be stored, the answers of some tokens after the other, each by one step over what the session holds and the new
// tokens that they see, and when all answers are known the append. Batches have several of these under way at once.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/session/extend_args.h"
#include "runtime/session/extended_tokens.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/host_pattern.h"
#include "runtime/session/host_stepper.h"

namespace keyhole::runtime {

/// Parts of a session that extensions on the host use; all of them outlive who is given them.
struct ExtensionParts {
  HostParts host;
  HostStepper& stepper;
  HostMemory& memory;
  ExtendPatterns& patterns;
  HostPattern& pattern;
  ExtendedTokens& extended;
  std::vector<std::byte>& new_rows;  ///< memory for K and V of the extension under way
};

/// A keyhole_session_extend of one session: start() and finish() in turn until start() has nothing left to do, then
/// append(). The session is used by nobody else meanwhile.
class HostExtension {
 public:
  enum class Tokens : uint8_t {
    its_own,        ///< they will be appended
    somebody_elses  ///< there are queries alone, which ask for the states of what the layer holds
  };
  /// Checks and prepares all. Throws Error; the session's tokens have not changed then.
  HostExtension(const ExtensionParts& parts, uint32_t layer, const ExtendArgs& args,
                Tokens tokens = Tokens::its_own);
  ~HostExtension();
  HostExtension(const HostExtension&) = delete;
  HostExtension& operator=(const HostExtension&) = delete;

  /// Hands a step for the next tokens to the pool; false: all are answered.
  [[nodiscard]] bool start() {
    if (!prepare()) return false;
    launch();
    return true;
  }
  /// Its two halves, between which the step may be planned for a CommonPass.
  [[nodiscard]] bool prepare();
  void launch();
  [[nodiscard]] DecodeStep& plan();
  /// Waits for it and writes its answers.
  void finish();
  void append();

 private:
  void store_new_rows();
  void describe_new_rows(const std::byte* k, const std::byte* v, uint32_t n);

  ExtensionParts parts_;
  uint32_t layer_;
  ExtendArgs args_;
  Stopwatch watch_;
  double append_seconds_ = 0.0;
  bool by_pattern_ = false;  ///< all at once, without a step
  bool is_prompt_ = false;   ///< the queries guide the index
  NewTokens fresh_;
  DecodeStep* joint_ = nullptr;  ///< of several tokens; null: of one at a time
  DecodeStep* step_ = nullptr;   ///< the one under way
  StepTokens asking_;            ///< of it
  bool is_prepared_ = false, under_way_ = false;
};

}  // namespace keyhole::runtime
