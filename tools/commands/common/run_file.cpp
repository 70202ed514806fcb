#include "tools/commands/common/run_file.h"

#include <algorithm>

#include "runtime/files/json.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

class Reader {
 public:
  Reader(const std::filesystem::path& path, std::span<const char* const> options)
      : path_(path), options_(options) {
    const std::string text = read_text_file(path);
    try {
      file_ = ordered_json::parse(text);
    } catch (const ordered_json::exception& e) {
      refuse("it is no JSON", e.what());
    }
  }

  [[nodiscard]] RunFile read() const {
    if (!file_.is_object()) refuse("it is no JSON object", "");
    if (file_.value("format", ordered_json()) != "keyhole-runs") {
      refuse("\"format\" is " + file_.value("format", ordered_json()).dump(),
             "allowed: \"keyhole-runs\"");
    }
    if (file_.value("version", ordered_json()) != 1) {
      refuse("\"version\" is " + file_.value("version", ordered_json()).dump(), "allowed: 1");
    }
    only(file_, "",
         {"format", "version", "comment", "trace", "options", "attend", "tail", "target", "goals",
          "runs"});
    RunFile out;
    if (file_.contains("trace")) out.trace = beside(text(file_["trace"], "trace"));
    out.arguments = arguments();
    out.goals = texts(file_, "goals", "goals");
    if (!file_.contains("runs") || !file_["runs"].is_array() || file_["runs"].empty()) {
      refuse("\"runs\" is missing or empty",
             "it is a list of objects, e.g. [{\"index\": \"flat\"}]");
    }
    for (size_t i = 0; i < file_["runs"].size(); ++i) {
      out.runs.push_back(run(file_["runs"][i], "runs[" + std::to_string(i) + "]"));
    }
    return out;
  }

 private:
  [[noreturn]] void refuse(const std::string& what, const std::string& why) const {
    throw UsageError("--runs " + path_.string() + ": " + what + (why.empty() ? "" : "; " + why));
  }

  void only(const ordered_json& object, const std::string& where,
            const std::vector<std::string>& allowed) const {
    for (const auto& [name, value] : object.items()) {
      if (std::find(allowed.begin(), allowed.end(), name) != allowed.end()) continue;
      std::string list;
      for (const std::string& one : allowed) list += (list.empty() ? "" : ", ") + one;
      refuse((where.empty() ? "" : where + ": ") + "there is no field \"" + name + "\"",
             "allowed: " + list);
    }
  }

  [[nodiscard]] std::string text(const ordered_json& value, const std::string& where) const {
    if (!value.is_string() || value.get<std::string>().empty())
      refuse(where + " is " + value.dump(), "it is a text");
    return value;
  }

  /// A number or a text, as a command line has it.
  [[nodiscard]] std::string word(const ordered_json& value, const std::string& where) const {
    if (value.is_number_integer()) return value.dump();
    if (value.is_number()) return value.dump();
    if (value.is_string() && !value.get<std::string>().empty()) return value;
    refuse(where + " is " + value.dump(), "it is a number, a text or a list of those");
  }

  /// A list of texts or one text; empty where there is none.
  [[nodiscard]] std::vector<std::string> texts(const ordered_json& object, const char* name,
                                               const std::string& where) const {
    std::vector<std::string> out;
    if (!object.contains(name)) return out;
    const ordered_json& value = object[name];
    if (!value.is_array()) return {text(value, where)};
    if (value.empty()) refuse(where + " is empty", "leave it out, or name something");
    for (const ordered_json& one : value) out.push_back(text(one, where));
    return out;
  }

  [[nodiscard]] std::string joined(const ordered_json& value, const std::string& where,
                                   char separator) const {
    if (!value.is_array()) return word(value, where);
    if (value.empty()) refuse(where + " is empty", "it is a number, a text or a list of those");
    std::string out;
    for (const ordered_json& one : value)
      out += (out.empty() ? "" : std::string(1, separator)) + word(one, where);
    return out;
  }

