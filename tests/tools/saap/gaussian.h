// Random numbers of the tests of training.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

#include "tests/normal.h"

namespace keyhole::tools {

inline std::vector<float> gaussian(size_t n, float deviation, std::mt19937& random) {
  keyhole::test::Normal<float> normal(0.0F, deviation);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

}  // namespace keyhole::tools
