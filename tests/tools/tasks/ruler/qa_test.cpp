// Questions about documents: SQuAD and HotpotQA as they come, and RULER's text letter by letter.
#include <algorithm>
#include <set>

#include "tests/temporary_folder.h"
#include "tests/tools/tasks/ruler/ruler_samples.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools::ruler {
namespace {

constexpr const char* kSquad = R"({"version": "v2.0", "data": [
  {"title": "A", "paragraphs": [
    {"context": "d {query}", "qas": [
      {"question": "q0?", "is_impossible": false, "answers": [{"text": "one"}, {"text": "two"}]},
      {"question": "never?", "is_impossible": true, "answers": []}]},
    {"context": "b", "qas": [{"question": "q1?", "answers": [{"text": "three"}]}]},
    {"context": "a", "qas": []}]},
  {"title": "B", "paragraphs": [
    {"context": "c", "qas": [{"question": "q2?", "is_impossible": false, "answers": [{"text": "x"}]}]},
    {"context": "b", "qas": []}]}]})";

constexpr const char* kHotpot = R"([
  {"question": "who?", "answer": "me", "context": [["T2", ["One.", " Two."]], ["T1", ["Three."]]]},
  {"question": "where?", "answer": "here", "context": [["T1", ["Three."]], ["T3", []]]}])";

TEST(RulerQaData, ReadsSquad) {
  const QaData data = parse_qa(kSquad, "squad.json");
  EXPECT_TRUE(data.is_squad);
  EXPECT_EQ(data.documents, (std::vector<std::string>{"a", "b", "c", "d {query}"}));
  ASSERT_EQ(data.questions.size(), 3U);
  EXPECT_EQ(data.questions[0].text, "q0?");
  EXPECT_EQ(data.questions[0].answers, (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(data.questions[0].documents, std::vector<size_t>{3});
  EXPECT_EQ(data.questions[0].near_documents, (std::vector<size_t>{1, 0}));
  EXPECT_EQ(data.questions[2].near_documents, std::vector<size_t>{1});
}

TEST(RulerQaData, ReadsHotpotQa) {
  const QaData data = parse_qa(kHotpot, "hotpot.json");
  EXPECT_FALSE(data.is_squad);
  EXPECT_EQ(data.documents, (std::vector<std::string>{"T1\nThree.", "T2\nOne. Two.", "T3\n"}));
  ASSERT_EQ(data.questions.size(), 2U);
  EXPECT_EQ(data.questions[0].answers, std::vector<std::string>{"me"});
  EXPECT_EQ(data.questions[0].documents, (std::vector<size_t>{1, 0}));
  EXPECT_TRUE(data.questions[0].near_documents.empty());
}

TEST(RulerQaData, RefusesOtherFiles) {
  for (const char* text :
       {"", "{}", "[1]", R"({"data": [{"paragraphs": 3}]})", R"([{"question": 1}])"}) {
    EXPECT_TRUE(error_of([&] {
                  (void)parse_qa(text, "file.json");
                }).starts_with("file.json is no file of SQuAD or HotpotQA: "))
        << text;
  }
  EXPECT_EQ(error_of([] { (void)parse_qa("[]", "file.json"); }),
            "file.json has no question with an answer");
}

TEST(RulerQa, AsksAboutNumberedDocuments) {
  const QaData data = parse_qa(kSquad, "squad.json");
  TaskSetup setup = setup_of(4096);
  setup.qa = &data;
  setup.samples = 3;
  const auto generator = generator_of("qa_1", setup);
  EXPECT_EQ(generator->size_search().step, 10U);
  for (const size_t count : {2U, 3U, 4U, 6U}) {
    const Sample sample = generator->draw(0, count);
    const std::string begin =
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output "
        "any other words.\n\nThe following are given documents.\n\n";
    const std::string end =
        "\n\nAnswer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nQuestion: q0?";
    const std::string context = between(sample.prompt, begin, end);
    EXPECT_EQ(sample.prompt, begin + context + end);
    EXPECT_EQ(sample.prefix, " Answer:");
    EXPECT_EQ(sample.references, (std::vector<std::string>{"one", "two"}));
    std::multiset<std::string> documents;
    for (size_t i = 0; i < count; ++i) {
      const std::string title = "Document " + std::to_string(i + 1) + ":\n";
      const std::string last = i + 1 == count ? "\n\n" : "\n\nDocument " + std::to_string(i + 2);
      documents.insert(between(context + "\n\n", title, last));
    }
    EXPECT_EQ(documents.count("d {query}"), 1U);
    // Paragraphs of the same article come first; where there are no more documents, they are repeated.
    if (count == 2) {
      EXPECT_EQ(documents.count("c"), 0U);
    }
    if (count == 3) {
      EXPECT_EQ(documents, (std::multiset<std::string>{"a", "b", "d {query}"}));
    }
    if (count == 4) {
      EXPECT_EQ(documents, (std::multiset<std::string>{"a", "b", "c", "d {query}"}));
    }
    if (count == 6) {
      EXPECT_EQ(documents, (std::multiset<std::string>{"a", "a", "b", "b", "c", "d {query}"}));
    }
  }
  EXPECT_EQ(generator->draw(2, 3).references, std::vector<std::string>{"x"});
  setup.samples = 4;
  EXPECT_EQ(error_of([&] { (void)generator_of("qa_1", setup); }),
            "--samples is 4; allowed: 1 to 3, the questions of the data");
}

}  // namespace
}  // namespace keyhole::tools::ruler
