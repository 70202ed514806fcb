// Decoding steps of bench-step: the calls of a token, timed, in host memory or in the order of a CUDA stream.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tools/commands/library.h"
#include "tools/commands/step_data.h"
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
  std::vector<double> layers;  ///< of each attend
  double token = 0;            ///< host clock, from the first call until all is done
  double device = 0;           ///< device clock; 0 without one
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
  /// Throws std::runtime_error where the last token's outputs are not finite.
  virtual void check_outputs(uint32_t layers) = 0;
};

/// keyhole_attend with tensors in host memory. `inputs` must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_host_runner(const StepInputs& inputs);
/// Stream steps; uploads the inputs. `stream` must outlive the runner.
[[nodiscard]] std::unique_ptr<StepRunner> make_stream_runner(const StepInputs& inputs,
                                                             TokenStream& stream);

}  // namespace keyhole::tools
