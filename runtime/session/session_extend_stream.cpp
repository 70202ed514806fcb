// Several new tokens of a layer with tensors in device memory: attention of blocks (gpu/blocked.h), for which the offloaded
// rows cross the bus once for all of them; or, where that takes longer, one step on the stream after the other.
#include <algorithm>
#include <string>

#include "gpu/codes.h"
#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

// Which of the two is faster is estimated from what a machine of today does, PCIe 4 to 5 and 16 bits: an error of a factor of
// two costs as much where both take about as long, and little elsewhere.
constexpr double kBusBytesPerUs = 40e3, kCopyBytesPerUs = 6e3;  // of memory that is not pinned
constexpr double kBlockedFixedUs = 300.0;  // waiting for the stream, handing K and V over
constexpr double kCodedStepUs = 25.0, kCodeBytesPerUs = 1.9e6;
constexpr double kHostStepUs = 300.0;
constexpr double kAtOnceGain = 1.9;  // of four tokens of a step over codes, for each of them

}  // namespace

gpu::BlockedShape Session::blocked_shape(uint32_t layer) const {
  const LayerShape m = engine_->model().of(layer);
  return {m.q_heads, m.kv_heads, m.head_dim, engine_->model().kv_dtype,
          params_.kv_host == KEYHOLE_KV_HOST_INT8};
}

Session::Blocked& Session::blocked_parts(uint32_t layer) {
  const LayerShape shape = engine_->model().of(layer);
  for (Blocked& b : blocked_) {
    if (b.shape == shape) return b;
  }
  return blocked_.emplace_back(Blocked{.shape = shape});
}

gpu::BlockedAttention& Session::blocked_of(uint32_t layer) {
  Blocked& parts = blocked_parts(layer);
  if (parts.attention == nullptr) {
    parts.attention =
        engine_->stream_device().make_blocked(sequence_.resident(), blocked_shape(layer));
  }
  return *parts.attention;
}

gpu::ListedAttention& Session::listed_of(uint32_t layer) {
  Blocked& parts = blocked_parts(layer);
  if (parts.listed == nullptr) {
    parts.listed = engine_->stream_device().make_listed(sequence_.resident(), blocked_shape(layer));
  }
  return *parts.listed;
}

uint32_t Session::pinned_rows(uint32_t layer) const {
  const gpu::Codes* const codes = codes_->of_layer(layer);
  const bool pinned = codes != nullptr && !codes_->rows_by_host();
  return pinned ? std::min(codes->count(layer) * kCodeBlock, sequence_.rows(layer)) : 0;
}

bool Session::attends_at_once(uint32_t layer) const {
  return !stream_->is_capturing() && engine_->device_has(gpu::DevicePart::blocked) &&
         gpu::why_no_blocked(blocked_shape(layer)).empty();
}

bool Session::attends_blocked(uint32_t layer, uint32_t n, bool masked) const {
  if (!attends_at_once(layer)) return false;
  const uint32_t at_once = stream_->most_tokens(layer);
  // Steps need the tokens of a mask in the window until the last of them.
  if (masked && (at_once == 1 || n > params_.window)) return true;
  const ModelShape& m = engine_->model();
  const bool reads_rows = params_.mode != KEYHOLE_MODE_RESIDENT;
  const double rows = reads_rows ? sequence_.rows(layer) : 0.0;
  const double row_bytes =
      2.0 * static_cast<double>(m.of(layer).token_bytes(params_.offload_dtype(m)));
  double step = reads_rows ? kHostStepUs : kCodedStepUs;
  if (const gpu::Codes* codes = codes_of_step(layer); codes != nullptr) {
    const double row = static_cast<double>(codes_->bytes()) / codes_->layers() / params_.max_tokens;
    step = (kCodedStepUs + rows * row / kCodeBytesPerUs) / (at_once == 1 ? 1.0 : kAtOnceGain);
  }
  const double pinned = reads_rows ? pinned_rows(layer) : 0.0;
  return n * step > kBlockedFixedUs +
                        (pinned / kBusBytesPerUs + (rows - pinned) / kCopyBytesPerUs) * row_bytes;
}

