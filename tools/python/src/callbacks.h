// What the library calls while it works: progress, and its log.
#ifndef KEYHOLE_TOOLS_PYTHON_SRC_CALLBACKS_H_
#define KEYHOLE_TOOLS_PYTHON_SRC_CALLBACKS_H_

#include <nanobind/nanobind.h>

#include <exception>

#include "keyhole/keyhole.h"
#include "tools/python/src/errors.h"

namespace keyhole::python {

/// A callable (or None) as keyhole_progress_fn. What it raises cancels the call and is raised by run(); so is Ctrl-C,
/// with or without a callable.
class Progress {
 public:
  explicit Progress(nanobind::handle callable) : callable_(callable) {}

  template <class Call>
  void run(Call&& call) {
    keyhole_status status;
    std::string text;
    {
      nanobind::gil_scoped_release unlocked;
      status = call(&Progress::step, static_cast<void*>(this));
      if (status != KEYHOLE_OK) text = keyhole_last_error();
    }
    if (raised_) std::rethrow_exception(raised_);
    if (status != KEYHOLE_OK) raise(status, text);
  }

 private:
  static int32_t step(void* user, double fraction, const char* what);

  nanobind::handle callable_;
  std::exception_ptr raised_;
};

/// Where the log of every engine goes: a callable (level, text), kept until the module goes.
void set_log(nanobind::handle callable);
void log(void* user, int32_t level, const char* text);

}  // namespace keyhole::python

#endif  // KEYHOLE_TOOLS_PYTHON_SRC_CALLBACKS_H_
