#include "runtime/files/budgets.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "runtime/files/input_file.h"
#include "runtime/files/strict_json.h"

namespace keyhole {
namespace {

using nlohmann::json;

constexpr uint32_t kVersion = 1;
// The file is {"heads": [{"measured": {}}]}.
constexpr int kBudgetsDepth = 5;

void check_size(size_t bytes) {
  if (bytes <= kMaxBudgetsBytes) return;
  fail("it has " + std::to_string(bytes) + " bytes; allowed: up to " +
       std::to_string(kMaxBudgetsBytes));
}

/// A value and where it stands: "heads[3].tail".
class Node {
 public:
  Node(const json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  /// An object with these keys alone.
  const Node& expect_keys(std::span<const std::string_view> allowed) const {
    if (!value_->is_object()) refuse("an object");
    for (const auto& [key, value] : value_->items()) {
      if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) continue;
      std::string list;
      for (const std::string_view name : allowed) {
        list += (list.empty() ? "" : ", ") + std::string(name);
      }
      fail(where() + "the key " + quoted_name(key) + " is unknown; allowed: " + list);
    }
    return *this;
  }
  const Node& expect_keys(std::initializer_list<std::string_view> allowed) const {
    return expect_keys(std::span(allowed.begin(), allowed.size()));
  }
  [[nodiscard]] bool has(const char* key) const { return value_->contains(key); }
  [[nodiscard]] Node at(const char* key) const {
    const auto found = value_->find(key);
    if (found == value_->end()) fail(where() + "the key \"" + key + "\" is missing");
    return {*found, (path_.empty() ? "" : path_ + ".") + key};
  }
  [[nodiscard]] Node item(size_t i) const {
    return {(*value_)[i], path_ + "[" + std::to_string(i) + "]"};
  }
  [[nodiscard]] size_t array_size() const {
    if (!value_->is_array()) refuse("an array");
    return value_->size();
  }

