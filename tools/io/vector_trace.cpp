#include "tools/io/vector_trace.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/files/mapped_file.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kMaxDim = 65536;

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& text) {
  throw std::runtime_error(path.string() + ": " + text);
}

bool is_hdf5(const std::filesystem::path& path) {
  return path.extension() == ".hdf5" || path.extension() == ".h5";
}

// Little-endian, as the machines that Keyhole runs on.
uint32_t read_u32(std::span<const std::byte> bytes, size_t at) {
  uint32_t value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

void check_dim(const std::filesystem::path& path, uint32_t dim) {
  if (dim == 0 || dim > kMaxDim) {
    fail(path, "the rows have " + std::to_string(dim) + " components; allowed are 1.." +
                   std::to_string(kMaxDim));
  }
}

VectorRows read_fbin(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  if (bytes.size() < 8) fail(path, "is shorter than the 8 bytes of an fbin header");
  const uint64_t rows = read_u32(bytes, 0);
  VectorRows out;
  out.dim = read_u32(bytes, 4);
  check_dim(path, out.dim);
  // rows < 2^32 and dim <= 2^16: no overflow.
  const uint64_t needed = 8 + rows * out.dim * sizeof(float);
  if (bytes.size() != needed) {
    fail(path, "announces " + std::to_string(rows) + " rows of " + std::to_string(out.dim) + ", " +
                   std::to_string(needed) + " bytes in all, but has " +
                   std::to_string(bytes.size()));
  }
  out.data.resize(rows * out.dim);
  if (!out.data.empty()) std::memcpy(out.data.data(), bytes.data() + 8, bytes.size() - 8);
  return out;
}

VectorRows read_fvecs(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  if (bytes.size() < 4) fail(path, "is shorter than the 4 bytes that begin an fvecs row");
  VectorRows out;
  out.dim = read_u32(bytes, 0);
  check_dim(path, out.dim);
  const size_t row_bytes = sizeof(float) * (size_t{out.dim} + 1);
  if (bytes.size() % row_bytes != 0) {
    fail(path, "has " + std::to_string(bytes.size()) + " bytes, not a multiple of the " +
                   std::to_string(row_bytes) + " of a row of " + std::to_string(out.dim));
  }
  const size_t rows = bytes.size() / row_bytes;
  out.data.resize(rows * out.dim);
  for (size_t r = 0; r < rows; ++r) {
    if (const uint32_t dim = read_u32(bytes, r * row_bytes); dim != out.dim) {
      fail(path, "row " + std::to_string(r) + " has " + std::to_string(dim) +
                     " components, the rows before it " + std::to_string(out.dim));
    }
    std::memcpy(out.data.data() + r * out.dim, bytes.data() + r * row_bytes + 4, row_bytes - 4);
  }
  return out;
}

std::vector<float> read_part(const std::filesystem::path& path, uint32_t dim) {
  if (path.empty()) return {};
  VectorRows rows = read_vector_rows(path);
  if (rows.dim != dim) {
    fail(path,
         "has rows of " + std::to_string(rows.dim) + ", the keys have " + std::to_string(dim));
  }
  return std::move(rows.data);
}

}  // namespace

bool is_vector_file(const std::filesystem::path& path) {
  return is_hdf5(path) || path.extension() == ".fbin" || path.extension() == ".fvecs";
}

VectorRows read_vector_rows(const std::filesystem::path& path) {
  const MappedFile file(path);
  if (path.extension() == ".fbin") return read_fbin(path, file.bytes());
  if (path.extension() == ".fvecs") return read_fvecs(path, file.bytes());
  fail(path, "is neither .fbin nor .fvecs");
}

Trace open_vectors(const VectorFiles& files) {
  Trace::Vectors vectors;
  if (is_hdf5(files.keys)) {
    vectors = read_hdf5_vectors(files.keys);
  } else {
    VectorRows keys = read_vector_rows(files.keys);
    vectors.dim = keys.dim;
    vectors.keys = std::move(keys.data);
    vectors.queries = read_part(files.queries, keys.dim);
    vectors.training = read_part(files.training, keys.dim);
    vectors.values = read_part(files.values, keys.dim);
  }
  return Trace::from_vectors(files.keys.string(), std::move(vectors));
}

}  // namespace keyhole::tools
