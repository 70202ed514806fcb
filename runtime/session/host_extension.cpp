#include "runtime/session/host_extension.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

// Tokens of which one thread stores K and V.
constexpr uint32_t kTokensOfOneThread = 64;
// Of so many new tokens the memory for K and V is kept for the next call.
constexpr uint32_t kTokensKept = 64;

}  // namespace

HostExtension::HostExtension(const ExtensionParts& parts, uint32_t layer, const ExtendArgs& args,
                             Tokens tokens)
    : parts_(parts), layer_(layer), args_(args) {
  const HostParts& host = parts_.host;
  if (tokens == Tokens::somebody_elses) {
    host.tokens.check_queries(args.q);
    describe_new_rows(nullptr, nullptr, 0);
  } else {
    check_counts(args);
    host.tokens.check_append(layer, args.k, args.v);
    host.tokens.check_queries(args.q);
    by_pattern_ = parts_.patterns.apply_to(layer, args);
    is_prompt_ = parts_.patterns.is_prompt(args);
    store_new_rows();
  }
  if (!by_pattern_) host.prompts.release();
  if (!is_prompt_) host.indexing.advance_append(layer);
  host.stream.finish_codes(layer);
  if (args.q.tokens > 1 && !by_pattern_) joint_ = host.steps.joint(layer);
  append_seconds_ = watch_.seconds();
}

HostExtension::~HostExtension() {
  if (under_way_) {
    try {
      (void)step_->finish();
    } catch (...) {  // NOLINT: another error is on its way
    }
  }
  if (under_way_ || is_prepared_) parts_.host.audits.discard();
  if (args_.k.tokens > kTokensKept) std::vector<std::byte>().swap(parts_.new_rows);
}

void HostExtension::store_new_rows() {
  const Engine& engine = parts_.host.engine;
  const ModelShape& m = engine.model();
  const LayerShape shape = m.of(layer_);
  const size_t row = shape.row_bytes(m.kv_dtype);
  const uint32_t n = args_.k.tokens;
  const size_t bytes = size_t{shape.kv_heads} * n * row;
  std::vector<std::byte>& rows = parts_.new_rows;
  if (2 * bytes > rows.capacity()) {
    parts_.memory.check(2 * bytes - rows.capacity(), "several new tokens");
    std::vector<std::byte>().swap(rows);
  }
  rows.resize(2 * bytes);
  std::byte* const to = rows.data();
  const auto store = [&](uint32_t task, uint32_t) {
    const TensorView& from = task < shape.kv_heads ? args_.k : args_.v;
    float scratch[kMaxHeadDim];
    for (uint32_t t = 0; t < n; ++t) {
      store_row(engine.kernels(), from, t, task % shape.kv_heads, to + (size_t{task} * n + t) * row,
                m.kv_dtype, shape.head_dim, scratch);
    }
  };
  if (n <= kTokensOfOneThread) {
    for (uint32_t task = 0; task < 2 * shape.kv_heads; ++task) store(task, 0);
  } else {
    engine.pool().run(2 * shape.kv_heads, store);
  }
  describe_new_rows(to, to + bytes, n);
}

void HostExtension::describe_new_rows(const std::byte* k, const std::byte* v, uint32_t n) {
  const Engine& engine = parts_.host.engine;
  const ModelShape& m = engine.model();
  fresh_ = {.kernels = &engine.kernels(),
            .k = k,
            .v = v,
            .count = n,
            .head_dim = m.of(layer_).head_dim,
            .dtype = m.kv_dtype,
            .logits = m.logits_of(layer_),
            .mask = args_.mask,
            .window = parts_.host.sequence.layer(layer_).reach(),
            .first = 0,
            .asking = 0};
}

bool HostExtension::prepare() {
  if (by_pattern_) {
    parts_.pattern.attend(layer_, args_, fresh_);
    return false;
  }
  fresh_.first += fresh_.asking;
  fresh_.asking = 0;
  if (fresh_.first == args_.q.tokens) return false;
  const uint32_t left = args_.q.tokens - fresh_.first;
  fresh_.asking = joint_ == nullptr ? 1 : std::min(left, joint_->most_tokens(layer_));
  step_ = fresh_.asking > 1 ? joint_ : &parts_.host.steps.one();
  // In a tree a token follows those that it sees; queries alone stand where the newest token does.
  const uint32_t behind = parts_.host.sequence.tokens(layer_) + fresh_.seen_by_first();
  asking_ = {layer_, fresh_.first, fresh_.asking, std::max(behind, 1U) - 1};
  parts_.stepper.prepare(*step_, asking_, args_.q);
  is_prepared_ = true;
  return true;
}

void HostExtension::launch() {
  is_prepared_ = false;
  parts_.stepper.launch(*step_, asking_, &fresh_);
  under_way_ = true;
}

DecodeStep& HostExtension::plan() {
  step_->plan(layer_, fresh_);
  return *step_;
}

void HostExtension::finish() {
  under_way_ = false;
  parts_.stepper.finish(*step_, asking_, args_.out, args_.lse);
}

void HostExtension::append() {
  const Stopwatch appending;
  const uint32_t before = parts_.host.sequence.tokens(layer_);
  parts_.host.tokens.append_prompt(layer_, args_.k, args_.v, is_prompt_ ? &args_.q : nullptr);
  parts_.extended.set(layer_, before, args_.k.tokens, false);
  parts_.host.stream.pin_codes(layer_);
  parts_.host.totals.add_seconds(append_seconds_ + appending.seconds(), watch_.seconds());
}

}  // namespace keyhole::runtime
