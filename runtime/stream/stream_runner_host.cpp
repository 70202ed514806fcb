// The host's part of steps: waiting for the queries, the search and attention of a step, and what the host takes of it.
#include <algorithm>
#include <chrono>
#include <exception>
#include <string>

#include "runtime/stream/stream_delivery.h"
#include "runtime/stream/stream_runner.h"

namespace keyhole::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// A step that was submitted comes within the time of a model layer's other kernels, 100 us to 1 ms: the serving
// thread spins for it, as naps take 50 us or more. Beyond that (the stream has a prefill before it) the thread naps.
constexpr uint32_t kAwaitSpinUs = 3000;

}  // namespace

bool StreamRunner::can_serve(const StreamStep& step, bool waits) {
  if (failure_ || step.keeps != nullptr) return true;
  gpu::Published published;
  const uint32_t spin_us = waits ? kAwaitSpinUs : 0;
  const uint64_t timeout_us = waits ? timeout_us_ : 0;
  return steps_->await(step.layer, step.sequence, spin_us, timeout_us, gives_up_, published) ||
         waits;
}

void StreamRunner::serve(const StreamStep& step) {
  if (step.keeps != nullptr) {
    if (failure_) return;
    for (const uint32_t layer : step.keeps->layers) {
      steps_->keep_newest_of_copy(layer, step.keeps->of, step.keeps->kept);
    }
    return;
  }
  if (failure_) return steps_->give_up(step.layer, step.sequence);
  try {
    gpu::Published published;
    // Its queries are here, or the wait for them has ended without.
    if (!steps_->await(step.layer, step.sequence, 0, 0, gives_up_, published)) {
      std::string text;
      const Status status = steps_->failure(text);
      if (status != Status::ok) throw Error(status, text);
      throw Error(Status::timeout,
                  "layer " + std::to_string(step.layer) +
                      ": the query of a step has not come within " +
                      std::to_string(timeout_us_ / 1000) +
                      " ms (timeout_ms): was the stream's work, or an announced graph, launched?");
    }
    serve_published(step, published);
  } catch (...) {
    client_->drop_audit();
    keep_failure();
    steps_->give_up(step.layer, step.sequence);
  }
}

void StreamRunner::serve_published(const StreamStep& step, const gpu::Published& published) {
  const auto arrived = Clock::now();
  client_->close_audit(true);  // the stream comes here after the steps before have ended
  check_finite_rows(step, published);
  if (step.coded) {
    if (step.appends != 0) client_->append_published(step.layer, published, step.appends);
    const uint32_t heads = model_.of(step.layer).kv_heads;
    for (uint32_t h = 0; h < heads; ++h) steps_->deliver(step.layer, h, step.sequence);
    steps_served_ += 1;
    coded_tokens_ += std::max(step.appends, 1U);
    // After all that the device could wait for. q stays until the host has taken the layer's next step.
    if (!step.audited) return;
    client_->begin_audit(step, published);
    client_->end_served_audit();
    return;
  }
  // A full window gives tokens to the host, which this very step attends there.
  const bool overflows = step.appends != 0 && client_->resident_counts(step.layer).window ==
                                                  params_->window + params_->flush_block;
  if (overflows) client_->append_published(step.layer, published, 1);
  const uint32_t appended = step.appends != 0 && !overflows ? 1 : 0;
  client_->prepare_work(step.layer, client_->tokens(step.layer) + appended - 1);
  if (step.audited) client_->begin_audit(step, published);
  StreamDelivery delivery(*steps_, step);
  client_->start_step(step.layer, published.q, delivery);
  std::exception_ptr error;
  try {
    if (appended != 0) client_->append_published(step.layer, published, 1);  // while workers search
  } catch (...) {
    error = std::current_exception();
  }
  client_->finish_step();
  if (error) std::rethrow_exception(error);
  if (step.audited) client_->end_served_audit();
  serve_seconds_ += std::chrono::duration<double>(Clock::now() - arrived).count();
  steps_served_ += 1;
}

void StreamRunner::check_finite_rows(const StreamStep& step,
                                     const gpu::Published& published) const {
  const uint32_t tokens = std::max(step.appends, 1U);
  const LayerShape shape = model_.of(step.layer);
  const auto check = [&](const char* name, const void* data, uint32_t heads, DType dtype) {
    const TensorView rows =
        dense_tensor(static_cast<const std::byte*>(data), tokens, heads, shape.head_dim, dtype);
    // Rows lie one after the other: one look at all of them, and at each only where that finds something.
    if (engine_->kernels().all_finite[static_cast<int>(dtype)](
            rows.data, size_t{tokens} * heads * shape.head_dim)) {
      return;
    }
    check_finite(engine_->kernels(), rows, name, 0, tokens, dtype);
  };
  check("q", published.q, shape.q_heads, DType::f32);
  if (step.appends == 0) return;
  check("k", published.k, shape.kv_heads, model_.kv_dtype);
  check("v", published.v, shape.kv_heads, model_.kv_dtype);
}

}  // namespace keyhole::runtime
