// A state of a sequence of any number of tokens, made out of one of a few: for benches, which have no use for what the
// tokens are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace keyhole::llama_cpp {

/// Bytes as llama_state_seq_set_data() takes them. The memory of K and V is address space alone, of zeros, but for what
/// is written into it.
class FilledState {
 public:
  /// `few`: what llama_state_seq_get_data() gives of a sequence of at least one token, from position 0 on, of the
  /// cache's first stream; in f16 or bf16, with flash attention, and no layers with a sliding window. What lies behind
  /// K and V (states of recurrent layers) is taken over, with another position. Throws std::runtime_error where it is
  /// none of these, or where there is no address space.
  FilledState(std::span<const uint8_t> few, uint32_t tokens);
  ~FilledState();
  FilledState(const FilledState&) = delete;
  FilledState& operator=(const FilledState&) = delete;

  [[nodiscard]] const uint8_t* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }
  /// Root mean square of the few tokens' keys, and of their values; in f16 alone, else 0.
  [[nodiscard]] float keys() const { return keys_; }
  [[nodiscard]] float values() const { return values_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  float keys_ = 0;
  float values_ = 0;
};

}  // namespace keyhole::llama_cpp
