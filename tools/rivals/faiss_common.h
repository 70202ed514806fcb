// What the three rivals of Faiss share. Faiss counts its work in variables of the process: measure one rival at a time.
#pragma once

#include <faiss/Index.h>
#include <faiss/IndexIVF.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/rivals/rival.h"

namespace keyhole::tools {

/// While one lives, Faiss uses this many threads when the calling thread calls it.
class FaissThreads {
 public:
  explicit FaissThreads(unsigned threads);
  ~FaissThreads();
  FaissThreads(const FaissThreads&) = delete;
  FaissThreads& operator=(const FaissThreads&) = delete;

 private:
  int former_;
};

/// The size of the index when it is saved, which is what it holds in memory.
[[nodiscard]] uint64_t faiss_bytes(const faiss::Index& index);

/// One search of one query head with one thread: writes the ids of at most k rows, best first, to `ids`.
class FaissSearch {
 public:
  void run(const faiss::Index& index, const float* query, size_t k, std::vector<uint32_t>& ids);

 private:
  std::vector<float> scores_;
  std::vector<int64_t> labels_;
};

/// Trains an empty index on all keys, and adds them.
void faiss_fill(faiss::IndexIVF& index, const RivalData& data);

/// The parameter `lists` of a spec; 0 is replaced by a choice by the number of keys.
[[nodiscard]] size_t faiss_lists(int64_t lists, size_t rows);
/// Throws UsageError where there are fewer keys than lists.
void check_faiss_lists(int64_t lists, size_t rows);

}  // namespace keyhole::tools
