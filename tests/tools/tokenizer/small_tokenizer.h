// A tokenizer.json that a test can change: six letters, three merges, two special tokens.
#pragma once

#include "runtime/files/json.h"
#include "tools/tokenizer/tokenizer_json.h"

namespace keyhole::tools {

inline const ModelTokens kSmallModel{.vocab_size = 64, .bos = {}, .end_tokens = {}};

/// A byte-level tokenizer.json, without the bytes that the tests do not write: U+0120 is the space.
inline nlohmann::json small_tokenizer() {
  return nlohmann::json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
      {"id": 20, "content": "<s>", "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false},
      {"id": 21, "content": "<end>", "special": true, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false},
      {"id": 22, "content": "<tool>", "special": false, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [20], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
      "fuse_unk": false, "byte_fallback": false,
      "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "<": 5, ">": 6, "s": 7, "n": 8, "\u0120": 9, "ab": 10, "abc": 11, "\u0120ab": 12},
      "merges": ["a b", ["ab", "c"], "\u0120 ab"]}})");
}

inline JsonTokenizer make_tokenizer(const nlohmann::json& file,
                                    const ModelTokens& model = kSmallModel) {
  return JsonTokenizer(JsonPart(file, "tokenizer.json: "), model);
}

}  // namespace keyhole::tools
