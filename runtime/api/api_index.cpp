// keyhole_index: one index over the keys of one KV head, by itself.
#include <array>
#include <atomic>
#include <charconv>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/home_process.h"
#include "index/types/factory.h"
#include "keyhole/index.h"
#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"
#include "runtime/engine/sizes.h"
#include "runtime/engine/tensor.h"
#include "runtime/plan/auto_index.h"
#include "runtime/plan/budget.h"
#include "runtime/step/selection.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

struct keyhole_index {
  std::shared_ptr<const Engine> engine;
  std::string spec;
  uint32_t layer = 0, kv_head = 0;      ///< whose trained data, if any, the index uses
  std::unique_ptr<index::Index> index;  ///< null until it is built
  std::vector<std::byte> keys, values;  ///< `[n, head_dim]` of kv_dtype
  size_t count = 0;
  std::unique_ptr<index::TailTree> tail;  ///< of all keys; null until it is built
  index::Balance balance;                 ///< of both
  Selection selection;
  uint32_t reserved_group = 0, reserved_k = 0;  ///< what `selection` is reserved for; 0: nothing
  std::vector<float> tail_o, tail_lse;          ///< `[group, head_dim]`, `[group]`
  std::vector<float> wide_o, wide_other;  ///< `[group, head_dim]`, of values narrower than keys
  std::vector<uint32_t> attended;         ///< last, where all are attended by codes
  std::vector<float> queries;
  std::string params, diagnostics;
  cpu::HomeProcess home;
  mutable std::atomic<bool> in_use = false;

  [[nodiscard]] LayerShape shape() const { return engine->model().of(layer); }
  [[nodiscard]] RowsView view(const std::vector<std::byte>& rows) const {
    const DType dtype = engine->model().kv_dtype;
    return dense_rows(rows.data(), rows.empty() ? 0 : count, shape().head_dim, dtype);
  }
};

