
#include <memory>
#include <vector>

#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "tools/python/src/arrays.h"
#include "tools/python/src/callbacks.h"
#include "tools/python/src/fields.h"
#include "tools/python/src/handles.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

using Text = nb::handle;  // str or None

const char* c_text(Text text, const char* name) {
  if (text.is_none()) return nullptr;
  const char* words =
      nb::isinstance<nb::str>(text) ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
  if (!words) {
    PyErr_Clear();
    throw nb::type_error((std::string(name) + " must be a str or None").c_str());
  }
  return words;
}

Session* create(Engine& engine, nb::dict values, const std::vector<uint32_t>& dense_layers) {
  Engine::Use use(engine);
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  fill(config, values);
  config.dense_layers = dense_layers.data();
  config.dense_layer_count = static_cast<uint32_t>(dense_layers.size());
  keyhole_session* session = nullptr;
  run([&] { return keyhole_session_create(use.get(), &config, &session); });
  return new Session(session, "the session");
}

nb::dict config_of(Session& self) {
  Session::Use use(self);
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  check(keyhole_session_get_config(use.get(), &config));
  nb::dict values = as_dict(config);
  nb::list dense;
  for (uint32_t i = 0; i < config.dense_layer_count; ++i)
    dense.append(nb::int_(config.dense_layers[i]));
  values["dense_layers"] = nb::tuple(dense);
  return values;
}

void append(Session& self, uint32_t layer, nb::handle k, nb::handle v, nb::handle q) {
  Session::Use use(self);
  const Array keys(k, "k", Array::kRead), values(v, "v", Array::kRead),
      queries(q, "q", Array::kRead);
  run([&] {
    return keyhole_session_append(use.get(), layer, keys.pointer(), values.pointer(),
                                  queries.pointer());
  });
}

void build(Session& self, nb::handle progress) {
  Session::Use use(self);
  Progress(progress).run([&](keyhole_progress_fn step, void* user) {
    return keyhole_session_build(use.get(), step, user);
  });
}

void attend(Session& self, uint32_t layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
            nb::handle lse) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), keys(k, "k", Array::kRead),
      values(v, "v", Array::kRead);
  const Array result(out, "out", Array::kWrite), sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_session_attend(use.get(), layer, queries.pointer(), keys.pointer(),
                                  values.pointer(), result.pointer(), lse_data);
  });
}

void attend_begin(Session& self, uint32_t layer, nb::handle q, nb::handle k, nb::handle v) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), keys(k, "k", Array::kRead),
      values(v, "v", Array::kRead);
  run([&] {
    return keyhole_session_attend_begin(use.get(), layer, queries.pointer(), keys.pointer(),
                                        values.pointer());
  });
}

void attend_end(Session& self, nb::handle out, nb::handle lse, int64_t q_heads) {
  Session::Use use(self);
  const Array result(out, "out", Array::kWrite), sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", q_heads);
  run([&] { return keyhole_session_attend_end(use.get(), result.pointer(), lse_data); });
}

void extend(Session& self, uint32_t layer, nb::handle q, nb::handle k, nb::handle v,
            nb::handle mask, nb::handle out, nb::handle lse) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), keys(k, "k", Array::kRead),
      values(v, "v", Array::kRead);
  const Array result(out, "out", Array::kWrite), sums(lse, "lse", Array::kWrite);
  const size_t tokens = queries.none() ? 0 : static_cast<size_t>(queries.tensor().shape[0]);
  const Elements<const uint64_t> words(
      mask, "mask", "a dense uint64 array in host memory, one element for each token", tokens);
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_session_extend(use.get(), layer, queries.pointer(), keys.pointer(),
                                  values.pointer(), words.data(), result.pointer(), lse_data);
  });
}

void attend_queries(Session& self, uint32_t layer, nb::handle q, nb::handle out, nb::handle lse) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), result(out, "out", Array::kWrite),
      sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_session_attend_queries(use.get(), layer, queries.pointer(), result.pointer(),
                                          lse_data);
  });
}

/// Sessions of a call, none of which another one uses meanwhile.
struct Uses {
  std::vector<std::unique_ptr<Session::Use>> uses;
  std::vector<keyhole_session*> pointers;

  explicit Uses(const nb::list& sessions) {
    for (nb::handle session : sessions) {
      uses.push_back(std::make_unique<Session::Use>(nb::cast<Session&>(session)));
      pointers.push_back(uses.back()->get());
    }
  }
};

