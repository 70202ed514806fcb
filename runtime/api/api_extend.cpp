// Several tokens at once: of one session, of several, and which of them stay; launches of graphs of several.
#include <array>
#include <cstddef>
#include <deque>
#include <list>
#include <memory_resource>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "runtime/api/session_call.h"
#include "runtime/parallel/sessions.h"
#include "runtime/session/session.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

namespace {

bool is_on_device(const ExtendArgs& a) {
  const bool on_device = a.q.on_device();
  if (a.k.on_device() != on_device || a.v.on_device() != on_device ||
      a.out.on_device() != on_device) {
    throw Error(Status::invalid_argument,
                "q, k, v and out: some lie in device memory, allowed: all of them or none");
  }
  return on_device;
}

/// The tensors of n new tokens, but for the mask.
ExtendArgs check_extend_tensors(const Engine& engine, uint32_t layer, const keyhole_tensor* q,
                                const keyhole_tensor* k, const keyhole_tensor* v,
                                const keyhole_tensor* out, float* lse) {
  const bool device = engine.has_streams();
  const LayerShape m = engine.model().of(layer);
  ExtendArgs a;
  a.q = check_rows(q, "q", m.q_heads, m.head_dim, false, device);
  a.k = check_rows(k, "k", m.kv_heads, m.head_dim, false, device);
  a.v = check_values(v, engine.model(), layer, a.k, false, device);
  a.out = check_many_out(out, "out", a.q.tokens, m.q_heads, m.value_dim, device);
  a.lse = lse;
  (void)is_on_device(a);
  return a;
}

/// The token where each session's begin, checked.
void check_query_start(const uint32_t* query_start, uint32_t count, uint32_t tokens) {
  const auto bad = [](const std::string& text) { throw Error(Status::invalid_argument, text); };
  if (query_start[0] != 0) {
    bad("query_start[0] is " + std::to_string(query_start[0]) + ", needed: 0");
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (query_start[i + 1] >= query_start[i]) continue;
    bad("query_start[" + std::to_string(i + 1) + "] is " + std::to_string(query_start[i + 1]) +
        ", needed: at least query_start[" + std::to_string(i) +
        "] = " + std::to_string(query_start[i]));
  }
  if (query_start[count] != tokens) {
    bad("q, k and v hold " + std::to_string(tokens) + " tokens, needed: query_start[" +
        std::to_string(count) + "] = " + std::to_string(query_start[count]));
  }
}

/// The sessions of a batch: those that can be used are locked as long as it lives.
class Batch {
 public:
  Batch(keyhole_session* const* sessions, uint32_t count) : handles_(sessions), members_(count) {}

  /// Throws Error where the arguments that concern all sessions are not right.
  void check(const ExtendArgs& all, const uint32_t* query_start) {
    const auto count = static_cast<uint32_t>(members_.size());
    // The session itself may be replaced by a call of another thread until this one has entered it.
    for (uint32_t i = 0; i < count; ++i) {
      if (handles_[i]->sessions == handles_[0]->sessions) continue;
      throw Error(Status::invalid_argument,
                  "sessions[" + std::to_string(i) + "] is of another engine than sessions[0]");
    }
    for (const TensorView* rows : {&all.k, &all.v}) {
      if (rows->tokens == all.q.tokens) continue;
      throw Error(Status::invalid_argument, std::string("tensor ") + (rows == &all.k ? "k" : "v") +
                                                " has " + std::to_string(rows->tokens) +
                                                " tokens, needed: as many as q, " +
                                                std::to_string(all.q.tokens));
    }
    check_query_start(query_start, count, all.q.tokens);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t begin = query_start[i], n = query_start[i + 1] - begin;
      members_[i].args = slice(all, begin, n);
    }
  }

  void run(uint32_t layer) {
    for (size_t i = 0; i < members_.size(); ++i) {
      Session::BatchMember& member = members_[i];
      if (member.args.k.tokens == 0) continue;
      try {
        calls_.emplace_back(*handles_[i]->use);
      } catch (...) {
        member.error = std::current_exception();
        continue;
      }
      member.session = &handles_[i]->session->batch_member();
      try {
        const bool on_device = is_on_device(member.args);
        member.session->enter(on_device ? Needs::stream : Needs::no_step);
        tell_dtype(*handles_[i], member.args.k);
      } catch (...) {
        member.error = std::current_exception();
      }
    }
    Session::extend_batch(layer, members_);
  }

  /// The first failure, whose text becomes the thread's last error.
  keyhole_status take_statuses(keyhole_status* statuses) noexcept {
    keyhole_status first = KEYHOLE_OK;
    // From the last on, so that the text that remains is the first one's.
    for (size_t i = members_.size(); i-- > 0;) {
      Session::BatchMember& member = members_[i];
      const keyhole_status status = guarded([&] {
        if (member.error == nullptr) return;
        try {
          std::rethrow_exception(member.error);
        } catch (const Error& e) {
          if (member.session != nullptr) member.session->keep_device_failure(e);
          throw;
        }
      });
      if (status != KEYHOLE_OK) first = status;
      if (statuses != nullptr) statuses[i] = status;
    }
    return first;
  }

 private:
  keyhole_session* const* handles_;
  std::vector<Session::BatchMember> members_;
  std::deque<SessionCall> calls_;
};

/// A session to which a launch is announced, locked.
struct Announced {
  explicit Announced(const keyhole_session& handle) : call(*handle.use), session(*handle.session) {}
  SessionCall call;
  SessionInterface& session;
  const Capture* graph = nullptr;
};

