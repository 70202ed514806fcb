#include "runtime/plan/planner.h"

#include <algorithm>
#include <bit>
#include <map>
#include <string_view>

#include "gpu/windows.h"
#include "index/scan/code_scan.h"
#include "index/scan/collector.h"
#include "index/tail/tail_tree.h"
#include "index/types/factory.h"
#include "runtime/audit/auditor.h"
#include "runtime/plan/code_plan.h"

namespace keyhole::runtime {
namespace {

using Wide = unsigned __int128;

uint64_t narrow(Wide bytes, const char* what) {
  if (bytes > (Wide{1} << 63)) {
    throw Error(Status::invalid_argument, std::string(what) + " would pass 2^63 bytes");
  }
  return static_cast<uint64_t>(bytes);
}

/// The kinds of heads of a session, by what they have in common and where they differ.
struct Kinds {
  /// A spec, and components of a key.
  using Spec = std::pair<std::string_view, uint32_t>;
  std::map<Spec, Wide> specs;           ///< heads with an index of it
  std::map<uint32_t, Wide> partitions;  ///< heads with partitions of a tail, by components of a key
  bool partitioned = false;             ///< some have
  uint32_t top_k = 0;                   ///< the largest
  bool explores = false;                ///< some attend to more than the best k
  bool codes = false;                   ///< some attend all rows by their codes
};

bool explores(const Budget& budget) {
  return budget.attend == KEYHOLE_ATTEND_SCORED || budget.attend == KEYHOLE_ATTEND_WEIGHT;
}

/// What one worker needs to estimate a tail: a score, weight and more of every partition and head,
/// a weight and some marks of every row (TailEstimate, TailReader).
Wide tail_scratch(const ModelShape& m, const SessionParams& s, uint64_t rows) {
  const Wide partitions = Wide{rows} / s.tail_partition + 1;
  const uint32_t group = m.largest_group();
  const Wide numbers = partitions * (5 * group + 8) + Wide{rows} * (2 * group + 6);
  return numbers * sizeof(float) * 5 / 4;
}

void count_head(const Budget& budget, const Kinds::Spec& spec, Wide heads, Kinds& kinds) {
  if (heads == 0) return;
  kinds.specs[spec] += heads;
  if (budget.needs_partitions()) {
    kinds.partitions[spec.second] += heads;
    kinds.partitioned = true;
  }
}

void count_budget(const Budget& budget, Kinds& kinds) {
  kinds.top_k = std::max(kinds.top_k, budget.top_k);
  kinds.explores = kinds.explores || explores(budget);
  kinds.codes = kinds.codes || budget.reads_codes();
}

Kinds count_kinds(const ModelShape& m, const SessionParams& s) {
  Kinds kinds;
  if (s.heads.empty()) {  // before all heads are walked: a shape may have millions
    count_budget(s.budget, kinds);
    for (uint32_t layer = 0; layer < m.layers; ++layer) {
      const LayerShape shape = m.of(layer);
      count_head(s.budget, {s.index, shape.head_dim}, s.is_dense(layer) ? 0 : shape.kv_heads,
                 kinds);
    }
    return kinds;
  }
  const HeadNumbers numbers = m.head_numbers();
  for (size_t i = 0; i < s.heads.size(); ++i) {
    const HeadParams& head = s.heads[i];
    const uint32_t layer = numbers.layer_of(i);
    if (head.dense || s.is_dense(layer)) continue;
    count_budget(head.budget, kinds);
    count_head(head.budget, {head.index, m.of(layer).head_dim}, 1, kinds);
  }
  return kinds;
}

/// What searches take on all workers: ids, scores and union of g heads x k, and the hash set (Selection); the keys that
/// a search has scored, where they are attended; estimates of tails.
Wide search_memory(const ModelShape& m, const SessionParams& s, const Kinds& kinds, uint64_t rows,
                   uint32_t threads) {
  const bool widens = s.audit_share > 0.0 && s.audit_action == KEYHOLE_AUDIT_WIDEN;
  const uint64_t widest = widens ? AuditSchedule::kMostWidening : 1;
  const uint64_t k = std::min<uint64_t>(kinds.top_k * widest, std::bit_ceil(rows));
  const uint32_t group = m.largest_group();
  const Wide selections = Wide{threads} * group * k * (3 * sizeof(uint32_t) + 4 * sizeof(uint64_t));
  const Wide logs = !kinds.explores ? 0 : Wide{threads} * index::Collector::log_bytes(group, rows);
  // Passes over codes: scratch of every worker, and what the parts of every KV head have come to.
  const LayerShape most = m.largest();
  const Wide of_head = Wide{threads} * (8 * most.head_dim + 400) +
                       Wide{most.kv_heads} * index::kMostCodeParts *
                           (most.head_dim + 3 + 2 * std::min(kinds.top_k, index::kMostExactRows));
  // Memory of a worker's pass for the rows that it reads where codes cannot tell, and for their places.
  const Wide doubted =
      Wide{threads} * 2 * (index::kMostDoubtedRows + kinds.top_k) * sizeof(uint32_t);
  const Wide codes = !kinds.codes ? 0 : of_head * group * sizeof(float) + doubted;
  const Wide tails = !kinds.partitioned ? 0 : threads * tail_scratch(m, s, rows);
  return selections + logs + codes + tails;
}

/// K and V of the sliding layers.
Wide sliding_memory(const ModelShape& m, uint64_t context) {
  Wide bytes = 0;
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!m.slides(layer)) continue;
    const uint64_t tokens = std::min<uint64_t>(context, m.windows[layer].slots(kMaxTokens));
    bytes += Wide{2} * tokens * m.of(layer).token_bytes(m.kv_dtype);
  }
  return bytes;
}

