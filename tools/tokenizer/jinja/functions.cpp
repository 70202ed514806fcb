#include "tools/tokenizer/jinja/functions.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>

#include "tools/tokenizer/jinja/fail.h"
#include "tools/tokenizer/jinja/syntax.h"
#include "tools/tokenizer/jinja/texts.h"

namespace keyhole::tools::jinja {
namespace {

constexpr std::array<std::string_view, 32> kFilters{
    "trim", "length", "count",   "upper",   "lower",      "capitalize", "title",  "first",
    "last", "join",   "tojson",  "string",  "int",        "float",      "list",   "default",
    "d",    "items",  "replace", "reverse", "selectattr", "rejectattr", "select", "reject",
    "map",  "safe",   "abs",     "indent",  "dictsort",   "unique",     "min",    "max"};
constexpr std::array<std::string_view, 21> kTests{
    "defined", "undefined", "none",  "string",  "mapping", "iterable",    "sequence",
    "number",  "integer",   "float", "boolean", "true",    "false",       "equalto",
    "eq",      "sameas",    "in",    "odd",     "even",    "divisibleby", "callable"};

int64_t length(const Value& value) {
  if (value.text() != nullptr)
    return static_cast<int64_t>(character_starts(value.text()->bytes).size()) - 1;
  if (value.list() != nullptr) return static_cast<int64_t>(value.list()->size());
  if (value.dict() != nullptr) return static_cast<int64_t>(value.dict()->size());
  if (value.undefined()) return 0;
  fail("length of " + value.kind());
}

List items(const Value& value) {
  List out;
  if (value.undefined()) return out;
  if (value.dict() == nullptr) fail("items of " + value.kind() + "; allowed: of a dictionary");
  for (const auto& [key, entry] : *value.dict())
    out.emplace_back(List{Text(std::string_view(key)), entry});
  return out;
}

/// Runs select, reject, selectattr, rejectattr.
List chosen(std::string_view name, const Value& value, const Arguments& arguments) {
  const bool by_attribute = name.ends_with("attr");
  const bool keeps = name.starts_with("select");
  const Value attribute = by_attribute ? arguments.get(0, "") : Value();
  const Value test = arguments.get(by_attribute ? 1 : 0, "");
  Arguments rest;
  for (size_t i = by_attribute ? 2 : 1; i < arguments.values.size(); ++i)
    rest.values.push_back(arguments.values[i]);
  List out;
  for (const Value& element : elements_of(value)) {
    const Value tested = by_attribute ? element.get(text_of(attribute, name).bytes) : element;
    if (test.text() != nullptr && !is_test(test.text()->bytes))
      fail("the test " + test.text()->bytes + " is not built in");
    const bool passed =
        test.undefined() ? tested.truth() : apply_test(text_of(test, name).bytes, tested, rest);
    if (passed == keeps) out.push_back(element);
  }
  return out;
}

List mapped(const Value& value, const Arguments& arguments) {
  const Value attribute = arguments.get(SIZE_MAX, "attribute");
  List out;
  for (const Value& element : elements_of(value)) {
    if (!attribute.undefined()) {
      Value entry = element.get(text_of(attribute, "map").bytes);
      const Value fallback = arguments.get(SIZE_MAX, "default");
      out.push_back(entry.undefined() && !fallback.undefined() ? fallback : entry);
      continue;
    }
    const std::string filter = text_of(arguments.get(0, ""), "map").bytes;
    if (!is_filter(filter)) fail("the filter " + filter + " is not built in");
    Arguments rest;
    rest.values.assign(arguments.values.begin() + 1, arguments.values.end());
    out.push_back(apply_filter(filter, element, rest));
  }
  return out;
}

double parsed_number(const Value& value) {
  if (value.number()) return value.real();
  return value.text() != nullptr ? std::strtod(value.text()->bytes.c_str(), nullptr) : 0.0;
}

Value extreme(const Value& value, bool largest) {
  const List list = elements_of(value);
  if (list.empty()) return {};
  Value best = list.front();
  for (const Value& element : list) {
    if (largest ? best.less(element) : element.less(best)) best = element;
  }
  return best;
}

}  // namespace

bool is_filter(std::string_view name) {
  return std::find(kFilters.begin(), kFilters.end(), name) != kFilters.end();
}
bool is_test(std::string_view name) {
  return std::find(kTests.begin(), kTests.end(), name) != kTests.end();
}

Value Arguments::get(size_t place, std::string_view name) const {
  if (place < values.size()) return values[place];
  for (const auto& [key, value] : named) {
    if (!name.empty() && key == name) return value;
  }
  return {};
}

List elements_of(const Value& value) {
  if (value.list() != nullptr) return *value.list();
  List out;
  if (value.undefined()) return out;
  if (const Dict* dict = value.dict()) {
    for (const auto& entry : *dict) out.emplace_back(Text(std::string_view(entry.first)));
    return out;
  }
  if (value.text() == nullptr) fail("a loop over " + value.kind());
  const std::vector<size_t> starts = character_starts(value.text()->bytes);
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    out.emplace_back(value.text()->part(starts[i], starts[i + 1]));
  return out;
}

Value item_of(const Value& value, const Value& index) {
  if (value.undefined()) fail(value.kind() + " has no items");
  if (index.text() != nullptr) return value.get(index.text()->bytes);
  if (value.list() == nullptr && value.text() == nullptr) return {};
  const List list = elements_of(value);
  int64_t i = index.integer();
  if (i < 0) i += static_cast<int64_t>(list.size());
  return i >= 0 && i < static_cast<int64_t>(list.size()) ? list[static_cast<size_t>(i)] : Value();
}

Value slice_of(const Value& value, const Value* from, const Value* to, const Value* step) {
  if (value.list() == nullptr && value.text() == nullptr) fail("a slice of " + value.kind());
  const List list = elements_of(value);
  const auto size = static_cast<int64_t>(list.size());
  const int64_t by = step == nullptr || step->none() ? 1 : step->integer();
  if (by == 0) fail("a slice with step 0");
  const auto place = [&](const Value* wanted, int64_t otherwise) {
    if (wanted == nullptr || wanted->none()) return otherwise;
    int64_t i = wanted->integer();
    if (i < 0) i += size;
    return std::clamp<int64_t>(i, by > 0 ? 0 : -1, by > 0 ? size : size - 1);
  };
  const int64_t begin = place(from, by > 0 ? 0 : size - 1);
  const int64_t end = place(to, by > 0 ? size : -1);
  List out;
  for (int64_t i = begin; by > 0 ? i < end : i > end; i += by)
    out.push_back(list[static_cast<size_t>(i)]);
  if (value.list() != nullptr) return out;
  return joined(out, Text());
}

bool apply_test(std::string_view name, const Value& value, const Arguments& arguments) {
  const Value other = arguments.get(0, "");
  if (name == "defined") return !value.undefined();
  if (name == "undefined") return value.undefined();
  if (name == "none") return value.none();
  if (name == "string") return value.text() != nullptr;
  if (name == "mapping") return value.dict() != nullptr;
  if (name == "iterable" || name == "sequence")
    return value.list() != nullptr || value.dict() != nullptr || value.text() != nullptr;
  if (name == "number") return value.number();
  if (name == "integer") return value.as<int64_t>() != nullptr;
  if (name == "float") return value.as<double>() != nullptr;
  if (name == "boolean") return value.as<bool>() != nullptr;
  if (name == "true") return value.as<bool>() != nullptr && value.truth();
  if (name == "false") return value.as<bool>() != nullptr && !value.truth();
  if (name == "equalto" || name == "eq" || name == "sameas") return value.equals(other);
  if (name == "odd") return value.integer() % 2 != 0;
  if (name == "even") return value.integer() % 2 == 0;
  if (name == "divisibleby") return other.integer() != 0 && value.integer() % other.integer() == 0;
  if (name == "callable") return false;
  if (name != "in") fail("the test " + std::string(name) + " is not built in");
  if (value.text() != nullptr && other.text() != nullptr)
    return other.text()->bytes.find(value.text()->bytes) != std::string::npos;
  const List list = elements_of(other);
  return std::any_of(list.begin(), list.end(),
                     [&](const Value& element) { return element.equals(value); });
}

Value apply_filter(std::string_view name, const Value& value, const Arguments& arguments) {
  if (name == "trim") return stripped(value.shown(), arguments.get(0, "chars"), true, true);
  if (name == "length" || name == "count") return length(value);
  if (name == "upper") return upper(value.shown());
  if (name == "lower") return lower(value.shown());
  if (name == "capitalize") return title(value.shown(), false);
  if (name == "title") return title(value.shown(), true);
  if (name == "first" || name == "last")
    return item_of(value.undefined() ? Value(List{}) : value, int64_t{name == "first" ? 0 : -1});
  if (name == "join") {
    const Value separator = arguments.get(0, "d");
    const Value attribute = arguments.get(1, "attribute");
    List list = elements_of(value);
    if (!attribute.undefined()) {
      for (Value& element : list) element = element.get(text_of(attribute, name).bytes);
    }
    return joined(list, separator.undefined() ? Text() : separator.shown());
  }
  if (name == "tojson") {
    const Value indent = arguments.get(SIZE_MAX, "indent");
    return to_json(value, indent.undefined() || indent.none()
                              ? -1
                              : std::clamp<int64_t>(indent.integer(), 0, 16));
  }
  if (name == "string" || name == "safe") return value.shown();
  if (name == "int") return static_cast<int64_t>(std::clamp(parsed_number(value), -9e15, 9e15));
  if (name == "float") return parsed_number(value);
  if (name == "abs")
    return value.as<int64_t>() != nullptr ? Value(std::abs(value.integer()))
                                          : Value(std::abs(value.real()));
  if (name == "list") return elements_of(value);
  if (name == "default" || name == "d") {
    const bool replaces =
        value.undefined() || (arguments.get(1, "boolean").truth() && !value.truth());
    return replaces ? arguments.get(0, "default_value") : value;
  }
  if (name == "items") return items(value);
  if (name == "dictsort") {
    List sorted = items(value);
    std::stable_sort(sorted.begin(), sorted.end(), [](const Value& a, const Value& b) {
      return (*a.list())[0].less((*b.list())[0]);
    });
    return sorted;
  }
  if (name == "replace") {
    const Value count = arguments.get(2, "count");
    return replaced(value.shown(), text_of(arguments.get(0, "old"), name),
                    text_of(arguments.get(1, "new"), name),
                    count.undefined() ? -1 : count.integer());
  }
  if (name == "reverse") {
    List list = elements_of(value);
    std::reverse(list.begin(), list.end());
    return value.text() != nullptr ? Value(joined(list, Text())) : Value(std::move(list));
  }
  if (name == "unique") {
    List out;
    for (const Value& element : elements_of(value)) {
      if (std::none_of(out.begin(), out.end(),
                       [&](const Value& known) { return known.equals(element); }))
        out.push_back(element);
    }
    return out;
  }
  if (name == "min" || name == "max") return extreme(value, name == "max");
  if (name == "map") return mapped(value, arguments);
  if (name == "indent") {
    const Value width = arguments.get(0, "width");
    return indented(value.shown(), width.undefined() ? 4 : width.integer(),
                    arguments.get(1, "first").truth());
  }
  return chosen(name, value, arguments);
}

Value call_method(const Value& value, std::string_view name, const Arguments& arguments) {
  const Value first = arguments.get(0, "");
  const Value second = arguments.get(1, "");
  if (const Text* text = value.text()) {
    if (name == "strip") return stripped(*text, first, true, true);
    if (name == "lstrip") return stripped(*text, first, true, false);
    if (name == "rstrip") return stripped(*text, first, false, true);
    if (name == "split")
      return split(
          *text, arguments.get(0, "sep"),
          arguments.get(1, "maxsplit").undefined() ? -1 : arguments.get(1, "maxsplit").integer());
    if (name == "startswith") return text->bytes.starts_with(text_of(first, name).bytes);
    if (name == "endswith") return text->bytes.ends_with(text_of(first, name).bytes);
    if (name == "upper") return upper(*text);
    if (name == "lower") return lower(*text);
    if (name == "title") return title(*text, true);
    if (name == "capitalize") return title(*text, false);
    if (name == "replace")
      return replaced(
          *text, text_of(first, name), text_of(second, name),
          arguments.get(2, "count").undefined() ? -1 : arguments.get(2, "count").integer());
    if (name == "join") return joined(elements_of(first), *text);
    if (name == "count") return static_cast<int64_t>(split(*text, first, -1).size()) - 1;
    if (name == "find") {
      const size_t found = text->bytes.find(text_of(first, name).bytes);
      if (found == std::string::npos) return int64_t{-1};
      return static_cast<int64_t>(
                 character_starts(std::string_view(text->bytes).substr(0, found)).size()) -
             1;
    }
    if (name == "removeprefix")
      return text->bytes.starts_with(text_of(first, name).bytes)
                 ? text->part(first.text()->bytes.size(), text->bytes.size())
                 : *text;
    if (name == "removesuffix")
      return text->bytes.ends_with(text_of(first, name).bytes)
                 ? text->part(0, text->bytes.size() - first.text()->bytes.size())
                 : *text;
  } else if (value.dict() != nullptr) {
    if (name == "items") return items(value);
    if (name == "keys") return elements_of(value);
    if (name == "get") {
      const Value entry = value.get(text_of(first, name).bytes);
      return !entry.undefined() ? entry : arguments.values.size() > 1 ? second : Value(None{});
    }
    if (name == "values") {
      List out;
      for (const auto& entry : *value.dict()) out.push_back(entry.second);
      return out;
    }
  } else if (const List* list = value.list()) {
    if (name == "index" || name == "count") {
      int64_t count = 0;
      for (size_t i = 0; i < list->size(); ++i) {
        if (!(*list)[i].equals(first)) continue;
        if (name == "index") return static_cast<int64_t>(i);
        ++count;
      }
      if (name == "count") return count;
      fail("index of what is not in the list");
    }
  }
  fail("the method " + std::string(name) + " of " + value.kind() + " is not built in");
}

}  // namespace keyhole::tools::jinja
