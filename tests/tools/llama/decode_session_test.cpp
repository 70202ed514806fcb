// decode as a person uses it: sampling, stops, sessions that are saved and go on, turns on a terminal.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/tasks/kv_task.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// Lines key=value, of which the bundled model knows the value of any key that is asked for, in a file.
class Facts {
 public:
  Facts() : task_(make_kv_task({.context_bytes = 1500, .questions = 4, .seed = 5})) {
    write_file(prompt(), task_.context);
  }
  [[nodiscard]] std::filesystem::path prompt() const { return folder_ / "facts.txt"; }
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] const std::string& context() const { return task_.context; }
  [[nodiscard]] std::string question(size_t i) const { return task_.questions.at(i).prompt; }
  /// Without its line end.
  [[nodiscard]] std::string answer(size_t i) const {
    const std::string& answer = task_.questions.at(i).answer;
    return answer.substr(0, answer.find('\n'));
  }
  /// On the host, with offloaded tokens.
  [[nodiscard]] std::vector<std::string> decode(const std::vector<std::string>& more) const {
    return with({"decode", "--device", "host"}, more);
  }

 private:
  TemporaryFolder folder_;
  Task task_;
};

const std::vector<std::string> kSmallWindow = {"--sink", "16", "--window", "128"};

TEST(Sampling, TheSeedDecides) {
  const Facts facts;
  const auto ids = [&](const std::vector<std::string>& more) {
    return run_json(
               with(facts.decode({"--prompt", facts.prompt(), "--generate", "24", "--ignore-eos"}),
                    more))["generated_ids"]
        .get<std::vector<uint32_t>>();
  };
  const std::vector<std::string> hot = {"--temperature", "1.5", "--top-p", "0.98"};
  EXPECT_EQ(ids(hot), ids(hot));
  EXPECT_NE(ids(hot), ids({"--temperature", "1.5", "--top-p", "0.98", "--seed", "4"}));
  const std::vector<uint32_t> greedy = ids({});
  EXPECT_NE(ids(hot), greedy);
  EXPECT_EQ(ids({"--temperature", "1.5", "--top-k", "1"}), greedy);
  EXPECT_EQ(ids({"--temperature", "0.001"}), greedy);
}

TEST(Sampling, RefusesWhatMeansNothing) {
  const Facts facts;
  for (const auto& [option, value] : {std::pair{"--temperature", "-1"},
                                      {"--top-p", "0"},
                                      {"--min-p", "2"},
                                      {"--repetition-penalty", "0"}}) {
    expect_failure(run_keyhole(facts.decode({"--prompt", facts.prompt(), option, value})), 2,
                   "allowed");
  }
}

TEST(Stops, EndAnAnswer) {
  const Facts facts;
  write_file(facts.file("question.txt"), facts.context() + facts.question(0));
  const std::vector<std::string> ask =
      facts.decode({"--prompt", facts.file("question.txt"), "--generate", "40"});
  const json stopped = run_json(ask, {"--stop", "never", "--stop", "\n"});
  EXPECT_EQ(stopped["generated"], facts.answer(0));
  EXPECT_EQ(stopped["stop"], "text");
  const std::string ids_end = facts.answer(0).substr(2, 3);
  const json inside = run_json(ask, {"--stop", ids_end});
  EXPECT_EQ(inside["generated"], facts.answer(0).substr(0, 2));
  const json on = run_json(ask, {"--ignore-eos"});
  EXPECT_EQ(on["stop"], "length");
  EXPECT_EQ(on["generated_ids"].size(), 40U);
}

