// What transports in libraries of their own share (runtime/mpi, runtime/nccl), and the library's own waits for ranks:
// how they wait, and how an error that such a library finds becomes the thread's. Header alone, as these libraries
// share no source.
#pragma once

#include <chrono>
#include <cstdio>
#include <thread>

#include "keyhole/parallel.h"

namespace keyhole::ranks {

/// Between two looks at whether others have come. A step's message is on its way for some microseconds: for 200 there
/// is no pause. Longer waits leave the core to others, which may be ranks of this host.
inline void pause_since(std::chrono::steady_clock::time_point begin) {
  using namespace std::chrono_literals;
  if (std::chrono::steady_clock::now() - begin > 200us) std::this_thread::sleep_for(50us);
}

/// Returns `status`, and makes `text` that of keyhole_last_error(), by way of a transport that fails.
inline keyhole_status fail(keyhole_status status, const char* text) {
  struct Failure {
    keyhole_status status;
    const char* text;
  } failure{status, text};
  keyhole_transport t;
  keyhole_transport_init(&t);
  t.size = 1;
  t.context = &failure;
  t.all_gather = [](void* context, const void*, void*, size_t, uint32_t, char* to) {
    const auto* f = static_cast<const Failure*>(context);
    std::snprintf(to, KEYHOLE_TRANSPORT_TEXT, "%s", f->text);
    return f->status;
  };
  keyhole_communicator* c = nullptr;
  const keyhole_status made = keyhole_communicator_create(&t, nullptr, &c);
  if (made != KEYHOLE_OK) return made;
  const keyhole_status failed = keyhole_communicator_gather(c, nullptr, nullptr, 0);
  keyhole_communicator_destroy(c);
  return failed;
}

}  // namespace keyhole::ranks
