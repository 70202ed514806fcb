// Which heads have their partitions on the device, on a device that keeps them in host memory.
#include "runtime/stream/device_partitions.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/normal.h"
#include "tests/runtime/stream_device.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kLayers = 2, kKvHeads = 2, kDim = 64;

class DevicePartitionsTest : public testing::Test {
 protected:
  DevicePartitionsTest() {
    model_.layers = kLayers;
    model_.q_heads = 4;
    model_.kv_heads = kKvHeads;
    model_.head_dim = kDim;
    model_.kv_dtype = DType::f32;
    params_.sink = 4;
    params_.window = 16;
    params_.flush_block = 8;
    params_.append_block = 32;
    params_.tail_partition = 4;
    std::mt19937 random(5);
    keyhole::test::Normal<float> normal;
    for (float& x : rows_) x = normal(random);
  }
  [[nodiscard]] KvView kv(size_t rows) const {
    const auto* data = reinterpret_cast<const std::byte*>(rows_.data());
    const RowsView view{data, kDim * sizeof(float), rows, kDim, DType::f32};
    return {view, view};
  }
  std::unique_ptr<index::TailTree> tree(size_t rows) {
    auto t = std::make_unique<index::TailTree>(context_, kDim, DType::f32,
                                               index::TailParams{.keys_per_partition = 4});
    t->build(kv(rows), {});
    return t;
  }
  DevicePartitions make() {
    return {params_, model_,
            [this](const gpu::PartitionsShape& shape) {
              if (has_no_memory_) throw Error(Status::out_of_device_memory, "planted: no memory");
              auto p = std::make_unique<test::FakePartitions>(shape);
              made_ = p.get();
              makes_ += 1;
              return p;
            },
            Log{[](void* self, int32_t, const char* text) {
                  static_cast<DevicePartitionsTest*>(self)->log_.emplace_back(text);
                },
                this}};
  }
  using Heads = std::vector<PartitionedHead>;

  ModelShape model_;
  SessionParams params_;
  std::vector<float> rows_ = std::vector<float>(size_t{8000} * kDim);
  cpu::Pool pool_{cpu::PoolConfig{.threads = 2}};
  index::Context context_{&cpu::select_kernels(nullptr), &pool_};
  bool has_no_memory_ = false;
  test::FakePartitions* made_ = nullptr;
  int makes_ = 0;
  std::vector<std::string> log_;
};

TEST_F(DevicePartitionsTest, AreMadeWhenAHeadWantsThem) {
  DevicePartitions p = make();
  EXPECT_TRUE(p.is_stale());
  Heads heads(kLayers * kKvHeads);
  EXPECT_EQ(p.update(heads), 0U);
  EXPECT_FALSE(p.is_stale());
  EXPECT_EQ(makes_, 0);
  const uint64_t none = p.version();

  const auto t = tree(300);
  heads[3] = {t.get(), 16, KEYHOLE_TAIL_CENTROID};
  p.set_stale();
  EXPECT_GE(p.update(heads), 1024U);
  EXPECT_EQ(makes_, 1);
  EXPECT_FALSE(p.layer_has(0));
  EXPECT_EQ(p.of_layer(0), nullptr);
  EXPECT_TRUE(p.layer_has(1));
  EXPECT_EQ(p.of_layer(1), made_);
  EXPECT_FALSE(p.holds(1, 0, *t));
  EXPECT_TRUE(p.holds(1, 1, *t));
  EXPECT_EQ(made_->count(1, 1), t->fine().count());
  EXPECT_NE(p.version(), none);
  EXPECT_EQ(p.bytes(), made_->bytes());
}

TEST_F(DevicePartitionsTest, AnotherVersionWheneverALayerComesOrGoes) {
  DevicePartitions p = make();
  const auto t = tree(300);
  Heads heads(kLayers * kKvHeads);
  heads[0] = heads[1] = heads[2] = {t.get(), 16, KEYHOLE_TAIL_CENTROID};
  (void)p.update(heads);
  uint64_t version = p.version();
  const auto changes = [&] {
    (void)p.update(heads);
    return std::exchange(version, p.version()) != p.version();
  };
  EXPECT_FALSE(changes()) << "as before";
  heads[0].min_keys = 32;
  EXPECT_FALSE(changes()) << "how many are chosen is no part of a graph";
  heads[0].tree = nullptr;
  EXPECT_FALSE(changes()) << "layer 0 still has head 1";
  EXPECT_FALSE(p.holds(0, 0, *t));
  EXPECT_TRUE(p.holds(0, 1, *t));
  heads[2].tree = nullptr;
  EXPECT_TRUE(changes()) << "layer 1 has none";
  heads[1].tree = nullptr;
  EXPECT_TRUE(changes()) << "the last one has gone";
  EXPECT_FALSE(p.layer_has(0));
  heads[1].tree = t.get();
  EXPECT_TRUE(changes());
  EXPECT_EQ(makes_, 1);
}

