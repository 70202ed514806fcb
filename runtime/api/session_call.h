// How a call of the C API enters a session: locked, and when the session is as the call needs it.
#pragma once

#include <string>
#include <utility>

#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"

namespace keyhole::runtime {

/// What a call needs of the session's steps.
enum class Needs {
  nothing,  ///< it reads counts and figures: waits for steps on a stream, during a capture for their host's part only
  no_step,  ///< it changes the session: refused inside a step and during a capture, waits for steps on a stream
  copy,  ///< it reads what no step may change meanwhile: likewise, but also after stream steps have failed
  stream,  ///< it may come while a stream has steps under way
  end      ///< it ends a step
};

/// Throws Error(unsupported) for a session that is spread over ranks.
inline void refuse_spread(const keyhole_session& handle, const char* what) {
  if (handle.spread == nullptr) return;
  throw Error(Status::unsupported,
              std::string(what) + " of a session that is spread over several ranks");
}

/// Whether tensors may lie in device memory.
inline bool takes_device(const keyhole_session& handle) {
  return handle.session->engine().has_streams();
}

[[noreturn]] inline void throw_in_step() {
  throw Error(Status::busy, "a step is under way: keyhole_attend_begin without keyhole_attend_end");
}

/// Waits until a session that is locked is as a call needs it; throws Error where it cannot be. is_spread: the failure of this
/// rank's steps is told by a collective call, to all ranks alike.
inline void make_ready(Session& s, Needs needs, bool is_spread = false) {
  const bool between_steps = needs != Needs::nothing && needs != Needs::end;
  if (between_steps && (s.in_step() || s.in_stream_step())) {
    throw_in_step();
  }
  if (needs == Needs::nothing && s.is_capturing()) {
    s.wait_for_host();
  } else if (needs != Needs::stream && needs != Needs::end) {
    s.check_not_capturing();
    s.wait_idle();
  }
  if (needs == Needs::no_step && !is_spread) s.check_failure();
}

/// Runs `body(Session&)` with the session locked, when it is as the call needs it.
template <class F>
keyhole_status with_session(const keyhole_session* handle, Needs needs, F&& body) noexcept {
  return guarded([&] {
    require(handle, "session");
    const UseLock lock(handle->in_use, "the session");
    Session& s = *handle->session;
    if (handle->spread != nullptr && handle->spread->in_step() && needs != Needs::nothing &&
        needs != Needs::end) {
      throw_in_step();
    }
    // Steps of a spread session end with those of the other ranks, if these come.
    if (handle->spread != nullptr && needs != Needs::stream && needs != Needs::end) {
      handle->spread->wait_for_stream();
    }
    make_ready(s, needs, handle->spread != nullptr);
    try {
      body(s);
    } catch (const Error& e) {
      // Of a copy it may be the copy's device that has failed.
      if (needs != Needs::nothing && needs != Needs::copy) s.keep_device_failure(e);
      throw;
    }
  });
}

/// Logs once per session that K or V come in another 16-bit dtype than they are stored in: f16
/// refuses what bf16 has beyond 65504, bf16 drops three bits of f16.
inline void tell_dtype(keyhole_session& handle, const RowsIn& rows) {
  const DType stored = handle.session->engine().model().kv_dtype;
  if (handle.told_dtype || rows.dtype == stored || rows.dtype == DType::f32 ||
      stored == DType::f32) {
    return;
  }
  handle.told_dtype = true;
  handle.session->engine().log()(KEYHOLE_LOG_INFO,
                                 std::string("K and V come as ") + dtype_name(rows.dtype) +
                                     " and are stored as " + dtype_name(stored) +
                                     ": keyhole_engine_config.kv_dtype should be the model's");
}

}  // namespace keyhole::runtime
