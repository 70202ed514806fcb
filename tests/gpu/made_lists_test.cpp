// Lists of codes that the device makes: each row once, the host's codes of the same rows bit for bit, figures against
// double precision, clusters as near as the host's.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/half.h"
#include "gpu/cuda/common/stream.h"
#include "runtime/files/safetensors.h"
#include "tests/captured_graph.h"
#include "tests/gpu/list_layer.h"

namespace keyhole::gpu::test {
namespace {

/// The codes of `ids` as the host makes them, in the order of MadeLists::codes_of().
struct HostList {
  HostList(const ListLayer& layer, uint32_t h, const std::vector<uint32_t>& ids) {
    const CodeShape& shape = layer.shape().code;
    const size_t tiles = (ids.size() + kCodeTile - 1) / kCodeTile;
    const size_t keys = tiles * kCodeLanes * shape.key_words() * 4;
    const size_t values = tiles * kCodeLanes * shape.value_words() * 4;
    codes.resize(keys + values + tiles * kCodeTile * 4);
    key_mean.resize(shape.dim);
    value_mean.resize(shape.dim);
    index::CodeRunOf<std::byte> run;
    run.keys = codes.data();
    run.values = run.keys + keys;
    run.factors = run.values + values;
    run.key_mean = reinterpret_cast<std::byte*>(key_mean.data());
    run.value_mean = reinterpret_cast<std::byte*>(value_mean.data());
    run.rows = static_cast<uint32_t>(ids.size());
    figures = index::encode_rows(shape, layer.lists(h).balance(), cpu::select_kernels(),
                                 layer.head(h), ids, run);
    index::CodeRun read;
    read.factors = run.factors;
    read.rows = run.rows;
    const float deviation = index::widest_factor(read) / code_step(shape.key_bits);
    widest = deviation * deviation;
  }
  std::vector<std::byte> codes;
  std::vector<uint16_t> key_mean, value_mean;
  index::CodeRunFigures figures;
  float widest = 0.0F;
};

/// Means and spread of a list in double precision: in the balanced space, which the rotation leaves.
void check_against_doubles(const ListLayer& layer, uint32_t h, const MadeLists& made, uint32_t l) {
  const uint32_t dim = layer.shape().code.dim;
  const std::vector<uint32_t> ids = made.rows_of(l);
  const index::Balance& balance = layer.lists(h).balance();
  const auto n = static_cast<double>(ids.size());
  const auto check = [&](const RowsView& rows, const uint16_t* mean, bool is_keys) {
    std::vector<std::vector<double>> scaled;
    std::vector<double> sum(dim);
    for (const uint32_t id : ids) {
      const std::vector<float> row = layer.row(rows, id);
      std::vector<double> x(dim);
      for (uint32_t j = 0; j < dim; ++j) {
        x[j] = is_keys ? double{row[j]} * balance.key_scale[j]
                       : double{row[j]} / double{balance.value_scale};
        sum[j] += x[j] / n;
      }
      scaled.push_back(x);
    }
    std::vector<float> back(dim);
    for (uint32_t j = 0; j < dim; ++j) back[j] = cpu::f16_to_f32(mean[j]);
    index::rotate_codes_back(back.data(), dim);
    double off = 0.0, norm = 1e-6, spread = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      off += (back[j] - sum[j]) * (back[j] - sum[j]);
      norm += sum[j] * sum[j];
      for (const std::vector<double>& x : scaled) spread += (x[j] - sum[j]) * (x[j] - sum[j]);
    }
    EXPECT_LT(std::sqrt(off / norm), 1e-3) << "list " << l;
    if (!is_keys) return;
    spread /= n * dim;
    EXPECT_NEAR(made.figures[l].spread, spread, 1e-3 * spread + 1e-5) << "list " << l;
  };
  const KvView kv = layer.head(h);
  check(kv.keys, made.key_means.data() + size_t{l} * dim, true);
  check(kv.values, made.value_means.data() + size_t{l} * dim, false);
}

/// The lists of rows [begin, begin + rows) of a KV head from list `first` on.
void check_lists(const ListLayer& layer, uint32_t h, uint32_t first, uint32_t begin,
                 uint32_t rows) {
  const uint32_t dim = layer.shape().code.dim;
  const MadeLists made = layer.made(h);
  std::vector<uint32_t> seen(rows);
  uint32_t pair = first == 0 ? 0
                             : made.places[first - 1].first_pair +
                                   (made.places[first - 1].rows + kPairRows - 1) / kPairRows;
  for (uint32_t l = first; l < made.lists(); ++l) {
    SCOPED_TRACE("KV head " + std::to_string(h) + ", list " + std::to_string(l));
    const ListPlace& place = made.places[l];
    ASSERT_EQ(place.first_pair, pair);
    ASSERT_GE(place.rows, 1U);
    ASSERT_LE(place.rows, kCodeBlock);
    pair += (place.rows + kPairRows - 1) / kPairRows;
    const std::vector<uint32_t> ids = made.rows_of(l);
    for (const uint32_t id : ids) {
      ASSERT_GE(id, begin);
      ASSERT_LT(id, begin + rows);
      ++seen[id - begin];
    }
    for (size_t i = size_t{place.first_pair} * kPairRows + place.rows; i < pair * kPairRows; ++i) {
      EXPECT_EQ(made.ids[i], 0U);
    }
    const HostList host(layer, h, ids);
    EXPECT_EQ(made.codes_of(l), host.codes);
    const uint16_t* const key_mean = made.key_means.data() + size_t{l} * dim;
    const uint16_t* const value_mean = made.value_means.data() + size_t{l} * dim;
    EXPECT_EQ(std::vector<uint16_t>(key_mean, key_mean + dim), host.key_mean);
    EXPECT_EQ(std::vector<uint16_t>(value_mean, value_mean + dim), host.value_mean);
    EXPECT_EQ(made.figures[l].noise, host.figures.noise);
    EXPECT_EQ(made.figures[l].spread, host.figures.spread);
    EXPECT_EQ(made.figures[l].widest, host.widest);
    EXPECT_NEAR(made.figures[l].log_rows, std::log(static_cast<double>(place.rows)), 1e-6);
    check_against_doubles(layer, h, made, l);
    if (testing::Test::HasFailure()) return;
  }
  for (uint32_t i = 0; i < rows; ++i) EXPECT_EQ(seen[i], 1U) << "row " << begin + i;
}

/// Mean values for tensor cores are those that lay_out_means() makes of the lists' mean values.
void check_mean_tiles(const ListLayer& layer, uint32_t h) {
  const MadeLists made = layer.made(h);
  const uint32_t dim = layer.shape().code.dim;
  const DeviceVector<uint16_t> means(made.value_means);
  const DeviceVector<uint32_t> tiles(std::vector<uint32_t>(made.mean_tiles.size()));
  ASSERT_EQ(
      lay_out_means({dim, layer.shape().code.value_bits, means.get(), 0, made.lists(), tiles.get()},
                    {}),
      cudaSuccess);
  const std::vector<uint32_t> right = tiles.read();
  for (size_t i = 0; i < right.size(); ++i) {
    // The last tile's other lists are whatever they were.
    const uint32_t lane = i / 4 % 32, reg = i % 4;
    const size_t list = i / (dim / 16 * 128) * 16 + 2 * (lane % 4) + reg / 2 * 8;
    for (uint32_t k = 0; k < 2; ++k) {
      if (list + k >= made.lists()) continue;
      ASSERT_EQ(made.mean_tiles[i] >> (16 * k) & 0xFFFF, right[i] >> (16 * k) & 0xFFFF)
          << "list " << list + k;
    }
  }
}

/// Squared distances of keys from the means of their lists, summed up.
double squares_of(const index::CodeChunk& host) {
  double sum = 0.0;
  for (size_t l = 0; l < host.lists(); ++l) sum += double{host.spreads[l]} * host.sizes[l];
  return sum;
}
double squares_of(const MadeLists& made) {
  double sum = 0.0;
  for (uint32_t l = 0; l < made.lists(); ++l) {
    sum += double{made.figures[l].spread} * made.places[l].rows;
  }
  return sum;
}

TEST(MadeLists, HaveEveryRowOnceInTheHostsCodes) {
  KEYHOLE_NEEDS_GPU();
  const DType types[] = {DType::f16, DType::bf16, DType::f32, DType::i8};
  uint32_t i = 0;
  for (const uint32_t dim : {64U, 80U, 96U, 128U, 256U}) {
    for (const uint32_t bits : {2U, 4U}) {
      ListCase c;
      c.dim = dim;
      c.bits = bits;
      c.rows = types[i++ % 4];
      c.blocks = 9;
      c.listed = 8;
      c.stretch = 4;
      const uint32_t seed = std::random_device{}();
      SCOPED_TRACE("seed " + std::to_string(seed) + ", dim " + std::to_string(dim) + ", bits " +
                   std::to_string(bits));
      ListLayer layer(c, seed);
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        check_lists(layer, h, 0, 0, 8 * kCodeBlock);
        check_mean_tiles(layer, h);
      }
    }
  }
}

