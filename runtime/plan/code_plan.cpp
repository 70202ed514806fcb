#include "runtime/plan/code_plan.h"

#include <algorithm>

#include "runtime/plan/list_gain.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {

std::optional<CodeSpecs::Codes> CodeSpecs::codes(const std::string& spec) {
  if (const auto at = known_.find(spec); at != known_.end()) return at->second;
  std::optional<Codes> codes;
  if (const auto bits = index::code_bits(spec)) codes = {*bits, index::code_listing(spec)};
  parsed_ += 1;
  if (known_.size() >= kMost) known_.clear();
  known_.emplace(spec, codes);
  return codes;
}

uint32_t CodePlan::first() const {
  const auto at = std::find(layers.begin(), layers.end(), char{1});
  return at == layers.end() ? 0 : static_cast<uint32_t>(at - layers.begin());
}

std::string CodePlan::text() const {
  std::string text;
  for (size_t begin = 0; begin < layers.size();) {
    if (layers[begin] == 0) {
      ++begin;
      continue;
    }
    size_t end = begin;
    while (end < layers.size() && layers[end] != 0) ++end;
    text += (text.empty() ? "" : ", ") + std::to_string(begin);
    if (end - begin > 1) text += " to " + std::to_string(end - 1);
    begin = end;
  }
  return text;
}

CodePlan plan_codes(const SessionParams& params, const ModelShape& model,
                    std::span<const HeadParams* const> heads, CodeSpecs& specs) {
  CodePlan plan;
  plan.layers.assign(model.layers, 0);
  plan.rows_by_host = params.exact_rows_by == KEYHOLE_ROWS_BY_HOST;
  if (params.offload_placement == KEYHOLE_PLACE_HOST) return plan;
  const HeadNumbers numbers = model.head_numbers();
  std::optional<index::CodeListing> lists;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (params.is_dense(layer)) continue;
    std::optional<index::CodeBits> bits;
    index::CodeListing of_layer;
    bool coded = true;
    uint32_t rows = 0;
    for (uint32_t h = 0; coded && h < numbers.of(layer); ++h) {
      const HeadParams& head = *heads[numbers.at(layer, h)];
      const std::optional<CodeSpecs::Codes> own = specs.codes(head.index);
      coded = !head.dense && own.has_value() && (h == 0 || own->bits == *bits) &&
              head.budget.tail == KEYHOLE_TAIL_CODES;
      if (!coded) break;
      bits = own->bits;
      if (h == 0) of_layer = own->lists;
      if (own->lists != of_layer) of_layer = {};
      rows = std::max(rows, head.budget.attend == KEYHOLE_ATTEND_NONE ? 0 : head.budget.top_k);
    }
    if (!coded) continue;
    const CodeShape shape{model.of(layer).head_dim, bits->keys, bits->values};
    if (!plan.any()) plan.shape = shape;
    if (shape.key_bits != plan.shape.key_bits || shape.value_bits != plan.shape.value_bits)
      continue;
    plan.layers[layer] = 1;
    if (!lists.has_value()) lists = of_layer;
    if (of_layer != *lists) lists = index::CodeListing{};
    plan.exact_rows = std::max(plan.exact_rows, std::min(rows, gpu::kMostDeviceRows));
  }
  plan.lists = lists.value_or(index::CodeListing{});
  return plan;
}

void check_placement(const CodePlan& plan, const SessionParams& params, const ModelShape& model) {
  if (params.offload_placement != KEYHOLE_PLACE_DEVICE || plan.any()) return;
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (params.is_dense(layer)) continue;
    bad("offload_placement is KEYHOLE_PLACE_DEVICE (2), and no layer is attended by codes: allowed "
        "with an index of type codes and tail KEYHOLE_TAIL_CODES in all KV heads of a layer, else "
        "KEYHOLE_PLACE_AUTO (0) or KEYHOLE_PLACE_HOST (1)");
  }
}

uint64_t coded_rows(uint64_t tokens, const SessionParams& params) {
  const uint64_t kept = uint64_t{params.sink} + params.window;
  return tokens > kept ? (tokens - kept) / kCodeBlock * kCodeBlock : 0;
}

