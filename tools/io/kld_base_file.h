// A file that llama.cpp's `llama-perplexity --kl-divergence-base FILE` writes: a text in tokens, cut into chunks, and
// what a model predicted in the second half of each, as log-probabilities in 16 bits. All numbers are little-endian.
//
//   "_logits_"                             8 bytes
//   context, vocabulary, chunks            32 bits each: tokens of a chunk, tokens of the vocabulary, chunks
//   tokens                                 [chunks, context] of 32 bits
//   predictions                            [chunks, context - 1 - context / 2] rows, each of
//     step, least                          fp32 each
//     steps                                [vocabulary] of 16 bits, and one more where the vocabulary is odd
//
// A chunk's first context / 2 tokens are a prompt; each token behind them but the last has a row, which predicts its
// successor: token t has the log-probability least + step * steps[t], in nats. The writer cuts logits at 16 below the
// largest: what is less has 0 steps, and more than its share. Tokens are those of the text: where the vocabulary puts a
// token in front of every prompt, the model was given that one in place of each chunk's first token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace keyhole::tools {

/// Such a file, of which one row at a time is in memory. Not for several threads at once.
class KldBaseFile {
 public:
  /// Log-probabilities up to this one do not count in a divergence, as llama.cpp reads them: most were cut.
  static constexpr float kLeastThatCounts = -16.0F;

  /// Copies the bytes from `offset` on, which are there.
  using ReadAt = std::function<void(uint64_t offset, std::span<std::byte> to)>;

  /// Opens a file and checks its header: as the other constructor, and CannotRead where the system refuses.
  explicit KldBaseFile(const std::filesystem::path& path);
  /// Checks the header of `size` bytes that `read` gives. Throws std::runtime_error that begins with `name`, where they
  /// are cut or no such file, where a count is outside of what is allowed (context 3 to 2^24, vocabulary 1 to 2^24,
  /// chunks 1 to 2^31 - 1), and where the counts and the size do not fit. What is allocated later is no more than the
  /// file has.
  KldBaseFile(std::string name, uint64_t size, ReadAt read);

  [[nodiscard]] const std::string& name() const { return name_; }
  /// Tokens of a chunk, of the vocabulary, and chunks.
  [[nodiscard]] uint32_t context() const { return context_; }
  [[nodiscard]] uint32_t vocabulary() const { return vocabulary_; }
  [[nodiscard]] uint32_t chunks() const { return chunks_; }
  /// Of a chunk: tokens before the first one that has a row, and rows.
  [[nodiscard]] uint32_t prompt() const { return context_ / 2; }
  [[nodiscard]] uint32_t rows() const { return context_ - 1 - context_ / 2; }

  /// `[context]` the tokens of a chunk. Throws std::runtime_error for one outside of the vocabulary.
  [[nodiscard]] std::vector<uint32_t> tokens(uint32_t chunk) const;

  /// Writes `[vocabulary]` log-probabilities of the successor of token prompt() + row of a chunk. Throws
  /// std::runtime_error for a row of which a number is not finite, the step negative, or a probability above 1 by more
  /// than rounding.
  void read_row(uint32_t chunk, uint32_t row, std::span<float> log_probabilities);

 private:
  [[nodiscard]] uint64_t row_bytes() const;
  [[noreturn]] void refuse(const std::string& why) const;

  std::string name_;
  ReadAt read_;
  uint32_t context_ = 0, vocabulary_ = 0, chunks_ = 0;
  std::vector<std::byte> row_;
};

}  // namespace keyhole::tools
