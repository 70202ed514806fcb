// What a turn adds to the tokens of a conversation, as a text and in the form of a template.
#include "tools/commands/decode/turns.h"

#include <gtest/gtest.h>

#include "tests/tools/tokenizer/small_tokenizer.h"

namespace keyhole::tools {
namespace {

using Tokens = std::vector<uint32_t>;

/// A letter for each side, d, e and c, and <end> (21) behind what it says.
ChatTemplate small_chat() {
  return ChatTemplate::parse(
      "{% for m in messages %}"
      "{% if m.role == 'system' %}d{% elif m.role == 'user' %}e{% else %}c{% endif %}"
      "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}c{% endif %}",
      "<s>", "", "template");
}

TEST(Turns, ATextGoesOn) {
  ModelTokens model = kSmallModel;
  model.end_tokens = {21};
  const JsonTokenizer tokenizer = make_tokenizer(small_tokenizer(), model);
  const Turns turns(tokenizer);
  const Tokens first = turns.with({}, "abc");
  EXPECT_EQ(first, (Tokens{20, 11}));
  EXPECT_EQ(turns.with({20, 11, 0}, "ab"), (Tokens{20, 11, 0, 10}));
  // The end token of an answer is not part of the text; a name of one is text.
  EXPECT_EQ(turns.with({20, 11, 0, 21}, "ab"), (Tokens{20, 11, 0, 10}));
  EXPECT_EQ(turns.end_tokens(), Tokens{21});
  EXPECT_TRUE(turns.answer_state().inside);
}

TEST(Turns, AChatHasTheFormOfItsTemplate) {
  // No end tokens: the template's own end of an answer is one.
  const JsonTokenizer tokenizer = make_tokenizer(small_tokenizer());
  const Turns turns(tokenizer, small_chat(), "");
  EXPECT_EQ(turns.end_tokens(), Tokens{21});
  EXPECT_FALSE(turns.answer_state().inside);
  const Tokens first = turns.with({}, "ab");
  EXPECT_EQ(first, (Tokens{4, 10, 21, 2}));
  // An answer that ended, and one that was cut off.
  const Tokens both{4, 10, 21, 2, 0, 21, 4, 1, 21, 2};
  EXPECT_EQ(turns.with({4, 10, 21, 2, 0, 21}, "b"), both);
  EXPECT_EQ(turns.with({4, 10, 21, 2, 0}, "b"), both);
  const Turns with_system(tokenizer, small_chat(), "a");
  EXPECT_EQ(with_system.with({}, "ab"), (Tokens{3, 0, 21, 4, 10, 21, 2}));
  EXPECT_EQ(with_system.with({4, 10, 21, 2, 0}, "b"), both);
}

TEST(Turns, NobodyCanWriteTheEndOfATurn) {
  const JsonTokenizer tokenizer = make_tokenizer(small_tokenizer());
  EXPECT_EQ(Turns(tokenizer, small_chat(), "").with({}, "<end>"),
            (Tokens{4, 5, 4, 8, 3, 6, 21, 2}));
  EXPECT_EQ(Turns(tokenizer).with({}, "<end>"), (Tokens{20, 5, 4, 8, 3, 6}));
}

}  // namespace
}  // namespace keyhole::tools
