#include "tools/tokenizer/jinja/interpreter.h"

#include <cmath>
#include <ctime>
#include <functional>
#include <map>
#include <stdexcept>

#include "tools/tokenizer/jinja/functions.h"

namespace keyhole::tools::jinja {
namespace {

using Kind = Expression::Kind;

constexpr int64_t kMaxSteps = 1'000'000;
constexpr int kMaxCalls = 50;
constexpr int kMaxDepth = 1000;
constexpr int64_t kMaxRange = 100'000;

/// An error that knows its line.
class LineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Flow : uint8_t { on, stop, next };

class Interpreter {
 public:
  explicit Interpreter(const Dict& globals) {
    scopes_.emplace_back();
    for (const auto& [name, value] : globals) scopes_.back()[name] = value;
  }

  Flow run(const Block& block, Text& out) {
    for (const auto& statement : block) {
      try {
        const Flow flow = run(*statement, out);
        if (flow != Flow::on) return flow;
      } catch (const LineError&) {
        throw;
      } catch (const std::runtime_error& e) {
        throw LineError("line " + std::to_string(statement->line) + ": " + e.what());
      }
    }
    return Flow::on;
  }

 private:
  using Scope = std::map<std::string, Value, std::less<>>;

  /// While one lives, execution is one level deeper.
  struct Deeper {
    explicit Deeper(Interpreter& run) : run_(run) {
      if (++run_.depth_ <= kMaxDepth) return;
      --run_.depth_;
      throw std::runtime_error("more than " + std::to_string(kMaxDepth) +
                               " levels of blocks and operations");
    }
    ~Deeper() { --run_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    Interpreter& run_;
  };

  void count_step() {
    if (++steps_ > kMaxSteps) throw std::runtime_error("more than a million steps");
  }

  Value look_up(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto it = scope->find(name); it != scope->end()) return it->second;
    }
    // Defined, for templates that ask; called by name.
    if (is_function(name) || macros_.contains(name)) return "function";
    return Undefined{name};
  }

  static bool is_function(std::string_view name) {
    return name == "raise_exception" || name == "namespace" || name == "dict" || name == "range" ||
           name == "strftime_now";
  }

  Flow run(const Statement& statement, Text& out) {
    const Deeper deeper(*this);
    count_step();
    switch (statement.kind) {
      case Statement::Kind::text: out += std::string_view(statement.text); break;
      case Statement::Kind::output: out += evaluate(*statement.expression).shown(); break;
      case Statement::Kind::group: return run(statement.body, out);
      case Statement::Kind::stop: return Flow::stop;
      case Statement::Kind::next: return Flow::next;
      case Statement::Kind::macro: macros_[statement.names.front()] = &statement; break;
      case Statement::Kind::choice:
        return run(evaluate(*statement.expression).truth() ? statement.body : statement.other, out);
      case Statement::Kind::loop: return loop(statement, out);
      case Statement::Kind::set: {
        Value value;
        if (statement.expression) {
          value = evaluate(*statement.expression);
        } else {
          Text text;
          (void)run(statement.body, text);
          value = std::move(text);
        }
        if (statement.names.size() == 2) {
          look_up(statement.names[0]).set(statement.names[1], std::move(value));
        } else {
          scopes_.back()[statement.names[0]] = std::move(value);
        }
        break;
      }
    }
    return Flow::on;
  }

  void bind(const std::vector<std::string>& names, const Value& element) {
    if (names.size() == 1) {
      scopes_.back()[names[0]] = element;
      return;
    }
    const List* parts = element.list();
    if (parts == nullptr || parts->size() != names.size()) {
      throw std::runtime_error("a loop with " + std::to_string(names.size()) + " names over " +
                               element.kind());
    }
    for (size_t i = 0; i < names.size(); ++i) scopes_.back()[names[i]] = (*parts)[i];
  }

