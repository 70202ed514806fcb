// CudaResident as StreamSteps: the launches of a step, and the host's end of the exchange.
#include <algorithm>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/codes/cuda_step_group.h"
#include "gpu/cuda/common/waiting.h"
#include "gpu/cuda/resident/answer.h"
#include "gpu/cuda/resident/cuda_resident.h"

namespace keyhole::gpu {
namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }

InputRows input(const DeviceRows* rows) {
  return rows == nullptr ? InputRows{} : InputRows{rows->data, rows->head_stride, rows->dtype};
}

void check_rows(const DeviceRows& rows, const char* what) {
  if (rows.data == nullptr) {
    throw Error(Status::invalid_argument, std::string(what) + " of a step: a null pointer");
  }
  if (rows.dtype != DType::f32 && rows.dtype != DType::f16 && rows.dtype != DType::bf16) {
    throw Error(Status::invalid_argument, std::string(what) + " of a step: dtype " +
                                              dtype_name(rows.dtype) +
                                              "; allowed are f32, f16, bf16");
  }
}

}  // namespace

void CudaResident::check_step(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                              const DeviceRows* v) const {
  if (layer >= shape_.layers) {
    throw Error(Status::invalid_argument, "a step of layer " + std::to_string(layer) +
                                              "; the session has " + std::to_string(shape_.layers));
  }
  check_rows(q, "q");
  if ((k == nullptr) != (v == nullptr)) {
    throw Error(Status::invalid_argument, "a step takes k and v, or neither");
  }
  if (k == nullptr) return;
  check_rows(*k, "k");
  check_rows(*v, "v");
  if (shape_.window_capacity == 0) {
    throw Error(Status::invalid_argument, "a step that appends, with a window of no slots");
  }
}

uint64_t CudaResident::capture_id(Stream stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream_of(stream), &status, &id);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    // Implicit: the default stream, while another one is captured. Errors of earlier work are reported by the call
    // that comes to launch or to wait: a session whose device has failed can still be asked and saved.
    return error == cudaErrorStreamCaptureImplicit ? kLostCapture : 0;
  }
  if (status == cudaStreamCaptureStatusNone) return 0;
  return status == cudaStreamCaptureStatusActive ? id : kLostCapture;
}

void CudaResident::check_capture(Stream stream) const {
  if (signal_ == Signal::host_launch && is_capturing(stream)) {
    throw Error(Status::unsupported,
                "a graph of steps on a machine where the device cannot wait for the host "
                "(Signal::host_launch)");
  }
}

void CudaResident::finish_own() {
  if (!own_is_busy_) return;
  const BesideCapture beside;
  own_->wait("copying rows to the device");
  own_is_busy_ = false;
}

StepParams CudaResident::stream_params(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                                       const DeviceRows* v) {
  StepParams p = step_params(layer);
  p.q = input(&q);
  p.k = input(k);
  p.v = input(v);
  return p;
}

StepParams CudaResident::open_step(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                                   const DeviceRows* v, const OnDevice& tokens, Stream stream) {
  check_step(layer, q, k, v);
  streams_used_ = true;
  finish_own();
  check_capture(stream);
  Layer& l = layers_[layer];
  l.codes = static_cast<CudaCodes*>(tokens.codes);
  l.q = q;
  set_keeps_answer(l, tokens.keeps_answer);
  return stream_params(layer, q, k, v);
}

void CudaResident::begin(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                         const DeviceRows* v, const OnDevice& tokens, Stream stream) {
  const DeviceScope device(config_.ordinal);
  const StepParams p = open_step(layer, q, k, v, tokens, stream);
  Layer& l = layers_[layer];
  if (l.codes != nullptr) {
    launcher_->launch(params_with_codes(layer, p), stream_of(stream));
    l.codes->attend(layer, q, stream);
    return;
  }
  ++l.begun;
  launcher_->launch(p, stream_of(stream));
}

