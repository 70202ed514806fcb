// Saved indexes: what was saved answers alike, and no bytes that save() cannot have written are taken, let
// alone crash, hang or exhaust memory.
#include <sstream>

#include "index/serial.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr const char* kSavedSpecs[] = {"flat",
                                       "ivf:C=12,probe=4,segment=100,iters=1",
                                       "hnsw:M=4,ef=20,efc=10",
                                       "hnsw:M=4,ef=20,efc=10,geometry=ip",
                                       "flat:codec=int8",
                                       "roargraph:M=4,ef=20,beam=10",
                                       "roargraph:M=4,ef=5,beam=10,codec=none",
                                       "saap:C=12,probe=4,iters=1",
                                       "sparq:r=8",
                                       "sparq:r=8,codec=int8",
                                       "codes:k=2",
                                       "codes:k=2,lists=16"};

class Saved : public ::testing::TestWithParam<const char*> {
 protected:
  Saved() : keys_(400, 64, DType::f16) {
    std::mt19937 random(61);
    std::vector<float> values = attention_keys(400, 64, random);
    for (size_t i = 0; i < 400; i += 5) {  // some are equal, two by two
      std::copy_n(values.begin(), 64, values.begin() + static_cast<std::ptrdiff_t>(i * 64));
      values[i * 64] = static_cast<float>(i / 10);
    }
    keys_.put(0, values);
    queries_ = attention_queries(3, 64, keys_, random);
    // Built, grown and cut, so that every part of the form is present.
    index_ = make_index(GetParam(), 64, DType::f16, context());
    BuildInput input;
    input.keys = keys_.view(300);
    index_->build(input, {});
    index_->append(keys_.view(390), {});
    index_->truncate(370);
    std::ostringstream out;
    index_->save(out);
    bytes_ = out.str();
  }

  [[nodiscard]] std::unique_ptr<Index> fresh(const std::string& spec) const {
    return make_index(spec, 64, DType::f16, context());
  }
  [[nodiscard]] std::unique_ptr<Index> fresh() const { return fresh(GetParam()); }

  /// The status with which load refuses these bytes; ok where it takes them.
  [[nodiscard]] Status load(Index& index, const std::string& bytes) const {
    std::istringstream in(bytes);
    try {
      index.load(in, keys_.view());
    } catch (const Error& e) {
      return e.status();
    }
    return Status::ok;
  }

  // The checksum at the end made right again, so that what is behind it is tested too.
  static std::string resealed(std::string bytes) {
    if (bytes.size() < 8) return bytes;
    Checksum sum;
    sum.update(bytes.data(), bytes.size() - 8);
    const uint64_t value = sum.value();
    std::memcpy(bytes.data() + bytes.size() - 8, &value, 8);
    return bytes;
  }

  Keys keys_;
  std::vector<float> queries_;
  std::unique_ptr<Index> index_;
  std::string bytes_;
};

TEST_P(Saved, AnswersAlike) {
  const auto loaded = fresh();
  ASSERT_EQ(load(*loaded, bytes_), Status::ok);
  EXPECT_EQ(loaded->count(), 370U);
  const Answer a = search(*index_, queries_, 64, 8);
  const Answer b = search(*loaded, queries_, 64, 8);
  EXPECT_EQ(a.heads, b.heads);
  EXPECT_EQ(a.keys_scored, b.keys_scored);
  EXPECT_EQ(index_->info().params, loaded->info().params);
  EXPECT_EQ(index_->info().build_seconds, loaded->info().build_seconds);
  // And goes on alike.
  index_->append(keys_.view(), {});
  loaded->append(keys_.view(), {});
  EXPECT_EQ(search(*index_, queries_, 64, 8).heads, search(*loaded, queries_, 64, 8).heads);
  std::ostringstream again;
  std::ostringstream same;
  fresh()->save(again);
  fresh()->save(same);
  EXPECT_EQ(again.str(), same.str());
}

TEST_P(Saved, LeavesWhatFollowsInTheStream) {
  std::stringstream both;
  index_->save(both);
  index_->save(both);
  both << "tail";
  const auto first = fresh();
  const auto second = fresh();
  first->load(both, keys_.view());
  second->load(both, keys_.view());
  std::string rest;
  both >> rest;
  EXPECT_EQ(rest, "tail");
}

TEST_P(Saved, SearchParametersMayDifferBuildParametersMayNot) {
  const std::string spec = GetParam();
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string other = spec;
    const size_t at = other.find(from);
    if (at == std::string::npos) return other;
    return other.replace(at, from.size(), to);
  };
  EXPECT_EQ(load(*fresh(replaced("probe=4", "probe=9")), bytes_), Status::ok);
  EXPECT_EQ(load(*fresh(replaced("ef=20", "ef=33")), bytes_), Status::ok);
  EXPECT_EQ(load(*fresh(replaced("r=8", "r=9")), bytes_), Status::ok);
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"C=12", "C=13"},
                                 {"iters=1", "iters=2"},
                                 {"M=4", "M=5"},
                                 {"efc=10", "efc=11"},
                                 {"r=8,codec=int8", "r=8"}}) {
    if (spec.find(from) == std::string::npos) continue;
    EXPECT_EQ(load(*fresh(replaced(from, to)), bytes_), Status::corrupt) << from;
  }
}

