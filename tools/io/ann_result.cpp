#include "tools/io/ann_result.h"

#include <stdexcept>

#ifdef KEYHOLE_HDF5

#include <algorithm>
#include <cmath>
#include <ostream>
#include <span>

#include "runtime/files/replace_file.h"
#include "tools/io/hdf5.h"

namespace keyhole::tools {
namespace {

class ResultReader {
 public:
  ResultReader(std::string where, hid_t at) : where_(std::move(where)), at_(at) {}

  [[nodiscard]] AnnResult read() const {
    AnnResult out;
    out.algo = text("algo");
    out.name = text("name");
    out.dataset = text("dataset");
    out.distance = text("distance");
    out.build_seconds = number("build_time");
    out.best_search_seconds = number("best_search_time");
    out.index_kib = number("index_size");
    out.candidates = number("candidates");
    std::vector<hsize_t> shape;
    out.neighbours = values<int64_t>("neighbors", 2, H5T_INTEGER, H5T_NATIVE_INT64, shape);
    const hsize_t rows = shape[0];
    out.count = shape[1];
    if (rows == 0 || out.count == 0) fail("\"neighbors\" is empty");
    out.seconds = values<double>("times", 1, H5T_FLOAT, H5T_NATIVE_DOUBLE, shape);
    expect_rows("times", shape[0], rows);
    for (const double t : out.seconds) {
      if (!(t >= 0) || !std::isfinite(t)) {
        fail("\"times\" holds " + std::to_string(t) + "; allowed are seconds of at least 0");
      }
    }
    if (has("distances")) {
      out.distances = values<float>("distances", 2, H5T_FLOAT, H5T_NATIVE_FLOAT, shape);
      expect_rows("distances", shape[0], rows);
      if (shape[1] != out.count) {
        fail("\"distances\" has " + std::to_string(shape[1]) + " columns, \"neighbors\" " +
             std::to_string(out.count));
      }
    }
    if (has("queries")) {
      out.queries = values<int64_t>("queries", 1, H5T_INTEGER, H5T_NATIVE_INT64, shape);
      expect_rows("queries", shape[0], rows);
    }
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(where_ + ": " + what);
  }
  [[nodiscard]] bool has(const char* name) const { return H5Lexists(at_, name, H5P_DEFAULT) > 0; }
  void expect_rows(const char* name, hsize_t rows, hsize_t expected) const {
    if (rows == expected) return;
    fail("\"" + std::string(name) + "\" has " + std::to_string(rows) + " rows, \"neighbors\" " +
         std::to_string(expected));
  }

  template <class T>
  [[nodiscard]] std::vector<T> values(const char* name, int dimensions, H5T_class_t kind,
                                      hid_t native, std::vector<hsize_t>& shape) const {
    const std::string what = "\"" + std::string(name) + "\" ";
    if (!has(name)) fail(what + "is missing");
    const Hdf5Handle set(H5Dopen2(at_, name, H5P_DEFAULT), H5Dclose);
    if (!set.valid()) fail(what + "is no dataset");
    const Hdf5Handle space(H5Dget_space(set.get()), H5Sclose);
    if (H5Sget_simple_extent_ndims(space.get()) != dimensions) {
      fail(what + "has " + std::to_string(H5Sget_simple_extent_ndims(space.get())) +
           " dimensions; needed: " + std::to_string(dimensions));
    }
    shape.assign(static_cast<size_t>(dimensions), 0);
    H5Sget_simple_extent_dims(space.get(), shape.data(), nullptr);
    const Hdf5Handle type(H5Dget_type(set.get()), H5Tclose);
    if (H5Tget_class(type.get()) != kind) {
      fail(what + "does not hold " +
           (kind == H5T_INTEGER ? "whole numbers" : "numbers in floating point"));
    }
    constexpr hsize_t kMost = hsize_t{1} << 32U;
    hsize_t elements = 1;
    for (const hsize_t n : shape) {
      if (n > kMost) fail(what + "has a dimension of " + std::to_string(n) + "; allowed: 2^32");
      elements *= n;
    }
    if (elements > kMost || hdf5_claims_too_much(set.get(), elements * H5Tget_size(type.get()))) {
      fail(what + "claims " + std::to_string(elements) + " numbers, more than are stored");
    }
    std::vector<T> out(elements);
    if (!out.empty() && H5Dread(set.get(), native, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) < 0) {
      fail(what + "cannot be read");
    }
    return out;
  }