StepParams CudaResident::params_with_codes(uint32_t layer, StepParams p) {
  Layer& l = layers_[layer];
  p.waits_for_last = true;
  p.merge = merge_params(layer, {}, nullptr);
  // A step that was given up is left to the kernel, which notes it.
  if (signal_ == Signal::host_launch) p.merge.wait = !wait_for_delivery(layer, l.begun);
  ++l.begun;
  return p;
}

MergeParams CudaResident::merge_params(uint32_t layer, const DeviceRows& out, float* lse) const {
  MergeParams m;
  m.out = {out.data, out.head_stride, out.dtype};
  m.lse = lse;
  m.resident_o = scratch_.as<float>(scratch_layout_.resident_o(layer));
  m.resident_lse = scratch_.as<float>(scratch_layout_.resident_lse(layer));
  m.slots = pinned_.device(layout_.slot(layer, 0));
  m.slot_bytes = layout_.slot_bytes();
  m.delivered = pinned_.device<DeliveredLine>(layout_.delivered(layer, 0));
  m.waited = scratch_.as<WaitSums>(scratch_layout_.waited());
  m.failure = pinned_.device<FailureLine>(layout_.failure());
  m.timeout_ns = uint64_t{config_.timeout_ms} * 1'000'000;
  m.layer = layer;
  m.group = shape_.q_heads / shape_.kv_heads;
  m.head_dim = shape_.head_dim;
  return m;
}

bool CudaResident::wait_for_delivery(uint32_t layer, uint32_t sequence) const {
  const auto* lines = pinned_.as<DeliveredLine>(layout_.delivered(layer, 0));
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
  if (!wait_until(ready, kSpinUs, uint64_t{config_.timeout_ms} * 1000, [] { return false; })) {
    throw Error(Status::timeout, "layer " + std::to_string(shape_.number_of(layer)) + ", KV head " +
                                     std::to_string(head) + ": the host has not delivered step " +
                                     std::to_string(sequence) + " within " +
                                     std::to_string(config_.timeout_ms) + " ms");
  }
  return !abandoned;
}

void CudaResident::end(uint32_t layer, const DeviceRows& out, float* lse, Stream stream) {
  if (layer >= shape_.layers) {
    throw Error(Status::invalid_argument, "a step of layer " + std::to_string(layer) +
                                              "; the session has " + std::to_string(shape_.layers));
  }
  check_rows(out, "out");
  const DeviceScope device(config_.ordinal);
  if (!layers_[layer].keeps_answer) return write(layer, out, lse, stream);
  write(layer, answer_rows(), answer_lse(), stream);
  hand_answer_over(layer, out, lse, stream);
}

void CudaResident::write(uint32_t layer, const DeviceRows& out, float* lse, Stream stream) {
  if (const Layer& l = layers_[layer]; l.codes != nullptr) {
    l.codes->finish(layer, l.q, scratch_.as<float>(scratch_layout_.resident_o(layer)),
                    scratch_.as<float>(scratch_layout_.resident_lse(layer)), out, lse, stream);
    return;
  }
  MergeParams m = merge_params(layer, out, lse);
  // A step that was given up is left to the kernel, which notes it.
  if (signal_ == Signal::host_launch) m.wait = !wait_for_delivery(layer, layers_[layer].begun);
  launch_host_merge(m, scratch_.as<RingState>(scratch_layout_.states(layer)), shape_.kv_heads,
                    launcher_->ahead(), stream_of(stream));
}