void Session::extend_on_device(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  const bool masked = args.mask != nullptr;
  release_prompt();
  check_counts(args);
  if (sequence_.slides(layer)) return extend_window(layer, args);
  if (!stream_->is_capturing()) (void)stream_->settled_tokens(layer);
  const bool by_pattern = extends_by_pattern_there(layer, args);
  if (!by_pattern && !attends_blocked(layer, n, masked)) return extend_by_steps(layer, args);
  wait_idle();
  check_failure();
  check_room(layer, n);
  const uint32_t before = tokens(layer);
  if (by_pattern && extends_by_lists(layer, args)) {
    try {
      extend_listed(layer, args);
      extended_[layer] = {before, n, false, true};
      return;
    } catch (const Error& e) {
      if (e.status() != Status::out_of_device_memory) throw;
      if (Blocked& parts = blocked_parts(layer); parts.listed != nullptr) parts.listed->release();
      engine_->log()(KEYHOLE_LOG_INFO,
                     std::string("many tokens are attended without lists of blocks: ") + e.what());
    }
  }
  for (uint32_t at = 0; at < n; at += gpu::kMostBlockedTokens) {
    try {
      extend_blocked(layer, slice(args, at, std::min(n - at, gpu::kMostBlockedTokens)));
    } catch (const Error& e) {
      if (tokens(layer) != before) truncate_layer(layer, before);
      if (e.status() != Status::out_of_device_memory) throw;
      engine_->log()(KEYHOLE_LOG_INFO,
                     std::string("several tokens are attended a few at a time: ") + e.what());
      return extend_by_steps(layer, args);
    }
  }
  extended_[layer] = {before, n, false, true};
}

gpu::SeenDrafts Session::drafts_seen(uint32_t layer, const uint64_t* mask, uint32_t i) const {
  if (mask == nullptr || mask[i] == (uint64_t{2} << i) - 1) return {};
  const gpu::SeenDrafts seen{i + 1, mask[i]};
  const Window& window = engine_->model().windows[layer];
  // The step's own token and those before it are in the ring when it attends, seen or not.
  const uint32_t slots = sequence_.rings().slots(layer), needed = seen.reach(window.tokens);
  if (needed <= slots || slots == params_.max_tokens) return seen;
  throw Error(Status::invalid_argument,
              "layer " + std::to_string(layer) + " has a sliding window of " +
                  std::to_string(window.tokens) + " and keeps " + std::to_string(slots) +
                  " tokens; of tensors in device memory token " + std::to_string(i) +
                  " of this mask needs a window_slack of " +
                  std::to_string(needed - window.tokens));
}

void Session::extend_window(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  for (uint32_t i = 0; i < n; ++i) (void)drafts_seen(layer, args.mask, i);
  const bool captured = stream_->is_capturing();
  const uint32_t before = captured ? 0 : tokens(layer);
  if (!captured && n > params_.max_tokens - before) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " +
                    std::to_string(uint64_t{before} + n) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_.max_tokens));
  }
  for (uint32_t i = 0; i < n; ++i) {
    const ExtendArgs one = slice(args, i, 1);
    stream_->enqueue_window(layer, one.q, &one.k, &one.v, drafts_seen(layer, args.mask, i),
                            &one.out, one.lse);
  }
  if (!captured) extended_[layer] = {before, n, false, true};
}

void Session::extend_by_steps(uint32_t layer, const ExtendArgs& args, gpu::StepGroup* group) {
  const uint32_t n = args.k.tokens;
  if (args.mask != nullptr && n > params_.window) {
    throw Error(Status::unsupported,
                "a mask for " + std::to_string(n) + " tokens in device memory, and a window of " +
                    std::to_string(params_.window) +
                    ": not in a capture, and with K and V in f16 or bf16 alone");
  }
  const bool captured = stream_->is_capturing();
  const uint32_t before = captured ? 0 : stream_->settled_tokens(layer);
  try {
    for (uint32_t i = 0; i < n;) i += enqueue_some(layer, args, i, group);
  } catch (...) {
    if (captured) throw;
    wait_idle();
    if (tokens(layer) > before) truncate_layer(layer, before);
    throw;
  }
  if (!captured) extended_[layer] = {before, n, false, true};
}

