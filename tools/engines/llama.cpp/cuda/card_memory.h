// Addresses on a card of which only those have memory that are used: llama.cpp is given a cache for the longest text
// there may be, and the card holds what has come so far, or nothing of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

namespace keyhole::llama_cpp {

class CardMemory {
 public:
  /// Takes addresses on a CUDA device, without memory. spare: bytes that hold() leaves to others. Throws
  /// std::runtime_error where there are none, or where the device cannot map pages.
  CardMemory(int ordinal, size_t bytes, size_t spare = kSpare);
  /// Waits for the device.
  ~CardMemory();
  CardMemory(const CardMemory&) = delete;
  CardMemory& operator=(const CardMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  /// Bytes that have memory. From any thread, as free_on_card().
  [[nodiscard]] size_t held() const { return held_; }

  /// Takes memory for this many bytes, whatever addresses will need it: hold() takes what it gives from there first.
  /// False: the card has too little, and nothing was taken.
  [[nodiscard]] bool prepare(size_t bytes);
  /// Gives memory to all of [begin, end); where there was none, it is filled with zeros when the call returns. False:
  /// the card has too little, or would have less to spare then; some of it may have got its memory.
  [[nodiscard]] bool hold(size_t begin, size_t end);
  /// Takes the memory back from pieces that lie within [begin, end) as a whole. Nothing that uses them may be under
  /// way.
  void let_go(size_t begin, size_t end);
  void let_go_all() { let_go(0, has_memory_.size() * page_); }
  /// How many pieces hold() has given memory to, and: takes it back from those behind the first `pieces` of them.
  [[nodiscard]] size_t pieces() const { return pieces_.size(); }
  void let_go_since(size_t pieces);

  /// Bytes of the device that nobody has taken.
  [[nodiscard]] size_t free_on_card() const;

  /// Copies bytes to the host's memory, zeros where there is no memory, or from there to bytes that have memory, and
  /// waits for that alone: what is enqueued elsewhere has to be done. Throws std::runtime_error where the device fails.
  void read(size_t begin, size_t bytes, std::byte* out) const;
  void write(size_t begin, size_t bytes, const std::byte* from);

  /// What hold() of a cache leaves to others, in bytes.
  static constexpr size_t kSpare = size_t{512} << 20U;

 private:
  struct Piece {
    size_t first = 0;  // page
    size_t pages = 0;
    unsigned long long handle = 0;
  };
  [[nodiscard]] bool map(size_t first, size_t pages);
  void map(const Piece& piece);
  void unmap(const Piece& piece);

  int ordinal_;
  size_t bytes_;
  size_t spare_;
  size_t page_ = 0;
  std::atomic<size_t> held_ = 0;
  std::byte* data_ = nullptr;
  std::vector<char> has_memory_;  // of each page
  std::vector<Piece> pieces_;
  std::vector<unsigned long long> prepared_;  // handles of a page each, which lie at no addresses
};

}  // namespace keyhole::llama_cpp