// Returns the status and the text of each session.
nb::list extend_batch(nb::list sessions, uint32_t layer, nb::handle q, nb::handle k, nb::handle v,
                      const std::vector<uint32_t>& query_start, nb::handle out, nb::handle lse) {
  const size_t count = sessions.size();
  if (query_start.size() != count + 1)
    throw nb::value_error(("query_start has " + std::to_string(query_start.size()) +
                           " elements; one more than sessions, " + std::to_string(count + 1) +
                           ", are needed")
                              .c_str());
  const Uses used(sessions);
  const Array queries(q, "q", Array::kRead), keys(k, "k", Array::kRead),
      values(v, "v", Array::kRead);
  const Array result(out, "out", Array::kWrite), sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", queries.rows());
  std::vector<keyhole_status> statuses(count, KEYHOLE_OK);
  keyhole_status status;
  std::string text;
  {
    nb::gil_scoped_release unlocked;
    status = keyhole_session_extend_batch(used.pointers.data(), static_cast<uint32_t>(count), layer,
                                          queries.pointer(), keys.pointer(), values.pointer(),
                                          query_start.data(), result.pointer(), lse_data,
                                          statuses.data());
    if (status != KEYHOLE_OK) text = keyhole_last_error();
  }
  // Where some went on, the caller must know which.
  size_t failed = 0;
  for (const keyhole_status one : statuses) failed += one != KEYHOLE_OK;
  if (status != KEYHOLE_OK && (failed == count || failed == 0)) raise(status, text);
  nb::list answers;
  for (const keyhole_status one : statuses)
    answers.append(
        one == KEYHOLE_OK
            ? nb::none()
            : nb::object(nb::make_tuple(one, one == status ? text : keyhole_status_string(one))));
  return answers;
}

void set_extend_pattern(Session& self, Text pattern, uint32_t tokens) {
  Session::Use use(self);
  const char* words = c_text(pattern, "pattern");
  run([&] { return keyhole_session_set_extend_pattern(use.get(), words, tokens); });
}

void set_prompt_chunk(Session& self, uint32_t tokens) {
  Session::Use use(self);
  run([&] { return keyhole_session_set_prompt_chunk(use.get(), tokens); });
}

void get_rows(Session& self, uint32_t layer, uint32_t first, nb::handle k, nb::handle v) {
  Session::Use use(self);
  const Array keys(k, "k", Array::kWrite), values(v, "v", Array::kWrite);
  run([&] {
    return keyhole_session_get_rows(use.get(), layer, first, keys.pointer(), values.pointer());
  });
}

nb::tuple extend_blocks(Session& self) {
  Session::Use use(self);
  uint64_t attended = 0, seen = 0;
  check(keyhole_session_get_extend_blocks(use.get(), &attended, &seen));
  return nb::make_tuple(attended, seen);
}

void accept(Session& self, uint32_t m, nb::handle path) {
  Session::Use use(self);
  std::vector<uint32_t> indexes;
  if (!path.is_none()) indexes = nb::cast<std::vector<uint32_t>>(path);
  if (!path.is_none() && indexes.size() < m) throw nb::value_error("path is shorter than m");
  run([&] {
    return keyhole_session_accept(use.get(), m, path.is_none() ? nullptr : indexes.data());
  });
}

void attend_offloaded(Session& self, uint32_t layer, nb::handle q, nb::handle out, nb::handle lse) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), result(out, "out", Array::kWrite),
      sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_session_attend_offloaded(use.get(), layer, queries.pointer(), result.pointer(),
                                            lse_data);
  });
}

void attend_tokens(Session& self, uint32_t layer, nb::handle q,
                   const std::vector<std::vector<uint32_t>>& ids, bool with_resident,
                   nb::handle out, nb::handle lse) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead), result(out, "out", Array::kWrite),
      sums(lse, "lse", Array::kWrite);
  std::vector<uint32_t> counts, flat;
  for (const std::vector<uint32_t>& head : ids) {
    counts.push_back(static_cast<uint32_t>(head.size()));
    flat.insert(flat.end(), head.begin(), head.end());
  }
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_session_attend_tokens(use.get(), layer, queries.pointer(),
                                         flat.empty() ? nullptr : flat.data(), counts.data(),
                                         with_resident, result.pointer(), lse_data);
  });
}

