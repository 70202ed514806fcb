#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#ifdef KEYHOLE_HDF5
#include <hdf5.h>

#include "tests/normal.h"
#endif

namespace keyhole::tools {
namespace {

using nlohmann::json;

constexpr uint32_t kDim = 64;
constexpr uint32_t kKeys = 500;
constexpr uint32_t kQueries = 20;

struct Set {
  std::vector<float> keys, queries;
};

Set make_set() {
  std::mt19937 random(std::random_device{}());
  keyhole::test::Normal<float> normal;
  Set set;
  for (uint32_t i = 0; i < kKeys * kDim; ++i) set.keys.push_back(normal(random));
  for (uint32_t i = 0; i < kQueries * kDim; ++i) set.queries.push_back(normal(random));
  return set;
}

std::string text_of(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

void write_fbin(const std::filesystem::path& path, const std::vector<float>& rows) {
  const uint32_t header[] = {static_cast<uint32_t>(rows.size()) / kDim, kDim};
  write_file(path,
             text_of(header, sizeof header) + text_of(rows.data(), rows.size() * sizeof(float)));
}

void write_fvecs(const std::filesystem::path& path, const std::vector<float>& rows) {
  std::string out;
  for (size_t i = 0; i < rows.size(); i += kDim) {
    out += text_of(&kDim, sizeof kDim) + text_of(&rows[i], kDim * sizeof(float));
  }
  write_file(path, out);
}

#ifdef KEYHOLE_HDF5
void write_hdf5(const std::filesystem::path& path, const Set& set) {
  const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  const auto add = [&](const char* name, const std::vector<float>& rows) {
    const hsize_t shape[] = {rows.size() / kDim, kDim};
    const hid_t space = H5Screate_simple(2, shape, nullptr);
    const hid_t data =
        H5Dcreate2(file, name, H5T_NATIVE_FLOAT, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(data, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, rows.data());
    H5Dclose(data);
    H5Sclose(space);
  };
  add("train", set.keys);
  add("test", set.queries);
  H5Fclose(file);
}
#endif

// Mean share of the softmax weight that the k best keys of each query hold.
double mass_of_best(const Set& set, size_t k) {
  double mean = 0;
  for (uint32_t q = 0; q < kQueries; ++q) {
    std::vector<double> weights;
    for (uint32_t i = 0; i < kKeys; ++i) {
      double product = 0;
      for (uint32_t x = 0; x < kDim; ++x) {
        product += double{set.queries[q * kDim + x]} * set.keys[i * kDim + x];
      }
      weights.push_back(std::exp(product / std::sqrt(double{kDim})));
    }
    std::sort(weights.rbegin(), weights.rend());
    double all = 0;
    double best = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      all += weights[i];
      if (i < k) best += weights[i];
    }
    mean += best / all / kQueries;
  }
  return mean;
}

class CompareVectors : public testing::Test {
 protected:
  json compare(std::vector<std::string> args) {
    const std::string out = folder_ / "result.json";
    args.insert(args.begin(), "compare");
    for (const char* word :
         {"--index", "flat", "--k", "10", "--kv-dtype", "f32", "--json", out.c_str()}) {
      args.emplace_back(word);
    }
    const Outcome outcome = run_keyhole(args);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return json::parse(read_file(out));
  }

  // All keys are offloaded; the whole softmax is theirs.
  void expect_exact(const json& result, bool has_values) {
    EXPECT_EQ(result["options"]["offloaded"], kKeys);
    EXPECT_EQ(result["options"]["queries"], kQueries);
    ASSERT_EQ(result["results"].size(), 1U);
    const json& row = result["results"][0];
    EXPECT_EQ(row["recall"], 1.0);
    EXPECT_NEAR(row["middle_mass"], 1, 1e-9);
    EXPECT_NEAR(row["recovered_mass"], mass_of_best(set_, 10), 1e-5);
    EXPECT_EQ(row["output_error"].is_null(), !has_values);
    EXPECT_GT(row["latency_us"]["p50"], 0);
  }

  Set set_ = make_set();
  TemporaryFolder folder_;
};

TEST_F(CompareVectors, Fbin) {
  write_fbin(folder_ / "k.fbin", set_.keys);
  write_fbin(folder_ / "q.fbin", set_.queries);
  expect_exact(compare({"--trace", folder_ / "k.fbin", "--query-file", folder_ / "q.fbin"}), false);
}

TEST_F(CompareVectors, FvecsWithValuesAndTrainingQueries) {
  write_fvecs(folder_ / "k.fvecs", set_.keys);
  write_fvecs(folder_ / "q.fvecs", set_.queries);
  expect_exact(
      compare({"--trace", folder_ / "k.fvecs", "--query-file", folder_ / "q.fvecs", "--value-file",
               folder_ / "k.fvecs", "--training-file", folder_ / "q.fvecs"}),
      true);
}

TEST_F(CompareVectors, KeysAloneAreRefused) {
  write_fbin(folder_ / "k.fbin", set_.keys);
  expect_failure(run_keyhole({"compare", "--trace", folder_ / "k.fbin", "--index", "flat"}), 2,
                 "--query-file");
}

TEST_F(CompareVectors, Hdf5) {
#ifdef KEYHOLE_HDF5
  write_hdf5(folder_ / "set.hdf5", set_);
  expect_exact(compare({"--trace", folder_ / "set.hdf5"}), false);
#else
  write_file(folder_ / "set.hdf5", std::string());
  expect_failure(run_keyhole({"compare", "--trace", folder_ / "set.hdf5", "--index", "flat"}), 1,
                 "built without HDF5");
#endif
}

}  // namespace
}  // namespace keyhole::tools
