// Layers of different shapes, divided into those that are alike: what the parts are made of, and that they are counted
// as what they are.
#include "gpu/layer_kinds.h"

#include <gtest/gtest.h>

namespace keyhole::gpu {
namespace {

constexpr LayerShape kWide{8, 2, 128, 128}, kNarrow{4, 4, 64, 64}, kNone{4, 0, 64, 64};

/// Layers 0 and 3 are wide, 2 and 4 narrow, 1 has nothing.
const std::vector<LayerShape> kShapes{kWide, kNone, kNarrow, kWide, kNarrow};

std::vector<LogitParams> logits() {
  std::vector<LogitParams> all;
  for (uint32_t l = 0; l < kShapes.size(); ++l) all.push_back({0.1F + static_cast<float>(l), 0.0F});
  return all;
}

/// The shape of these layers alone, which all have the same heads.
template <class Shape>
Shape alone(Shape s, const LayerShape& heads, const std::vector<uint32_t>& layers) {
  s.shapes.clear();
  s.q_heads = heads.q_heads;
  s.kv_heads = heads.kv_heads;
  s.layers = static_cast<uint32_t>(layers.size());
  s.layer_logits.clear();
  for (const uint32_t l : layers) s.layer_logits.push_back(logits()[l]);
  return s;
}

ResidentShape resident() {
  ResidentShape s;
  s.layers = 5;
  s.sink = 3;
  s.window_capacity = 40;
  s.window = 20;
  s.layer_logits = logits();
  s.shapes = kShapes;
  return s;
}

TEST(LayerKinds, ALayerIsWithThoseOfItsShape) {
  const LayerKinds kinds(kShapes);
  ASSERT_EQ(kinds.count(), 2U);
  EXPECT_EQ(kinds.layers(0), (std::vector<uint32_t>{0, 3}));
  EXPECT_EQ(kinds.layers(1), (std::vector<uint32_t>{2, 4}));
  EXPECT_EQ(kinds.at(3).kind, 0U);
  EXPECT_EQ(kinds.at(3).layer, 1U);
  EXPECT_FALSE(kinds.has(1));
  EXPECT_FALSE(kinds.has(5));
  EXPECT_THROW((void)kinds.at(1), Error);
  EXPECT_THROW((void)kinds.at(5), Error);
}

TEST(LayerKinds, ResidentPartsAreThoseOfAModelOfTheirLayers) {
  const ResidentShape shape = resident();
  const std::vector<ResidentShape> parts = parts_of(shape);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].head_dim, 128U);
  EXPECT_EQ(parts[1].head_dim, 64U);
  EXPECT_EQ(parts[1].q_heads, 4U);
  EXPECT_EQ(parts[1].window_capacity, 40U);
  EXPECT_EQ(parts[1].number_of(1), 4U);
  EXPECT_EQ(parts[1].logits_of(1), logits()[4]);
  ResidentShape wide = alone(shape, kWide, {0, 3}), narrow = alone(shape, kNarrow, {2, 4});
  wide.head_dim = 128;
  narrow.head_dim = 64;
  EXPECT_EQ(resident_bytes(shape), resident_bytes(wide) + resident_bytes(narrow));
  EXPECT_EQ(cuda_resident_bytes(shape), cuda_resident_bytes(wide) + cuda_resident_bytes(narrow));
  EXPECT_EQ(cuda_pinned_bytes(shape), cuda_pinned_bytes(wide) + cuda_pinned_bytes(narrow));
}

TEST(LayerKinds, CodesAreOfTheLayersThatHaveSome) {
  CodesShape shape;
  shape.layers = 5;
  shape.code = {0, 4, 4};
  shape.blocks = 7;
  shape.exact_rows = 16;
  shape.layer_logits = logits();
  shape.shapes = kShapes;
  shape.coded = {1, 0, 0, 1, 1};
  std::vector<float> sinks;
  for (uint32_t l = 0; l < 5; ++l)
    sinks.insert(sinks.end(), kShapes[l].q_heads, static_cast<float>(l));
  shape.sinks = sinks.data();
  std::vector<float> own;
  const std::vector<CodesShape> parts = parts_of(shape, own);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].coded_layers, 2U);
  EXPECT_EQ(parts[1].coded_layers, 1U);
  EXPECT_EQ(parts[1].layers, 2U) << "numbers of layers are those of the resident tokens";
  EXPECT_EQ(parts[0].code.dim, 128U);
  for (uint32_t h = 0; h < 8; ++h) {
    EXPECT_EQ(parts[0].sinks[h], 0.0F);
    EXPECT_EQ(parts[0].sinks[8 + h], 3.0F);
    EXPECT_EQ(parts[1].sinks[h], h < 4 ? 2.0F : 4.0F);
  }
  for (const bool by_host : {false, true}) {
    shape.rows_by_host = by_host;
    CodesShape wide = alone(shape, kWide, {0, 3}), narrow = alone(shape, kNarrow, {2, 4});
    wide.code.dim = 128;
    wide.coded_layers = 2;
    narrow.code.dim = 64;
    narrow.coded_layers = 1;
    EXPECT_EQ(codes_bytes(shape), codes_bytes(wide) + codes_bytes(narrow));
    EXPECT_EQ(codes_pinned_bytes(shape), codes_pinned_bytes(wide) + codes_pinned_bytes(narrow));
    shape.coded = {1, 0, 0, 1, 0};
    EXPECT_EQ(codes_bytes(shape), codes_bytes(wide)) << "a shape without codes takes nothing";
    shape.coded = {1, 0, 0, 1, 1};
  }
  EXPECT_EQ(why_no_codes(shape), "");
  shape.code = {0, 1, 4};
  EXPECT_NE(why_no_codes(shape), "");
}

TEST(LayerKinds, WindowsLikewise) {
  WindowsShape w;
  w.shapes = {kNarrow, kWide, kNarrow};
  for (uint32_t l = 0; l < 3; ++l) w.layers.push_back({l, 10 + l, 20 + l, {}});
  for (uint32_t l = 0; l < 3; ++l)
    w.sinks.insert(w.sinks.end(), w.shapes[l].q_heads, static_cast<float>(l));
  const std::vector<WindowsShape> parts = parts_of(w);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].layers[1].number, 2U);
  EXPECT_EQ(parts[0].sinks, (std::vector<float>{0, 0, 0, 0, 2, 2, 2, 2}));
  EXPECT_EQ(parts[1].sinks, std::vector<float>(8, 1.0F));
  EXPECT_EQ(windows_bytes(w), windows_bytes(parts[0]) + windows_bytes(parts[1]));
  EXPECT_GT(windows_bytes(parts[1]), uint64_t{2} * 2 * 128 * 2 * 21) << "its ring at least";
}

}  // namespace
}  // namespace keyhole::gpu
