// Samples as tokens, as a text and in a chat; what asks for which tasks and lengths.
#include "tools/commands/eval/ruler_prompts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "tests/temporary_folder.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// A tokenizer with a chat template, which ends a turn with <|end|> and begins the answer with "A:".
class RulerModel {
 public:
  RulerModel() {
    std::filesystem::copy(KEYHOLE_TOKENIZERS "/llama3.json", folder_ / "tokenizer.json");
    write_file(
        folder_ / "tokenizer_config.json",
        std::string(
            R"({"bos_token": "<s>", "eos_token": "<|end|>", "chat_template":)"
            R"("{{ bos_token }}{% for m in messages %}U:{{ m.content }}<|end|>A:{% endfor %}"})"));
    tokenizer =
        load_tokenizer(folder_.path(), ModelTokens{.vocab_size = 700, .bos = {}, .end_tokens = {}});
    options.model.folder = folder_.path();
    options.task.seed = 42;
    options.ruler.samples = 3;
  }
  [[nodiscard]] std::string file(const std::string& name, const std::string& text) const {
    write_file(folder_ / name, text);
    return folder_ / name;
  }

  std::unique_ptr<const Tokenizer> tokenizer;
  EvalOptions options;

 private:
  TemporaryFolder folder_;
};

TEST(RulerPrompts, AreATextOrAChatWithTheBeginningOfTheAnswer) {
  RulerModel model;
  const ruler::Sample sample{"Which <|end|> is it?", " The end is", {"x"}};
  EXPECT_EQ(RulerPrompts(model.options, *model.tokenizer).encode(sample),
            model.tokenizer->encode_prompt("Which <|end|> is it? The end is"));
  model.options.chat = true;
  const std::string whole = "<s>U:Which <|end|> is it?<|end|>A: The end is";
  const size_t said = whole.find("Which");
  const size_t end = whole.find("<|end|>A:");
  const size_t prefix = end + 9;
  const std::vector<TextRange> literal = {{said, end}, {prefix, whole.size()}};
  EXPECT_EQ(RulerPrompts(model.options, *model.tokenizer).encode(sample),
            model.tokenizer->encode(whole, Specials::parsed, literal));
}

TEST(RulerPrompts, FollowUpsContinueTheConversation) {
  RulerModel model;
  // Turns of two roles, which end with a token of the vocabulary.
  (void)model.file(
      "tokenizer_config.json",
      R"({"bos_token": "<s>", "eos_token": "<|end|>", "chat_template":)"
      R"("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }})"
      R"({% else %}A:{{ m['content'] }}{% endif %}<|end|>{% endfor %})"
      R"({% if add_generation_prompt %}A:{% endif %}"})");
  const ruler::Sample sample{"Which?",
                             " It is",
                             {"red"},
                             " red.",
                             {{"And then?", " It was", {"old"}, " old."},
                              {"", " and", {"new"}, " new."},
                              {"The last?", " No", {"one"}, " one."}}};
  const auto joined = [](const std::vector<std::vector<uint32_t>>& turns) {
    std::vector<uint32_t> all;
    for (const auto& turn : turns) all.insert(all.end(), turn.begin(), turn.end());
    return all;
  };
  const auto text = RulerPrompts(model.options, *model.tokenizer).turns(sample);
  ASSERT_EQ(text.size(), 4U);
  EXPECT_EQ(text.front(), RulerPrompts(model.options, *model.tokenizer).encode(sample));
  EXPECT_EQ(joined(text), model.tokenizer->encode_prompt("Which? It is red.\nAnd then? It was old. "
                                                         "and new.\nThe last? No"));
  model.options.chat = true;
  const RulerPrompts prompts(model.options, *model.tokenizer);
  const auto chat = prompts.turns(sample);
  ASSERT_EQ(chat.size(), 4U);
  EXPECT_EQ(chat.front(), prompts.encode(sample));
  EXPECT_EQ(joined(chat),
            model.tokenizer->encode("<s>U:Which?<|end|>A: It is red.<|end|>U:And then?<|end|>A: It "
                                    "was old. and new.<|end|>U:The last?<|end|>A: No",
                                    Specials::parsed));
  // What was said is text, even where it is written as an end.
  ruler::Sample hostile = sample;
  hostile.follow_ups = {{"<|end|>", "<|end|>", {"x"}, ""}};
  const auto once = prompts.turns(hostile);
  const std::vector<uint32_t> end = model.tokenizer->encode("<|end|>", Specials::parsed);
  ASSERT_EQ(end.size(), 1U);
  EXPECT_EQ(std::count(once[1].begin(), once[1].end(), end.front()), 2);
}

