#include <algorithm>

#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"
#include "runtime/api/session_call.h"
#include "runtime/parallel/spread_file.h"
#include "runtime/session/session_file.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

namespace {

/// The tensors of a step, checked.
struct StepTensors {
  RowsIn q, k, v;
  bool appends = false;
  bool on_device = false;
  [[nodiscard]] const RowsIn* keys() const { return appends ? &k : nullptr; }
  [[nodiscard]] const RowsIn* values() const { return appends ? &v : nullptr; }
};

StepTensors check_step(const keyhole_session& handle, uint32_t layer, const keyhole_tensor* q,
                       const keyhole_tensor* k, const keyhole_tensor* v) {
  const Session& s = *handle.session;
  s.check_layer(layer);
  const ModelShape& model = s.engine().model();
  const LayerShape m = model.of(layer);
  const bool device = takes_device(handle);
  StepTensors t;
  t.q = check_rows(q, "q", m.q_heads, m.head_dim, true, device);
  t.on_device = t.q.on_device;
  if ((k == nullptr) != (v == nullptr) && (!model.values_in_keys || k == nullptr)) {
    throw Error(Status::invalid_argument, "k and v: one is NULL, allowed: both or none");
  }
  t.appends = k != nullptr;
  if (!t.appends) return t;
  t.k = check_rows(k, "k", m.kv_heads, m.head_dim, true, device);
  t.v = check_values(v, model, layer, t.k, true, device);
  if (t.k.on_device != t.on_device || t.v.on_device != t.on_device) {
    throw Error(Status::invalid_argument,
                "q, k and v: some lie in device memory, allowed: all of them or none");
  }
  return t;
}

RowsOut check_step_out(Session& s, uint32_t layer, const keyhole_tensor* out, bool on_device) {
  const LayerShape m = s.engine().model().of(layer);
  const RowsOut rows = check_out(out, "out", m.q_heads, m.value_dim, s.engine().has_streams());
  if (rows.on_device != on_device) {
    throw Error(Status::invalid_argument, std::string("out lies in ") +
                                              (on_device ? "host" : "device") +
                                              " memory and q does not, allowed: both in the same");
  }
  return rows;
}

/// The query of a call that takes host memory alone.
RowsIn check_host_q(Session& s, uint32_t layer, const keyhole_tensor* q) {
  s.check_layer(layer);
  const LayerShape m = s.engine().model().of(layer);
  return check_rows(q, "q", m.q_heads, m.head_dim, true, false);
}

/// Of a call whose query and output lie in either memory.
struct StateTensors {
  RowsIn q;
  RowsOut out;
};
StateTensors check_state(Session& s, uint32_t layer, const keyhole_tensor* q,
                         const keyhole_tensor* out) {
  s.check_layer(layer);
  const LayerShape m = s.engine().model().of(layer);
  return {check_rows(q, "q", m.q_heads, m.head_dim, true, s.engine().has_streams()),
          check_step_out(s, layer, out, q->memory == KEYHOLE_DEVICE)};
}

/// A step with tensors in host memory comes after those on the stream.
void begin_on_host(keyhole_session& handle, uint32_t layer, const StepTensors& t) {
  if (handle.spread != nullptr) {
    return handle.spread->attend_begin(layer, t.q, t.keys(), t.values());
  }
  Session& s = *handle.session;
  s.check_not_capturing();
  s.wait_idle();
  s.check_failure();
  s.attend_begin(layer, t.q, t.keys(), t.values());
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
    const std::shared_ptr<const Engine>& e = engine->engine;
    const auto make = [&] {
      return std::make_unique<Session>(
          e, check_session(c, e->model(), e->code_room(c.device_memory_limit)));
    };
    *out = e->communicator() == nullptr
               ? new keyhole_session(make())
               : new keyhole_session(SpreadSession::make_own(*e->communicator(), make),
                                     std::vector<uint32_t>(e->model().layers));
  });
}