TEST(MadeLists, AreOfAnySize) {
  KEYHOLE_NEEDS_GPU();
  for (const uint32_t list_rows : {16U, 40U, 64U, 256U}) {
    for (const uint32_t stretch : {1U, 3U, 64U}) {
      ListCase c;
      c.dim = 64;
      c.list_rows = list_rows;
      c.blocks = c.listed = c.stretch = stretch;
      const uint32_t seed = std::random_device{}();
      SCOPED_TRACE("seed " + std::to_string(seed) + ", lists of " + std::to_string(list_rows) +
                   ", blocks " + std::to_string(stretch));
      ListLayer layer(c, seed);
      for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
        check_lists(layer, h, 0, 0, stretch * kCodeBlock);
      }
    }
  }
}

TEST(MadeLists, AreAsNearAsTheHosts) {
  KEYHOLE_NEEDS_GPU();
  for (const float apart : {0.3F, 1.0F}) {
    ListCase c;
    c.blocks = c.listed = c.stretch = 32;
    c.apart = apart;
    const uint32_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", apart " + std::to_string(apart));
    ListLayer layer(c, seed);
    for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
      const index::CodeChunk host = layer.host_lists(h, 0, 32);
      const MadeLists made = layer.made(h);
      EXPECT_LT(squares_of(made), 1.05 * squares_of(host));
    }
  }
}