  [[nodiscard]] bool is_object() const { return value_->is_object(); }
  [[nodiscard]] bool is_string() const { return value_->is_string(); }
  [[nodiscard]] std::string string() const {
    if (!value_->is_string()) refuse("a string");
    return value_->get<std::string>();
  }
  /// The only word that may stand here.
  void word(std::string_view allowed) const {
    if (!value_->is_string() || value_->get_ref<const std::string&>() != allowed) {
      refuse("one of " + std::string(allowed));
    }
  }
  /// The number of one of the setting's words.
  [[nodiscard]] int32_t word_of(const Setting& s) const {
    if (value_->is_string()) {
      if (const auto n = number_of_word(s, value_->get_ref<const std::string&>())) return *n;
    }
    std::string list;
    for (const SettingWord& w : s.words) list.append(list.empty() ? "" : ", ").append(w.word);
    refuse("one of " + list);
  }
  [[nodiscard]] uint32_t whole(uint32_t lowest, uint32_t highest) const {
    if (!value_->is_number_unsigned() || value_->get<uint64_t>() < lowest ||
        value_->get<uint64_t>() > highest) {
      refuse("a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest));
    }
    return value_->get<uint32_t>();
  }
  [[nodiscard]] float share() const {
    const double x = number();
    if (!(std::fabs(x) <= double{std::numeric_limits<float>::max()})) refuse("a number");
    return static_cast<float>(x);
  }
  [[nodiscard]] double number() const {
    if (!value_->is_number()) refuse("a number");
    return value_->get<double>();
  }
  [[nodiscard]] bool flag() const {
    if (!value_->is_boolean()) refuse("true or false");
    return value_->get<bool>();
  }
  [[nodiscard]] std::map<std::string, double> numbers() const {
    if (!value_->is_object()) refuse("an object of numbers");
    std::map<std::string, double> out;
    for (const auto& [key, value] : value_->items()) {
      out.emplace(key, Node(value, path_ + "." + quoted_name(key)).number());
    }
    return out;
  }

 private:
  [[nodiscard]] std::string where() const { return path_.empty() ? "" : path_ + ": "; }
  [[noreturn]] void refuse(const std::string& allowed) const {
    // Shows no more than a line's worth of the value, and nothing that a terminal would obey.
    std::string seen = value_->dump(-1, ' ', true, json::error_handler_t::replace);
    if (seen.size() > 40) seen = seen.substr(0, 40) + "...";
    fail((path_.empty() ? "the file" : path_) + " is " + seen + "; allowed: " + allowed);
  }

  const json* value_;
  std::string path_;
};

template <class T, class Read>
void take(const Node& entry, const char* key, std::optional<T>& out, Read&& read) {
  if (entry.has(key)) out = read(entry.at(key));
}

/// Checks no more than the type of a number: the library judges values.
void parse_field(const Node& node, const Setting& s, BudgetFields& out) {
  const auto lowest = static_cast<uint32_t>(s.range.low);
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  keyhole_budget& values = out.name(s);
  switch (s.kind) {
    case SettingKind::count: field<uint32_t>(s, &values) = node.whole(lowest, kMost); break;
    case SettingKind::word: field<int32_t>(s, &values) = node.word_of(s); break;
    case SettingKind::real: field<float>(s, &values) = node.share(); break;
    default: throw std::logic_error(std::string(s.name) + " is a setting that no budgets file has");
  }
}

BudgetsFile::Entry parse_entry(const Node& entry, const BudgetsFile& file) {
  // Whether the entry is about prompts, or about decoding.
  const bool of_prompts = entry.is_object() && entry.has("q_head");
  std::vector<std::string_view> keys = {"layer", "q_head", "pattern", "measured"};
  if (!of_prompts) {
    keys = {"layer", "kv_head", "index"};
    for (const Setting& setting : kBudgetSettings) keys.emplace_back(setting.name);
    keys.insert(keys.end(), {"dense", "measured"});
  }
  entry.expect_keys(keys);
  BudgetsFile::Entry out;
  const auto place = [&](const char* key, uint32_t count, std::optional<uint32_t>& number) {
    const Node node = entry.at(key);
    if (node.is_string()) {
      node.word("all");
    } else {
      number = node.whole(0, count - 1);
    }
  };
  place("layer", file.layers, out.layer);
  if (entry.has("measured")) out.measured = entry.at("measured").numbers();
  if (of_prompts) {
    place("q_head", file.q_heads, out.q_head);
    out.pattern = entry.at("pattern").string();
    return out;
  }
  place("kv_head", file.kv_heads, out.kv_head);
  take(entry, "index", out.index, [](const Node& n) { return n.string(); });
  for (const Setting& setting : kBudgetSettings) {
    if (entry.has(setting.name)) parse_field(entry.at(setting.name), setting, out.budget);
  }
  take(entry, "dense", out.dense, [](const Node& n) { return n.flag(); });
  return out;
}

BudgetsFile parse_budgets_json(const json& parsed) {
  const Node root(parsed, "");
  // The version comes first: the other content of a newer format is not ours to judge.
  if (!root.has("keyhole_budgets")) {
    fail("it is not a file of budgets: the key \"keyhole_budgets\" is missing");
  }
  const uint32_t version =
      root.at("keyhole_budgets").whole(0, std::numeric_limits<uint32_t>::max());
  if (version != kVersion) {
    throw AnotherFormat("it has format " + std::to_string(version) +
                        "; this version reads format " + std::to_string(kVersion));
  }
  root.expect_keys(
      {"keyhole_budgets", "model", "tail_partition", "target", "machine", "made_by", "heads"});
  BudgetsFile out;
  const Node model = root.at("model");
  model.expect_keys({"layers", "q_heads", "kv_heads", "head_dim"});
  out.layers = model.at("layers").whole(1, 1024);
  out.q_heads = model.at("q_heads").whole(1, 4096);
  out.kv_heads = model.at("kv_heads").whole(1, 4096);
  out.head_dim = model.at("head_dim").whole(1, 1024);
  if (root.has("tail_partition")) {
    constexpr Range kRange = setting(kSessionSettings, "tail_partition").range;
    out.tail_partition =
        root.at("tail_partition")
            .whole(static_cast<uint32_t>(kRange.low), static_cast<uint32_t>(kRange.high));
  }
  if (root.has("target")) out.target = root.at("target").numbers();
  if (root.has("machine")) out.machine = root.at("machine").string();
  if (root.has("made_by")) out.made_by = root.at("made_by").string();
  const Node heads = root.at("heads");
  std::map<std::tuple<bool, uint32_t, uint32_t>, size_t> named;
  for (size_t i = 0; i < heads.array_size(); ++i) {
    out.heads.push_back(parse_entry(heads.item(i), out));
    const BudgetsFile::Entry& entry = out.heads.back();
    constexpr uint32_t kAll = std::numeric_limits<uint32_t>::max();
    const bool of_prompts = entry.pattern.has_value();
    const std::optional<uint32_t>& head = of_prompts ? entry.q_head : entry.kv_head;
    const auto [earlier, is_new] =
        named.emplace(std::tuple(of_prompts, entry.layer.value_or(kAll), head.value_or(kAll)), i);
    if (is_new) continue;
    const auto name = [](const std::optional<uint32_t>& number) {
      return number ? std::to_string(*number) : "all";
    };
    fail("heads[" + std::to_string(i) + "] is of layer " + name(entry.layer) +
         (of_prompts ? ", q_head " : ", kv_head ") + name(head) + ", as is heads[" +
         std::to_string(earlier->second) + "]; allowed: one entry of each kind");
  }
  return out;
}

}  // namespace

void BudgetFields::apply_to(keyhole_budget& budget) const {
  for (const Setting& s : kBudgetSettings) {
    if (has(s)) copy_field(s, &values_, &budget);
  }
}

BudgetsFile parse_budgets(std::span<const std::byte> bytes) {
  check_size(bytes.size());
  return parse_budgets_json(parse_strict_json(bytes, kBudgetsDepth, "the file"));
}

BudgetsFile read_budgets(const std::filesystem::path& path) {
  const InputFile file(path);
  try {
    check_size(file.size());
    std::vector<std::byte> bytes(file.size());
    file.read(0, bytes);
    return parse_budgets(bytes);
  } catch (const CannotRead&) {
    throw;
  } catch (const AnotherFormat& e) {
    throw AnotherFormat(path.string() + ": " + e.what());
  } catch (const std::runtime_error& e) {
    fail(path.string() + ": " + e.what());
  }
}

}  // namespace keyhole
