// The table of settings: every field of keyhole_budget and keyhole_session_config, with its type, its range, what 0
// stands for and its words. Configs are checked, completed, read back, saved, loaded and parsed by walking it, so a
// new field is written in two places: the public header and this table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "keyhole/keyhole.h"

namespace keyhole {

/// The C type of a field.
enum class SettingKind : uint8_t {
  count,   ///< uint32_t
  bytes,   ///< size_t
  word,    ///< int32_t, one of the words
  real,    ///< float
  share,   ///< double
  text,    ///< const char*, copied by the library
  layers,  ///< const uint32_t* followed by its uint32_t count
  budget,  ///< keyhole_budget
};

/// A value of an enumeration: its place in the list is its number.
struct SettingWord {
  const char* word;      ///< in files and on the command line
  const char* constant;  ///< in the public header
  const char* help;
};

/// What the value 0 of a number means.
enum class Zero : uint8_t { number, automatic, none };

struct Range {
  double low = 0.0;
  double high = std::numeric_limits<double>::infinity();
  bool open = false;  ///< neither end is allowed
};

struct Setting {
  const char* name;
  SettingKind kind;
  size_t offset, size;       ///< in its struct
  Range range{};             ///< of count, real and share
  Zero zero = Zero::number;  ///< of a number
  double initial = 0;        ///< what the struct's init function sets
  double automatic = 0;      ///< what KEYHOLE_AUTO stands for; 0: chosen elsewhere
  std::span<const SettingWord> words{};
  const char* help;
};

namespace settings {

template <class Field>
consteval SettingKind kind_of() {
  if constexpr (std::is_same_v<Field, uint32_t>) return SettingKind::count;
  if constexpr (std::is_same_v<Field, int32_t>) return SettingKind::word;
  if constexpr (std::is_same_v<Field, size_t>) return SettingKind::bytes;
  if constexpr (std::is_same_v<Field, float>) return SettingKind::real;
  if constexpr (std::is_same_v<Field, double>) return SettingKind::share;
  if constexpr (std::is_same_v<Field, const char*>) return SettingKind::text;
  if constexpr (std::is_same_v<Field, keyhole_budget>) return SettingKind::budget;
}

inline constexpr double kMaxTokens = 2147483648.0;  // 2^31
inline constexpr double kMaxResident = kMaxTokens / 4;

inline constexpr SettingWord kAttendWords[] = {
    {"topk", "KEYHOLE_ATTEND_TOPK", "the top_k best keys of each search"},
    {"scored", "KEYHOLE_ATTEND_SCORED", "every key that was scored"},
    {"weight", "KEYHOLE_ATTEND_WEIGHT", "scored keys of a softmax weight above min_weight"},
    {"none", "KEYHOLE_ATTEND_NONE", "no search: a tail or a target decides what is read"}};
inline constexpr SettingWord kTailWords[] = {
    {"none", "KEYHOLE_TAIL_NONE", "nothing"},
    {"mean", "KEYHOLE_TAIL_MEAN", "one mean value"},
    {"centroid", "KEYHOLE_TAIL_CENTROID", "mean keys and values of partitions"},
    {"second", "KEYHOLE_TAIL_SECOND", "the same with the keys' variance"},
    {"codes", "KEYHOLE_TAIL_CODES", "each key's own code, of an index of type codes"}};
inline constexpr SettingWord kModeWords[] = {
    {"indexed", "KEYHOLE_MODE_INDEXED", "through the index"},
    {"exact", "KEYHOLE_MODE_EXACT", "every token"},
    {"resident", "KEYHOLE_MODE_RESIDENT", "sink and window only"}};
inline constexpr SettingWord kPlacementWords[] = {
    {"auto", "KEYHOLE_PLACE_AUTO", "on the device where there is one with enough memory"},
    {"host", "KEYHOLE_PLACE_HOST", "on the host"},
    {"device", "KEYHOLE_PLACE_DEVICE", "on the device, or an error"}};
inline constexpr SettingWord kAppendWords[] = {
    {"background", "KEYHOLE_APPEND_BACKGROUND", "on a thread of the session's own"},
    {"in-step", "KEYHOLE_APPEND_IN_STEP", "in the step that takes a block in"}};
inline constexpr SettingWord kActionWords[] = {
    {"report", "KEYHOLE_AUDIT_REPORT", "count it"},
    {"widen", "KEYHOLE_AUDIT_WIDEN", "double what the head reads"},
    {"exact", "KEYHOLE_AUDIT_EXACT", "attend everything from then on"}};
inline constexpr SettingWord kKvHostWords[] = {
    {"same", "KEYHOLE_KV_HOST_SAME", "as they come"},
    {"int8", "KEYHOLE_KV_HOST_INT8", "in int8, a scale for each channel of 256 tokens"}};

inline constexpr SettingWord kRowsByWords[] = {
    {"auto", "KEYHOLE_ROWS_BY_AUTO", "the device, or the host where memory cannot be pinned"},
    {"device", "KEYHOLE_ROWS_BY_DEVICE", "the device, from pinned memory"},
    {"host", "KEYHOLE_ROWS_BY_HOST", "the host, for the device"}};

inline constexpr Range kBelowOne{0, 1, true};

// clang-format off
#define KEYHOLE_FIELD(type, field) \
  .name = #field, .kind = kind_of<decltype(type::field)>(), \
  .offset = offsetof(type, field), .size = sizeof(type::field)
#define KEYHOLE_BUDGET(field) KEYHOLE_FIELD(keyhole_budget, field)
#define KEYHOLE_SESSION(field) KEYHOLE_FIELD(keyhole_session_config, field)

inline constexpr Setting kBudget[] = {
    {KEYHOLE_BUDGET(top_k), .range = {1, kMaxTokens}, .initial = 100,
     .help = "Keys that one search finds: of each query head, with codes of the KV head"},
    {KEYHOLE_BUDGET(attend), .words = kAttendWords,
     .help = "Which of the scored keys are attended"},
    {KEYHOLE_BUDGET(min_weight), .range = kBelowOne, .zero = Zero::automatic, .automatic = 1e-4,
     .help = "Softmax weight above which `attend` weight takes a key"},
    {KEYHOLE_BUDGET(tail), .words = kTailWords,
     .help = "What stands in for the keys that a step does not attend"},
    {KEYHOLE_BUDGET(error_target), .range = kBelowOne, .zero = Zero::none,
     .help = "Output error that a step must reach by its own estimate"},
    {KEYHOLE_BUDGET(mass_target), .range = kBelowOne, .zero = Zero::none,
     .help = "Share of the attention mass that a step must read by its own estimate"},
    {KEYHOLE_BUDGET(min_keys), .zero = Zero::automatic,
     .help = "Fewest keys that a step with a tail or a target attends"},
    {KEYHOLE_BUDGET(max_keys), .zero = Zero::automatic,
     .help = "Most keys that it attends beyond what the search found"},
};

inline constexpr Setting kSession[] = {
    {KEYHOLE_SESSION(max_tokens), .range = {1, kMaxTokens}, .zero = Zero::automatic,
     .automatic = 131072, .help = "Longest context in tokens"},
    {KEYHOLE_SESSION(sink), .range = {0, kMaxResident}, .initial = 128,
     .help = "First tokens that stay resident"},
    {KEYHOLE_SESSION(window), .range = {1, kMaxResident}, .initial = 512,
     .help = "Newest tokens that stay resident"},
    {KEYHOLE_SESSION(flush_block), .range = {1, kMaxResident}, .zero = Zero::automatic,
     .automatic = 64, .help = "Tokens that leave the window together"},
    {KEYHOLE_SESSION(mode), .words = kModeWords, .help = "What is attended"},
    {KEYHOLE_SESSION(index), .help = "Spec of every head's index, or auto"},
    {KEYHOLE_SESSION(budget), .help = "How much of the index a step reads"},
    {KEYHOLE_SESSION(tail_partition), .range = {4, 1024}, .zero = Zero::automatic, .automatic = 16,
     .help = "Keys per partition of the tail"},
    {KEYHOLE_SESSION(offload_placement), .words = kPlacementWords,
     .help = "Where the codes of offloaded tokens lie"},
    {KEYHOLE_SESSION(budgets), .help = "File with an index and a budget per head"},
    {.name = "dense_layers", .kind = SettingKind::layers,
     .offset = offsetof(keyhole_session_config, dense_layers),
     .size = offsetof(keyhole_session_config, dense_layer_count) + sizeof(uint32_t) -
             offsetof(keyhole_session_config, dense_layers),
     .help = "Layers with exact attention"},
    {KEYHOLE_SESSION(append_block), .range = {1, kMaxTokens}, .zero = Zero::automatic,
     .automatic = 1024, .help = "Pending tokens that enter an index together"},
    {KEYHOLE_SESSION(append_mode), .words = kAppendWords,
     .help = "Which thread brings tokens into an index"},
    {KEYHOLE_SESSION(training_queries), .range = {0, 16777216}, .initial = 4096,
     .help = "Prefill queries kept per KV head"},
    {KEYHOLE_SESSION(host_memory_limit), .zero = Zero::none, .help = "Bytes of host memory"},
    {KEYHOLE_SESSION(device_memory_limit), .zero = Zero::none, .help = "Bytes of device memory"},
    {KEYHOLE_SESSION(audit_share), .range = {0, 1},
     .help = "Share of (step, layer, KV head) that is audited"},
    {KEYHOLE_SESSION(audit_action), .words = kActionWords,
     .help = "What an audit above audit_bound leads to"},
    {KEYHOLE_SESSION(audit_bound), .zero = Zero::automatic,
     .help = "Output error that is too much"},
    {KEYHOLE_SESSION(kv_host), .words = kKvHostWords,
     .help = "How K and V of offloaded tokens lie in host memory"},
    {KEYHOLE_SESSION(pinned_memory_limit), .zero = Zero::none,
     .help = "Bytes of pinned host memory"},
    {KEYHOLE_SESSION(exact_rows_by), .words = kRowsByWords,
     .help = "Who reads the tokens that codes on the device attend exactly"},
};
#undef KEYHOLE_SESSION
#undef KEYHOLE_BUDGET
#undef KEYHOLE_FIELD
// clang-format on

/// Whether a table names every byte of its struct between `begin` and `end` but padding (at most 7
/// bytes in a gap): a field that the header has and the table lacks stops the build.
consteval bool covers(std::span<const Setting> table, size_t begin, size_t end) {
  for (const Setting& s : table) {
    const size_t alignment = s.size < 8 ? s.size : 8;
    if (s.offset < begin || s.offset - begin >= alignment) return false;
    begin = s.offset + s.size;
  }
  return end >= begin && end - begin < 8;
}
static_assert(covers(kBudget, sizeof(size_t), offsetof(keyhole_budget, reserved)));
static_assert(covers(kSession, sizeof(size_t), sizeof(keyhole_session_config)));

}  // namespace settings

inline constexpr std::span<const Setting> kBudgetSettings = settings::kBudget;
inline constexpr std::span<const Setting> kSessionSettings = settings::kSession;

/// The row of a name; a name that no row has does not compile.
consteval const Setting& setting(std::span<const Setting> table, std::string_view name) {
  for (const Setting& s : table) {
    if (name == s.name) return s;
  }
  throw std::logic_error("no such setting");
}

/// The field of a struct of the table's type. `Field` is the C type that the kind names.
template <class Field>
[[nodiscard]] Field& field(const Setting& s, void* config) {
  return *reinterpret_cast<Field*>(static_cast<std::byte*>(config) + s.offset);
}
template <class Field>
[[nodiscard]] const Field& field(const Setting& s, const void* config) {
  return *reinterpret_cast<const Field*>(static_cast<const std::byte*>(config) + s.offset);
}

/// Calls `f` with the field if it is a number (count, bytes, word, real, share); otherwise returns false.
template <class Config, class F>
bool visit_number(const Setting& s, Config* config, F&& f) {
  switch (s.kind) {
    case SettingKind::count: f(field<uint32_t>(s, config)); return true;
    case SettingKind::bytes: f(field<size_t>(s, config)); return true;
    case SettingKind::word: f(field<int32_t>(s, config)); return true;
    case SettingKind::real: f(field<float>(s, config)); return true;
    case SettingKind::share: f(field<double>(s, config)); return true;
    default: return false;
  }
}

/// Copies one field between two structs of the table's type.
void copy_field(const Setting& s, const void* from, void* to);
/// Whether a number is the same in both structs, by ==; fields of other kinds never are.
[[nodiscard]] bool same_number(const Setting& s, const void* a, const void* b);

/// Sets every number of a struct to its initial value.
void set_initial(std::span<const Setting> table, void* config);

/// Puts what KEYHOLE_AUTO stands for in place of every 0 that means it.
void complete(std::span<const Setting> table, void* config);

/// Returns an empty text where the field's value is allowed, else "FIELD is VALUE, allowed: LOW..HIGH" or the like.
/// Texts, layers and budgets are always allowed here, because what they may hold depends on more than the field.
[[nodiscard]] std::string refusal(const Setting& s, const void* config);

/// The number of a word; nothing where the setting has no such word.
[[nodiscard]] std::optional<int32_t> number_of_word(const Setting& s, std::string_view word);
/// The word of a number of the setting's list.
[[nodiscard]] const char* word_of_number(const Setting& s, int32_t number);
[[nodiscard]] std::vector<std::string> words_of(const Setting& s);
/// The words with their meanings, for help texts: "none (nothing), mean (one mean value), ...".
[[nodiscard]] std::string words_help(const Setting& s);

}  // namespace keyhole
