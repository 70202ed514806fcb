// Decoding steps of bench-step: the calls of a token, timed, in host memory or in the order of a CUDA stream.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/api/handles.h"
#include "tools/commands/bench_step/step_data.h"
#include "tools/commands/bench_step/step_ranks.h"
#include "tools/cuda/token_stream.h"

namespace keyhole::tools {

/// What every decoding step brings to every layer, fp16: `[tokens, layers, shape.token_elements()]`.
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

/// Times of one token in microseconds.
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

  /// Called before the first token of a session, and where another one's turn comes.
  virtual void use(keyhole_session* session) = 0;
  /// All of the first `layers` layers attend; the next tokens come in the order of the inputs.
  virtual TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) = 0;
  /// From now on run() replays a graph, until the next use(). Nothing where there are no graphs.
  virtual void capture(keyhole_session* session, uint32_t layers) = 0;
  /// What the last token's attend of a layer wrote, `[q_heads, head_dim]` fp16: of all ranks' heads where these are shared.
  [[nodiscard]] virtual std::vector<uint16_t> output(uint32_t layer) = 0;
};

/// Throws std::runtime_error where one of the last token's outputs is not finite.
void check_outputs(StepRunner& runner, uint32_t layers);

/// |o - o*| / |o*| of each query head of a layer, those of all ranks: o is the last token's output of the runner, o* what
/// exact attention to the tokens that the session holds now gives for the same query. Leaves the session in the mode
/// KEYHOLE_MODE_INDEXED.
[[nodiscard]] std::vector<double> output_errors(StepRunner& runner, const StepInputs& inputs,
                                                keyhole_session* session, uint32_t token,
                                                uint32_t layer, const StepRanks& ranks = {});

/// keyhole_attend of fp16 rows: q and out `[q_heads, head_dim]`, k and v `[kv_heads, head_dim]`. Throws LibraryError.
void attend_rows(keyhole_session* session, uint32_t layer, const StepShape& shape, const void* q,
                 const void* k, const void* v, void* out, keyhole_memory memory);

/// keyhole_attend with tensors in host memory. `inputs` must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_host_runner(const StepInputs& inputs);
/// Stream steps; uploads the inputs. `stream` must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_stream_runner(const StepInputs& inputs,
                                                             TokenStream& stream);

}  // namespace keyhole::tools
