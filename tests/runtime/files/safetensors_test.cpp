#include "runtime/files/safetensors.h"

#include <gtest/gtest.h>

#include "runtime/files/input_file.h"
#include "tests/runtime/files/safetensors_bytes.h"
#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

std::string error_of_bytes(const std::vector<std::byte>& bytes) {
  return error_of([&] { validate_safetensors(bytes); });
}

TEST(Safetensors, ReadsTensorsInPlace) {
  const TemporaryFolder folder;
  // Two tensors in falling order of names, a scalar, an empty one; metadata; trailing blanks.
  write_file(folder / "a.safetensors",
             safetensors_bytes(R"({"__metadata__":{"format":"pt","a":""},)"
                               R"("w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
                               R"("b":{"dtype":"U8","shape":[],"data_offsets":[12,13]},)"
                               R"("e":{"dtype":"F32","shape":[0,7],"data_offsets":[13,13]},)"
                               R"("i":{"dtype":"I64","shape":[1],"data_offsets":[13,21]}}    )",
                               21));
  const SafetensorsFile file(folder / "a.safetensors");
  EXPECT_EQ(file.tensors().size(), 4U);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_TRUE(file.contains("w"));
  EXPECT_FALSE(file.contains("__metadata__"));

  const StoredTensor& w = file.tensor("w");
  EXPECT_EQ(w.type, ElementType::bf16);
  EXPECT_EQ(w.shape, (std::vector<size_t>{2, 3}));
  EXPECT_EQ(w.elements(), 6U);
  EXPECT_EQ(std::to_integer<int>(w.bytes[11]), 11);
  EXPECT_EQ(w.to_f32().size(), 6U);
  EXPECT_EQ(file.tensor("b").elements(), 1U);
  EXPECT_EQ(file.tensor("e").elements(), 0U);
  EXPECT_EQ(std::to_integer<int>(file.tensor("i").bytes[0]), 13);
  EXPECT_NE(error_of([&] { (void)file.tensor("i").to_f32(); }).find("I64"), std::string::npos);
}

TEST(Safetensors, ReaderCopiesTensorsOfAFileThatOthersMayCut) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  write_file(path, safetensors_bytes(R"({"__metadata__":{"format":"pt"},)"
                                     R"("w":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},)"
                                     R"("e":{"dtype":"F32","shape":[0],"data_offsets":[12,12]},)"
                                     R"("b":{"dtype":"U8","shape":[5],"data_offsets":[12,17]}})",
                                     17));
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  ASSERT_EQ(reader.tensors().size(), 3U);
  const TensorEntry& b = reader.tensors().at("b");
  EXPECT_EQ(b.shape, (std::vector<size_t>{5}));
  std::vector<std::byte> bytes(5);
  reader.read(b, bytes);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(std::to_integer<int>(bytes[i]), 12 + i);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THROW(reader.read(b, bytes), CannotRead);
  EXPECT_NE(error_of([&] { reader.read(b, bytes); }).find("was cut meanwhile"), std::string::npos);
  std::vector<std::byte> others(12);
  EXPECT_NO_THROW(reader.read(reader.tensors().at("w"), others));
  EXPECT_NO_THROW(reader.read(reader.tensors().at("e"), {}));
  EXPECT_NE(error_of([&] { const SafetensorsReader again(path); }).find("a.safetensors"),
            std::string::npos);
}