/// Memory of the sliding layers on a device, for a session with `context` tokens.
uint64_t windows_memory(const ModelShape& m, uint64_t context) {
  const auto most = static_cast<uint32_t>(std::clamp<uint64_t>(context, 1, kMaxTokens));
  gpu::WindowsShape shape{m.q_heads, m.kv_heads, m.head_dim, m.kv_dtype, {}, {}};
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!m.slides(layer)) continue;
    const Window& w = m.windows[layer];
    shape.layers.push_back({0, w.tokens, w.slots(most), {}});
    if (m.layers_differ()) shape.shapes.push_back(m.of(layer));
  }
  return shape.layers.empty() ? 0 : gpu::windows_bytes(shape);
}

/// The plan of codes for the heads as the session begins, which are the same for all unless they have their own.
CodePlan code_plan(const ModelShape& m, const SessionParams& s) {
  if (s.row_block() != kCodeBlock) return {};
  std::vector<const HeadParams*> heads;
  for (const HeadParams& head : s.heads) heads.push_back(&head);
  CodeSpecs specs;
  if (!heads.empty()) return plan_codes(s, m, heads, specs);
  // A shape may have millions of heads: one of each layer stands for those that are alike.
  const HeadParams same = s.head(0);
  ModelShape narrow = m;
  narrow.kv_heads = 1;
  for (LayerShape& shape : narrow.shapes) shape.kv_heads = 1;
  heads.assign(m.layers, &same);
  return plan_codes(s, narrow, heads, specs);
}

/// Heads of the plan's layers, by their specs.
std::map<Kinds::Spec, Wide> heads_by_spec(const CodePlan& plan, const ModelShape& m,
                                          const SessionParams& s) {
  std::map<Kinds::Spec, Wide> heads;
  const HeadNumbers numbers = m.head_numbers();
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (plan.layers[layer] == 0) continue;
    const LayerShape shape = m.of(layer);
    if (s.heads.empty()) heads[{s.index, shape.head_dim}] += shape.kv_heads;
    for (uint32_t h = 0; !s.heads.empty() && h < shape.kv_heads; ++h) {
      heads[{s.heads[numbers.at(layer, h)].index, shape.head_dim}] += 1;
    }
  }
  return heads;
}

}  // namespace

uint64_t estimate_search_bytes(const ModelShape& m, const SessionParams& s, uint64_t rows,
                               uint32_t threads) {
  return narrow(search_memory(m, s, count_kinds(m, s), rows, threads), "the memory of searches");
}

