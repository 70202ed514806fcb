// eval --task ruler from outside, with the bundled model, which was not trained for such questions: what is checked is
// the frame of the scores, not their height.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <sstream>

#include "runtime/files/json.h"
#include "tests/tools/cli/html_data.h"
#include "tests/tools/llama/run_json.h"
#include "tools/tasks/ruler/score.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

TEST(EvalRuler, ScoresEveryTaskLengthAndWay) {
  const TemporaryFolder folder;
  const std::vector<std::string> args = {
      "eval",     "--task",   "ruler",     "--ruler", "niah_single_1,infinitebench_number",
      "--length", "1100",     "--samples", "2",       "--seed",
      "42",       "--window", "64",        "--sink",  "16"};
  const json result =
      run_json(args, {"--index", "none", "--index", "exact", "--index", "flat", "--k", "2000",
                      "--attend", "scored", "--html", folder / "page.html"});
  EXPECT_EQ(result["task"], "ruler");
  EXPECT_EQ(result["tokens"], 1100);
  EXPECT_EQ(result["lengths"], json::array({1100}));
  EXPECT_EQ(result["ruler"], json({"niah_single_1", "infinitebench_number"}));
  EXPECT_EQ(result["note"], "");
  EXPECT_GT(result["prefill_s"], 0.0);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 2U * 3U);  // tasks, ways
  EXPECT_EQ(result["means"].size(), 3U);
  for (size_t i = 0; i < rows.size(); ++i) {
    const json& row = rows[i];
    EXPECT_EQ(row["length"], 1100);
    EXPECT_EQ(row["task"], i < 3 ? "niah_single_1" : "infinitebench_number");
    EXPECT_EQ(row["samples"], 2);
    EXPECT_GT(row["units"], 0);
    const bool first_number = row["task"] == "infinitebench_number";
    const auto scoring = first_number ? ruler::Scoring::first_number : ruler::Scoring::all;
    double lost = 0.0;
    for (const json& wrong : row["wrong"]) {
      const std::string answer = wrong["answer"];
      EXPECT_LE(answer.size(), first_number ? 12U : 128U);  // tokens are bytes
      const double score =
          ruler::score(scoring, answer, wrong["references"].get<std::vector<std::string>>());
      EXPECT_EQ(wrong["score"], score);
      lost += 1.0 - score;
    }
    EXPECT_NEAR(row["score"].get<double>(), 100.0 * (2.0 - lost) / 2.0, 1e-9);
    EXPECT_GT(row["tokens_per_second"], 0.0);
  }
  // What reads everything answers as exact attention does.
  for (size_t i = 0; i < rows.size(); i += 3) {
    EXPECT_EQ(rows[i + 2]["wrong"], rows[i + 1]["wrong"]);
    EXPECT_EQ(rows[i + 2]["lost"], 0);
  }
  const std::string page = read_file(folder / "page.html");
  EXPECT_EQ(result_in_page(page), result);
  const auto drawn = [](const json& row) { return row["score"] > 0.0; };
  EXPECT_EQ(static_cast<ptrdiff_t>(drawn_bars(page).size()),
            std::count_if(result["means"].begin(), result["means"].end(), drawn));

  // The same seed asks the same.
  const json again = run_json(args, {"--index", "exact"});
  EXPECT_EQ(again["results"][0]["wrong"], rows[1]["wrong"]);
  EXPECT_EQ(again["results"][1]["wrong"], rows[4]["wrong"]);
}

TEST(EvalRuler, ASignalLeavesTheSamplesThatWereAnswered) {
  const TemporaryFolder folder;
  const std::string out = folder / "cut.json";
  Command command({"eval", "--task", "ruler", "--ruler", "infinitebench_passkey,niah_single_1",
                   "--length", "1000", "--seed", "42", "--window", "64", "--sink", "16", "--index",
                   "exact", "--samples", "400", "--json", out},
                  {}, Command::Output::terminal);
  // Shown when it has taken two seconds, which may be in the first sample.
  for (int sample = 1; sample < 2;) {
    const std::string shown = command.expect(" of 400");
    sample = std::stoi(shown.substr(shown.rfind("sample ") + 7));
  }
  command.interrupt();
  EXPECT_EQ(command.wait().exit_code, 128 + SIGINT);
  const json result = json::parse(read_file(out));
  ASSERT_EQ(result["results"].size(), 1U);
  const json& row = result["results"][0];
  EXPECT_EQ(row["task"], "infinitebench_passkey");
  const size_t samples = row["samples"];
  EXPECT_GT(samples, 0U);
  EXPECT_LT(samples, 400U);
  EXPECT_LE(row["wrong"].size(), samples);
}