/// Hard heads of a real model (tests/runtime/session/golden/cut_heads.py): sums of squared distances from the means of
/// lists.
TEST(MadeLists, OfRealHeadsAreAsNearAsTheHosts) {
  KEYHOLE_NEEDS_GPU();
  const SafetensorsFile file(KEYHOLE_GOLDEN_FOLDER "/real_heads.safetensors");
  std::vector<std::vector<float>> keys, values;
  std::vector<float> training;  // `[kv_heads, each, dim]`
  for (const auto& [name, stored] : file.tensors()) {
    if (!name.ends_with(".keys")) continue;
    const std::string head = name.substr(0, name.size() - 4);
    keys.push_back(stored.to_f32());
    values.push_back(file.tensor(head + "values").to_f32());
    const std::vector<float> queries = file.tensor(head + "training_queries").to_f32();
    training.insert(training.end(), queries.begin(), queries.end());
  }
  ASSERT_FALSE(keys.empty());
  CodesShape shape;
  shape.layers = 1;
  shape.kv_heads = static_cast<uint32_t>(keys.size());
  shape.q_heads = shape.kv_heads;
  shape.code = {64, 4, 4};
  shape.list_rows = 16;
  shape.lists_from = 1;
  const uint32_t dim = shape.code.dim;
  shape.blocks = static_cast<uint32_t>(keys[0].size() / dim / kCodeBlock);
  const uint32_t rows = shape.blocks * kCodeBlock;
  OffloadedLayer layer(shape, rows);
  const auto row_of = [&](const std::vector<std::vector<float>>& heads, uint32_t i) {
    std::vector<float> row;
    for (const std::vector<float>& head : heads) {
      const auto from = head.begin() + static_cast<ptrdiff_t>(size_t{i} * dim);
      row.insert(row.end(), from, from + dim);
    }
    return row;
  };
  for (uint32_t i = 0; i < rows; ++i) layer.append(row_of(keys, i), row_of(values, i));
  layer.learn(training, static_cast<uint32_t>(training.size() / dim / keys.size()));
  CudaCodes codes(shape);
  layer.tell(codes, 0);
  codes.encode(0, 0, shape.blocks, {});
  ASSERT_TRUE(codes.make_lists(0, 0, rows));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  codes.use_lists(0, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const DeviceVector<float> q(size_t{shape.q_heads} * dim);
  const CodesStep step =
      codes.describe(0, dense_tensor(reinterpret_cast<std::byte*>(q.get()), 1, shape.q_heads, dim,
                                     DType::f32, Memory::device));
  index::Context context;
  context.kernels = &cpu::select_kernels();
  const index::Progress progress;
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    index::ProgressMeter meter(progress, 1.0);
    const index::CodeChunk host =
        index::make_chunk(context, shape.code, layer.codes(h).balance(), layer.head(h), 0, rows,
                          {.rows = shape.list_rows}, meter);
    const MadeLists made(step, h);
    EXPECT_LT(squares_of(made), 1.05 * squares_of(host)) << "head " << h;
  }
}

TEST(MadeLists, OfEqualKeysAreDivided) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.dim = 64;
  c.blocks = 20;
  c.listed = 0;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  layer.group_keys([](uint32_t) { return 0; });
  layer.list(0, 20);
  for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
    check_lists(layer, h, 0, 0, 20 * kCodeBlock);
    EXPECT_EQ(layer.made(h).lists(), 20U);
  }
  layer.run();
  layer.check();
}

TEST(MadeLists, AreEvenWhereClustersTakeTooManyPairs) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.dim = 64;
  c.blocks = 64;
  c.listed = 0;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  // 252 clusters of 64 rows of the text each and of one, or two, of the last 256: three pairs each. That is more than
  // there is room for.
  constexpr uint32_t kGroups = 252;
  const ListStretch room(64 * kCodeBlock, 64);
  ASSERT_GT(3 * kGroups, room.pairs);
  layer.group_keys(
      [](uint32_t row) { return row < 64 * kGroups ? row / 64 : (row - 64 * kGroups) % kGroups; });
  layer.list(0, 64);
  for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
    check_lists(layer, h, 0, 0, 64 * kCodeBlock);
    for (const ListPlace& place : layer.made(h).places) EXPECT_EQ(place.rows, 64U);
  }
  layer.run();
  layer.check();
}

