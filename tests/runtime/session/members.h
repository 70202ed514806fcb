// Sessions beside the tokens that they should hold, and copies of them.
#pragma once

#include "keyhole/save.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

struct Member {
  SessionPtr session;
  Model model;
};

inline SessionPtr fork(keyhole_session* s) {
  keyhole_session* copy = nullptr;
  EXPECT_OK(keyhole_session_fork(s, &copy));
  return SessionPtr(copy);
}

}  // namespace keyhole::test