TEST(EvalRuler, PromptsAreWrittenForOtherPrograms) {
  const TemporaryFolder folder;
  const auto arguments = [](const char* task) {
    return std::vector<std::string>{"eval",     "--task",  "ruler",     "--ruler", task,
                                    "--length", "1400",    "--samples", "2",       "--seed",
                                    "3",        "--index", "none"};
  };
  const auto written = [&](const char* task, const std::vector<std::string>& more = {}) {
    const std::string file = folder / "prompts.jsonl";
    const Outcome outcome =
        run_keyhole(with(with(arguments(task), more), {"--write-prompts", file}));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    std::vector<json> samples;
    std::istringstream lines(read_file(file));
    for (std::string line; std::getline(lines, line);) samples.push_back(json::parse(line));
    return samples;
  };
  const std::vector<json> samples = written("niah_single_1");
  ASSERT_EQ(samples.size(), 2U);
  // What is right is what the task itself asks for: of a model that answers nothing right it names all.
  const json asked = run_json(arguments("niah_single_1"))["results"][0]["wrong"];
  ASSERT_EQ(asked.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(samples[i]["task"], "niah_single_1");
    EXPECT_EQ(samples[i]["length"], 1400);
    EXPECT_EQ(samples[i]["sample"], i);
    EXPECT_EQ(samples[i]["scoring"], "all");
    EXPECT_EQ(samples[i]["answer_tokens"], 128);
    EXPECT_FALSE(samples[i].contains("follow_ups"));
    EXPECT_EQ(samples[i]["references"], asked[i]["references"]);
    // Tokens of this model are bytes.
    const size_t bytes = samples[i]["prompt"].get<std::string>().size() +
                         samples[i]["prefix"].get<std::string>().size();
    EXPECT_LE(bytes + 128, 1400U);
    EXPECT_GT(bytes + 128, 1000U);
  }
  const std::vector<json> turns = written("turns", {"--bytes-per-token", "3"});
  ASSERT_EQ(turns[0]["follow_ups"].size(), 9U);
  EXPECT_EQ(turns[0]["scoring"], "word");
  EXPECT_EQ(turns[0]["one_line"], true);
  // By bytes the same; four of them to a token make the text four times as long.
  EXPECT_EQ(written("niah_single_1", {"--bytes-per-token", "1"})[0]["references"],
            samples[0]["references"]);
  const std::string longer = written("niah_single_1", {"--bytes-per-token", "4"})[0]["prompt"];
  EXPECT_GT(longer.size(), 4 * 1000U);
  EXPECT_LE(longer.size(), 4 * 1400U);
  expect_failure(run_keyhole(with(arguments("vt"), {"--write-prompts", folder / "p.jsonl",
                                                    "--bytes-per-token", "nan"})),
                 2, "nan is no number, allowed: 0.1 to 100");
  expect_failure(run_keyhole(with(arguments("vt"), {"--bytes-per-token", "4"})), 2,
                 "--write-prompts");
}

