// The parameters of Faiss's rivals, which are the same in builds with and without the library.
#pragma once

#include "tools/rivals/params.h"

namespace keyhole::tools {

struct FaissIvfParams {
  enum Place : size_t { lists, probe };
  static constexpr RivalParam kTable[] = {
      {"lists", RivalStage::build, 0, 0, 1 << 20, "lists; 0: 4 times the root of the keys"},
      {"probe", RivalStage::search, 16, 1, 1 << 20, "lists that a search reads"},
  };
};

struct FaissIvfPqParams {
  enum Place : size_t { lists, probe, m, refine };
  static constexpr RivalParam kTable[] = {
      {"lists", RivalStage::build, 0, 0, 1 << 20, "lists; 0: 4 times the root of the keys"},
      {"probe", RivalStage::search, 16, 1, 1 << 20, "lists that a search reads"},
      {"m", RivalStage::build, 0, 0, 4096,
       "parts of a key with 4 bits each, a divisor of the head's dimension; 0: half of it"},
      {"refine", RivalStage::search, 4, 1, 1024,
       "keys ranked again by their exact rows, for each one wanted"},
  };
};

inline constexpr const char* kFaissIvfMeaning =
    "Faiss IndexIVFFlat, inner product: lists by spherical k-means, fp32 rows";
inline constexpr const char* kFaissIvfPqMeaning =
    "Faiss IndexIVFPQFastScan, inner product: lists of 4-bit product codes, then exact rows";
inline constexpr const char* kFaissHnswMeaning = "Faiss IndexHNSWFlat";

}  // namespace keyhole::tools
