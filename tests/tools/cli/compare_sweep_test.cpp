// Sweeps from run files, and sweeps that were stopped.
#include <sys/file.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <regex>

#include "tests/tools/cli/compare_fixture.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class CompareSweep : public CompareFixture {
 protected:
  void SetUp() override {
    trace_ = write(make_synthetic_trace({}, random_));
    rows_ = folder_ / "rows.jsonl";
  }
  static json without_times(json rows) {
    for (json& row : rows) {
      for (const char* name : {"latency_us", "build_s", "tail_build_s", "series"}) row.erase(name);
    }
    return rows;
  }
  [[nodiscard]] Outcome resumed(const std::string& k = "20") const {
    return run_keyhole({"compare", "--trace", trace_, "--sink", "16", "--window", "32",
                        "--kv-dtype", "f32", "--index", "flat", "--k", k, "--resume", rows_});
  }

  std::string trace_, rows_;
};

TEST_F(CompareSweep, ARunFileIsAsACommandLine) {
  write_file(folder_ / "runs.json", std::string(R"({"format": "keyhole-runs", "version": 1,
    "trace": "t.safetensors", "options": {"k": 20, "queries": 3, "sink": 999}, "tail": ["none"], "goals": ["error=0.9"],
    "runs": [{"index": "flat", "attend": ["topk:20"]},
             {"index": "ivf", "args": {"C": 16}, "query_args": {"probe": [1, 4]}, "attend": ["topk:20", "scored"], "tail": ["none", "second"]},
             {"rival": "random", "args": {"budget": 32}}]})"));
  // What the command line says goes first: sink 16. Its own --index comes behind the file's.
  const json file = compare(
      trace_, {"--runs", folder_ / "runs.json", "--index", "hnsw:M=4", "--attend", "scored"});
  const json flat =
      compare(trace_, {"--k", "20", "--queries", "3", "--index", "flat", "--attend", "topk:20"});
  const json ivf =
      compare(trace_, {"--k", "20", "--queries", "3", "--index", "ivf:C=16,probe=1|4", "--attend",
                       "topk:20", "--attend", "scored", "--tail", "none", "--tail", "second"});
  ASSERT_EQ(file["summary"].size(), 1U + 8 + 1 + 1);
  EXPECT_EQ(file["options"]["sink"], 16);
  EXPECT_EQ(file["options"]["queries"], 3);
  EXPECT_EQ(file["advice"]["goals"][0]["text"], "error=0.9");
  json first = json::array(), second = json::array();
  for (size_t i = 0; i < 4; ++i) first.push_back(file["results"][i]);
  for (size_t i = 4; i < 36; ++i) second.push_back(file["results"][i]);
  EXPECT_EQ(without_times(first), without_times(flat["results"]));
  EXPECT_EQ(without_times(second), without_times(ivf["results"]));
  EXPECT_EQ(file["summary"][9]["index"], "hnsw:M=4");
  EXPECT_EQ(file["summary"][9]["attend"], "scored");
  EXPECT_EQ(file["summary"][10]["index"], "random:budget=32");
}

TEST_F(CompareSweep, RefusesRunFilesThatCannotBe) {
  const auto refused = [&](const std::string& text, const std::string& part) {
    write_file(folder_ / "runs.json", text);
    const Outcome outcome =
        run_keyhole({"compare", "--runs", folder_ / "runs.json", "--sink", "16", "--window", "32"});
    expect_failure(outcome, 2, part);
    EXPECT_EQ(outcome.out, "");
  };
  const std::string head = R"({"format": "keyhole-runs", "version": 1, "trace": "t.safetensors", )";
  refused("{", "no JSON");
  refused(head + R"("options": {"k": "many"}, "runs": [{"index": "flat"}]})", "options: ");
  refused(head + R"("runs": [{"index": "annoy"}]})", "annoy");
  refused(head + R"("runs": [{"index": "ivf", "args": {"probe": "8..2*2"}}]})", "8 is above 2");
  refused(head + R"("runs": [{"index": "flat"}, {"index": "flat"}]})", "twice");
  refused(head + R"("runs": [{"index": "flat", "attend": ["best"]}]})", "best");
  refused(R"({"format": "keyhole-runs", "version": 1, "runs": [{"index": "flat"}]})",
          "--trace is missing");
}

