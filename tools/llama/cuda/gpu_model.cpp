#include "tools/llama/gpu_model.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <exception>
#include <future>
#include <iterator>

#include "tools/llama/cuda/blas_lt.h"
#include "tools/llama/cuda/device_model.h"
#include "tools/llama/cuda/products.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools {
namespace {

using Bf16 = __nv_bfloat16;

/// The nearest bf16's bits (ties to even). Of finite numbers.
uint16_t nearest_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

template <class T>
cuda::Buffer<T> upload(const std::vector<T>& numbers) {
  cuda::Buffer<T> buffer(numbers.size());
  cuda::copy_now(buffer.get(), numbers.data(), numbers.size());
  return buffer;
}

bool all_bf16(const Matrix& matrix) {
  return std::all_of(matrix.parts.begin(), matrix.parts.end(),
                     [](const MatrixPart& part) { return part.type == ElementType::bf16; });
}

uint64_t bytes_of(const LlamaModel& model) {
  uint64_t total = 0;
  model.for_each_matrix([&](const Matrix& matrix) { total += matrix.bytes(); });
  return total;
}

/// Has the kernels of long prompts' products loaded. What cannot be loaded now is left to the prompt that needs it.
void load_products(const LlamaConfig& config) noexcept {
  try {
    constexpr size_t kLongPrompt = size_t{1} << 20U;
    const auto chunk =
        static_cast<uint32_t>(gpu_prefill_sizes(config, kLongPrompt, 0, "dense").rows.chunk);
    const uint32_t hidden = config.hidden_size, inner = config.intermediate_size;
    const auto q = static_cast<uint32_t>(config.q_width());
    const auto qkv = static_cast<uint32_t>(config.q_width() + 2 * config.kv_width());
    cuda::Products products;
    products.load(chunk, qkv, hidden, false, false);
    products.load(chunk, hidden, q, true, false);
    products.load(chunk, 2 * inner, hidden, false, config.dtype == "bfloat16");
    products.load(chunk, hidden, inner, true, false);
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace

DeviceMatrix::DeviceMatrix(const Matrix& matrix, cuda::Upload& upload)
    : high(matrix.rows * matrix.cols),
      rows(static_cast<uint32_t>(matrix.rows)),
      columns(static_cast<uint32_t>(matrix.cols)) {
  static_assert(sizeof(Bf16) == sizeof(uint16_t));
  if (all_bf16(matrix)) {
    Bf16* to = high.get();
    for (const MatrixPart& part : matrix.parts) {
      const size_t count = part.rows * matrix.cols;
      upload.copy(to, part.data, count * sizeof(Bf16));
      to += count;
    }
    upload.count(matrix.bytes());
    return;
  }
  std::vector<uint16_t> upper(high.size());
  std::vector<uint16_t> rest(high.size());
  std::atomic<bool> exact{true};
  upload.team().for_each(matrix.rows, [&](size_t row, unsigned) {
    std::vector<float> numbers(matrix.cols);
    matrix.rows_to_f32(row, row + 1, numbers.data());
    for (size_t i = 0; i < matrix.cols; ++i) {
      const size_t at = row * matrix.cols + i;
      upper[at] = nearest_bf16(numbers[i]);
      rest[at] = nearest_bf16(numbers[i] - from_bf16(upper[at]));
      if ((rest[at] & 0x7FFF) != 0) exact.store(false, std::memory_order_relaxed);
    }
  });
  upload.copy(high.get(), upper.data(), upper.size() * sizeof(uint16_t));
  if (!exact.load()) {
    low = cuda::Buffer<Bf16>(rest.size());
    upload.copy(low.get(), rest.data(), rest.size() * sizeof(uint16_t));
  }
  upload.count(matrix.bytes());
}

GpuModel::Device::Device(const LlamaModel& model, cuda::Upload&& weights_upload)
    : embedding(model.embedding, weights_upload),
      final_norm(upload(model.final_norm)),
      eps(static_cast<float>(model.config.rms_norm_eps)),
      tied(model.config.tied_output) {
  for (const LayerWeights& weights : model.layers) {
    DeviceLayer& layer = layers.emplace_back();
    layer.attention_norm = upload(weights.attention_norm);
    layer.qkv = DeviceMatrix(weights.qkv, weights_upload);
    layer.output = DeviceMatrix(weights.output, weights_upload);
    layer.mlp_norm = upload(weights.mlp_norm);
    layer.gate_up = DeviceMatrix(weights.gate_up, weights_upload);
    layer.down = DeviceMatrix(weights.down, weights_upload);
    layer.qkv_bias = upload(weights.qkv_bias);
    layer.output_bias = upload(weights.output_bias);
    layer.gate_up_bias = upload(weights.gate_up_bias);
    layer.down_bias = upload(weights.down_bias);
    layer.q_norm = upload(weights.q_norm);
    layer.k_norm = upload(weights.k_norm);
    layer.output_norm = upload(weights.output_norm);
    layer.mlp_output_norm = upload(weights.mlp_output_norm);
  }
  if (!tied) lm_head = DeviceMatrix(model.lm_head, weights_upload);
  weights_upload.wait();
  is_bf16 = std::all_of(layers.begin(), layers.end(), [](const DeviceLayer& layer) {
    return !layer.qkv.low && !layer.output.low && !layer.gate_up.low && !layer.down.low;
  });
}

std::string gpu_refusal(const LlamaConfig& config) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    return std::string("no GPU: ") + cudaGetErrorString(error);
  }
  if (devices == 0) return "no GPU";
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    return "the GPU does not answer";
  }
  if (major < 8) {
    return "the GPU is of compute capability " + std::to_string(major) + "; allowed: 8.0 or more";
  }
  // What the decoder has kernels for: of the dimensions that sessions have on a device, all but 512.
  constexpr uint32_t kHeadDims[] = {64, 80, 96, 128, 256};
  if (std::ranges::find(kHeadDims, config.head_dim) == std::end(kHeadDims)) {
    return "head_dim is " + std::to_string(config.head_dim) +
           "; allowed on the GPU: 64, 80, 96, 128, 256";
  }
  // The session's sink and window lie there, too.
  constexpr uint32_t kMostGroup = 16;
  if (config.group() > kMostGroup) {
    return "num_attention_heads is " + std::to_string(config.group()) +
           " times num_key_value_heads; allowed on the GPU: up to " + std::to_string(kMostGroup) +
           " times";
  }
  for (const auto& [name, size] : {std::pair{"hidden_size", config.hidden_size},
                                   std::pair{"intermediate_size", config.intermediate_size}}) {
    if (size % 8 != 0) {
      return std::string(name) + " is " + std::to_string(size) +
             "; allowed on the GPU: multiples of 8";
    }
  }
  return cuda::blas_lt_refusal();
}

GpuModel::GpuModel(const LlamaModel& model, const LoadProgress& progress) : model_(model) {
  if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
    throw std::runtime_error(refusal);
  }
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, 0), "its properties");
  device_name_ = properties.name;
  const auto loading = std::async(std::launch::async, [&] { load_products(model.config); });
  device_ = std::make_unique<Device>(model, cuda::Upload(bytes_of(model), progress));
  note_memory();
}
GpuModel::~GpuModel() = default;

bool GpuModel::rounds_activations(size_t context) const {
  switch (products_) {
    case PromptProducts::exact: return false;
    case PromptProducts::bf16: return true;
    case PromptProducts::automatic: break;
  }
  return context > kFineTokens && device_->is_bf16 && model_.config.dtype != "float32";
}

void GpuModel::note_memory() const noexcept {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  uint64_t seen = memory_peak_;
  while (seen < total - free && !memory_peak_.compare_exchange_weak(seen, total - free)) {
  }
}

}  // namespace keyhole::tools
