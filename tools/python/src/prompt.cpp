#include "keyhole/prefill.h"

#include "tools/python/src/arrays.h"
#include "tools/python/src/handles.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

Prompt* create(Engine& engine, nb::handle pattern) {
  Engine::Use use(engine);
  const std::string words = pattern.is_none() ? "" : nb::cast<std::string>(pattern);
  keyhole_prompt* prompt = nullptr;
  run([&] {
    return keyhole_prompt_create(use.get(), pattern.is_none() ? nullptr : words.c_str(), &prompt);
  });
  return new Prompt(prompt, "the prompt");
}

void set_pattern(Prompt& self, uint32_t layer, uint32_t q_head, const std::string& pattern) {
  Prompt::Use use(self);
  run([&] { return keyhole_prompt_set_pattern(use.get(), layer, q_head, pattern.c_str()); });
}

void attend(Prompt& self, uint32_t layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
            nb::handle lse, uintptr_t stream) {
  Prompt::Use use(self);
  const Array queries(q, "q", Array::kRead), keys(k, "k", Array::kRead),
      values(v, "v", Array::kRead);
  const Array result(out, "out", Array::kWrite), sums(lse, "lse", Array::kWrite);
  float* lse_data = sums.floats("lse", queries.rows());
  run([&] {
    return keyhole_prompt_attend(use.get(), layer, queries.pointer(), keys.pointer(),
                                 values.pointer(), result.pointer(), lse_data,
                                 reinterpret_cast<void*>(stream));
  });
}

nb::tuple blocks(Prompt& self) {
  Prompt::Use use(self);
  uint64_t attended = 0, seen = 0;
  run([&] { return keyhole_prompt_get_blocks(use.get(), &attended, &seen); });
  return nb::make_tuple(attended, seen);
}

}  // namespace

void define_prompt(nb::module_& module) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<Prompt>(module, "Prompt")
      .def("close", &Prompt::close)
      .def_prop_ro("closed", &Prompt::closed)
      .def("set_pattern", set_pattern, nb::arg("layer"), nb::arg("q_head"), nb::arg("pattern"))
      .def("attend", attend, nb::arg("layer"), none("q"), none("k"), none("v"), none("out"),
           none("lse"), nb::arg("stream"))
      .def("blocks", blocks);
  module.def("prompt_create", create, nb::arg("engine"), none("pattern"));
}

}  // namespace keyhole::python
