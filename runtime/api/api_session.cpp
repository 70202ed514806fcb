#include <algorithm>
#include <memory>
#include <optional>

#include "keyhole/attention.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"
#include "runtime/api/session_call.h"
#include "runtime/parallel/sessions.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

namespace {

/// The tensors of a step, checked.
struct StepTensors {
  TensorView q, k, v;
  bool appends = false;
  bool on_device = false;
  [[nodiscard]] const TensorView* keys() const { return appends ? &k : nullptr; }
  [[nodiscard]] const TensorView* values() const { return appends ? &v : nullptr; }
};

StepTensors check_step(const SessionInterface& s, uint32_t layer, const keyhole_tensor* q,
                       const keyhole_tensor* k, const keyhole_tensor* v) {
  const ModelShape& model = s.engine().model();
  check_layer(model, layer);
  const LayerShape m = model.of(layer);
  const bool device = takes_device(s);
  StepTensors t;
  t.q = check_rows(q, "q", m.q_heads, m.head_dim, true, device);
  t.on_device = t.q.on_device();
  if ((k == nullptr) != (v == nullptr) && (!model.values_in_keys || k == nullptr)) {
    throw Error(Status::invalid_argument, "k and v: one is NULL, allowed: both or none");
  }
  t.appends = k != nullptr;
  if (!t.appends) return t;
  t.k = check_rows(k, "k", m.kv_heads, m.head_dim, true, device);
  t.v = check_values(v, model, layer, t.k, true, device);
  if (t.k.on_device() != t.on_device || t.v.on_device() != t.on_device) {
    throw Error(Status::invalid_argument,
                "q, k and v: some lie in device memory, allowed: all of them or none");
  }
  return t;
}

TensorOut check_step_out(const SessionInterface& s, uint32_t layer, const keyhole_tensor* out,
                         bool on_device) {
  const LayerShape m = s.engine().model().of(layer);
  const TensorOut rows = check_out(out, "out", m.q_heads, m.value_dim, s.engine().has_streams());
  if (rows.on_device() != on_device) {
    throw Error(Status::invalid_argument, std::string("out lies in ") +
                                              (on_device ? "host" : "device") +
                                              " memory and q does not, allowed: both in the same");
  }
  return rows;
}

/// The query of a call that takes host memory alone.
TensorView check_host_q(const SessionInterface& s, uint32_t layer, const keyhole_tensor* q) {
  check_layer(s.engine().model(), layer);
  const LayerShape m = s.engine().model().of(layer);
  return check_rows(q, "q", m.q_heads, m.head_dim, true, false);
}

/// Of a call whose query and output lie in either memory.
struct StateTensors {
  TensorView q;
  TensorOut out;
};
StateTensors check_state(const SessionInterface& s, uint32_t layer, const keyhole_tensor* q,
                         const keyhole_tensor* out) {
  check_layer(s.engine().model(), layer);
  const LayerShape m = s.engine().model().of(layer);
  return {check_rows(q, "q", m.q_heads, m.head_dim, true, s.engine().has_streams()),
          check_step_out(s, layer, out, q->memory == KEYHOLE_DEVICE)};
}

}  // namespace

extern "C" {

void keyhole_session_config_init_sized(keyhole_session_config* config, size_t size) {
  init_struct(config, size, initial_config());
}

keyhole_status keyhole_session_create(keyhole_engine* engine, const keyhole_session_config* config,
                                      keyhole_session** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    require(engine, "engine");
    keyhole_session_config defaults;
    keyhole_session_config_init(&defaults);
    const auto c = config == nullptr ? defaults : read_struct(config, defaults, "config");
    const Engine& e = *engine->engine;
    auto made = make_session(engine->engine, [&] {
      SessionParams params = check_session(c, e.model(), e.code_room(c.device_memory_limit));
      if (!e.has_streams()) check_host_placement(params);
      return params;
    });
    *out = new keyhole_session(std::move(made), engine->sessions);
  });
}

void keyhole_session_destroy(keyhole_session* session) {
  if (session == nullptr || !session->home.is_here()) return;
  session->leave();
  (void)guarded([&] { session->session->end(); });
  delete session;
}

keyhole_status keyhole_session_get_config(const keyhole_session* session,
                                          keyhole_session_config* config) {
  return with_session(session, Needs::nothing, [&](const SessionInterface& s) {
    keyhole_session_config c = public_config(s.params());
    c.audit_bound = s.params().audit_bound_of(s.params().budget);
    write_struct(config, c, "config");
  });
}

keyhole_status keyhole_session_set_index(keyhole_session* session, const char* index) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    require(index, "index");
    s.set_index(index);
  });
}

keyhole_status keyhole_session_set_mode(keyhole_session* session, keyhole_mode mode,
                                        uint32_t top_k) {
  return with_session(session, Needs::no_step,
                      [&](SessionInterface& s) { s.set_mode(mode, top_k); });
}

keyhole_status keyhole_session_set_attend(keyhole_session* session, keyhole_attend_mode attend,
                                          float min_weight) {
  return with_session(session, Needs::no_step,
                      [&](SessionInterface& s) { s.set_attend(attend, min_weight); });
}