uint32_t Session::enqueue_some(uint32_t layer, const ExtendArgs& args, uint32_t first,
                               gpu::StepGroup* group) {
  const uint32_t n = std::min(args.k.tokens - first, stream_->most_tokens(layer));
  if (n > 1 || args.mask != nullptr) {
    const ExtendArgs some = slice(args, first, n);
    gpu::ManyTokens t;
    t.q = device_tokens(some.q);
    t.k = device_tokens(some.k);
    t.v = device_tokens(some.v);
    t.out = device_tokens(some.out);
    t.lse = some.lse;
    t.tokens = n;
    if (first + n == args.k.tokens) t.group = group;
    t.drafts = args.mask == nullptr ? n : first + n;
    for (uint32_t i = 0; i < n; ++i) {
      t.sees[i] = args.mask == nullptr ? (uint64_t{2} << i) - 1 : args.mask[first + i];
    }
    if (stream_->enqueue_tokens(layer, t)) return n;
    if (args.mask != nullptr) {
      throw Error(
          Status::unsupported,
          "layer " + std::to_string(layer) +
              ": a mask for tokens in device memory, in a layer without codes there: not in a "
              "capture, and with K and V in f16 or bf16 alone");
    }
  }
  const ExtendArgs one = slice(args, first, 1);
  stream_->enqueue(layer, one.q, &one.k, &one.v, &one.out, one.lse,
                   first + 1 == args.k.tokens ? group : nullptr);
  return 1;
}

std::array<gpu::KvRows, 2> Session::offloaded_rows(uint32_t layer) {
  const LayerShape m = engine_->model().of(layer);
  const KvView first = sequence_.view(layer, 0);
  gpu::KvRows pinned;
  pinned.keys = first.keys.data;
  pinned.values = first.values.data;
  pinned.head_stride =
      m.kv_heads == 1 ? 0
                      : static_cast<size_t>(sequence_.view(layer, 1).keys.data - first.keys.data);
  pinned.dtype = first.keys.dtype;
  pinned.scales = sequence_.scales(layer);
  // What has codes is pinned; what comes behind it may be in part.
  pinned.pinned = true;
  pinned.count = pinned_rows(layer);
  gpu::KvRows others = pinned;
  const size_t skip = pinned.count * m.row_bytes(pinned.dtype);
  others.keys += skip;
  others.values += skip;
  if (others.scales != nullptr) {
    others.scales += size_t{pinned.count / kScaleRows} * m.kv_heads * 2 * m.head_dim;
  }
  others.count = sequence_.rows(layer) - pinned.count;
  others.pinned = false;
  return {pinned, others};
}

void Session::extend_blocked(uint32_t layer, const ExtendArgs& args) {
  const gpu::Stream stream = stream_->stream();
  const ModelShape& m = engine_->model();
  gpu::BlockedAttention& blocked = blocked_of(layer);
  blocked.begin(device_tokens(args.q), args.q.tokens, {m.logits_of(layer), m.sinks_of(layer)},
                stream);
  if (params_.mode != KEYHOLE_MODE_RESIDENT && sequence_.rows(layer) != 0) {
    for (const gpu::KvRows& rows : offloaded_rows(layer)) {
      if (rows.count != 0) blocked.attend(rows, stream);
    }
  }
  const gpu::ResidentPieces resident = sequence_.resident().stream_steps()->device_rows(layer);
  for (uint32_t i = 0; i < resident.count; ++i) blocked.attend(resident.pieces[i], stream);
  blocked.attend_new(device_tokens(args.k), device_tokens(args.v), args.mask, stream);
  blocked.finish(device_tokens(args.out), args.lse, stream);
  if (blocked.saw_bad_queries(stream)) {
    throw Error(Status::not_finite, "tensor q has a NaN or an infinity");
  }
  prefill_from_device(layer, args.k, args.v, nullptr);
  totals_.attends += args.q.tokens;
  const uint64_t rows = params_.mode == KEYHOLE_MODE_RESIDENT ? 0 : sequence_.rows(layer);
  totals_.keys_attended += rows * m.of(layer).q_heads * args.q.tokens;
}

}  // namespace keyhole::runtime