TEST(EvalRuler, SessionsGoOnFromQuestionToQuestion) {
  const TemporaryFolder folder;
  const std::vector<std::string> args = {
      "eval",     "--task",   "ruler",     "--ruler", "turns,mqar",
      "--length", "2600",     "--samples", "1",       "--seed",
      "3",        "--window", "64",        "--sink",  "16",
      "--index",  "exact",    "--index",   "flat",    "--k",
      "3000",     "--attend", "scored",    "--html",  folder / "page.html"};
  const json result = run_json(args);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 4U);
  for (const json& row : rows) {
    const bool turns = row["task"] == "turns";
    const json& questions = row["questions"];
    ASSERT_EQ(questions.size(), turns ? 10U : 16U);
    // The first question comes with the prompt, without the token whose step begins the answer; what follows takes the
    // right answer and the question alone. All of it fills the length with the last answer; tokens are bytes.
    double taken = 1.0, score = 0.0;
    for (size_t i = 0; i < questions.size(); ++i) {
      const double own = questions[i]["taken"];
      taken += own;
      score += questions[i]["score"].get<double>() / static_cast<double>(questions.size());
      if (i == 0) {
        EXPECT_GT(own, turns ? 1000.0 : 400.0);
      } else if (turns) {
        EXPECT_GT(own, 60.0);
        EXPECT_LT(own, 180.0);
      } else {
        EXPECT_LT(own, 1300.0);
      }
    }
    EXPECT_LE(taken + (turns ? 32 : 16), 2600.0);
    EXPECT_GT(taken + (turns ? 32 : 16), 1500.0);
    EXPECT_NEAR(row["score"].get<double>(), score, 1e-9);
    double wrong = 0.0;
    for (const json& one : row["wrong"]) {
      wrong += 1.0 - one["score"].get<double>();
      EXPECT_EQ(one["answer"].get<std::string>().find('\n'), std::string::npos);
    }
    const auto count = static_cast<double>(questions.size());
    EXPECT_NEAR(row["score"].get<double>(), 100.0 * (count - wrong) / count, 1e-9);
    EXPECT_GT(row["tokens_per_second"], 0.0);
  }
  // What reads everything answers as exact attention does, turn after turn.
  EXPECT_EQ(rows[1]["wrong"], rows[0]["wrong"]);
  EXPECT_EQ(rows[3]["questions"], rows[2]["questions"]);
  EXPECT_EQ(result_in_page(read_file(folder / "page.html")), result);
}

TEST(EvalRuler, AsksAboutDocuments) {
  const TemporaryFolder folder;
  write_file(folder / "squad.json",
             std::string(R"({"data": [{"title": "t", "paragraphs": [{"context": "It is red.",
               "qas": [{"question": "Which colour?", "answers": [{"text": "red"}, {"text": ""}]}]
               }]}]})"));
  const Outcome outcome =
      run_keyhole({"eval", "--task", "ruler", "--ruler", "qa_1", "--data", folder / "squad.json",
                   "--length", "1200,1000", "--samples", "1", "--index", "exact"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  // Any text contains an empty answer, so the part scored is 1.
  for (const char* part : {"qa_1", "100 %", "length 1,000\n", "length 1,200\n",
                           "1 sample of each task and length", "attention/token"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(EvalRuler, NamesWhatIsWrong) {
  struct Mistake {
    std::vector<std::string> args;
    const char* text;
  };
  const std::vector<Mistake> mistakes = {
      {{"--task", "ruler", "--ruler", "niah"}, "niah_single_1"},
      {{"--task", "ruler", "--ruler", "qa_2"}, "--ruler qa_2 needs --data FILE"},
      {{"--task", "ruler", "--ruler", "vt", "--length", "8k,x"}, "x"},
      {{"--task", "ruler", "--ruler", "niah_single_1", "--length", "700"},
       "--ruler niah_single_1 at --length 700: the prompt with the smallest haystack has "},
      {{"--task", "ruler", "--ruler", "vt", "--audit", "0.1"}, "--audit is of other tasks"},
      {{"--task", "ruler", "--prompt", "x"}, "--prompt and --tokens are of --task text"},
      {{"--task", "ruler", "--ruler", "records", "--length", "900"},
       "--ruler records at --length 900: the prompt with the smallest haystack has "},
      {{"--task", "kv", "--ruler", "vt"}, "--ruler and --data are of --task ruler"},
      {{"--task", "ruler", "--samples", "0"}, "--samples"},
      {{"--task", "kv", "--samples", "5"}, "--samples is of --task ruler"},
      {{"--task", "kv", "--write-prompts", "x"}, "--write-prompts is of --task ruler"},
      {{"--task", "ruler", "--ruler", "vt", "--write-prompts", "x", "--json", "y"},
       "--json is of runs of a model, and --write-prompts runs none"},
      {{"--task", "kv", "--audit-bound", "0.1"}, "--audit-bound requires --audit"},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = run_keyhole(with({"eval", "--index", "exact"}, mistake.args));
    EXPECT_EQ(outcome.exit_code, 2) << mistake.text << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(mistake.text), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace keyhole::tools
