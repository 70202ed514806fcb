// Where a thread block of the pass by warpgroups (gpu/cuda/codes/warpgroup.cuh) leaves its states, as that of wide.cuh
// does: those of a row lie among the states of the row's part. While codes are attended, the state of the block's
// resident tokens waits there.
#pragma once

#include "gpu/cuda/codes/resident_rows.cuh"
#include "gpu/cuda/codes/wide_params.h"
#include "gpu/cuda/codes/wide_shape.cuh"

namespace keyhole::gpu::codes {

/// The maximum in base 2 and the sum of the weights of each row, of a thread block's codes or of its resident tokens.
template <int kHeads>
struct StateSums {
  float top[kHeads], sum[kHeads];
};

template <int kDim, int kHeads, int kThreads>
class GroupStates {
 public:
  static constexpr int kQuads = kHeads * kDim / 4;                  ///< of all rows
  static constexpr int kEach = (kQuads + kThreads - 1) / kThreads;  ///< of a thread
  /// The quads of resident tokens that a thread brings back.
  struct Residents {
    float4 quads[kEach] = {};
  };

  __device__ GroupStates(const WideParams& p, uint32_t kv_head) : p_(p), kv_head_(kv_head) {}

  /// Leaves a row's state of the resident tokens in its place, by a warp; x: a lane's quads.
  __device__ void put(int row, const float (&x)[kLaneParts<kDim>]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (static_cast<uint32_t>(row) >= p_.step.group || 4 * lane >= kDim) return;
    store_quads<kDim>(state_of(static_cast<uint32_t>(row)), lane, x, 1.0F);
  }
  /// Asks for what put() has left, all at once; of a step without resident tokens zeros.
  __device__ Residents load() const {
    Residents residents;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = static_cast<int>(threadIdx.x) + e * kThreads;
      const auto row = static_cast<uint32_t>(i / (kDim / 4));
      if (!p_.step.has_resident || i >= kQuads || row >= p_.step.group) break;
      residents.quads[e] = __ldcg(reinterpret_cast<const float4*>(state_of(row)) + i % (kDim / 4));
    }
    return residents;
  }
  /// Leaves the states of codes and resident tokens, by all threads. states: `[kHeads]` rows of kRow floats in shared
  /// memory, the sums of weighted values in units of OnesUnits<kBits>, halved.
  template <int kBits, int kRow>
  __device__ void leave(const float* states, const StateSums<kHeads>& codes,
                        const Residents& residents, const StateSums<kHeads>& of_residents) const {
    using Units = OnesUnits<kBits>;
    const bool has_resident = p_.step.has_resident;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = static_cast<int>(threadIdx.x) + e * kThreads;
      const int row = i / (kDim / 4), j = i % (kDim / 4) * 4;
      if (i >= kQuads || static_cast<uint32_t>(row) >= p_.step.group) break;
      const WideParams::Place at = p_.place(static_cast<uint32_t>(row));
      const CodesParams& part = p_.parts[at.part];
      const size_t slot = slot_of(at);
      const float unit = j % 16 < 8 ? Units::kEven : Units::kOdd;
      const float top = codes.top[row];
      const float overall = has_resident ? fmaxf(top, of_residents.top[row]) : top;
      const float base = finite_base(overall), keep = exp2_fast(top - base);
      const float of_resident = has_resident ? exp2_fast(of_residents.top[row] - base) : 0.0F;
      const float4 sum = *reinterpret_cast<const float4*>(&states[row * kRow + j]);
      const auto state = [&](float x, float r) {
        return fmaf(of_resident, r, keep * 2.0F * unit * x);
      };
      const float4 r = residents.quads[e];
      *reinterpret_cast<float4*>(part.part_o + slot * kDim + j) = {
          state(sum.x, r.x), state(sum.y, r.y), state(sum.z, r.z), state(sum.w, r.w)};
      if (j != 0) continue;
      float total = keep * codes.sum[row];
      if (has_resident) total = fmaf(of_resident, of_residents.sum[row], total);
      part.part_lse[slot] = top + log2f(codes.sum[row]);
      part.part_sum[slot] = make_float2(overall, total);
    }
  }

 private:
  /// The place of this thread block's state of a row among those of the row's part.
  __device__ size_t slot_of(const WideParams::Place& at) const {
    const CodesParams& part = p_.parts[at.part];
    return (size_t{kv_head_} * part.splits + blockIdx.x) * part.group + at.row;
  }
  __device__ float* state_of(uint32_t row) const {
    const WideParams::Place at = p_.place(row);
    return p_.parts[at.part].part_o + slot_of(at) * kDim;
  }

  const WideParams& p_;
  const uint32_t kv_head_;
};

}  // namespace keyhole::gpu::codes