namespace {

/// Rows of `dim` elements.
std::vector<std::byte> convert(const Engine& engine, const TensorView& rows, uint32_t dim,
                               const char* name) {
  const DType dtype = engine.model().kv_dtype;
  const size_t row = dim * dtype_size(dtype);
  check_finite(engine.kernels(), rows, name, 0, rows.tokens, dtype);
  std::vector<std::byte> to(checked_product({rows.tokens, row}, name));
  float scratch[kMaxHeadDim];
  for (size_t i = 0; i < rows.tokens; ++i) {
    store_row(engine.kernels(), rows, i, 0, to.data() + i * row, dtype, dim, scratch);
  }
  return to;
}

std::vector<float> convert_queries(const Engine& engine, const TensorView& from, const char* name) {
  check_finite(engine.kernels(), from, name, 0, from.tokens, DType::f32);
  std::vector<float> to(from.tokens * from.dim);
  for (size_t i = 0; i < from.tokens; ++i) {
    engine.kernels().to_f32[static_cast<int>(from.dtype)](from.row(i), to.data() + i * from.dim,
                                                          from.dim);
  }
  return to;
}

/// Checks what search and attend share and puts the queries in place.
struct Call {
  uint32_t group = 0;
  uint32_t asked_k = 0;  ///< the width of the caller's arrays
  SearchParams params;
  GroupQuery query;
};

Call prepare(keyhole_index& ix, const keyhole_tensor* queries,
             const keyhole_search_options* options, bool attends) {
  if (ix.index == nullptr) {
    throw Error(Status::invalid_argument, "the index is empty: call keyhole_index_build first");
  }
  keyhole_search_options defaults;
  keyhole_search_options_init(&defaults);
  const auto o = options == nullptr ? defaults : read_struct(options, defaults, "options");
  const LayerShape m = ix.shape();
  const TensorView q = check_matrix(queries, "queries", m.head_dim);
  if (q.tokens < 1 || q.tokens > kMaxGroup) {
    throw Error(Status::invalid_argument, "queries holds " + std::to_string(q.tokens) +
                                              " rows, allowed: 1.." + std::to_string(kMaxGroup));
  }
  Budget budget = check_embedded_budget(o.budget);
  if (attends) budget = completed(budget, ix.spec);
  Call call;
  call.group = static_cast<uint32_t>(q.tokens);
  call.asked_k = budget.top_k;
  call.params = {.k = static_cast<uint32_t>(std::min<size_t>(budget.top_k, ix.count)),
                 .attend = budget.attend,
                 .min_weight = budget.min_weight};
  if (budget.reads_codes() && attends) {
    check_codes(budget, ix.spec);
    call.params.codes = index::CodedRows::of(*ix.index);
    if (!call.params.codes) {
      throw Error(Status::invalid_argument,
                  "tail is KEYHOLE_TAIL_CODES, but the index was built without values");
    }
    ix.tail_o.resize(size_t{call.group} * m.head_dim);
    ix.tail_lse.resize(call.group);
  }
  if (budget.needs_partitions()) {
    if (ix.tail == nullptr) {
      throw Error(Status::invalid_argument,
                  "a tail or a target needs partitions: call keyhole_index_build_tail first");
    }
    if ((o.other_o == nullptr) != (o.other_lse == nullptr)) {
      throw Error(Status::invalid_argument, "of other_o and other_lse one is NULL, needed: both");
    }
    call.params.tail = tail_work(budget, *ix.tail);
    // Read only: StateView is what merges take.
    call.params.tail.other = {const_cast<float*>(o.other_o), const_cast<float*>(o.other_lse)};
    if (o.other_o != nullptr && m.value_dim != m.head_dim) {
      ix.wide_other.assign(size_t{call.group} * m.head_dim, 0.0F);
      for (uint32_t h = 0; h < call.group; ++h) {
        std::copy_n(o.other_o + size_t{h} * m.value_dim, m.value_dim,
                    ix.wide_other.begin() + size_t{h} * m.head_dim);
      }
      call.params.tail.other.o = ix.wide_other.data();
    }
    ix.tail_o.resize(size_t{call.group} * m.head_dim);
    ix.tail_lse.resize(call.group);
  }
  check_finite(ix.engine->kernels(), q, "queries", 0, call.group, DType::f32);
  ix.queries.resize(size_t{call.group} * m.head_dim);
  for (uint32_t h = 0; h < call.group; ++h) {
    ix.engine->kernels().to_f32[static_cast<int>(q.dtype)](
        q.row(h), ix.queries.data() + size_t{h} * m.head_dim, m.head_dim);
  }
  const Selection::Use use{ix.index.get(), call.params.attend, ix.tail.get()};
  if (ix.reserved_group != call.group || ix.reserved_k != call.params.k ||
      !ix.selection.fits(use)) {
    ix.selection.reserve({&use, 1}, call.group, call.params.k);
    ix.reserved_group = call.group;
    ix.reserved_k = call.params.k;
  }
  call.query = {.kernels = &ix.engine->kernels(),
                .kv = {ix.view(ix.keys), ix.view(ix.values)},
                .queries = ix.queries.data(),
                .group = call.group,
                .logits = ix.engine->model().logits_of(ix.layer),
                .position = o.position};
  return call;
}

/// Adds the rows of the last block, which have no codes yet, to the state of the rows that were read exactly. Returns
/// both.
std::span<const uint32_t> add_uncoded(keyhole_index& ix, const Call& call, StateView read) {
  const std::span<const uint32_t> chosen = ix.selection.attended();
  ix.attended.assign(chosen.begin(), chosen.end());
  const size_t first = call.params.codes.count();
  if (ix.selection.attended_all()) {
    ix.attended.resize(first);
    std::iota(ix.attended.begin(), ix.attended.end(), 0U);
  }
  if (first == ix.count) return ix.attended;
  for (size_t i = first; i < ix.count; ++i) ix.attended.push_back(static_cast<uint32_t>(i));
  std::vector<float> o(size_t{call.group} * call.query.dim()), lse(call.group);
  const StateView rest{o.data(), lse.data()};
  call.query.attend_range(first, ix.count - first, rest);
  const std::array<StateView, 2> both{read, rest};
  cpu::merge_states(both, call.group, call.query.dim(), read);
  return ix.attended;
}

/// Merges the state by codes into o and lse, and tells its share of the mass, what is attended elsewhere left out.
void merge_missing(const Call& call, float* o, float* lse, StateView tail, float* missing) {
  const std::array<StateView, 2> both{StateView{o, lse}, tail};
  cpu::merge_states(both, call.group, call.query.dim(), {o, lse});
  for (uint32_t h = 0; h < call.group; ++h) {
    missing[h] = tail.lse[h] == kMinusInf ? 0.0F : std::exp(tail.lse[h] - lse[h]);
  }
}

void check_below(const char* field, uint32_t value, uint32_t end) {
  if (value >= end) {
    throw Error(Status::invalid_argument, std::string(field) + " is " + std::to_string(value) +
                                              ", allowed: 0.." + std::to_string(end - 1));
  }
}

std::string json_of(const std::vector<std::pair<std::string, double>>& numbers) {
  std::string text;
  for (const auto& [name, value] : numbers) {
    text.append(text.empty() ? "" : ", ").append("\"").append(name).append("\": ");
    // The caller's locale may write 1,5, which is no JSON.
    char digits[32];
    const char* const end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    text.append(std::isfinite(value) ? std::string_view(digits, end) : "null");
  }
  return "{" + text + "}";
}

/// Spreads hits over the caller's arrays, which are wider than the search where k was above the
/// number of keys.
void copy_hits(const index::Hits& hits, const Call& call, uint32_t* ids, float* scores,
               uint32_t* counts) {
  for (uint32_t h = 0; h < call.group; ++h) {
    const size_t from = size_t{h} * call.params.k;
    const size_t to = size_t{h} * call.asked_k;
    std::copy_n(hits.ids + from, hits.counts[h], ids + to);
    if (scores != nullptr) std::copy_n(hits.scores + from, hits.counts[h], scores + to);
    counts[h] = hits.counts[h];
  }
}

}  // namespace

