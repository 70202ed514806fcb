// The GPU decoder in a build without CUDA: a clear answer.
#include <stdexcept>

#include "tools/llama/gpu_decoder.h"
#include "tools/llama/gpu_head.h"

namespace keyhole::tools {
namespace {

constexpr const char* kReason = "this program was built without CUDA";

}  // namespace

struct GpuModel::Device {};
class GpuDecoder::Steps {};

std::string gpu_refusal(const LlamaConfig&) { return kReason; }

GpuModel::GpuModel(const LlamaModel& model, const LoadProgress&) : model_(model) {
  throw std::runtime_error(kReason);
}
GpuModel::~GpuModel() = default;
void GpuModel::note_memory() const noexcept {}

void check_prefill_pattern(const LlamaConfig&, const std::string&) {
  throw std::runtime_error(kReason);
}

std::vector<float> gpu_prefill(const GpuModel&, std::span<const uint32_t>, const LayerSink&,
                               const PrefillProgress&, PrefillTimes*) {
  throw std::runtime_error(kReason);
}

std::vector<float> gpu_prefill_to_device(const GpuModel&, std::span<const uint32_t>,
                                         const DeviceSink&, const PrefillProgress&) {
  throw std::runtime_error(kReason);
}

struct GpuHead::Memory {};
GpuHead::GpuHead(uint32_t dim) : dim_(dim) { throw std::runtime_error(kReason); }
GpuHead::~GpuHead() = default;
void GpuHead::take(const HeadRows& head) { tokens_ = head.tokens; }
double GpuHead::attend(keyhole_prompt*, float*, float*) { return dim_ * 0.0; }

GpuDecoder::GpuDecoder(const GpuModel&, KeyholeCache&, HeldTokens) {
  throw std::runtime_error(kReason);
}
GpuDecoder::~GpuDecoder() = default;
std::span<const float> GpuDecoder::prefill(std::span<const uint32_t>, const PrefillProgress&) {
  return {};
}
std::span<const float> GpuDecoder::step(uint32_t) { return {}; }
std::span<const float> GpuDecoder::extend(std::span<const uint32_t>) { return {}; }
size_t GpuDecoder::tokens_at_once() const { return 1; }
void GpuDecoder::take_at_once(size_t) {}
void GpuDecoder::truncate(uint32_t) {}
uint32_t GpuDecoder::tokens() const { return 0; }
size_t GpuDecoder::rope_tokens() const { return 0; }
bool GpuDecoder::turns_otherwise(size_t) const { return false; }
void GpuDecoder::set_attention_hook(AttentionHook) {}
const StepTimes& GpuDecoder::times() const {
  static const StepTimes none;
  return none;
}
void GpuDecoder::reset_times() {}

}  // namespace keyhole::tools
