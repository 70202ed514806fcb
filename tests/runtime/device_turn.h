// New tokens of a layer in device memory, and the answers to them. Vector: floats there, as in
// tests/runtime/device_vector.h.
#pragma once

#include <cmath>
#include <vector>

#include "tests/runtime/new_tokens.h"

namespace keyhole::test {

template <class Vector>
struct DeviceTurn {
  DeviceTurn(const Shape& of, uint32_t n, Numbers& numbers)
      : shape(of),
        host(new_tokens(of, n, numbers)),
        q(of.q(n)),
        k(of.kv(n)),
        v(of.v(n)),
        out(of.o(n)),
        lse(static_cast<size_t>(n * of.hq)) {}

  /// Copies the host's numbers to the device, on its stream.
  template <class Stream>
  void fill(Stream stream) {
    q.set(host.q, stream);
    k.set(host.k, stream);
    v.set(host.v, stream);
    out.set(std::vector<float>(host.answer.o.size(), NAN), stream);
    lse.set(std::vector<float>(host.answer.lse.size(), NAN), stream);
  }
  /// Copies the answers to the host's; waits.
  void fetch() { host.answer = {out.get(), lse.get()}; }

  keyhole_status append(keyhole_session* s, uint32_t layer) {
    const keyhole_tensor tk = rows(k, shape.hkv), tv = rows(v, shape.hkv);
    return keyhole_session_append(s, layer, &tk, &tv, nullptr);
  }
  keyhole_status extend(keyhole_session* s, uint32_t layer, const uint64_t* mask = nullptr) {
    const keyhole_tensor tq = rows(q, shape.hq), tk = rows(k, shape.hkv), tv = rows(v, shape.hkv),
                         to = rows(out, shape.hq);
    return keyhole_session_extend(s, layer, &tq, &tk, &tv, mask, &to, sums());
  }
  keyhole_status extend_batch(const std::vector<keyhole_session*>& sessions, uint32_t layer,
                              const uint32_t* start) {
    const keyhole_tensor tq = rows(q, shape.hq), tk = rows(k, shape.hkv), tv = rows(v, shape.hkv),
                         to = rows(out, shape.hq);
    return keyhole_session_extend_batch(sessions.data(), static_cast<uint32_t>(sessions.size()),
                                        layer, &tq, &tk, &tv, start, &to, sums(), nullptr);
  }
  /// A step, of a single token. halves: as attend_begin and attend_end.
  keyhole_status attend(keyhole_session* s, uint32_t layer, bool halves) {
    const keyhole_tensor tq = q.tensor({shape.hq, shape.d}), tk = k.tensor({shape.hkv, shape.d}),
                         tv = v.tensor({shape.hkv, shape.d}), to = out.tensor({shape.hq, shape.d});
    if (!halves) return keyhole_session_attend(s, layer, &tq, &tk, &tv, &to, sums());
    const keyhole_status status = keyhole_session_attend_begin(s, layer, &tq, &tk, &tv);
    return status != KEYHOLE_OK ? status : keyhole_session_attend_end(s, &to, sums());
  }

  Shape shape;
  NewTokens host;
  Vector q, k, v, out, lse;

 private:
  keyhole_tensor rows(Vector& x, int64_t heads) {
    return x.tensor({static_cast<int64_t>(host.n), heads, shape.d});
  }
  float* sums() {
    return static_cast<float*>(lse.tensor({static_cast<int64_t>(host.n) * shape.hq}).data);
  }
};

}  // namespace keyhole::test
