// Builds: the same result for any number of threads, cancelled without a trace, sized as announced.
#include <sstream>
#include <thread>

#include "tests/index/keys.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

// What a build made, without the seconds that it took.
std::string content(const Index& index) {
  std::string bytes = saved_bytes(index);
  const std::string params = index.info().params;
  const size_t header = 8 + 4 + 4;  // magic, version, length of the text
  uint32_t text = 0;
  std::memcpy(&text, bytes.data() + 12, 4);
  bytes.erase(header + text + 8, 8);         // build_seconds, after dim and dtype
  return bytes.substr(0, bytes.size() - 8);  // the checksum covers them
}

constexpr const char* kBuildSpecs[] = {"flat",
                                       "ivf:segment=512",
                                       "ivf:train=global,C=50",
                                       "ivf:segment=512,metric=ip",
                                       "hnsw:M=6,efc=30",
                                       "flat:codec=int8",
                                       "roargraph:M=6,ef=8,beam=30",
                                       "saap:C=40",
                                       "sparq",
                                       "sparq:codec=int8"};

TEST(Build, DoesNotDependOnThreads) {
  std::mt19937 random(71);
  Keys keys(1600, 64, DType::f16);
  keys.put(0, attention_keys(1600, 64, random));
  cpu::Pool one({.threads = 1});
  cpu::Pool four({.threads = 4});
  for (const char* spec : kBuildSpecs) {
    SCOPED_TRACE(spec);
    const std::string alone = content(*built(spec, keys, nullptr));
    EXPECT_EQ(content(*built(spec, keys, &one)), alone);
    EXPECT_EQ(content(*built(spec, keys, &four)), alone);
    // Heads are built from tasks of the same pool.
    std::vector<std::string> nested(4);
    four.run(4,
             [&](uint32_t task, uint32_t) { nested[task] = content(*built(spec, keys, &four)); });
    for (const std::string& bytes : nested) EXPECT_EQ(bytes, alone);
  }
}

TEST(Build, DoesNotDependOnTheKernelsLevelBeyondRounding) {
  KEYHOLE_SKIP_WITH_TSAN();
  std::mt19937 random(72);
  Keys keys(800, 64, DType::f16);
  keys.put(0, integers(800, 64, random));
  const auto queries = integers(2, 64, random);
  for (const cpu::Level level : cpu::available_levels()) {
    const Context ctx = {cpu::kernels_for(level), nullptr};
    for (const char* spec : {"flat", "ivf:C=10,probe=10", "hnsw:ef=800,efc=40", "roargraph:ef=800",
                             "saap:C=9,probe=9", "sparq:r=64"}) {
      const auto index = make_index(spec, 64, DType::f16, ctx);
      BuildInput input;
      input.keys = keys.view();
      index->build(input, {});
      const Answer answer = search(*index, queries, 64, 20);
      for (uint32_t h = 0; h < 2; ++h) {
        const auto all = truth(keys, queries.data() + h * 64);
        for (size_t i = 0; i < 20; ++i) {
          ASSERT_EQ(answer.heads[h].ids[i], all[i].second) << spec << level_name(level);
        }
      }
    }
  }
}

class Cancel : public ::testing::TestWithParam<const char*> {};

