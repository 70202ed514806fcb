// What a tokenizer.json can ask for, and what is refused of it. Equality with Hugging Face's library: golden_test.cpp.
#include <gtest/gtest.h>

#include "tests/temporary_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using Ids = std::vector<uint32_t>;

TEST(JsonTokenizer, MergesByRankWithinWords) {
  const json file = small_tokenizer();
  const JsonTokenizer tokenizer = make_tokenizer(file);
  EXPECT_EQ(tokenizer.encode("abcabd ab"), (Ids{11, 10, 3, 12}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  EXPECT_EQ(tokenizer.encode_prompt("a"), (Ids{20, 0}));
  EXPECT_EQ(tokenizer.decode(Ids{20, 11, 12, 21, 22, 63}), "abc ab<tool>");
  EXPECT_EQ(tokenizer.vocab_size(), 23U);
}

TEST(JsonTokenizer, SpecialTokensAreParsedOnlyWhereAskedFor) {
  const json file = small_tokenizer();
  const JsonTokenizer tokenizer = make_tokenizer(file);
  EXPECT_EQ(tokenizer.encode("a<s>b"), (Ids{0, 5, 7, 6, 1}));
  EXPECT_EQ(tokenizer.encode("a<s>b", Specials::parsed), (Ids{0, 20, 1}));
  // Not special: part of the language.
  EXPECT_EQ(tokenizer.encode("a<tool>b"), (Ids{0, 22, 1}));
}

TEST(JsonTokenizer, NothingSpecialIsParsedInLiteralRanges) {
  const json file = small_tokenizer();
  const JsonTokenizer tokenizer = make_tokenizer(file);
  const std::string text = "<s>a<s><end>b<s>";
  const std::vector<TextRange> said{{3, 7}};
  EXPECT_EQ(tokenizer.encode(text, Specials::parsed, said), (Ids{20, 0, 5, 7, 6, 21, 1, 20}));
  // A token that only begins in what was said is not parsed either.
  const std::vector<TextRange> half{{0, 4}, {12, 14}};
  EXPECT_EQ(tokenizer.encode(text, Specials::parsed, half), (Ids{5, 7, 6, 0, 20, 21, 1, 5, 7, 6}));
  // The ranges follow the text where broken bytes make it longer: U+FFFD has no token here.
  const std::vector<TextRange> behind{{2, 5}};
  EXPECT_EQ(tokenizer.encode("\xFF\xFF<s><s>", Specials::parsed, behind), (Ids{5, 7, 6, 20}));
}

TEST(JsonTokenizer, TokensHaveNamesAndIds) {
  const json file = small_tokenizer();
  const JsonTokenizer tokenizer = make_tokenizer(file);
  EXPECT_EQ(tokenizer.token_id("<end>"), 21U);
  EXPECT_EQ(tokenizer.token_id("abc"), 11U);
  EXPECT_EQ(tokenizer.token_id("abcd"), std::nullopt);
  EXPECT_EQ(tokenizer.token_text(21), "<end>");
  EXPECT_EQ(tokenizer.token_text(15), "");
  EXPECT_TRUE(tokenizer.is_special(21));
  EXPECT_FALSE(tokenizer.is_special(22));
}

TEST(JsonTokenizer, TokensWithoutARowAreLeftOut) {
  json file = small_tokenizer();
  file["added_tokens"].push_back({{"id", 64U}, {"content", "<image>"}, {"special", true}});
  EXPECT_EQ(make_tokenizer(file).token_id("<image>"), std::nullopt);
}

/// A change to the file, and what the error must say.
struct Refusal {
  const char* pointer;
  const char* value;
  std::vector<std::string> parts;
};

TEST(JsonTokenizer, RefusesByNameWhatIsNotBuiltIn) {
  const std::vector<Refusal> refusals{
      {"/model/type", R"("Unigram")", {"model.type", "Unigram", "BPE"}},
      {"/model/type", R"("WordPiece")", {"model.type", "WordPiece"}},
      {"/model/dropout", "0.5", {"model.dropout", "0.5"}},
      {"/model/continuing_subword_prefix", R"("##")", {"continuing_subword_prefix", "##"}},
      {"/model/end_of_word_suffix", R"("</w>")", {"end_of_word_suffix", "</w>"}},
      {"/model/unk_token", R"("<unk>")", {"model.unk_token", "<unk>"}},
      {"/model/vocab/a", "64", {"model.vocab", "\"a\"", "64"}},
      {"/model/vocab/a", "-1", {"model.vocab", "-1"}},
      {"/model/vocab/a", "1", {"model.vocab", "\"a\"", "\"b\""}},
      {"/model/merges/1", R"("ab x")", {"model.merges[1]", "\"x\""}},
      {"/model/merges/1", R"(["ab"])", {"model.merges[1]"}},
      {"/model/merges/1", R"("a b c")", {"model.merges[1]"}},
      {"/model/merges/1", "7", {"model.merges[1]"}},
      {"/normalizer", R"({"type": "Precompiled"})", {"normalizer.type", "Precompiled", "NFC"}},
      {"/normalizer",
       R"({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Nmt"}]})",
       {"normalizer.normalizers[1].type", "Nmt"}},
      {"/normalizer",
       R"({"type": "Replace", "pattern": {"Regex": "(a"}, "content": ""})",
       {"normalizer.pattern.Regex", "(a"}},
      {"/pre_tokenizer",
       R"({"type": "BertPreTokenizer"})",
       {"pre_tokenizer.type", "BertPreTokenizer"}},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "[a&&b]"}, "behavior": "Isolated"})",
       {"pre_tokenizer.pattern.Regex", "&&"}},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "[a[b]]"}, "behavior": "Isolated"})",
       {"pre_tokenizer.pattern.Regex", "class inside a class"}},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"String": " "}, "behavior": "Other"})",
       {"pre_tokenizer.behavior", "Other", "Isolated"}},
      {"/pre_tokenizer",
       R"({"type": "Metaspace", "replacement": "__"})",
       {"pre_tokenizer.replacement", "__"}},
      {"/decoder", R"({"type": "WordPiece"})", {"decoder.type", "WordPiece"}},
      {"/decoder", "null", {"decoder", "missing"}},
      {"/decoder",
       R"({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "a"}, "content": ""}]})",
       {"decoder.decoders[1].type", "Fuse"}},
      {"/post_processor",
       R"({"type": "RobertaProcessing"})",
       {"post_processor.type", "RobertaProcessing"}},
      {"/post_processor/special_tokens/<s>/ids",
       "[64]",
       {"post_processor.special_tokens.<s>.ids[0]", "64"}},
      {"/post_processor/single", "[]", {"post_processor.single", "Sequence"}},
      {"/added_tokens/0/id", "3", {"added_tokens[0].id", "3"}},
      {"/added_tokens/0/id", "21", {"added_tokens[1].id", "21"}},
      {"/added_tokens/0/content", R"("")", {"added_tokens[0].content"}},
      {"/version", R"("2.0")", {"version", "2.0"}},
  };
  for (const Refusal& refusal : refusals) {
    json file = small_tokenizer();
    file[json::json_pointer(refusal.pointer)] = json::parse(refusal.value);
    const std::string error = error_of([&] { (void)make_tokenizer(file); });
    EXPECT_TRUE(error.starts_with("tokenizer.json: ")) << refusal.pointer << ": " << error;
    for (const std::string& part : refusal.parts) {
      EXPECT_NE(error.find(part), std::string::npos) << refusal.pointer << ": " << error;
    }
  }
}

