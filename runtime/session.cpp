#include "runtime/session.h"

#include <algorithm>

#include "index/factory.h"

namespace keyhole::runtime {
namespace {

// Tokens per task when rows are checked or converted: tens of microseconds of work.
constexpr uint32_t kTokensPerTask = 64;

uint32_t pieces(uint32_t n, uint32_t piece) { return (n + piece - 1) / piece; }

}  // namespace

Session::Session(std::shared_ptr<const Engine> engine, SessionParams params)
    : engine_(std::move(engine)),
      params_(std::move(params)),
      store_(engine_->model().layers, engine_->model().kv_heads, engine_->model().head_dim,
             engine_->model().kv_dtype, params_.max_tokens),
      resident_(engine_->make_resident(params_.resident_shape(engine_->model()),
                                       params_.device_memory_limit)),
      step_(*engine_),
      appends_(engine_->model().layers),
      builder_(engine_->pool()) {
  const ModelShape& m = engine_->model();
  heads_.reserve(size_t{m.layers} * m.kv_heads);
  for (size_t i = 0; i < size_t{m.layers} * m.kv_heads; ++i) {
    heads_.push_back({nullptr, nullptr,
                      QuerySample(params_.training_queries, m.group(), m.head_dim),
                      params_.head(i)});
  }
  params_.heads.clear();  // from here on each head has its own
  const size_t staging = size_t{params_.window + params_.flush_block} * m.kv_heads * m.row_bytes();
  staging_k_.resize(staging);
  staging_v_.resize(staging);
  make_stream_side();
  if (params_.audit_share > 0.0) {
    uint32_t top_k = 0;
    for (const Head& h : heads_) top_k = std::max(top_k, h.params.budget.top_k);
    auditor_ = std::make_unique<Auditor>(
        *engine_, params_.max_tokens, top_k,
        AuditSchedule(m.layers, m.kv_heads, params_.audit_share, params_.audit_action));
  }
}

void Session::check_layer(uint32_t layer) const {
  if (layer >= engine_->model().layers) {
    throw Error(Status::invalid_argument, "layer is " + std::to_string(layer) + ", allowed: 0.." +
                                              std::to_string(engine_->model().layers - 1));
  }
}

uint32_t Session::tokens(uint32_t layer) const {
  return resident_->sink_count(layer) + store_.rows(layer) + resident_->window_count(layer);
}

keyhole_layer_tokens Session::layer_tokens(uint32_t layer) const {
  keyhole_layer_tokens t{};
  t.struct_size = sizeof t;
  t.total = tokens(layer);
  t.sink = resident_->sink_count(layer);
  t.window = resident_->window_count(layer);
  // Heads differ only after a build that was cancelled half-way.
  bool dense = true;
  t.indexed = store_.rows(layer);
  for (uint32_t h = 0; h < engine_->model().kv_heads; ++h) {
    if (is_dense(layer, h)) continue;
    dense = false;
    t.indexed = std::min(t.indexed, head(layer, h).indexed());
  }
  if (dense) t.indexed = 0;
  t.pending = store_.rows(layer) - t.indexed;
  return t;
}

// ---- Appending -----------------------------------------------------------------------------------

void Session::check_memory(uint64_t more_bytes, const char* what) const {
  if (params_.host_memory_limit == 0) return;
  const uint64_t held = host_bytes();
  if (held + more_bytes > params_.host_memory_limit) {
    throw Error(Status::out_of_memory, std::string(what) + " needs " + std::to_string(more_bytes) +
                                           " bytes more than the " + std::to_string(held) +
                                           " held, host_memory_limit is " +
                                           std::to_string(params_.host_memory_limit));
  }
}

void Session::check_append(uint32_t layer, const RowsIn& k, const RowsIn& v) const {
  const uint32_t n = k.tokens;
  if (v.tokens != n) {
    throw Error(Status::invalid_argument, "tensor v has " + std::to_string(v.tokens) +
                                              " tokens, needed: as many as k, " +
                                              std::to_string(n));
  }
  const uint64_t total = uint64_t{tokens(layer)} + n;
  if (total > params_.max_tokens) {
    throw Error(Status::invalid_argument,
                "layer " + std::to_string(layer) + " would hold " + std::to_string(total) +
                    " tokens, allowed: max_tokens = " + std::to_string(params_.max_tokens));
  }
  const uint64_t slots = uint64_t{params_.sink} + params_.window + params_.flush_block;
  if (params_.host_memory_limit != 0 && total > slots) {
    check_memory(
        uint64_t{std::max(n, params_.flush_block)} * 2 * k.heads * engine_->model().row_bytes(),
        "appending tokens");
  }
  const DType to = engine_->model().kv_dtype;
  const auto check = [&](uint32_t task, uint32_t) {
    const uint32_t begin = task * kTokensPerTask;
    const uint32_t end = std::min(n, begin + kTokensPerTask);
    check_finite(engine_->kernels(), k, "k", begin, end, to);
    check_finite(engine_->kernels(), v, "v", begin, end, to);
  };
  if (n <= kTokensPerTask) {
    if (n != 0) check(0, 0);
  } else {
    engine_->pool().run(pieces(n, kTokensPerTask), check);
  }
}

void Session::prefill(uint32_t layer, const RowsIn& k, const RowsIn& v, const RowsIn* q) {
  check_append(layer, k, v);
  if (q != nullptr) {
    if (q->tokens != k.tokens) {
      throw Error(Status::invalid_argument, "tensor q has " + std::to_string(q->tokens) +
                                                " tokens, needed: as many as k, " +
                                                std::to_string(k.tokens));
    }
    const RowsIn& rows = *q;
    engine_->pool().run(pieces(k.tokens, kTokensPerTask), [&](uint32_t task, uint32_t) {
      const uint32_t begin = task * kTokensPerTask;
      check_finite(engine_->kernels(), rows, "q", begin,
                   std::min(rows.tokens, begin + kTokensPerTask), DType::f32);
    });
    sample_queries(layer, rows, tokens(layer));
  }
  append_tokens(layer, k, v);
}

void Session::sample_queries(uint32_t layer, const RowsIn& q, uint32_t first_position) {
  const ModelShape& m = engine_->model();
  float row[kMaxHeadDim];
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    QuerySample& sample = head(layer, h).queries;
    for (uint32_t t = 0; t < q.tokens; ++t) {
      const int wanted = sample.wanted_head(first_position + t);
      if (wanted < 0) continue;
      const std::byte* src = q.row(t, size_t{h} * m.group() + static_cast<size_t>(wanted));
      engine_->kernels().to_f32[static_cast<int>(q.dtype)](src, row, m.head_dim);
      sample.add(first_position + t, row);
    }
  }
}

