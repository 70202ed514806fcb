// The extension keyhole._native: calls of the C headers one by one. What users see is the package around it.
#include <nanobind/nanobind.h>

#include "keyhole/prefill.h"
#include "tools/python/src/callbacks.h"
#include "tools/python/src/fields.h"
#include "tools/python/src/handles.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  using namespace keyhole::python;
  module.def("set_error_classes", set_error_classes);
  module.def(
      "set_log", [](nb::handle callable) { set_log(callable); }, nb::arg("callable").none());
  module.def("version", keyhole_version);
  module.def("abi_version", keyhole_abi_version);
  module.def("status_string", keyhole_status_string);
  module.def("index_help", keyhole_index_help);
  module.def("prompt_help", keyhole_prompt_help);
  module.def("field_names", field_names);
  module.attr("HEADER_ABI_VERSION") = KEYHOLE_ABI_VERSION;
#ifdef KEYHOLE_PYTHON_CUDA
  module.attr("CUDA") = true;
#else
  module.attr("CUDA") = false;
#endif
  define_engine(module);
  define_session(module);
  define_index(module);
  define_prompt(module);
  // What outlives the last object must not outlive the interpreter.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    set_log(nb::none());
    forget_error_classes();
  }));
}