  Flow loop(const Statement& statement, Text& out) {
    List elements = elements_of(evaluate(*statement.expression));
    if (statement.condition) {
      List chosen;
      for (const Value& element : elements) {
        scopes_.emplace_back();
        bind(statement.names, element);
        if (evaluate(*statement.condition).truth()) chosen.push_back(element);
        scopes_.pop_back();
      }
      elements = std::move(chosen);
    }
    if (elements.empty()) return run(statement.other, out);
    const auto size = static_cast<int64_t>(elements.size());
    for (int64_t i = 0; i < size; ++i) {
      count_step();
      scopes_.emplace_back();
      bind(statement.names, elements[static_cast<size_t>(i)]);
      const auto neighbour = [&](int64_t at) {
        return at >= 0 && at < size ? elements[static_cast<size_t>(at)] : Value();
      };
      scopes_.back()["loop"] = Dict{{"index", i + 1},
                                    {"index0", i},
                                    {"revindex", size - i},
                                    {"revindex0", size - i - 1},
                                    {"first", i == 0},
                                    {"last", i == size - 1},
                                    {"length", size},
                                    {"previtem", neighbour(i - 1)},
                                    {"nextitem", neighbour(i + 1)}};
      const Flow flow = run(statement.body, out);
      scopes_.pop_back();
      if (flow == Flow::stop) break;
    }
    return Flow::on;
  }

  // --- expressions

  Value evaluate(const Expression& e) {
    const Deeper deeper(*this);
    count_step();
    const auto part = [&](size_t i) { return evaluate(*e.parts[i]); };
    switch (e.kind) {
      case Kind::constant: return e.value;
      case Kind::name: return look_up(e.text);
      case Kind::attribute: {
        const Value object = part(0);
        if (object.undefined())
          throw std::runtime_error(object.kind() + " has no attribute " + e.text);
        return object.get(e.text);
      }
      case Kind::item: return item_of(part(0), part(1));
      case Kind::slice: {
        Value bounds[3];
        const Value* given[3] = {};
        for (size_t i = 0; i < 3; ++i) {
          if (e.parts[i + 1] == nullptr) continue;
          bounds[i] = part(i + 1);
          given[i] = &bounds[i];
        }
        return slice_of(part(0), given[0], given[1], given[2]);
      }
      case Kind::list: {
        List list;
        for (size_t i = 0; i < e.parts.size(); ++i) list.push_back(part(i));
        return list;
      }
      case Kind::dict: {
        Dict dict;
        for (size_t i = 0; i < e.parts.size(); i += 2)
          dict.emplace_back(part(i).shown().bytes, part(i + 1));
        return dict;
      }
      case Kind::call: return call(e);
      case Kind::filter: return apply_filter(e.text, part(0), arguments_of(e));
      case Kind::test: return apply_test(e.text, part(0), arguments_of(e));
      case Kind::negate: {
        const Value value = part(0);
        return value.as<double>() != nullptr ? Value(-value.real()) : Value(-value.integer());
      }
      case Kind::negation: return !part(0).truth();
      case Kind::both: {
        Value left = part(0);
        return left.truth() ? part(1) : left;
      }
      case Kind::either: {
        Value left = part(0);
        return left.truth() ? left : part(1);
      }
      case Kind::conditional:
        if (part(1).truth()) return part(0);
        return e.parts[2] == nullptr ? Value() : part(2);
      case Kind::binary: return binary(e.text, part(0), part(1));
    }
    return {};
  }

  /// The arguments in the parentheses: parts from 1 on, and the named ones.
  Arguments arguments_of(const Expression& e) {
    Arguments arguments;
    for (size_t i = 1; i < e.parts.size(); ++i) arguments.values.push_back(evaluate(*e.parts[i]));
    for (const auto& [name, value] : e.named) arguments.named.emplace_back(name, evaluate(*value));
    return arguments;
  }

  static Value binary(const std::string& sign, const Value& left, const Value& right) {
    if (sign == "==") return left.equals(right);
    if (sign == "!=") return !left.equals(right);
    if (sign == "<") return left.less(right);
    if (sign == ">") return right.less(left);
    if (sign == "<=") return !right.less(left);
    if (sign == ">=") return !left.less(right);
    if (sign == "in" || sign == "not in") {
      const bool found = right.dict() != nullptr && left.text() != nullptr
                             ? !right.get(left.text()->bytes).undefined()
                             : apply_test("in", left, {{right}, {}});
      return found == (sign == "in");
    }
    if (sign == "~") {
      Text text = left.shown();
      return text += right.shown();
    }
    if (sign == "+" && left.text() != nullptr && right.text() != nullptr) {
      Text text = *left.text();
      return text += *right.text();
    }
    if (sign == "+" && left.list() != nullptr && right.list() != nullptr) {
      List list = *left.list();
      list.insert(list.end(), right.list()->begin(), right.list()->end());
      return list;
    }
    if (!left.number() || !right.number()) {
      throw std::runtime_error(left.kind() + " " + sign + " " + right.kind() + " is not possible");
    }
    return arithmetic(sign, left, right);
  }