void CudaResident::step(uint32_t layer, const DeviceRows& q, const DeviceRows* k,
                        const DeviceRows* v, const OnDevice& tokens, const DeviceRows& out,
                        float* lse, Stream stream) {
  if (tokens.codes != nullptr) {
    check_rows(out, "out");
    const DeviceScope device(config_.ordinal);
    const StepParams p = open_step(layer, q, k, v, tokens, stream);
    const bool keeps = tokens.keeps_answer;
    // What hands an answer over follows the step at once.
    StepGroup* const group = keeps ? nullptr : tokens.group;
    layers_[layer].codes->step(layer, q, params_with_codes(layer, p), keeps ? answer_rows() : out,
                               keeps ? answer_lse() : lse, stream, group);
    if (keeps) hand_answer_over(layer, out, lse, stream);
    return;
  }
  if (signal_ == Signal::host_launch || !launcher_->can_wait()) {
    begin(layer, q, k, v, tokens, stream);
    end(layer, out, lse, stream);
    return;
  }
  check_rows(out, "out");
  const DeviceScope device(config_.ordinal);
  StepParams p = open_step(layer, q, k, v, tokens, stream);
  const bool keeps = tokens.keeps_answer;
  p.merges = true;
  p.merge =
      keeps ? merge_params(layer, answer_rows(), answer_lse()) : merge_params(layer, out, lse);
  launcher_->launch(p, stream_of(stream));
  if (keeps) hand_answer_over(layer, out, lse, stream);
}

void CudaResident::step_tokens(uint32_t layer, const ManyTokens& t, Codes& codes, Stream stream) {
  const auto first = [](const DeviceTokens& x) {
    return DeviceRows{x.data, x.head_stride, x.dtype};
  };
  const DeviceRows q = first(t.q), k = first(t.k), v = first(t.v);
  check_rows(first(t.out), "out");
  const uint32_t most = codes.most_tokens(layer);
  if (t.tokens == 0 || t.tokens > most || t.drafts < t.tokens || t.drafts > kMostDrafts) {
    throw Error(Status::invalid_argument, "a step of " + std::to_string(t.tokens) + " tokens and " +
                                              std::to_string(t.drafts) +
                                              " drafts; allowed are 1.." + std::to_string(most) +
                                              ", and " + std::to_string(kMostDrafts));
  }
  const DeviceScope device(config_.ordinal);
  OnDevice on_device;
  on_device.codes = &codes;
  StepParams p = params_with_codes(layer, open_step(layer, q, &k, &v, on_device, stream));
  p.q.token_stride = t.q.token_stride;
  p.k.token_stride = t.k.token_stride;
  p.v.token_stride = t.v.token_stride;
  p.tokens = t.tokens;
  p.drafts = t.drafts;
  std::copy(t.sees.begin(), t.sees.end(), p.sees);
  layers_[layer].codes->step_tokens(
      layer, p, {t.out.data, t.out.head_stride, t.out.dtype, t.out.token_stride}, t.lse, stream,
      t.group);
}

std::unique_ptr<StepGroup> CudaResident::make_group(uint32_t most) {
  return std::make_unique<CudaStepGroup>(config_.ordinal, most);
}

void CudaResident::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                               std::span<const uint32_t> kept, Stream stream) {
  if (of > kMostDrafts || kept.size() > of) {
    throw Error(Status::invalid_argument, std::to_string(kept.size()) + " tokens of " +
                                              std::to_string(of) + " are to be kept; allowed are " +
                                              std::to_string(kMostDrafts));
  }
  const DeviceScope device(config_.ordinal);
  finish_own();
  KeepParams p;
  p.ring = ring_;
  p.kv_heads = shape_.kv_heads;
  p.row_bytes = static_cast<uint32_t>(row_bytes_ / shape_.kv_heads);
  p.of = of;
  p.kept = static_cast<uint32_t>(kept.size());
  for (uint32_t i = 0; i < p.kept; ++i) p.numbers[i] = static_cast<uint8_t>(kept[i]);
  p.layers = shape_.layers;
  p.states = scratch_.as<RingState>(scratch_layout_.states(0));
  p.states_bytes = scratch_layout_.states(1) - scratch_layout_.states(0);
  p.kv = kv_.data();
  p.layer_bytes = layer_bytes();
  for (const uint32_t layer : layers) p.takes_part[layer / 64] |= uint64_t{1} << layer % 64;
  launch_keep_newest(p, stream_of(stream));
}

