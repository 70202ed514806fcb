// Sets of vectors in HDF5.
#include "tools/io/vector_trace.h"

#ifdef KEYHOLE_HDF5

#include <stdexcept>
#include <string>

#include "tools/io/hdf5.h"

namespace keyhole::tools {
namespace {

struct VectorReader {
  const std::filesystem::path& path;
  hid_t file;

  [[noreturn]] void fail(const std::string& name, const std::string& text) const {
    throw std::runtime_error(path.string() + ": dataset \"" + name + "\" " + text);
  }

  [[nodiscard]] bool contains(const std::string& name) const {
    return H5Lexists(file, name.c_str(), H5P_DEFAULT) > 0;
  }

  // The dataset as fp32; HDF5 converts from any number type. Sets `dim`, or checks it where it is
  // set.
  std::vector<float> read(const std::string& name, uint32_t& dim) const {
    if (!contains(name)) fail(name, "is missing; needed are train and test");
    const Hdf5Handle set(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose);
    if (!set.valid()) fail(name, "cannot be opened");
    const Hdf5Handle space(H5Dget_space(set.get()), H5Sclose);
    hsize_t shape[2] = {0, 0};
    if (H5Sget_simple_extent_ndims(space.get()) != 2 ||
        H5Sget_simple_extent_dims(space.get(), shape, nullptr) != 2) {
      fail(name, "is not two-dimensional");
    }
    const Hdf5Handle type(H5Dget_type(set.get()), H5Tclose);
    const H5T_class_t kind = H5Tget_class(type.get());
    if (kind != H5T_FLOAT && kind != H5T_INTEGER) fail(name, "does not hold numbers");
    constexpr hsize_t kMaxRows = UINT32_MAX;
    constexpr hsize_t kMaxDim = 65536;
    if (shape[1] == 0 || shape[1] > kMaxDim || shape[0] > kMaxRows) {
      fail(name, "has the shape [" + std::to_string(shape[0]) + ", " + std::to_string(shape[1]) +
                     "]; allowed are up to 2^32 - 1 rows of 1..65536");
    }
    if (dim != 0 && shape[1] != dim) {
      fail(name,
           "has rows of " + std::to_string(shape[1]) + ", the keys have " + std::to_string(dim));
    }
    dim = static_cast<uint32_t>(shape[1]);
    const hsize_t bytes = shape[0] * shape[1] * H5Tget_size(type.get());
    if (hdf5_claims_too_much(set.get(), bytes)) {
      fail(name, "claims " + std::to_string(bytes) + " bytes, of which only " +
                     std::to_string(H5Dget_storage_size(set.get())) + " are stored");
    }
    std::vector<float> out(shape[0] * shape[1]);
    if (!out.empty() &&
        H5Dread(set.get(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) < 0) {
      fail(name, "cannot be read");
    }
    return out;
  }
};

}  // namespace

Trace::Vectors read_hdf5_vectors(const std::filesystem::path& path) {
  const Hdf5Silence silent;
  const Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  if (!file.valid()) {
    throw std::runtime_error(path.string() +
                             ": cannot be opened as HDF5 (missing, cut short or of "
                             "another format)");
  }
  const VectorReader reader{path, file.get()};
  Trace::Vectors out;
  out.keys = reader.read("train", out.dim);
  out.queries = reader.read("test", out.dim);
  if (reader.contains("learn")) out.training = reader.read("learn", out.dim);
  return out;
}

}  // namespace keyhole::tools

#else  // KEYHOLE_HDF5

#include <stdexcept>

namespace keyhole::tools {

Trace::Vectors read_hdf5_vectors(const std::filesystem::path& path) {
  throw std::runtime_error(
      path.string() +
      ": this keyhole was built without HDF5; install libhdf5-dev and build it "
      "again, or convert the file to fbin");
}

}  // namespace keyhole::tools

#endif  // KEYHOLE_HDF5
