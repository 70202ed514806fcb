// Several new tokens of a layer at once (keyhole_extend): their K and V in the dtype in which they will be stored, the
// answers of some tokens after the other, each by one step over what the session holds and the new tokens that they see,
// and when all answers are known the append. Batches are several of these whose steps are under way at once.
#include <algorithm>
#include <memory>
#include <string>

#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

// Tokens of which one thread stores K and V.
constexpr uint32_t kTokensPerTask = 64;
// Of so many new tokens the memory for K and V is kept for the next call.
constexpr uint32_t kTokensKept = 64;
// Steps of a batch that are under way at once: as many jobs as the pool publishes (64), with room for others.
constexpr size_t kStepsAtOnce = 32;

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

/// A keyhole_extend of one session: start() and finish() in turn until start() has nothing left to do, then append().
class Session::Extension {
 public:
  /// Checks and prepares all. Throws Error; the session's tokens have not changed then.
  Extension(Session& session, uint32_t layer, const ExtendArgs& args);
  ~Extension();
  Extension(const Extension&) = delete;
  Extension& operator=(const Extension&) = delete;

  /// Hands a step for the next tokens to the pool; false: all are answered.
  [[nodiscard]] bool start();
  /// Waits for it and writes its answers.
  void finish();
  void append();

 private:
  void store_new_rows();
  void put_queries();
  void write_answers();

  Session* s_;
  uint32_t layer_;
  ExtendArgs args_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  double append_seconds_ = 0.0;
  bool by_pattern_ = false;  ///< all at once, without a step
  NewTokens fresh_;
  DecodeStep* joint_ = nullptr;  ///< of several tokens; null: of one at a time
  DecodeStep* step_ = nullptr;   ///< the one under way
  bool under_way_ = false;
};

Session::Extension::Extension(Session& session, uint32_t layer, const ExtendArgs& args)
    : s_(&session), layer_(layer), args_(args) {
  s_->check_extend(layer, args);
  by_pattern_ = s_->extends_by_pattern(layer, args);
  store_new_rows();
  if (!by_pattern_) s_->release_prompt();
  s_->advance_append(layer);
  if (s_->codes_of_step(layer) != nullptr) s_->stream_->finish_codes(layer);
  if (args.k.tokens > 1 && !by_pattern_) joint_ = s_->joint_step(layer);
  append_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
}

Session::Extension::~Extension() {
  if (under_way_) {
    try {
      (void)step_->finish();
    } catch (...) {  // NOLINT: another error is on its way
    }
    s_->audits_.discard();
  }
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
  if (n <= kTokensPerTask) {
    for (uint32_t task = 0; task < 2 * shape.kv_heads; ++task) store(task, 0);
  } else {
    engine.pool().run(2 * shape.kv_heads, store);
  }
  fresh_ = {.kernels = &engine.kernels(),
            .k = to,
            .v = to + bytes,
            .count = n,
            .head_dim = shape.head_dim,
            .dtype = m.kv_dtype,
            .logits = m.logits_of(layer_),
            .mask = args_.mask,
            .window = m.slides(layer_) ? m.windows[layer_].tokens : 0,
            .first = 0,
            .asking = 0};
}

bool Session::Extension::start() {
  if (by_pattern_) {
    s_->extend_by_pattern(layer_, args_, fresh_);
    return false;
  }
  fresh_.first += fresh_.asking;
  fresh_.asking = 0;
  if (fresh_.first == fresh_.count) return false;
  const uint32_t left = fresh_.count - fresh_.first;
  fresh_.asking = joint_ == nullptr ? 1 : std::min(left, joint_->most_tokens(layer_));
  step_ = fresh_.asking > 1 ? joint_ : &s_->step_;
  put_queries();
  const uint32_t before = s_->tokens(layer_);
  // In a tree a token follows those that it sees.
  const uint32_t depth = fresh_.seen_by_first() - 1;
  s_->prepare_work(*step_, layer_, before + depth, false, fresh_.asking);
  gpu::Codes* const codes = s_->codes_of_step(layer_);
  try {
    if (s_->audits_.on()) s_->begin_audits(layer_);
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
  return true;
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
    if (!s_->engine_->kernels().all_finite[0](reinterpret_cast<const std::byte*>(step_->o()),
                                              values)) {
      throw Error(Status::internal, "finite inputs gave an attention that is not");
    }
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

void Session::extend(uint32_t layer, const ExtendArgs& args) {
  Extension extension(*this, layer, args);
  while (extension.start()) extension.finish();
  extension.append();
}

// ---- Batches -------------------------------------------------------------------------------------

void Session::extend_batch(uint32_t layer, std::span<BatchMember> members) {
  if (!members.empty() && members[0].args.q.on_device) {
    return extend_batch_on_device(layer, members);
  }
  // Of one session after the other the step under way is finished and the next begun at once: meanwhile workers have the
  // tasks of all others.
  struct Slot {
    BatchMember* member = nullptr;
    std::unique_ptr<Extension> extension;  ///< with a step under way; null: the slot is free
  };
  // Taken before any session changes: from here on only members can fail.
  std::vector<Slot> slots(std::min(kStepsAtOnce, members.size()));
  const auto attempt = [](BatchMember& member, auto&& body) {
    try {
      return body();
    } catch (...) {
      member.error = std::current_exception();
      return false;
    }
  };
  // False: the session is done, or has failed.
  const auto go_on = [&](Slot& slot) {
    return attempt(*slot.member, [&] {
      if (slot.extension->start()) return true;
      slot.extension->append();
      return false;
    });
  };
  size_t next = 0;
  const auto take_next = [&](Slot& slot) {
    slot.extension.reset();
    while (next < members.size()) {
      slot.member = &members[next++];
      if (slot.member->error != nullptr || slot.member->args.k.tokens == 0) continue;
      const bool begun = attempt(*slot.member, [&] {
        slot.extension =
            std::make_unique<Extension>(*slot.member->session, layer, slot.member->args);
        return true;
      });
      if (begun && go_on(slot)) return;
      slot.extension.reset();
    }
  };
  for (Slot& slot : slots) take_next(slot);
  for (bool some = true; some;) {
    some = false;
    for (Slot& slot : slots) {
      if (slot.extension == nullptr) continue;
      some = true;
      const bool answered = attempt(*slot.member, [&] {
        slot.extension->finish();
        return true;
      });
      if (!answered || !go_on(slot)) take_next(slot);
    }
  }
}

}  // namespace keyhole::runtime