void CudaResident::set_keeps_answer(Layer& layer, bool keeps) const {
  if (keeps && !shape_.keeps_answers) {
    throw Error(Status::invalid_argument,
                "a step that keeps its answer, in a session without memory for answers");
  }
  layer.keeps_answer = keeps;
}

DeviceRows CudaResident::answer_rows() const {
  return {scratch_.as<float>(scratch_layout_.answer_o()), shape_.head_dim, DType::f32};
}
float* CudaResident::answer_lse() const { return scratch_.as<float>(scratch_layout_.answer_lse()); }

void CudaResident::hand_answer_over(uint32_t layer, const DeviceRows& out, float* lse,
                                    Stream stream) {
  AnswerParams p;
  p.o = scratch_.as<float>(scratch_layout_.answer_o());
  p.lse = answer_lse();
  p.numbers = scratch_.as<uint32_t>(scratch_layout_.numbers(layer));
  p.out = {out.data, out.head_stride, out.dtype};
  p.out_lse = lse;
  p.answers = pinned_.device(layout_.answer(layer, 0, 0));
  p.answer_bytes = layout_.answer_bytes();
  p.slot_bytes = layout_.slot_bytes();
  p.answered = pinned_.device<PublishedLine>(layout_.answered(layer, 0));
  p.group = shape_.q_heads / shape_.kv_heads;
  p.head_dim = shape_.head_dim;
  launch_answer(p, shape_.kv_heads, launcher_->ahead(), stream_of(stream));
}

bool CudaResident::await(uint32_t layer, uint32_t sequence, uint32_t spin_us, uint64_t timeout_us,
                         const std::atomic<bool>& stop, Published& out) {
  const auto* lines = pinned_.as<PublishedLine>(layout_.published(layer, 0));
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
  std::atomic<uint32_t>& awaited = layers_[layer].awaited;
  uint32_t seen = awaited.load(std::memory_order_relaxed);
  while (!has_reached(seen, sequence) &&
         !awaited.compare_exchange_weak(seen, sequence, std::memory_order_relaxed)) {
  }
  const std::byte* rows = pinned_.data() + layout_.rows(layer, sequence);
  out.q = reinterpret_cast<const float*>(rows);
  out.k = rows + layout_.q_place();
  out.v = out.k + layout_.kv_place();
  return true;
}

StateView CudaResident::host_slot(uint32_t layer, uint32_t kv_head) {
  auto* o = pinned_.as<float>(layout_.slot(layer, kv_head));
  return {o, o + size_t{shape_.q_heads / shape_.kv_heads} * shape_.head_dim};
}

void CudaResident::deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) {
  store_release(pinned_.as<DeliveredLine>(layout_.delivered(layer, kv_head))->sequence, sequence);
}

void CudaResident::give_up(uint32_t layer, uint32_t sequence) {
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    store_release(pinned_.as<DeliveredLine>(layout_.delivered(layer, head))->abandoned, sequence);
  }
}

bool CudaResident::answer(uint32_t layer, uint32_t kv_head, uint32_t sequence, StateView& out) {
  const auto* line = pinned_.as<PublishedLine>(layout_.answered(layer, kv_head));
  if (!shape_.keeps_answers || !has_reached(load_acquire(line->sequence), sequence)) return false;
  auto* o = pinned_.as<float>(layout_.answer(layer, kv_head, sequence));
  out = {o, o + size_t{shape_.q_heads / shape_.kv_heads} * shape_.head_dim};
  return true;
}

ResidentRows CudaResident::host_copy(uint32_t layer, uint32_t kv_head) {
  const size_t offset = kv_head * (row_bytes_ / shape_.kv_heads);
  return mirror_.rows(layer, offset, shape_.head_dim, shape_.dtype);
}

uint32_t CudaResident::update_host_copy(uint32_t layer, const Published& published, std::byte* k,
                                        std::byte* v) {
  return mirror_.update_host_copy(layer, published.k, published.v, k, v);
}

