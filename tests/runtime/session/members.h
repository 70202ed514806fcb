// Sessions beside the tokens that they should hold.
#pragma once

#include "tests/runtime/fixture.h"

namespace keyhole::test {

struct Member {
  SessionPtr session;
  Model model;
};

}  // namespace keyhole::test