/// Runs `body`, which uses a session of several that are locked, as with_session() does.
template <class F>
void use_member(SessionInterface& s, F&& body) {
  try {
    body();
  } catch (const Error& e) {
    s.keep_device_failure(e);
    throw;
  }
}

}  // namespace

extern "C" {

keyhole_status keyhole_session_extend(keyhole_session* session, uint32_t layer,
                                      const keyhole_tensor* q, const keyhole_tensor* k,
                                      const keyhole_tensor* v, const uint64_t* mask,
                                      const keyhole_tensor* out, float* lse) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) {
    check_layer(s.engine().model(), layer);
    ExtendArgs a = check_extend_tensors(s.engine(), layer, q, k, v, out, lse);
    a.mask = mask;
    tell_dtype(*session, a.k);
    s.extend(layer, a);
  });
}

keyhole_status keyhole_session_attend_queries(keyhole_session* session, uint32_t layer,
                                              const keyhole_tensor* q, const keyhole_tensor* out,
                                              float* lse) {
  return with_session(session, Needs::no_step, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_attend_queries");
    check_layer(s.engine().model(), layer);
    const LayerShape m = s.engine().model().of(layer);
    for (const keyhole_tensor* t : {q, out}) {
      if (t == nullptr || t->memory != KEYHOLE_DEVICE || !takes_device(s)) continue;
      throw Error(
          Status::unsupported,
          std::string("tensor ") + (t == q ? "q" : "out") +
              " lies in device memory, allowed: host memory, from which queries that append "
              "nothing are answered");
    }
    const TensorView queries = check_rows(q, "q", m.q_heads, m.head_dim, false);
    if (queries.tokens == 0) {
      throw Error(Status::invalid_argument, "tensor q has 0 tokens, allowed: at least 1");
    }
    const auto n = static_cast<uint32_t>(queries.tokens);
    const TensorOut rows = check_many_out(out, "out", n, m.q_heads, m.value_dim);
    s.attend_queries(layer, queries, rows, lse);
  });
}

keyhole_status keyhole_session_set_prompt_chunk(keyhole_session* session, uint32_t tokens) {
  return with_session(session, Needs::no_step,
                      [&](SessionInterface& s) { s.set_prompt_chunk(tokens); });
}

keyhole_status keyhole_session_set_extend_pattern(keyhole_session* session, const char* pattern,
                                                  uint32_t tokens) {
  return with_session(session, Needs::stream,
                      [&](SessionInterface& s) { s.set_extend_pattern(pattern, tokens); });
}

keyhole_status keyhole_session_get_extend_blocks(const keyhole_session* session, uint64_t* attended,
                                                 uint64_t* seen) {
  return with_session(session, Needs::nothing, [&](SessionInterface& s) {
    require(attended, "attended");
    require(seen, "seen");
    const gpu::PromptBlocks blocks = s.extend_blocks();
    *attended = blocks.attended;
    *seen = blocks.seen;
  });
}

keyhole_status keyhole_session_accept(keyhole_session* session, uint32_t m, const uint32_t* path) {
  return with_session(session, Needs::stream, [&](SessionInterface& s) { s.accept(m, path); });
}

keyhole_status keyhole_session_extend_batch(keyhole_session* const* sessions, uint32_t count,
                                            uint32_t layer, const keyhole_tensor* q,
                                            const keyhole_tensor* k, const keyhole_tensor* v,
                                            const uint32_t* query_start, const keyhole_tensor* out,
                                            float* lse, keyhole_status* statuses) {
  keyhole_status of_members = KEYHOLE_OK;
  const keyhole_status of_all = guarded([&] {
    if (count == 0) return;
    require(sessions, "sessions");
    require(query_start, "query_start");
    for (uint32_t i = 0; i < count; ++i) require(sessions[i], "sessions[i]");
    Batch batch(sessions, count);
    const Engine& engine = *sessions[0]->engine;
    check_layer(engine.model(), layer);
    check_batches(engine);
    const ExtendArgs all = check_extend_tensors(engine, layer, q, k, v, out, lse);
    batch.check(all, query_start);
    batch.run(layer);
    of_members = batch.take_statuses(statuses);
  });
  if (of_all == KEYHOLE_OK) return of_members;
  for (uint32_t i = 0; statuses != nullptr && i < count; ++i) statuses[i] = of_all;
  return of_all;
}

keyhole_status keyhole_session_announce_batch(keyhole_session* const* sessions, uint32_t count,
                                              uint64_t graph) {
  return guarded([&] {
    if (count == 0) return;
    require(sessions, "sessions");
    if (graph == 0) throw Error(Status::invalid_argument, "graph is 0; numbers of graphs are not");
    for (uint32_t i = 0; i < count; ++i) require(sessions[i], "sessions[i]");
    // Of as many sessions as steps go together by one launch, this takes no memory.
    std::array<std::byte, 2048> place;
    std::pmr::monotonic_buffer_resource memory(place.data(), place.size());
    std::pmr::list<Announced> all(&memory);
    for (uint32_t i = 0; i < count; ++i) {
      all.emplace_back(*sessions[i]);
      all.back().session.check_takes("keyhole_session_announce_batch");
      all.back().session.enter(Needs::stream);
    }
    // Nothing is announced before it is known that everything can be; then nothing fails.
    for (Announced& one : all) {
      StreamStepper& steps = one.session.batch_member().stream();
      use_member(one.session, [&] { one.graph = &steps.ready_graph(graph); });
    }
    for (const Announced& one : all) one.session.batch_member().stream().submit_graph(*one.graph);
  });
}

}  // extern "C"