extern "C" {

const char* keyhole_index_help(void) {
  static const std::string text = [] {
    std::string s;
    for (const index::TypeHelp& type : index::index_types()) {
      s += type.name + ": " + type.meaning + "\n";
      for (const index::ParamHelp& p : type.params) {
        s += "    " + p.name + "=" + p.default_value + "  (" + p.allowed + ") " + p.meaning + "\n";
      }
    }
    return s;
  }();
  return text.c_str();
}

keyhole_status keyhole_index_create(keyhole_engine* engine, const char* spec, uint32_t layer,
                                    uint32_t kv_head, keyhole_index** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    require(engine, "engine");
    require(spec, "spec");
    index::check_spec(spec);
    const ModelShape& m = engine->engine->model();
    check_below("layer", layer, m.layers);
    check_below("kv_head", kv_head, m.of(layer).kv_heads);
    check_undone(spec, m.has_rope);
    auto handle = std::make_unique<keyhole_index>();
    handle->engine = engine->engine;
    handle->spec = spec;
    handle->layer = layer;
    handle->kv_head = kv_head;
    *out = handle.release();
  });
}

void keyhole_index_destroy(keyhole_index* index) { destroy(index); }

keyhole_status keyhole_index_build(keyhole_index* ix, const keyhole_tensor* keys,
                                   const keyhole_tensor* values,
                                   const keyhole_tensor* training_queries,
                                   const uint32_t* training_positions, uint32_t first_position,
                                   keyhole_progress_fn progress, void* user) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    const Engine& engine = *ix->engine;
    const LayerShape m = ix->shape();
    const bool values_in_keys = engine.model().values_in_keys;
    const TensorView k = check_matrix(keys, "keys", m.head_dim);
    if (k.tokens == 0)
      throw Error(Status::invalid_argument, "keys holds 0 rows, allowed: at least 1");
    ix->index.reset();
    ix->tail.reset();
    ix->reserved_group = 0;
    ix->count = k.tokens;
    ix->keys = convert(engine, k, m.head_dim, "keys");
    ix->values.clear();
    if (values_in_keys && values != nullptr) {
      throw Error(Status::invalid_argument,
                  "values is given, but the engine was made with values_in_keys; allowed: NULL");
    }
    if (values_in_keys || values != nullptr) {
      TensorView v = values_in_keys ? k : check_matrix(values, "values", m.value_dim);
      v.dim = m.value_dim;
      if (v.tokens != k.tokens) {
        throw Error(Status::invalid_argument, "values holds " + std::to_string(v.tokens) +
                                                  " rows, needed: as many as keys, " +
                                                  std::to_string(k.tokens));
      }
      ix->values = convert(engine, v, m.head_dim, "values");
    }
    index::BuildInput input;
    input.keys = ix->view(ix->keys);
    input.values = ix->view(ix->values);
    input.first_position = first_position;
    input.rope = &engine.rope(ix->layer);
    std::vector<float> queries;
    if (training_queries != nullptr) {
      const TensorView q = check_matrix(training_queries, "training_queries", m.head_dim);
      queries = convert_queries(engine, q, "training_queries");
      input.queries.rows = dense_rows(queries.data(), q.tokens, m.head_dim, DType::f32);
      input.queries.positions = training_positions;
    }
    // With the queries, which a tail that is built later does not see.
    index::Balance balance = index::learn_balance(
        engine.kernels(), {.keys = input.keys, .values = ix->view(ix->values)}, input.queries.rows);
    input.balance = &balance;
    const auto report = progress_function(progress, user);
    auto built = index::make_index(ix->spec, m.head_dim, engine.model().kv_dtype,
                                   engine.index_context(ix->layer, ix->kv_head));
    const AcceleratedBuild accelerated(engine);
    built->build(input, [&](double f) { return !report || report(f, "building the index"); });
    const index::IndexInfo info = built->info();
    ix->params = info.params;
    ix->diagnostics = json_of(info.diagnostics);
    ix->index = std::move(built);
    ix->balance = std::move(balance);
  });
}

