// Keys that are turned to new positions: by a stand-in for llama.cpp's CPU backend, which computes the node in double,
// and by as many threads as it is told.
#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "tools/engines/llama.cpp/cpu_backend.h"
#include "tools/engines/llama.cpp/rewriting.h"
#include "tools/engines/llama.cpp/session.h"

namespace keyhole::llama_cpp {
namespace {

constexpr float kBase = 10000.0F;

int threads_of_last = -1;

/// A ROPE of pairs that lie side by side, without scaling.
void turn_pairs(const ggml_tensor* node) {
  const ggml_tensor* x = node->src[0];
  const auto* positions = static_cast<const int32_t*>(node->src[1]->data);
  for (int64_t token = 0; token < x->ne[2]; ++token) {
    for (int64_t head = 0; head < x->ne[1]; ++head) {
      auto* row = reinterpret_cast<float*>(static_cast<char*>(x->data) + token * x->nb[2] +
                                           head * x->nb[1]);
      for (int64_t i = 0; i < x->ne[0]; i += 2) {
        const double angle =
            positions[token] *
            std::pow(double{kBase}, -static_cast<double>(i) / static_cast<double>(x->ne[0]));
        const double a = row[i], b = row[i + 1];
        row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
        row[i + 1] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
      }
    }
  }
}

}  // namespace

CpuBackend::CpuBackend() = default;
CpuBackend::~CpuBackend() = default;
void CpuBackend::compute(ggml_tensor* node) {
  threads_of_last = threads_;
  turn_pairs(node);
}

namespace {

struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

// Two heads of eight components, of which the middle four are turned.
TEST(LlamaCppKeyTurns, TurnsThePartOfEachHeadThatTheNodeTurnsOnTheThreadsItIsTold) {
  constexpr int64_t kHeads = 2, kComponents = 8, kFirst = 2, kTurned = 4, kTokens = 3;
  const std::unique_ptr<ggml_context, FreeContext> memory(
      ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
  ggml_tensor* cells =
      ggml_new_tensor_3d(memory.get(), GGML_TYPE_F32, kComponents, kHeads, kTokens);
  ggml_tensor* part = ggml_view_3d(memory.get(), cells, kTurned, kHeads, kTokens, cells->nb[1],
                                   cells->nb[2], kFirst * sizeof(float));
  ggml_tensor* by = ggml_new_tensor_1d(memory.get(), GGML_TYPE_I32, kTokens);
  const ggml_tensor* node =
      ggml_rope_ext_inplace(memory.get(), part, by, nullptr, static_cast<int>(kTurned),
                            GGML_ROPE_TYPE_NORMAL, 0, kBase, 1.0F, 0.0F, 1.0F, 0.0F, 0.0F);

  // Numbers that 16 bits have, side by side.
  std::vector<ggml_fp16_t> keys(kTokens * kHeads * kComponents);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = ggml_fp32_to_fp16(static_cast<float>(static_cast<int>(i * 7 % 13) - 6) / 4.0F);
  }
  const std::vector<ggml_fp16_t> before = keys;
  const Rows rows{keys.data(),    Number::kF16, kTokens,
                  kHeads,         kComponents,  kHeads * kComponents * 2,
                  kComponents * 2};
  const std::vector<int32_t> turns{0, -3, 40};
  KeyTurns keys_of_layers;
  keys_of_layers.set_threads(3);
  keys_of_layers.turn(1, rows, turns);  // of no layer that was turned
  EXPECT_EQ(threads_of_last, -1);
  keys_of_layers.learn(1, node, kHeads, kComponents);
  keys_of_layers.turn(1, rows, turns);
  EXPECT_EQ(threads_of_last, 3);
  for (size_t i = 0; i < keys.size(); i += 2) {
    const int64_t component = static_cast<int64_t>(i) % kComponents;
    const auto token = i / (kHeads * kComponents);
    const double a = ggml_fp16_to_fp32(before[i]), b = ggml_fp16_to_fp32(before[i + 1]);
    const bool is_turned = component >= kFirst && component < kFirst + kTurned;
    const double angle =
        is_turned
            ? turns[token] * std::pow(double{kBase},
                                      -static_cast<double>(component - kFirst) / double{kTurned})
            : 0.0;
    EXPECT_NEAR(ggml_fp16_to_fp32(keys[i]), a * std::cos(angle) - b * std::sin(angle), 2e-3) << i;
    EXPECT_NEAR(ggml_fp16_to_fp32(keys[i + 1]), a * std::sin(angle) + b * std::cos(angle), 2e-3)
        << i;
  }
  keys_of_layers.set_threads(1);
  keys_of_layers.turn(1, rows, turns);
  EXPECT_EQ(threads_of_last, 1);
}

}  // namespace
}  // namespace keyhole::llama_cpp
