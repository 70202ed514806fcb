// How a call of the C API enters a session: locked, and when the session is as the call needs it.
#pragma once

#include <string>
#include <utility>

#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"

namespace keyhole::runtime {

/// Whether tensors may lie in device memory.
inline bool takes_device(const SessionInterface& s) { return s.engine().has_streams(); }

/// Runs `body(SessionInterface&)` with the session locked, when it is as the call needs it.
template <class F>
keyhole_status with_session(const keyhole_session* handle, Needs needs, F&& body) noexcept {
  return guarded([&] {
    require(handle, "session");
    const SessionCall call(*handle->use);
    SessionInterface& s = *handle->session;
    s.enter(needs);
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
inline void tell_dtype(keyhole_session& handle, const TensorView& rows) {
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
