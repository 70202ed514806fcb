// The library's objects as Python holds them: closed once, never while a call is inside.
#ifndef KEYHOLE_TOOLS_PYTHON_SRC_HANDLES_H_
#define KEYHOLE_TOOLS_PYTHON_SRC_HANDLES_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "keyhole/index.h"
#include "keyhole/prefill.h"
#include "keyhole/stream.h"
#include "tools/python/src/errors.h"

namespace keyhole::python {

/// Owns one object of the library. Its counts are read and written under the interpreter's lock alone.
template <class Object, void (*destroy)(Object*)>
class Handle {
 public:
  Handle(Object* object, const char* name) : object_(object), name_(name) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { free(); }

  bool closed() const { return object_ == nullptr; }

  /// Frees it before Python would. Calls afterwards raise ValueError; closing again does nothing.
  void close() {
    if (callers_ > 0)
      raise(KEYHOLE_BUSY,
            std::string(name_) + " cannot be closed while another thread is inside it");
    free();
  }

  /// One call's hold of the object.
  class Use {
   public:
    explicit Use(Handle& handle) : handle_(handle) {
      if (handle.closed())
        throw nanobind::value_error((std::string(handle.name_) + " is closed").c_str());
      ++handle_.callers_;
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { --handle_.callers_; }
    Object* get() const { return handle_.object_; }

   private:
    Handle& handle_;
  };

 private:
  void free() {
    Object* object = object_;
    object_ = nullptr;
    if (!object) return;
    nanobind::gil_scoped_release unlocked;
    destroy(object);
  }

  Object* object_;
  const char* name_;
  int callers_ = 0;
};

/// Steps that are on their way would be given up, and leave wrong numbers in arrays that somebody may still read.
inline void finish_and_destroy(keyhole_session* session) {
  // What failed has no one to tell.
  [[maybe_unused]] const keyhole_status status = keyhole_session_synchronize(session);
  keyhole_session_destroy(session);
}

using Engine = Handle<keyhole_engine, keyhole_engine_destroy>;
using Session = Handle<keyhole_session, finish_and_destroy>;
using Index = Handle<keyhole_index, keyhole_index_destroy>;
using Prompt = Handle<keyhole_prompt, keyhole_prompt_destroy>;

void define_engine(nanobind::module_& module);
void define_session(nanobind::module_& module);
void define_index(nanobind::module_& module);
void define_prompt(nanobind::module_& module);

}  // namespace keyhole::python

#endif  // KEYHOLE_TOOLS_PYTHON_SRC_HANDLES_H_