class SavedSessions : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(SavedSessions, GoOnAsIfNothingHadHappened) {
  const Facts facts;
  const std::string session = facts.file("s.session");
  const std::vector<std::string> way = with(kSmallWindow, GetParam());
  const std::vector<std::string> prompt = {"--prompt", facts.prompt(), "--ignore-eos"};
  const auto ids = [](const json& result) {
    return result["generated_ids"].get<std::vector<uint32_t>>();
  };
  const json whole = run_json(facts.decode(with(prompt, way)), {"--generate", "150"});
  const json begun =
      run_json(facts.decode(with(prompt, way)), {"--generate", "75", "--save-session", session});
  const json rest =
      run_json(facts.decode({"--load-session", session, "--ignore-eos", "--generate", "75"}));
  std::vector<uint32_t> joined = ids(begun);
  for (const uint32_t id : ids(rest)) joined.push_back(id);
  EXPECT_EQ(joined, ids(whole));
  EXPECT_EQ(rest["reused_tokens"], begun["prompt_tokens"].get<size_t>() + 74);
  EXPECT_EQ(rest["prompt_tokens"], begun["prompt_tokens"].get<size_t>() + 75);
  for (const char* kept : {"sink", "window", "kv_dtype", "kv_host"}) {
    EXPECT_EQ(rest[kept], whole[kept]) << kept;
  }
  if (whole["index"] == "exact" || whole["index"] == "none") {
    EXPECT_EQ(rest["index"], whole["index"]);
  } else {
    for (const char* kept : {"attend", "tail", "target"}) EXPECT_EQ(rest[kept], whole[kept]);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, SavedSessions,
    ::testing::Values(std::vector<std::string>{"--index", "auto"},
                      std::vector<std::string>{"--index", "exact"},
                      std::vector<std::string>{"--index", "none", "--kv-dtype", "f32"},
                      std::vector<std::string>{"--index", "ivf", "--tail", "second", "--k", "20"}));

TEST(SavedSession, APromptThatBeginsWithItGoesOnFromThere) {
  const Facts facts;
  const std::string session = facts.file("s.session");
  const json saved = run_json(facts.decode(with(
      {"--prompt", facts.prompt(), "--generate", "1", "--save-session", session}, kSmallWindow)));
  for (size_t i = 0; i < 3; ++i) {
    write_file(facts.file("question.txt"), facts.context() + facts.question(i));
    const json asked = run_json(facts.decode(
        {"--load-session", session, "--prompt", facts.file("question.txt"), "--stop", "\n"}));
    EXPECT_EQ(asked["generated"], facts.answer(i));
    EXPECT_EQ(asked["reused_tokens"], saved["prompt_tokens"]);
    EXPECT_EQ(asked["prompt_tokens"],
              saved["prompt_tokens"].get<size_t>() + facts.question(i).size());
  }
  // Another index for the same tokens.
  const json exact =
      run_json(facts.decode({"--load-session", session, "--index", "exact", "--prompt",
                             facts.file("question.txt"), "--stop", "\n"}));
  EXPECT_EQ(exact["generated"], facts.answer(2));
  EXPECT_EQ(exact["index"], "exact");
  EXPECT_EQ(exact["reused_tokens"], saved["prompt_tokens"]);
}

TEST(SavedSession, IsRefusedByAnotherModel) {
  const Facts facts;
  const std::string session = facts.file("s.session");
  (void)run_json(
      facts.decode({"--prompt", facts.prompt(), "--generate", "1", "--save-session", session}));
  const TemporaryFolder other;
  write_model(other.path(), small_config(), random_weights(small_config(), ElementType::f32, 23),
              ElementType::f32);
  expect_failure(run_keyhole({"decode", "--model", other.path(), "--load-session", session}), 1,
                 "was saved with the model bundled");
  expect_failure(run_keyhole(facts.decode({"--load-session", session, "--window", "64"})), 2,
                 "--window");
}

TEST(Interactive, AnswersEachLineOfAPipe) {
  const Facts facts;
  const std::string session = facts.file("s.session");
  const std::vector<std::string> args = facts.decode(
      with({"--interactive", "--prompt", facts.prompt(), "--stop", "\n"}, kSmallWindow));
  const Outcome outcome = run_keyhole(args, {}, Command::Output::files,
                                      facts.question(0) + "\n" + facts.question(1) + "\n/save " +
                                          session + "\n" + facts.question(2));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string saved = std::to_string(facts.context().size());
  EXPECT_EQ(outcome.out.rfind(facts.answer(0) + "\n" + facts.answer(1) + "\n(", 0), 0U)
      << outcome.out;
  EXPECT_TRUE(outcome.out.ends_with(" tokens)\n" + facts.answer(2) + "\n")) << outcome.out;
  EXPECT_EQ(outcome.out.find("> "), std::string::npos) << outcome.out;

  const Outcome resumed =
      run_keyhole(facts.decode({"--interactive", "--load-session", session, "--stop", "\n"}), {},
                  Command::Output::files, facts.question(3) + "\n/stats\n/quit\n" + "never said");
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(resumed.out.rfind(facts.answer(3) + "\n", 0), 0U) << resumed.out;
  EXPECT_NE(resumed.out.find("ended by text\n"), std::string::npos) << resumed.out;
}

TEST(Interactive, APipeEndsAtTheFirstFailure) {
  const Facts facts;
  const Outcome outcome = run_keyhole(facts.decode({"--interactive"}), {}, Command::Output::files,
                                      "/nonsense\nhello\n");
  expect_failure(outcome, 1, "/nonsense is no command");
  EXPECT_EQ(outcome.out, "");
}

TEST(Interactive, CtrlCEndsTheAnswerAndNotTheProgram) {
  const Facts facts;
  Command command(
      facts.decode(with({"--interactive", "--prompt", facts.prompt(), "--ignore-eos", "--generate",
                         "100000", "--save-session", facts.file("s.session")},
                        kSmallWindow)),
      {}, Command::Output::dialogue);
  (void)command.expect("> ");
  command.type(facts.question(0) + "\n");
  // The answer has begun: its digits behind the echo of the question.
  (void)command.expect("\n" + facts.answer(0));
  command.type("\x03");
  (void)command.expect("(interrupted)");
  (void)command.expect("> ");
  command.type(facts.question(1) + "\n");
  (void)command.expect("\n" + facts.answer(1));
  command.type("\x03");
  (void)command.expect("(interrupted)");
  (void)command.expect("> ");
  command.type("/stats\n");
  (void)command.expect("ended by Ctrl-C");
  (void)command.expect("> ");
  command.type("half a line\x03");
  (void)command.expect("(Ctrl-D or /quit ends)");
  (void)command.expect("> ");
  command.type("/save\n");
  (void)command.expect("the file is missing");
  (void)command.expect("> ");
  command.type("/reset\n");
  (void)command.expect("everything is forgotten");
  (void)command.expect("> ");
  // One text of two lines.
  command.type("girks=38512\\\n");
  (void)command.expect(". ");
  command.type("?girks=\n");
  (void)command.expect("\n38512");
  command.type("\x03");
  (void)command.expect("(interrupted)");
  (void)command.expect("> ");
  command.type("\x04");
  const Outcome outcome = command.wait();
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(std::filesystem::exists(facts.file("s.session")));
}

/// A random model with LongRoPE, whose original context has 60 tokens, and prompts of token ids in files.
class LongRopeModel {
 public:
  LongRopeModel() {
    json config = small_config();
    config["rope_scaling"] = {{"rope_type", "longrope"},
                              {"short_factor", std::vector<double>(32, 1.0)},
                              {"long_factor", std::vector<double>(32, 4.0)},
                              {"original_max_position_embeddings", 60},
                              {"attention_factor", 1.0}};
    write_model(folder_.path(), config, random_weights(config, ElementType::f32, 2),
                ElementType::f32);
    std::mt19937 random(8);
    for (int i = 0; i < 75; ++i) {
      prompt.push_back(std::uniform_int_distribution<uint32_t>(0, 36)(random));
    }
  }
  /// The tokens that follow these.
  [[nodiscard]] std::vector<uint32_t> after(const std::vector<uint32_t>& tokens, size_t count,
                                            const std::vector<std::string>& more = {}) const {
    write_file(folder_ / "ids.txt", ids_text(tokens));
    std::vector<std::string> args = {"decode",     "--device",           "host",
                                     "--model",    folder_.path(),       "--ignore-eos",
                                     "--generate", std::to_string(count)};
    if (!tokens.empty()) args = with(args, {"--tokens", folder_ / "ids.txt"});
    if (std::find(more.begin(), more.end(), "--load-session") == more.end()) {
      args = with(args, {"--index", "flat", "--sink", "4", "--window", "16"});
    }
    return run_json(args, more)["generated_ids"].get<std::vector<uint32_t>>();
  }
  [[nodiscard]] std::vector<uint32_t> first(size_t count) const {
    return {prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(count)};
  }
  [[nodiscard]] std::string session() const { return folder_ / "rope.session"; }

