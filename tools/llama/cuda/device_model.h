// The weights of a GpuModel in device memory.
#pragma once

#include <vector>

#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/split.h"
#include "tools/llama/cuda/step_kernels.h"
#include "tools/llama/cuda/upload.h"
#include "tools/llama/gpu_model.h"

namespace keyhole::tools {

struct DeviceMatrix {
  cuda::Buffer<__nv_bfloat16> high, low;
  uint32_t rows = 0, columns = 0;

  DeviceMatrix() = default;
  /// Enqueues the copy of `matrix`: its numbers are there after upload.wait().
  DeviceMatrix(const Matrix& matrix, cuda::Upload& upload);
  [[nodiscard]] cuda::Split split() const { return {high.get(), low.get()}; }
  [[nodiscard]] cuda::StepMatrix step() const { return {split(), rows, columns}; }
};

/// The vectors and matrices of a layer, like LayerWeights; vectors are null where the family has none.
struct DeviceLayer {
  cuda::Buffer<float> attention_norm, mlp_norm;
  cuda::Buffer<float> qkv_bias, output_bias, gate_up_bias, down_bias;
  cuda::Buffer<float> q_norm, k_norm, output_norm, mlp_output_norm;
  DeviceMatrix qkv, output, gate_up, down;
};

struct GpuModel::Device {
  Device(const LlamaModel& model, cuda::Upload&& upload);

  DeviceMatrix embedding;
  std::vector<DeviceLayer> layers;
  cuda::Buffer<float> final_norm;
  DeviceMatrix lm_head;  ///< empty if tied
  float eps = 0.0F;
  bool tied = false;
  bool is_bf16 = false;  ///< no matrix of a layer has a low part

  [[nodiscard]] const DeviceMatrix& output_projection() const { return tied ? embedding : lm_head; }
  [[nodiscard]] cuda::Norm norm(const cuda::Buffer<float>& weight) const {
    return {weight.get(), eps};
  }
};

}  // namespace keyhole::tools
