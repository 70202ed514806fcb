// What a user can say about Keyhole under llama.cpp: the environment variable KEYHOLE_GGML.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace keyhole::llama_cpp {

/// The settings, with the values that hold where the variable does not name them.
struct Settings {
  /// The spec of an index type as in keyhole_session_config; "auto"; or "exact": every token is attended exactly.
  std::string index = "auto";
  /// What stands for tokens that a step does not read: "none", "mean", "centroid", "second" or "codes". "": what the
  /// index type has by itself.
  std::string tail;
  /// Tokens that a search returns for each query head. 0: what the index type has by itself.
  uint32_t top_k = 0;
  /// Tokens at the beginning of a sequence, and at its end, that are attended exactly.
  uint32_t sink = 128;
  uint32_t window = 512;
  /// Offloaded K and V are kept in int8 in the place of the cache's 16 bits.
  bool int8 = false;
  /// Threads of Keyhole's pool, the caller's included. 0: as many as llama.cpp computes with.
  uint32_t threads = 0;
  /// llama.cpp's own cache is filled as well. It takes as much memory again, and it is what states are saved from, what
  /// sequences are made from after tokens have left the middle or have been shifted, and what llama.cpp attends in
  /// layers that Keyhole does not take. None: it is filled in host memory, and on a card as long as llama.cpp attends.
  std::optional<bool> copy;
  /// Of a card alone: llama.cpp attends, over its own cache in the card's memory, until a sequence is to decode behind
  /// at least so many tokens; then they go to Keyhole.
  uint32_t card = 16384;
  /// Of a card alone: where K and V of prompts behind that length lie while the prompts come: on the card as long as it
  /// has room, or, with "host", nowhere but in Keyhole's sessions.
  bool rows_on_card = true;
  /// Of a card alone, and without `copy`: a step of one sequence, or with `together` of several, of up to nine tokens
  /// of each, becomes one CUDA graph when it is the second of its kind.
  bool graphs = true;
  /// The new tokens of several sequences attend by one call of the library; else by one for each sequence.
  bool together = true;
  /// The pattern by which batches of at least `prompt_from` tokens attend, see keyhole_session_set_extend_pattern;
  /// "none": they attend as steps do.
  std::string prompt = "dense";
  uint32_t prompt_from = 128;
  /// Path of a file of budgets, see keyhole_session_config. "": none.
  std::string budgets;
  /// The line of the log that says which layers Keyhole takes, how, and what memory that needs is a warning, which
  /// programs show without being asked.
  bool plan = false;
};

/// Reads "key=value;key=value". A key stands for the member of that name; kv=same|int8 stands for `int8`,
/// rows=card|host for `rows_on_card`; copy, plan, graphs and together take on or off. Values are not looked at further:
/// what an index spec may say the library knows. Throws std::invalid_argument that names the key, the value and what is
/// allowed, for an unknown or repeated key, a missing or empty value, and a number out of range.
[[nodiscard]] Settings parse_settings(std::string_view text);

}  // namespace keyhole::llama_cpp