TEST(MadeLists, TakeNumbersThatHalvesCannotHold) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.rows = DType::f32;
  c.blocks = 4;
  c.listed = 0;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  layer.set_key(300, 1e9F);
  layer.set_key(700, 3e30F);
  layer.list(0, 4);
  uint32_t unknown = 0;
  for (uint32_t h = 0; h < layer.kv_heads(); ++h) {
    const MadeLists made = layer.made(h);
    for (uint32_t l = 0; l < made.lists(); ++l) {
      const HostList host(layer, h, made.rows_of(l));
      EXPECT_EQ(made.codes_of(l), host.codes);
      EXPECT_EQ(made.figures[l].noise, host.figures.noise);
      unknown += made.figures[l].noise >= 1e6F ? 1 : 0;
    }
  }
  EXPECT_GE(unknown, 2U);
}

TEST(MadeLists, AreTheSameInEveryRun) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.blocks = c.listed = c.stretch = 16;
  const ListLayer one(c, 5), two(c, 5);
  for (uint32_t h = 0; h < one.kv_heads(); ++h) {
    const MadeLists a = one.made(h), b = two.made(h);
    EXPECT_EQ(a.ids, b.ids);
    EXPECT_EQ(a.pairs, b.pairs);
  }
}

TEST(MadeLists, StayUnseenUntilTheyAreUsed) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.spare = 8;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);  // 12 of 14 blocks are in lists
  layer.append(6);
  CudaCodes& codes = layer.codes();
  ASSERT_TRUE(codes.make_lists(0, 12 * kCodeBlock, 4 * kCodeBlock));
  EXPECT_EQ(codes.listed(0), 12 * kCodeBlock);
  EXPECT_EQ(codes.made_lists(0), 16 * kCodeBlock);
  layer.run();
  layer.check();
  // A cut through rows that are being listed forgets these lists alone.
  layer.truncate(15);
  EXPECT_EQ(codes.made_lists(0), 12 * kCodeBlock);
  layer.run();
  layer.check();
  ASSERT_TRUE(codes.make_lists(0, 12 * kCodeBlock, kCodeBlock));
  codes.stop_lists(0);
  EXPECT_EQ(codes.made_lists(0), 12 * kCodeBlock);
  codes.use_lists(0, {});
  EXPECT_EQ(codes.listed(0), 12 * kCodeBlock);
  layer.list(12, 2);
  layer.run();
  layer.check();
}

TEST(MadeLists, AreFoundByAGraphThatIsOlder) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  c.listed = 0;
  c.share = 1.0F;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ListLayer layer(c, seed);
  EXPECT_EQ(layer.step().lists.list_capacity, 0U);
  ASSERT_TRUE(layer.codes().make_lists(0, 0, 8 * kCodeBlock));
  EXPECT_NE(layer.step().lists.list_capacity, 0U);
  const OwnStream stream;
  const CapturedGraph graph(stream.get(), cudaStreamCaptureModeThreadLocal,
                            [&] { layer.enqueue(stream.get()); });
  graph.run();
  const std::vector<double> of_blocks = layer.errors();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  layer.codes().use_lists(0, stream.get());
  EXPECT_EQ(layer.codes().listed(0), 8 * kCodeBlock);
  stream.wait();
  graph.run();
  const std::vector<double> of_lists = layer.errors();
  for (size_t h = 0; h < of_lists.size(); ++h) {
    EXPECT_LT(of_blocks[h], 0.1);
    EXPECT_LT(of_lists[h], 0.1);
    EXPECT_NE(of_lists[h], of_blocks[h]);
  }
}

TEST(MadeLists, RefuseRowsThatDoNotFollow) {
  KEYHOLE_NEEDS_GPU();
  ListCase c;
  ListLayer layer(c, 3);
  const auto refuses = [&](uint32_t begin, uint32_t rows) {
    EXPECT_THROW((void)layer.codes().make_lists(0, begin, rows), Error);
  };
  refuses(13 * kCodeBlock, kCodeBlock);      // a gap
  refuses(6 * kCodeBlock, kCodeBlock);       // rows that are in lists
  refuses(12 * kCodeBlock, 3 * kCodeBlock);  // rows without blocks
  refuses(12 * kCodeBlock, 100);
  refuses(12 * kCodeBlock, 0);
  EXPECT_EQ(layer.codes().made_lists(0), 12 * kCodeBlock);
}

}  // namespace
}  // namespace keyhole::gpu::test
