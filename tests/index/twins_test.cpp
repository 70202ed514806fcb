// Compares the twins that are found with a comparison of all keys with all.
#include "index/scan/twins.h"

#include <map>
#include <random>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kRowDim = 64;

// The rows of equal keys in rising order, found by comparing all with all.
std::map<uint32_t, std::vector<uint32_t>> twins_by_hand(const std::vector<float>& values,
                                                        size_t count) {
  std::map<uint32_t, std::vector<uint32_t>> found;
  std::vector<uint32_t> lowest;
  for (uint32_t row = 0; row < count; ++row) {
    const auto* key = values.data() + size_t{row} * kRowDim;
    const auto same = std::find_if(lowest.begin(), lowest.end(), [&](uint32_t other) {
      return std::equal(key, key + kRowDim, values.data() + size_t{other} * kRowDim);
    });
    if (same == lowest.end()) {
      lowest.push_back(row);
    } else {
      found[*same].push_back(row);
    }
  }
  return found;
}

void expect_twins(const Twins& twins, const std::map<uint32_t, std::vector<uint32_t>>& expected,
                  size_t count) {
  size_t size = 0;
  std::vector<uint32_t> representative(count);
  for (uint32_t row = 0; row < count; ++row) representative[row] = row;
  for (uint32_t row = 0; row < count + 70; ++row) {
    const auto at = expected.find(row);
    const auto of = twins.of(row);
    const std::vector<uint32_t> rows(of.begin(), of.end());
    ASSERT_EQ(rows, at == expected.end() ? std::vector<uint32_t>{} : at->second) << "row " << row;
    for (const uint32_t twin : rows) representative[twin] = row;
    size += rows.size();
  }
  EXPECT_EQ(twins.size(), size);
  EXPECT_EQ(twins.representatives(count), representative);
  std::vector<uint32_t> distinct;
  for (uint32_t row = 0; row < count && size != 0; ++row) {
    if (representative[row] == row) distinct.push_back(row);
  }
  EXPECT_EQ(twins.distinct(count), distinct);
  EXPECT_EQ(twins.empty(), size == 0);
  if (size == 0) {
    EXPECT_EQ(twins.bytes(), 0U);
  } else {
    EXPECT_GE(twins.bytes(), size * sizeof(uint32_t));
    EXPECT_LE(twins.bytes(), 5 * count + 64);
  }
}

TEST(Twins, AreTheRowsWhoseKeysAnEarlierRowHas) {
  for (uint32_t seed = 0; seed < cases(24); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const DType dtype = key_dtypes()[seed % 3];
    const size_t n = 1 + random() % 400;
    // Numbers of different keys range from one for all rows to more than rows; numbers are such as every dtype holds,
    // with zeros of both signs.
    const size_t choice = 1 + random() % (seed % 2 == 0 ? 5 : 2 * n);
    const std::vector<float> different = integers(choice, kRowDim, random);
    std::vector<float> values;
    for (size_t i = 0; i < n; ++i) {
      const float* key = different.data() + random() % choice * kRowDim;
      for (uint32_t j = 0; j < kRowDim; ++j) {
        values.push_back(key[j] == 0.0F && random() % 2 == 0 ? -0.0F : key[j]);
      }
    }
    Keys keys(n, kRowDim, dtype);
    keys.put(0, values);
    const cpu::Kernels& kernels = *context().kernels;
    const Twins whole = Twins::among(kernels, keys.view());
    expect_twins(whole, twins_by_hand(values, n), n);
    Twins grown;
    for (size_t count = 0; count < n;) {
      count = std::min(n, count + random() % 90);
      grown = grown.grown(kernels, keys.view(count));
      expect_twins(grown, twins_by_hand(values, count), count);
    }
    Twins cut = whole;
    const size_t count = random() % (n + 1);
    cut.truncate(count);
    expect_twins(cut, twins_by_hand(values, count), count);
    cut = cut.grown(kernels, keys.view());
    expect_twins(cut, twins_by_hand(values, n), n);
  }
}

TEST(Twins, Int8RowsAreComparedAsWhatTheyStandFor) {
  // Blocks of 256 rows with a scale each: the same bytes are other keys, 2 * 0.5 is 1 * 1.
  constexpr size_t kRows = 3 * kScaleRows;
  std::vector<int8_t> codes(kRows * kRowDim);
  std::vector<uint16_t> scales(3 * kRowDim, 0x3F80);                              // 1
  std::fill_n(scales.begin() + kRowDim, kRowDim, static_cast<uint16_t>(0x3F00));  // 0.5
  std::vector<float> values;
  for (size_t i = 0; i < kRows; ++i) {
    for (uint32_t j = 0; j < kRowDim; ++j) {
      codes[i * kRowDim + j] = static_cast<int8_t>(2 * (i % 30) + j % 3);
      values.push_back(static_cast<float>(codes[i * kRowDim + j]) *
                       (i / kScaleRows == 1 ? 0.5F : 1.0F));
    }
  }
  RowsView keys = dense_rows(codes.data(), kRows, kRowDim, DType::i8);
  keys.scales = {scales.data(), kRowDim, 0};
  const auto expected = twins_by_hand(values, kRows);
  ASSERT_GT(expected.size(), 30U) << "of the second block";
  expect_twins(Twins::among(*context().kernels, keys), expected, kRows);
}

}  // namespace
}  // namespace keyhole::index::test