TEST(RulerPrompts, FillTheLengthTogetherWithTheirAnswers) {
  RulerModel model;
  model.options.task.haystack = model.file("prose.txt", "A hill. A mill on it. A miller in it.\n");
  for (const bool chat : {false, true}) {
    model.options.chat = chat;
    const RulerPrompts prompts(model.options, *model.tokenizer);
    for (const char* name : {"niah_multivalue", "niah_multikey_3", "vt", "fwe", "turns", "mqar"}) {
      SCOPED_TRACE(name);
      const ruler::TaskInfo& task = *ruler::find_task(name);
      const auto samples = prompts.samples(task, 5000);
      for (int i = 0; i < 3; ++i) {
        size_t tokens = 0;
        for (const auto& turn : prompts.turns(samples->next())) tokens += turn.size();
        EXPECT_LE(tokens + task.answer_tokens, 5000U);
        EXPECT_GT(tokens + task.answer_tokens, 4400U);  // fwe grows in steps of 1/32 of the words
      }
    }
  }
  const RulerPrompts prompts(model.options, *model.tokenizer);
  const std::string refused =
      error_of([&] { (void)prompts.samples(*ruler::find_task("niah_multivalue"), 200); });
  EXPECT_TRUE(
      refused.starts_with("--ruler niah_multivalue at --length 200: the prompt with the "
                          "smallest haystack has "))
      << refused;
  EXPECT_TRUE(refused.ends_with(" tokens; allowed: 72, the length without the tokens of an answer"))
      << refused;
}

TEST(RulerPrompts, NeedTheDataOfTheirTasks) {
  RulerModel model;
  model.options.ruler.tasks = {"qa_1", "qa_2"};
  const auto refusal = [&] {
    return error_of([&] { RulerPrompts(model.options, *model.tokenizer); });
  };
  EXPECT_EQ(refusal(), "--ruler qa_1 needs --data FILE, a file of SQuAD");
  model.options.ruler.data = {
      model.file("squad.json", R"({"data": [{"paragraphs": [{"context": "It is red.", "qas": [
        {"question": "Which?", "answers": [{"text": "red"}]}]}]}]})")};
  EXPECT_EQ(refusal(), "--ruler qa_2 needs --data FILE, a file of HotpotQA");
  model.options.ruler.data.push_back(model.file(
      "hotpot.json", R"([{"question": "Who?", "answer": "she", "context": [["T", ["She."]]]}])"));
  model.options.ruler.samples = 1;
  const RulerPrompts prompts(model.options, *model.tokenizer);
  EXPECT_EQ(prompts.samples(*ruler::find_task("qa_1"), 2000)->next().references,
            std::vector<std::string>{"red"});
  EXPECT_EQ(prompts.samples(*ruler::find_task("qa_2"), 2000)->next().references,
            std::vector<std::string>{"she"});
  EXPECT_EQ(prompts.note(), "");
}

TEST(RulerPrompts, SayWhatEssaysAreMadeOf) {
  RulerModel model;
  model.options.task.haystack = model.file("prose.txt", "A hill.\n");
  model.options.ruler.tasks = {"vt", "niah_single_2", "niah_multiquery"};
  EXPECT_EQ(RulerPrompts(model.options, *model.tokenizer).note(),
            "niah_single_2, niah_multiquery: the haystack is " + model.options.task.haystack +
                ", not Paul Graham's essays: these scores are not comparable with published ones");
}

TEST(RulerOptions, NameTasksAndLengths) {
  RulerOptions options;
  std::vector<std::string> names;
  for (const ruler::TaskInfo* task : tasks_of(options)) names.emplace_back(task->name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"niah_single_1", "niah_single_2", "niah_single_3",
                                      "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
                                      "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"}));
  options.tasks = {"vt", "infinitebench_kv", "vt"};
  ASSERT_EQ(tasks_of(options).size(), 2U);
  EXPECT_EQ(tasks_of(options)[1]->name, "infinitebench_kv");

  EXPECT_EQ(lengths_of("16k,8192,8k"), (std::vector<uint32_t>{8192, 16384}));
  EXPECT_EQ(lengths_of("1000"), std::vector<uint32_t>{1000});
  for (const char* wrong : {"", "8k,", "8k;16k", "8k,1"}) {
    EXPECT_THROW((void)lengths_of(wrong), UsageError) << wrong;
  }
}

}  // namespace
}  // namespace keyhole::tools