  static Value arithmetic(const std::string& sign, const Value& left, const Value& right) {
    const double a = left.real();
    const double b = right.real();
    const bool whole = left.as<double>() == nullptr && right.as<double>() == nullptr;
    if ((sign == "/" || sign == "//" || sign == "%") && b == 0.0)
      throw std::runtime_error("a division by 0");
    double result = 0.0;
    if (sign == "+") result = a + b;
    if (sign == "-") result = a - b;
    if (sign == "*") result = a * b;
    if (sign == "/") return a / b;
    if (sign == "//") result = std::floor(a / b);
    if (sign == "%") result = a - b * std::floor(a / b);
    if (sign == "**") result = std::pow(a, b);
    if (!whole) return result;
    // Beyond this not every whole number is a double.
    if (!(std::abs(result) <= 9e15)) throw std::runtime_error("a whole number beyond 9e15");
    return static_cast<int64_t>(result);
  }

  Value call(const Expression& e) {
    const Expression& callee = *e.parts[0];
    const Arguments arguments = arguments_of(e);
    if (callee.kind == Kind::attribute) {
      return call_method(evaluate(*callee.parts[0]), callee.text, arguments);
    }
    if (callee.kind != Kind::name) throw std::runtime_error("a call of what has no name");
    const std::string& name = callee.text;
    if (const auto macro = macros_.find(name); macro != macros_.end())
      return run_macro(*macro->second, arguments);
    const Value first = arguments.get(0, "");
    if (name == "raise_exception")
      throw std::runtime_error("the template refuses: " + first.shown().bytes);
    if (name == "namespace" || name == "dict") {
      Dict entries(arguments.named.begin(), arguments.named.end());
      return name == "dict" ? Value(std::move(entries)) : Value(Namespace{std::move(entries)});
    }
    if (name == "range") return range(arguments);
    if (name == "strftime_now") return now(first);
    throw std::runtime_error("the function " + name + " is not built in");
  }

  Value run_macro(const Statement& macro, const Arguments& arguments) {
    if (++calls_ > kMaxCalls)
      throw std::runtime_error("macros that call each other more than " +
                               std::to_string(kMaxCalls) + " deep");
    // A macro sees the global names and its own.
    std::vector<Scope> outer;
    outer.swap(scopes_);
    scopes_.push_back(outer.front());
    scopes_.emplace_back();
    const size_t names = macro.names.size() - 1;
    for (size_t i = 0; i < names; ++i) {
      Value value = arguments.get(i, macro.names[i + 1]);
      const size_t from = names - macro.defaults.size();
      if (value.undefined() && i >= from) value = evaluate(*macro.defaults[i - from]);
      scopes_.back()[macro.names[i + 1]] = std::move(value);
    }
    Text text;
    (void)run(macro.body, text);
    scopes_.swap(outer);
    --calls_;
    return text;
  }

  static Value range(const Arguments& arguments) {
    const size_t count = arguments.values.size();
    if (count < 1 || count > 3)
      throw std::runtime_error("range of " + std::to_string(count) + " arguments");
    const int64_t begin = count == 1 ? 0 : arguments.values[0].integer();
    const int64_t end = arguments.values[count == 1 ? 0 : 1].integer();
    const int64_t step = count == 3 ? arguments.values[2].integer() : 1;
    if (step == 0) throw std::runtime_error("range with step 0");
    List out;
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
      if (static_cast<int64_t>(out.size()) >= kMaxRange) {
        throw std::runtime_error("range of more than " + std::to_string(kMaxRange) + " numbers");
      }
      out.emplace_back(i);
    }
    return out;
  }

  static Value now(const Value& format) {
    const std::time_t seconds = std::time(nullptr);
    std::tm local{};
    localtime_r(&seconds, &local);
    char text[256];
    const size_t size = std::strftime(text, sizeof(text), format.shown().bytes.c_str(), &local);
    return Text(std::string_view(text, size));
  }

  std::vector<Scope> scopes_;
  std::map<std::string, const Statement*, std::less<>> macros_;
  int64_t steps_ = 0;
  int depth_ = 0;
  int calls_ = 0;
};

}  // namespace

Template::Template(std::string_view source, std::string place) : place_(std::move(place)) {
  try {
    block_ = parse_template(source);
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(place_ + ", " + e.what());
  }
}

Text Template::render(const Dict& globals) const {
  Text out;
  try {
    (void)Interpreter(globals).run(block_, out);
  } catch (const std::runtime_error& e) {
    throw std::runtime_error(place_ + ", " + e.what());
  }
  return out;
}

}  // namespace keyhole::tools::jinja
