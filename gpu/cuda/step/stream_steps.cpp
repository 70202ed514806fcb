// CudaStepper's steps on a caller's stream: which kernels a step takes, and what they are told.
#include <algorithm>

#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/exchange/answer.h"
#include "gpu/cuda/exchange/host_merge.h"
#include "gpu/cuda/step/codes_steps.h"
#include "gpu/cuda/step/cuda_step_group.h"
#include "gpu/cuda/step/cuda_stepper.h"

namespace keyhole::gpu {
namespace {

void check_rows(const TensorView& rows, const char* what) {
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

void CudaStepper::check_layer(uint32_t layer) const {
  if (layer < shape_.layers) return;
  throw Error(Status::invalid_argument, "a step of layer " + std::to_string(layer) +
                                            "; the session has " + std::to_string(shape_.layers));
}

void CudaStepper::check_step(uint32_t layer, const TensorView& q, const TensorView* k,
                             const TensorView* v) const {
  check_layer(layer);
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

uint64_t CudaStepper::capture_id(Stream stream) const {
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

void CudaStepper::check_capture(Stream stream) const {
  if (signal_ == Signal::host_launch && is_capturing(stream)) {
    throw Error(Status::unsupported,
                "a graph of steps on a machine where the device cannot wait for the host "
                "(Signal::host_launch)");
  }
}

void CudaStepper::set_keeps_answer(Layer& layer, bool keeps) const {
  if (keeps && !shape_.keeps_answers) {
    throw Error(Status::invalid_argument,
                "a step that keeps its answer, in a session without memory for answers");
  }
  layer.keeps_answer = keeps;
}

StepParams CudaStepper::open_step(uint32_t layer, const TensorView& q, const TensorView* k,
                                  const TensorView* v, const OnDevice& tokens, Stream stream) {
  check_step(layer, q, k, v);
  store_->open_to_streams();
  check_capture(stream);
  Layer& l = layers_[layer];
  l.codes = tokens.codes == nullptr ? nullptr : &cuda_codes(*tokens.codes);
  l.q = q;
  set_keeps_answer(l, tokens.keeps_answer);
  StepParams p = step_params(layer, StepQueue::stream);
  p.q = q;
  if (k != nullptr) p.k = *k;
  if (v != nullptr) p.v = *v;
  return p;
}

StepParams CudaStepper::params_with_codes(uint32_t layer, StepParams p) {
  Layer& l = layers_[layer];
  p.waits_for_last = true;
  p.merge = merge_params(layer, {}, nullptr);
  // A step that was given up is left to the kernel, which notes it.
  if (signal_ == Signal::host_launch) p.merge.wait = !exchange_->wait_for_delivery(layer, l.begun);
  ++l.begun;
  return p;
}

MergeParams CudaStepper::merge_params(uint32_t layer, const TensorOut& out, float* lse) const {
  MergeParams m;
  exchange_->set_waiting(layer, m);
  m.out = out;
  m.lse = lse;
  m.resident_o = store_->scratch<float>(store_->layout().resident_o(layer));
  m.resident_lse = store_->scratch<float>(store_->layout().resident_lse(layer));
  m.waited = store_->scratch<WaitSums>(store_->layout().waited());
  m.group = shape_.q_heads / shape_.kv_heads;
  m.head_dim = shape_.head_dim;
  return m;
}

void CudaStepper::begin(uint32_t layer, const TensorView& q, const TensorView* k,
                        const TensorView* v, const OnDevice& tokens, Stream stream) {
  const DeviceScope device(config_.ordinal);
  const StepParams p = open_step(layer, q, k, v, tokens, stream);
  Layer& l = layers_[layer];
  if (l.codes != nullptr) {
    launcher_->launch(params_with_codes(layer, p), stream_of(stream));
    enqueue_codes_pass(l.codes->describe(layer, q), l.codes->launches_ahead(), stream_of(stream));
    return;
  }
  ++l.begun;
  launcher_->launch(p, stream_of(stream));
}

void CudaStepper::end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) {
  check_layer(layer);
  check_rows(out, "out");
  const DeviceScope device(config_.ordinal);
  if (!layers_[layer].keeps_answer) return write(layer, out, lse, stream);
  write(layer, answer_rows(), answer_lse(), stream);
  hand_answer_over(layer, out, lse, stream);
}

void CudaStepper::write(uint32_t layer, const TensorOut& out, float* lse, Stream stream) {
  if (const Layer& l = layers_[layer]; l.codes != nullptr) {
    CodesStep s = l.codes->describe(layer, l.q);
    s.resident_o = store_->scratch<float>(store_->layout().resident_o(layer));
    s.resident_lse = store_->scratch<float>(store_->layout().resident_lse(layer));
    s.out = out;
    s.lse = lse;
    enqueue_codes_rest(s, l.codes->launches_ahead(), stream_of(stream));
    return;
  }
  MergeParams m = merge_params(layer, out, lse);
  // A step that was given up is left to the kernel, which notes it.
  if (signal_ == Signal::host_launch) {
    m.wait = !exchange_->wait_for_delivery(layer, layers_[layer].begun);
  }
  launch_host_merge(m, store_->states(layer), shape_.kv_heads, launcher_->ahead(),
                    stream_of(stream));
}

void CudaStepper::step(uint32_t layer, const TensorView& q, const TensorView* k,
                       const TensorView* v, const OnDevice& tokens, const TensorOut& out,
                       float* lse, Stream stream) {
  const bool keeps = tokens.keeps_answer;
  if (tokens.codes != nullptr) {
    check_rows(out, "out");
    const DeviceScope device(config_.ordinal);
    const StepParams p = params_with_codes(layer, open_step(layer, q, k, v, tokens, stream));
    const CudaCodes& codes = *layers_[layer].codes;
    CodesStep s = codes.describe(layer, p.q);
    s.has_resident = true;
    s.resident = p;
    s.out = keeps ? answer_rows() : out;
    s.lse = keeps ? answer_lse() : lse;
    // What hands an answer over follows the step at once.
    enqueue_codes(s, codes.launches_ahead(), stream_of(stream), keeps ? nullptr : tokens.group);
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
  p.merges = true;
  p.merge =
      keeps ? merge_params(layer, answer_rows(), answer_lse()) : merge_params(layer, out, lse);
  launcher_->launch(p, stream_of(stream));
  if (keeps) hand_answer_over(layer, out, lse, stream);
}

void CudaStepper::step_tokens(uint32_t layer, const ManyTokens& t, Codes& codes, Stream stream) {
  check_rows(t.out, "out");
  const uint32_t most = codes.most_tokens(layer);
  const auto tokens = static_cast<uint32_t>(t.q.tokens);
  if (tokens == 0 || tokens > most || t.drafts < tokens || t.drafts > kMostDrafts) {
    throw Error(Status::invalid_argument, "a step of " + std::to_string(tokens) + " tokens and " +
                                              std::to_string(t.drafts) +
                                              " drafts; allowed are 1.." + std::to_string(most) +
                                              ", and " + std::to_string(kMostDrafts));
  }
  const DeviceScope device(config_.ordinal);
  OnDevice on_device;
  on_device.codes = &codes;
  StepParams p = params_with_codes(layer, open_step(layer, t.q, &t.k, &t.v, on_device, stream));
  p.tokens = tokens;
  p.drafts = t.drafts;
  std::copy(t.sees.begin(), t.sees.end(), p.sees);
  const CudaCodes& own = *layers_[layer].codes;
  CodesStep s = own.describe(layer, p.q, p.tokens);
  s.has_resident = true;
  s.resident = p;
  s.out = t.out;
  s.lse = t.lse;
  enqueue_codes(s, own.launches_ahead(), stream_of(stream), t.group);
}

std::unique_ptr<StepGroup> CudaStepper::make_group(uint32_t most) {
  return std::make_unique<CudaStepGroup>(config_.ordinal, most);
}

void CudaStepper::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                              std::span<const uint32_t> kept, Stream stream) {
  store_->keep_newest(layers, of, kept, stream_of(stream));
}

void CudaStepper::synchronize(Stream stream) {
  const DeviceScope device(config_.ordinal);
  check(cudaStreamSynchronize(stream_of(stream)), "work on the caller's stream");
}

// --- answers -----------------------------------------------------------------------------------------

TensorOut CudaStepper::answer_rows() const {
  return dense_tensor(store_->scratch<std::byte>(store_->layout().answer_o()), 1, shape_.q_heads,
                      shape_.head_dim, DType::f32, Memory::device);
}
float* CudaStepper::answer_lse() const {
  return store_->scratch<float>(store_->layout().answer_lse());
}

void CudaStepper::hand_answer_over(uint32_t layer, const TensorOut& out, float* lse,
                                   Stream stream) {
  AnswerParams p;
  exchange_->set_answers(layer, p);
  p.o = store_->scratch<float>(store_->layout().answer_o());
  p.lse = answer_lse();
  p.numbers = store_->scratch<uint32_t>(store_->layout().numbers(layer));
  p.out = out;
  p.out_lse = lse;
  p.group = shape_.q_heads / shape_.kv_heads;
  p.head_dim = shape_.head_dim;
  launch_answer(p, shape_.kv_heads, launcher_->ahead(), stream_of(stream));
}

}  // namespace keyhole::gpu
