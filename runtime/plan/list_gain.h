// From how many rows on lists of codes on a device are worth their memory: where a step that chooses among them
// (gpu/code_lists.h) is faster than one that reads all codes of a layer.
//
// It is a matter of bytes: choosing costs a step some 20 us, in which a card reads 60 MB, and lists save seven eighths of
// what all codes take. With few KV heads choosing takes longer, because a KV head's lists are scored by 8 multiprocessors.
// Measured by gpu_lists_bench (bench/RESULTS.md, "Lists of codes on a device").
#pragma once

#include <cstdint>

#include "cpu/code_layout.h"
#include "cpu/layer_shape.h"
#include "runtime/plan/code_plan.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Whether "auto" takes lists on a device where they are faster and there is memory for them. It wants lists that are made
/// while a prompt comes: a first step that makes them takes seconds.
inline constexpr bool kAutoTakesLists = false;
/// Rows of a layer from which on its steps are faster by lists; 0: at no number.
[[nodiscard]] uint64_t rows_for_lists(const LayerShape& layer, const CodeShape& code);

/// Rows of a layer from which on steps of a plan that has lists choose among them: what the spec says (`from`), or what all
/// its layers gain from; gpu::kListsFrom where some never do.
[[nodiscard]] uint32_t lists_from(const CodePlan& plan, const ModelShape& model);

/// Whether all layers of a plan without lists would be faster with `lists` in sessions of `tokens` tokens, and there is room for them.
/// room: as of fitting().
[[nodiscard]] bool gains_by_lists(const CodePlan& plan, const index::CodeListing& lists,
                                  const CodeBytes& room, uint64_t tokens,
                                  const SessionParams& params, const ModelShape& model);

}  // namespace keyhole::runtime
