// What a decoding step calls allocates nothing: kernels, merge, and the pool's hand-off.
#include <atomic>

#include "cpu/pool.h"
#include "tests/cpu/reference.h"
#include "tests/replaced_new.h"

namespace {
std::atomic<size_t> allocations{0};
const keyhole::test::BeforeAllocation hook([] { ++allocations; });
}  // namespace

namespace keyhole::cpu::test {
namespace {

TEST(PoolAllocation, TheCounterCounts) {
  const size_t before = allocations.load();
  const std::vector<int> v(100);
  EXPECT_EQ(allocations.load(), before + 1) << v.size();
}

TEST(PoolAllocation, ThePoolAllocatesNothing) {
  Pool pool({.threads = 3});
  std::atomic<uint64_t> sum{0};
  const auto add = [&](uint32_t task, uint32_t) { sum.fetch_add(task); };
  pool.run(10, add);
  const size_t before = allocations.load();
  for (int round = 0; round < 100; ++round) {
    pool.run(10, add);
    Job job;
    pool.start(
        job, 10,
        [](void* c, uint32_t task, uint32_t) {
          static_cast<std::atomic<uint64_t>*>(c)->fetch_add(task);
        },
        &sum);
    pool.finish(job);
  }
  EXPECT_EQ(allocations.load(), before);
  EXPECT_EQ(sum.load(), 201U * 45U);
}

class KernelAllocation : public EveryLevel {};

TEST_P(KernelAllocation, KernelsAndMergeAllocateNothing) {
  Rng rng(51);
  const uint32_t dim = 128;
  const TestRows k(300, dim, DType::f16, 0, gaussian(rng));
  const auto queries = random_queries(rng, 4, dim);
  const auto ids = random_distinct_ids(rng, 300, 100);
  OutState a(4, dim);
  OutState b(4, dim);
  std::vector<float> scores(4 * 300);
  const StateView states[] = {a.view(), b.view()};
  const size_t before = allocations.load();
  attend_range(kernels, {k.view, k.view}, queries.data(), 4, {}, a.view());
  attend_ids(kernels, {k.view, k.view}, ids, queries.data(), 4, {}, b.view());
  merge_states(states, 4, dim, a.view());
  kernels.score[1]({queries.data(), 4, k.view, ids.data(), 100, scores.data(), 300});
  EXPECT_EQ(allocations.load(), before);
}

KEYHOLE_FOR_EVERY_LEVEL(KernelAllocation);

}  // namespace
}  // namespace keyhole::cpu::test
