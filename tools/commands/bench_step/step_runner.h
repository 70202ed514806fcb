// Decoding steps of bench-step: the calls for a token, timed, in host memory or in the order of a CUDA stream.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/bench_step/step_data.h"
#include "tools/commands/bench_step/step_ranks.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// The input of every decoding step to every layer, fp16: `[tokens, layers, shape.token_elements()]`.
struct StepInputs {
  StepShape shape;
  uint32_t tokens = 0;
  std::vector<uint16_t> rows;

  [[nodiscard]] const uint16_t* at(uint32_t token, uint32_t layer) const {
    return rows.data() + (size_t{token} * shape.layers + layer) * shape.token_elements();
  }
  [[nodiscard]] uint16_t* at(uint32_t token, uint32_t layer) {
    return rows.data() + (size_t{token} * shape.layers + layer) * shape.token_elements();
  }
};

/// The times of one token in microseconds.
struct TokenTimes {
  std::vector<double> layers;  ///< of each attend; empty: they were not clocked
  double token =
      0;  ///< host clock, from the first call until all is done; 0: not of a clocked graph
  double device = 0;  ///< device clock; 0 without one
};

/// Runs tokens through a session. One session at a time; one thread.
class StepRunner {
 public:
  virtual ~StepRunner() = default;

  /// Call it before the first token of a session, and whenever another session's turn comes.
  virtual void use(keyhole_session* session) = 0;
  /// Makes all of the first `layers` layers attend. The next tokens come in the order of the inputs.
  virtual TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) = 0;
  /// Captures a graph, which run() replays until the next use(). Does nothing where there are no graphs.
  virtual void capture(keyhole_session* session, uint32_t layers) = 0;
  /// The output of the last token's attend of a layer, `[q_heads, head_dim]` fp16; where ranks share the heads, of
  /// all of them.
  [[nodiscard]] virtual std::vector<uint16_t> output(uint32_t layer) = 0;
};

/// Throws std::runtime_error where one of the last token's outputs is not finite.
void check_outputs(StepRunner& runner, uint32_t layers);

/// Returns |o - o*| / |o*| of each query head of a layer, over all ranks: o is the last token's output of the runner,
/// o* that of exact attention to the tokens that the session holds now, for the same query. Leaves the session in the
/// mode KEYHOLE_MODE_INDEXED.
[[nodiscard]] std::vector<double> output_errors(StepRunner& runner, const StepInputs& inputs,
                                                keyhole_session* session, uint32_t token,
                                                uint32_t layer, const StepRanks& ranks = {});

/// Calls keyhole_session_attend with fp16 rows: q and out `[q_heads, head_dim]`, k and v `[kv_heads, head_dim]`. Throws
/// LibraryError.
void attend_rows(keyhole_session* session, uint32_t layer, const StepShape& shape, const void* q,
                 const void* k, const void* v, void* out, keyhole_memory memory);

/// Makes a runner that calls keyhole_session_attend with tensors in host memory. `inputs` must outlive it.
[[nodiscard]] std::unique_ptr<StepRunner> make_host_runner(const StepInputs& inputs);
/// Makes a runner of stream steps, and uploads the inputs. `stream` must outlive it.
[[nodiscard]] std::unique_ptr<StepRunner> make_stream_runner(const StepInputs& inputs,
                                                             TokenStream& stream);

}  // namespace keyhole::tools
