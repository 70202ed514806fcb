// Sets of vectors as traces of one head: keys without a sequence around them, whose queries all
// come after the last key. Their scale is 1/sqrt(d), and there is no RoPE.
//
//   HDF5 (ann-benchmarks, VIBE)   `train` the keys, `test` the queries, `learn` (optional) the training queries:
//                                 two-dimensional, of any floating-point or integer type
//   fbin                          two little-endian int32, rows and dim, then fp32 rows
//   fvecs                         for every row a little-endian int32 dim, then dim fp32
#pragma once

#include <filesystem>

#include "tools/io/trace.h"

namespace keyhole::tools {

/// The files of the parts of a set of vectors.
struct VectorFiles {
  std::filesystem::path keys;      ///< .hdf5, .h5, .fbin or .fvecs; HDF5 holds all parts
  std::filesystem::path queries;   ///< .fbin or .fvecs; needed beside fbin and fvecs keys
  std::filesystem::path training;  ///< .fbin or .fvecs; "": none
  std::filesystem::path values;    ///< .fbin or .fvecs; "": none
};

/// True for a path that ends as the keys of a set of vectors do.
[[nodiscard]] bool is_vector_file(const std::filesystem::path& path);

/// Opens a set of vectors. Throws std::runtime_error that names the file and what is wrong; in a build without HDF5,
/// a text that says so.
[[nodiscard]] Trace open_vectors(const VectorFiles& files);

/// Rows of fbin and fvecs files, told apart by ending: fp32 rows of `dim`.
struct VectorRows {
  uint32_t dim = 0;
  std::vector<float> data;
};
[[nodiscard]] VectorRows read_vector_rows(const std::filesystem::path& path);

/// Reads the parts of an HDF5 file.
[[nodiscard]] Trace::Vectors read_hdf5_vectors(const std::filesystem::path& path);

}  // namespace keyhole::tools
