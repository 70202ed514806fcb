#include "runtime/session/device_extender.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/code_layout.h"
#include "gpu/codes.h"

namespace keyhole::runtime {
namespace {

// Which way is the fastest is estimated from what an H100 does, over a bus of PCIe 4 to 5 and with 16 bits, and how
// much slower the device is in each of these (gpu/device_slowness.h): an error of a factor of two costs as much where
// two ways take about as long, and little elsewhere. With 32 / 8 heads of 128 behind 131,072 tokens codes of 4 / 2 bits
// are attended at once from so many tokens on: H100 and H200 12 / 12, A100 10 / 10, RTX 3090 12 / 21, 4090 10 / 11,
// 5070 10 / 18, 5090 10 / 14; of 33 to 38 tokens, which begin a second tile, by 2 bits not on a 3090. With 24 / 4 heads
// of 256 behind 262,144 tokens and 4 bits: H100 9, A100 8, 3090 15 (not 22 to 28), 4090 8, 5090 10.
constexpr double kBusBytesPerUs = 40e3, kCopyBytesPerUs = 6e3;  // of memory that is not pinned
constexpr double kBlockedFixedUs = 300.0;  // waiting for the stream, handing K and V over
constexpr double kCodedStepUs = 25.0, kCodeBytesPerUs = 1.9e6;
constexpr double kHostStepUs = 300.0;
constexpr double kAtOnceGain = 1.9;  // of four tokens of a step over codes, for each of them
// Codes of many tokens at once, measured on an H100 (bench/RESULTS.md, "Several new tokens"): what takes as long
// whatever the rows (the host takes new K and V in meanwhile), and operations in a microsecond, of query rows in tiles
// of 128, of which fewer than make up kTurnTiles leave processors idle. Attention in full has as many, and takes them
// beside what crosses the bus: of 1024 tokens behind 131,072 14.9 ms, of 2048 19.4.
constexpr double kCodedTurnUs = 150.0, kTurnOperationsPerUs = 460e6,
                 kWideTurnOperationsPerUs = 365e6;
constexpr uint32_t kLeastCodedTurn = 12, kMostCodedTurn = 1024, kTurnTile = 128, kTurnDim = 128;
constexpr double kTurnTiles = 4.0;
// Each of some tokens of a step over codes, there; and the share of exact attention's time, estimated for slower buses,
// from which on it is sure to be the slower.
constexpr double kTokenUs = 8.0, kTokenOperationsPerUs = 120e6;
constexpr double kSurelyFaster = 0.85;
// Fewer tokens are no chunk of a prompt, of which others follow that need the same memory of the host again.
constexpr uint32_t kLeastPromptTokens = 128;

/// Operations in which a query head of a token attends a row.
double operations_of_row(const LayerShape& m) { return 4.0 * m.head_dim; }
/// Operations in a microsecond, of many tokens.
double turn_rate_of(const LayerShape& m) {
  return m.head_dim <= kTurnDim ? kTurnOperationsPerUs : kWideTurnOperationsPerUs;
}

}  // namespace

bool DeviceExtender::attends_at_once(uint32_t layer) const {
  return !parts_.stream.is_capturing() && parts_.blocks.has_blocked(layer);
}

bool DeviceExtender::attends_blocked(uint32_t layer, uint32_t n, bool masked) const {
  if (!attends_at_once(layer)) return false;
  const uint32_t at_once = parts_.stream.runner().most_tokens(layer);
  // Steps need the tokens of a mask in the window until the last of them.
  if (masked && (at_once == 1 || n > parts_.params.window)) return true;
  if (n == 1) return false;  // for which nothing is made on the device
  const TurnTimes times = times_of(layer, n);
  return n * times.token_by_step > times.in_full;
}

DeviceExtender::TurnTimes DeviceExtender::times_of(uint32_t layer, uint32_t n) const {
  const gpu::DeviceSlowness slowness = parts_.blocks.blocked(layer).slowness();
  const ModelShape& m = parts_.engine.model();
  const LayerShape shape = m.of(layer);
  const bool reads_rows = parts_.params.mode != KEYHOLE_MODE_RESIDENT;
  const double rows = reads_rows ? parts_.sequence.rows(layer) : 0.0;
  const double row_bytes =
      2.0 * static_cast<double>(shape.token_bytes(parts_.params.offload_dtype(m)));
  const double operations = operations_of_row(shape) * rows * shape.q_heads;  // of a token
  double step = reads_rows ? kHostStepUs : kCodedStepUs;
  if (const gpu::Codes* codes = parts_.codes.of_step(layer); codes != nullptr) {
    const double row = parts_.codes.row_bytes(layer);
    const bool alone = parts_.stream.runner().most_tokens(layer) == 1;
    step = (kCodedStepUs + rows * row / kCodeBytesPerUs * slowness.memory) /
           (alone ? 1.0 : kAtOnceGain);
    if (!alone) {
      step = std::min(step, kTokenUs + operations / kTokenOperationsPerUs * slowness.products);
    }
  }
  const double pinned = reads_rows ? parts_.codes.pinned_rows(layer) : 0.0;
  const double bus =
      (pinned / kBusBytesPerUs * slowness.bus + (rows - pinned) / kCopyBytesPerUs) * row_bytes;
  const double products = n * operations / turn_rate_of(shape) * slowness.products;
  return {step, kBlockedFixedUs + bus + products};
}

gpu::CodedRows DeviceExtender::codes_of_turn(uint32_t layer, const ExtendArgs& args,
                                             uint32_t chosen) {
  const uint32_t n = args.k.tokens;
  if (parts_.codes.of_step(layer) == nullptr || (chosen == 0 && n > kMostCodedTurn) ||
      !attends_at_once(layer) || parts_.patterns.is_prompt(args)) {
    return {};
  }
  if (n >= kLeastCodedTurn) {
    // Rows that a fork or a truncation has left unpinned, and new ones, are pinned and encoded as before a step.
    parts_.stream.wait_idle();
    parts_.stream.finish_codes(layer);
  }
  const gpu::Codes* const codes = parts_.codes.of_step(layer);
  if (codes == nullptr) return {};
  gpu::CodedRows rows = codes->coded_rows(layer);
  if (rows.blocks == 0 || size_t{rows.blocks} * kCodeBlock > parts_.codes.pinned_rows(layer))
    return {};
  if (chosen != 0) {
    rows.chosen_blocks = chosen;
    const gpu::BlockedAttention& blocked = parts_.blocks.blocked(layer);
    if (!blocked.attends_codes(rows)) return {};
    if (chosen >= rows.blocks || blocked.chooses_codes(rows)) return rows;
    // All are attended, by what is the fastest.
    rows.chosen_blocks = 0;
    if (n > kMostCodedTurn) return {};
  }
  const LayerShape m = parts_.engine.model().of(layer);
  const double of_query = operations_of_row(m) * rows.blocks * static_cast<double>(kCodeBlock);
  const double tiles = std::ceil(double{1.0} * n * m.q_heads / m.kv_heads / kTurnTile) * m.kv_heads;
  const double coded = kCodedTurnUs + of_query * kTurnTile * std::max(tiles, kTurnTiles) /
                                          turn_rate_of(m) *
                                          parts_.blocks.blocked(layer).slowness().products;
  const TurnTimes times = times_of(layer, n);
  const bool masks = args.mask != nullptr && n > parts_.params.window;  // what no step takes
  // By a pattern no steps are taken: the other way is in full.
  const bool by_steps = chosen == 0 && !masks;
  if (coded > kSurelyFaster * times.in_full || (by_steps && coded > n * times.token_by_step) ||
      !parts_.blocks.blocked(layer).attends_codes(rows)) {
    return {};
  }
  return rows;
}

void DeviceExtender::extend(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  const bool masked = args.mask != nullptr;
  if (args.k.tokens < kLeastPromptTokens) parts_.prompt_memory.release();
  check_counts(args);
  if (!parts_.sequence.layer(layer).offloads()) return extend_window(layer, args);
  if (!parts_.stream.is_capturing()) parts_.stream.settle(layer);
  const uint32_t chosen =
      parts_.stream.is_capturing()
          ? 0
          : parts_.patterns.coded_blocks(layer, args, parts_.sequence.rows(layer));
  gpu::CodedRows codes;
  if (chosen != 0) codes = codes_of_turn(layer, args, chosen);
  const bool by_pattern = codes.blocks_at == nullptr && attends_by_pattern(layer, args);
  if (!by_pattern && codes.blocks_at == nullptr) codes = codes_of_turn(layer, args, 0);
  if (!by_pattern && codes.blocks_at == nullptr && !attends_blocked(layer, n, masked)) {
    return extend_by_steps(layer, args);
  }
  parts_.stream.wait_idle();
  parts_.stream.check_failure();
  parts_.tokens.check_room(layer, n);
  const uint32_t before = parts_.sequence.tokens(layer);
  if (by_pattern && attends_by_lists(layer, args)) {
    try {
      extend_listed(layer, args);
      parts_.extended.set(layer, before, n, true);
      return;
    } catch (const Error& e) {
      if (e.status() != Status::out_of_device_memory) throw;
      parts_.blocks.release_listed(layer);
      parts_.engine.log()(
          KEYHOLE_LOG_INFO,
          std::string("many tokens are attended without lists of blocks: ") + e.what());
    }
  }
  const auto take_back = [&] {
    if (parts_.sequence.tokens(layer) != before) parts_.tokens.truncate_layer(layer, before);
  };
  // Turns over codes gain nothing by more tokens, and take memory for them. The codes of a slice's tokens come with the
  // next call.
  const uint32_t most = codes.chosen_blocks != 0 ? kMostCodedTurn : gpu::kMostBlockedTokens;
  for (uint32_t at = 0; at < n; at += most) {
    try {
      extend_blocked(layer, slice(args, at, std::min(n - at, most)),
                     parts_.patterns.is_prompt(args), codes);
    } catch (const Error& e) {
      take_back();
      if (e.status() != Status::out_of_device_memory) throw;
      parts_.engine.log()(KEYHOLE_LOG_INFO,
                          std::string("several tokens are attended a few at a time: ") + e.what());
      return extend_by_steps(layer, args);
    } catch (...) {
      take_back();
      throw;
    }
  }
  parts_.extended.set(layer, before, n, true);
}

gpu::SeenDrafts DeviceExtender::drafts_seen(uint32_t layer, const uint64_t* mask,
                                            uint32_t i) const {
  if (mask == nullptr || mask[i] == (uint64_t{2} << i) - 1) return {};
  const gpu::SeenDrafts seen{i + 1, mask[i]};
  const Window& window = parts_.engine.model().windows[layer];
  // The step's own token and those before it are in the ring when it attends, seen or not.
  const uint32_t slots = parts_.sequence.rings().slots(layer), needed = seen.reach(window.tokens);
  if (needed <= slots || slots == parts_.params.max_tokens) return seen;
  throw Error(Status::invalid_argument,
              "layer " + std::to_string(layer) + " has a sliding window of " +
                  std::to_string(window.tokens) + " and keeps " + std::to_string(slots) +
                  " tokens; of tensors in device memory token " + std::to_string(i) +
                  " of this mask needs a window_slack of " +
                  std::to_string(needed - window.tokens));
}

void DeviceExtender::extend_window(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  for (uint32_t i = 0; i < n; ++i) (void)drafts_seen(layer, args.mask, i);
  const bool captured = parts_.stream.is_capturing();
  const uint32_t before = captured ? 0 : parts_.sequence.tokens(layer);
  if (!captured && n > parts_.params.max_tokens - before) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " +
                    std::to_string(uint64_t{before} + n) +
                    " tokens, allowed: max_tokens = " + std::to_string(parts_.params.max_tokens));
  }
  for (uint32_t i = 0; i < n; ++i) {
    const ExtendArgs one = slice(args, i, 1);
    parts_.stream.runner().enqueue_window(layer, one.q, &one.k, &one.v,
                                          drafts_seen(layer, args.mask, i), &one.out, one.lse);
  }
  if (!captured) parts_.extended.set(layer, before, n, true);
}

