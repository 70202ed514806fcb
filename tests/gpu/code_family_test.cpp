// Families of copied layers: what a step of several members may read once. Needs no GPU.
#include "gpu/code_family.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace keyhole::gpu {
namespace {

/// A layer whose blocks are numbers, of which no two are alike but by a copy.
struct Layer {
  std::vector<int> blocks;
  CodeFamily family;

  [[nodiscard]] uint32_t count() const { return static_cast<uint32_t>(blocks.size()); }
  void grow(uint32_t n, int& next) {
    family.cut(count());
    for (uint32_t i = 0; i < n; ++i) blocks.push_back(next++);
  }
  void cut(uint32_t n) {
    family.cut(n);
    blocks.resize(n);
  }
  [[nodiscard]] Layer copy() { return {blocks, family.copied(count())}; }
  /// What a step together with `other` reads once, where both are in one family.
  [[nodiscard]] uint32_t read_once(const Layer& other) const {
    return std::min({family.shared(), other.family.shared(), count(), other.count()});
  }
  /// The first blocks that are the same.
  [[nodiscard]] uint32_t common(const Layer& other) const {
    uint32_t n = 0;
    while (n < count() && n < other.count() && blocks[n] == other.blocks[n]) ++n;
    return n;
  }
};

TEST(CodeFamily, AGraphOfTwoStaysRightWhenOneIsCopied) {
  int next = 0;
  Layer one;
  one.grow(117, next);
  Layer zero = one.copy();
  zero.cut(23);
  zero.grow(27, next);
  // A graph of both is captured here.
  ASSERT_EQ(zero.family.id(), one.family.id());
  EXPECT_EQ(zero.read_once(one), 23U);
  const Layer two = zero.copy();
  EXPECT_EQ(zero.read_once(one), 23U);
  EXPECT_LE(two.read_once(zero), 50U);
}

TEST(CodeFamily, CopiesShareAllUntilOneIsCut) {
  int next = 0;
  Layer first;
  first.grow(40, next);
  EXPECT_EQ(first.family.id(), nullptr);
  Layer second = first.copy(), third = second.copy();
  EXPECT_EQ(first.family.id(), third.family.id());
  EXPECT_EQ(first.read_once(third), 40U);
  third.grow(5, next);
  EXPECT_EQ(first.read_once(third), 40U);
  second.cut(12);
  EXPECT_EQ(first.read_once(second), 12U);
  EXPECT_EQ(first.read_once(third), 40U);
}

TEST(CodeFamily, ALayerWhoseCopiesHaveGoneSharesAllWithANewOne) {
  int next = 0;
  Layer layer;
  layer.grow(40, next);
  { const Layer gone = layer.copy(); }
  layer.cut(3);
  layer.grow(90, next);
  const Layer copy = layer.copy();
  EXPECT_EQ(layer.family.id(), copy.family.id());
  EXPECT_EQ(layer.read_once(copy), 93U);
}

// Random copies, cuts and new blocks beside graphs that were captured on the way: none ever reads once what its members
// do not have in common.
TEST(CodeFamily, NoGraphReadsOnceWhatDiffers) {
  struct Graph {
    size_t a, b;
  };
  size_t asked = 0, shared = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return static_cast<uint32_t>(random() % n); };
    int next = 0;
    std::vector<Layer> layers(1);
    layers.reserve(8);
    layers[0].grow(20 + below(100), next);
    std::vector<Graph> graphs;
    for (int step = 0; step < 60; ++step) {
      Layer& layer = layers[below(layers.size())];
      switch (below(4)) {
        case 0:
          if (layers.size() < 8 && layer.count() != 0) layers.push_back(layer.copy());
          break;
        case 1: layer.cut(below(layer.count() + 1)); break;
        case 2: layer.grow(below(60), next); break;
        default: {
          const size_t a = below(layers.size()), b = below(layers.size());
          const void* const id = layers[a].family.id();
          if (a != b && id != nullptr && id == layers[b].family.id()) graphs.push_back({a, b});
        }
      }
      for (const Graph& g : graphs) {
        const uint32_t once = layers[g.a].read_once(layers[g.b]);
        ASSERT_LE(once, layers[g.a].common(layers[g.b])) << "seed " << seed << ", step " << step;
        ++asked;
        shared += once != 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(shared, asked / 10);
}

}  // namespace
}  // namespace keyhole::gpu
