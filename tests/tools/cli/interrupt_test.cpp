#include <gtest/gtest.h>

#include <csignal>

#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

TEST(Interrupt, EndsWorkWithItsOwnExitCodeAndWithoutFiles) {
  std::mt19937 random(1);
  SyntheticShape shape;
  shape.layers = 1;
  shape.kv_heads = 1;
  shape.tokens = 40000;  // seconds of building
  const TemporaryFolder folder;
  make_synthetic_trace(shape, random).write(folder / "t.safetensors");
  const std::string out = folder / "result.json";
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    SCOPED_TRACE(signal);
    Command command(
        {"compare", "--trace", folder / "t.safetensors", "--index", "hnsw:M=64", "--json", out});
    command.interrupt(signal);
    const Outcome outcome = command.wait();
    EXPECT_EQ(outcome.exit_code, 128 + signal) << outcome.err;
    EXPECT_EQ(outcome.err, "keyhole: interrupted\n");
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_EQ(files_in(folder.path()), 1U) << "the trace alone";
  }
}

}  // namespace
}  // namespace keyhole::tools