TEST_F(CompareSweep, GoesOnWhereItStopped) {
  const std::vector<std::string> first = {
      "--k", "20", "--index", "flat", "--index", "ivf:C=16,probe=1|4", "--resume", rows_};
  const json before = compare(trace_, first);
  ASSERT_EQ(before["results"].size(), 12U);
  std::string text = read_file(rows_);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 13);

  // The same again measures nothing: all times are the same, to the last digit. So with more indexes and rivals.
  json again = compare(trace_, first);
  EXPECT_EQ(again["results"], before["results"]);
  EXPECT_EQ(again["summary"], before["summary"]);
  EXPECT_EQ(read_file(rows_), text);
  std::vector<std::string> more = first;
  more.insert(more.end(), {"--index", "hnsw:M=4", "--rival", "random:budget=32"});
  again = compare(trace_, more);
  ASSERT_EQ(again["results"].size(), 20U);
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(again["results"][i], before["results"][i]) << i;
  // What is not asked for stays in the file.
  EXPECT_EQ(compare(trace_, first)["results"], before["results"]);

  // A machine that stopped within a write leaves half a row: it goes, and is measured again.
  text = read_file(rows_);
  const std::string cut = text.substr(0, text.size() - 40);
  write_file(rows_, cut);
  const json mended = compare(trace_, more);
  EXPECT_EQ(without_times(mended["results"]), without_times(again["results"]));
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(mended["results"][i], again["results"][i]) << i;
  const std::string whole = cut.substr(0, cut.rfind('\n') + 1);
  EXPECT_EQ(read_file(rows_).substr(0, whole.size()), whole);
  // In the header it can be cut as well.
  write_file(rows_, text.substr(0, 30));
  EXPECT_EQ(compare(trace_, first)["results"].size(), 12U);
}

TEST_F(CompareSweep, MixesNoTwoComparisons) {
  ASSERT_EQ(resumed().exit_code, 0);
  const std::string text = read_file(rows_);
  const auto refused = [&](const Outcome& outcome, const std::string& part) {
    expect_failure(outcome, 2, part);
    EXPECT_NE(outcome.err.find("rows.jsonl"), std::string::npos) << outcome.err;
  };
  refused(resumed("10"), "options.k is 20 there and 10 here");
  EXPECT_EQ(read_file(rows_), text);
  {
    const int held = open(rows_.c_str(), O_RDONLY);
    ASSERT_EQ(flock(held, LOCK_EX), 0);
    refused(resumed(), "another process");
    close(held);
  }
  for (const std::string& other : {std::string("index,attend\n"), std::string("{\"a\": 1}\n"),
                                   std::string("a letter"), text + "{\"index\": \"flat\"}\n"}) {
    write_file(rows_, other);
    const Outcome outcome = resumed();
    refused(outcome, other.size() > text.size() ? "line 6 is no row" : "is no file of results");
    EXPECT_EQ(read_file(rows_), other) << "it is somebody's: it stays as it is";
  }
  expect_failure(run_keyhole({"compare", "--trace", trace_, "--sink", "16", "--window", "32",
                              "--index", "flat", "--resume", folder_ / "none" / "rows.jsonl"}),
                 1, "rows.jsonl");
}

TEST_F(CompareSweep, AnInterruptLosesNoRow) {
  SyntheticShape shape;
  shape.layers = shape.kv_heads = 1;
  shape.tokens = 30000;
  const std::string trace = write(make_synthetic_trace(shape, random_), "long.safetensors");
  const std::vector<std::string> args = {"compare", "--trace",   trace,      "--index", "flat",
                                         "--index", "hnsw:M=64", "--resume", rows_};
  {
    Command command(args);
    // The first index is in the file long before the second is built.
    for (int i = 0;
         i < 6000 && (!std::filesystem::exists(rows_) || std::filesystem::file_size(rows_) == 0 ||
                      read_file(rows_).find("\"flat\"") == std::string::npos);
         ++i) {
      usleep(10000);
    }
    command.interrupt();
    const Outcome outcome = command.wait();
    expect_failure(outcome, 130, "rows.jsonl holds the rows that are measured, 1 so far");
    EXPECT_NE(outcome.err.find("keyhole: interrupted\n"), std::string::npos) << outcome.err;
  }
  const std::string text = read_file(rows_);
  ASSERT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  std::vector<std::string> rest = args;
  rest[6] = "ivf:C=16";  // in place of the slow one
  const Outcome outcome = run_keyhole(rest);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(read_file(rows_).substr(0, text.size()), text);
}

TEST_F(CompareSweep, TellsTheTimeLeftOnATerminal) {
  SyntheticShape shape;
  shape.layers = shape.kv_heads = 1;
  shape.tokens = 30000;
  const std::string trace = write(make_synthetic_trace(shape, random_), "long.safetensors");
  Command command({"compare", "--trace", trace, "--index", "flat", "--index", "hnsw:M=64"},
                  {{"NO_COLOR", "1"}, {"TERM", "xterm"}}, Command::Output::terminal);
  // On a busy machine the index before it takes long enough for a line of its own.
  const std::string shown = command.expect("comparing hnsw:M=64") + command.expect(" left");
  EXPECT_NE(shown.find('%'), std::string::npos) << shown;
  EXPECT_FALSE(std::regex_search(shown, std::regex("\033\\[[0-9;]*m"))) << "colours: " << shown;
  command.interrupt();
  EXPECT_EQ(command.wait().exit_code, 130);
}

}  // namespace
}  // namespace keyhole::tools
