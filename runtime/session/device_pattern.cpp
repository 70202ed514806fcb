// Many new tokens of a layer by a pattern of prompts, with tensors in device memory (gpu/listed.h): blocks of all
// tokens that there are are chosen and attended on the device, for which offloaded K and V cross the bus once, head by
// head. Where the pattern is dense, or there is no memory for it, all rows are attended.
#include <algorithm>
#include <vector>

#include "runtime/session/device_extender.h"

namespace keyhole::runtime {
namespace {

/// Answers are written two numbers at a time.
bool is_aligned(const TensorOut& out) {
  constexpr size_t kBytes = 8;
  const size_t elements = kBytes / dtype_size(out.dtype);
  return reinterpret_cast<uintptr_t>(out.data) % kBytes == 0 && out.token_stride % elements == 0 &&
         out.head_stride % elements == 0;
}

}  // namespace

bool DeviceExtender::attends_by_pattern(uint32_t layer, const ExtendArgs& args) const {
  if (!parts_.patterns.apply_to(layer, args) || !attends_at_once(layer)) return false;
  return !parts_.patterns.chooses_tokens() || attends_blocked(layer, args.k.tokens, false);
}

bool DeviceExtender::attends_by_lists(uint32_t layer, const ExtendArgs& args) const {
  const uint64_t rows = uint64_t{parts_.sequence.tokens(layer)} + args.k.tokens;
  if (!parts_.blocks.has_listed(rows) || !is_aligned(args.out)) return false;
  if (!gpu::patterns_choose(parts_.engine.model().of(layer).head_dim)) return false;
  const auto patterns = parts_.patterns.of(layer);
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const gpu::PromptPattern& p) { return !p.dense && rows > p.dense_rows; });
}

void DeviceExtender::extend_listed(uint32_t layer, const ExtendArgs& args) {
  const gpu::Stream stream = parts_.stream.runner().stream();
  const ModelShape& m = parts_.engine.model();
  gpu::ListedAttention& listed = parts_.blocks.listed(layer);
  // The sink comes before offloaded tokens, the window behind them; where it begins a place may hold both.
  const KvPieces resident = parts_.sequence.resident().stream_steps()->device_rows(layer);
  std::vector<KvView> before;
  const auto add_resident = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (uint32_t i = 0; i < resident.count; ++i) {
      const KvView& piece = resident.pieces[i];
      const size_t from = std::max(begin, at), to = std::min(end, at + piece.keys.tokens);
      if (from < to) before.push_back(piece.slice(from - at, to - from));
      at += piece.keys.tokens;
    }
  };
  const size_t sink = parts_.sequence.sink(layer);
  add_resident(0, sink);
  for (const KvView& rows : parts_.blocks.offloaded_rows(layer)) {
    if (rows.keys.tokens != 0) before.push_back(rows);
  }
  add_resident(sink, sink + parts_.sequence.window(layer));

  gpu::ListedTurn turn;
  turn.q = args.q;
  turn.k = args.k;
  turn.v = args.v;
  turn.out = args.out;
  turn.lse = args.lse;
  turn.n = args.k.tokens;
  turn.layer = {m.logits_of(layer), m.sinks_of(layer)};
  turn.before = before;
  const gpu::PromptBlocks so_far = listed.blocks();
  const gpu::Stream beside = parts_.prompts.stream_beside();
  listed.attend(turn, parts_.patterns.of(layer), stream);
  // The new rows come to the host while the device attends.
  const DevicePrompts::Brought brought = parts_.prompts.bring(
      layer, args.k, args.v, parts_.patterns.is_prompt(args) ? &args.q : nullptr, beside);
  if (listed.saw_bad_queries(stream)) {
    throw Error(Status::not_finite, "tensor q has a NaN or an infinity");
  }
  const gpu::PromptBlocks blocks = blocks_since(so_far, listed.blocks());
  const uint64_t keys = parts_.patterns.keys_in(layer, turn.n, blocks);
  parts_.prompts.store(layer, brought);
  parts_.patterns.add(blocks);
  parts_.totals.add_on_device(turn.n, keys);
}

}  // namespace keyhole::runtime
