// Runs steps that choose among lists of codes, in every way that the device has, and checks them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "tests/gpu/list_layer.h"

namespace keyhole::gpu::test {

/// Runs a step in every way, and checks it.
inline void run_every_way(ListLayer& layer) {
  for (const ListWay& way : layer.ways()) {
    SCOPED_TRACE(way.name());
    layer.take(way);
    layer.run();
    layer.check();
  }
  layer.take({});
}

/// Steps in every way, and others with other queries behind more rows that no list has.
inline void run_case(const ListCase& c) {
  if (!c.is_chosen_here()) return;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed) + ", dim " + std::to_string(c.dim) + ", bits " +
               std::to_string(c.bits) + ", group " + std::to_string(c.group) + ", tokens " +
               std::to_string(c.tokens) + ", lists of " + std::to_string(c.list_rows) + ", share " +
               std::to_string(c.share));
  ListLayer layer(c, seed);
  ASSERT_EQ(layer.codes().listed(0), c.listed * kCodeBlock);
  ASSERT_NE(layer.step().lists.list_capacity, 0U);
  run_every_way(layer);
  layer.draw_queries();
  layer.append(1);
  run_every_way(layer);
}

}  // namespace keyhole::gpu::test