void Session::stage(const RowsIn& rows, uint32_t begin, uint32_t n, std::byte* to) {
  const ModelShape& m = engine_->model();
  float scratch[kMaxHeadDim];
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      convert_row(engine_->kernels(), rows.row(begin + t, h), rows.dtype, to, m.kv_dtype,
                  m.head_dim, scratch);
      to += m.row_bytes();
    }
  }
}

void Session::append_tokens(uint32_t layer, const RowsIn& k, const RowsIn& v) {
  const uint32_t capacity = params_.window + params_.flush_block;
  const uint32_t n = k.tokens;
  uint32_t at = 0;

  while (at < n && resident_->sink_count(layer) < params_.sink) {
    const uint32_t piece =
        std::min({n - at, params_.sink - resident_->sink_count(layer), capacity});
    stage(k, at, piece, staging_k_.data());
    stage(v, at, piece, staging_v_.data());
    resident_->append_sink(layer, staging_k_.data(), staging_v_.data(), piece);
    at += piece;
  }

  const uint32_t window = resident_->window_count(layer);
  if (n - at > capacity - window) {
    // The window falls back to its W newest tokens: what is older leaves, first from the window, then
    // straight from the input.
    const uint32_t overflow = window + (n - at) - params_.window;
    const uint32_t from_window = std::min(overflow, window);
    offload_from_window(layer, from_window);
    offload_from_input(layer, k, v, at, overflow - from_window);
    at += overflow - from_window;
  }
  if (at < n) {
    stage(k, at, n - at, staging_k_.data());
    stage(v, at, n - at, staging_v_.data());
    resident_->append_window(layer, staging_k_.data(), staging_v_.data(), n - at);
  }
}

void Session::offload_from_window(uint32_t layer, uint32_t n) {
  if (n == 0) return;
  resident_->evict(layer, staging_k_.data(), staging_v_.data(), n);
  store_staged(layer, n);
}

void Session::store_staged(uint32_t layer, uint32_t n) {
  const ModelShape& m = engine_->model();
  store_.prepare(layer, n);
  const uint32_t row = store_.rows(layer);
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      const size_t at = (size_t{t} * m.kv_heads + h) * m.row_bytes();
      std::copy_n(staging_k_.data() + at, m.row_bytes(), store_.key(layer, h, row + t));
      std::copy_n(staging_v_.data() + at, m.row_bytes(), store_.value(layer, h, row + t));
    }
  }
  store_.grow(layer, n);
}