void keyhole_session_destroy(keyhole_session* session) {
  if (session == nullptr || !session->home.is_here()) return;
  // A step that was begun still has tasks in the pool which read the session.
  if (session->session->in_step()) session->session->abandon_step();
  // Gathers on the stream end with the other ranks, or are given up: what is destroyed waits for the stream.
  if (session->spread != nullptr) {
    (void)guarded([&] { session->spread->wait_for_stream(); });
  }
  delete session;
}

keyhole_status keyhole_session_get_config(const keyhole_session* session,
                                          keyhole_session_config* config) {
  return with_session(session, Needs::nothing, [&](const Session& s) {
    keyhole_session_config c = public_config(s.params());
    c.audit_bound = s.params().audit_bound_of(s.params().budget);
    write_struct(config, c, "config");
  });
}

keyhole_status keyhole_session_set_index(keyhole_session* session, const char* index) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    require(index, "index");
    if (session->spread != nullptr) return session->spread->set_index(index);
    s.set_index(index);
  });
}

keyhole_status keyhole_session_set_mode(keyhole_session* session, keyhole_mode mode,
                                        uint32_t top_k) {
  return with_session(session, Needs::no_step, [&](Session& s) { s.set_mode(mode, top_k); });
}

keyhole_status keyhole_session_set_attend(keyhole_session* session, keyhole_attend_mode attend,
                                          float min_weight) {
  return with_session(session, Needs::no_step,
                      [&](Session& s) { s.set_attend(attend, min_weight); });
}

void keyhole_budget_init_sized(keyhole_budget* budget, size_t size) {
  init_struct(budget, size, initial_config().budget);
}

keyhole_status keyhole_session_set_budget(keyhole_session* session, uint32_t layer,
                                          uint32_t kv_head, const keyhole_budget* budget) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    keyhole_budget defaults;
    keyhole_budget_init(&defaults);
    s.set_budget(layer, kv_head, check_budget(read_struct(budget, defaults, "budget")));
  });
}

keyhole_status keyhole_session_get_budget(const keyhole_session* session, uint32_t layer,
                                          uint32_t kv_head, keyhole_budget* budget) {
  return with_session(session, Needs::nothing, [&](const Session& s) {
    write_struct<keyhole_budget>(budget, s.budget(layer, kv_head), "budget");
  });
}

keyhole_status keyhole_prefill(keyhole_session* session, uint32_t layer, const keyhole_tensor* k,
                               const keyhole_tensor* v, const keyhole_tensor* q) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    s.check_layer(layer);
    const LayerShape m = s.engine().model().of(layer);
    const bool device = takes_device(*session);
    const RowsIn rk = check_rows(k, "k", m.kv_heads, m.head_dim, false, device);
    const RowsIn rv = check_values(v, s.engine().model(), layer, rk, false, device);
    RowsIn rq;
    if (q != nullptr) rq = check_rows(q, "q", m.q_heads, m.head_dim, false, device);
    const RowsIn* queries = q == nullptr ? nullptr : &rq;
    tell_dtype(*session, rk);
    tell_dtype(*session, rv);
    if (session->spread != nullptr) return session->spread->prefill(layer, rk, rv, queries);
    if (rk.on_device || rv.on_device || rq.on_device) {
      s.prefill_from_device(layer, rk, rv, queries);
    } else {
      s.prefill(layer, rk, rv, queries);
    }
  });
}

keyhole_status keyhole_build(keyhole_session* session, keyhole_progress_fn progress, void* user) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    if (session->spread != nullptr) {
      return session->spread->build(progress_function(progress, user));
    }
    s.build(progress_function(progress, user));
  });
}

keyhole_status keyhole_attend(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                              const keyhole_tensor* k, const keyhole_tensor* v,
                              const keyhole_tensor* out, float* lse) {
  return with_session(session, Needs::stream, [&](Session& s) {
    // All checked first: after begin the token is there.
    const StepTensors t = check_step(*session, layer, q, k, v);
    const RowsOut rows = check_step_out(s, layer, out, t.on_device);
    if (t.appends) tell_dtype(*session, t.k);
    if (t.on_device && session->spread != nullptr) {
      return session->spread->enqueue(layer, t.q, t.keys(), t.values(), &rows, lse);
    }
    if (t.on_device) {
      return s.enqueue(layer, t.q, t.keys(), t.values(), &rows, lse);
    }
    begin_on_host(*session, layer, t);
    if (session->spread != nullptr) return session->spread->attend_end(rows, lse);
    s.attend_end(rows, lse);
  });
}