void DeviceExtender::extend_by_steps(uint32_t layer, const ExtendArgs& args,
                                     gpu::StepGroup* group) {
  const uint32_t n = args.k.tokens;
  if (args.mask != nullptr && n > parts_.params.window) {
    throw Error(Status::unsupported,
                "a mask for " + std::to_string(n) + " tokens in device memory, and a window of " +
                    std::to_string(parts_.params.window) +
                    ": not in a capture, and with K and V in f16 or bf16 alone");
  }
  const bool captured = parts_.stream.is_capturing();
  const uint32_t before = captured ? 0 : parts_.stream.runner().settled_tokens(layer);
  try {
    for (uint32_t i = 0; i < n;) i += enqueue_some(layer, args, i, group);
  } catch (...) {
    if (captured) throw;
    parts_.stream.wait_idle();
    if (parts_.sequence.tokens(layer) > before) parts_.tokens.truncate_layer(layer, before);
    throw;
  }
  if (!captured) parts_.extended.set(layer, before, n, true);
}

uint32_t DeviceExtender::enqueue_some(uint32_t layer, const ExtendArgs& args, uint32_t first,
                                      gpu::StepGroup* group) {
  const auto n = static_cast<uint32_t>(
      std::min<size_t>(args.k.tokens - first, parts_.stream.runner().most_tokens(layer)));
  if (n > 1 || args.mask != nullptr) {
    const ExtendArgs some = slice(args, first, n);
    gpu::ManyTokens t;
    t.q = some.q;
    t.k = some.k;
    t.v = some.v;
    t.out = some.out;
    t.lse = some.lse;
    if (first + n == args.k.tokens) t.group = group;
    t.drafts = args.mask == nullptr ? n : first + n;
    for (uint32_t i = 0; i < n; ++i) {
      t.sees[i] = args.mask == nullptr ? (uint64_t{2} << i) - 1 : args.mask[first + i];
    }
    if (parts_.stream.runner().enqueue_tokens(layer, t)) return n;
    if (args.mask != nullptr) {
      throw Error(
          Status::unsupported,
          "layer " + std::to_string(layer) +
              ": a mask for tokens in device memory, in a layer without codes there: not in a "
              "capture, and with K and V in f16 or bf16 alone");
    }
  }
  const ExtendArgs one = slice(args, first, 1);
  parts_.stream.runner().enqueue(layer, one.q, &one.k, &one.v, &one.out, one.lse,
                                 first + 1 == args.k.tokens ? group : nullptr);
  return 1;
}

