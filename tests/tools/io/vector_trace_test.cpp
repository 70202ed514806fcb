#include "tools/io/vector_trace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/temporary_folder.h"
#ifdef KEYHOLE_HDF5
#include <hdf5.h>
#endif

namespace keyhole::tools {
namespace {

std::vector<float> counting(size_t count, float first) {
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = first + static_cast<float>(i);
  return out;
}

template <class T>
void append(std::vector<std::byte>& out, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}

std::vector<std::byte> fbin(uint32_t rows, uint32_t dim, const std::vector<float>& data) {
  std::vector<std::byte> out;
  append(out, rows);
  append(out, dim);
  for (const float x : data) append(out, x);
  return out;
}

std::vector<std::byte> fvecs(uint32_t dim, const std::vector<float>& data) {
  std::vector<std::byte> out;
  for (size_t i = 0; i < data.size(); ++i) {
    if (i % dim == 0) append(out, dim);
    append(out, data[i]);
  }
  return out;
}

class VectorFilesTest : public testing::Test {
 protected:
  std::filesystem::path file(const std::string& name, const std::vector<std::byte>& bytes) {
    write_file(folder_ / name, bytes);
    return folder_ / name;
  }
  std::string error(const VectorFiles& files) {
    return error_of([&] { (void)open_vectors(files); });
  }
  TemporaryFolder folder_;
};

TEST_F(VectorFilesTest, AreATraceOfOneHead) {
  const auto keys = counting(6 * 4, 0);
  const auto queries = counting(2 * 4, 100);
  const auto training = counting(3 * 4, 200);
  const auto values = counting(6 * 4, 300);
  // fbin and fvecs may stand side by side.
  const Trace trace =
      open_vectors({file("k.fbin", fbin(6, 4, keys)), file("q.fvecs", fvecs(4, queries)),
                    file("t.fbin", fbin(3, 4, training)), file("v.fvecs", fvecs(4, values))});
  const TraceInfo& info = trace.info();
  EXPECT_EQ(info.q_heads, 1U);
  EXPECT_EQ(info.kv_heads, 1U);
  EXPECT_EQ(info.head_dim, 4U);
  EXPECT_EQ(info.tokens, 6U);
  EXPECT_FLOAT_EQ(info.scale, 0.5F);
  EXPECT_EQ(info.rope.theta, 0);
  EXPECT_EQ(std::vector<uint32_t>(trace.query_positions().begin(), trace.query_positions().end()),
            (std::vector<uint32_t>{5, 5}));
  ASSERT_EQ(trace.heads().size(), 1U);
  const TraceHead& head = trace.heads().front();
  EXPECT_EQ(head.keys.to_f32(), keys);
  EXPECT_EQ(head.queries.to_f32(), queries);
  EXPECT_EQ(head.queries.shape, (std::vector<size_t>{2, 1, 4}));
  EXPECT_EQ(head.training_queries->to_f32(), training);
  EXPECT_EQ(head.values->to_f32(), values);
}

TEST_F(VectorFilesTest, NeedNeitherTrainingQueriesNorValues) {
  const Trace trace = open_vectors({file("k.fvecs", fvecs(4, counting(8, 0))),
                                    file("q.fbin", fbin(1, 4, counting(4, 0))), "", ""});
  EXPECT_FALSE(trace.heads().front().values.has_value());
  EXPECT_FALSE(trace.heads().front().training_queries.has_value());
}

TEST_F(VectorFilesTest, AreRefusedWithTheirReason) {
  const auto good = file("good.fbin", fbin(2, 4, counting(8, 0)));
  const auto says = [&](const VectorFiles& files, const std::string& part) {
    const std::string text = error(files);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  says({folder_ / "absent.fbin", good, "", ""}, "No such file");
  says({file("short.fbin", std::vector<std::byte>(7)), good, "", ""}, "8 bytes");
  says({file("cut.fbin", fbin(3, 4, counting(8, 0))), good, "", ""}, "3 rows of 4, 56 bytes");
  says({file("long.fbin", fbin(1, 4, counting(8, 0))), good, "", ""}, "24 bytes");
  says({file("huge.fbin", fbin(0xffffffff, 0xffffffff, {})), good, "", ""},
       "4294967295 components");
  says({file("flat.fbin", fbin(4, 0, {})), good, "", ""}, "0 components");
  says({file("none.fbin", fbin(0, 4, {})), good, "", ""}, "0 keys");
  says({file("cut.fvecs", std::vector<std::byte>(3)), good, "", ""}, "4 bytes");
  auto odd = fvecs(4, counting(8, 0));
  odd.pop_back();
  says({file("odd.fvecs", odd), good, "", ""}, "not a multiple of the 20");
  auto mixed = fvecs(4, counting(8, 0));
  mixed[20] = std::byte{5};
  says({file("mixed.fvecs", mixed), good, "", ""}, "row 1 has 5 components");
  says({good, file("q3.fbin", fbin(2, 3, counting(6, 0))), "", ""}, "the keys have 4");
  says({good, good, "", file("v.fbin", fbin(1, 4, counting(4, 0)))}, "2 keys but 1 values");
  says({good, file("q.txt", {}), "", ""}, "neither .fbin nor .fvecs");
}

#ifdef KEYHOLE_HDF5

class Hdf5File {
 public:
  explicit Hdf5File(const std::filesystem::path& path)
      : id_(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)) {}
  ~Hdf5File() { H5Fclose(id_); }
  Hdf5File(const Hdf5File&) = delete;
  Hdf5File& operator=(const Hdf5File&) = delete;

  template <class T>
  void add(const char* name, const std::vector<hsize_t>& shape, hid_t type,
           const std::vector<T>& data) {
    const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t set = H5Dcreate2(id_, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    if (!data.empty()) H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data());
    H5Dclose(set);
    H5Sclose(space);
  }

 private:
  hid_t id_;
};

TEST_F(VectorFilesTest, Hdf5HoldsAllParts) {
  const auto path = folder_ / "set.hdf5";
  {
    Hdf5File out(path);
    out.add("train", {6, 4}, H5T_NATIVE_FLOAT, counting(24, 0));
    out.add("test", {2, 4}, H5T_NATIVE_DOUBLE, std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7.5});
    out.add("learn", {1, 4}, H5T_NATIVE_INT, std::vector<int>{-1, 0, 1, 2});
    out.add("distances", {1}, H5T_NATIVE_FLOAT, counting(1, 0));
  }
  const Trace trace = open_vectors({path, "", "", ""});
  const TraceHead& head = trace.heads().front();
  EXPECT_EQ(head.keys.to_f32(), counting(24, 0));
  EXPECT_EQ(head.queries.to_f32(), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7.5F}));
  EXPECT_EQ(head.training_queries->to_f32(), (std::vector<float>{-1, 0, 1, 2}));
  EXPECT_FALSE(head.values.has_value());
}

