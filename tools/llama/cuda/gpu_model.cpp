#include "tools/llama/gpu_model.h"

#include <bit>

#include "tools/llama/cuda/attention.h"
#include "tools/llama/cuda/device_model.h"
#include "tools/llama/rope.h"

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
cuda::Buffer<Bf16> upload_bf16(const std::vector<uint16_t>& bits) {
  static_assert(sizeof(Bf16) == sizeof(uint16_t));
  cuda::Buffer<Bf16> buffer(bits.size());
  cuda::copy_now(reinterpret_cast<uint16_t*>(buffer.get()), bits.data(), bits.size());
  return buffer;
}

}  // namespace

DeviceMatrix::DeviceMatrix(const Matrix& matrix)
    : rows(static_cast<uint32_t>(matrix.rows)), columns(static_cast<uint32_t>(matrix.cols)) {
  if (!matrix.bf16.empty()) {
    high = upload_bf16(matrix.bf16);
    return;
  }
  std::vector<uint16_t> upper(matrix.data.size());
  std::vector<uint16_t> rest(matrix.data.size());
  for (size_t i = 0; i < matrix.data.size(); ++i) {
    upper[i] = nearest_bf16(matrix.data[i]);
    rest[i] = nearest_bf16(matrix.data[i] - from_bf16(upper[i]));
  }
  high = upload_bf16(upper);
  low = upload_bf16(rest);
}

GpuModel::Device::Device(const LlamaModel& model)
    : embedding(model.embedding),
      final_norm(upload(model.final_norm)),
      frequencies(upload(Rope(model.config).frequencies())),
      eps(static_cast<float>(model.config.rms_norm_eps)),
      tied(model.config.tied_output) {
  for (const LayerWeights& weights : model.layers) {
    DeviceLayer& layer = layers.emplace_back();
    layer.attention_norm = upload(weights.attention_norm);
    layer.qkv = DeviceMatrix(weights.qkv);
    layer.output = DeviceMatrix(weights.output);
    layer.mlp_norm = upload(weights.mlp_norm);
    layer.gate_up = DeviceMatrix(weights.gate_up);
    layer.down = DeviceMatrix(weights.down);
  }
  if (!tied) lm_head = DeviceMatrix(model.lm_head);
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
  if (!cuda::attention_has(config.head_dim)) {
    return "head_dim is " + std::to_string(config.head_dim) +
           "; allowed on the GPU: 64, 80, 96, 128, 256";
  }
  for (const auto& [name, size] : {std::pair{"hidden_size", config.hidden_size},
                                   std::pair{"intermediate_size", config.intermediate_size}}) {
    if (size % 8 != 0) {
      return std::string(name) + " is " + std::to_string(size) +
             "; allowed on the GPU: multiples of 8";
    }
  }
  return {};
}

GpuModel::GpuModel(const LlamaModel& model) : model_(model) {
  if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
    throw std::runtime_error(refusal);
  }
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, 0), "its properties");
  device_name_ = properties.name;
  device_ = std::make_unique<Device>(model);
}
GpuModel::~GpuModel() = default;

}  // namespace keyhole::tools
