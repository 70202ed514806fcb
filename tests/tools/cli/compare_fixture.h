// What the tests of compare share: a synthetic trace in a folder of its own, and compare's JSON.
#pragma once

#include <gtest/gtest.h>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {

class CompareFixture : public testing::Test {
 protected:
  using json = nlohmann::json;

  static constexpr size_t kSink = 16;
  static constexpr size_t kWindow = 32;

  CompareFixture() : seed_(std::random_device{}()), random_(seed_) {}

  [[nodiscard]] std::string write(const SyntheticTrace& trace,
                                  const std::string& name = "t.safetensors") const {
    trace.write(folder_ / name);
    return folder_ / name;
  }

  /// Runs compare with fp32 storage and returns its JSON; out_ has what it printed.
  json compare(const std::string& trace, std::vector<std::string> args) {
    const std::string out = folder_ / "result.json";
    const std::vector<std::string> common = {"compare",
                                             "--trace",
                                             trace,
                                             "--sink",
                                             std::to_string(kSink),
                                             "--window",
                                             std::to_string(kWindow),
                                             "--kv-dtype",
                                             "f32",
                                             "--json",
                                             out};
    args.insert(args.begin(), common.begin(), common.end());
    const Outcome outcome = run_keyhole(args);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    out_ = outcome.out;
    return json::parse(read_file(out));
  }
  json compare(const SyntheticTrace& trace, std::vector<std::string> args) {
    return compare(write(trace), std::move(args));
  }

  unsigned seed_;
  std::mt19937 random_;
  TemporaryFolder folder_;
  std::string out_;
};

}  // namespace keyhole::tools