TEST_P(Cancel, LeavesTheIndexAsItWas) {
  std::mt19937 random(73);
  Keys keys(1500, 64, DType::f16);
  keys.put(0, attention_keys(1500, 64, random));
  const auto queries = attention_queries(2, 64, keys, random);
  cpu::Pool pool({.threads = 3});
  for (cpu::Pool* p : {static_cast<cpu::Pool*>(nullptr), &pool}) {
    const auto index = make_index(GetParam(), 64, DType::f16, context(p));
    BuildInput input;
    input.keys = keys.view(700);
    index->build(input, {});
    const std::string before = content(*index);
    const Answer answer = search(*index, queries, 64, 15);

    // How often a whole build asks, and that it says truly how far it is.
    std::vector<double> shares;
    input.keys = keys.view();
    make_index(GetParam(), 64, DType::f16, context(p))->build(input, [&](double share) {
      shares.push_back(share);
      return true;
    });
    ASSERT_FALSE(shares.empty());
    EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
    EXPECT_GE(shares.front(), 0.0);
    EXPECT_LE(shares.back(), 1.0);
    EXPECT_GT(shares.back(), 0.9);

    for (const size_t stop : {size_t{0}, shares.size() / 3, shares.size() - 1}) {
      for (const bool appending : {false, true}) {
        size_t asked = 0;
        const Progress progress = [&](double) { return asked++ < stop; };
        try {
          if (appending) {
            index->append(keys.view(), progress);
            ASSERT_LE(asked, stop);  // it was done sooner than a build is
            index->truncate(700);
            index->build({keys.view(700), {}, 0, nullptr}, {});
            continue;
          }
          index->build(input, progress);
          FAIL() << "not cancelled at question " << stop;
        } catch (const Error& e) {
          EXPECT_EQ(e.status(), Status::cancelled);
        }
        EXPECT_EQ(asked, stop + 1) << "asked again after the answer was no";
        EXPECT_EQ(index->count(), 700U);
        EXPECT_EQ(content(*index), before);
        EXPECT_EQ(search(*index, queries, 64, 15).heads, answer.heads);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Cancel, ::testing::ValuesIn(kBuildSpecs));

TEST(Bytes, AreWhatTheEstimateSays) {
  KEYHOLE_SKIP_WITH_TSAN();
  std::mt19937 random(74);
  for (const size_t n : {size_t{0}, size_t{700}, size_t{2000}}) {
    for (const DType dtype : key_dtypes()) {
      Keys keys(n, 64, dtype);
      keys.put(0, gaussian(n, 64, random));
      for (const char* spec :
           {"flat", "ivf", "ivf:C=100", "ivf:train=global,iters=2", "hnsw:efc=10", "hnsw:M=4,efc=5",
            "hnsw:M=48,efc=5", "flat:codec=int8", "roargraph:beam=10",
            "roargraph:M=4,beam=10,codec=none", "saap", "saap:C=100,iters=2", "sparq",
            "sparq:codec=int8"}) {
        const auto bytes = static_cast<double>(built(spec, keys)->info().bytes);
        const auto estimate = static_cast<double>(estimate_bytes(spec, n, 64, dtype));
        EXPECT_NEAR(bytes, estimate, 0.1 * estimate) << spec << " of " << n;
      }
    }
  }
}

TEST(Bytes, AndSecondsGrowWithAppends) {
  std::mt19937 random(75);
  Keys keys(1200, 64, DType::f16);
  keys.put(0, gaussian(1200, 64, random));
  for (const char* spec : {"ivf:segment=200", "hnsw:M=4,efc=10", "roargraph:M=4,beam=10", "saap"}) {
    const auto index = make_index(spec, 64, DType::f16, context());
    index->append(keys.view(600), {});
    const IndexInfo half = index->info();
    index->append(keys.view(), {});
    const IndexInfo whole = index->info();
    EXPECT_GT(half.bytes, 0U);
    EXPECT_GT(whole.bytes, half.bytes);
    EXPECT_GT(half.build_seconds, 0.0);
    EXPECT_GT(whole.build_seconds, half.build_seconds);
    const auto estimate = static_cast<double>(estimate_bytes(spec, 1200, 64, DType::f16));
    EXPECT_NEAR(static_cast<double>(whole.bytes), estimate, 0.15 * estimate) << spec;
  }
}

TEST(Threads, SearchAtOnceWithTheirOwnScratch) {
  std::mt19937 random(76);
  Keys keys(1500, 64, DType::f16);
  keys.put(0, attention_keys(1500, 64, random));
  for (const char* spec :
       {"flat", "ivf", "hnsw:M=6,efc=20,ef=30", "roargraph:M=6,beam=20,ef=8", "saap", "sparq"}) {
    SCOPED_TRACE(spec);
    const auto index = built(spec, keys);
    std::vector<std::vector<float>> queries;
    std::vector<Answer> expected;
    for (int i = 0; i < 8; ++i) {
      queries.push_back(attention_queries(2, 64, keys, random));
      expected.push_back(search(*index, queries.back(), 64, 20));
    }
    std::vector<int> wrong(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const auto scratch = index->make_scratch(2, 20);
        for (size_t i = 0; i < 40; ++i) {
          const size_t q = (i + t) % queries.size();
          const Answer answer = search(*index, queries[q], 64, 20, *scratch);
          wrong[t] += static_cast<int>(answer.heads != expected[q].heads);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(4, 0));
  }
}

TEST(Scratch, ServesEveryIndexOfItsType) {
  std::mt19937 random(77);
  Keys small(50, 64, DType::f16);
  small.put(0, gaussian(50, 64, random));
  Keys large(2000, 64, DType::f16);
  large.put(0, gaussian(2000, 64, random));
  const auto queries = gaussian(3, 64, random);
  for (const char* spec :
       {"flat", "ivf", "hnsw:M=6,efc=20", "roargraph:M=6,beam=20,ef=8", "saap", "sparq"}) {
    SCOPED_TRACE(spec);
    const auto a = built(spec, small);
    const auto b = built(spec, large);
    const auto scratch = a->make_scratch(4, 100);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(search(*a, queries, 64, 100, *scratch).heads, search(*a, queries, 64, 100).heads);
      EXPECT_EQ(search(*b, queries, 64, 100, *scratch).heads, search(*b, queries, 64, 100).heads);
      EXPECT_EQ(search(*b, queries, 64, 7, *scratch).heads, search(*b, queries, 64, 7).heads);
    }
  }
}

TEST(Scratch, RefusesWhatItWasNotMadeFor) {
  std::mt19937 random(78);
  Keys keys(50, 64, DType::f16);
  keys.put(0, gaussian(50, 64, random));
  const auto queries = gaussian(5, 64, random);
  const auto ivf = built("ivf", keys);
  const auto hnsw = built("hnsw", keys);
  const auto scratch = ivf->make_scratch(4, 10);
  EXPECT_THROW(search(*ivf, queries, 64, 10, *scratch), Error);
  EXPECT_THROW(search(*ivf, gaussian(4, 64, random), 64, 11, *scratch), Error);
  EXPECT_THROW(search(*hnsw, gaussian(4, 64, random), 64, 10, *scratch), Error);
  EXPECT_NO_THROW(search(*ivf, gaussian(4, 64, random), 64, 10, *scratch));
}

TEST(Build, EveryTypeRefusesAnotherTypesScratch) {
  std::mt19937 random(79);
  Keys keys(200, 64, DType::f16);
  keys.put(0, gaussian(200, 64, random));
  const auto query = gaussian(1, 64, random);
  constexpr const char* kTypes[] = {"flat", "ivf", "hnsw", "roargraph", "saap", "sparq"};
  for (const char* own : kTypes) {
    const auto index = built(own, keys);
    for (const char* other : kTypes) {
      const auto scratch = built(other, keys)->make_scratch(1, 5);
      if (own == other) {
        EXPECT_NO_THROW(search(*index, query, 64, 5, *scratch)) << own;
        EXPECT_NO_THROW(index->reserve_search(*scratch)) << own;
      } else if (std::string(own) != "ivf" || std::string(other) != "saap") {  // saap's holds ivf's
        EXPECT_THROW(search(*index, query, 64, 5, *scratch), Error) << own << " with " << other;
        EXPECT_THROW(index->reserve_search(*scratch), Error) << own << " with " << other;
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
