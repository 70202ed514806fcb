// Memory of graphs on a card that is made of host memory: what nodes read and write has it, masks do not until somebody
// reads them.
#include "tools/engines/llama.cpp/cuda/graph_memory.h"

#include <cuda_runtime_api.h>
#include <ggml-backend-impl.h>
#include <ggml-impl.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/tools/engines/llama.cpp/host_card/buffers.h"
#include "tools/engines/llama.cpp/cuda/host_inputs.h"

namespace keyhole::llama_cpp {
namespace {

size_t used() {
  size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

constexpr size_t kKiB = 1024, kOfMask = 512 * kKiB, kOfRows = 64 * kKiB;

class GraphMemory : public testing::Test {
 protected:
  void SetUp() override {
    before_ = used();
    buffer_ = make_graph_buffer(&type_, 0, kOfMask + 4 * kOfRows, kOfMask);
    ASSERT_NE(buffer_, nullptr);
    ggml_backend_buffer_set_usage(buffer_, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    watch_inputs(buffer_);
    context_ = ggml_init({1U << 20U, nullptr, true});
    mask_ = ggml_new_tensor_2d(context_, GGML_TYPE_F16, 256, 1024);
    ggml_set_name(mask_, "KEYHOLE0#attn_inp_kq_mask#0");
    rows_ = ggml_new_tensor_1d(context_, GGML_TYPE_F32, kOfRows / 4);
    sum_ = ggml_add(context_, rows_, rows_);
    place(mask_, 0);
    place(rows_, kOfMask);
    place(sum_, kOfMask + kOfRows);
    graph_ = ggml_new_graph(context_);
    ggml_build_forward_expand(graph_, sum_);
    // As attention reads it.
    sum_->src[3] = mask_;
  }
  void TearDown() override {
    ggml_backend_buffer_free(buffer_);
    ggml_free(context_);
    EXPECT_EQ(used(), before_) << "all memory is given back";
  }
  void place(ggml_tensor* tensor, size_t offset) {
    auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer_));
    ASSERT_EQ(ggml_backend_tensor_alloc(buffer_, tensor, base + offset), GGML_STATUS_SUCCESS);
  }

  ggml_backend_buffer_type type_ = host_card_buffers();
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_context* context_ = nullptr;
  ggml_tensor *mask_ = nullptr, *rows_ = nullptr, *sum_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  size_t before_ = 0;
};

TEST_F(GraphMemory, IsTakenAtOnceButForMasks) {
  EXPECT_EQ(used() - before_, 4 * kOfRows);
  EXPECT_TRUE(is_graph_buffer(buffer_));
  EXPECT_EQ(ggml_backend_buffer_get_size(buffer_), kOfMask + 4 * kOfRows);
  hold_graph(graph_);
  EXPECT_EQ(used() - before_, 4 * kOfRows) << "of what was taken";
  const std::vector<float> x(kOfRows / 4, 3.0F);
  ggml_backend_tensor_set(rows_, x.data(), 0, kOfRows);
  std::memcpy(sum_->data, x.data(),
              kOfRows);  // as a kernel would: a fault where there is no memory
  std::vector<float> back(x.size());
  ggml_backend_tensor_get(sum_, back.data(), 0, kOfRows);
  EXPECT_EQ(back, x);
}

TEST_F(GraphMemory, MasksStayInHostMemoryUntilTheyAreRead) {
  std::vector<uint16_t> mask(kOfMask / 2);
  std::iota(mask.begin(), mask.end(), uint16_t{1});
  ggml_backend_tensor_set(mask_, mask.data(), 0, kOfMask);
  hold_graph(graph_);
  EXPECT_EQ(host_input(mask_), mask.data());
  EXPECT_EQ(used() - before_, 4 * kOfRows);
  bring_input(sum_);
  bring_input(rows_);
  EXPECT_EQ(used() - before_, 4 * kOfRows) << "these are no masks";

  bring_input(mask_);
  EXPECT_EQ(used() - before_, kOfMask + 2 * kOfRows) << "what was taken is used up, then more";
  EXPECT_EQ(std::memcmp(mask_->data, mask.data(), kOfMask), 0);
  EXPECT_EQ(host_input(mask_), mask.data());

  // The next batch's mask, which is read back.
  std::vector<uint16_t> next(mask.rbegin(), mask.rend()), back(mask.size());
  ggml_backend_tensor_set(mask_, next.data(), 0, kOfMask);
  ggml_backend_tensor_get(mask_, back.data(), 0, kOfMask);
  EXPECT_EQ(back, next);
}

TEST_F(GraphMemory, WhatLiesWhereAMaskDidIsNotWrittenOver) {
  const std::vector<uint16_t> mask(kOfMask / 2, 7);
  ggml_backend_tensor_set(mask_, mask.data(), 0, kOfMask);
  // As logits, which come behind the last attention.
  ggml_tensor* late = ggml_add(context_, rows_, rows_);
  place(late, 0);
  hold_tensor(late);
  const std::vector<float> x(kOfRows / 4, 3.0F);
  std::memcpy(late->data, x.data(), kOfRows);
  std::vector<float> back(x.size());
  ggml_backend_tensor_get(late, back.data(), 0, kOfRows);
  EXPECT_EQ(back, x);
}

TEST_F(GraphMemory, MasksWrittenInPartsAreOnTheCard) {
  std::vector<uint16_t> mask(kOfMask / 2, 7);
  ggml_backend_tensor_set(mask_, mask.data(), 0, kOfMask);
  const uint16_t other = 9;
  ggml_backend_tensor_set(mask_, &other, 2, sizeof other);
  EXPECT_EQ(host_input(mask_), nullptr);
  EXPECT_EQ(static_cast<const uint16_t*>(mask_->data)[0], 7);
  EXPECT_EQ(static_cast<const uint16_t*>(mask_->data)[1], 9);
}

}  // namespace
}  // namespace keyhole::llama_cpp