void keyhole_budget_init_sized(keyhole_budget* budget, size_t size) {
  init_struct(budget, size, initial_config().budget);
}

keyhole_status keyhole_session_set_budget(keyhole_session* session, uint32_t layer,
                                          uint32_t kv_head, const keyhole_budget* budget) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    keyhole_budget defaults;
    keyhole_budget_init(&defaults);
    s.set_budget(layer, kv_head, check_budget(read_struct(budget, defaults, "budget")));
  });
}

keyhole_status keyhole_session_get_budget(const keyhole_session* session, uint32_t layer,
                                          uint32_t kv_head, keyhole_budget* budget) {
  return with_session(session, Needs::nothing, [&](const SessionInterface& s) {
    write_struct<keyhole_budget>(budget, s.budget(layer, kv_head), "budget");
  });
}

keyhole_status keyhole_session_append(keyhole_session* session, uint32_t layer,
                                      const keyhole_tensor* k, const keyhole_tensor* v,
                                      const keyhole_tensor* q) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    check_layer(s.engine().model(), layer);
    const LayerShape m = s.engine().model().of(layer);
    const bool device = takes_device(s);
    const TensorView rk = check_rows(k, "k", m.kv_heads, m.head_dim, false, device);
    const TensorView rv = check_values(v, s.engine().model(), layer, rk, false, device);
    TensorView rq;
    if (q != nullptr) rq = check_rows(q, "q", m.q_heads, m.head_dim, false, device);
    const TensorView* queries = q == nullptr ? nullptr : &rq;
    tell_dtype(*session, rk);
    tell_dtype(*session, rv);
    s.prefill(layer, rk, rv, queries);
  });
}

keyhole_status keyhole_session_build(keyhole_session* session, keyhole_progress_fn progress,
                                     void* user) {
  return with_session(session, Needs::no_step,
                      [&](SessionInterface& s) { s.build(progress_function(progress, user)); });
}

keyhole_status keyhole_session_attend(keyhole_session* session, uint32_t layer,
                                      const keyhole_tensor* q, const keyhole_tensor* k,
                                      const keyhole_tensor* v, const keyhole_tensor* out,
                                      float* lse) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) {
    // All checked first: after begin the token is there.
    const StepTensors t = check_step(s, layer, q, k, v);
    const TensorOut rows = check_step_out(s, layer, out, t.on_device);
    if (t.appends) tell_dtype(*session, t.k);
    s.attend(layer, t.q, t.keys(), t.values(), rows, lse);
  });
}

keyhole_status keyhole_session_attend_begin(keyhole_session* session, uint32_t layer,
                                            const keyhole_tensor* q, const keyhole_tensor* k,
                                            const keyhole_tensor* v) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) {
    const StepTensors t = check_step(s, layer, q, k, v);
    if (t.appends) tell_dtype(*session, t.k);
    s.attend_begin(layer, t.q, t.keys(), t.values());
  });
}

keyhole_status keyhole_session_attend_end(keyhole_session* session, const keyhole_tensor* out,
                                          float* lse) {
  return with_session(session, Needs::end, [&](SessionInterface& s) {
    const std::optional<SessionInterface::OpenStep> step = s.open_step();
    if (!step) {
      throw Error(Status::invalid_argument,
                  "no step is under way: call keyhole_session_attend_begin first");
    }
    s.attend_end(check_step_out(s, step->layer, out, step->on_device), lse);
  });
}

keyhole_status keyhole_session_attend_offloaded(keyhole_session* session, uint32_t layer,
                                                const keyhole_tensor* q, const keyhole_tensor* out,
                                                float* lse) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_attend_offloaded");
    const StateTensors t = check_state(s, layer, q, out);
    s.attend_offloaded(layer, t.q, t.out, lse);
  });
}

keyhole_status keyhole_session_attend_tokens(keyhole_session* session, uint32_t layer,
                                             const keyhole_tensor* q, const uint32_t* ids,
                                             const uint32_t* counts, int32_t with_resident,
                                             const keyhole_tensor* out, float* lse) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_attend_tokens");
    const StateTensors t = check_state(s, layer, q, out);
    require(counts, "counts");
    const uint32_t kv_heads = s.engine().model().of(layer).kv_heads;
    if (std::any_of(counts, counts + kv_heads, [](uint32_t n) { return n != 0; })) {
      require(ids, "ids");
    }
    s.attend_tokens(layer, t.q, {ids, counts, with_resident != 0}, t.out, lse);
  });
}

keyhole_status keyhole_session_search_tokens(keyhole_session* session, uint32_t layer,
                                             const keyhole_tensor* q, uint32_t top_k, uint32_t* ids,
                                             float* scores, uint32_t* counts) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_search_tokens");
    const TensorView queries = check_host_q(s, layer, q);
    require(ids, "ids");
    require(counts, "counts");
    if (top_k == 0 || top_k > s.params().max_tokens) {
      throw Error(Status::invalid_argument, "top_k is " + std::to_string(top_k) + ", allowed: 1.." +
                                                std::to_string(s.params().max_tokens) +
                                                " (max_tokens)");
    }
    s.search_tokens(layer, queries,
                    {.ids = ids, .scores = scores, .counts = counts, .top_k = top_k});
  });
}

