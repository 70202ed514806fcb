#include "cpu/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>

#include "cpu/types.h"

namespace keyhole::cpu::test {
namespace {

size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TEST(ReservedBuffer, ReadsAsZeroAndKeepsWhatIsWritten) {
  for (const size_t bytes : {size_t{1}, size_t{4095}, size_t{4097}, (size_t{8} << 20) + 13}) {
    const ReservedBuffer buffer(bytes);
    ASSERT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(buffer.data()[0], std::byte{0});
    EXPECT_EQ(buffer.data()[bytes - 1], std::byte{0});
    buffer.data()[bytes - 1] = std::byte{7};
    EXPECT_EQ(buffer.data()[bytes - 1], std::byte{7});
  }
}

TEST(ReservedBuffer, ReservesFarMoreThanThereIsMemory) {
#if defined(KEYHOLE_SANITIZED)
  const size_t bytes =
      size_t{1} << 38;  // ThreadSanitizer leaves a program about 1 TiB of addresses
#else
  const size_t bytes = size_t{1} << 43;  // 8 TiB
#endif
  const size_t before = resident_bytes();
  const ReservedBuffer buffer(bytes);
  buffer.data()[bytes / 2] = std::byte{1};
  buffer.data()[bytes - 1] = std::byte{2};
  EXPECT_EQ(buffer.data()[bytes / 2 - 1], std::byte{0});
  EXPECT_LT(resident_bytes(), before + (size_t{64} << 20));
}

TEST(ReservedBuffer, AbsurdSizesAreRefusedWithOutOfMemory) {
  for (const size_t bytes :
       {std::numeric_limits<size_t>::max(), size_t{1} << 63, size_t{1} << 62, size_t{1} << 52}) {
    try {
      const ReservedBuffer buffer(bytes);
      FAIL() << bytes << " bytes were reserved";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::out_of_memory);
      EXPECT_NE(std::string(e.what()).find(std::to_string(bytes)), std::string::npos) << e.what();
    }
  }
}

TEST(ReservedBuffer, ReleasedPagesReadAsZeroAndOthersStay) {
  const size_t bytes = size_t{6} << 20;
  ReservedBuffer buffer(bytes);
  for (size_t i = 0; i < bytes; i += 1000) buffer.data()[i] = std::byte{9};
  const size_t begin = (size_t{1} << 20) + 5;
  const size_t before = resident_bytes();
  buffer.release(begin, bytes);
  EXPECT_LT(resident_bytes() + (size_t{3} << 20), before);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < bytes; i += 1000) {
    if (i < begin) {
      ASSERT_EQ(buffer.data()[i], std::byte{9}) << i;
    } else if (i >= begin + page) {
      ASSERT_EQ(buffer.data()[i], std::byte{0}) << i;
    }
  }
  buffer.data()[bytes - 1] = std::byte{3};
  EXPECT_EQ(buffer.data()[bytes - 1], std::byte{3});
  buffer.release(bytes, bytes);          // nothing to release
  buffer.release(bytes * 2, bytes * 3);  // nor here
  EXPECT_EQ(buffer.data()[bytes - 1], std::byte{3});
}

TEST(ReservedBuffer, MovesLeaveNothingBehind) {
  ReservedBuffer a(100);
  a.data()[50] = std::byte{1};
  ReservedBuffer b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): that is the test
  EXPECT_EQ(a.bytes(), 0U);
  EXPECT_EQ(b.data()[50], std::byte{1});
  ReservedBuffer c;
  c = std::move(b);
  EXPECT_EQ(c.data()[50], std::byte{1});
  EXPECT_EQ(c.bytes(), 100U);
  const ReservedBuffer none(0);
  EXPECT_EQ(none.data(), nullptr);
}

}  // namespace
}  // namespace keyhole::cpu::test