keyhole_status keyhole_index_set_spec(keyhole_index* ix, const char* spec) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    require(spec, "spec");
    index::check_spec(spec);
    check_undone(spec, ix->engine->model().has_rope);
    if (ix->index != nullptr) {
      ix->index->set_search_params(spec);
      ix->params = ix->index->info().params;
      ix->reserved_group = 0;  // a scratch of the size that the new searches need
    }
    ix->spec = spec;
  });
}

keyhole_status keyhole_index_build_tail(keyhole_index* ix, uint32_t keys_per_partition,
                                        keyhole_progress_fn progress, void* user) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    const uint32_t keys = check_tail_partition(keys_per_partition);
    if (ix->index == nullptr) {
      throw Error(Status::invalid_argument, "the index is empty: call keyhole_index_build first");
    }
    if (ix->values.empty()) {
      throw Error(Status::invalid_argument,
                  "the index was built without values, whose means a tail needs");
    }
    const ModelShape& m = ix->engine->model();
    const auto report = progress_function(progress, user);
    auto tail = std::make_unique<index::TailTree>(
        ix->engine->index_context(ix->layer, ix->kv_head), ix->shape().head_dim, m.kv_dtype,
        index::TailParams{.keys_per_partition = keys}, ix->balance.key_scale);
    const AcceleratedBuild accelerated(*ix->engine);
    tail->build({ix->view(ix->keys), ix->view(ix->values)},
                [&](double f) { return !report || report(f, "partitioning the keys"); });
    ix->tail = std::move(tail);
    ix->reserved_group = 0;
  });
}

void keyhole_search_cost_init_sized(keyhole_search_cost* cost, size_t size) {
  init_struct(cost, size, {});
}

void keyhole_search_options_init_sized(keyhole_search_options* options, size_t size) {
  keyhole_search_options value{};
  keyhole_budget_init(&value.budget);
  value.position = KEYHOLE_POSITION_UNKNOWN;
  init_struct(options, size, value);
}

