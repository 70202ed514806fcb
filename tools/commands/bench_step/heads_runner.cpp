#include "tools/commands/bench_step/heads_runner.h"

#include <algorithm>
#include <exception>

#include "tools/terminal/clock.h"

namespace keyhole::tools {
namespace {

class HeadsRunner final : public StepRunner {
 public:
  HeadsRunner(const StepInputs& inputs, const StepRanks& ranks)
      : inputs_(inputs),
        ranks_(ranks),
        own_(inputs.shape.q_elements() + 1),
        all_(own_.size() * ranks.size()),
        outputs_(inputs.shape.layers) {
    for (auto& out : outputs_) out.resize(inputs.shape.q_elements() * ranks.size());
  }

  void use(keyhole_session*) override {}
  void capture(keyhole_session*, uint32_t) override {}

  TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) override {
    TokenTimes times;
    times.layers.reserve(layers);
    const auto start = Clock::now();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const auto begin = Clock::now();
      attend(session, token, layer);
      times.layers.push_back(microseconds_since(begin));
    }
    times.token = microseconds_since(start);
    return times;
  }

  std::vector<uint16_t> output(uint32_t layer) override { return outputs_[layer]; }

 private:
  void attend(keyhole_session* session, uint32_t token, uint32_t layer) {
    const StepShape& shape = inputs_.shape;
    const uint16_t* q = inputs_.at(token, layer);
    const uint16_t* k = q + shape.q_elements();
    std::exception_ptr error;
    try {
      attend_rows(session, layer, shape, q, k, k + shape.kv_elements(), own_.data(), KEYHOLE_HOST);
    } catch (...) {
      error = std::current_exception();  // the others are told, as they wait for this rank's heads
    }
    own_.back() = error ? 1 : 0;
    ranks_.gather(own_.data(), all_.data(), own_.size() * sizeof(uint16_t));
    bool failed = false;
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      const uint16_t* part = all_.data() + r * own_.size();
      std::copy_n(part, shape.q_elements(), outputs_[layer].data() + r * shape.q_elements());
      failed |= part[shape.q_elements()] != 0;
    }
    if (!failed) return;
    ranks_.together([&] {
      if (error) std::rethrow_exception(error);
    });
  }

  const StepInputs& inputs_;
  const StepRanks& ranks_;
  std::vector<uint16_t> own_, all_;  ///< outputs of a rank, and behind them whether it has failed
  std::vector<std::vector<uint16_t>> outputs_;  ///< by layer, `[q_heads of all ranks, head_dim]`
};

}  // namespace

std::unique_ptr<StepRunner> make_heads_runner(const StepInputs& inputs, const StepRanks& ranks) {
  return std::make_unique<HeadsRunner>(inputs, ranks);
}

}  // namespace keyhole::tools
