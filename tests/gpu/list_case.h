// For tests of lists of codes on the device: what a layer is to be like, and the ways in which a device may take its
// steps.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/codes.h"
#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/device.h"
#include "tests/gpu/codes_layer.h"

namespace keyhole::gpu::test {

/// What a step does otherwise than the device would have it.
struct ListWay {
  bool by_memory = false;  ///< CodesLists::by_memory
  bool cluster = true;  ///< CodesStep::cluster; false: one thread block chooses the heaviest rows
  bool narrow = false;  ///< CodesStep::narrow

  [[nodiscard]] std::string name() const {
    return std::string("way:") + (by_memory ? " by memory" : "") + (cluster ? "" : ", single") +
           (narrow ? ", narrow" : "");
  }
};

struct ListCase {
  uint32_t dim = 128, bits = 4, group = 4, kv_heads = 2;
  uint32_t blocks = 14;     ///< of all rows
  uint32_t listed = 12;     ///< the first of them that are in lists, a multiple of `stretch`
  uint32_t stretch = 6;     ///< blocks that are clustered together
  uint32_t list_rows = 64;  ///< on average
  float share = 0.3F;
  uint32_t least = 1, exact_rows = 16;
  float miss = 0.0F;    ///< ListShare::miss
  float most = 1e9F;    ///< ListShare::most
  uint32_t keeps = 0;   ///< ListShare::keeps
  float spread = 1.5F;  ///< about the standard deviation of the logits, nats
  float softcap = 0.0F;
  DType rows = DType::f16;
  float apart = 1.0F;  ///< size of the clusters' centres, beside rows of size 1 about them
  bool asks_doubt = false;
  uint32_t spare = 3;      ///< blocks that there is room for beside
  uint32_t tokens = 1;     ///< of a step; divides `group`, the rows of queries of all of them
  uint32_t from_more = 0;  ///< CodesShape::lists_from_more
  uint32_t choosers = 0;   ///< thread blocks of a KV head that choose, see CodesLists::blocks
  uint32_t kept =
      ~0U;  ///< lists that a thread block keeps in shared memory at most, a multiple of 16
  ListWay way;

  [[nodiscard]] CodesShape shape() const {
    CodesShape s;
    s.layers = 1;
    s.kv_heads = kv_heads;
    s.q_heads = kv_heads * group / tokens;
    s.code = {dim, bits, bits};
    s.dtype = rows;
    s.blocks = blocks + spare;
    s.exact_rows = exact_rows;
    s.asks_doubt = asks_doubt;
    s.list_rows = list_rows;
    s.list_share = {share, least, miss, most, keeps};
    s.lists_from = 1;
    s.lists_from_more = from_more;
    // Products of queries and centres vary by apart |q|, those of queries and rows about them by |q|.
    const float size = std::sqrt(static_cast<float>(dim) * (1.0F + apart * apart));
    s.logits = {spread / size, softcap};
    return s;
  }
  /// Whether the device has lists of such a layer.
  [[nodiscard]] bool is_chosen_here() const {
    return !cuda_devices().empty() && chooses_among_lists(shape(), kernel_limits(0));
  }
  /// As the device has it; where it has clusters as it is without them, by memory and with one thread block that
  /// chooses the heaviest rows; and groups that 99 KiB may be too little for with fewer heads at a time.
  [[nodiscard]] std::vector<ListWay> ways() const {
    std::vector<ListWay> all{{}};
    if (has_clusters()) all.push_back({true, false, false});
    const bool is_narrow = codes_are_narrow({dim, bits, bits}, group, shared_memory_of(0).of_block);
    if (group > narrow_heads(dim) && !is_narrow) all.push_back({true, false, true});
    return all;
  }
};

}  // namespace keyhole::gpu::test
