#include "tools/tokenizer/token_file.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

namespace keyhole::tools {

std::vector<uint32_t> read_token_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  constexpr std::string_view kSeparators = " \t\r\n,";
  std::vector<uint32_t> tokens;
  for (size_t at = text.find_first_not_of(kSeparators); at != std::string::npos;
       at = text.find_first_not_of(kSeparators, at)) {
    const size_t end = std::min(text.find_first_of(kSeparators, at), text.size());
    uint32_t token = 0;
    const auto [rest, error] = std::from_chars(text.data() + at, text.data() + end, token);
    if (error != std::errc() || rest != text.data() + end) {
      throw std::runtime_error(path.string() + ": token " + std::to_string(tokens.size()) +
                               " is \"" + text.substr(at, std::min<size_t>(end - at, 20)) +
                               "\"; allowed: token ids in decimal, separated by spaces or commas");
    }
    tokens.push_back(token);
    at = end;
  }
  return tokens;
}

}  // namespace keyhole::tools
