// What bench-step says of a step by codes beside the time in which a copy moves as many bytes.
#include "tools/commands/bench_step/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace keyhole::tools {
namespace {

keyhole_statistics of_codes(uint32_t layers, uint64_t bytes) {
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  s.code_layers = layers;
  s.code_bytes = bytes;
  return s;
}

TEST(CodesFloor, IsTheBytesOfALayerAtTheSpeedOfCopies) {
  // 8 layers of 150 MB at 3 TB/s: 50 us each.
  EXPECT_DOUBLE_EQ(codes_floor(of_codes(8, 1'200'000'000), 8, 3e12).value(), 50.0);
}

TEST(CodesFloor, NeedsCodesOfAllLayersAndASpeed) {
  EXPECT_FALSE(codes_floor(of_codes(7, 1'200'000'000), 8, 3e12));
  EXPECT_FALSE(codes_floor(of_codes(8, 1'200'000'000), 8, 0));
  EXPECT_FALSE(codes_floor(of_codes(0, 0), 0, 3e12));
}

TEST(StepReport, SaysTheShareOfTheFloorInALayersTime) {
  StepResult result;
  result.name = "codes";
  result.timing.emplace();
  keyhole_statistics_init(&result.timing->statistics);
  result.timing->layer = {80, 80, 80, 80};
  result.timing->token = {800, 800, 800, 800};
  EXPECT_TRUE(to_json(result)["codes_floor_us"].is_null());
  EXPECT_TRUE(to_json(result)["share_of_codes_floor"].is_null());
  EXPECT_EQ(to_text(result).find("speed of copies"), std::string::npos);

  result.codes_floor = 50;
  EXPECT_DOUBLE_EQ(to_json(result)["share_of_codes_floor"], 0.625);
  // Layers of a graph lie closer together than those that events keep apart.
  result.timing->layer_in_token = 62.5;
  EXPECT_DOUBLE_EQ(to_json(result)["codes_floor_us"], 50.0);
  EXPECT_DOUBLE_EQ(to_json(result)["share_of_codes_floor"], 0.8);
  EXPECT_NE(to_text(result).find("at the speed of copies 50"), std::string::npos);
  EXPECT_NE(to_text(result).find("80 % of its time"), std::string::npos) << to_text(result);
}

}  // namespace
}  // namespace keyhole::tools