TEST_F(VectorFilesTest, Hdf5IsRefusedWithItsReason) {
  const auto says = [&](const std::filesystem::path& path, const std::string& part) {
    const std::string text = error({path, "", "", ""});
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find(path.string()), std::string::npos) << text;
  };
  says(folder_ / "absent.hdf5", "cannot be opened as HDF5");
  says(file("text.h5", std::vector<std::byte>(100)), "cannot be opened as HDF5");

  const auto make = [&](const char* name, auto&& fill) {
    const auto path = folder_ / name;
    Hdf5File out(path);
    fill(out);
    return path;
  };
  says(make("a.h5",
            [](Hdf5File& f) {
              f.add("train", {2, 2}, H5T_NATIVE_FLOAT, counting(4, 0));
            }),
       "\"test\" is missing");
  says(make("b.h5", [](Hdf5File& f) { f.add("train", {4}, H5T_NATIVE_FLOAT, counting(4, 0)); }),
       "not two-dimensional");
  says(make("c.h5",
            [](Hdf5File& f) {
              f.add("train", {2, 2}, H5T_NATIVE_FLOAT, counting(4, 0));
              f.add("test", {1, 3}, H5T_NATIVE_FLOAT, counting(3, 0));
            }),
       "rows of 3, the keys have 2");
  // A few hundred bytes that claim 2 TiB.
  says(make("d.h5",
            [](Hdf5File& f) {
              f.add("train", {hsize_t{1} << 31U, 256}, H5T_NATIVE_FLOAT, std::vector<float>{});
            }),
       "are stored");
  says(make("e.h5",
            [](Hdf5File& f) {
              f.add("train", {hsize_t{1} << 60U, 256}, H5T_NATIVE_FLOAT, std::vector<float>{});
            }),
       "allowed are");
}

#else

TEST_F(VectorFilesTest, Hdf5NamesTheMissingFeature) {
  EXPECT_NE(error({file("set.hdf5", {}), "", "", ""}).find("built without HDF5"),
            std::string::npos);
}

#endif

}  // namespace
}  // namespace keyhole::tools
