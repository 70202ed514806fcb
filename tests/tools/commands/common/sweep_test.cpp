// Sweeps: which specs they stand for, and which they refuse.
#include "tools/commands/common/sweep.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

using Specs = std::vector<std::string>;

TEST(Sweep, StandsForEveryCombination) {
  EXPECT_EQ(expand_sweep("flat"), Specs{"flat"});
  EXPECT_EQ(expand_sweep("ivf:probe=8"), Specs{"ivf:probe=8"});
  EXPECT_EQ(expand_sweep("ivf:C=1|2,probe=8|a"),
            (Specs{"ivf:C=1,probe=8", "ivf:C=1,probe=a", "ivf:C=2,probe=8", "ivf:C=2,probe=a"}));
  // What is wrong with a spec is for its reader to say.
  EXPECT_EQ(expand_sweep("ivf:probe"), Specs{"ivf:probe"});
  EXPECT_EQ(expand_sweep("ivf:"), Specs{"ivf:"});
}

TEST(Sweep, RangesMultiplyOrAdd) {
  EXPECT_EQ(expand_sweep("hnsw:ef=32..512*2"),
            (Specs{"hnsw:ef=32", "hnsw:ef=64", "hnsw:ef=128", "hnsw:ef=256", "hnsw:ef=512"}));
  EXPECT_EQ(expand_sweep("ivf:probe=8..32+8"),
            (Specs{"ivf:probe=8", "ivf:probe=16", "ivf:probe=24", "ivf:probe=32"}));
  EXPECT_EQ(expand_sweep("ivf:probe=0..5+2"), (Specs{"ivf:probe=0", "ivf:probe=2", "ivf:probe=4"}));
  EXPECT_EQ(expand_sweep("ivf:probe=5..5*3"), Specs{"ivf:probe=5"});
  EXPECT_EQ(expand_sweep("ivf:C=1|10..100*10,probe=1..2+1"),
            (Specs{"ivf:C=1,probe=1", "ivf:C=1,probe=2", "ivf:C=10,probe=1", "ivf:C=10,probe=2",
                   "ivf:C=100,probe=1", "ivf:C=100,probe=2"}));
  // Up to the largest number, without overflow.
  EXPECT_EQ(expand_sweep("a:b=9223372036854775806..9223372036854775807+1").size(), 2U);
  EXPECT_EQ(expand_sweep("a:b=4611686018427387904..9223372036854775807*2").size(), 1U);
  EXPECT_EQ(expand_sweep("a:b=1..9223372036854775807*2").size(), 63U);
}

TEST(Sweep, RangesAreTheNumbersOfTheirDefinition) {
  std::mt19937 random(std::random_device{}());
  for (size_t i = 0; i < 200; ++i) {
    const bool multiplies = random() % 2 == 0;
    const uint64_t first = 1 + random() % 50;
    const uint64_t last = first + random() % 1000;
    const uint64_t by = 2 + random() % 9;
    Specs expected;
    for (uint64_t n = first; n <= last; n = multiplies ? n * by : n + by) {
      expected.push_back("x:n=" + std::to_string(n));
    }
    const std::string range = std::to_string(first) + ".." + std::to_string(last) +
                              (multiplies ? "*" : "+") + std::to_string(by);
    EXPECT_EQ(expand_sweep("x:n=" + range), expected) << range;
  }
}

TEST(Sweep, RefusesWhatIsNoRange) {
  const auto refused = [](const std::string& spec, const std::string& part) {
    try {
      (void)expand_sweep(spec);
      ADD_FAILURE() << spec;
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << spec << ": " << e.what();
    }
  };
  refused("hnsw:ef=32..512", "ef=32..512: how it goes on");
  refused("hnsw:ef=32..512", "first..last*factor or first..last+step");
  refused("hnsw:ef=16|..512*2", "ef=..512*2: '' is no whole number");
  refused("hnsw:ef=32..*2", "'' is no whole number");
  refused("hnsw:ef=32..512*", "'' is no whole number");
  refused("hnsw:ef=32..512*2*2", "'2*2' is no whole number");
  refused("hnsw:ef=a..b*2", "'a' is no whole number");
  refused("hnsw:ef=-4..8+4", "'-4' is no whole number");
  refused("hnsw:ef=1.5..8+4", "'1.5' is no whole number");
  refused("hnsw:ef=1...8+4", "'.8' is no whole number");
  refused("hnsw:ef=1..9223372036854775808+4", "'9223372036854775808' is no whole number");
  refused("hnsw:ef=512..32*2", "512 is above 32");
  refused("hnsw:ef=32..512*1", "32 times 1 does not grow");
  refused("hnsw:ef=0..512*2", "0 times 2 does not grow");
  refused("hnsw:ef=32..512+0", "a step of 0");
  refused("hnsw:ef=1..10001+1", "more than 10000 numbers");
  refused("hnsw:ef=1..200+1,M=1..100+1", "more than 10000 combinations");
}

}  // namespace
}  // namespace keyhole::tools
