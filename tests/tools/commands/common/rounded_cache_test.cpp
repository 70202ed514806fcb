// Caches of ways that have a format: what they are fitted to is read once, and refused where nothing is.
#include "tools/commands/common/rounded_cache.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/temporary_folder.h"
#include "tests/tools/cli/synthetic_trace.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

LlamaConfig model_of(const TraceInfo& info) {
  LlamaConfig model;
  model.layers = static_cast<uint32_t>(info.layers.size());
  model.q_heads = info.q_heads;
  model.kv_heads = info.kv_heads;
  model.head_dim = info.head_dim;
  model.attention_scale = info.scale;
  model.windows.assign(model.layers, 0);
  return model;
}

/// The output of a step in layer 0 behind `tokens` tokens of the trace.
std::vector<float> output_of(KeyholeCache& cache, const SyntheticTrace& trace, size_t tokens) {
  const TraceInfo& info = trace.info;
  const size_t d = info.head_dim, width = size_t{info.kv_heads} * d;
  std::vector<float> k(tokens * width), v(k.size());
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t h = 0; h < info.kv_heads; ++h) {
      for (size_t c = 0; c < d; ++c) {
        k[t * width + h * d + c] = trace.keys[h][t * d + c];
        v[t * width + h * d + c] = trace.values[h][t * d + c];
      }
    }
  }
  const std::vector<float> q(tokens * info.q_heads * d, 0.25F);
  cache.prefill({0, 0, tokens - 1, q.data(), k.data(), v.data()});
  std::vector<float> out(info.q_heads * d);
  cache.attend(0, q.data(), k.data() + (tokens - 1) * width, v.data() + (tokens - 1) * width,
               out.data());
  return out;
}

TEST(RoundedCaches, AreFittedToTheirCalibrationOnce) {
  std::mt19937 random(3);
  const SyntheticTrace trace = make_synthetic_trace({.layers = 1, .tokens = 700}, random);
  const TemporaryFolder folder;
  CacheFlags flags;
  flags.sink = 4;
  flags.window = 64;
  flags.threads = 1;
  flags.model = trace.info.model;
  flags.calibration = folder / "calibration.safetensors";
  trace.write(flags.calibration);
  const LlamaConfig model = model_of(trace.info);
  const AttendSpec oscar{"oscar2", ""};

  RoundedCacheMaker maker;
  KeyholeCache first = maker.make(model, flags, 700, oscar);
  const std::vector<float> expected = output_of(first, trace, 650);
  std::filesystem::remove(flags.calibration);
  KeyholeCache second = maker.make(model, flags, 700, oscar);
  EXPECT_EQ(output_of(second, trace, 650), expected);
  EXPECT_ANY_THROW((void)RoundedCacheMaker().make(model, flags, 700, oscar)) << "nothing to fit to";
}

TEST(RoundedCaches, RefuseACalibrationThatHasNoUse) {
  CacheFlags flags;
  const AttendSpec oscar{"oscar2", ""}, kivi{"kivi2", ""}, codes{"codes", ""};
  EXPECT_NO_THROW(check_calibration_has_use(flags, std::vector{kivi, codes}));
  flags.calibration = "FILE";
  EXPECT_NO_THROW(check_calibration_has_use(flags, std::vector{kivi, oscar}));
  EXPECT_THROW(check_calibration_has_use(flags, std::vector{kivi, codes}), UsageError);
}

}  // namespace
}  // namespace keyhole::tools