keyhole_status keyhole_attend_begin(keyhole_session* session, uint32_t layer,
                                    const keyhole_tensor* q, const keyhole_tensor* k,
                                    const keyhole_tensor* v) {
  return with_session(session, Needs::stream, [&](Session& s) {
    const StepTensors t = check_step(*session, layer, q, k, v);
    if (t.appends) tell_dtype(*session, t.k);
    if (!t.on_device) return begin_on_host(*session, layer, t);
    if (session->spread != nullptr) {
      return session->spread->enqueue(layer, t.q, t.keys(), t.values(), nullptr, nullptr);
    }
    s.enqueue(layer, t.q, t.keys(), t.values(), nullptr, nullptr);
  });
}

keyhole_status keyhole_attend_end(keyhole_session* session, const keyhole_tensor* out, float* lse) {
  return with_session(session, Needs::end, [&](Session& s) {
    SpreadSession* const spread = session->spread.get();
    if (spread != nullptr && spread->in_step()) {
      const bool on_device = spread->step_is_on_device();
      const RowsOut rows = check_step_out(s, spread->step_layer(), out, on_device);
      return on_device ? spread->enqueue_end(rows, lse) : spread->attend_end(rows, lse);
    }
    if (!s.in_step() && !s.in_stream_step()) {
      throw Error(Status::invalid_argument,
                  "no step is under way: call keyhole_attend_begin first");
    }
    const RowsOut rows = check_step_out(s, s.step_layer(), out, s.in_stream_step());
    if (s.in_stream_step()) {
      s.enqueue_end(rows, lse);
    } else {
      s.attend_end(rows, lse);
    }
  });
}

keyhole_status keyhole_attend_offloaded(keyhole_session* session, uint32_t layer,
                                        const keyhole_tensor* q, const keyhole_tensor* out,
                                        float* lse) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    refuse_spread(*session, "keyhole_attend_offloaded");
    const StateTensors t = check_state(s, layer, q, out);
    s.attend_offloaded(layer, t.q, t.out, lse);
  });
}

keyhole_status keyhole_attend_tokens(keyhole_session* session, uint32_t layer,
                                     const keyhole_tensor* q, const uint32_t* ids,
                                     const uint32_t* counts, int32_t with_resident,
                                     const keyhole_tensor* out, float* lse) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    refuse_spread(*session, "keyhole_attend_tokens");
    const StateTensors t = check_state(s, layer, q, out);
    require(counts, "counts");
    const uint32_t kv_heads = s.engine().model().of(layer).kv_heads;
    if (std::any_of(counts, counts + kv_heads, [](uint32_t n) { return n != 0; })) {
      require(ids, "ids");
    }
    s.attend_tokens(layer, t.q, {ids, counts, with_resident != 0}, t.out, lse);
  });
}

keyhole_status keyhole_search_tokens(keyhole_session* session, uint32_t layer,
                                     const keyhole_tensor* q, uint32_t top_k, uint32_t* ids,
                                     float* scores, uint32_t* counts) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    refuse_spread(*session, "keyhole_search_tokens");
    const RowsIn queries = check_host_q(s, layer, q);
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
  return with_session(session, Needs::no_step, [&](Session& s) {
    s.set_stream(stream);
    if (session->spread != nullptr) session->spread->set_stream(stream);
  });
}

keyhole_status keyhole_session_announce(keyhole_session* session) {
  return with_session(session, Needs::stream, [&](Session& s) {
    if (session->spread != nullptr) return session->spread->announce();
    s.announce();
  });
}

keyhole_status keyhole_session_synchronize(keyhole_session* session) {
  return with_session(session, Needs::stream, [&](Session& s) {
    if (session->spread != nullptr) return session->spread->synchronize();
    s.synchronize();
  });
}

