// Files of log-probabilities: numbers of double precision come back to half a step, and what is no such file is
// refused.
#include "tools/io/kld_base_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "runtime/files/input_file.h"
#include "tests/temporary_folder.h"
#include "tests/tools/io/kld_base_writer.h"

namespace keyhole::tools {
namespace {

KldBaseNumbers random_numbers(uint32_t context, uint32_t vocabulary, uint32_t chunks, double wide) {
  std::mt19937 random(7 * context + vocabulary);
  std::normal_distribution<double> normal(0.0, wide);
  KldBaseNumbers numbers{context, vocabulary, chunks, {}, {}};
  for (uint32_t i = 0; i < context * chunks; ++i) {
    numbers.tokens.push_back(std::uniform_int_distribution<uint32_t>(0, vocabulary - 1)(random));
  }
  for (uint32_t i = 0; i < chunks * (context - 1 - context / 2); ++i) {
    std::vector<double>& row = numbers.logits.emplace_back(vocabulary);
    for (double& x : row) x = 100.0 + normal(random);
  }
  return numbers;
}

/// A file in memory, which is never read beyond its end.
KldBaseFile file_of(const std::string& bytes) {
  return KldBaseFile("base", bytes.size(), [bytes](uint64_t offset, std::span<std::byte> to) {
    ASSERT_LE(offset, bytes.size());
    ASSERT_LE(to.size(), bytes.size() - offset);
    if (!to.empty()) std::memcpy(to.data(), bytes.data() + offset, to.size());
  });
}

/// Reads all of it.
void read_all(const std::string& bytes) {
  KldBaseFile file = file_of(bytes);
  std::vector<float> row(file.vocabulary());
  for (uint32_t c = 0; c < file.chunks(); ++c) {
    (void)file.tokens(c);
    for (uint32_t i = 0; i < file.rows(); ++i) file.read_row(c, i, row);
  }
}

void expect_refused(const std::string& bytes, const std::string& why) {
  try {
    read_all(bytes);
    ADD_FAILURE() << "allowed: " << why;
  } catch (const std::runtime_error& e) {
    EXPECT_EQ(std::string(e.what()).rfind("base: ", 0), 0U) << e.what();
    EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
  }
}

std::string with_number(std::string bytes, size_t at, uint32_t value) {
  std::string number;
  put_little_endian(number, value, 4);
  return bytes.replace(at, 4, number);
}

TEST(KldBaseFile, GivesWhatWasWritten) {
  const TemporaryFolder folder;
  for (const uint32_t context : {3U, 8U, 9U}) {
    for (const uint32_t vocabulary : {1U, 6U, 7U}) {
      for (const double wide : {0.0, 1.0, 20.0}) {
        SCOPED_TRACE(std::to_string(context) + " " + std::to_string(vocabulary));
        const KldBaseNumbers numbers = random_numbers(context, vocabulary, 2, wide);
        write_file(folder / "base", kld_base_bytes(numbers));
        KldBaseFile file(folder / "base");
        EXPECT_EQ(file.context(), context);
        EXPECT_EQ(file.vocabulary(), vocabulary);
        EXPECT_EQ(file.chunks(), 2U);
        EXPECT_EQ(file.prompt() + file.rows() + 1, context);
        std::vector<float> row(vocabulary);
        for (uint32_t c = 0; c < 2; ++c) {
          const auto begin = numbers.tokens.begin() + c * context;
          EXPECT_EQ(file.tokens(c), std::vector<uint32_t>(begin, begin + context));
          for (uint32_t i = 0; i < file.rows(); ++i) {
            file.read_row(c, i, row);
            const std::vector<double>& logits = numbers.logits[c * file.rows() + i];
            const double log_sum = log_sum_of(logits);
            const double most = *std::max_element(logits.begin(), logits.end());
            for (uint32_t t = 0; t < vocabulary; ++t) {
              // Half of the greatest step, and fp32's rounding; 16 below the largest the rest is cut.
              EXPECT_NEAR(row[t], std::max(logits[t], most - 16.0) - log_sum, 8.0 / 65535 + 1e-5);
            }
          }
        }
      }
    }
  }
  EXPECT_THROW(KldBaseFile(folder / "none"), CannotRead);
}

TEST(KldBaseFile, RefusesWhatIsCutOrLonger) {
  const std::string bytes = kld_base_bytes(random_numbers(5, 3, 2, 2.0));
  ASSERT_NO_THROW(read_all(bytes));
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string why =
        size < 20 ? "has " + std::to_string(size) + " bytes; a header of log-probabilities has 20"
                  : "has " + std::to_string(size - 20) + " bytes behind its header";
    expect_refused(bytes.substr(0, size), why);
  }
  expect_refused(bytes + "x", "bytes behind its header");
  expect_refused(bytes + bytes.substr(20, (bytes.size() - 20) / 2), "bytes behind its header");
}

TEST(KldBaseFile, RefusesOtherFilesAndCounts) {
  const std::string bytes = kld_base_bytes(random_numbers(5, 3, 2, 2.0));
  for (size_t i = 0; i < 8; ++i) {
    std::string other = bytes;
    other[i] ^= 1;
    expect_refused(other, "does not begin with \"_logits_\"");
    expect_refused(other.substr(0, i + 1), "does not begin with \"_logits_\"");
  }
  const char* const names[] = {"the tokens of a chunk is ", "the vocabulary is ",
                               "the number of chunks is "};
  for (const uint32_t value : {0U, 1U << 31U, ~0U}) {
    for (size_t i = 0; i < 3; ++i) {
      expect_refused(with_number(bytes, 8 + 4 * i, value), names[i] + std::to_string(value));
    }
  }
  expect_refused(with_number(bytes, 8, 2), "the tokens of a chunk is 2; allowed: 3 to 16777216");
  // The largest that are allowed, alone and together, whose product has more than 64 bits.
  std::string huge = bytes;
  for (const auto& [at, value] :
       {std::pair<size_t, uint32_t>{8, 1U << 24U}, {12, 1U << 24U}, {16, (1U << 31U) - 1}}) {
    expect_refused(with_number(bytes, at, value), "bytes behind its header");
    huge = with_number(huge, at, value);
  }
  expect_refused(huge,
                 "announces 2147483647 chunks of 16777216 tokens of a vocabulary of 16777216");
  // A vocabulary or a context that is one more.
  expect_refused(with_number(bytes, 12, 5), "bytes behind its header");
  expect_refused(with_number(bytes, 8, 6), "bytes behind its header");
}

TEST(KldBaseFile, RefusesWrongNumbers) {
  const std::string bytes = kld_base_bytes(random_numbers(5, 3, 2, 2.0));
  expect_refused(with_number(bytes, 20 + 4 * 6, 3), "token 1 of chunk 1 is 3; allowed: less than");
  expect_refused(with_number(bytes, 20, ~0U), "token 0 of chunk 0 is 4294967295");
  const size_t rows = 20 + 4 * 10, row = 8 + 2 * 4;
  constexpr uint32_t kNan = 0x7FC00000, kInfinite = 0x7F800000, kLess = 0xBF800000,
                     kOne = 0x3F800000;
  for (const uint32_t value : {kNan, kInfinite, kLess}) {
    expect_refused(with_number(bytes, rows + 3 * row, value), "row 1 of chunk 1 has steps of");
  }
  for (const uint32_t value : {kNan, kInfinite}) {
    expect_refused(with_number(bytes, rows + 4, value), "row 0 of chunk 0 has steps of");
  }
  expect_refused(with_number(bytes, rows + 4, kOne), "has a log-probability of");
  expect_refused(with_number(bytes, rows, kOne), "has a log-probability of");
}

}  // namespace
}  // namespace keyhole::tools
