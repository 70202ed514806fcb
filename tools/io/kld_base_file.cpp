#include "tools/io/kld_base_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "runtime/files/input_file.h"

namespace keyhole::tools {
namespace {

constexpr std::string_view kKldBaseMagic = "_logits_";
constexpr uint64_t kKldBaseHeader = 20;
// Of a row: the step and the least log-probability.
constexpr uint64_t kKldBaseRowHeader = 2 * sizeof(float);
constexpr uint32_t kMostOfAChunk = 1U << 24U;
constexpr uint32_t kMostChunks = (1U << 31U) - 1;
// Log-probabilities above 0 by rounding of fp32.
constexpr float kRoundedAbove = 1e-3F;

template <class Number>
Number number_at(std::span<const std::byte> bytes, size_t at) {
  Number value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

KldBaseFile::ReadAt reader_of(const std::shared_ptr<const InputFile>& file) {
  return [file](uint64_t offset, std::span<std::byte> to) { file->read(offset, to); };
}

}  // namespace

KldBaseFile::KldBaseFile(const std::filesystem::path& path) : name_(path.string()) {
  const auto file = std::make_shared<const InputFile>(path);
  *this = KldBaseFile(name_, file->size(), reader_of(file));
}

KldBaseFile::KldBaseFile(std::string name, uint64_t size, ReadAt read)
    : name_(std::move(name)), read_(std::move(read)) {
  std::array<std::byte, kKldBaseHeader> header{};
  const size_t magic = std::min<uint64_t>(size, kKldBaseMagic.size());
  read_(0, std::span(header).first(std::min<uint64_t>(size, kKldBaseHeader)));
  if (std::memcmp(header.data(), kKldBaseMagic.data(), magic) != 0) {
    refuse(
        "does not begin with \"_logits_\", as files of llama-perplexity's "
        "--kl-divergence-base do");
  }
  if (size < kKldBaseHeader) {
    refuse("has " + std::to_string(size) + " bytes; a header of log-probabilities has " +
           std::to_string(kKldBaseHeader));
  }
  context_ = number_at<uint32_t>(header, 8);
  vocabulary_ = number_at<uint32_t>(header, 12);
  chunks_ = number_at<uint32_t>(header, 16);
  const auto check = [this](const char* what, uint32_t value, uint32_t least, uint32_t most) {
    if (value >= least && value <= most) return;
    refuse(std::string(what) + " is " + std::to_string(value) +
           "; allowed: " + std::to_string(least) + " to " + std::to_string(most));
  };
  check("the tokens of a chunk", context_, 3, kMostOfAChunk);
  check("the vocabulary", vocabulary_, 1, kMostOfAChunk);
  check("the number of chunks", chunks_, 1, kMostChunks);
  // Below 2^50; all chunks together may be more than 64 bits count.
  const uint64_t chunk = sizeof(uint32_t) * uint64_t{context_} + rows() * row_bytes();
  const uint64_t rest = size - kKldBaseHeader;
  if (rest / chunk != chunks_ || rest % chunk != 0) {
    refuse("announces " + std::to_string(chunks_) + " chunks of " + std::to_string(context_) +
           " tokens of a vocabulary of " + std::to_string(vocabulary_) + ", " +
           std::to_string(chunk) + " bytes each, but has " + std::to_string(rest) +
           " bytes behind its header: it was cut, or not written to its end");
  }
}

uint64_t KldBaseFile::row_bytes() const {
  return kKldBaseRowHeader + 2 * sizeof(uint16_t) * ((uint64_t{vocabulary_} + 1) / 2);
}

void KldBaseFile::refuse(const std::string& why) const {
  throw std::runtime_error(name_ + ": " + why);
}

std::vector<uint32_t> KldBaseFile::tokens(uint32_t chunk) const {
  std::vector<uint32_t> out(context_);
  read_(kKldBaseHeader + sizeof(uint32_t) * uint64_t{chunk} * context_,
        std::as_writable_bytes(std::span(out)));
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] < vocabulary_) continue;
    refuse("token " + std::to_string(i) + " of chunk " + std::to_string(chunk) + " is " +
           std::to_string(out[i]) + "; allowed: less than the vocabulary of " +
           std::to_string(vocabulary_));
  }
  return out;
}

void KldBaseFile::read_row(uint32_t chunk, uint32_t row, std::span<float> log_probabilities) {
  row_.resize(row_bytes());
  const uint64_t before = uint64_t{chunk} * rows() + row;
  read_(kKldBaseHeader + sizeof(uint32_t) * uint64_t{chunks_} * context_ + before * row_bytes(),
        row_);
  const auto step = number_at<float>(row_, 0), least = number_at<float>(row_, sizeof(float));
  const auto wrong = [&](const std::string& why) {
    refuse("row " + std::to_string(row) + " of chunk " + std::to_string(chunk) + " " + why);
  };
  if (!std::isfinite(step) || step < 0 || !std::isfinite(least)) {
    wrong("has steps of " + std::to_string(step) + " above " + std::to_string(least) +
          "; allowed: finite numbers, the step 0 or more");
  }
  float best = least;
  for (size_t token = 0; token < vocabulary_; ++token) {
    const auto steps = number_at<uint16_t>(row_, kKldBaseRowHeader + token * sizeof(uint16_t));
    log_probabilities[token] = step * static_cast<float>(steps) + least;
    best = std::max(best, log_probabilities[token]);
  }
  if (!(best <= kRoundedAbove)) {
    wrong("has a log-probability of " + std::to_string(best) + "; allowed: 0 or less");
  }
}

}  // namespace keyhole::tools
