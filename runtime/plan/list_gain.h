// From how many rows on lists of codes on a device are worth their memory: where a step that chooses among them
// (gpu/code_lists.h) is faster than one that reads all codes of a layer.
//
// Choosing takes a step 20 to 30 us, and longer the more mean keys a KV head has, because few multiprocessors score
// them; what lists save grows with the bytes of all codes. So they gain with many KV heads and long contexts, and with
// few KV heads at no usual length. The times behind it are those of gpu_lists_bench on an H100 (bench/RESULTS.md,
// "Lists of codes on a device").
#pragma once

#include <cstdint>

#include "cpu/code_layout.h"
#include "cpu/layer_shape.h"
#include "runtime/plan/code_plan.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Whether "auto" takes lists on a device where they are faster and there is memory for them. It does not as long as a
/// layer whose heads look at everything takes a seventh longer with them, and codes of 4 bits of 128k tokens lose more
/// with them than without.
inline constexpr bool kAutoTakesLists = false;

/// Rows of a layer from which on its steps are faster by lists though they read twice the usual share of the rows: a
/// fifth faster at least where they read no more than that share. 0: at no number, or the device has no lists of heads
/// so long (is_device_index_dim()). A layer whose heads look at everything reads all blocks in nearly all steps
/// (gpu::ListShare::keeps).
[[nodiscard]] uint64_t rows_for_lists(const LayerShape& layer, const CodeShape& code);
/// By how many rows this grows with every further token of a step, whose queries lists are chosen for, too.
[[nodiscard]] uint64_t more_rows_for_lists(const LayerShape& layer, const CodeShape& code);

/// Rows of a layer from which on steps of a plan that has lists choose among them: what the spec says (`from`), or what
/// all its layers that can have lists gain from; gpu::kListsFrom where some of these never do.
[[nodiscard]] uint32_t lists_from(const CodePlan& plan, const ModelShape& model);
/// By how many rows that grows with every further token of a step; 0 where the spec says from where on.
[[nodiscard]] uint32_t lists_from_more(const CodePlan& plan, const ModelShape& model);

/// Whether all layers of a plan without lists would be faster with `lists` in sessions of `tokens` tokens, and these
/// would take at most half of the room: other sessions may come, whose codes want less. room: as of fitting().
[[nodiscard]] bool gains_by_lists(const CodePlan& plan, const index::CodeListing& lists,
                                  const CodeBytes& room, uint64_t tokens,
                                  const SessionParams& params, const ModelShape& model);

}  // namespace keyhole::runtime