void Session::offload_from_input(uint32_t layer, const RowsIn& k, const RowsIn& v, uint32_t begin,
                                 uint32_t n) {
  if (n == 0) return;
  const ModelShape& m = engine_->model();
  const uint32_t row = store_.rows(layer);
  const uint32_t per_head = pieces(n, 1024);
  store_.prepare(layer, n);
  engine_->pool().run(m.kv_heads * per_head, [&](uint32_t task, uint32_t) {
    float scratch[kMaxHeadDim];
    const uint32_t h = task / per_head;
    const uint32_t first = task % per_head * 1024;
    for (uint32_t t = first; t < std::min(n, first + 1024); ++t) {
      convert_row(engine_->kernels(), k.row(begin + t, h), k.dtype, store_.key(layer, h, row + t),
                  m.kv_dtype, m.head_dim, scratch);
      convert_row(engine_->kernels(), v.row(begin + t, h), v.dtype, store_.value(layer, h, row + t),
                  m.kv_dtype, m.head_dim, scratch);
    }
  });
  store_.grow(layer, n);
}

// ---- Steps ---------------------------------------------------------------------------------------

void Session::attend_begin(uint32_t layer, const RowsIn& q, const RowsIn* k, const RowsIn* v) {
  const auto began = std::chrono::steady_clock::now();
  const ModelShape& m = engine_->model();
  if (k != nullptr) check_append(layer, *k, *v);
  check_finite(engine_->kernels(), q, "q", 0, 1, DType::f32);
  if (k == nullptr && tokens(layer) == 0) {
    throw Error(
        Status::invalid_argument,
        "layer " + std::to_string(layer) + " holds no token to attend to: append one with k and v");
  }
  advance_append(layer);
  if (k != nullptr) append_tokens(layer, *k, *v);
  step_append_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();

  for (uint32_t h = 0; h < m.q_heads; ++h) {
    engine_->kernels().to_f32[static_cast<int>(q.dtype)](
        q.row(0, h), step_.queries() + size_t{h} * m.head_dim, m.head_dim);
  }
  prepare_work(layer, tokens(layer) - 1, false);
  if (auditor_ != nullptr) begin_audits(layer);
  step_layer_ = layer;
  step_appended_ = k != nullptr;
  step_began_ = began;
  step_.start(layer, *resident_);
  in_step_ = true;
}

void Session::prepare_work(uint32_t layer, uint32_t position, bool front) {
  const ModelShape& m = engine_->model();
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    const Head& hd = head(layer, h);
    HeadWork& work = step_.work(h);
    work.kv = store_.view(layer, h);
    work.index = nullptr;
    work.exact_begin = 0;
    work.record = nullptr;
    work.partitions = nullptr;
    if (params_.mode == KEYHOLE_MODE_EXACT || is_dense(layer, h)) continue;
    work.exact_begin = store_.rows(layer);
    if (params_.mode == KEYHOLE_MODE_RESIDENT) continue;
    // An index does not fit only where there was no memory for a search in it.
    const Budget& budget = hd.params.budget;
    if (front && chooses_on_device(hd)) {
      work.partitions = hd.tail.get();
      work.exact_begin = hd.indexed();
      continue;
    }
    const index::TailTree* tail = budget.needs_partitions() ? hd.full_tail() : nullptr;
    const bool searches = hd.indexed() != 0 &&
                          (tail != nullptr || budget.attend != KEYHOLE_ATTEND_NONE) &&
                          step_.fits({hd.index.get(), budget.attend, tail});
    work.exact_begin = searches ? hd.indexed() : 0;
    if (!searches) continue;
    work.index = hd.index.get();
    work.search = {.k = budget.top_k, .attend = budget.attend, .min_weight = budget.min_weight};
    work.position = position;
    if (tail != nullptr) work.search.tail = tail_work(budget, *tail);
  }
}

