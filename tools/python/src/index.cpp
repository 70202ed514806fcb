#include "keyhole/index.h"

#include <vector>

#include "tools/python/src/arrays.h"
#include "tools/python/src/callbacks.h"
#include "tools/python/src/fields.h"
#include "tools/python/src/handles.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

Index* create(Engine& engine, const std::string& spec, uint32_t layer, uint32_t kv_head) {
  Engine::Use use(engine);
  keyhole_index* index = nullptr;
  run([&] { return keyhole_index_create(use.get(), spec.c_str(), layer, kv_head, &index); });
  return new Index(index, "the index");
}

void build(Index& self, nb::handle keys, nb::handle values, nb::handle training_queries,
           nb::handle training_positions, uint32_t first_position, nb::handle progress) {
  Index::Use use(self);
  const Array k(keys, "keys", Array::kRead), v(values, "values", Array::kRead);
  const Array queries(training_queries, "training_queries", Array::kRead);
  const Elements<const uint32_t> positions(
      training_positions, "training_positions", "a dense uint32 array in host memory",
      queries.none() ? 0 : static_cast<size_t>(queries.tensor().shape[0]));
  Progress(progress).run([&](keyhole_progress_fn step, void* user) {
    return keyhole_index_build(use.get(), k.pointer(), v.pointer(), queries.pointer(),
                               positions.data(), first_position, step, user);
  });
}

void build_tail(Index& self, uint32_t keys_per_partition, nb::handle progress) {
  Index::Use use(self);
  Progress(progress).run([&](keyhole_progress_fn step, void* user) {
    return keyhole_index_build_tail(use.get(), keys_per_partition, step, user);
  });
}

void set_spec(Index& self, const std::string& spec) {
  Index::Use use(self);
  run([&] { return keyhole_index_set_spec(use.get(), spec.c_str()); });
}

struct Options {
  keyhole_search_options options;
  Elements<const float> other_o, other_lse;
  Options(nb::dict values, nb::handle o, nb::handle lse)
      : other_o(o, "other_o", "a dense float32 array in host memory"),
        other_lse(lse, "other_lse", "a dense float32 array in host memory") {
    keyhole_search_options_init(&options);
    fill(options, values);
    options.other_o = other_o.data();
    options.other_lse = other_lse.data();
  }
};

size_t rows(const Array& queries) {
  return queries.none() ? 0 : static_cast<size_t>(queries.tensor().shape[0]);
}

nb::dict search(Index& self, nb::handle queries, nb::dict values, nb::handle ids, nb::handle scores,
                nb::handle counts) {
  Index::Use use(self);
  const Array q(queries, "queries", Array::kRead);
  const Options options(values, nb::none(), nb::none());
  const size_t wanted = rows(q) * options.options.budget.top_k;
  const Elements<uint32_t> found(ids, "ids", "a writable dense uint32 array in host memory",
                                 wanted);
  const Elements<float> products(scores, "scores", "a writable dense float32 array in host memory",
                                 wanted);
  const Elements<uint32_t> numbers(counts, "counts", "a writable dense uint32 array in host memory",
                                   rows(q));
  keyhole_search_cost cost;
  keyhole_search_cost_init(&cost);
  run([&] {
    return keyhole_index_search(use.get(), q.pointer(), &options.options, found.data(),
                                products.data(), numbers.data(), &cost);
  });
  return as_dict(cost, rows(q));
}

nb::tuple attend(Index& self, nb::handle queries, nb::dict values, nb::handle other_o,
                 nb::handle other_lse, nb::handle o, nb::handle lse) {
  Index::Use use(self);
  const Array q(queries, "queries", Array::kRead);
  const Options options(values, other_o, other_lse);
  const Elements<float> output(o, "o", "a writable dense float32 array in host memory", rows(q));
  const Elements<float> sums(lse, "lse", "a writable dense float32 array in host memory", rows(q));
  keyhole_search_cost cost;
  keyhole_search_cost_init(&cost);
  const uint32_t* ids = nullptr;
  uint32_t count = 0;
  run([&] {
    return keyhole_index_attend(use.get(), q.pointer(), &options.options, output.data(),
                                sums.data(), &ids, &count, &cost);
  });
  nb::list attended;
  for (uint32_t i = 0; i < count; ++i) attended.append(nb::int_(ids[i]));
  return nb::make_tuple(attended, as_dict(cost, rows(q)));
}

nb::dict info(Index& self) {
  Index::Use use(self);
  keyhole_index_info value;
  keyhole_index_info_init(&value);
  check(keyhole_index_get_info(use.get(), &value));
  return as_dict(value);
}

}  // namespace

void define_index(nb::module_& module) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<Index>(module, "Index")
      .def("close", &Index::close)
      .def_prop_ro("closed", &Index::closed)
      .def("build", build, none("keys"), none("values"), none("training_queries"),
           none("training_positions"), nb::arg("first_position"), none("progress"))
      .def("build_tail", build_tail, nb::arg("keys_per_partition"), none("progress"))
      .def("set_spec", set_spec)
      .def("search", search, nb::arg("queries"), nb::arg("options"), none("ids"), none("scores"),
           none("counts"))
      .def("attend", attend, nb::arg("queries"), nb::arg("options"), none("other_o"),
           none("other_lse"), none("o"), none("lse"))
      .def("info", info);
  module.def("index_create", create);
}

}  // namespace keyhole::python
