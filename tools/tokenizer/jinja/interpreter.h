// Runs chat templates: messages in, text out.
#pragma once

#include <string>
#include <string_view>

#include "tools/tokenizer/jinja/syntax.h"

namespace keyhole::tools::jinja {

/// A parsed template. Immutable: any number of threads may render it.
class Template {
 public:
  /// Parses. Throws std::runtime_error that begins with `place` and names the line, for a malformed template or one
  /// that uses what is not built in.
  Template(std::string_view source, std::string place);

  /// The text that the template writes with these global names. Throws std::runtime_error with the place and the line
  /// where it fails, calls raise_exception(), or takes more than a million steps.
  [[nodiscard]] Text render(const Dict& globals) const;

 private:
  std::string place_;
  Block block_;
};

}  // namespace keyhole::tools::jinja
