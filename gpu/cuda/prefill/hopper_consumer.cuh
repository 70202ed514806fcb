// The part of a warpgroup in Hopper's attention (hopper_kernel.cuh): its shared memory, turns, products, powers and
// sums of its 64 queries, and its output.
//
// SELECTIVE. Rows that a tile of queries does not choose are hidden like those behind a query. Blocks without weight
// for any query of the warpgroup have powers of 0 and no product with their values; its threads agree about them by a
// vote.
#pragma once

#include <type_traits>

#include "gpu/cuda/common/copy_engine.cuh"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/wgmma.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/ends.cuh"

namespace keyhole::gpu::hopper {

using blocked::chosen_rows;
using blocked::has_weight;
using blocked::power_of_2;
using blocked::quad_max;
using blocked::quad_sum;
using blocked::QueryEnd;
using blocked::Seen;
using blocked::skip_of;
using blocked::store_pair;

constexpr int kQueries = kListQueries;  ///< of a thread block
constexpr int kBlockRows = kListRows;
constexpr int kConsumers = 2;  ///< warpgroups
constexpr int kGroupThreads = 128;
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kStages = 2;
constexpr uint32_t kNoBlock = 1U << 24U;  ///< lies behind all rows: the copy engine brings zeros

/// columns: 64, 128 or 256, the components of a row and zeros.
template <int columns>
struct Tiles {
  static constexpr int kPanels = columns / kPanelColumns;
  static constexpr int kKeys = columns <= 128 ? 128 : 64;
  static constexpr int kBlocks = kKeys / kBlockRows;
  static constexpr uint32_t kQueryPanel = kQueries * kPanelColumns;  // elements
  static constexpr uint32_t kKeyPanel = kKeys * kPanelColumns;
  static constexpr uint32_t kTileBytes = kPanels * kKeyPanel * sizeof(uint16_t);
  alignas(1024) uint16_t queries[kPanels * kQueryPanel];
  alignas(1024) uint16_t keys[kStages][kPanels * kKeyPanel];
  alignas(1024) uint16_t values[kStages][kPanels * kKeyPanel];
  CopyBarrier queries_are_here;
  CopyBarrier keys_are_here[kStages], values_are_here[kStages];
  CopyBarrier keys_are_used[kStages], values_are_used[kStages];
};

/// Barriers of the block by which the warpgroups take turns.
__device__ inline void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ inline void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}

/// Whether `mine` holds for some thread of the warpgroup; the same answer in all of them.
__device__ inline bool any_of_group(int group, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(mine ? 1U : 0U), "r"(1 + kConsumers + group)
      : "memory");
  // All lanes have the answer already; taken from one of them, the compiler knows it to be the same, too.
  return __shfl_sync(kWholeWarp, any, 0) != 0;
}

/// The rows that a thread block attends: how many blocks of 64, and which.
struct BlockRange {
  const uint16_t* list;  ///< null: begin, begin + 1, ..
  uint32_t begin, count;

  __device__ BlockRange(const BlockedParams& a, uint32_t head, uint32_t tile) {
    const uint32_t end = Seen::by(a, min((tile + 1) * kQueries, a.n) - 1).to;
    list = nullptr;
    begin = Seen::by(a, tile * kQueries).from / kBlockRows;
    count = (end + kBlockRows - 1) / kBlockRows - begin;
    if (a.lists.counts == nullptr) return;
    const size_t at = size_t{head} * ((a.n + kQueries - 1) / kQueries) + tile;
    list = a.lists.blocks + at * a.lists.capacity;
    count = min(a.lists.counts[at], a.lists.capacity);
  }
  /// The i-th block from the end.
  [[nodiscard]] __device__ uint32_t from_end(uint32_t i) const {
    if (i >= count) return kNoBlock;
    const uint32_t at = count - 1 - i;
    return list == nullptr ? begin + at : __ldg(list + at);
  }
};

/// Enqueues logits = a warpgroup's queries times a tile of keys. Both are addresses of shared memory.
template <class T, int columns, int n>
__device__ inline void multiply_queries(float (&logits)[n], uint32_t queries, uint32_t keys) {
  using Shared = Tiles<columns>;
  hold(logits);
  start_products();
#pragma unroll
  for (int step = 0; step < columns / 16; ++step) {
    const uint32_t panel = step / 4, along = step % 4 * 32;
    multiply_rows<T>(logits, rows_operand(queries + panel * Shared::kQueryPanel * 2 + along),
                     rows_operand(keys + panel * Shared::kKeyPanel * 2 + along), step != 0);
  }
  commit_products();
}