TEST(JsonTokenizer, RefusesWhatIsNestedTooDeep) {
  for (const auto& [field, list] : {std::pair{"normalizer", "normalizers"},
                                    {"pre_tokenizer", "pretokenizers"},
                                    {"decoder", "decoders"},
                                    {"post_processor", "processors"}}) {
    json part = {{"type", "ByteLevel"}};
    if (std::string(field) == "normalizer") part["type"] = "NFC";
    for (int i = 0; i < 100; ++i) part = {{"type", "Sequence"}, {list, json::array({part})}};
    json file = small_tokenizer();
    file[field] = part;
    EXPECT_NE(error_of([&] { (void)make_tokenizer(file); }).find("nested too deep"),
              std::string::npos)
        << field;
  }
}

TEST(JsonTokenizer, AnExpressionThatTakesForeverIsAnError) {
  json file = small_tokenizer();
  file["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", "(a+)+[cd]"}}}, {"behavior", "Isolated"}};
  const JsonTokenizer tokenizer = make_tokenizer(file);
  EXPECT_NE(error_of([&] {
              (void)tokenizer.encode(std::string(200, 'a') + "b");
            }).find("pre_tokenizer.pattern.Regex"),
            std::string::npos);
}

/// A folder with the small tokenizer and other files.
class Folder {
 public:
  explicit Folder(const json& file = small_tokenizer()) { write("tokenizer.json", file.dump()); }
  void write(const char* name, const std::string& text) { write_file(folder_ / name, text); }
  std::unique_ptr<const Tokenizer> load(const ModelTokens& model = kSmallModel) const {
    return load_tokenizer(folder_.path(), model);
  }
  std::string error() const {
    return error_of([&] { (void)load(); });
  }