keyhole_status keyhole_session_set_stream(keyhole_session* session, void* stream) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) { s.set_stream(stream); });
}

keyhole_status keyhole_session_announce(keyhole_session* session) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) { s.announce(0); });
}

keyhole_status keyhole_session_get_graph(const keyhole_session* session, uint64_t* graph) {
  return with_session(session, Needs::nothing, [&](SessionInterface& s) {
    require(graph, "graph");
    *graph = s.last_graph();
  });
}

keyhole_status keyhole_session_announce_graph(keyhole_session* session, uint64_t graph) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) {
    if (graph == 0) throw Error(Status::invalid_argument, "graph is 0; numbers of graphs are not");
    s.announce(graph);
  });
}

keyhole_status keyhole_session_synchronize(keyhole_session* session) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) { s.synchronize(); });
}

keyhole_status keyhole_session_truncate(keyhole_session* session, uint32_t n_tokens) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) { s.truncate(n_tokens); });
}

keyhole_status keyhole_session_remove(keyhole_session* session, uint32_t first, uint32_t count,
                                      int32_t shift) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_remove");
    std::unique_ptr<SessionInterface> left = s.without(first, count, shift);
    if (left != nullptr) session->replace(std::move(left));
  });
}

keyhole_status keyhole_session_fork(keyhole_session* session, keyhole_session** out) {
  if (out != nullptr) *out = nullptr;
  return with_session(session, Needs::copy, [&](SessionInterface& s) {
    require(out, "out");
    *out = new keyhole_session(s.fork(), session->sessions);
  });
}

keyhole_status keyhole_session_save(keyhole_session* session, const char* path) {
  return with_session(session, Needs::copy, [&](SessionInterface& s) {
    require(path, "path");
    s.save(path);
  });
}

void keyhole_load_options_init_sized(keyhole_load_options* options, size_t size) {
  init_struct(options, size, {});
}

keyhole_status keyhole_session_load(keyhole_engine* engine, const char* path,
                                    const keyhole_load_options* options, keyhole_session** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    const keyhole_load_options any{};
    const auto [size, model, tokens, count] =
        options == nullptr ? any : read_struct(options, any, "options");
    require(engine, "engine");
    require(path, "path");
    auto loaded = load_any_session(engine->engine, path, {model, tokens, count, {}});
    *out = new keyhole_session(std::move(loaded), engine->sessions);
  });
}

void keyhole_identity_init_sized(keyhole_identity* identity, size_t size) {
  init_struct(identity, size, {});
}

keyhole_status keyhole_session_set_identity(keyhole_session* session, const char* model,
                                            const int32_t* tokens, uint64_t count) {
  return with_session(session, Needs::copy, [&](SessionInterface& s) {
    uint64_t held = 0;
    for (uint32_t layer = 0; layer < s.engine().model().layers; ++layer) {
      held = std::max<uint64_t>(held, s.layer_tokens(layer).total);
    }
    s.identity().set(model, tokens, count, held);
  });
}

keyhole_status keyhole_session_get_identity(const keyhole_session* session,
                                            keyhole_identity* identity) {
  return with_session(session, Needs::nothing, [&](SessionInterface& s) {
    keyhole_identity found{};
    const Identity& own = s.identity();
    std::copy(own.model.begin(), own.model.end(), found.model);
    found.token_count = own.token_count;
    found.token_hash = own.token_hash;
    write_struct(identity, found, "identity");
  });
}

void keyhole_layer_tokens_init_sized(keyhole_layer_tokens* tokens, size_t size) {
  init_struct(tokens, size, {});
}

keyhole_status keyhole_session_get_layer_tokens(const keyhole_session* session, uint32_t layer,
                                                keyhole_layer_tokens* tokens) {
  return with_session(session, Needs::nothing, [&](const SessionInterface& s) {
    check_layer(s.engine().model(), layer);
    write_struct(tokens, s.layer_tokens(layer), "tokens");
  });
}

void keyhole_statistics_init_sized(keyhole_statistics* statistics, size_t size) {
  init_struct(statistics, size, {});
}

keyhole_status keyhole_session_get_statistics(const keyhole_session* session,
                                              keyhole_statistics* statistics) {
  return with_session(session, Needs::nothing, [&](const SessionInterface& s) {
    write_struct(statistics, s.statistics(), "statistics");
  });
}

keyhole_status keyhole_session_reset_statistics(keyhole_session* session) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) { s.reset_statistics(); });
}

void keyhole_audit_init_sized(keyhole_audit* audit, size_t size) { init_struct(audit, size, {}); }

keyhole_status keyhole_session_get_audit(keyhole_session* session, uint32_t layer, uint32_t kv_head,
                                         keyhole_audit* audit) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    write_struct(audit, s.audit(layer, kv_head), "audit");
  });
}

}  // extern "C"
