// What engines with attention of their own ask for: the state of the offloaded tokens alone, of tokens that they have
// chosen, and the tokens that a search chooses. Nothing is appended, sink and window stay as they are, and no step is
// under way.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/session/host_stepper.h"
#include "runtime/step/chosen_tokens.h"
#include "runtime/step/token_search.h"

namespace keyhole::runtime {

class OffloadedStates {
 public:
  /// All that it is given outlives it; of params the mode counts, which may change between calls.
  OffloadedStates(const HostParts& parts, const SessionParams& params, const IndexKeeper& keeper)
      : parts_(parts), params_(&params), keeper_(&keeper) {}
  OffloadedStates(const OffloadedStates&) = delete;
  OffloadedStates& operator=(const OffloadedStates&) = delete;

  // q and out may lie in device memory, both of them and lse with them. All throw Error(unsupported) of a sliding
  // layer.
  /// See keyhole_session_attend_offloaded.
  void attend_offloaded(uint32_t layer, const TensorView& q, const TensorOut& out, float* lse);
  /// See keyhole_session_attend_tokens.
  void attend_tokens(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                     const TensorOut& out, float* lse);
  /// See keyhole_session_search_tokens. q in host memory; found: all but first_token.
  void search_tokens(uint32_t layer, const TensorView& q, TokenSearch::Found found);

  /// Host memory.
  [[nodiscard]] size_t bytes() const {
    return (chosen_ == nullptr ? 0 : chosen_->bytes()) +
           (search_ == nullptr ? 0 : search_->bytes());
  }

 private:
  /// Runs call(q, out, lse) with rows in host memory, between which and the caller's they are copied where these are a
  /// device's.
  template <class Call>
  void by_way_of_host(uint32_t layer, const TensorView& q, const TensorOut& out, float* lse,
                      const Call& call);
  void attend_offloaded_on_host(uint32_t layer, const TensorView& q, const TensorOut& out,
                                float* lse);
  void attend_tokens_on_host(uint32_t layer, const TensorView& q, const TokenChoice& choice,
                             const TensorOut& out, float* lse);
  /// Checks q and puts it where a step reads it. Throws Error(unsupported) of a sliding layer.
  void take_queries(uint32_t layer, const TensorView& q);
  /// Writes o and lse `[q_heads, head_dim]`, `[q_heads]` to the caller's; throws Error(internal) for what is not
  /// finite.
  void give_state(uint32_t layer, const float* o, const float* lse, const TensorOut& out,
                  float* out_lse) const;

  HostParts parts_;
  const SessionParams* params_;
  const IndexKeeper* keeper_;
  std::unique_ptr<ChosenTokens> chosen_;  ///< null: no call has needed it
  std::unique_ptr<TokenSearch> search_;   ///< null: no call has needed it
};

}  // namespace keyhole::runtime