void Session::attend_end(const RowsOut& out, float* lse) {
  in_step_ = false;
  const ModelShape& m = engine_->model();
  StepCost cost;
  try {
    cost = step_.finish();
    const size_t values = size_t{m.q_heads} * m.head_dim;
    if (!engine_->kernels().all_finite[0](reinterpret_cast<const std::byte*>(step_.o()), values)) {
      throw Error(Status::internal, "finite inputs gave an attention that is not");
    }
  } catch (...) {
    if (auditor_ != nullptr) auditor_->discard();
    if (step_appended_) drop_newest(step_layer_);
    throw;
  }
  if (auditor_ != nullptr) auditor_->submit();
  for (uint32_t h = 0; h < m.q_heads; ++h) {
    engine_->kernels().from_f32[static_cast<int>(out.dtype)](
        step_.o() + size_t{h} * m.head_dim, out.data + h * out.head_stride, m.head_dim);
  }
  if (lse != nullptr) std::copy_n(step_.lse(), m.q_heads, lse);

  add_cost(cost);
  totals_.append_seconds += step_append_seconds_;
  totals_.attend_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - step_began_).count();
}

void Session::add_cost(const StepCost& cost) {
  totals_.attends += 1;
  totals_.keys_scored += cost.keys_scored;
  totals_.keys_offered += cost.keys_offered;
  totals_.keys_attended += cost.keys_attended;
  totals_.bytes_read += cost.bytes_read;
  totals_.search_seconds += cost.search_seconds;
  totals_.offload_seconds += cost.offload_seconds;
  totals_.resident_seconds += cost.resident_seconds;
  totals_.tail_seconds += cost.tail_seconds;
  totals_.keys_opened += cost.keys_opened;
  totals_.targets_missed += cost.targets_missed;
}

void Session::drop_newest(uint32_t layer) {
  const uint32_t sink = resident_->sink_count(layer);
  const uint32_t window = resident_->window_count(layer);
  if (window != 0) {
    resident_->truncate(layer, sink, window - 1);
  } else {
    resident_->truncate(layer, sink - 1, 0);
  }
}

void Session::abandon_step() noexcept {
  in_step_ = false;
  try {
    (void)step_.finish();
  } catch (...) {  // NOLINT: nobody is left to hear of it
  }
}

void Session::truncate(uint32_t n) {
  const ModelShape& m = engine_->model();
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (tokens(layer) <= n) continue;
    const uint32_t sink = std::min(n, resident_->sink_count(layer));
    const uint32_t rows = std::min(n - sink, store_.rows(layer));
    if (auditor_ != nullptr) auditor_->finish_reading(layer, rows);
    // A block of rows that all remain goes on: they are not touched, nor are the indexes, which end before.
    if (appends_[layer] != nullptr && appends_[layer]->rows > rows) cancel_append(layer);
    for (uint32_t h = 0; h < m.kv_heads; ++h) {
      Head& hd = head(layer, h);
      hd.queries.truncate(n);
      if (hd.tail != nullptr && hd.tail->count() > rows) {
        hd.tail->truncate(rows, store_.view(layer, h));
      }
      if (hd.index == nullptr || hd.indexed() <= rows) continue;
      if (rows == 0) {
        hd.index.reset();
      } else {
        hd.index->truncate(rows);
      }
    }
    store_.truncate(layer, rows);
    resident_->truncate(layer, sink, n - sink - rows);
  }
  index_bytes_ = count_index_bytes();
  drop_front();
}

// ---- Settings and figures ------------------------------------------------------------------------

void Session::set_index(const std::string& spec) {
  index::check_spec(spec);
  for (uint32_t l = 0; l < engine_->model().layers; ++l) cancel_append(l);
  for (Head& h : heads_) {
    h.index.reset();
    h.tail.reset();
    h.params.index = spec;
    h.params.dense = false;
  }
  params_.index = spec;
  index_bytes_ = 0;
  drop_front();
  if (auditor_ == nullptr) return;
  for (size_t i = 0; i < heads_.size(); ++i) auditor_->schedule().reset_reach(i);
}

void Session::change_budget(size_t i, const Budget& budget) {
  if (heads_[i].params.budget == budget) return;
  heads_[i].params.budget = budget;
  if (stream_ != nullptr) stream_->front_refused = false;
  if (auditor_ != nullptr) auditor_->schedule().reset_reach(i);
}

void Session::set_mode(keyhole_mode mode, uint32_t top_k) {
  check_mode(mode);
  if (top_k > kMaxTokens) {
    throw Error(Status::invalid_argument, "top_k is " + std::to_string(top_k) + ", allowed: 1.." +
                                              std::to_string(kMaxTokens) + ", or 0 to keep it");
  }
  if (top_k != 0) {
    if (auditor_ != nullptr) auditor_->prepare(top_k);
    params_.budget.top_k = top_k;
    for (size_t i = 0; i < heads_.size(); ++i) {
      Budget budget = heads_[i].params.budget;
      budget.top_k = top_k;
      change_budget(i, budget);
    }
  }
  if (params_.mode != mode && stream_ != nullptr) stream_->version += 1;
  params_.mode = mode;
  make_room(false);
}

