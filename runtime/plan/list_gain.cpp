#include "runtime/plan/list_gain.h"

#include <algorithm>

#include "cpu/types.h"

namespace keyhole::runtime {
namespace {

CodeShape code_of(const CodePlan& plan, const LayerShape& layer) {
  return {layer.head_dim, plan.shape.key_bits, plan.shape.value_bits};
}

double components_of(const LayerShape& layer) {
  return static_cast<double>(layer.group()) * layer.head_dim;
}
/// Microseconds that a row takes by all codes, less what it takes by lists.
double gain_of_row(const LayerShape& layer, const CodeShape& code) {
  constexpr double kAllBytes4 = 2.6e6,
                   kAllBytes2 = 2.4e6;  // a microsecond, codes of 4 and of 2 bits
  constexpr double kListBytes = 2.28e6,
                   kScoredBytes = 128e3;  // of what is read, of a KV head's mean keys
  constexpr double kRowsOfList = 64.0,
                   kShare = 0.25;  // of the rows: twice what steps read, as a margin
  const double heads = layer.kv_heads, dim = layer.head_dim;
  const double row = heads * static_cast<double>(code.block_bytes()) / kCodeBlock;
  const double means = heads * (4.0 * dim + sizeof(gpu::ListFigures) + sizeof(gpu::ListPlace));
  const double of_list = kRowsOfList * row / (code.key_bits == 2 ? kAllBytes2 : kAllBytes4) -
                         (kShare * kRowsOfList * row + means) / kListBytes -
                         2.0 * dim / kScoredBytes;
  return of_list / kRowsOfList;
}

}  // namespace

uint64_t rows_for_lists(const LayerShape& layer, const CodeShape& code) {
  if (!is_device_index_dim(layer.head_dim)) return 0;
  // Microseconds of a layer, each the sum of what it has of its own and what a group's queries take. Lists are those of
  // a layer with heads that have more of them read, which chooses for 10 us longer than others.
  constexpr double kAll = 9.4, kAllOfComponent = 1.0 / 64;
  constexpr double kLists = 30.6, kListsOfComponent = 1.3 / 64;
  const double gain = gain_of_row(layer, code);
  const double loss = kLists - kAll + (kListsOfComponent - kAllOfComponent) * components_of(layer);
  if (gain <= 0.0) return 0;
  const double rows = std::max(0.0, loss / gain);
  if (rows >= static_cast<double>(kMaxTokens)) return 0;
  const uint64_t blocks = static_cast<uint64_t>(rows) / kCodeBlock + 1;
  return std::max<uint64_t>(blocks * kCodeBlock, gpu::kListsFrom);
}

uint64_t more_rows_for_lists(const LayerShape& layer, const CodeShape& code) {
  if (!is_device_index_dim(layer.head_dim)) return 0;
  // Microseconds for each component of a group's queries by which a second token takes steps by lists longer than those
  // by all codes: of 512 components of heads of 128 some 5, hardly more for a fourth token; of 1,536 and 2,048 of heads
  // of 256 27 and 21, as all codes finish every token by itself there (an H200, "Several tokens").
  constexpr uint32_t kUsual = 128;
  constexpr double kLossOfComponent = 0.25 / 64, kLossOfLong = 0.9 / 64;
  const double gain = gain_of_row(layer, code);
  if (gain <= 0.0) return 0;
  const double loss = layer.head_dim > kUsual ? kLossOfLong : kLossOfComponent;
  const double rows = loss * components_of(layer) / gain;
  return static_cast<uint64_t>(std::min(rows, static_cast<double>(kMaxTokens)));
}

uint32_t lists_from(const CodePlan& plan, const ModelShape& model) {
  if (plan.lists.from != 0) return plan.lists.from;
  uint64_t most = gpu::kListsFrom;
  for (uint32_t l = 0; l < plan.layers.size(); ++l) {
    if (plan.layers[l] == 0) continue;
    const LayerShape layer = model.of(l);
    if (!is_device_index_dim(layer.head_dim)) continue;  // its steps read all codes anyway
    const uint64_t rows = rows_for_lists(layer, code_of(plan, layer));
    if (rows == 0) return gpu::kListsFrom;
    most = std::max(most, rows);
  }
  return static_cast<uint32_t>(std::min<uint64_t>(most, kMaxTokens));
}

uint32_t lists_from_more(const CodePlan& plan, const ModelShape& model) {
  if (plan.lists.from != 0) return 0;
  uint64_t most = 0;
  for (uint32_t l = 0; l < plan.layers.size(); ++l) {
    const LayerShape layer = model.of(l);
    if (plan.layers[l] != 0)
      most = std::max(most, more_rows_for_lists(layer, code_of(plan, layer)));
  }
  return static_cast<uint32_t>(std::min<uint64_t>(most, kMaxTokens));
}

bool gains_by_lists(const CodePlan& plan, const index::CodeListing& lists, const CodeBytes& room,
                    uint64_t tokens, const SessionParams& params, const ModelShape& model) {
  if (!plan.any() || plan.rows_by_host) return false;
  const uint64_t rows = coded_rows(tokens, params);
  for (uint32_t l = 0; l < plan.layers.size(); ++l) {
    if (params.is_dense(l)) continue;
    if (plan.layers[l] == 0) return false;  // lists would keep more of them from the device
    const LayerShape layer = model.of(l);
    const uint64_t from = rows_for_lists(layer, code_of(plan, layer));
    if (from == 0 || rows < from) return false;
  }
  CodePlan with = plan;
  with.lists = lists;
  if (codes_shape(with, tokens, params, model).list_rows == 0) return false;  // the device has none
  const CodeBytes bytes = code_bytes(with, tokens, params, model);
  return bytes.device <= room.device / 2 && bytes.pinned <= room.pinned;
}

}  // namespace keyhole::runtime
