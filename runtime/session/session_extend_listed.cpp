// Many new tokens of a layer by a pattern of prompts, with tensors in device memory (gpu/listed.h): blocks of all tokens that there
// are are chosen and attended on the device, for which offloaded K and V cross the bus once, head by head. Where the pattern
// is dense, or there is no memory for it, all rows are attended (session_extend_stream.cpp).
#include <algorithm>
#include <vector>

#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

/// Answers are written two numbers at a time.
bool is_aligned(const RowsOut& out) {
  constexpr size_t kBytes = 8;
  return reinterpret_cast<uintptr_t>(out.data) % kBytes == 0 && out.token_stride % kBytes == 0 &&
         out.head_stride % kBytes == 0;
}

/// Rows [begin, end) of a place in device memory.
gpu::KvRows part_of(const gpu::KvRows& rows, size_t begin, size_t end, size_t row_bytes) {
  gpu::KvRows part = rows;
  part.keys += begin * row_bytes;
  part.values += begin * row_bytes;
  part.count = static_cast<uint32_t>(end - begin);
  return part;
}

}  // namespace

bool Session::extends_by_pattern_there(uint32_t layer, const ExtendArgs& args) const {
  if (!extends_by_pattern(layer, args) || !attends_at_once(layer)) return false;
  return extend_pattern_from_ != 0 || attends_blocked(layer, args.k.tokens, false);
}

bool Session::extends_by_lists(uint32_t layer, const ExtendArgs& args) const {
  const uint64_t rows = uint64_t{tokens(layer)} + args.k.tokens;
  if (!engine_->device_has(gpu::DevicePart::listed) || rows > gpu::kMostListedRows ||
      !is_aligned(args.out)) {
    return false;
  }
  const auto patterns = extend_patterns_of(layer);
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const gpu::PromptPattern& p) { return !p.dense && rows > p.dense_rows; });
}

void Session::extend_listed(uint32_t layer, const ExtendArgs& args) {
  const gpu::Stream stream = stream_->stream();
  const ModelShape& m = engine_->model();
  gpu::ListedAttention& listed = listed_of(layer);
  const size_t row_bytes = m.of(layer).row_bytes(m.kv_dtype);
  // The sink comes before offloaded tokens, the window behind them; where it begins a place may hold both.
  const gpu::ResidentPieces resident = sequence_.resident().stream_steps()->device_rows(layer);
  std::vector<gpu::KvRows> before;
  const auto add_resident = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (uint32_t i = 0; i < resident.count; ++i) {
      const gpu::KvRows& piece = resident.pieces[i];
      const size_t from = std::max(begin, at), to = std::min(end, at + piece.count);
      if (from < to) before.push_back(part_of(piece, from - at, to - at, row_bytes));
      at += piece.count;
    }
  };
  const size_t sink = sequence_.sink(layer);
  add_resident(0, sink);
  for (const gpu::KvRows& rows : offloaded_rows(layer)) {
    if (rows.count != 0) before.push_back(rows);
  }
  add_resident(sink, sink + sequence_.window(layer));

  gpu::ListedTurn turn;
  turn.q = device_tokens(args.q);
  turn.k = device_tokens(args.k);
  turn.v = device_tokens(args.v);
  turn.out = device_tokens(args.out);
  turn.lse = args.lse;
  turn.n = args.k.tokens;
  turn.layer = {m.logits_of(layer), m.sinks_of(layer)};
  turn.before = before;
  const gpu::PromptBlocks so_far = listed.blocks();
  listed.attend(turn, extend_patterns_of(layer), stream);
  if (listed.saw_bad_queries(stream)) {
    throw Error(Status::not_finite, "tensor q has a NaN or an infinity");
  }
  const gpu::PromptBlocks all = listed.blocks();
  const gpu::PromptBlocks blocks{all.attended - so_far.attended, all.seen - so_far.seen};
  const uint64_t keys = keys_in_blocks(layer, turn.n, blocks);
  prefill_from_device(layer, args.k, args.v, nullptr);
  extend_blocks_.attended += blocks.attended;
  extend_blocks_.seen += blocks.seen;
  totals_.attends += turn.n;
  totals_.keys_attended += keys;
}

}  // namespace keyhole::runtime