void search_tokens(Session& self, uint32_t layer, nb::handle q, uint32_t top_k, nb::handle ids,
                   nb::handle scores, nb::handle counts) {
  Session::Use use(self);
  const Array queries(q, "q", Array::kRead);
  const size_t heads = static_cast<size_t>(queries.rows());
  const Elements<uint32_t> found(ids, "ids", "a writable dense uint32 array in host memory",
                                 heads * top_k);
  const Elements<float> products(scores, "scores", "a writable dense float32 array in host memory",
                                 heads * top_k);
  const Elements<uint32_t> numbers(counts, "counts", "a writable dense uint32 array in host memory",
                                   heads);
  run([&] {
    return keyhole_session_search_tokens(use.get(), layer, queries.pointer(), top_k, found.data(),
                                         products.data(), numbers.data());
  });
}

void set_index(Session& self, const std::string& spec) {
  Session::Use use(self);
  run([&] { return keyhole_session_set_index(use.get(), spec.c_str()); });
}

void set_mode(Session& self, int32_t mode, uint32_t top_k) {
  Session::Use use(self);
  run([&] { return keyhole_session_set_mode(use.get(), mode, top_k); });
}

void set_attend(Session& self, int32_t attend_mode, float min_weight) {
  Session::Use use(self);
  run([&] { return keyhole_session_set_attend(use.get(), attend_mode, min_weight); });
}

void set_budget(Session& self, uint32_t layer, uint32_t kv_head, nb::dict values) {
  Session::Use use(self);
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  fill(budget, values);
  run([&] { return keyhole_session_set_budget(use.get(), layer, kv_head, &budget); });
}

nb::dict get_budget(Session& self, uint32_t layer, uint32_t kv_head) {
  Session::Use use(self);
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  check(keyhole_session_get_budget(use.get(), layer, kv_head, &budget));
  return as_dict(budget);
}

void set_stream(Session& self, uintptr_t stream) {
  Session::Use use(self);
  run([&] { return keyhole_session_set_stream(use.get(), reinterpret_cast<void*>(stream)); });
}

uint64_t graph(Session& self) {
  Session::Use use(self);
  uint64_t number = 0;
  check(keyhole_session_get_graph(use.get(), &number));
  return number;
}

void announce_graph(Session& self, uint64_t number) {
  Session::Use use(self);
  run([&] { return keyhole_session_announce_graph(use.get(), number); });
}

void announce_batch(nb::list sessions, uint64_t number) {
  const Uses used(sessions);
  run([&] {
    return keyhole_session_announce_batch(used.pointers.data(),
                                          static_cast<uint32_t>(used.pointers.size()), number);
  });
}

void truncate(Session& self, uint32_t n_tokens) {
  Session::Use use(self);
  run([&] { return keyhole_session_truncate(use.get(), n_tokens); });
}

void remove(Session& self, uint32_t first, uint32_t count, int32_t shift) {
  Session::Use use(self);
  run([&] { return keyhole_session_remove(use.get(), first, count, shift); });
}

Session* fork(Session& self) {
  Session::Use use(self);
  keyhole_session* copy = nullptr;
  run([&] { return keyhole_session_fork(use.get(), &copy); });
  return new Session(copy, "the session");
}

void save(Session& self, const std::string& path) {
  Session::Use use(self);
  run([&] { return keyhole_session_save(use.get(), path.c_str()); });
}

Session* load(Engine& engine, const std::string& path, Text model, nb::handle tokens) {
  Engine::Use use(engine);
  const char* expected = c_text(model, "model");
  const Elements<const int32_t> ids(tokens, "tokens", "a dense int32 array in host memory");
  keyhole_session* session = nullptr;
  keyhole_load_options options;
  keyhole_load_options_init(&options);
  options.model = expected;
  options.tokens = ids.data();
  options.token_count = ids.size();
  run([&] { return keyhole_session_load(use.get(), path.c_str(), &options, &session); });
  return new Session(session, "the session");
}

void set_identity(Session& self, Text model, nb::handle tokens) {
  Session::Use use(self);
  const char* name = c_text(model, "model");
  const Elements<const int32_t> ids(tokens, "tokens", "a dense int32 array in host memory");
  run([&] { return keyhole_session_set_identity(use.get(), name, ids.data(), ids.size()); });
}

