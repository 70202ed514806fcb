// The forecast against a layer that is played token by token.
#include "runtime/stream/offload_forecast.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <string>

namespace keyhole::runtime {
namespace {

/// The tokens of a layer by name, moved as gpu/step.h says.
struct Layer {
  uint32_t sink, window, capacity;
  uint32_t in_sink = 0;
  std::deque<uint32_t> in_window{};
  uint64_t offloaded = 0;

  void append(uint32_t token) {
    if (in_sink < sink) {
      in_sink += 1;
      return;
    }
    if (in_window.size() == capacity) {
      while (in_window.size() > window - 1) {
        in_window.pop_front();
        offloaded += 1;
      }
    }
    in_window.push_back(token);
  }
};

TEST(OffloadForecast, IsWhatHappens) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    const uint32_t sink = below(5), window = 1 + below(8), capacity = window + below(6);
    Layer layer{sink, window, capacity};
    const uint32_t before = below(40);
    for (uint32_t t = 0; t < before; ++t) layer.append(t);
    OffloadForecast forecast(2, sink, window, capacity);
    const auto size = [&] { return static_cast<uint32_t>(layer.in_window.size()); };
    forecast.reset(1, {layer.in_sink, size()});
    // Many at once, against one after the other.
    for (uint32_t n = 0; n < 40; ++n) {
      Layer played = layer;
      for (uint32_t t = 0; t < n; ++t) played.append(t);
      ASSERT_EQ(forecast.offloaded(1, n), played.offloaded - layer.offloaded)
          << "sink " << sink << ", window " << window << " of " << capacity << ", holding "
          << layer.in_sink << " + " << size() << ", appending " << n;
    }
    for (uint32_t t = 0; t < 60; ++t) {
      const uint64_t offloaded = layer.offloaded;
      layer.append(t);
      ASSERT_EQ(forecast.offloaded(1, 1), layer.offloaded - offloaded);
      forecast.append(1);
    }
    EXPECT_EQ(forecast.offloaded(0, sink + capacity), 0U) << "a layer of its own, empty";
  }
}

}  // namespace
}  // namespace keyhole::runtime