MemoryPlan plan_memory(const ModelShape& m, const SessionParams& s, uint64_t context,
                       uint32_t threads, bool host_device, uint64_t device_limit) {
  const uint64_t slots = uint64_t{s.sink} + s.window + s.flush_block;
  // A full window holds between W and W + one block tokens; W is the case that offloads most.
  const uint64_t resident = uint64_t{s.sink} + s.window;
  const uint64_t rows = context > resident ? context - resident : 0;

  // Bytes of the layers that do not slide.
  Wide token = 0, offloaded = 0, samples = 0;
  const uint64_t sampled = std::min<uint64_t>(s.training_queries, context);
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (m.slides(layer)) continue;
    const LayerShape shape = m.of(layer);
    token += Wide{2} * shape.token_bytes(m.kv_dtype);
    offloaded += s.offload_bytes(m, layer, rows);
    samples += Wide{shape.kv_heads} * sampled * (shape.head_dim * sizeof(float) + sizeof(uint32_t));
  }
  const Wide sliding = sliding_memory(m, context);

  MemoryPlan plan;
  plan.kv_bytes = narrow(token * context + sliding, "K and V");
  plan.device_bytes = narrow(token * slots, "sink and window");

  const Kinds kinds = count_kinds(m, s);
  Wide mirror = 0;
  if (!host_device) {
    const gpu::ResidentShape shape = s.resident_shape(m);
    mirror = gpu::resident_bytes(shape);
    plan.device_bytes = gpu::cuda_resident_bytes(shape) + windows_memory(m, context);
    plan.pinned_bytes = gpu::cuda_pinned_bytes(shape);
  }
  CodePlan coded = host_device ? CodePlan{} : code_plan(m, s);
  if (!host_device) check_placement(coded, s, m);
  const uint64_t left = device_limit > plan.device_bytes ? device_limit - plan.device_bytes : 0;
  CodePlan fits =
      fitting(coded, {device_limit == 0 ? UINT64_MAX : left, pinned_room(s, m)}, context, s, m);
  // With KEYHOLE_PLACE_DEVICE no layer may make way, lists may.
  const bool must_be_there = s.offload_placement == KEYHOLE_PLACE_DEVICE;
  if (must_be_there && fits.count() != coded.count()) {
    coded = with_rows_placed(std::move(coded), pinned_room(s, m), context, s, m);
  } else {
    coded = std::move(fits);
  }
  std::map<Kinds::Spec, Wide> on_device;  // heads that need no index of the spec here
  if (coded.any() && gpu::codes_supported(codes_shape(coded, context, s, m))) {
    const CodeBytes bytes = code_bytes(coded, context, s, m);
    plan.code_bytes = bytes.device;
    plan.device_bytes += bytes.device;
    (coded.rows_by_host ? plan.pinned_bytes : plan.pinned_kv_bytes) += bytes.pinned;
    plan.code_layers = coded.count();
    plan.first_code_layer = coded.first();
    plan.rows_by_host = coded.rows_by_host;
    on_device = heads_by_spec(coded, m, s);
  }
  Wide index = 0;
  for (const auto& [spec, count] : kinds.specs) {
    const Wide here = count - on_device[spec];
    if (rows == 0 || rows < index::first_rows(spec.first)) continue;
    index += here * index::estimate_bytes(spec.first, rows, spec.second, m.kv_dtype);
  }
  for (const auto& [dim, count] : kinds.partitions) {
    if (rows == 0) break;
    index += count * index::TailTree::estimate(rows, dim, m.kv_dtype,
                                               {.keys_per_partition = s.tail_partition});
  }
  plan.index_bytes = narrow(index, "the indexes");

  const Wide staging = Wide{2} * s.staging_tokens() * m.most([&](const LayerShape& shape) {
    return shape.token_bytes(m.kv_dtype);
  });
  const Wide searches = search_memory(m, s, kinds, rows, threads);
  const Wide states = Wide{66} * sizeof(float) * m.most([](const LayerShape& shape) {
    return size_t{shape.q_heads} * (shape.head_dim + 1);
  });
  const Wide audits =
      s.audit_share > 0.0 ? Auditor::estimate_bytes(m, threads, kinds.top_k, context) : 0;
  plan.host_bytes =
      narrow(mirror + offloaded + sliding + index + samples + staging + searches + states + audits,
             "host memory");
  return plan;
}

bool plan_fits(const MemoryPlan& plan, uint64_t device_limit, uint64_t host_limit,
               uint64_t pinned_limit, bool host_device) {
  if (device_limit != 0 && plan.device_bytes > device_limit) return false;
  if (pinned_limit != 0 && plan.pinned_bytes + plan.pinned_kv_bytes > pinned_limit) return false;
  const uint64_t host = plan.host_bytes + plan.pinned_bytes + (host_device ? plan.device_bytes : 0);
  return host_limit == 0 || host <= host_limit;
}

uint32_t longest_context(uint64_t least, const std::function<bool(uint64_t)>& plan_fits) {
  const auto fits = [&](uint64_t context) {
    try {
      return plan_fits(context);
    } catch (const Error& e) {
      if (e.status() != Status::invalid_argument) throw;
      return false;  // beyond 2^63 bytes
    }
  };
  if (!fits(least)) return 0;
  uint64_t low = least;
  uint64_t high = uint64_t{kMaxTokens} + 1;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return static_cast<uint32_t>(low);
}

}  // namespace keyhole::runtime