 private:
  TemporaryFolder folder_;
};

TEST(LoadTokenizer, EndTokensAreThoseOfAllFiles) {
  Folder folder;
  EXPECT_EQ(folder.load()->end_tokens(), Ids{});
  EXPECT_EQ(folder.load({.vocab_size = 64, .bos = 20, .end_tokens = {4}})->end_tokens(), Ids{4});
  folder.write("generation_config.json", R"({"eos_token_id": [3, 2, 99]})");
  folder.write("tokenizer_config.json",
               R"({"eos_token": "<end>", "bos_token": {"content": "<s>"}})");
  folder.write("special_tokens_map.json", R"({"eos_token": {"content": "<tool>"}})");
  EXPECT_EQ(folder.load({.vocab_size = 64, .bos = 20, .end_tokens = {4}})->end_tokens(),
            (Ids{2, 3, 4, 21, 22}));
  folder.write("generation_config.json", R"({"eos_token_id": 1})");
  EXPECT_EQ(folder.load()->end_tokens(), (Ids{1, 21, 22}));
}

TEST(LoadTokenizer, AddBosTokenOutranksTheTemplate) {
  Folder folder;
  folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "add_bos_token": false})");
  EXPECT_EQ(folder.load()->encode_prompt("a"), (Ids{0}));
  folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "add_bos_token": true})");
  EXPECT_EQ(folder.load()->encode_prompt("a"), (Ids{20, 0}));
  json file = small_tokenizer();
  file["post_processor"] = nullptr;
  Folder bare(file);
  EXPECT_EQ(bare.load()->encode_prompt("a"), (Ids{0}));
  bare.write("tokenizer_config.json", R"({"bos_token": "<s>", "add_bos_token": true})");
  EXPECT_EQ(bare.load()->encode_prompt("a"), (Ids{20, 0}));
}

TEST(LoadTokenizer, BrokenFilesAreNamed) {
  Folder folder;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                           "special_tokens_map.json"}) {
    for (const char* text :
         {"", "{", "[]", "7", "\"x\"", R"({"eos_token": 7, "eos_token_id": "x"})"}) {
      Folder broken;
      broken.write(name, text);
      EXPECT_NE(broken.error().find(name), std::string::npos)
          << name << " " << text << ": " << broken.error();
    }
  }
}

}  // namespace
}  // namespace keyhole::tools