/// A lane's part of the computation: its two rows of its warpgroup's 64.
template <class T, int columns, bool fine>
struct Consumer {
  using Shared = Tiles<columns>;
  static constexpr int kKeys = Shared::kKeys, kPanels = Shared::kPanels;
  static constexpr int kParts = columns <= 128 ? 1 : 2;  ///< of the sums, of up to 128 components
  static constexpr int kPart = columns / kParts / 2;     ///< registers of each

  float logits[kKeys / 2];
  float sums[kParts][kPart];
  uint32_t weights[kKeys / 16][4];
  uint32_t rest[fine ? kKeys / 16 : 1][4];
  float top[2], total[2];
  uint32_t row[2];  ///< query
  Seen seen[2];

  __device__ void begin(const BlockedParams& a, uint32_t head, uint32_t first, uint32_t dim) {
    const int lane = static_cast<int>(threadIdx.x) % 32,
              warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = first + warp * 16 + lane / 4 + half * 8;
      seen[half] = Seen::by(a, row[half]);
      top[half] = kMinusInf;
      total[half] = 0.0F;
      const bool continues = !a.is_first && row[half] < a.n;
      const size_t at = size_t{row[half]} * a.q_heads + head;
      if (continues) {
        const float2 before = a.sums[at];
        top[half] = before.x;
        total[half] = lane % 4 == 0 ? before.y : 0.0F;
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPart / 4; ++i) {
          const uint32_t column = part * 128 + i * 8 + lane % 4 * 2;
          float2 x{};
          if (continues && column < dim)
            x = *reinterpret_cast<const float2*>(a.o + at * dim + column);
          sums[part][4 * i + 2 * half] = x.x, sums[part][4 * i + 2 * half + 1] = x.y;
        }
      }
    }
  }

  /// Enqueues the logits: queries times keys.
  __device__ void score(uint32_t queries, uint32_t keys) {
    multiply_queries<T, columns>(logits, queries, keys);
  }
  /// Enqueues sums += weights times values. blocks: a bit for each block of the tile that has weights; where it is
  /// not selective all have.
  template <bool selective>
  __device__ void sum_up(uint32_t values, uint32_t blocks) {
    constexpr uint32_t kPanelBytes = Shared::kKeyPanel * 2;
    constexpr int kSteps = kBlockRows / 16;  ///< of a block
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold(sums[part]);
    start_products();
#pragma unroll
    for (int block = 0; block < Shared::kBlocks; ++block) {
      if (selective) {
        if ((blocks >> block & 1U) == 0) continue;
        start_products();  // of this branch
      }
#pragma unroll
      for (int step = block * kSteps; step < (block + 1) * kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t b =
              columns_operand(values + part * 2 * kPanelBytes + step * 2048, kPanelBytes);
          multiply_columns<T>(sums[part], weights[step], b);
          if constexpr (fine) multiply_columns<T>(sums[part], rest[step], b);
        }
      }
    }
    commit_products();
  }
  __device__ void hold_sums() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold(sums[part]);
  }

  __device__ void cap_logits(const LogitParams& l) {
#pragma unroll
    for (float& x : logits) x = l.softcap * tanhf(l.scale * x / l.softcap);
  }
  /// Hides the logits of rows of the tile's blocks that a query does not see.
  __device__ void hide(const uint32_t (&block)[Shared::kBlocks]) {
    const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const uint32_t in_tile = i / 4 * 8 + i % 2;
      const uint32_t key = block[in_tile / kBlockRows] * kBlockRows + in_tile % kBlockRows + column;
      const Seen& s = seen[i / 2 % 2];
      if (key < s.from || key >= s.to) logits[i] = kMinusInf;
    }
  }
  /// Hides the logits of rows that the tile of queries does not attend. chosen: the bits of all rows.
  __device__ void hide_unchosen(const uint32_t* chosen, const uint32_t (&block)[Shared::kBlocks]) {
    const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int b = 0; b < Shared::kBlocks; ++b) {
      const uint2 bits = block[b] == kNoBlock
                             ? make_uint2(0, 0)
                             : __ldg(reinterpret_cast<const uint2*>(chosen) + block[b]);
#pragma unroll
      for (int i = 0; i < kBlockRows / 8; ++i) {
        const uint32_t eight = (i < 4 ? bits.x : bits.y) >> (i % 4 * 8);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if ((eight >> (column + j) & 1U) != 0) continue;
          const int at = 4 * (b * kBlockRows / 8 + i) + j;
          logits[at] = logits[at + 2] = kMinusInf;
        }
      }
    }
  }
  /// exponentiate() that gives blocks of no weight (BlockedParams::skip) powers of 0. Returns a bit for each other
  /// block.
  __device__ uint32_t exponentiate_heavy(const BlockedParams& a, int group, float limit,
                                         float to_base2, float (&shrink)[2]) {
    constexpr int kBlocks = Shared::kBlocks, kEights = kBlockRows / 8;
    float largest[kBlocks][2], next[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next[half] = top[half];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float x = kMinusInf;
#pragma unroll
        for (int i = b * kEights; i < (b + 1) * kEights; ++i)
          x = fmaxf(x, fmaxf(logits[4 * i + 2 * half], logits[4 * i + 2 * half + 1]));
        largest[b][half] = quad_max(x);
        next[half] = fmaxf(next[half], largest[b][half]);
      }
    }
    uint32_t heavy = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      bool is_heavy = limit <= 0.0F;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        is_heavy = is_heavy || (row[half] < a.n && has_weight(largest[b][half] * to_base2,
                                                              next[half] * to_base2, limit));
      }
      if (any_of_group(group, is_heavy)) heavy |= 1U << b;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = finite_base(next[half]) * to_base2;
      shrink[half] = power_of_2(fmaf(top[half], to_base2, -base));
      top[half] = next[half];
      total[half] *= shrink[half];
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if ((heavy >> b & 1U) != 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float base = finite_base(next[half]) * to_base2;
#pragma unroll
          for (int i = b * kEights; i < (b + 1) * kEights; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& x = logits[4 * i + 2 * half + j];
              x = power_of_2(fmaf(x, to_base2, -base));
              total[half] += x;
            }
          }
        }
      } else {
#pragma unroll
        for (int i = 4 * b * kEights; i < 4 * (b + 1) * kEights; ++i) logits[i] = 0.0F;
      }
    }
    return heavy;
  }
  /// Turns logits into powers. shrink: gets the factor by which sums so far are to be multiplied.
  __device__ void exponentiate(float to_base2, float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = logits[2 * half];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
        largest = fmaxf(largest, fmaxf(logits[4 * i + 2 * half], logits[4 * i + 2 * half + 1]));
      }
      largest = fmaxf(top[half], quad_max(largest));
      const float base = finite_base(largest) * to_base2;
      shrink[half] = power_of_2(fmaf(top[half], to_base2, -base));
      top[half] = largest;
      float more = 0.0F;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = logits[4 * i + 2 * half + j];
          x = power_of_2(fmaf(x, to_base2, -base));
          more += x;
        }
      }
      total[half] = fmaf(total[half], shrink[half], more);
    }
  }
  __device__ void rescale(const float (&shrink)[2]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kPart; ++i) sums[part][i] *= shrink[i / 2 % 2];
    }
  }
  __device__ void pack_weights() {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = logits[8 * step + 2 * i], y = logits[8 * step + 2 * i + 1];
        const T a = rounded_to<T>(x), b = rounded_to<T>(y);
        weights[step][i] = packed(a, b);
        if constexpr (fine)
          rest[step][i] = packed(rounded_to<T>(x - as_float(a)), rounded_to<T>(y - as_float(b)));
      }
    }
  }

  __device__ void end(const BlockedParams& a, uint32_t head, uint32_t dim) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = quad_sum(total[half]);
      if (row[half] >= a.n) continue;
      const size_t at = size_t{row[half]} * a.q_heads + head;
      if (a.final.data != nullptr) {
        const QueryEnd q = QueryEnd::of(a, head, top[half], all);
        if (a.final.lse != nullptr && lane % 4 == 0) a.final.lse[at] = q.lse;
        const size_t to = row[half] * a.final.token_stride + head * a.final.head_stride;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int i = 0; i < kPart / 4; ++i) {
            const uint32_t column = part * 128 + i * 8 + lane % 4 * 2;
            if (column >= dim) continue;
            store_pair(a.final, to + column, q.scale * sums[part][4 * i + 2 * half],
                       q.scale * sums[part][4 * i + 2 * half + 1]);
          }
        }
        continue;
      }
      if (lane % 4 == 0) a.sums[at] = make_float2(top[half], all);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPart / 4; ++i) {
          const uint32_t column = part * 128 + i * 8 + lane % 4 * 2;
          if (column >= dim) continue;
          *reinterpret_cast<float2*>(a.o + at * dim + column) =
              make_float2(sums[part][4 * i + 2 * half], sums[part][4 * i + 2 * half + 1]);
        }
      }
    }
  }
};

}  // namespace keyhole::gpu::hopper
