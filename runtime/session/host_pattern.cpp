#include "runtime/session/host_pattern.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

/// Rows of all KV heads, of which the first two are given: those of one KV head have no stride.
cpu::TokenRows rows_of(const RowsView& first, const RowsView& second) {
  const ptrdiff_t apart = second.data - first.data;
  return {const_cast<std::byte*>(first.data), first.stride, static_cast<size_t>(apart),
          first.dtype};
}

}  // namespace

cpu::RowRuns HostPattern::rows_before(uint32_t layer, bool values) {
  const uint32_t last_head = engine_->model().of(layer).kv_heads - 1,
                 second = std::min(1U, last_head);
  const auto rows_in = [&](const KvView& view) { return values ? view.values : view.keys; };
  cpu::RowRuns runs;
  const auto add = [&](const RowsView& a, const RowsView& b, size_t from, size_t count) {
    cpu::TokenRows rows = rows_of(a, b);
    rows.data += from * rows.token_stride;
    runs.add(count, rows,
             {a.scales.slice(from), static_cast<size_t>(b.scales.data - a.scales.data)});
  };
  // The resident ones of a device without a ring are one piece; the sink is the beginning of the first.
  const gpu::ResidentRows resident = sequence_->resident().host_rows(layer, 0),
                          of_second = sequence_->resident().host_rows(layer, second);
  const auto add_resident = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (uint32_t i = 0; i < resident.count; ++i) {
      const RowsView a = rows_in(resident.pieces[i]), b = rows_in(of_second.pieces[i]);
      const size_t from = std::max(begin, at), to = std::min(end, at + a.count);
      if (from < to) add(a, b, from - at, to - from);
      at += a.count;
    }
  };
  const size_t sink = sequence_->sink(layer);
  add_resident(0, sink);
  const RowsView a = rows_in(sequence_->view(layer, 0)),
                 b = rows_in(sequence_->view(layer, second));
  add(a, b, 0, a.count);
  add_resident(sink, sink + sequence_->window(layer));
  return runs;
}

void HostPattern::attend(uint32_t layer, const ExtendArgs& args, const NewTokens& fresh) {
  const ModelShape& model = engine_->model();
  const LayerShape m = model.of(layer);
  const uint32_t n = args.k.tokens;
  cpu::PromptPiece p;
  p.q = {const_cast<std::byte*>(args.q.data), args.q.token_stride, args.q.head_stride,
         args.q.dtype};
  p.out = {args.out.data, args.out.token_stride, args.out.head_stride, args.out.dtype};
  p.lse = args.lse;
  p.sinks = model.sinks_of(layer);
  p.n = n;
  p.rows = sequence_->tokens(layer) + n;
  p.q_heads = m.q_heads;
  p.kv_heads = m.kv_heads;
  p.head_dim = m.head_dim;
  p.logits = model.logits_of(layer);
  for (const bool values : {false, true}) {
    const std::byte* const rows = values ? fresh.v : fresh.k;  // `[kv_heads][n, head_dim]`
    cpu::RowRuns& runs = values ? p.v : p.k;
    runs = rows_before(layer, values);
    const size_t row = m.row_bytes(model.kv_dtype);
    runs.add(n, {const_cast<std::byte*>(rows), row, n * row, model.kv_dtype});
  }
  HostPrompt* prompt = prompts_->attention.get();
  if (prompt == nullptr || prompts_->shape != m) {
    prompts_->attention.reset();
    prompts_->shape = m;
    prompts_->attention = std::make_unique<HostPrompt>(
        gpu::PromptShape{m.q_heads, m.kv_heads, m.head_dim}, engine_->kernels(), engine_->pool());
    prompt = prompts_->attention.get();
  }
  const auto patterns = patterns_->of(layer);
  const size_t held = prompt->bytes(), wanted = prompt->bytes_for(p, patterns);
  if (wanted > held) {
    memory_->check(wanted - held, "the choice of blocks of several new tokens");
  }
  const gpu::PromptBlocks before = prompt->blocks();
  prompt->attend(p, patterns);
  const gpu::PromptBlocks blocks = blocks_since(before, prompt->blocks());
  patterns_->add(blocks);
  // What the output's dtype has no number for is the caller's choice.
  for (uint32_t i = 0; i < n * m.q_heads && args.out.dtype != DType::f16; ++i) {
    check_answer(engine_->kernels(), args.out.row(i / m.q_heads, i % m.q_heads), args.out.dtype,
                 m.head_dim);
  }
  StepCost cost;
  cost.keys_attended = patterns_->keys_in(layer, n, blocks);
  totals_->add(cost, n);
  steps_->count_bytes();
}

}  // namespace keyhole::runtime