TEST_F(DevicePartitionsTest, UploadOnlyWhatIsNew) {
  DevicePartitions p = make();
  auto t = tree(300);
  Heads heads(kLayers * kKvHeads);
  heads[0] = {t.get(), 16, KEYHOLE_TAIL_SECOND};
  EXPECT_GT(p.update(heads), 0U);
  const uint64_t version = p.version();
  EXPECT_EQ(p.update(heads), 0U) << "nothing new to reserve rows for";
  t->commit_append(*t->prepare_append(kv(340), {}));
  EXPECT_FALSE(p.holds(0, 0, *t));
  EXPECT_GT(p.update(heads), 0U);
  EXPECT_TRUE(p.holds(0, 0, *t));
  EXPECT_EQ(made_->count(0, 0), t->fine().count());
  EXPECT_EQ(p.version(), version) << "an appended block fits, and leaves graphs valid";
  // After a drop all of it comes again.
  p.drop();
  EXPECT_TRUE(p.is_stale());
  EXPECT_FALSE(p.holds(0, 0, *t));
  EXPECT_GT(p.update(heads), 0U);
  EXPECT_EQ(made_->count(0, 0), t->fine().count());
  // More than there is capacity for: made anew.
  const auto larger = tree(3000);
  heads[0].tree = larger.get();
  p.drop();
  (void)p.update(heads);
  EXPECT_EQ(makes_, 2);
  EXPECT_NE(p.version(), version);
  EXPECT_EQ(made_->count(0, 0), larger->fine().count());
}

TEST_F(DevicePartitionsTest, StayOnTheHostWithoutMemoryAndAreTriedAgain) {
  DevicePartitions p = make();
  const auto t = tree(300);
  Heads heads(kLayers * kKvHeads, {t.get(), 16, KEYHOLE_TAIL_CENTROID});
  has_no_memory_ = true;
  EXPECT_EQ(p.update(heads), 0U);
  ASSERT_EQ(log_.size(), 1U);
  EXPECT_FALSE(p.layer_has(0));
  EXPECT_FALSE(p.is_stale());
  has_no_memory_ = false;
  (void)p.update(heads);
  EXPECT_EQ(makes_, 0) << "not before retry()";
  p.retry();
  (void)p.update(heads);
  EXPECT_EQ(makes_, 1);
  EXPECT_TRUE(p.layer_has(0));
  EXPECT_EQ(log_.size(), 1U);

  params_.partitions = KEYHOLE_PLACE_DEVICE;
  DevicePartitions must = make();
  has_no_memory_ = true;
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW((void)must.update(heads), Error) << "each time";
    EXPECT_TRUE(must.is_stale());
  }
  params_.device_memory_limit = 1000;
  has_no_memory_ = false;
  EXPECT_THROW((void)must.update(heads), Error);
  params_.device_memory_limit = 0;
  (void)must.update(heads);
  EXPECT_TRUE(must.holds(1, 1, *t));

  params_.partitions = KEYHOLE_PLACE_HOST;
  (void)must.update(heads);
  EXPECT_FALSE(must.layer_has(0));
}

TEST_F(DevicePartitionsTest, HeadsThatWantTooManyStayOnTheHost) {
  DevicePartitions p = make();
  const auto small = tree(1000), large = tree(8000);
  ASSERT_GT(large->fine().count(), 1100U);
  Heads heads(kLayers * kKvHeads);
  heads[0] = {small.get(), 1000000, KEYHOLE_TAIL_CENTROID};  // all of them: fewer than 1024
  heads[1] = {large.get(), 4096, KEYHOLE_TAIL_CENTROID};     // 1024 of 4 keys
  heads[2] = {large.get(), 4097, KEYHOLE_TAIL_CENTROID};
  heads[3] = {large.get(), UINT32_MAX, KEYHOLE_TAIL_CENTROID};
  (void)p.update(heads);
  EXPECT_TRUE(p.holds(0, 0, *small));
  EXPECT_TRUE(p.holds(0, 1, *large));
  EXPECT_FALSE(p.holds(1, 0, *large));
  EXPECT_FALSE(p.holds(1, 1, *large));
  EXPECT_FALSE(p.layer_has(1));
  ASSERT_EQ(log_.size(), 1U);
  EXPECT_NE(log_[0].find("layer 1, KV head 0"), std::string::npos) << log_[0];
  EXPECT_NE(log_[0].find("4097"), std::string::npos) << log_[0];
  (void)p.update(heads);
  EXPECT_EQ(log_.size(), 1U);
}

}  // namespace
}  // namespace keyhole::runtime
