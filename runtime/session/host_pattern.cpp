#include "runtime/session/host_pattern.h"

#include <algorithm>

namespace keyhole::runtime {

cpu::RowRuns HostPattern::rows_before(uint32_t layer, bool values) {
  cpu::RowRuns runs;
  const auto add = [&](const KvView& kv) { runs.add(values ? kv.values : kv.keys); };
  // The resident ones of a device without a ring are one piece; the sink is the beginning of the first.
  const KvPieces resident = sequence_->resident().host_rows(layer);
  const auto add_resident = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (uint32_t i = 0; i < resident.count; ++i) {
      const KvView& piece = resident.pieces[i];
      const size_t from = std::max(begin, at), to = std::min(end, at + piece.keys.tokens);
      if (from < to) add(piece.slice(from - at, to - from));
      at += piece.keys.tokens;
    }
  };
  const size_t sink = sequence_->sink(layer);
  add_resident(0, sink);
  add(sequence_->view(layer));
  add_resident(sink, sink + sequence_->window(layer));
  return runs;
}

void HostPattern::attend(uint32_t layer, const ExtendArgs& args, const NewTokens& fresh) {
  const ModelShape& model = engine_->model();
  const LayerShape m = model.of(layer);
  const uint32_t n = args.k.tokens;
  cpu::PromptPiece p;
  p.q = args.q;
  p.out = args.out;
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
    runs.add({{.data = rows,
               .token_stride = m.head_dim,
               .head_stride = ptrdiff_t{n} * m.head_dim,
               .tokens = n,
               .heads = m.kv_heads,
               .dim = m.head_dim,
               .dtype = model.kv_dtype}});
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
