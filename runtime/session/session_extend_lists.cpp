// Many new tokens of a layer by a pattern of prompts (keyhole_session_set_extend_pattern): blocks of all tokens that there are,
// sink, offloaded rows as they lie, window and new ones, chosen and attended by the host. With tensors in device memory the device
// does: session_extend_listed.cpp.
#include <cmath>
#include <string>

#include "runtime/prefill/prefill_pattern.h"
#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kFewestByDefault = cpu::kPromptQueries;  // a tile

/// Rows of all KV heads, of which the first two are given: those of one KV head have no stride.
cpu::TokenRows rows_of(const RowsView& first, const RowsView& second) {
  const ptrdiff_t apart = second.data - first.data;
  return {const_cast<std::byte*>(first.data), first.stride, static_cast<size_t>(apart),
          first.dtype};
}

}  // namespace

void Session::set_extend_pattern(const char* pattern, uint32_t tokens) {
  const ModelShape& m = engine_->model();
  if (tokens > kMaxTokens) {
    throw Error(Status::invalid_argument,
                "extends of " + std::to_string(tokens) + " tokens or more, allowed: 1.." +
                    std::to_string(kMaxTokens) + ", and KEYHOLE_AUTO for " +
                    std::to_string(kFewestByDefault));
  }
  std::vector<gpu::PromptPattern> patterns;
  if (pattern != nullptr) {
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      const LayerShape shape = m.of(layer);
      if (shape.value_dim == shape.head_dim) continue;
      throw Error(Status::unsupported,
                  "patterns of extends: value_dim is " + std::to_string(shape.value_dim) +
                      ", needed: head_dim, which is " + std::to_string(shape.head_dim));
    }
    patterns = parse_head_patterns(pattern, m);
  }
  extend_patterns_ = std::move(patterns);
  extend_pattern_from_ = tokens;
}

bool Session::extends_by_pattern(uint32_t layer, const ExtendArgs& args) const {
  const uint32_t fewest = extend_pattern_from_ == 0 ? kFewestByDefault : extend_pattern_from_;
  return !extend_patterns_.empty() && args.k.tokens >= fewest && args.mask == nullptr &&
         !sequence_.slides(layer) && params_.mode != KEYHOLE_MODE_RESIDENT;
}

cpu::RowRuns Session::rows_before(uint32_t layer, bool values) {
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
  const gpu::ResidentRows resident = sequence_.resident().host_rows(layer, 0),
                          of_second = sequence_.resident().host_rows(layer, second);
  const auto add_resident = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (uint32_t i = 0; i < resident.count; ++i) {
      const RowsView a = rows_in(resident.pieces[i]), b = rows_in(of_second.pieces[i]);
      const size_t from = std::max(begin, at), to = std::min(end, at + a.count);
      if (from < to) add(a, b, from - at, to - from);
      at += a.count;
    }
  };
  const size_t sink = sequence_.sink(layer);
  add_resident(0, sink);
  const RowsView a = rows_in(sequence_.view(layer, 0)), b = rows_in(sequence_.view(layer, second));
  add(a, b, 0, a.count);
  add_resident(sink, sink + sequence_.window(layer));
  return runs;
}

void Session::extend_by_pattern(uint32_t layer, const ExtendArgs& args, const NewTokens& fresh) {
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
  p.rows = tokens(layer) + n;
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
  if (extend_prompt_ == nullptr || extend_prompt_shape_ != m) {
    extend_prompt_.reset();
    extend_prompt_shape_ = m;
    extend_prompt_ = std::make_unique<HostPrompt>(
        gpu::PromptShape{m.q_heads, m.kv_heads, m.head_dim}, engine_->kernels(), engine_->pool());
  }
  const auto patterns = extend_patterns_of(layer);
  const size_t held = extend_prompt_->bytes(), wanted = extend_prompt_->bytes_for(p, patterns);
  if (wanted > held) check_memory(wanted - held, "the choice of blocks of several new tokens");
  const gpu::PromptBlocks before = extend_prompt_->blocks();
  extend_prompt_->attend(p, patterns);
  const gpu::PromptBlocks blocks = extend_prompt_->blocks();
  const uint64_t attended = blocks.attended - before.attended, seen = blocks.seen - before.seen;
  extend_blocks_.attended += attended;
  extend_blocks_.seen += seen;
  // What the output's dtype has no number for is the caller's choice.
  for (uint32_t i = 0; i < n * m.q_heads && args.out.dtype != DType::f16; ++i) {
    check_answer(engine_->kernels(), args.out.row(i / m.q_heads, i % m.q_heads), args.out.dtype,
                 m.head_dim);
  }
  StepCost cost;
  cost.keys_attended = keys_in_blocks(layer, n, {attended, seen});
  add_cost(cost, n);
}

uint64_t Session::keys_in_blocks(uint32_t layer, uint32_t n,
                                 const gpu::PromptBlocks& blocks) const {
  const uint64_t keys = uint64_t{sequence_.rows(layer)} * engine_->model().of(layer).q_heads * n;
  if (blocks.seen == 0) return keys;
  const double share = static_cast<double>(blocks.attended) / static_cast<double>(blocks.seen);
  return static_cast<uint64_t>(std::llround(static_cast<double>(keys) * share));
}

std::span<const gpu::PromptPattern> Session::extend_patterns_of(uint32_t layer) const {
  const ModelShape& model = engine_->model();
  return std::span(extend_patterns_).subspan(model.first_q_head(layer), model.of(layer).q_heads);
}

void Session::release_prompt() {
  for (RowBuffer& buffer : prompt_rows_) buffer.release();
  extend_prompt_.reset();
}

}  // namespace keyhole::runtime
