// Several new tokens of a layer at once (keyhole_extend): their K and V in the dtype in which they will be stored, the
// answers of some tokens after the other, each by one step over what the session holds and the new tokens that they see,
// and when all answers are known the append.
#include <algorithm>
#include <memory>
#include <string>

#include "runtime/session/extension.h"

namespace keyhole::runtime {
namespace {

// Tokens of which one thread stores K and V.
constexpr uint32_t kTokensOfOneThread = 64;
// Of so many new tokens the memory for K and V is kept for the next call.
constexpr uint32_t kTokensKept = 64;

void check_mask(const uint64_t* mask, uint32_t n) {
  if (mask == nullptr) return;
  if (n > 64) {
    throw Error(Status::invalid_argument,
                "a mask for " + std::to_string(n) + " tokens, allowed: up to 64 with a mask");
  }
  for (uint32_t i = 0; i < n; ++i) {
    if (mask[i] >> i == 1) continue;
    throw Error(Status::invalid_argument, "word " + std::to_string(i) + " of the mask is " +
                                              std::to_string(mask[i]) + ", needed: bit " +
                                              std::to_string(i) + " set and none above it");
  }
}

}  // namespace

ExtendArgs slice(const ExtendArgs& args, uint32_t begin, uint32_t n) {
  ExtendArgs part = args;
  part.q = slice(args.q, begin, n);
  part.k = slice(args.k, begin, n);
  part.v = slice(args.v, begin, n);
  part.out.data = args.out.row(begin, 0);
  if (args.lse != nullptr) part.lse = args.lse + size_t{begin} * args.q.heads;
  return part;
}

// ---- One extension -------------------------------------------------------------------------------

Session::Extension::Extension(Session& session, uint32_t layer, const ExtendArgs& args,
                              bool asks_only)
    : s_(&session), layer_(layer), args_(args), asks_only_(asks_only) {
  if (asks_only_) {
    s_->check_queries(args.q);
    describe_new_rows(nullptr, nullptr, 0);
  } else {
    s_->check_extend(layer, args);
    by_pattern_ = s_->extends_by_pattern(layer, args);
    store_new_rows();
  }
  if (!by_pattern_) s_->release_prompt();
  s_->advance_append(layer);
  if (s_->codes_of_step(layer) != nullptr) s_->stream_->finish_codes(layer);
  if (args.q.tokens > 1 && !by_pattern_) joint_ = s_->joint_step(layer);
  append_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

Session::Extension::~Extension() {
  if (under_way_) {
    try {
      (void)step_->finish();
    } catch (...) {  // NOLINT: another error is on its way
    }
  }
  if (under_way_ || is_prepared_) s_->audits_.discard();
  if (args_.k.tokens > kTokensKept) std::vector<std::byte>().swap(s_->new_rows_);
}

void Session::Extension::store_new_rows() {
  const Engine& engine = *s_->engine_;
  const ModelShape& m = engine.model();
  const LayerShape shape = m.of(layer_);
  const size_t row = shape.row_bytes(m.kv_dtype);
  const uint32_t n = args_.k.tokens;
  const size_t bytes = size_t{shape.kv_heads} * n * row;
  if (2 * bytes > s_->new_rows_.capacity()) {
    s_->check_memory(2 * bytes - s_->new_rows_.capacity(), "several new tokens");
    std::vector<std::byte>().swap(s_->new_rows_);
  }
  s_->new_rows_.resize(2 * bytes);
  std::byte* const to = s_->new_rows_.data();
  const auto store = [&](uint32_t task, uint32_t) {
    const RowsIn& rows = task < shape.kv_heads ? args_.k : args_.v;
    float scratch[kMaxHeadDim];
    for (uint32_t t = 0; t < n; ++t) {
      store_row(engine.kernels(), rows, t, task % shape.kv_heads, to + (size_t{task} * n + t) * row,
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

void Session::Extension::describe_new_rows(const std::byte* k, const std::byte* v, uint32_t n) {
  const Engine& engine = *s_->engine_;
  const ModelShape& m = engine.model();
  const LayerShape shape = m.of(layer_);
  fresh_ = {.kernels = &engine.kernels(),
            .k = k,
            .v = v,
            .count = n,
            .head_dim = shape.head_dim,
            .dtype = m.kv_dtype,
            .logits = m.logits_of(layer_),
            .mask = args_.mask,
            .window = m.slides(layer_) ? m.windows[layer_].tokens : 0,
            .first = 0,
            .asking = 0};
}

bool Session::Extension::prepare() {
  if (by_pattern_) {
    s_->extend_by_pattern(layer_, args_, fresh_);
    return false;
  }
  fresh_.first += fresh_.asking;
  fresh_.asking = 0;
  if (fresh_.first == args_.q.tokens) return false;
  const uint32_t left = args_.q.tokens - fresh_.first;
  fresh_.asking = joint_ == nullptr ? 1 : std::min(left, joint_->most_tokens(layer_));
  step_ = fresh_.asking > 1 ? joint_ : &s_->step_;
  put_queries();
  const uint32_t before = s_->tokens(layer_);
  // In a tree a token follows those that it sees.
  const uint32_t depth = fresh_.seen_by_first() - 1;
  s_->prepare_work(*step_, layer_, before + depth, fresh_.asking);
  try {
    if (s_->audits_.on()) s_->begin_audits(layer_);
  } catch (...) {
    s_->audits_.discard();
    throw;
  }
  is_prepared_ = true;
  return true;
}

void Session::Extension::launch() {
  is_prepared_ = false;
  gpu::Codes* const codes = s_->codes_of_step(layer_);
  try {
    s_->step_layer_ = layer_;
    if (codes != nullptr) s_->codes_->expect_step();
    if (fresh_.window != 0) s_->sequence_.rings().set_ahead(fresh_.seen_by_first());
    step_->start(layer_, s_->sequence_.resident_of(layer_), codes, &fresh_);
  } catch (...) {
    s_->sequence_.rings().set_ahead(0);
    s_->audits_.discard();
    throw;
  }
  // A ring without tokens was not asked.
  s_->sequence_.rings().set_ahead(0);
  under_way_ = true;
}

DecodeStep& Session::Extension::plan() {
  step_->plan(layer_, fresh_);
  return *step_;
}

void Session::Extension::put_queries() {
  const LayerShape m = s_->engine_->model().of(layer_);
  const auto to_f32 = s_->engine_->kernels().to_f32[static_cast<int>(args_.q.dtype)];
  float* to = step_->queries();
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    for (uint32_t t = 0; t < fresh_.asking; ++t) {
      for (uint32_t g = 0; g < m.group(); ++g, to += m.head_dim) {
        to_f32(args_.q.row(fresh_.first + t, h * m.group() + g), to, m.head_dim);
      }
    }
  }
}

void Session::Extension::finish() {
  under_way_ = false;
  const LayerShape m = s_->engine_->model().of(layer_);
  StepCost cost;
  try {
    cost = step_->finish();
    const size_t values = size_t{fresh_.asking} * m.q_heads * m.head_dim;
    check_answer(s_->engine_->kernels(), reinterpret_cast<const std::byte*>(step_->o()), DType::f32,
                 values);
  } catch (...) {
    s_->audits_.discard();
    throw;
  }
  if (s_->audits_.on() && s_->codes_of_step(layer_) != nullptr) s_->end_coded_audits();
  s_->audits_.submit();
  write_answers();
  s_->add_cost(cost, fresh_.asking);
}

void Session::Extension::write_answers() {
  const LayerShape m = s_->engine_->model().of(layer_);
  const auto from_f32 = s_->engine_->kernels().from_f32[static_cast<int>(args_.out.dtype)];
  size_t from = 0;  // `[kv_heads, asking, group]`
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    for (uint32_t t = 0; t < fresh_.asking; ++t) {
      for (uint32_t g = 0; g < m.group(); ++g, ++from) {
        const size_t token = fresh_.first + t, head = h * m.group() + g;
        from_f32(step_->o() + from * m.head_dim, args_.out.row(token, head), m.value_dim);
        if (args_.lse != nullptr) args_.lse[token * m.q_heads + head] = step_->lse()[from];
      }
    }
  }
}

void Session::Extension::append() {
  const auto answered = std::chrono::steady_clock::now();
  const uint32_t before = s_->tokens(layer_);
  s_->sequence_.append(layer_, args_.k, args_.v);
  s_->extended_[layer_] = {before, args_.k.tokens, false};
  if (s_->stream_ != nullptr) s_->stream_->pin_codes(layer_);
  const auto now = std::chrono::steady_clock::now();
  s_->totals_.append_seconds +=
      append_seconds_ + std::chrono::duration<double>(now - answered).count();
  s_->totals_.attend_seconds += std::chrono::duration<double>(now - began_).count();
}

DecodeStep* Session::joint_step(uint32_t layer) {
  const ModelShape& m = engine_->model();
  const LayerShape shape = m.of(layer);
  // An audit's record is of one token.
  // The window of a sliding layer moves on from token to token.
  if (kJointHeads / shape.group() < 2 || audits_.on() || m.slides(layer)) return nullptr;
  if (sequence_.resident().contiguous_rows(layer, 0).keys.data == nullptr) return nullptr;
  for (uint32_t h = 0; h < shape.kv_heads && params_.mode == KEYHOLE_MODE_INDEXED; ++h) {
    const HeadIndex& head = keeper_.head(layer, h);
    if (keeper_.is_dense(layer, h) || head.index == nullptr) continue;
    // A target is met, and partitions are chosen, for the heads of a group together.
    if (!head.index->finds_per_head() || head.params.budget.needs_partitions()) return nullptr;
  }
  if (joint_step_ != nullptr) return joint_step_.get();
  try {
    joint_step_ = std::make_unique<DecodeStep>(*engine_, DecodeStep::Tokens::several);
    reserve_searches(false);
    count_step_bytes();
    check_memory(0, "several tokens in one step");
  } catch (const std::exception&) {
    joint_step_.reset();
    count_step_bytes();
  }
  return joint_step_.get();
}

void Session::check_counts(const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  if (n == 0) {
    throw Error(Status::invalid_argument, "tensor k has 0 tokens, allowed: at least 1");
  }
  if (args.q.tokens != n) {
    throw Error(Status::invalid_argument, "tensor q has " + std::to_string(args.q.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  if (args.v.tokens != n) {
    throw Error(Status::invalid_argument, "tensor v has " + std::to_string(args.v.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  check_mask(args.mask, n);
}

void Session::check_extend(uint32_t layer, const ExtendArgs& args) const {
  check_counts(args);
  check_append(layer, args.k, args.v);
  check_queries(args.q);
}

void Session::answer(uint32_t layer, const RowsIn& q, const RowsOut& out, float* lse) {
  ExtendArgs args;
  args.q = q;
  args.out = out;
  args.lse = lse;
  Extension extension(*this, layer, args, true);
  while (extension.start()) extension.finish();
}

void Session::extend(uint32_t layer, const ExtendArgs& args) {
  Extension extension(*this, layer, args);
  while (extension.start()) extension.finish();
  extension.append();
}

}  // namespace keyhole::runtime
