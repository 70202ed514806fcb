// The kernels of k-means. Points and centroids are rows of three bf16 planes, as launch_convert() to f32 writes them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace keyhole::gpu {

/// labels[i] = the first c of largest  points[i] . centroids[c] - offsets[c].
cudaError_t launch_assign(const uint16_t* points, uint32_t count, uint32_t dim,
                          const uint16_t* centroids, const float* offsets, uint32_t clusters,
                          uint32_t* labels, cudaStream_t stream);

/// Raises *largest to the bits of the largest |element|, if those are larger.
cudaError_t launch_largest(const float* numbers, size_t count, uint32_t* largest,
                           cudaStream_t stream);

/// sums[label, j] += round(points[i, j] * scale), sizes[label] += 1.
cudaError_t launch_accumulate(const uint16_t* points, uint32_t count, uint32_t dim,
                              const uint32_t* labels, double scale, long long* sums,
                              uint32_t* sizes, cudaStream_t stream);

}  // namespace keyhole::gpu
