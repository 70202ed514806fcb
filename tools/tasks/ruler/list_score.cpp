#include "tools/tasks/ruler/list_score.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "runtime/files/json.h"

namespace keyhole::tools::ruler {
namespace {

/// The fields of a record as texts.
using Record = std::map<std::string, std::string>;

std::optional<Record> parsed_record(std::string_view text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  Record record;
  for (const auto& [name, value] : json.items()) {
    record[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return record;
}

std::set<Record> records_in(std::string_view text) {
  std::set<Record> records;
  size_t begin = std::string_view::npos;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '{') begin = at;
    if (text[at] != '}' || begin == std::string_view::npos) continue;
    if (auto record = parsed_record(text.substr(begin, at + 1 - begin))) {
      records.insert(std::move(*record));
    }
    begin = std::string_view::npos;
  }
  return records;
}

/// The things of a text in the order of their first mention, in lower case.
std::vector<std::string> things_in(std::string_view text) {
  std::vector<std::string> things;
  std::string word;
  const auto end_word = [&] {
    const size_t dash = word.find('-');
    const bool inside = dash != std::string::npos && dash > 0 && word.back() != '-';
    if (inside && std::find(things.begin(), things.end(), word) == things.end()) {
      things.push_back(word);
    }
    word.clear();
  };
  for (const char c : text) {
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if ((lower >= 'a' && lower <= 'z') || lower == '-') {
      word += lower;
    } else {
      end_word();
    }
  }
  end_word();
  return things;
}

/// The length of the longest common subsequence.
size_t common_in_order(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::vector<size_t> best(b.size() + 1);  // of what has been seen of a, and the first items of b
  for (const std::string& item : a) {
    size_t before = 0;  // best[j] before this item
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t with = before + (item == b[j] ? 1 : 0);
      before = best[j + 1];
      best[j + 1] = std::max({best[j + 1], best[j], with});
    }
  }
  return best.back();
}

}  // namespace

double score_records(std::string_view prediction, const std::vector<std::string>& references) {
  const std::set<Record> answered = records_in(prediction);
  size_t hits = 0;
  for (const std::string& reference : references) {
    const auto record = parsed_record(reference);
    hits += record && answered.count(*record) > 0 ? 1 : 0;
  }
  return 2.0 * static_cast<double>(hits) / static_cast<double>(references.size() + answered.size());
}

double score_ordered(std::string_view prediction, const std::vector<std::string>& references) {
  const std::vector<std::string> answered = things_in(prediction);
  return static_cast<double>(common_in_order(references, answered)) /
         static_cast<double>(std::max(references.size(), answered.size()));
}

}  // namespace keyhole::tools::ruler
