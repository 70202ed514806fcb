#include "tools/commands/bench_step/comparisons.h"

#include <exception>
#include <string>

#include "tools/terminal/clock.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

// Bytes of the ring that layers are copied from: four times what a last-level cache holds, and two layers at 128k.
constexpr uint64_t kRing = uint64_t{1} << 30U;

// Lets `measure` fill in the result; its failure becomes the result's note.
template <class Measure>
StepResult comparison(const std::string& name, const std::string& note, const Measure& measure) {
  StepResult result;
  result.name = name;
  result.note = note;
  result.comparison = true;
  try {
    measure(result);
  } catch (const std::exception& e) {
    if (interrupted()) throw;
    result.note = std::string("not measured: ") + e.what();
  }
  return result;
}

// The timing of layers that always take `us` each.
StepTiming fixed_timing(double us, uint32_t layers) {
  StepTiming timing;
  timing.layer = {us, us, us, us};
  const double token = us * layers;
  timing.token = {token, token, token, token};
  keyhole_statistics_init(&timing.statistics);
  return timing;
}

}  // namespace

void StepComparisons::attend_by(keyhole_mode mode, const Session& session, const std::string& name,
                                const std::string& note) const {
  listener_.result(comparison(name, note, [&](StepResult& result) {
    check(keyhole_session_set_mode(session.get(), mode, 0));
    result.timing = meter_.time(session);
    check(keyhole_session_set_mode(session.get(), KEYHOLE_MODE_INDEXED, 0));
  }));
}

void StepComparisons::copy_over_pcie() const {
  listener_.result(comparison("K and V over PCIe", "", [&](StepResult& result) {
    if (stream_ == nullptr) throw std::runtime_error("no stream steps on a CUDA device");
    floors_.host_copy_bandwidth = stream_->host_copy_bandwidth(floors_.layer_bytes, kRing);
    const double us = 1e6 * static_cast<double>(floors_.layer_bytes) / floors_.host_copy_bandwidth;
    result.timing = fixed_timing(us, plan_.shape.layers);
    result.note = format_bytes(floors_.layer_bytes) + " a layer from pinned memory at " +
                  format_number(1e-9 * floors_.host_copy_bandwidth) +
                  " GB/s; the copies alone, without attention to them and without weights";
  }));
}

void StepComparisons::format_floor(KvFormat format) const {
  const std::string name = has_8_bits(format) ? "q8_0" : "q4_0";
  listener_.result(comparison(name + " on the card (floor)", "", [&](StepResult& result) {
    result.floor = true;
    if (floors_.copy_bandwidth <= 0) {
      throw std::runtime_error(
          "no stream steps on a CUDA device, whose copy bandwidth it is a floor by");
    }
    if (plan_.shape.head_dim % kKvFormatBlock != 0) {
      throw std::runtime_error("head_dim is " + std::to_string(plan_.shape.head_dim) +
                               "; allowed: multiples of 32");
    }
    const uint64_t numbers = 2 * plan_.context * plan_.shape.kv_elements();
    const uint64_t bytes = kv_format_bytes(format, numbers);
    const double us = 1e6 * static_cast<double>(bytes) / floors_.copy_bandwidth;
    result.timing = fixed_timing(us, plan_.shape.layers);
    result.note = "a floor, not a measurement: " + format_bytes(bytes) + " of K and V a layer at " +
                  format_number(1e-9 * floors_.copy_bandwidth) +
                  " GB/s, the speed of copies on the card; without weights";
  }));
}

void StepComparisons::attend_on_device(const Engine& engine, keyhole_session_config config,
                                       ContextFeed& context) const {
  listener_.result(comparison("full attention, " + floors_.device, "", [&](StepResult& result) {
    config.sink = 0;
    config.window = config.max_tokens;
    config.mode = KEYHOLE_MODE_EXACT;
    config.training_queries = 0;
    config.device_memory_limit = 0;
    config.host_memory_limit = 0;
    config.pinned_memory_limit = 0;
    const Session session = make_session(engine, config);
    const std::string phase = "prefill of full attention";
    const Clock::time_point start = Clock::now();
    (void)context.hand_over(phase, nullptr,
                            [&](uint32_t layer, const keyhole_tensor& k, const keyhole_tensor& v,
                                const keyhole_tensor* q) {
                              check(keyhole_session_append(session.get(), layer, &k, &v, q));
                            });
    listener_.phase({phase, seconds_since(start)});
    result.timing = meter_.time(session);
  }));
}

}  // namespace keyhole::tools