gpu::CodedAttention DeviceExtender::attend_codes(gpu::BlockedAttention& blocked,
                                                 const gpu::CodedRows& codes, gpu::Stream stream,
                                                 const std::function<void()>& meanwhile) {
  try {
    const gpu::CodedAttention end = blocked.attend_codes(codes, stream, meanwhile);
    parts_.totals.add_doubts(end.heads, end.refused ? end.heads : 0);
    return end;
  } catch (const Error& e) {
    if (e.status() != Status::out_of_device_memory) throw;
    return {.refused = true};
  }
}

void DeviceExtender::extend_blocked(uint32_t layer, const ExtendArgs& args, bool is_prompt,
                                    const gpu::CodedRows& codes) {
  const gpu::Stream stream = parts_.stream.runner().stream();
  const ModelShape& m = parts_.engine.model();
  gpu::BlockedAttention& blocked = parts_.blocks.blocked(layer);
  // The host takes the tokens in while the device attends codes: 4 us a token of 8 KV heads of 128, which it else
  // waited for.
  const gpu::Stream beside = codes.blocks == 0 ? nullptr : parts_.prompts.stream_beside();
  bool is_taken_in = false;
  const auto check_queries = [&](gpu::Stream on) {
    if (!blocked.saw_bad_queries(on)) return;
    throw Error(Status::not_finite, "tensor q has a NaN or an infinity");
  };
  const auto take_in = [&] {
    blocked.finish(args.out, args.lse, stream);
    // Tokens that are taken in and taken back leave the window shorter, and in int8 rounded.
    check_queries(beside);
    parts_.prompts.take_in(layer, args.k, args.v, beside);
    is_taken_in = true;
  };
  blocked.begin(args.q, {m.logits_of(layer), m.sinks_of(layer)}, stream);
  // Of the offloaded rows the first ones have codes.
  const size_t coded = size_t{codes.blocks} * kCodeBlock;
  const auto attend_rows = [&](size_t begin, size_t end) {
    size_t at = 0;
    for (const KvView& rows : parts_.blocks.offloaded_rows(layer)) {
      const size_t count = rows.keys.tokens, from = std::clamp(begin, at, at + count) - at,
                   to = std::clamp(end, at, at + count) - at;
      if (from < to) blocked.attend(rows.slice(from, to - from), stream);
      at += count;
    }
  };
  // What the device has comes first: rows of the host's cross the bus meanwhile.
  const KvPieces resident = parts_.sequence.resident().stream_steps()->device_rows(layer);
  for (uint32_t i = 0; i < resident.count; ++i) blocked.attend(resident.pieces[i], stream);
  const bool has_rows = parts_.params.mode != KEYHOLE_MODE_RESIDENT;
  // As they are taken in, tokens bring others out of the window.
  const uint32_t before = parts_.sequence.tokens(layer),
                 rows = has_rows ? parts_.sequence.rows(layer) : 0;
  if (has_rows) attend_rows(coded, rows);
  blocked.attend_new(args.k, args.v, args.mask, stream);
  bool is_answered = false;
  gpu::CodedAttention end;
  if (coded != 0) {
    end = attend_codes(blocked, codes, stream, take_in);
    if (end.refused) attend_rows(0, coded);
    is_answered = is_taken_in && !end.refused && end.passes <= 1;
  }
  if (!is_answered) blocked.finish(args.out, args.lse, stream);
  if (!is_taken_in) check_queries(stream);
  if (is_taken_in) {
    parts_.prompts.finish_taking_in(layer);
  } else {
    parts_.prompts.prefill(layer, args.k, args.v, is_prompt ? &args.q : nullptr);
  }
  count_attended(layer, args.q.tokens, before, rows, codes, end);
}