  [[nodiscard]] bool has_attribute(const char* name) const { return H5Aexists(at_, name) > 0; }

  // NaN where it is absent or no number.
  [[nodiscard]] double number(const char* name) const {
    if (!has_attribute(name)) return AnnResult::kUnknown;
    const Hdf5Handle attribute(H5Aopen(at_, name, H5P_DEFAULT), H5Aclose);
    const Hdf5Handle type(H5Aget_type(attribute.get()), H5Tclose);
    const Hdf5Handle space(H5Aget_space(attribute.get()), H5Sclose);
    const H5T_class_t kind = H5Tget_class(type.get());
    double out = AnnResult::kUnknown;
    if ((kind != H5T_INTEGER && kind != H5T_FLOAT) ||
        H5Sget_simple_extent_npoints(space.get()) != 1 ||
        H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, &out) < 0) {
      return AnnResult::kUnknown;
    }
    return out;
  }

  // "" where it is absent or no text.
  [[nodiscard]] std::string text(const char* name) const {
    if (!has_attribute(name)) return "";
    const Hdf5Handle attribute(H5Aopen(at_, name, H5P_DEFAULT), H5Aclose);
    const Hdf5Handle type(H5Aget_type(attribute.get()), H5Tclose);
    const Hdf5Handle space(H5Aget_space(attribute.get()), H5Sclose);
    if (H5Tget_class(type.get()) != H5T_STRING || H5Sget_simple_extent_npoints(space.get()) != 1) {
      return "";
    }
    if (H5Tis_variable_str(type.get()) > 0) {
      char* value = nullptr;
      const Hdf5Handle memory(H5Tcopy(type.get()), H5Tclose);
      if (H5Aread(attribute.get(), memory.get(), &value) < 0 || value == nullptr) return "";
      std::string out = value;
      H5free_memory(value);
      return out;
    }
    constexpr size_t kLongest = 1U << 20U;
    const size_t size = H5Tget_size(type.get());
    if (size > kLongest) return "";
    std::string out(size, '\0');
    if (H5Aread(attribute.get(), type.get(), out.data()) < 0) return "";
    out.resize(std::min(out.find('\0'), out.size()));
    return out;
  }

  std::string where_;
  hid_t at_;
};

// Names of the groups of the file's root.
std::vector<std::string> groups_of(hid_t file) {
  std::vector<std::string> out;
  const auto add = [](hid_t, const char* name, const H5L_info_t*, void* to) -> herr_t {
    static_cast<std::vector<std::string>*>(to)->emplace_back(name);
    return 0;
  };
  H5Literate(file, H5_INDEX_NAME, H5_ITER_INC, nullptr, add, &out);
  return out;
}

class Writer {
 public:
  Writer(const std::filesystem::path& path, hid_t at) : path_(path), at_(at) {}

  void write(const AnnResult& r) const {
    text("algo", r.algo);
    text("name", r.name);
    text("dataset", r.dataset);
    text("distance", r.distance);
    number("build_time", r.build_seconds);
    number("best_search_time", r.best_search_seconds);
    number("index_size", r.index_kib);
    number("candidates", r.candidates);
    whole("count", static_cast<int64_t>(r.count));
    // What else their own tools write, and ask for.
    whole("run_count", 1);
    for (const char* name : {"batch_mode", "expect_extra", "gpu_mode"}) whole(name, 0);
    const hsize_t rows = r.rows();
    const hsize_t shape[] = {rows, r.count};
    set("times", {&rows, 1}, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, r.seconds.data());
    const int64_t largest = *std::max_element(r.neighbours.begin(), r.neighbours.end());
    set("neighbors", shape, largest > INT32_MAX ? H5T_STD_I64LE : H5T_STD_I32LE, H5T_NATIVE_INT64,
        r.neighbours.data());
    set("distances", shape, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, r.distances.data());
    if (!r.queries.empty()) {
      set("queries", {&rows, 1}, H5T_STD_I32LE, H5T_NATIVE_INT64, r.queries.data());
    }
  }

