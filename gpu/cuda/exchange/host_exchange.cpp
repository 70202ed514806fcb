#include "gpu/cuda/exchange/host_exchange.h"

#include <cstring>

#include "gpu/cuda/common/waiting.h"

namespace keyhole::gpu {

HostExchange::HostExchange(const ResidentShape& shape, uint32_t timeout_ms)
    : shape_(shape),
      layout_(shape),
      timeout_ms_(timeout_ms),
      awaited_(shape.layers),
      memory_(layout_.bytes()) {}

void HostExchange::set_publishing(uint32_t layer, StepParams& p) const {
  p.published = memory_.device<PublishedLine>(layout_.published(layer, 0));
  p.rows = memory_.device(layout_.rows(layer, 0));
  p.rows_bytes = layout_.rows_bytes();
  p.q_bytes = layout_.q_place();
  p.kv_bytes = layout_.kv_place();
}

void HostExchange::set_waiting(uint32_t layer, MergeParams& m) const {
  m.slots = memory_.device(layout_.slot(layer, 0));
  m.slot_bytes = layout_.slot_bytes();
  m.delivered = memory_.device<DeliveredLine>(layout_.delivered(layer, 0));
  m.failure = failure_line();
  m.timeout_ns = timeout_ns();
  m.layer = layer;
}

void HostExchange::set_answers(uint32_t layer, AnswerParams& p) const {
  p.answers = memory_.device(layout_.answer(layer, 0, 0));
  p.answer_bytes = layout_.answer_bytes();
  p.slot_bytes = layout_.slot_bytes();
  p.answered = memory_.device<PublishedLine>(layout_.answered(layer, 0));
}

// --- steps on a stream -------------------------------------------------------------------------------

bool HostExchange::await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
                         const std::atomic<bool>& stop, Published& out) {
  const auto* lines = memory_.as<PublishedLine>(layout_.published(layer, 0));
  uint32_t head = 0;
  const auto ready = [&] {
    while (head < shape_.kv_heads && has_reached(load_acquire(lines[head].sequence), sequence)) {
      ++head;
    }
    return head == shape_.kv_heads;
  };
  const auto stopped = [&] { return stop.load(std::memory_order_relaxed); };
  if (!wait_until(ready, spin_us, timeout_us, stopped)) return false;
  // Of two threads that await, one may be a step behind.
  std::atomic<uint32_t>& awaited = awaited_[layer];
  uint32_t seen = awaited.load(std::memory_order_relaxed);
  while (!has_reached(seen, sequence) &&
         !awaited.compare_exchange_weak(seen, sequence, std::memory_order_relaxed)) {
  }
  const std::byte* rows = memory_.data() + layout_.rows(layer, sequence);
  out.q = reinterpret_cast<const float*>(rows);
  out.k = rows + layout_.q_place();
  out.v = out.k + layout_.kv_place();
  return true;
}

StateView HostExchange::host_slot(uint32_t layer, uint32_t kv_head) const {
  auto* o = memory_.as<float>(layout_.slot(layer, kv_head));
  return {o, o + size_t{group()} * shape_.head_dim};
}

void HostExchange::deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) {
  store_release(memory_.as<DeliveredLine>(layout_.delivered(layer, kv_head))->sequence, sequence);
}

void HostExchange::give_up(uint32_t layer, uint32_t sequence) {
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    store_release(memory_.as<DeliveredLine>(layout_.delivered(layer, head))->abandoned, sequence);
  }
}

void HostExchange::give_up_all() {
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    constexpr uint32_t kFarAhead = 1U << 30U;
    give_up(layer, awaited_[layer].load() + kFarAhead);
  }
}

bool HostExchange::answer(uint32_t layer, uint32_t kv_head, uint32_t sequence,
                          StateView& out) const {
  const auto* line = memory_.as<PublishedLine>(layout_.answered(layer, kv_head));
  if (!shape_.keeps_answers || !has_reached(load_acquire(line->sequence), sequence)) return false;
  auto* o = memory_.as<float>(layout_.answer(layer, kv_head, sequence));
  out = {o, o + size_t{group()} * shape_.head_dim};
  return true;
}

