// Exact attention to tokens that a caller has chosen by their positions, in place of a search: resident and offloaded
// ones, for every KV head its own.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "gpu/step.h"
#include "runtime/engine/engine.h"
#include "runtime/step/cost.h"
#include "runtime/step/result_sink.h"

namespace keyhole::runtime {

/// Where the tokens of one KV head lie: [0, sink) and the newest ones are resident, in order; those between are
/// offloaded.
struct HeadTokens {
  KvView offloaded;
  KvPieces resident;
};

/// The caller's choice of tokens, see keyhole_session_attend_tokens.
struct TokenChoice {
  const uint32_t* ids = nullptr;     ///< those of all KV heads, one head after the other
  const uint32_t* counts = nullptr;  ///< `[kv_heads]`
  bool with_resident = false;
};

/// Attends chosen tokens. Keeps its memory from call to call. One thread at a time.
class ChosenTokens {
 public:
  explicit ChosenTokens(const Engine& engine);

  /// Attends by queries `[q_heads, head_dim]` fp32; `sink` tokens lie before the offloaded ones. Throws
  /// Error(invalid_argument) for an id that the layer does not have, or that comes twice. The result does not depend
  /// on the number of threads.
  StepCost attend(uint32_t layer, std::span<const HeadTokens> heads, uint32_t sink,
                  const TokenChoice& choice, const float* queries);
  /// The results of the last attend().
  [[nodiscard]] const ResultArrays& results() const { return results_; }

  [[nodiscard]] size_t bytes() const;

 private:
  static constexpr uint32_t kPieces = std::tuple_size_v<decltype(KvPieces::pieces)>;
  /// The rows of one KV head that are to be attended.
  struct Rows {
    std::vector<uint32_t> offloaded;
    std::array<std::vector<uint32_t>, kPieces> resident;
    size_t first_state = 0;  ///< the first of its states, kPieces of resident rows and then chunks
    uint32_t chunks = 0;
  };
  struct Task {
    uint32_t kv_head;
    uint32_t chunk;  ///< of offloaded rows
  };
  /// Sorts the ids of a head by where they lie. marks: a bit for every token, all 0 before and after.
  void find_rows(uint32_t kv_head, const HeadTokens& tokens, uint32_t sink,
                 std::span<const uint32_t> ids, std::vector<uint64_t>& marks);
  [[nodiscard]] StateView state(size_t number) {
    return {o_.data() + number * group_ * dim_, lse_.data() + number * group_};
  }
  void attend_resident(uint32_t kv_head, const HeadTokens& tokens, bool all, const float* q);
  void attend_chunk(const Task& task, const HeadTokens& tokens, const float* q);

  const Engine* engine_;
  uint32_t group_ = 0, dim_ = 0;              // of the call under way
  std::vector<Rows> rows_;                    // [the most kv_heads]
  std::vector<std::vector<uint64_t>> marks_;  // [workers]
  std::vector<Task> tasks_;
  std::vector<float> o_, lse_;  // of all states
  LogitParams logits_;          // of the call under way
  std::vector<StateView> merged_;
  ResultArrays results_;
};

}  // namespace keyhole::runtime