keyhole_status keyhole_index_search(keyhole_index* ix, const keyhole_tensor* queries,
                                    const keyhole_search_options* options, uint32_t* ids,
                                    float* scores, uint32_t* counts, keyhole_search_cost* cost) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    require(ids, "ids");
    require(counts, "counts");
    const Call call = prepare(*ix, queries, options, false);
    const index::Hits& hits = ix->selection.search(*ix->index, call.query, call.params);
    copy_hits(hits, call, ids, scores, counts);
    if (cost != nullptr) {
      keyhole_search_cost c{};
      c.keys_scored = hits.keys_scored;
      c.bytes_read = hits.bytes_read;
      write_struct(cost, c, "cost");
    }
  });
}

keyhole_status keyhole_index_attend(keyhole_index* ix, const keyhole_tensor* queries,
                                    const keyhole_search_options* options, float* o, float* lse,
                                    const uint32_t** rows, uint32_t* row_count,
                                    keyhole_search_cost* cost) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    require(o, "o");
    require(lse, "lse");
    const Call call = prepare(*ix, queries, options, true);
    if (ix->values.empty()) {
      throw Error(Status::invalid_argument,
                  "the index was built without values, which attention needs");
    }
    const StateView tail{ix->tail_o.data(), ix->tail_lse.data()};
    const LayerShape m = ix->shape();
    const bool is_narrow = m.value_dim != m.head_dim;
    float* const given_o = o;
    if (is_narrow) {
      ix->wide_o.resize(size_t{call.group} * m.head_dim);
      o = ix->wide_o.data();
    }
    const StepCost spent =
        ix->selection.search_and_attend(*ix->index, call.query, call.params, {}, {{o, lse}, tail});
    std::span<const uint32_t> attended = ix->selection.attended();
    float missing[kMaxGroup] = {};
    if (call.params.codes) {
      attended = add_uncoded(*ix, call, {o, lse});
      merge_missing(call, o, lse, tail, missing);
    } else if (call.params.tail.mode != index::TailMode::none) {
      const std::array<StateView, 2> both{StateView{o, lse}, tail};
      cpu::merge_states(both, call.group, m.head_dim, {o, lse});
    }
    for (uint32_t h = 0; h < call.group && is_narrow; ++h) {
      std::copy_n(o + size_t{h} * m.head_dim, m.value_dim, given_o + size_t{h} * m.value_dim);
    }
    if (rows != nullptr) *rows = attended.data();
    if (row_count != nullptr) *row_count = static_cast<uint32_t>(attended.size());
    if (cost != nullptr) {
      keyhole_search_cost c{};
      c.keys_scored = spent.keys_scored;
      c.bytes_read = spent.bytes_read;
      c.keys_attended = static_cast<uint32_t>(attended.size());
      c.keys_opened = static_cast<uint32_t>(spent.keys_opened);
      c.tail_bytes_read = spent.tail_bytes_read;
      c.tail_seconds = spent.tail_seconds;
      const size_t told = std::min(size_t{call.group}, std::size(c.missing));
      if (call.params.codes) std::copy_n(missing, told, c.missing);
      if (call.params.tail.tree != nullptr) {
        const TailFigures& tails = ix->selection.tail_figures();
        std::copy_n(tails.missing, told, c.missing);
        std::copy_n(tails.error, told, c.error);
      }
      write_struct(cost, c, "cost");
    }
  });
}

void keyhole_index_info_init_sized(keyhole_index_info* info, size_t size) {
  init_struct(info, size, {});
}

keyhole_status keyhole_index_get_info(const keyhole_index* ix, keyhole_index_info* info) {
  return guarded([&] {
    require(ix, "index");
    const UseLock lock(ix->in_use, "the index");
    keyhole_index_info i;
    keyhole_index_info_init(&i);
    i.params = ix->index == nullptr ? ix->spec.c_str() : ix->params.c_str();
    i.diagnostics = ix->index == nullptr ? "{}" : ix->diagnostics.c_str();
    if (ix->index != nullptr) {
      const index::IndexInfo known = ix->index->info();
      i.keys = known.count;
      i.bytes = known.bytes;
      i.build_seconds = known.build_seconds;
      i.tail_bytes = ix->tail != nullptr ? ix->tail->bytes() : 0;
      i.tail_build_seconds = ix->tail != nullptr ? ix->tail->build_seconds() : 0.0;
    }
    write_struct(info, i, "info");
  });
}

}  // extern "C"
