#include "tools/io/ann_result.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "tests/temporary_folder.h"
#ifdef KEYHOLE_HDF5
#include <hdf5.h>
#endif

namespace keyhole::tools {
namespace {

#ifdef KEYHOLE_HDF5

AnnResult some_result() {
  AnnResult r;
  r.algo = "annoy";
  r.name = "Annoy(n_trees=100, search_k=200)";
  r.dataset = "llama-128-ip";
  r.distance = "ip";
  r.build_seconds = 12.5;
  r.best_search_seconds = 0.25;
  r.index_kib = 1024;
  r.candidates = 2.5;
  r.count = 3;
  r.seconds = {0.25, 0.125};
  r.neighbours = {7, 0, 3, 5, 2, -1};
  r.distances = {-3, -2, -1, -9, -8, INFINITY};
  return r;
}

void expect_same(const AnnResult& a, const AnnResult& b) {
  EXPECT_EQ(a.group, b.group);
  EXPECT_EQ(a.algo, b.algo);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.dataset, b.dataset);
  EXPECT_EQ(a.distance, b.distance);
  EXPECT_EQ(a.build_seconds, b.build_seconds);
  EXPECT_EQ(a.best_search_seconds, b.best_search_seconds);
  EXPECT_EQ(a.index_kib, b.index_kib);
  EXPECT_EQ(a.candidates, b.candidates);
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.seconds, b.seconds);
  EXPECT_EQ(a.neighbours, b.neighbours);
  EXPECT_EQ(a.distances, b.distances);
  EXPECT_EQ(a.queries, b.queries);
}

class AnnResultFile : public testing::Test {
 protected:
  std::filesystem::path path() const { return folder_ / "r.hdf5"; }
  std::string error() const {
    return error_of([&] { (void)read_ann_results(path()); });
  }
  TemporaryFolder folder_;
};

TEST_F(AnnResultFile, ComesBackAsItWas) {
  AnnResult r = some_result();
  write_ann_result(path(), r);
  std::vector<AnnResult> back = read_ann_results(path());
  ASSERT_EQ(back.size(), 1U);
  expect_same(back[0], r);
  EXPECT_EQ(files_in(folder_.path()), 1U) << "nothing but the file itself";

  r.group = "search_k_200";
  r.queries = {4, 9};
  r.build_seconds = AnnResult::kUnknown;
  write_ann_result(path(), r);
  back = read_ann_results(path());
  ASSERT_EQ(back.size(), 1U);
  EXPECT_TRUE(std::isnan(back[0].build_seconds));
  back[0].build_seconds = r.build_seconds = 0;
  expect_same(back[0], r);
}