keyhole_status keyhole_truncate(keyhole_session* session, uint32_t n_tokens) {
  return with_session(session, Needs::no_step, [&](Session& s) {
    if (session->spread != nullptr) return session->spread->truncate(n_tokens);
    s.truncate(n_tokens);
  });
}

keyhole_status keyhole_fork(keyhole_session* session, keyhole_session** out) {
  return with_session(session, Needs::copy, [&](Session& s) {
    require(out, "out");
    *out = nullptr;
    SpreadSession* const spread = session->spread.get();
    if (spread != nullptr) spread->settle();
    s.finish_audits();
    *out = spread == nullptr
               ? new keyhole_session(fork_session(s))
               : new keyhole_session(SpreadSession::make_own(spread->ranks(),
                                                             [&] {
                                                               spread->check_failure();
                                                               return fork_session(s);
                                                             }),
                                     spread->all_tokens());
  });
}

keyhole_status keyhole_save(keyhole_session* session, const char* path) {
  return with_session(session, Needs::copy, [&](Session& s) {
    require(path, "path");
    if (session->spread != nullptr) session->spread->settle();
    s.finish_audits();
    if (session->spread != nullptr) return save_spread(s, *session->spread, path);
    save_session(s, path);
  });
}

keyhole_status keyhole_load(keyhole_engine* engine, const char* path, keyhole_session** out) {
  return keyhole_load_expecting(engine, path, nullptr, nullptr, 0, out);
}

keyhole_status keyhole_load_expecting(keyhole_engine* engine, const char* path, const char* model,
                                      const int32_t* tokens, uint64_t count,
                                      keyhole_session** out) {
  return guarded([&] {
    require(out, "out");
    *out = nullptr;
    require(engine, "engine");
    require(path, "path");
    LoadedShare loaded = load_spread(engine->engine, path, {model, tokens, count});
    *out = engine->engine->communicator() == nullptr
               ? new keyhole_session(std::move(loaded.own))
               : new keyhole_session(std::move(loaded.own), std::move(loaded.tokens));
  });
}

void keyhole_identity_init_sized(keyhole_identity* identity, size_t size) {
  init_struct(identity, size, {});
}

keyhole_status keyhole_session_set_identity(keyhole_session* session, const char* model,
                                            const int32_t* tokens, uint64_t count) {
  return with_session(session, Needs::copy,
                      [&](Session& s) { s.identity().set(model, tokens, count); });
}

keyhole_status keyhole_session_get_identity(const keyhole_session* session,
                                            keyhole_identity* identity) {
  return with_session(session, Needs::nothing, [&](const Session& s) {
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

keyhole_status keyhole_get_layer_tokens(const keyhole_session* session, uint32_t layer,
                                        keyhole_layer_tokens* tokens) {
  return with_session(session, Needs::nothing, [&](const Session& s) {
    s.check_layer(layer);
    keyhole_layer_tokens t = s.layer_tokens(layer);
    if (session->spread != nullptr) t.total = session->spread->tokens(layer);
    write_struct(tokens, t, "tokens");
  });
}

void keyhole_statistics_init_sized(keyhole_statistics* statistics, size_t size) {
  init_struct(statistics, size, {});
}

keyhole_status keyhole_get_statistics(const keyhole_session* session,
                                      keyhole_statistics* statistics) {
  return with_session(session, Needs::nothing, [&](const Session& s) {
    keyhole_statistics figures = s.statistics();
    if (session->spread != nullptr) figures.tokens = session->spread->most_tokens();
    write_struct(statistics, figures, "statistics");
  });
}

keyhole_status keyhole_reset_statistics(keyhole_session* session) {
  return with_session(session, Needs::no_step, [&](Session& s) { s.reset_statistics(); });
}

void keyhole_audit_init_sized(keyhole_audit* audit, size_t size) { init_struct(audit, size, {}); }

keyhole_status keyhole_get_audit(keyhole_session* session, uint32_t layer, uint32_t kv_head,
                                 keyhole_audit* audit) {
  return with_session(session, Needs::no_step,
                      [&](Session& s) { write_struct(audit, s.audit(layer, kv_head), "audit"); });
}

}  // extern "C"