nb::dict identity(Session& self) {
  Session::Use use(self);
  keyhole_identity value;
  keyhole_identity_init(&value);
  check(keyhole_session_get_identity(use.get(), &value));
  return as_dict(value);
}

nb::dict layer_tokens(Session& self, uint32_t layer) {
  Session::Use use(self);
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  run([&] { return keyhole_session_get_layer_tokens(use.get(), layer, &tokens); });
  return as_dict(tokens);
}

nb::dict statistics(Session& self) {
  Session::Use use(self);
  keyhole_statistics value;
  keyhole_statistics_init(&value);
  run([&] { return keyhole_session_get_statistics(use.get(), &value); });
  return as_dict(value);
}

nb::dict audit(Session& self, uint32_t layer, uint32_t kv_head) {
  Session::Use use(self);
  keyhole_audit value;
  keyhole_audit_init(&value);
  run([&] { return keyhole_session_get_audit(use.get(), layer, kv_head, &value); });
  return as_dict(value);
}

template <keyhole_status (*call)(keyhole_session*)>
void plain(Session& self) {
  Session::Use use(self);
  run([&] { return call(use.get()); });
}

}  // namespace

void define_session(nb::module_& module) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<Session>(module, "Session")
      .def("close", &Session::close)
      .def_prop_ro("closed", &Session::closed)
      .def("config", config_of)
      .def("append", append, nb::arg("layer"), none("k"), none("v"), none("q"))
      .def("build", build, none("progress"))
      .def("attend", attend, nb::arg("layer"), none("q"), none("k"), none("v"), none("out"),
           none("lse"))
      .def("attend_begin", attend_begin, nb::arg("layer"), none("q"), none("k"), none("v"))
      .def("attend_end", attend_end, none("out"), none("lse"), nb::arg("q_heads"))
      .def("extend", extend, nb::arg("layer"), none("q"), none("k"), none("v"), none("mask"),
           none("out"), none("lse"))
      .def("attend_queries", attend_queries, nb::arg("layer"), none("q"), none("out"), none("lse"))
      .def("set_extend_pattern", set_extend_pattern, none("pattern"), nb::arg("tokens"))
      .def("set_prompt_chunk", set_prompt_chunk, nb::arg("tokens"))
      .def("get_rows", get_rows, nb::arg("layer"), nb::arg("first"), none("k"), none("v"))
      .def("extend_blocks", extend_blocks)
      .def("accept", accept, nb::arg("m"), none("path"))
      .def("attend_offloaded", attend_offloaded, nb::arg("layer"), none("q"), none("out"),
           none("lse"))
      .def("attend_tokens", attend_tokens, nb::arg("layer"), none("q"), nb::arg("ids"),
           nb::arg("with_resident"), none("out"), none("lse"))
      .def("search_tokens", search_tokens, nb::arg("layer"), none("q"), nb::arg("top_k"),
           none("ids"), none("scores"), none("counts"))
      .def("set_index", set_index)
      .def("set_mode", set_mode)
      .def("set_attend", set_attend)
      .def("set_budget", set_budget)
      .def("get_budget", get_budget)
      .def("set_stream", set_stream)
      .def("announce", plain<keyhole_session_announce>)
      .def("announce_graph", announce_graph)
      .def("graph", graph)
      .def("synchronize", plain<keyhole_session_synchronize>)
      .def("truncate", truncate)
      .def("remove", remove, nb::arg("first"), nb::arg("count"), nb::arg("shift"))
      .def("fork", fork)
      .def("save", save)
      .def("set_identity", set_identity, none("model"), none("tokens"))
      .def("identity", identity)
      .def("layer_tokens", layer_tokens)
      .def("statistics", statistics)
      .def("reset_statistics", plain<keyhole_session_reset_statistics>)
      .def("audit", audit);
  module.def("session_create", create);
  module.def("session_load", load, nb::arg("engine"), nb::arg("path"), none("model"),
             none("tokens"));
  module.def("extend_batch", extend_batch, nb::arg("sessions"), nb::arg("layer"), none("q"),
             none("k"), none("v"), nb::arg("query_start"), none("out"), none("lse"));
  module.def("announce_batch", announce_batch, nb::arg("sessions"), nb::arg("number"));
}

}  // namespace keyhole::python