gpu::CodesShape codes_shape(const CodePlan& plan, uint64_t tokens, const SessionParams& params,
                            const ModelShape& model) {
  gpu::CodesShape shape;
  shape.layers = model.resident_layers();
  shape.q_heads = model.q_heads;
  shape.kv_heads = model.kv_heads;
  shape.code = plan.shape;
  shape.dtype = params.offload_dtype(model);
  shape.blocks =
      static_cast<uint32_t>(std::max<uint64_t>(1, coded_rows(tokens, params) / kCodeBlock));
  shape.exact_rows = plan.exact_rows;
  shape.logits = model.logits;
  shape.layer_logits = model.layer_logits;
  shape.sinks = model.sinks.empty() ? nullptr : model.sinks.data();
  shape.coded_layers = plan.count();
  shape.rows_by_host = plan.rows_by_host;
  shape.shapes = model.device_shapes();
  if (!shape.shapes.empty()) {
    shape.coded.assign(plan.layers.begin(), plan.layers.begin() + shape.layers);
  }
  // The device chooses among lists of rows that it reads, where there may be enough of them and it has kernels for
  // that.
  shape.lists_from = lists_from(plan, model);
  shape.lists_from_more = lists_from_more(plan, model);
  if (shape.blocks * kCodeBlock < shape.lists_from) return shape;
  gpu::CodesShape listed = shape;
  listed.list_rows = plan.lists.rows;
  listed.list_share.share = plan.lists.share;
  listed.list_share.miss = plan.lists.miss;
  return gpu::chooses_among_lists(listed, model.device_limits) ? listed : shape;
}

CodeBytes code_bytes(const CodePlan& plan, uint64_t tokens, const SessionParams& params,
                     const ModelShape& model) {
  const gpu::CodesShape shape = codes_shape(plan, tokens, params, model);
  if (plan.rows_by_host) return {gpu::codes_bytes(shape), gpu::codes_pinned_bytes(shape)};
  const uint64_t rows = coded_rows(tokens, params);
  CodeBytes bytes{gpu::codes_bytes(shape), 0};
  for (uint32_t layer = 0; layer < plan.layers.size(); ++layer) {
    if (plan.layers[layer] != 0) bytes.pinned += params.offload_bytes(model, layer, rows);
  }
  return bytes;
}

uint64_t pinned_room(const SessionParams& params, const ModelShape& model) {
  const uint64_t limit = params.pinned_memory_limit;
  if (limit == 0) return UINT64_MAX;
  const uint64_t exchange = gpu::cuda_pinned_bytes(params.resident_shape(model));
  return limit > exchange ? limit - exchange : 0;
}

CodePlan with_rows_placed(CodePlan plan, uint64_t pinned, uint64_t tokens,
                          const SessionParams& params, const ModelShape& model) {
  if (params.exact_rows_by != KEYHOLE_ROWS_BY_AUTO || !plan.any()) return plan;
  if (!plan.rows_by_host && code_bytes(plan, tokens, params, model).pinned > pinned) {
    plan.rows_by_host = true;
  }
  return plan;
}

namespace {

/// Keeps as many of the plan's layers as fit, the last ones, with rows read as the plan says.
CodePlan last_layers(CodePlan plan, const CodeBytes& room, uint64_t tokens,
                     const SessionParams& params, const ModelShape& model) {
  const auto fits = [&] {
    try {
      if (!gpu::codes_supported(codes_shape(plan, tokens, params, model))) return false;
      const CodeBytes bytes = code_bytes(plan, tokens, params, model);
      return bytes.device <= room.device && bytes.pinned <= room.pinned;
    } catch (const Error&) {
      return false;  // more tokens than a device can have codes of
    }
  };
  for (char& layer : plan.layers) {
    if (layer == 0) continue;
    if (fits()) break;
    layer = 0;
  }
  return plan;
}

}  // namespace

CodePlan fitting(CodePlan plan, const CodeBytes& room, uint64_t tokens, const SessionParams& params,
                 const ModelShape& model) {
  CodePlan by_host = plan, without_lists = plan;
  by_host.rows_by_host = true;
  without_lists.lists = {};
  const uint32_t all = plan.count();
  plan = last_layers(std::move(plan), room, tokens, params, model);
  if (plan.lists.rows != 0 && plan.count() != all) {
    without_lists = last_layers(std::move(without_lists), room, tokens, params, model);
    if (without_lists.count() > plan.count()) plan = std::move(without_lists);
  }
  if (plan.rows_by_host || params.exact_rows_by != KEYHOLE_ROWS_BY_AUTO) return plan;
  by_host = last_layers(std::move(by_host), room, tokens, params, model);
  return by_host.count() > plan.count() ? by_host : plan;
}

}  // namespace keyhole::runtime
