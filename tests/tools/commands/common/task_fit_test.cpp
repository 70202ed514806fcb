// Contexts that fill a number of tokens, of bytes and of other vocabularies.
#include "tools/commands/common/task_fit.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/files/json.h"
#include "tests/temporary_folder.h"
#include "tools/terminal/errors.h"
#include "tools/tokenizer/byte_tokenizer.h"

namespace keyhole::tools {
namespace {

const ModelTokens kByteModel{.vocab_size = 264, .bos = 256, .end_tokens = {257}};

/// A trained vocabulary of 700 tokens, BOS in front.
std::unique_ptr<const Tokenizer> trained() {
  const TemporaryFolder folder;
  std::filesystem::copy(KEYHOLE_TOKENIZERS "/llama3.json", folder / "tokenizer.json");
  return load_tokenizer(folder.path(), {.vocab_size = 700, .bos = 0, .end_tokens = {1}});
}

TEST(FitBytes, FindsTheBytesWhateverTheDensity) {
  for (const double density : {0.05, 0.25, 0.7, 1.0}) {
    for (const double guessed : {0.05, 0.25, 1.0}) {
      for (const size_t tokens : {20U, 1000U, 131072U}) {
        size_t last = 0;
        const size_t bytes = fit_bytes(tokens, guessed, [&](size_t tried) {
          last = tried;
          return static_cast<size_t>(density * static_cast<double>(tried));
        });
        const auto used = static_cast<size_t>(density * static_cast<double>(bytes));
        EXPECT_EQ(last, bytes);
        EXPECT_LE(used, tokens);
        EXPECT_GE(used + std::max<size_t>(16, tokens / 1000), tokens) << density << " " << guessed;
      }
    }
  }
}

TEST(FitBytes, SaysWhereNothingFits) {
  EXPECT_EQ(fit_bytes(10, 1.0, [](size_t) { return size_t{11}; }), 0U);
  // Tokens in steps: the best of what was tried is what was tried last.
  size_t last = 0;
  const size_t bytes = fit_bytes(1000, 1.0, [&](size_t tried) {
    last = tried;
    return tried / 300 * 300;
  });
  EXPECT_EQ(bytes, last);
  EXPECT_LE(bytes / 300 * 300, 1000U);
}

TEST(FitTask, OfBytesIsTheTaskOfAsManyBytes) {
  const ByteTokenizer tokenizer(kByteModel);
  const TaskOptions options{.task = "kv", .length = "3000", .seed = 5, .haystack = ""};
  const FittedTask fitted = fit_task(tokenizer, options, 3000, 0, 64);
  const Task expected = make_task(options, 2999, 64);
  EXPECT_EQ(fitted.task.context, expected.context);
  ASSERT_EQ(fitted.task.questions.size(), 64U);
  EXPECT_EQ(fitted.task.questions[63].answer, expected.questions[63].answer);
  EXPECT_EQ(fitted.tokens.size(), expected.context.size() + 1);
}

TEST(FitTask, FillsTheTokensOfAnyVocabulary) {
  const auto tokenizer = trained();
  std::string prose;
  for (int i = 0; i < 4000; ++i)
    prose += "The river ran past the old house number " + std::to_string(i) + ". ";
  const TemporaryFolder folder;
  write_file(folder / "prose", prose);
  for (const char* task : {"kv", "passkey"}) {
    for (const uint32_t length : {300U, 2000U, 20000U}) {
      const TaskOptions options{
          .task = task, .length = "n", .seed = 5, .haystack = folder / "prose"};
      const FittedTask fitted = fit_task(*tokenizer, options, length, 0, 16);
      EXPECT_LE(fitted.tokens.size(), length) << task;
      EXPECT_GE(fitted.tokens.size() + std::max(20U, length / 500), length) << task;
      EXPECT_EQ(fitted.tokens, tokenizer->encode_prompt(fitted.task.context));
      EXPECT_EQ(fitted.tokens.front(), 0U);
    }
  }
  // More questions than bytes of as many tokens would hold.
  const TaskOptions options{
      .task = "passkey", .length = "2000", .seed = 5, .haystack = folder / "prose"};
  EXPECT_EQ(fit_task(*tokenizer, options, 2000, 12, 16).task.questions.size(), 12U);
  EXPECT_THROW((void)fit_task(*tokenizer, options, 2000, 500, 16), UsageError);
}

}  // namespace
}  // namespace keyhole::tools
