// Stored K and V handed back.
#include <optional>

#include "keyhole/inspect.h"
#include "runtime/api/session_call.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

extern "C" {

keyhole_status keyhole_session_get_rows(keyhole_session* session, uint32_t layer, uint32_t first,
                                        const keyhole_tensor* k, const keyhole_tensor* v) {
  return with_session(session, Needs::copy, [&](SessionInterface& s) {
    s.check_takes("keyhole_session_get_rows");
    const ModelShape& model = s.engine().model();
    check_layer(model, layer);
    const LayerShape m = model.of(layer);
    if (k == nullptr && v == nullptr) {
      throw Error(Status::invalid_argument, "k and v are NULL, needed: one of them");
    }
    if (v != nullptr && model.values_in_keys) {
      throw Error(Status::invalid_argument,
                  "tensor v is given, but the engine was made with values_in_keys; allowed: NULL");
    }
    const uint32_t n = k != nullptr ? check_rows(k, "k", m.kv_heads, m.head_dim, false).tokens
                                    : check_rows(v, "v", m.kv_heads, m.value_dim, false).tokens;
    std::optional<TensorOut> keys, values;
    if (k != nullptr) keys = check_many_out(k, "k", n, m.kv_heads, m.head_dim);
    if (v != nullptr) values = check_many_out(v, "v", n, m.kv_heads, m.value_dim);
    s.read_rows(layer, first, n, keys ? &*keys : nullptr, values ? &*values : nullptr);
  });
}

}  // extern "C"
