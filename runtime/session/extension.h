// Several new tokens of one layer of one session, see session_extend.cpp; batches have several of these under way at once.
#pragma once

#include <chrono>

#include "runtime/session/session.h"
#include "runtime/step/new_tokens.h"

namespace keyhole::runtime {

/// A keyhole_extend of one session: start() and finish() in turn until start() has nothing left to do, then append(). The
/// session is used by nobody else meanwhile.
class Session::Extension {
 public:
  /// Checks and prepares all. Throws Error; the session's tokens have not changed then.
  /// asks_only: the tokens are somebody else's, there are queries alone.
  Extension(Session& session, uint32_t layer, const ExtendArgs& args, bool asks_only = false);
  ~Extension();
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;

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
  void put_queries();
  void write_answers();

  Session* s_;
  uint32_t layer_;
  ExtendArgs args_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  double append_seconds_ = 0.0;
  bool asks_only_;
  bool by_pattern_ = false;  ///< all at once, without a step
  NewTokens fresh_;
  DecodeStep* joint_ = nullptr;  ///< of several tokens; null: of one at a time
  DecodeStep* step_ = nullptr;   ///< the one under way
  bool is_prepared_ = false, under_way_ = false;
};

}  // namespace keyhole::runtime
