// Communicators: what a transport is checked for, and what ranks say to each other by themselves.
#include <algorithm>

#include "runtime/api/api_guard.h"
#include "runtime/plan/config.h"
#include "runtime/ranks/communicator.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

extern "C" {

void keyhole_transport_init_sized(keyhole_transport* transport, size_t size) {
  init_struct(transport, size, {});
}

void keyhole_communicator_config_init_sized(keyhole_communicator_config* config, size_t size) {
  init_struct(config, size, {});
}

keyhole_status keyhole_communicator_create(const keyhole_transport* transport,
                                           const keyhole_communicator_config* config,
                                           keyhole_communicator** out) {
  return guarded([&] {
    const auto t = read_struct(transport, keyhole_transport{}, "transport");
    // The first that can fail: what throws before it has made a Communicator owns the context, too.
    struct Context {
      keyhole_transport t;
      ~Context() {
        if (t.release != nullptr) t.release(t.context);
      }
    } context{t};
    require(out, "out");
    *out = nullptr;
    const auto c = config == nullptr ? keyhole_communicator_config{}
                                     : read_struct(config, keyhole_communicator_config{}, "config");
    auto handle = std::make_unique<keyhole_communicator>();
    handle->communicator = std::make_shared<Communicator>(t, c);
    context.t.release = nullptr;
    *out = handle.release();
  });
}

void keyhole_communicator_destroy(keyhole_communicator* communicator) { destroy(communicator); }

uint32_t keyhole_communicator_get_rank(const keyhole_communicator* communicator) {
  return communicator == nullptr ? 0 : communicator->communicator->rank();
}

uint32_t keyhole_communicator_get_size(const keyhole_communicator* communicator) {
  return communicator == nullptr ? 1 : communicator->communicator->size();
}

keyhole_status keyhole_communicator_gather(keyhole_communicator* communicator, const void* own,
                                           void* all, size_t bytes) {
  return guarded([&] {
    require(communicator, "communicator");
    if (bytes != 0) {
      require(own, "own");
      require(all, "all");
    }
    Communicator& c = *communicator->communicator;
    const auto payloads =
        c.exchange({"gather", bytes}, {static_cast<const std::byte*>(own), bytes});
    for (uint32_t r = 0; r < c.size(); ++r) {
      std::copy_n(payloads.of(r), bytes, static_cast<std::byte*>(all) + r * bytes);
    }
  });
}

keyhole_status keyhole_communicator_gather_on_stream(keyhole_communicator* communicator,
                                                     const void* own, void* all, size_t bytes,
                                                     void* stream) {
  return guarded([&] {
    require(communicator, "communicator");
    require(own, "own");
    require(all, "all");
    if (bytes == 0) throw Error(Status::invalid_argument, "bytes is 0, allowed: at least 1");
    communicator->communicator->gather_on_stream(own, all, bytes, stream);
  });
}

keyhole_status keyhole_communicator_sum(keyhole_communicator* communicator, float* values,
                                        size_t count) {
  return guarded([&] {
    require(communicator, "communicator");
    if (count != 0) require(values, "values");
    communicator->communicator->sum({values, count});
  });
}

keyhole_status keyhole_communicator_broadcast(keyhole_communicator* communicator, void* data,
                                              size_t bytes, uint32_t root) {
  return guarded([&] {
    require(communicator, "communicator");
    if (bytes != 0) require(data, "data");
    communicator->communicator->broadcast({static_cast<std::byte*>(data), bytes}, root);
  });
}

}  // extern "C"
