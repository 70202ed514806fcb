// What a session's audits have found.
#pragma once

#include "keyhole/inspect.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

inline keyhole_audit audit_of(keyhole_session* s, uint32_t layer = KEYHOLE_ALL,
                              uint32_t kv_head = KEYHOLE_ALL) {
  keyhole_audit a;
  keyhole_audit_init(&a);
  EXPECT_OK(keyhole_session_get_audit(s, layer, kv_head, &a));
  return a;
}

}  // namespace keyhole::test