 private:
  void expect(bool good, const char* name) const {
    if (!good) {
      throw std::runtime_error(path_.string() + ": \"" + name + "\" cannot be written");
    }
  }
  void attribute(const char* name, hid_t type, hid_t native, const void* value) const {
    const Hdf5Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const Hdf5Handle made(H5Acreate2(at_, name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT),
                          H5Aclose);
    expect(made.valid() && H5Awrite(made.get(), native, value) >= 0, name);
  }
  void number(const char* name, double value) const {
    if (!std::isnan(value)) attribute(name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
  }
  void whole(const char* name, int64_t value) const {
    attribute(name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
  }
  // As h5py writes texts: of variable length, in UTF-8.
  void text(const char* name, const std::string& value) const {
    const Hdf5Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(type.get(), H5T_VARIABLE);
    H5Tset_cset(type.get(), H5T_CSET_UTF8);
    const char* bytes = value.c_str();
    attribute(name, type.get(), type.get(), &bytes);
  }
  void set(const char* name, std::span<const hsize_t> shape, hid_t type, hid_t native,
           const void* data) const {
    const Hdf5Handle space(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr),
                           H5Sclose);
    const Hdf5Handle made(
        H5Dcreate2(at_, name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Dclose);
    expect(made.valid() && H5Dwrite(made.get(), native, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0,
           name);
  }

  const std::filesystem::path& path_;
  hid_t at_;
};

/// The file in memory: HDF5 seeks in what it writes, and leaves half of a file where it fails.
std::vector<char> file_of(const std::filesystem::path& path, const AnnResult& result) {
  constexpr size_t kGrowth = size_t{1} << 20U;
  const Hdf5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_fapl_core(access.get(), kGrowth, /*backing_store=*/0);
  const Hdf5Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()),
                        H5Fclose);
  if (!file.valid()) throw std::runtime_error(path.string() + ": cannot be written");
  if (result.group.empty()) {
    Writer(path, file.get()).write(result);
  } else {
    const Hdf5Handle group(
        H5Gcreate2(file.get(), result.group.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
        H5Gclose);
    if (!group.valid()) {
      throw std::runtime_error(path.string() + ": the group " + result.group +
                               " cannot be written");
    }
    Writer(path, group.get()).write(result);
  }
  const bool is_whole = H5Fflush(file.get(), H5F_SCOPE_LOCAL) >= 0;
  const ssize_t size = is_whole ? H5Fget_file_image(file.get(), nullptr, 0) : -1;
  std::vector<char> bytes(size > 0 ? static_cast<size_t>(size) : 0);
  if (size <= 0 || H5Fget_file_image(file.get(), bytes.data(), bytes.size()) != size) {
    throw std::runtime_error(path.string() + ": cannot be written");
  }
  return bytes;
}

}  // namespace

std::vector<AnnResult> read_ann_results(const std::filesystem::path& path) {
  const Hdf5Silence silent;
  const Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose);
  if (!file.valid()) {
    throw std::runtime_error(
        path.string() + ": cannot be opened as HDF5 (missing, cut short or of another format)");
  }
  if (H5Lexists(file.get(), "neighbors", H5P_DEFAULT) > 0) {
    if (H5Lexists(file.get(), "train", H5P_DEFAULT) > 0) {
      throw std::runtime_error(
          path.string() + ": holds a data set (train, test), not results of a search over one");
    }
    return {ResultReader(path.string(), file.get()).read()};
  }
  std::vector<AnnResult> out;
  for (const std::string& name : groups_of(file.get())) {
    const Hdf5Handle group(H5Gopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group.valid() || H5Lexists(group.get(), "neighbors", H5P_DEFAULT) <= 0) continue;
    out.push_back(ResultReader(path.string() + ", group " + name, group.get()).read());
    out.back().group = name;
  }
  if (out.empty()) {
    throw std::runtime_error(path.string() +
                             ": holds no results: neither the file nor a group of it has a dataset "
                             "\"neighbors\"");
  }
  return out;
}

void write_ann_result(const std::filesystem::path& path, const AnnResult& result) {
  const Hdf5Silence silent;
  const std::vector<char> bytes = file_of(path, result);
  replace_file(path, [&bytes](std::ostream& out) {
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  });
}

void check_has_hdf5(const std::string& /*option*/) {}

}  // namespace keyhole::tools

#else  // KEYHOLE_HDF5

namespace keyhole::tools {

void check_has_hdf5(const std::string& option) {
  throw std::runtime_error(
      option + ": this keyhole was built without HDF5; install libhdf5-dev and build it again");
}

std::vector<AnnResult> read_ann_results(const std::filesystem::path& path) {
  check_has_hdf5(path.string());
  return {};
}

void write_ann_result(const std::filesystem::path& path, const AnnResult& /*result*/) {
  check_has_hdf5(path.string());
}

}  // namespace keyhole::tools

#endif  // KEYHOLE_HDF5
