#include "runtime/plan/list_gain.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

CodeShape code_of(const CodePlan& plan, const LayerShape& layer) {
  return {layer.head_dim, plan.shape.key_bits, plan.shape.value_bits};
}

}  // namespace

uint64_t rows_for_lists(const LayerShape& layer, const CodeShape& code) {
  // Bytes of a layer's codes from which on lists are faster.
  constexpr uint64_t kBytes = 70'000'000;
  constexpr uint32_t kFewestHeads = 4;
  if (layer.kv_heads < kFewestHeads) return 0;
  const uint64_t block = code.block_bytes() * layer.kv_heads;
  return std::max<uint64_t>((kBytes + block - 1) / block * kCodeBlock, gpu::kListsFrom);
}

uint32_t lists_from(const CodePlan& plan, const ModelShape& model) {
  if (plan.lists.from != 0) return plan.lists.from;
  uint64_t most = gpu::kListsFrom;
  for (uint32_t l = 0; l < plan.layers.size(); ++l) {
    if (plan.layers[l] == 0) continue;
    const LayerShape layer = model.of(l);
    const uint64_t rows = rows_for_lists(layer, code_of(plan, layer));
    if (rows == 0) return gpu::kListsFrom;
    most = std::max(most, rows);
  }
  return static_cast<uint32_t>(std::min<uint64_t>(most, kMaxTokens));
}

bool gains_by_lists(const CodePlan& plan, const index::CodeListing& lists, const CodeBytes& room,
                    uint64_t tokens, const SessionParams& params, const ModelShape& model) {
  if (!plan.any() || plan.rows_by_host) return false;
  const uint64_t rows = coded_rows(tokens, params);
  for (uint32_t l = 0; l < plan.layers.size(); ++l) {
    if (plan.layers[l] == 0) continue;
    const LayerShape layer = model.of(l);
    const uint64_t from = rows_for_lists(layer, code_of(plan, layer));
    if (from == 0 || rows < from) return false;
  }
  CodePlan with = plan;
  with.lists = lists;
  const CodeBytes bytes = code_bytes(with, tokens, params, model);
  return bytes.device <= room.device && bytes.pinned <= room.pinned;
}

}  // namespace keyhole::runtime
