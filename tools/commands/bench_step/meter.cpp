#include "tools/commands/bench_step/meter.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "tools/commands/bench_step/busy.h"
#include "tools/commands/bench_step/heads_runner.h"
#include "tools/commands/common/quantile.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {

Latency latency_of(std::vector<double> sample) {
  if (sample.empty()) return {};
  std::sort(sample.begin(), sample.end());
  const double sum = std::accumulate(sample.begin(), sample.end(), 0.0);
  return {sum / static_cast<double>(sample.size()), nearest_rank(sample, 0.5),
          nearest_rank(sample, 0.95), nearest_rank(sample, 0.99)};
}

StepMeter::StepMeter(const StepPlan& plan, const StepInputs& inputs, TokenStream* stream)
    : plan_(plan),
      inputs_(inputs),
      own_runner_(stream != nullptr       ? make_stream_runner(inputs, *stream)
                  : plan.ranks.by_heads() ? make_heads_runner(inputs, plan.ranks)
                                          : make_host_runner(inputs)),
      runner_(*own_runner_) {}

StepTiming StepMeter::time(const Session& session) {
  StepTiming timing;
  std::vector<double> layers;
  std::vector<double> tokens_on_host;
  std::vector<double> tokens_on_device;
  runner_.use(session.get());
  std::optional<BusyThreads> busy;
  if (plan_.busy != 0) busy.emplace(plan_.busy);
  const uint32_t n = plan_.shape.layers;
  // Half of the warm-up comes after the capture: a graph's first launches are slower, too.
  const uint32_t captured_at = plan_.graph ? plan_.warmup / 2 : plan_.tokens();
  for (uint32_t token = 0; token < plan_.tokens(); ++token) {
    throw_if_interrupted();
    if (token == captured_at) runner_.capture(session.get(), n);
    if (token == plan_.warmup) check(keyhole_session_reset_statistics(session.get()));
    const TokenTimes times = runner_.run(session.get(), token, n);
    if (token < plan_.warmup) continue;
    layers.insert(layers.end(), times.layers.begin(), times.layers.end());
    if (times.token != 0) tokens_on_host.push_back(times.token);
    if (times.device != 0) tokens_on_device.push_back(times.device);
  }
  if (busy) timing.busy_bandwidth = busy->stop();
  check_outputs(runner_, n);
  plan_.ranks.slowest(layers);
  plan_.ranks.slowest(tokens_on_host);
  timing.layer = latency_of(std::move(layers));
  timing.token = latency_of(std::move(tokens_on_host));
  timing.token_on_device = latency_of(std::move(tokens_on_device));
  if (!plan_.weights) timing.layer_in_token = timing.token_on_device.p50 / n;
  keyhole_statistics_init(&timing.statistics);
  check(keyhole_session_get_statistics(session.get(), &timing.statistics));
  plan_.ranks.add_up(timing);
  truncate(session);
  return timing;
}

keyhole_audit StepMeter::audit(const Session& session, uint32_t layers) {
  runner_.use(session.get());
  check(keyhole_session_reset_statistics(session.get()));
  for (uint32_t token = 0; token < audited_tokens(); ++token) {
    throw_if_interrupted();
    (void)runner_.run(session.get(), token, layers);
  }
  keyhole_audit figures;
  keyhole_audit_init(&figures);
  check(keyhole_session_get_audit(session.get(), KEYHOLE_ALL, KEYHOLE_ALL, &figures));
  plan_.ranks.join(figures);
  truncate(session);
  return figures;
}

Latency StepMeter::written_error(const Session& session, uint32_t layers) {
  runner_.use(session.get());
  std::vector<double> errors;
  for (uint32_t token = 0; token < audited_tokens(); ++token) {
    throw_if_interrupted();
    (void)runner_.run(session.get(), token, layers);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      for (const double error :
           output_errors(runner_, inputs_, session.get(), token, layer, plan_.ranks)) {
        errors.push_back(error);
      }
    }
  }
  truncate(session);
  return latency_of(std::move(errors));
}

uint32_t StepMeter::audited_tokens() const { return std::min(plan_.audit_steps, plan_.tokens()); }

void StepMeter::truncate(const Session& session) const {
  check(keyhole_session_truncate(session.get(), static_cast<uint32_t>(plan_.context)));
}

}  // namespace keyhole::tools
