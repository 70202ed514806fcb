#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/files/safetensors.h"
#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

using Layout = std::vector<SafetensorsWriter::Declaration>;

std::vector<std::byte> counting(size_t count) {
  std::vector<std::byte> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<std::byte>(i);
  return out;
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TemporaryFolder folder;
  const auto path = folder / "out.safetensors";
  const Layout layout = {{"z", ElementType::f16, {3, 2}},
                         {"a \"quoted\"\n", ElementType::u8, {5}},
                         {"none", ElementType::i64, {0}},
                         {"scalar", ElementType::f32, {}}};
  const std::vector<std::byte> data = counting(12 + 5 + 4);
  SafetensorsWriter writer(path, layout, {{"key", "value"}});
  // Pieces that do not care about the tensors' borders.
  for (size_t i = 0; i < data.size(); i += 4) {
    writer.write(std::span(data).subspan(i, std::min<size_t>(4, data.size() - i)));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.finish();

  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("key"), "value");
  size_t offset = 0;
  for (const auto& tensor : layout) {
    const StoredTensor& view = file.tensor(tensor.name);
    EXPECT_EQ(view.type, tensor.type);
    EXPECT_EQ(view.shape, tensor.shape);
    const std::span expected = std::span(data).subspan(offset, view.bytes.size());
    EXPECT_TRUE(std::equal(view.bytes.begin(), view.bytes.end(), expected.begin())) << tensor.name;
    offset += view.bytes.size();
  }
  EXPECT_EQ(offset, data.size());
  // Mapped at a page, the first tensor can be read in place by any instruction set.
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensor("z").bytes.data()) % 64, 0U);
  EXPECT_EQ(files_in(folder.path()), 1U) << "nothing is left beside it";
}

TEST(SafetensorsWriter, LeavesTheOldFileUntilItIsFinished) {
  const TemporaryFolder folder;
  const auto path = folder / "out.safetensors";
  write_file(path, std::string("old"));
  {
    SafetensorsWriter writer(path, {{"a", ElementType::u8, {2}}}, {});
    writer.write(counting(1));
    const std::string error = error_of([&] { writer.finish(); });
    EXPECT_NE(error.find("declares 2"), std::string::npos) << error;
    EXPECT_NE(error.find("only 1"), std::string::npos) << error;
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(files_in(folder.path()), 1U) << "nothing is left beside it";
}

TEST(SafetensorsWriter, RefusesMoreThanWasDeclared) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder / "out", {{"a", ElementType::u8, {2}}}, {});
  EXPECT_NE(error_of([&] { writer.write(counting(3)); }).find("declares 2"), std::string::npos);
  writer.write(counting(2));
  writer.finish();
  EXPECT_FALSE(error_of([&] { writer.finish(); }).empty());
}

TEST(SafetensorsWriter, RefusesLayoutsThatCannotBe) {
  const TemporaryFolder folder;
  const auto refused = [&](const Layout& layout) {
    return error_of([&] { SafetensorsWriter(folder / "out", layout, {}); });
  };
  EXPECT_NE(refused({{"a", ElementType::u8, {1}}, {"a", ElementType::u8, {1}}}).find("twice"),
            std::string::npos);
  EXPECT_FALSE(refused({{"__metadata__", ElementType::u8, {1}}}).empty());
  EXPECT_NE(refused({{"a", ElementType::i64, {size_t{1} << 61U}}}).find("overflow"),
            std::string::npos);
  EXPECT_NE(
      refused({{"a", ElementType::u8, {SIZE_MAX}}, {"b", ElementType::u8, {1}}}).find("overflow"),
      std::string::npos);
}

TEST(SafetensorsWriter, NamesAFolderThatIsNotThere) {
  const std::string error = error_of([] {
    SafetensorsWriter("/nonexistent/out", {{"a", ElementType::u8, {1}}}, {});
  });
  EXPECT_NE(error.find("/nonexistent/out"), std::string::npos) << error;
  EXPECT_NE(error.find("No such file"), std::string::npos) << error;
}

}  // namespace
}  // namespace keyhole
