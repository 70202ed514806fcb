#include "tools/terminal/command_line.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>

namespace keyhole::tools {

std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string("_@%+=:,./-").find(static_cast<char>(c)) != std::string::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string out;
  for (std::string word; std::getline(file, word, '\0');) {
    if (out.empty()) word = std::filesystem::path(word).filename().string();
    out += (out.empty() ? "" : " ") + shell_word(word);
  }
  return out;
}

}  // namespace keyhole::tools