  [[nodiscard]] std::string beside(const std::string& path) const {
    return (path_.parent_path() / path).string();  // an absolute path stays one
  }

  [[nodiscard]] std::vector<std::string> arguments() const {
    std::vector<std::string> out;
    if (!file_.contains("options")) return out;
    if (!file_["options"].is_object())
      refuse("\"options\" is " + file_["options"].dump(), "it is an object");
    for (const auto& [name, value] : file_["options"].items()) {
      std::string option = name;
      std::replace(option.begin(), option.end(), '_', '-');
      if (std::find(options_.begin(), options_.end(), option) == options_.end()) {
        std::string list;
        for (const char* one : options_) list += (list.empty() ? "" : ", ") + std::string(one);
        refuse("options: there is no \"" + name + "\"", "allowed: " + list);
      }
      const std::string given = joined(value, "options." + name, ',');
      const bool is_file = option == "classifiers" || option.find("-file") != std::string::npos;
      out.insert(out.end(), {"--" + option, is_file ? beside(given) : given});
    }
    return out;
  }

  [[nodiscard]] RunFile::Run run(const ordered_json& object, const std::string& where) const {
    if (!object.is_object()) refuse(where + " is " + object.dump(), "it is an object");
    only(object, where,
         {"comment", "index", "rival", "args", "query_args", "attend", "tail", "target"});
    if (object.contains("index") == object.contains("rival"))
      refuse(where + " names " + (object.contains("index") ? "both" : "neither"),
             "it names an \"index\" or a \"rival\"");
    RunFile::Run out;
    out.rival = object.contains("rival");
    const char* const kind = out.rival ? "rival" : "index";
    out.spec = text(object[kind], where + "." + kind);
    char separator = out.spec.find(':') == std::string::npos ? ':' : ',';
    for (const char* part : {"args", "query_args"}) {
      if (!object.contains(part)) continue;
      const std::string inside = where + "." + part;
      if (!object[part].is_object())
        refuse(inside + " is " + object[part].dump(), "it is an object of parameters");
      for (const auto& [name, value] : object[part].items()) {
        out.spec += separator + name + "=" + joined(value, inside + "." + name, '|');
        separator = ',';
      }
    }
    const auto list = [&](const char* name) {
      if (out.rival && object.contains(name))
        refuse(where + ": \"" + std::string(name) + "\" is of indexes",
               "rivals are asked for the K of each topk:K");
      std::vector<std::string> own = texts(object, name, where + "." + name);
      return own.empty() ? texts(file_, name, name) : own;
    };
    out.budgets.attends = list("attend");
    out.budgets.tails = list("tail");
    out.budgets.targets = list("target");
    return out;
  }

  std::filesystem::path path_;
  std::span<const char* const> options_;
  ordered_json file_;
};

// The arguments of a command line that were given, in any order.
std::vector<std::string> given_arguments(const CLI::App& command) {
  std::vector<std::string> out;
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    for (const std::string& value : option->results()) {
      out.push_back(option->get_name() + "=" + value);
    }
  }
  return out;
}

}  // namespace

RunFile read_run_file(const std::filesystem::path& path, std::span<const char* const> options) {
  return Reader(path, options).read();
}

RunFile resolve_run_file(const CLI::App& command, const std::string& path,
                         std::span<const char* const> options,
                         const std::function<void(CLI::App&)>& add_options) {
  RunFile file = read_run_file(path, options);
  CLI::App both;
  add_options(both);
  std::vector<std::string> arguments = given_arguments(command);
  for (size_t i = 0; i < file.arguments.size(); i += 2) {
    if (command.count(file.arguments[i]) != 0) continue;
    arguments.push_back(file.arguments[i] + "=" + file.arguments[i + 1]);
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
  try {
    both.parse(arguments);
  } catch (const CLI::ParseError& e) {
    throw UsageError("--runs " + path + ": options: " + e.what());
  }
  return file;
}

}  // namespace keyhole::tools
