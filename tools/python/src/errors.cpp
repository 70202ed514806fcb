#include "tools/python/src/errors.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

PyObject* classes = nullptr;

}  // namespace

void set_error_classes(nb::dict by_status) {
  forget_error_classes();
  classes = by_status.release().ptr();
}

void forget_error_classes() {
  Py_XDECREF(classes);
  classes = nullptr;
}

void raise(keyhole_status status, const std::string& text) {
  const nb::object number = nb::int_(status);
  PyObject* kind = classes ? PyDict_GetItem(classes, number.ptr()) : nullptr;
  if (!kind) kind = PyExc_RuntimeError;
  const std::string words = text.empty() ? keyhole_status_string(status) : text;
  nb::object error = nb::borrow(kind)(words);
  error.attr("status") = number;
  PyErr_SetObject(kind, error.ptr());
  throw nb::python_error();
}

void check(keyhole_status status) {
  if (status != KEYHOLE_OK) raise(status, keyhole_last_error());
}

}  // namespace keyhole::python