ResidentPieces CudaResident::device_rows(uint32_t layer) {
  finish_own();
  const size_t row = row_bytes_ / shape_.kv_heads;
  const size_t plane = (size_t{shape_.sink} + shape_.window_capacity) * row;
  const std::byte* const base = kv_.data() + layer * layer_bytes();
  ResidentPieces all;
  mirror_.for_pieces(layer, [&](uint32_t slot, uint32_t n) {
    KvRows& piece = all.pieces[all.count++];
    piece.keys = base + slot * row;
    piece.values = piece.keys + plane;
    piece.head_stride = 2 * plane;
    piece.count = n;
    piece.dtype = shape_.dtype;
    piece.on_device = true;
  });
  return all;
}

void CudaResident::synchronize(Stream stream) {
  const DeviceScope device(config_.ordinal);
  check(cudaStreamSynchronize(stream_of(stream)), "work on the caller's stream");
}

Status CudaResident::failure(std::string& text) {
  auto& line = *pinned_.as<FailureLine>(layout_.failure());
  if (const uint64_t word = std::atomic_ref(line.word).exchange(0); word != 0) {
    const auto kind = static_cast<FailureKind>(word >> 56U);
    const uint32_t layer = shape_.number_of(static_cast<uint32_t>(word >> 44U) & 0xfffU);
    const std::string where = "step " + std::to_string(static_cast<uint32_t>(word)) + " of layer " +
                              std::to_string(layer) + ", KV head " +
                              std::to_string((word >> 32U) & 0xfffU);
    if (kind == FailureKind::untaken || kind == FailureKind::untaken_in_time) {
      const bool in_time = kind == FailureKind::untaken_in_time;
      text = where + ": the host has not taken its q, k and v" +
             (in_time ? " within " + std::to_string(config_.timeout_ms) + " ms" : "") +
             (in_time ? "" : ", but gave it up");
      return in_time ? Status::timeout : Status::cancelled;
    }
    if (kind == FailureKind::rows_in_time || kind == FailureKind::rows_given_up) {
      const bool in_time = kind == FailureKind::rows_in_time;
      text =
          where + " (of all over codes): the host has not read the rows that it chose" +
          (in_time ? " within " + std::to_string(config_.timeout_ms) + " ms" : ", but gave it up") +
          "; its output is NaN";
      return in_time ? Status::timeout : Status::cancelled;
    }
    if (kind == FailureKind::given_up) {
      text = where + ": the host gave it up; its output is NaN";
      return Status::cancelled;
    }
    text = where + ": the host's state did not come within " + std::to_string(config_.timeout_ms) +
           " ms; the output is NaN";
    return Status::timeout;
  }
  const DeviceScope device(config_.ordinal);
  const BesideCapture beside;
  const cudaError_t error = cudaStreamQuery(own_->get());
  if (error == cudaSuccess || error == cudaErrorNotReady) return Status::ok;
  text = std::string("CUDA says '") + cudaGetErrorString(error) + "' (" + cudaGetErrorName(error) +
         ")";
  return Status::device_error;
}

// Heads wait at the same time: the one that waited longest stands for the step.
uint64_t CudaResident::wait_nanoseconds() const {
  std::vector<WaitSums> sums(shape_.kv_heads);
  copy_back(scratch_layout_.waited(), sums.data(), sums.size() * sizeof(WaitSums));
  uint64_t most = 0;
  for (const WaitSums& head : sums) most = std::max(most, head.nanoseconds);
  return most;
}

uint64_t CudaResident::merges() const {
  std::vector<WaitSums> sums(shape_.kv_heads);
  copy_back(scratch_layout_.waited(), sums.data(), sums.size() * sizeof(WaitSums));
  uint64_t most = 0;
  for (const WaitSums& head : sums) most = std::max(most, head.merges);
  return most;
}

}  // namespace keyhole::gpu