TEST(Safetensors, NamesAbsentTensorsAndWhatIsThere) {
  const TemporaryFolder folder;
  write_file(folder / "a.safetensors",
             safetensors_bytes(R"({"alpha":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1));
  const SafetensorsFile file(folder / "a.safetensors");
  const std::string error = error_of([&] { (void)file.tensor("beta"); });
  EXPECT_NE(error.find("a.safetensors"), std::string::npos) << error;
  EXPECT_NE(error.find("\"beta\""), std::string::npos) << error;
  EXPECT_NE(error.find("\"alpha\""), std::string::npos) << error;
}

TEST(Safetensors, NamesFilesThatCannotBeOpened) {
  const TemporaryFolder folder;
  const auto open = [&](const char* name) {
    return error_of([&] { const SafetensorsFile file(folder / name); });
  };
  EXPECT_NE(open("absent").find("No such file"), std::string::npos) << open("absent");
  EXPECT_NE(open(".").find("not a regular file"), std::string::npos) << open(".");
  write_file(folder / "empty", std::string());
  EXPECT_NE(open("empty").find("0 bytes"), std::string::npos) << open("empty");
  const auto read = [&](const char* name) {
    return error_of([&] { const SafetensorsReader reader(folder / name); });
  };
  EXPECT_NE(read("absent").find("No such file"), std::string::npos) << read("absent");
  EXPECT_NE(read("empty").find("0 bytes"), std::string::npos) << read("empty");
}

struct Malformed {
  const char* name;
  std::vector<std::byte> bytes;
  std::vector<const char*> said;  ///< parts of the error's text
};

class SafetensorsMalformed : public testing::TestWithParam<Malformed> {};

TEST_P(SafetensorsMalformed, IsRefusedWithItsReason) {
  const std::string error = error_of_bytes(GetParam().bytes);
  EXPECT_FALSE(error.empty());
  for (const char* part : GetParam().said) EXPECT_NE(error.find(part), std::string::npos) << error;
}

std::vector<std::byte> one_tensor(const std::string& description, size_t data_bytes) {
  return safetensors_bytes("{\"t\":" + description + "}", data_bytes);
}

const Malformed kMalformed[] = {
    {"no_length", std::vector<std::byte>(7), {"7 bytes"}},
    {"length_without_header", safetensors_bytes("", 0), {"length is 0"}},
    {"length_beyond_the_file", safetensors_bytes("{}", 0, 3), {"length is 3", "only 2"}},
    {"length_of_another_format",
     safetensors_bytes("{}", 0, 0x04034b50'04034b50ULL),
     {"at most 100000000"}},
    {"length_wraps_around", safetensors_bytes("{}", 0, ~uint64_t{0}), {"18446744073709551615"}},
    {"no_json", safetensors_bytes("{]", 0), {"not valid JSON"}},
    {"json_cut_short", safetensors_bytes(R"({"t":{"dtype")", 0), {"not valid JSON"}},
    {"no_utf8", safetensors_bytes("{\"\xff\xfe\":{}}", 0), {"not valid JSON"}},
    {"no_object", safetensors_bytes("[1]", 0), {"array", "object"}},
    {"deep_nesting", safetensors_bytes(std::string(100000, '['), 0), {"nested"}},
    {"name_twice",
     safetensors_bytes(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                       2),
     {"\"t\" twice"}},
    {"field_twice",
     one_tensor(R"({"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1),
     {"\"dtype\" twice"}},
    {"tensor_no_object", one_tensor("7", 0), {"\"t\"", "object"}},
    {"field_unknown",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1})", 1),
     {"\"x\"", "allowed are dtype, shape and data_offsets"}},
    {"field_missing", one_tensor(R"({"dtype":"U8","data_offsets":[0,1]})", 1), {"no shape"}},
    {"dtype_unknown",
     one_tensor(R"({"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]})", 1),
     {"\"F8_E4M3\"", "BF16"}},
    {"dtype_no_string",
     one_tensor(R"({"dtype":4,"shape":[1],"data_offsets":[0,1]})", 1),
     {"dtype is not a string"}},
    {"shape_no_array",
     one_tensor(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})", 1),
     {"shape is not an array"}},
    {"shape_negative",
     one_tensor(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})", 1),
     {"axis", "non-negative integer"}},
    {"shape_fraction",
     one_tensor(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})", 1),
     {"axis", "non-negative integer"}},
    {"shape_beyond_64_bits",
     one_tensor(R"({"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]})", 1),
     {"axis"}},
    // 2^32 * 2^32 * 1 byte is 0 modulo 2^64, which is what an unchecked product would find.
    {"shape_overflows",
     one_tensor(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0),
     {"overflows"}},
    {"shape_overflows_by_its_dtype",
     one_tensor(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})", 0),
     {"overflows"}},
    {"shape_too_small",
     one_tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,12]})", 12),
     {"takes 8 bytes", "span 12"}},
    {"offsets_three",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,2]})", 1),
     {"two numbers"}},
    {"offsets_negative",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[-1,0]})", 1),
     {"first offset"}},
    {"offsets_falling",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})", 1),
     {"[1, 0)", "ascend"}},
    {"offsets_beyond_the_file",
     one_tensor(R"({"dtype":"U8","shape":[2],"data_offsets":[0,2]})", 1),
     {"[0, 2)", "1 bytes of data"}},
    {"offsets_beyond_64_bits",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]})", 1),
     {"second offset"}},
    {"overlap",
     safetensors_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                       3),
     {"\"b\"", "overlaps"}},
    {"same_bytes_twice",
     safetensors_bytes(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                       2),
     {"overlaps"}},
    {"hole",
     safetensors_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                       3),
     {"\"b\"", "hole"}},
    {"data_nobody_names",
     one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})", 2),
     {"end at byte 1", "holds 2"}},
    {"metadata_no_strings", safetensors_bytes(R"({"__metadata__":{"a":1}})", 0), {"\"a\""}},
    {"metadata_no_object", safetensors_bytes(R"({"__metadata__":[]})", 0), {"__metadata__"}},
};

INSTANTIATE_TEST_SUITE_P(Files, SafetensorsMalformed, testing::ValuesIn(kMalformed),
                         [](const auto& test) { return test.param.name; });

TEST(Safetensors, HidesControlCharactersOfNames) {
  const std::string error =
      error_of_bytes(safetensors_bytes("{\"\\u001b[31mred\":{\"dtype\":\"U8\"}}", 0));
  EXPECT_EQ(error.find('\033'), std::string::npos);
  EXPECT_NE(error.find("red"), std::string::npos) << error;
}

}  // namespace
}  // namespace keyhole