// h5py is what ann-benchmarks and VIBE write and read with.
TEST_F(AnnResultFile, IsReadByPythonAndReadsWhatPythonWrites) {
  const char* given = std::getenv("KEYHOLE_H5PY");  // a Python that has h5py
  const std::string python = given != nullptr ? given : "python3";
  if (std::system((python + " -c 'import h5py' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "no h5py here";
  }
  write_ann_result(path(), some_result());
  write_file(folder_ / "both.py", std::string(R"py(
import sys, h5py, numpy as np
with h5py.File(sys.argv[1]) as f:
    assert f.attrs["algo"] == "annoy" and f.attrs["dataset"] == "llama-128-ip", dict(f.attrs)
    assert int(f.attrs["count"]) == 3 and f.attrs["build_time"] == 12.5 and f.attrs["index_size"] == 1024
    assert f["times"][:].tolist() == [0.25, 0.125]
    assert f["neighbors"].dtype == np.int32 and f["neighbors"][:].tolist() == [[7, 0, 3], [5, 2, -1]]
    assert f["distances"].dtype == np.float32 and f["distances"][1, 2] == float("inf")
# As store_results() of ann-benchmarks does, and as that of VIBE does, with a group for each setting.
def fill(g, name):
    attrs = {"build_time": 12.5, "best_search_time": 0.25, "candidates": 2.5, "index_size": np.int64(1024), "name": name,
             "run_count": 5, "batch_mode": False, "distance": "ip", "count": 3, "algo": "annoy", "dataset": "llama-128-ip"}
    for k, v in attrs.items():
        g.attrs[k] = v
    g.create_dataset("times", (2,), "f")[:] = [0.25, 0.125]
    g.create_dataset("neighbors", (2, 3), "i")[:] = [[7, 0, 3], [5, 2, -1]]
    g.create_dataset("distances", (2, 3), "f")[:] = [[-3, -2, -1], [-9, -8, float("inf")]]
with h5py.File(sys.argv[2], "w") as f:
    fill(f, "Annoy(n_trees=100, search_k=200)")
with h5py.File(sys.argv[3], "w") as f:
    fill(f.create_group("200"), "a")
    fill(f.create_group("400"), "b")
)py"));
  const std::string flat = folder_ / "flat.hdf5";
  const std::string groups = folder_ / "groups.hdf5";
  ASSERT_EQ(std::system((python + " '" + (folder_ / "both.py").string() + "' '" + path().string() +
                         "' '" + flat + "' '" + groups + "'")
                            .c_str()),
            0);
  const std::vector<AnnResult> one = read_ann_results(flat);
  ASSERT_EQ(one.size(), 1U);
  expect_same(one[0], some_result());
  const std::vector<AnnResult> two = read_ann_results(groups);
  ASSERT_EQ(two.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    AnnResult expected = some_result();
    expected.group = i == 0 ? "200" : "400";
    expected.name = i == 0 ? "a" : "b";
    expect_same(two[i], expected);
  }
}

TEST_F(AnnResultFile, RefusesWhatIsNone) {
  EXPECT_NE(error().find("r.hdf5: cannot be opened as HDF5"), std::string::npos) << error();
  write_file(path(), std::string("not HDF5"));
  EXPECT_NE(error().find("cannot be opened as HDF5"), std::string::npos) << error();

  const auto make = [&](const std::vector<hsize_t>& neighbours, hid_t kind,
                        const std::vector<hsize_t>& times, bool is_data_set = false) {
    const hid_t file = H5Fcreate(path().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    const auto add = [&](const char* name, const std::vector<hsize_t>& shape, hid_t type) {
      if (shape.empty()) return;
      const hid_t space = H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
      H5Dclose(H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
      H5Sclose(space);
    };
    add("neighbors", neighbours, kind);
    add("times", times, H5T_NATIVE_DOUBLE);
    if (is_data_set) add("train", {2, 2}, H5T_NATIVE_FLOAT);
    H5Fclose(file);
    return error();
  };
  const auto refused = [](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_NE(error.find("r.hdf5"), std::string::npos) << error;
  };
  refused(make({}, H5T_NATIVE_INT, {}), "holds no results");
  refused(make({2, 3}, H5T_NATIVE_INT, {}, true), "holds a data set");
  refused(make({2}, H5T_NATIVE_INT, {2}), "\"neighbors\" has 1 dimensions; needed: 2");
  refused(make({0, 3}, H5T_NATIVE_INT, {2}), "\"neighbors\" is empty");
  refused(make({2, 3}, H5T_NATIVE_FLOAT, {2}), "\"neighbors\" does not hold whole numbers");
  // Nothing of it was ever written: a small file that claims much.
  refused(make({1000, 3000}, H5T_NATIVE_INT, {2}), "claims 3000000 numbers");

  AnnResult r = some_result();
  r.seconds = {0.25, -1};
  write_ann_result(path(), r);
  refused(error(), "\"times\" holds -1");
  EXPECT_NE(
      error_of([&] { write_ann_result(folder_ / "absent" / "r.hdf5", r); }).find("cannot write"),
      std::string::npos);
}

#else

TEST(AnnResultFile, NeedsHdf5) {
  EXPECT_NE(error_of([] { (void)read_ann_results("r.hdf5"); }).find("built without HDF5"),
            std::string::npos);
}

#endif

}  // namespace
}  // namespace keyhole::tools
