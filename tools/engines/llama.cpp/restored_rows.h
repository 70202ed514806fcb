// Rows of K and V that were written into cells from outside (saved states) while the cells have no memory of their own:
// they lie here, in host memory, until sessions have taken them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// Cells are counted through all streams. Memory is taken for what is written, and given back as soon as none of the
/// kBlock cells that lie side by side has anything here.
class RestoredRows {
 public:
  RestoredRows() = default;
  ~RestoredRows() { clear(); }
  RestoredRows(const RestoredRows&) = delete;
  RestoredRows& operator=(const RestoredRows&) = delete;

  /// Room for `bytes` bytes from `offset` on of a tensor of the cache, for the caller to write; the cells that they lie
  /// in have something here then. With random_rows.h it shows these already, and nothing is to be written. Throws
  /// std::runtime_error where there is no address space.
  [[nodiscard]] std::byte* write(const ggml_tensor* tensor, size_t offset, size_t bytes);
  /// What was written of a tensor's cell, and behind it what was written of the next ones; has(id).
  [[nodiscard]] std::byte* row(const ggml_tensor* tensor, size_t id) const;
  /// `count` cells of a tensor from `from` on lie in those from `to` on as well; what these had here is gone, in all
  /// tensors.
  void copy(const ggml_tensor* tensor, size_t from, size_t to, size_t count);

  [[nodiscard]] bool has(size_t id) const { return id < marks_.size() && marks_[id] != 0; }
  [[nodiscard]] bool any() const { return count_ > 0; }
  /// A session has the cell's rows, or they are of no use any more.
  void forget(size_t id);
  void clear();

  static constexpr size_t kBlock = 256;

 private:
  void mark(size_t id);
  void give_back(size_t block);

  std::map<const ggml_tensor*, std::byte*> regions_;  // each as large as its tensor
  std::vector<uint8_t> marks_;                        // of each cell
  std::vector<uint32_t> marked_;                      // marks that are set, of each block
  size_t count_ = 0;                                  // marks that are set
};

}  // namespace keyhole::llama_cpp
