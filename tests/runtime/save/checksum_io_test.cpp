// Saved sessions as bytes: written by one thread or many they are the same, and every byte of them is in the checksum.
#include "runtime/save/checksum_io.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <fstream>
#include <mutex>
#include <random>
#include <sstream>
#include <system_error>

#include "runtime/files/new_file.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace keyhole::runtime {
namespace {

using Bytes = std::vector<std::byte>;

/// Small values and large arrays in turn.
struct Content {
  explicit Content(uint64_t seed) : random(seed) {
    for (int i = 0; i < 6; ++i) {
      values.push_back(random());
      texts.push_back(std::string(random() % 3 == 0 ? random() % 70000 : random() % 40, 'x'));
      std::vector<Bytes> some(random() % 5);
      for (Bytes& array : some) {
        // Of no bytes, of a few, of several chunks; whole numbers of four.
        const size_t most =
            std::array<size_t, 4>{1, 300, 3 * ChunkSums::kChunk, 100000}[random() % 4];
        array.resize(random() % most / 4 * 4);
        for (std::byte& b : array) b = static_cast<std::byte>(random());
      }
      arrays.push_back(std::move(some));
    }
  }
  void write(ChecksumWriter& out) const {
    for (size_t i = 0; i < values.size(); ++i) {
      out.value(values[i]);
      out.text(texts[i]);
      std::vector<std::span<const std::byte>> all;
      for (const Bytes& array : arrays[i]) all.emplace_back(array);
      out.arrays(all);
    }
    out.finish();
  }
  /// Reads what write() wrote, and looks at it.
  void read(ChecksumReader& in) const {
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(in.value<uint64_t>("value"), values[i]);
      ASSERT_EQ(in.text("text"), texts[i]);
      std::vector<Bytes> seen;
      std::vector<std::span<std::byte>> all;
      size_t wanted = 0;
      for (const Bytes& array : arrays[i]) {
        seen.emplace_back(array.size());
        all.emplace_back(seen.back());
        wanted += array.size();
      }
      std::mutex mutex;
      size_t checked = 0;
      in.arrays(all, "arrays", [&](size_t number, const std::byte* data, size_t n) {
        const std::lock_guard lock(mutex);
        const auto at = static_cast<size_t>(data - seen[number].data());
        EXPECT_EQ(at % 4, 0U) << "an element in two parts";
        EXPECT_TRUE(std::equal(data, data + n, arrays[i][number].begin() + static_cast<long>(at)));
        checked += n;
      });
      ASSERT_EQ(checked, wanted);
      ASSERT_EQ(seen, arrays[i]);
    }
    in.finish();
  }

  std::mt19937_64 random;
  std::vector<uint64_t> values;
  std::vector<std::string> texts;
  std::vector<std::vector<Bytes>> arrays;
};

std::string written(const Content& content) {
  std::ostringstream out;
  ChecksumWriter writer(out);
  content.write(writer);
  return std::move(out).str();
}

TEST(ChecksumIo, IsTheSameByOneThreadAndByMany) {
  cpu::Pool pool({.threads = 3});
  const TemporaryFolder folder;
  for (uint64_t seed = 1; seed <= test::unless_sanitized(12, 3); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Content content(seed);
    const std::string bytes = written(content);
    const std::string path = (folder / "file").string();
    {
      NewFile file(path);
      ChecksumWriter writer(file.stream(), &pool);
      content.write(writer);
      file.commit();
    }
    ASSERT_EQ(read_file(path), bytes);
    const FileSource from_file(path);
    ChecksumReader by_many(from_file, &pool);
    content.read(by_many);
    const MemorySource from_memory(bytes);
    ChecksumReader by_one(from_memory);
    content.read(by_one);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ChecksumIo, TheSumIsOneOfSums) {
  const std::string bytes = written(Content(5));
  const size_t end = bytes.size() - 8;
  ASSERT_GT(end, 3 * (size_t{256} << 10));
  std::vector<uint64_t> sums;
  for (size_t at = 0; at < end; at += size_t{256} << 10) {
    sums.push_back(XXH3_64bits(bytes.data() + at, std::min(size_t{256} << 10, end - at)));
  }
  uint64_t stored = 0;
  std::copy_n(bytes.data() + end, 8, reinterpret_cast<char*>(&stored));
  EXPECT_EQ(stored, XXH3_64bits(sums.data(), sums.size() * 8));
}

TEST(ChecksumIo, DamageIsNoticed) {
  cpu::Pool pool({.threads = 2});
  const Content content(7);
  const std::string good = written(content);
  std::mt19937 random(3);
  const auto refused = [&](const std::string& bytes) {
    const MemorySource source(bytes);
    ChecksumReader in(source, &pool);
    // Lengths are not trusted, numbers are whatever they are: only the sum tells.
    for (size_t i = 0; i < content.values.size(); ++i) {
      (void)in.value<uint64_t>("value");
      (void)in.text("text");
      std::vector<Bytes> seen;
      std::vector<std::span<std::byte>> all;
      for (const Bytes& array : content.arrays[i])
        all.emplace_back(seen.emplace_back(array.size()));
      in.arrays(all, "arrays");
    }
    in.finish();
  };
  refused(good);
  for (int i = 0; i < 40; ++i) {
    std::string bad = good;
    bad[random() % bad.size()] ^= static_cast<char>(1 << (random() % 8));
    EXPECT_THROW(refused(bad), Error);
    EXPECT_THROW(refused(good.substr(0, random() % good.size())), Error);
  }
  EXPECT_THROW(refused(good + "x"), Error);
}

TEST(ChecksumIo, AFileThatIsCutMeanwhileIsAnError) {
  const TemporaryFolder folder;
  const std::string path = (folder / "file").string();
  const Content content(7);
  std::ofstream(path, std::ios::binary) << written(content);
  const FileSource source(path);
  std::filesystem::resize_file(path, 1000);
  ChecksumReader in(source);
  try {
    content.read(in);
    ADD_FAILURE() << "it was read";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::io) << e.what();
  }
}

TEST(ChecksumIo, WhatCannotBeWrittenLeavesNothing) {
  cpu::Pool pool({.threads = 2});
  const TemporaryFolder folder;
  rlimit before{};
  ASSERT_EQ(0, getrlimit(RLIMIT_FSIZE, &before));
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);  // writes fail with EFBIG instead
  rlimit small = before;
  small.rlim_cur = 700000;
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &small));
  const Content content(5);
  EXPECT_THROW(
      {
        NewFile file(folder / "file");
        ChecksumWriter writer(file.stream(), &pool);
        content.write(writer);
        file.commit();
      },
      std::system_error);
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &before));
  signal(SIGXFSZ, old_handler);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace keyhole::runtime
