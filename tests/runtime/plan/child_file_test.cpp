// Files that hold what is not in another one: what they stand for is what was written, however it came about, they are small
// where it is the parent's, and damage of either file is found.
#include "runtime/plan/child_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <random>
#include <sstream>

#include "runtime/plan/checksum_io.h"
#include "tests/sanitized.h"

namespace keyhole::runtime {
namespace {

using keyhole::test::cases;

/// Bytes that pass for a saved session.
std::string saved(const std::string& content) {
  std::ostringstream out;
  ChecksumWriter writer(out);
  const std::string bytes = "KEYHOLE\x1a" + content;
  writer.bytes(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  writer.finish();
  return out.str();
}

std::string some_bytes(std::mt19937& random, size_t n) {
  std::string s(n, '\0');
  for (char& c : s) c = static_cast<char>(random());
  return s;
}

/// Written in pieces of changing sizes.
std::string child_of(const ByteSource& parent, const std::string& whole, std::mt19937& random,
                     cpu::Pool* pool = nullptr) {
  std::ostringstream file;
  ChildWriter writer(file, parent, "parent.kv", pool);
  std::ostream out(&writer);
  for (size_t at = 0; at < whole.size();) {
    const size_t n = random() % 3 == 0 ? 1 + random() % 10 : 1 + random() % 300000;
    const std::string part = whole.substr(at, n);
    out.write(part.data(), static_cast<std::streamsize>(part.size()));
    at += part.size();
  }
  writer.finish();
  return file.str();
}

std::unique_ptr<ChildSource> open(const std::string& child, const std::string& parent) {
  return std::make_unique<ChildSource>(std::make_unique<MemorySource>(child),
                                       std::make_unique<MemorySource>(parent));
}

std::string all_of(const ByteSource& source) {
  std::string s(source.size(), '\0');
  source.read(0, reinterpret_cast<std::byte*>(s.data()), s.size());
  return s;
}

Status status_of(const std::string& child, const std::string& parent) {
  try {
    (void)all_of(*open(child, parent));
    return Status::ok;
  } catch (const Error& e) {
    EXPECT_NE(*e.what(), '\0');
    return e.status();
  }
}

TEST(ChildFile, StandsForWhatWasWritten) {
  for (uint32_t seed = 1; seed <= cases(24); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::string content = some_bytes(random, random() % 2000000);
    // Stretches of zeros, and what comes again and again.
    for (int i = 0; i < 3 && !content.empty(); ++i) {
      const size_t at = random() % content.size();
      const size_t n = std::min<size_t>(content.size() - at, random() % 200000);
      if (i == 0) {
        std::fill_n(content.begin() + static_cast<std::ptrdiff_t>(at), n, '\0');
      } else {
        content.insert(random() % content.size(), content.substr(at, n));
      }
    }
    const std::string parent = saved(content);
    size_t own = 0;
    const auto edits = random() % 12;
    for (uint32_t i = 0; i < edits; ++i) {
      const size_t at = random() % (content.size() + 1), n = random() % 50000;
      if (random() % 3 == 0) {
        content.erase(at, n);
      } else {
        content.insert(at, some_bytes(random, n));
        own += n;
      }
    }
    const std::string whole = saved(content);
    const MemorySource source(parent);
    std::mt19937 pieces(seed);
    const std::string child = child_of(source, whole, pieces);
    const auto opened = open(child, parent);
    EXPECT_EQ(all_of(*opened), whole);
    // Each edit hides some 4 KiB at most beside its own bytes: up to the next anchor.
    EXPECT_LE(child.size(), own + (edits + 8) * 2 * 4200);
    for (int i = 0; i < 20; ++i) {
      const size_t at = random() % whole.size(), n = random() % (whole.size() - at + 1);
      std::string part(n, '\0');
      opened->read(at, reinterpret_cast<std::byte*>(part.data()), n);
      ASSERT_EQ(part, whole.substr(at, n));
    }
    // Neither the pieces in which it comes nor threads change what is written.
    cpu::Pool pool({.threads = 3});
    std::mt19937 others(seed + 100);
    EXPECT_EQ(child_of(source, whole, others, &pool), child);
  }
}

TEST(ChildFile, OfTheSameBytesIsARecord) {
  std::mt19937 random(3);
  const std::string parent = saved(some_bytes(random, 700000));
  const std::string child = child_of(MemorySource(parent), parent, random);
  EXPECT_LT(child.size(), 200U);
  EXPECT_EQ(all_of(*open(child, parent)), parent);
  // And of bytes that are not there, these.
  const std::string other = saved(some_bytes(random, 5000000));
  EXPECT_LT(child_of(MemorySource(parent), other, random).size(), other.size() + 300);
}

TEST(ChildFile, MayHaveChildren) {
  std::mt19937 random(5);
  std::string content = some_bytes(random, 300000);
  const std::string first = saved(content);
  const std::string second = saved(content += some_bytes(random, 20000));
  const std::string third = saved(content += some_bytes(random, 20000));
  const std::string child = child_of(MemorySource(first), second, random);
  const auto parent = open(child, first);
  const std::string grandchild = child_of(*parent, third, random);
  EXPECT_LT(grandchild.size(), 25000U);
  const ChildSource opened(std::make_unique<MemorySource>(grandchild), open(child, first));
  EXPECT_EQ(all_of(opened), third);
  // Its parent may as well be whole.
  EXPECT_EQ(all_of(*open(grandchild, second)), third);
  EXPECT_EQ(status_of(grandchild, first), Status::invalid_argument);
}

TEST(ChildFile, RefusesAnotherParent) {
  std::mt19937 random(7);
  const std::string content = some_bytes(random, 100000);
  const std::string parent = saved(content), whole = saved(content + "x");
  const std::string child = child_of(MemorySource(parent), whole, random);
  std::string other = parent;
  other.back() = static_cast<char>(other.back() + 1);
  for (const std::string& wrong : {other, whole, std::string("short")}) {
    EXPECT_NE(status_of(child, wrong), Status::ok);
  }
  try {
    (void)open(child, whole);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument);
    const std::string text = e.what();
    EXPECT_NE(text.find(parent_id(MemorySource(parent)).text()), std::string::npos) << text;
    EXPECT_NE(text.find(parent_id(MemorySource(whole)).text()), std::string::npos) << text;
    EXPECT_NE(text.find("parent.kv"), std::string::npos) << text;
  }
  // A parent that is damaged, or none, has no children.
  std::string damaged = parent;
  damaged[5000] = static_cast<char>(damaged[5000] + 1);
  for (const std::string& wrong : {damaged, content}) {
    std::ostringstream out;
    const MemorySource source(wrong);
    try {
      const ChildWriter writer(out, source, "", nullptr);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::corrupt);
    }
  }
}

TEST(ChildFile, RefusesWhatNoChildHas) {
  std::mt19937 random(9);
  std::string content = some_bytes(random, 9000);
  const std::string parent = saved(content);
  content.insert(5000, "something new");
  const std::string whole = saved(content);
  const std::string child = child_of(MemorySource(parent), whole, random);
  for (size_t n = 0; n < child.size(); ++n) {
    ASSERT_NE(status_of(child.substr(0, n), parent), Status::ok) << n << " bytes";
  }
  EXPECT_EQ(status_of(child + "x", parent), Status::corrupt);
  // Whatever is changed, it is another row of bytes at most: memory is read where it is. Of more of the parent's bytes than this
  // has nothing is told.
  for (uint32_t i = 0; i < cases(4000); ++i) {
    std::string changed = child;
    for (uint32_t n = 1 + random() % 3; n != 0; --n) {
      changed[random() % changed.size()] = static_cast<char>(random() % 3 == 0 ? 255 : random());
    }
    try {
      const auto opened = open(changed, parent);
      ASSERT_LE(opened->size(), changed.size() + parent.size());
      (void)all_of(*opened);
    } catch (const Error& e) {
      ASSERT_NE(e.status(), Status::internal);
    }
  }
}

}  // namespace
}  // namespace keyhole::runtime
