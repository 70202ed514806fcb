#include "tools/engines/llama.cpp/filled_state.h"

#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

/// Reads llama.cpp's bytes: a magic number, the sequence; the number of streams, of tokens; of each token its position,
/// its number of sequences, in some models 12 bytes more, and its sequence; whether values are transposed, the number
/// of layers; for each layer's keys their type, the bytes of a row, and the rows; the same for values; the number of
/// tokens in each other stream, which is 0.
class Parsed {
 public:
  Parsed(std::span<const uint8_t> bytes, size_t of_token) : bytes_(bytes) {
    skip(8);
    const auto streams = number<uint32_t>();
    if (streams == 0 || streams > 1000) return;
    tokens = number<uint32_t>();
    tokens_at = at;
    skip(of_token * tokens);
    rows_at = at;
    if (tokens == 0 || number<uint32_t>() != 0) return;
    const uint32_t layers = number<uint32_t>();
    if (layers == 0 || layers > 1000) return;
    for (uint32_t i = 0; i < 2 * layers; ++i) {
      const auto type = number<int32_t>();
      const auto row = number<uint64_t>();
      constexpr std::array kTypes{GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
      if (std::find(kTypes.begin(), kTypes.end(), type) == kTypes.end() || row == 0 ||
          row > 1U << 20U) {
        return;
      }
      parts.push_back({at, type, row});
      skip(row * tokens);
    }
    rows_end = at;
    for (uint32_t i = 1; i < streams; ++i) {
      if (number<uint32_t>() != 0) return;
    }
    is_right = !beyond_;
  }

  struct Part {
    size_t at;  // of the rows
    int32_t type;
    size_t row;
  };
  uint32_t tokens = 0;
  size_t tokens_at = 0;
  size_t rows_at = 0;
  std::vector<Part> parts;  // keys of all layers, then values
  size_t rows_end = 0;
  size_t at = 0;  // behind what is read
  bool is_right = false;

 private:
  void skip(size_t bytes) {
    beyond_ = beyond_ || bytes > bytes_.size() - at;
    if (!beyond_) at += bytes;
  }
  template <class T>
  T number() {
    T value{};
    const size_t from = at;
    skip(sizeof value);
    if (!beyond_) std::memcpy(&value, bytes_.data() + from, sizeof value);
    return value;
  }

  std::span<const uint8_t> bytes_;
  bool beyond_ = false;
};

float root_mean_square(std::span<const uint8_t> bytes, std::span<const Parsed::Part> parts,
                       uint32_t tokens) {
  double sum = 0;
  size_t count = 0;
  for (const Parsed::Part& part : parts) {
    if (part.type != GGML_TYPE_F16) return 0;
    std::vector<ggml_fp16_t> rows(part.row * tokens / sizeof(ggml_fp16_t));
    std::memcpy(rows.data(), bytes.data() + part.at, rows.size() * sizeof(ggml_fp16_t));
    for (const ggml_fp16_t x : rows) sum += std::pow(double{ggml_fp16_to_fp32(x)}, 2);
    count += rows.size();
  }
  return static_cast<float>(std::sqrt(sum / static_cast<double>(count)));
}

}  // namespace

FilledState::FilledState(std::span<const uint8_t> few, uint32_t tokens) {
  size_t of_token = 12;
  Parsed parsed(few, of_token);
  if (!parsed.is_right) parsed = Parsed(few, of_token = 24);
  if (!parsed.is_right)
    throw std::runtime_error("llama.cpp's state of the sequence is not understood");
  const std::span<const Parsed::Part> parts(parsed.parts);
  keys_ = root_mean_square(few, parts.first(parts.size() / 2), parsed.tokens);
  values_ = root_mean_square(few, parts.last(parts.size() / 2), parsed.tokens);

  const size_t rest = few.size() - parsed.rows_end;
  size_ = few.size() + of_token * tokens - of_token * parsed.tokens;
  for (const Parsed::Part& part : parts) size_ += part.row * tokens - part.row * parsed.tokens;
  void* made = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw std::runtime_error("no address space for a state");
  data_ = static_cast<uint8_t*>(made);

  uint8_t* to = data_;
  const auto put = [&](const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  put(few.data(), parsed.tokens_at - sizeof tokens);
  put(&tokens, sizeof tokens);
  for (uint32_t i = 0; i < tokens; ++i) {
    put(&i, sizeof i);
    put(few.data() + parsed.tokens_at + sizeof i, of_token - sizeof i);
    if (of_token == 12) continue;
    // x and y of a position in a text are the position.
    const std::array<uint32_t, 2> place{i, i};
    std::memcpy(to - of_token + 8, place.data(), sizeof place);
  }
  size_t from = parsed.rows_at;
  for (const Parsed::Part& part : parts) {
    put(few.data() + from, part.at - from);  // what stands in front of the rows
    to += part.row * tokens;
    from = part.at + part.row * parsed.tokens;
  }
  uint8_t* behind = to + (parsed.at - parsed.rows_end);
  if (rest > 0) put(few.data() + parsed.rows_end, rest);
  // Recurrent layers: the number of states, and the position of the first.
  const uint32_t last = tokens - 1;
  if (to - behind >= 8) std::memcpy(behind + 4, &last, sizeof last);
}

FilledState::~FilledState() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace keyhole::llama_cpp
