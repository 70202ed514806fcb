// States of many tokens made out of one of a few, byte by byte as llama.cpp reads them.
#include "tools/engines/llama.cpp/filled_state.h"

#include <ggml.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    const size_t at = bytes.size();
    bytes.resize(at + sizeof value);
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return *this;
  }
  std::vector<uint8_t> bytes;
};

constexpr uint32_t kLayers = 2, kKeys = 3, kValues = 2;  // components of a row

/// What llama.cpp writes for `tokens` tokens. places: with positions in a picture, as some models have them; behind: of
/// a recurrent layer's state. type: of 16 bits, or said to be. streams: of which the others are empty.
std::vector<uint8_t> state(uint32_t tokens, float key, float value, bool places, bool recurrent,
                           ggml_type type = GGML_TYPE_F16, uint32_t streams = 1) {
  Bytes b;
  b.put(uint32_t{0xABCD}).put(int32_t{0}).put(streams).put(tokens);
  for (uint32_t i = 0; i < tokens; ++i) {
    b.put(i).put(uint32_t{1});
    if (places) b.put(i).put(i).put(int32_t{77});
    b.put(int32_t{0});
  }
  b.put(uint32_t{0}).put(kLayers);
  for (const bool values : {false, true}) {
    const uint32_t components = values ? kValues : kKeys;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      b.put(static_cast<int32_t>(type)).put(uint64_t{components * 2});
      for (uint32_t i = 0; i < tokens * components; ++i) {
        b.put(ggml_fp32_to_fp16(values ? value : i % 2 == 0 ? key : 0 - key));
      }
    }
  }
  for (uint32_t i = 1; i < streams; ++i) b.put(uint32_t{0});
  if (recurrent) b.put(uint32_t{1}).put(tokens - 1).put(uint32_t{0}).put(uint64_t{0x1234567890});
  return b.bytes;
}

TEST(LlamaCppFilledState, IsWhatLlamaCppWritesOfSoManyTokensButForKAndV) {
  for (const bool places : {false, true}) {
    for (const bool recurrent : {false, true}) {
      const FilledState filled(state(3, 2.0F, 0.5F, places, recurrent), 1000);
      EXPECT_NEAR(filled.keys(), 2.0F, 1e-3F);
      EXPECT_NEAR(filled.values(), 0.5F, 1e-3F);
      const std::vector<uint8_t> expected = state(1000, 0, 0, places, recurrent);
      ASSERT_EQ(filled.size(), expected.size());
      const std::vector<uint8_t> found(filled.data(), filled.data() + filled.size());
      EXPECT_TRUE(found == expected) << places << recurrent;
    }
  }
}

TEST(LlamaCppFilledState, QuantisedRowsAreZeros) {
  for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
    const FilledState filled(state(3, 1, 1, false, false, type), 1000);
    const std::vector<uint8_t> found(filled.data(), filled.data() + filled.size());
    EXPECT_TRUE(found == state(1000, 0, 0, false, false, type)) << ggml_type_name(type);
  }
}

TEST(LlamaCppFilledState, OtherStreamsAreEmpty) {
  for (const bool recurrent : {false, true}) {
    const auto of = [&](uint32_t tokens, float x) {
      return state(tokens, x, x, false, recurrent, GGML_TYPE_F16, 4);
    };
    const FilledState filled(of(3, 1), 1000);
    const std::vector<uint8_t> found(filled.data(), filled.data() + filled.size());
    EXPECT_TRUE(found == of(1000, 0)) << recurrent;
  }
}

TEST(LlamaCppFilledState, RefusesWhatItDoesNotUnderstand) {
  std::vector<uint8_t> few = state(3, 1, 1, false, false);
  for (size_t bytes = 0; bytes < few.size(); ++bytes) {
    EXPECT_THROW(FilledState({few.data(), bytes}, 10), std::runtime_error) << bytes;
  }
  few[8] = 2;  // streams, of which the second is not there
  EXPECT_THROW(FilledState(few, 10), std::runtime_error);
  few = state(3, 1, 1, false, false, GGML_TYPE_F16, 2);
  few[few.size() - 4] = 1;  // its tokens
  EXPECT_THROW(FilledState(few, 10), std::runtime_error);
  few = state(3, 1, 1, false, false, GGML_TYPE_F64);
  EXPECT_THROW(FilledState(few, 10), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::llama_cpp
