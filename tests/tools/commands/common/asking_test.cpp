// Tasks as texts and as chats: what is put together from pieces is what the template writes as a whole.
#include "tools/commands/common/asking.h"

#include <gtest/gtest.h>

#include "tools/tokenizer/byte_tokenizer.h"

namespace keyhole::tools {
namespace {

const Question kQuestion{"\n?abcde=", "@fghij=12345\n", "What is abcde?", {"12345"}};

/// A template whose every part can be seen in bytes.
ChatTemplate chat() {
  return ChatTemplate::parse(
      "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</{{ m.role }}>{% "
      "endfor %}"
      "{% if add_generation_prompt %}[assistant]{% endif %}",
      "<s>", "</s>", "test");
}

TEST(Asking, ATextIsContinued) {
  const ByteTokenizer tokenizer({.vocab_size = 264, .bos = 256, .end_tokens = {257}});
  const Asking asking(tokenizer, std::nullopt);
  EXPECT_EQ(asking.context("ab"), (std::vector<uint32_t>{256, 'a', 'b'}));
  EXPECT_EQ(tokenizer.decode(asking.first_question(kQuestion)), kQuestion.prompt);
  EXPECT_EQ(tokenizer.decode(asking.next_question(kQuestion)), kQuestion.prompt);
  EXPECT_EQ(tokenizer.decode(asking.answer(kQuestion)), kQuestion.answer);
  EXPECT_TRUE(asking.right(kQuestion, "@fghij=12345\n"));
  EXPECT_TRUE(asking.right(kQuestion, "@fghij=12345\n\nmore"));
  EXPECT_FALSE(asking.right(kQuestion, "@fghij=1234"));
  EXPECT_FALSE(asking.right(kQuestion, "12345\n"));
  EXPECT_FALSE(asking.complete(kQuestion, "@fghij=12345"));
  EXPECT_TRUE(asking.complete(kQuestion, "@fghij=12345\n"));
  EXPECT_TRUE(asking.complete(kQuestion, std::string(kQuestion.answer.size() + 8, 'x')));
}

TEST(Asking, AChatIsTheTemplatesOwnText) {
  const ByteTokenizer tokenizer({.vocab_size = 264, .bos = 256, .end_tokens = {257}});
  const Asking asking(tokenizer, chat());
  const std::string context = "  the context\n";
  const std::string head = tokenizer.decode(asking.context(context));
  EXPECT_TRUE(head.starts_with("<s>[user]")) << head;
  EXPECT_TRUE(head.ends_with(context)) << head;
  const std::string tail = tokenizer.decode(asking.first_question(kQuestion));
  EXPECT_TRUE(tail.ends_with("What is abcde?</user>[assistant]")) << tail;
  const std::string said = (head + tail).substr(9, head.size() + tail.size() - 9 - 18);
  const std::vector<ChatMessage> messages{{ChatMessage::Role::user, said}};
  EXPECT_EQ(chat().render(messages).text, head + tail);
  EXPECT_EQ(tokenizer.decode(asking.answer(kQuestion)), "12345</assistant>");
  EXPECT_EQ(tokenizer.decode(asking.next_question(kQuestion)),
            "[user]What is abcde?</user>[assistant]");
}

TEST(Asking, AnAnswerInAChatContainsTheNumber) {
  const ByteTokenizer tokenizer({.vocab_size = 264, .bos = 256, .end_tokens = {257}});
  const Asking asking(tokenizer, chat());
  EXPECT_TRUE(asking.right(kQuestion, "It is 12345."));
  EXPECT_TRUE(asking.right(kQuestion, "112345? No, 12345"));
  EXPECT_FALSE(asking.right(kQuestion, "112345"));
  EXPECT_FALSE(asking.right(kQuestion, "123456"));
  EXPECT_FALSE(asking.right(kQuestion, "1234"));
  EXPECT_FALSE(asking.complete(kQuestion, "12345\n"));
}

TEST(Asking, AFreeAnswerContainsAllValues) {
  const ByteTokenizer tokenizer({.vocab_size = 264, .bos = 256, .end_tokens = {257}});
  const Question question{"\nWhich are", "", "Which?", {"123", "ABC"}};
  const Asking asking(tokenizer, std::nullopt);
  EXPECT_TRUE(asking.right(question, " ABC and 123."));
  EXPECT_FALSE(asking.right(question, "ABCD and 123"));
  EXPECT_EQ(Asking::found(question, "ABCD and 123"), 0.5);
  EXPECT_EQ(Asking::found(question, ""), 0.0);
  EXPECT_FALSE(asking.complete(question, " \n 123, ABC"));
  EXPECT_TRUE(asking.complete(question, " 123]"));
  EXPECT_TRUE(asking.complete(question, " 123\n"));
  EXPECT_EQ(tokenizer.decode(asking.answer(question)), "123, ABC.\n");
}

}  // namespace
}  // namespace keyhole::tools
