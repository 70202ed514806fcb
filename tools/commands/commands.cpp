#include "tools/commands/commands.h"

namespace keyhole::tools {

std::string examples(const std::vector<std::string>& lines) {
  std::string out = "Examples:";
  for (const std::string& line : lines) out += "\n  " + line;
  return out;
}

}  // namespace keyhole::tools