bool HostExchange::wait_for_delivery(uint32_t layer, uint32_t sequence) const {
  const auto* lines = memory_.as<DeliveredLine>(layout_.delivered(layer, 0));
  bool abandoned = false;
  uint32_t head = 0;
  const auto ready = [&] {
    while (head < shape_.kv_heads && has_reached(load_acquire(lines[head].sequence), sequence)) {
      ++head;
    }
    if (head == shape_.kv_heads) return true;
    abandoned = has_reached(load_acquire(lines[head].abandoned), sequence);
    return abandoned;
  };
  constexpr uint64_t kSpinUs = 1000;
  if (!wait_until(ready, kSpinUs, uint64_t{timeout_ms_} * 1000, [] { return false; })) {
    throw Error(Status::timeout, "layer " + std::to_string(shape_.number_of(layer)) + ", KV head " +
                                     std::to_string(head) + ": the host has not delivered step " +
                                     std::to_string(sequence) + " within " +
                                     std::to_string(timeout_ms_) + " ms");
  }
  return !abandoned;
}

Status HostExchange::failure(std::string& text) {
  auto& line = *memory_.as<FailureLine>(layout_.failure());
  const uint64_t word = std::atomic_ref(line.word).exchange(0);
  if (word == 0) return Status::ok;
  const auto kind = static_cast<FailureKind>(word >> 56U);
  const uint32_t layer = shape_.number_of(static_cast<uint32_t>(word >> 44U) & 0xfffU);
  const std::string where = "step " + std::to_string(static_cast<uint32_t>(word)) + " of layer " +
                            std::to_string(layer) + ", KV head " +
                            std::to_string((word >> 32U) & 0xfffU);
  if (kind == FailureKind::untaken || kind == FailureKind::untaken_in_time) {
    const bool in_time = kind == FailureKind::untaken_in_time;
    text = where + ": the host has not taken its q, k and v" +
           (in_time ? " within " + std::to_string(timeout_ms_) + " ms" : "") +
           (in_time ? "" : ", but gave it up");
    return in_time ? Status::timeout : Status::cancelled;
  }
  if (kind == FailureKind::rows_in_time || kind == FailureKind::rows_given_up) {
    const bool in_time = kind == FailureKind::rows_in_time;
    text = where + " (of all over codes): the host has not read the rows that it chose" +
           (in_time ? " within " + std::to_string(timeout_ms_) + " ms" : ", but gave it up") +
           "; its output is NaN";
    return in_time ? Status::timeout : Status::cancelled;
  }
  if (kind == FailureKind::given_up) {
    text = where + ": the host gave it up; its output is NaN";
    return Status::cancelled;
  }
  text = where + ": the host's state did not come within " + std::to_string(timeout_ms_) +
         " ms; the output is NaN";
  return Status::timeout;
}

// --- steps with tensors of the host ------------------------------------------------------------------

void HostExchange::set_result(uint32_t ticket, StepParams& p) const {
  p.resident_o = memory_.device<float>(layout_.host_o());
  p.resident_lse = memory_.device<float>(layout_.host_lse());
  p.done = memory_.device<PublishedLine>(layout_.host_done(0));
  p.ticket = ticket;
}

bool HostExchange::has_result(uint32_t ticket, uint32_t& first) const {
  const auto* done = memory_.as<PublishedLine>(layout_.host_done(0));
  while (first < shape_.kv_heads && has_reached(load_acquire(done[first].sequence), ticket)) {
    ++first;
  }
  return first == shape_.kv_heads;
}

void HostExchange::read_result(StateView out) const {
  std::memcpy(out.o, memory_.data() + layout_.host_o(), layout_.q_bytes());
  std::memcpy(out.lse, memory_.data() + layout_.host_lse(), shape_.q_heads * sizeof(float));
}

}  // namespace keyhole::gpu