  std::vector<uint32_t> prompt;

 private:
  TemporaryFolder folder_;
};

TEST(LongRope, GoesOnPastTheOriginalContext) {
  const LongRopeModel model;
  const std::vector<uint32_t> answer = model.after(model.first(55), 12);
  ASSERT_EQ(answer.size(), 12U);
  // Every token is the one that follows a prompt of those before it.
  std::vector<uint32_t> before = model.first(55);
  for (const uint32_t token : answer) {
    EXPECT_EQ(model.after(before, 1), std::vector{token}) << "after " << before.size();
    before.push_back(token);
  }
}

TEST(LongRope, ASavedSessionKnowsHowItsKeysWereTurned) {
  const LongRopeModel model;
  const std::vector<uint32_t> answer = model.after(model.first(55), 12);
  const std::vector<uint32_t> first(answer.begin(), answer.begin() + 8);
  EXPECT_EQ(model.after(model.first(55), 8, {"--save-session", model.session()}), first);
  EXPECT_EQ(model.after({}, 4, {"--load-session", model.session()}),
            std::vector<uint32_t>(answer.begin() + 8, answer.end()));
  // Prompts that have its beginning: within the original context, and beyond it.
  for (const size_t count : {50U, 75U}) {
    EXPECT_EQ(model.after(model.first(count), 3, {"--load-session", model.session()}),
              model.after(model.first(count), 3));
  }
  // One that was saved within the context, and one of a version that did not say.
  EXPECT_EQ(model.after(model.first(55), 2, {"--save-session", model.session()}),
            std::vector<uint32_t>(answer.begin(), answer.begin() + 2));
  for (const bool says : {true, false}) {
    if (!says) {
      json root = json::parse(read_file(model.session()));
      root.erase("rope_tokens");
      write_file(model.session(), root.dump());
    }
    EXPECT_EQ(model.after({}, 10, {"--load-session", model.session()}),
              std::vector<uint32_t>(answer.begin() + 2, answer.end()));
  }
}

}  // namespace
}  // namespace keyhole::tools
