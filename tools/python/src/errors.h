// Failures of the library as Python exceptions: one class per status, with the library's text.
#ifndef KEYHOLE_TOOLS_PYTHON_SRC_ERRORS_H_
#define KEYHOLE_TOOLS_PYTHON_SRC_ERRORS_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "keyhole/keyhole.h"

namespace keyhole::python {

/// The exception class of each status, from the Python side of the package; kept until the module goes.
void set_error_classes(nanobind::dict by_status);
void forget_error_classes();

/// Throws the exception of `status`, with `text` and the number in its attribute `status`.
[[noreturn]] void raise(keyhole_status status, const std::string& text);

/// Throws where `status` is a failure. Call it on the thread that made the call: the library keeps its text per thread.
void check(keyhole_status status);

/// Runs a call of the library without the interpreter's lock and throws what it failed with. The text is read before
/// any other call can replace it.
template <class Call>
void run(Call&& call) {
  keyhole_status status;
  std::string text;
  {
    nanobind::gil_scoped_release unlocked;
    status = call();
    if (status != KEYHOLE_OK) text = keyhole_last_error();
  }
  if (status != KEYHOLE_OK) raise(status, text);
}

}  // namespace keyhole::python

#endif  // KEYHOLE_TOOLS_PYTHON_SRC_ERRORS_H_
