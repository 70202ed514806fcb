// Where results go: refused before the work where they cannot go there, and never lost in silence.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/commands/common/prompt_text.h"

namespace keyhole::tools {
namespace {

std::vector<std::string> decode_of(const TemporaryFolder& folder,
                                   const std::vector<std::string>& more) {
  write_file(folder / "prompt", std::string("hello"));
  std::vector<std::string> args = {"decode",    "--prompt", folder / "prompt", "--generate", "2",
                                   "--threads", "1"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

/// The exit code of `keyhole ARGS` in a shell; 124 where it has not ended after a minute.
int shell(const std::string& before, const std::string& args) {
  const int status = std::system((before + "timeout 60 " KEYHOLE_COMMAND " " + args).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(StandardStreams, ClosedOrFullOnesAreNoticed) {
  const TemporaryFolder folder;
  write_file(folder / "prompt", std::string("hello"));
  const std::string errors = " 2>" + (folder / "errors").string();
  const std::string decode =
      "decode --prompt " + (folder / "prompt").string() + " --generate 2 --threads 1 ";
  EXPECT_EQ(shell("", "decode --interactive --threads 1 <&- >/dev/null" + errors), 0) << "no line";
  for (const std::string& full :
       {decode + ">/dev/full", decode + "--json - >/dev/full", decode + ">&-",
        std::string(
            "eval --task kv --length 1k --questions 1 --index exact --threads 1 >/dev/full"),
        std::string("--help >/dev/full"), std::string("--version >/dev/full"),
        std::string("plan --layers 2 --heads 4 --kv-heads 2 --head-dim 64 --context 4k --index "
                    "flat >/dev/full")}) {
    EXPECT_EQ(shell("", full + errors), 1) << full;
    EXPECT_NE(read_file(folder / "errors").find("standard output"), std::string::npos) << full;
  }
  // A closed standard output is not the next file that is opened.
  const std::string session = folder / "session";
  EXPECT_EQ(shell("", decode + "--save-session " + session + " >&-" + errors), 1);
  EXPECT_TRUE(nlohmann::json::accept(read_file(session)));
  EXPECT_EQ(shell("", "decode --load-session " + session + " --generate 2 >/dev/null" + errors), 0)
      << read_file(folder / "errors");
}

TEST(AddressSpace, TooLittleOfItIsAnErrorAndNoLoop) {
  const TemporaryFolder folder;
  write_file(folder / "prompt", std::string("hello"));
  const std::string args = "decode --prompt " + (folder / "prompt").string() +
                           " --device host --generate 2 --threads 2 >/dev/null 2>" +
                           (folder / "errors").string();
  bool has_failed = false, has_passed = false;
  // With less, OpenBLAS 0.3.29 (Debian 13) asks for ever while it is loaded, before main().
  for (int mib = 400; mib <= 1500; mib += 100) {
    // OpenBLAS makes a thread for each processor when it is loaded, before main() can ask for room: here as many as on
    // two.
    const int code = shell(
        "export OPENBLAS_NUM_THREADS=2; ulimit -v " + std::to_string(1024 * mib) + "; ", args);
    EXPECT_TRUE(code == 0 || code == 1) << mib << " MiB: " << code;
    has_failed = has_failed || code == 1;
    has_passed = has_passed || code == 0;
  }
  EXPECT_TRUE(has_failed && has_passed) << "the limits are not around what is needed";
}

TEST(Record, LeavesNothingWhenItIsAskedToEnd) {
  const TemporaryFolder folder;
  Command command({"record", "--task", "kv", "--length", "32k", "--threads", "1", "--out",
                   folder / "trace.safetensors"});
  while (files_in(folder.path()) == 0) {  // the new file, under another name
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  command.interrupt(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGTERM);
  EXPECT_EQ(files_in(folder.path()), 0U);
}

TEST(Prompts, WhatIsNoFileGetsAHint) {
  const TemporaryFolder folder;
  write_file(folder / "model.gguf", std::string("GGUF"));
  const std::string gguf = folder / "model.gguf", here = folder.path();
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--prompt", "-"}, "/dev/stdin"},
      {{"--prompt", "Once upon a time"}, "there is no such file"},
      {{"--prompt", here}, "is a folder"},
      {{"--model", gguf, "--prompt", gguf}, "GGUF files are not read"}};
  for (const auto& [options, hint] : cases) {
    for (const char* command : {"decode", "record"}) {
      std::vector<std::string> args = {command};
      args.insert(args.end(), options.begin(), options.end());
      if (args.front() == "record") args.insert(args.end(), {"--out", folder / "t"});
      expect_failure(run_keyhole(args), hint == "there is no such file" ? 1 : 2, hint);
    }
  }
}

TEST(Prompts, AnEmptyOneOfAModelWithoutBosIsRefused) {
  const TemporaryFolder folder;
  testing::write_model(folder.path(), testing::small_config(),
                       testing::random_weights(testing::small_config(), ElementType::f32, 23),
                       ElementType::f32);
  nlohmann::json tokenizer = small_tokenizer();
  tokenizer["post_processor"] = nullptr;
  write_file(folder / "tokenizer.json", tokenizer.dump());
  write_file(folder / "empty", std::string());
  for (const char* command : {"decode", "record"}) {
    std::vector<std::string> args = {command, "--model", folder.path(), "--prompt",
                                     folder / "empty"};
    if (args.front() == "record") args.insert(args.end(), {"--out", folder / "t"});
    expect_failure(run_keyhole(args), 2, "is empty");
  }
}

TEST(DecodeJson, HoldsTextAsUtf8AndWhatAutoBecame) {
  const TemporaryFolder folder;
  const Outcome outcome = run_keyhole(decode_of(folder, {"--json", "-"}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const nlohmann::json result = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(result["index"], "auto");
  EXPECT_EQ(result["index_in_effect"].get<std::string>().rfind("codes:", 0), 0U)
      << result["index_in_effect"];
  EXPECT_EQ(printable("h\xC3\xA9llo \xE2\x82\xAC\n"), "h\xC3\xA9llo \xE2\x82\xAC\n");
  EXPECT_EQ(printable("\x1B[0m \xC3( \xC2\x9B \xE2\x82"), "\\x1b[0m \\xc3( \\xc2\\x9b \\xe2\\x82");
}

TEST(Interactive, WarnsOfAContextThatTheModelWasNotMadeFor) {
  const Outcome outcome =
      run_keyhole({"decode", "--interactive", "--context", "4M", "--threads", "1"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("warning: the context is 4,194,304"), std::string::npos)
      << outcome.err;
}

TEST(SavedSessions, MayHaveNamesThatAreNoUtf8) {
  const TemporaryFolder folder;
  const std::string name = (folder / "n\xff").string();
  EXPECT_EQ(run_keyhole(decode_of(folder, {"--save-session", name})).exit_code, 0);
  const Outcome again = run_keyhole({"decode", "--load-session", name, "--generate", "2",
                                     "--threads", "1", "--save-session", name});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(run_keyhole({"decode", "--load-session", name, "--generate", "2"}).exit_code, 0);
  EXPECT_EQ(files_in(folder.path()), 3U) << "prompt, session, K and V";
}

TEST(Outputs, AreRefusedBeforeTheWork) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  const std::string nowhere = folder / "none" / "file";
  for (const auto& [option, path] : {std::pair<std::string, std::string>{"--json", nowhere},
                                     {"--save-session", nowhere},
                                     {"--save-session", folder / "fifo"}}) {
    const Outcome outcome = run_keyhole(decode_of(folder, {option, path}));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.out, "") << "the model has run";
    EXPECT_NE(outcome.err.find("cannot write " + path), std::string::npos) << outcome.err;
  }
  EXPECT_EQ(files_in(folder.path()), 2U);
}

TEST(SavedSessions, SampledAnswersGoOnAsInOneRun) {
  const TemporaryFolder folder;
  const auto tokens_of = [&](const std::string& source, const std::string& generated,
                             const std::string& session) {
    const Outcome outcome =
        run_keyhole({"decode", source == "prompt" ? "--prompt" : "--load-session", folder / source,
                     "--generate", generated, "--temperature", "0.9", "--seed", "7", "--threads",
                     "1", "--ignore-eos", "--save-session", folder / session});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(folder / session))
        .at("tokens")
        .get<std::vector<uint32_t>>();
  };
  write_file(folder / "prompt", std::string("The river runs to the sea, and the sea"));
  const std::vector<uint32_t> whole = tokens_of("prompt", "24", "whole");
  const std::vector<uint32_t> half = tokens_of("prompt", "12", "half");
  EXPECT_EQ(half, std::vector<uint32_t>(whole.begin(), whole.end() - 12));
  EXPECT_EQ(tokens_of("half", "12", "both"), whole);
}

}  // namespace
}  // namespace keyhole::tools
