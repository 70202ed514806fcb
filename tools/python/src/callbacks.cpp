#include "tools/python/src/callbacks.h"

namespace nb = nanobind;

namespace keyhole::python {
namespace {

PyObject* log_callable = nullptr;

}  // namespace

int32_t Progress::step(void* user, double fraction, const char* what) {
  auto* self = static_cast<Progress*>(user);
  nb::gil_scoped_acquire locked;
  if (self->raised_) return 1;
  try {
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (self->callable_.is_none()) return 0;
    const nb::object answer = self->callable_(fraction, what);
    const int stop = PyObject_IsTrue(answer.ptr());
    if (stop < 0) throw nb::python_error();
    return stop;
  } catch (...) {
    self->raised_ = std::current_exception();
    return 1;
  }
}

void set_log(nb::handle callable) {
  Py_XDECREF(log_callable);
  log_callable = callable.is_none() ? nullptr : callable.inc_ref().ptr();
}

void log(void*, int32_t level, const char* text) {
  // Threads of the library may still speak when the interpreter goes.
  if (!Py_IsInitialized()) return;
  nb::gil_scoped_acquire locked;
  if (!log_callable) return;
  try {
    nb::borrow(log_callable)(level, text);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("keyhole log");
  }
}

}  // namespace keyhole::python
