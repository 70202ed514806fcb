// Thousands of damaged safetensors files: each must be refused with a text or be valid by a second,
// simpler reading of the format. The heap copy that is parsed has exactly the file's size, so that
// AddressSanitizer sees every byte read beyond it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "runtime/files/json.h"
#include "runtime/files/safetensors.h"
#include "tests/runtime/files/safetensors_bytes.h"
#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

std::vector<Bytes> seeds() {
  return {
      safetensors_bytes("{}", 0),
      safetensors_bytes(R"({"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})", 16),
      safetensors_bytes(R"({"__metadata__":{"format":"pt"},)"
                        R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[4,10]},)"
                        R"("a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},)"
                        R"("c":{"dtype":"U8","shape":[0,9],"data_offsets":[10,10]}})",
                        10),
  };
}

// What an attacker or a bad disk would put in: borders of integers, JSON of another kind.
const char* const kTokens[] = {"0",
                               "1",
                               "-1",
                               "255",
                               "4294967295",
                               "4294967296",
                               "9223372036854775808",
                               "18446744073709551615",
                               "18446744073709551616",
                               "1e99",
                               "0.5",
                               "null",
                               "true",
                               "[]",
                               "{}",
                               "[[[[[[[[",
                               "\"F64\"",
                               "\"dtype\"",
                               "\"shape\"",
                               "\"data_offsets\"",
                               "\"__metadata__\"",
                               ",",
                               ":",
                               "}",
                               "]",
                               "\""};

size_t pick(Random& random, size_t below) {
  return std::uniform_int_distribution<size_t>(0, below - 1)(random);
}

void set_length(Bytes& file, uint64_t length) {
  for (size_t i = 0; i < 8 && i < file.size(); ++i)
    file[i] = static_cast<std::byte>(length >> (8 * i));
}

void mutate(Bytes& file, Random& random) {
  const size_t at = file.empty() ? 0 : pick(random, file.size());
  const auto here = file.begin() + static_cast<ptrdiff_t>(at);
  switch (pick(random, 8)) {
    case 0:
      if (!file.empty()) file[at] ^= static_cast<std::byte>(1U << pick(random, 8));
      break;
    case 1:
      if (!file.empty()) file[at] = static_cast<std::byte>(pick(random, 256));
      break;
    case 2: file.resize(at); break;
    case 3:
      file.insert(here, 1 + pick(random, 16), static_cast<std::byte>(pick(random, 256)));
      break;
    case 4:
      if (!file.empty()) {
        file.erase(here, here + static_cast<ptrdiff_t>(
                                    1 + pick(random, std::min<size_t>(16, file.size() - at))));
      }
      break;
    case 5: {  // a digit or word of the header becomes a token; the header's length follows
      if (file.size() < 9) break;
      const char* token = kTokens[pick(random, std::size(kTokens))];
      const size_t place = 8 + pick(random, file.size() - 8);
      const size_t removed = std::min<size_t>(1 + pick(random, 3), file.size() - place);
      const auto from = file.begin() + static_cast<ptrdiff_t>(place);
      file.erase(from, from + static_cast<ptrdiff_t>(removed));
      const auto* bytes = reinterpret_cast<const std::byte*>(token);
      file.insert(file.begin() + static_cast<ptrdiff_t>(place), bytes, bytes + std::strlen(token));
      uint64_t length = 0;
      std::memcpy(&length, file.data(), 8);
      set_length(file, length + std::strlen(token) - removed);
      break;
    }
    case 6: set_length(file, random() >> pick(random, 64)); break;
    case 7: {  // a piece of the file once more, elsewhere
      const Bytes piece(
          here,
          here + static_cast<ptrdiff_t>(
                     file.empty() ? 0 : pick(random, std::min<size_t>(40, file.size() - at + 1))));
      file.insert(file.begin() + static_cast<ptrdiff_t>(pick(random, file.size() + 1)),
                  piece.begin(), piece.end());
      break;
    }
    default: break;
  }
}

// The format's rules, said again for a file that was accepted.
void expect_valid(const Bytes& file) {
  ASSERT_GE(file.size(), 8U);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  ASSERT_LE(length, file.size() - 8);
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  const auto header = nlohmann::json::parse(text, text + length);
  const size_t data_bytes = file.size() - 8 - length;
  std::vector<int> owners(data_bytes);
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const std::string dtype = tensor.at("dtype");
    size_t bytes = dtype == "I64"                                       ? 8
                   : dtype == "F32" || dtype == "I32" || dtype == "U32" ? 4
                   : dtype == "F16" || dtype == "BF16"                  ? 2
                                                                        : 1;
    for (const size_t axis : tensor.at("shape")) bytes *= axis;
    const size_t begin = tensor.at("data_offsets").at(0);
    const size_t end = tensor.at("data_offsets").at(1);
    ASSERT_EQ(begin + bytes, end);
    ASSERT_LE(end, data_bytes);
    for (size_t i = begin; i < end; ++i) ++owners[i];
  }
  for (const int owner_count : owners) ASSERT_EQ(owner_count, 1);
}

TEST(SafetensorsMutations, AreRefusedOrValid) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const std::vector<Bytes> originals = seeds();
  size_t accepted = 0;
  size_t refused = 0;
  for (int i = 0; i < 30000; ++i) {
    Bytes file = originals[pick(random, originals.size())];
    for (size_t n = 1 + pick(random, 3); n > 0; --n) mutate(file, random);
    file.shrink_to_fit();
    try {
      validate_safetensors(file);
      ++accepted;
    } catch (const std::runtime_error& e) {
      ASSERT_STRNE(e.what(), "");
      ++refused;
      continue;
    }
    expect_valid(file);
    if (HasFatalFailure()) return;
  }
  // Both outcomes occur, or the mutations are too wild or too tame to tell anything.
  EXPECT_GT(accepted, 100U);
  EXPECT_GT(refused, 10000U);
}

TEST(SafetensorsMutations, EveryTruncationIsRefused) {
  for (const Bytes& original : seeds()) {
    for (size_t size = 0; size < original.size(); ++size) {
      const Bytes cut(original.begin(), original.begin() + static_cast<ptrdiff_t>(size));
      EXPECT_THROW(validate_safetensors(cut), std::runtime_error) << size;
    }
    EXPECT_NO_THROW(validate_safetensors(original));
  }
}

}  // namespace
}  // namespace keyhole