void Session::set_attend(keyhole_attend_mode attend, float min_weight) {
  check_attend(attend);
  params_.budget.min_weight = check_min_weight(min_weight, params_.budget.min_weight);
  bool other = params_.budget.attend != attend;
  params_.budget.attend = attend;
  for (size_t i = 0; i < heads_.size(); ++i) {
    Budget budget = heads_[i].params.budget;
    if (min_weight != 0.0F) budget.min_weight = min_weight;
    other = other || budget.attend != attend;
    budget.attend = attend;
    change_budget(i, budget);
  }
  if (other) make_room(true);  // scratch of another shape
}

std::vector<size_t> Session::named_heads(uint32_t layer, uint32_t kv_head) const {
  const ModelShape& m = engine_->model();
  const auto check = [](const char* field, uint32_t value, uint32_t end) {
    if (value == KEYHOLE_ALL || value < end) return;
    throw Error(Status::invalid_argument, std::string(field) + " is " + std::to_string(value) +
                                              ", allowed: 0.." + std::to_string(end - 1) +
                                              " or KEYHOLE_ALL");
  };
  check("layer", layer, m.layers);
  check("kv_head", kv_head, m.kv_heads);
  std::vector<size_t> out;
  for (uint32_t l = layer == KEYHOLE_ALL ? 0 : layer; l < m.layers; ++l) {
    for (uint32_t h = kv_head == KEYHOLE_ALL ? 0 : kv_head; h < m.kv_heads; ++h) {
      out.push_back(size_t{l} * m.kv_heads + h);
      if (kv_head != KEYHOLE_ALL) break;
    }
    if (layer != KEYHOLE_ALL) break;
  }
  return out;
}

void Session::set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget) {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  if (auditor_ != nullptr) auditor_->prepare(budget.top_k);
  if (layer == KEYHOLE_ALL && kv_head == KEYHOLE_ALL) params_.budget = budget;
  bool other = false;
  for (const size_t i : named) {
    other = other || heads_[i].params.budget.attend != budget.attend;
    change_budget(i, budget);
  }
  make_room(other);
}

Budget Session::budget(uint32_t layer, uint32_t kv_head) const {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  const Budget& first = heads_[named.front()].params.budget;
  for (const size_t i : named) {
    if (heads_[i].params.budget == first) continue;
    throw Error(Status::invalid_argument,
                "the heads that KEYHOLE_ALL names have different budgets: ask for one of them");
  }
  return first;
}

uint64_t Session::count_index_bytes() const {
  uint64_t bytes = 0;
  for (const Head& h : heads_) {
    if (h.index != nullptr) bytes += h.index->bytes();
    if (h.tail != nullptr) bytes += h.tail->bytes();
  }
  return bytes;
}

uint64_t Session::host_bytes() const {
  uint64_t bytes =
      store_.bytes() + index_bytes_ + staging_k_.size() + staging_v_.size() + step_.bytes();
  // On a CUDA device the resident tokens have a copy here.
  if (stream_ != nullptr) bytes += gpu::resident_bytes(params_.resident_shape(engine_->model()));
  for (const Head& h : heads_) bytes += h.queries.bytes();
  if (auditor_ != nullptr) bytes += auditor_->bytes();
  return bytes;
}

keyhole_statistics Session::statistics() const {
  keyhole_statistics s = totals_;
  s.struct_size = sizeof s;
  for (uint32_t l = 0; l < engine_->model().layers; ++l)
    s.tokens = std::max<uint64_t>(s.tokens, tokens(l));
  s.host_bytes = host_bytes();
  s.index_bytes = index_bytes_;
  for (const Head& h : heads_) s.tail_bytes += h.tail != nullptr ? h.tail->bytes() : 0;
  s.device_bytes = device_bytes();
  s.device_bytes_peak = std::max(device_bytes_peak_, s.device_bytes);
  s.host_bytes_peak = std::max(host_bytes_peak_, s.host_bytes);
  s.signal = "";
  stream_statistics(s);
  s.device = engine_->device_name();
  s.cpu_level = engine_->kernels().name;
  s.threads = engine_->pool().threads();
  return s;
}

}  // namespace keyhole::runtime