void DeviceExtender::count_attended(uint32_t layer, size_t n, uint32_t before, uint32_t rows,
                                    const gpu::CodedRows& codes, const gpu::CodedAttention& end) {
  const uint64_t queries = uint64_t{parts_.engine.model().of(layer).q_heads} * n;
  uint64_t keys = rows * queries;
  if (!end.refused && end.chosen_blocks != 0) {
    const uint64_t left_out = codes.blocks - end.chosen_blocks, few = queries - end.doubted;
    keys -= left_out * kCodeBlock * few;
    parts_.patterns.add_coded(layer, static_cast<uint32_t>(n), before, left_out * few);
  }
  parts_.totals.add_on_device(n, keys);
}

bool DeviceExtender::takes_one_step(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  if (!parts_.sequence.layer(layer).offloads()) return false;
  if (!parts_.stream.is_capturing()) parts_.stream.settle(layer);
  return parts_.codes.of_step(layer) != nullptr && n <= parts_.stream.runner().most_tokens(layer) &&
         !attends_blocked(layer, n, false) && !attends_by_pattern(layer, args);
}

void DeviceExtender::prepare_step(uint32_t layer, const ExtendArgs& args) {
  parts_.prompt_memory.release();
  check_counts(args);
  parts_.stream.runner().prepare_ahead(layer, args.k.tokens);
}

void DeviceExtender::fail_in_group(uint32_t layer, const std::exception_ptr& error) {
  const bool captured = parts_.stream.is_capturing();
  try {
    parts_.stream.runner().fail_launch(error);
  } catch (...) {
    if (captured) throw;
    parts_.extended.note_change(layer);
    parts_.stream.wait_idle();
    throw;
  }
}

}  // namespace keyhole::runtime