TEST_P(Saved, RefusesAnotherTypeShapeOrTooFewKeys) {
  for (const char* other : {"flat", "ivf", "hnsw", "roargraph", "saap", "sparq", "codes"}) {
    if (std::string(GetParam()).find(other) == 0) continue;
    EXPECT_EQ(load(*fresh(other), bytes_), Status::corrupt) << other;
  }
  std::istringstream in(bytes_);
  EXPECT_THROW(fresh()->load(in, keys_.view(369)), Error);
  Keys wide(400, 128, DType::f16);
  wide.poison(400);
  in.seekg(0);
  EXPECT_THROW(make_index(GetParam(), 128, DType::f16, context())->load(in, wide.view()), Error);
}

TEST_P(Saved, ANewerFormatIsAVersionError) {
  std::string bytes = bytes_;
  ++bytes[8];
  EXPECT_EQ(load(*fresh(), resealed(bytes)), Status::version);
}

TEST_P(Saved, AFailedStreamIsAnIoError) {
  std::ostringstream out;
  out.setstate(std::ios::badbit);
  try {
    index_->save(out);
    FAIL() << "written to a broken stream";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::io);
  }
}

TEST_P(Saved, EveryTruncationIsRefused) {
  const auto index = fresh();
  const size_t step = std::max<size_t>(bytes_.size() / cases(2000), 1);
  for (size_t size = 0; size < bytes_.size(); size += size < 300 ? 1 : step) {
    ASSERT_EQ(load(*index, bytes_.substr(0, size)), Status::corrupt) << size << " bytes";
  }
}

TEST_P(Saved, AFailedLoadChangesNothing) {
  const Answer before = search(*index_, queries_, 64, 8);
  std::string bytes = bytes_;
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  EXPECT_EQ(load(*index_, bytes), Status::corrupt);
  EXPECT_EQ(index_->count(), 370U);
  EXPECT_EQ(search(*index_, queries_, 64, 8).heads, before.heads);
}

// Any change of any byte is found by the checksum.
TEST_P(Saved, MutationsAreRefused) {
  const auto index = fresh();
  for (uint32_t seed = 0; seed < cases(1500); ++seed) {
    std::mt19937 random(seed);
    std::string bytes = bytes_;
    const size_t changes = 1 + random() % 4;
    for (size_t i = 0; i < changes; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (bytes == bytes_) continue;
    const Status status = load(*index, bytes);
    ASSERT_TRUE(status == Status::corrupt || status == Status::version) << "seed " << seed;
  }
}

// With the checksum put right, a mutation is either refused or gives an index that can be used: all its
// operations stay within bounds (the sanitizers watch) and its answers are sound.
TEST_P(Saved, ForgedMutationsAreRefusedOrHarmless) {
  int taken = 0;
  for (uint32_t seed = 0; seed < cases(1500); ++seed) {
    std::mt19937 random(seed);
    std::string bytes = bytes_;
    const size_t changes = 1 + random() % 3;
    for (size_t i = 0; i < changes; ++i) {
      // Half of them in the head, where the lengths are.
      const size_t at =
          random() % (random() % 2 == 0 ? std::min<size_t>(bytes.size(), 260) : bytes.size());
      switch (random() % 4) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes[at] = static_cast<char>(0xFF); break;
        case 2: bytes.erase(at, 1 + random() % 8); break;
        default: bytes.insert(at, 1 + random() % 8, static_cast<char>(random())); break;
      }
    }
    const auto index = fresh();
    if (load(*index, resealed(bytes)) != Status::ok) continue;
    ++taken;
    ASSERT_LE(index->count(), 400U);
    const Answer answer = search(*index, queries_, 64, 8);
    for (uint32_t h = 0; h < 3; ++h) {
      std::vector<uint32_t> ids = answer.heads[h].ids;
      for (const uint32_t id : ids) ASSERT_LT(id, index->count()) << "seed " << seed;
      std::sort(ids.begin(), ids.end());
      ASSERT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end()) << "seed " << seed;
    }
    static_cast<void>(index->info());
    index->truncate(index->count() / 2);
    index->append(keys_.view(), {});
    static_cast<void>(search(*index, queries_, 64, 8));
  }
  EXPECT_GT(taken, 0) << "no mutation got past the checks: they test nothing behind the checksum";
}

TEST_P(Saved, AbsurdLengthsCostNoMemory) {
  // Each aligned 8-byte word in turn made enormous, under a right checksum.
  const size_t step = std::max<size_t>(8, bytes_.size() / cases(400));
  for (size_t at = 0; at + 16 < bytes_.size(); at += at < 400 ? 1 : step) {
    for (const uint64_t value :
         {~uint64_t{0}, uint64_t{1} << 62, uint64_t{1} << 31, uint64_t{1} << 24}) {
      std::string bytes = bytes_;
      std::memcpy(bytes.data() + at, &value, 8);
      static_cast<void>(load(*fresh(), resealed(bytes)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Saved, ::testing::ValuesIn(kSavedSpecs));

TEST(Checksum, DoesNotDependOnTheDivision) {
  std::mt19937 random(62);
  std::string bytes(1000, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  Checksum whole;
  whole.update(bytes.data(), bytes.size());
  for (int i = 0; i < 100; ++i) {
    Checksum pieces;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(random() % 40, bytes.size() - at);
      pieces.update(bytes.data() + at, n);
      at += n;
    }
    EXPECT_EQ(pieces.value(), whole.value());
  }
  // XXH3_64bits with seed 0, as xxHash's own documentation and tests have it.
  EXPECT_EQ(Checksum().value(), 0x2D06800538D394C2U);
  Checksum shorter;
  shorter.update(bytes.data(), 999);
  EXPECT_NE(shorter.value(), whole.value());
}

}  // namespace
}  // namespace keyhole::index::test
