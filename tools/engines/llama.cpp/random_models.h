// Small models of random weights, one for each class of models that has something of its own in its cache or its
// attention. llama.cpp makes the tensors that a model of these dimensions has; no file is read.
#pragma once

#include <llama.h>

#include <cstdint>
#include <span>
#include <string>

namespace keyhole::llama_cpp {

struct ModelClass {
  const char* name;
  /// llama.cpp's name of the architecture.
  const char* architecture;
  uint32_t layers;
  uint32_t q_heads;
  uint32_t kv_heads;
  uint32_t head_dim;
  /// How many of its layers have a cache, and how many of them Keyhole attends where llama.cpp's cache is filled as
  /// well.
  int cached;
  int attended;
};

/// All classes. Vocabularies have kVocabulary tokens without text.
[[nodiscard]] std::span<const ModelClass> model_classes();
constexpr uint32_t kVocabulary = 256;

/// What scores of attention spread by, in nats: few tokens have most of the weight.
constexpr float kSharp = 3;
/// Many tokens weigh.
constexpr float kFlat = 1;

/// A model of the class, freed by llama_model_free(); the same one for the same seed. Scores of its attention spread by
/// `spread`, but where an architecture norms queries and keys without weights (llama4: by one). NULL: llama.cpp refuses
/// it, and its log says why.
[[nodiscard]] llama_model* make_random_model(const ModelClass& model_class, uint32_t seed,
                                             float spread, const llama_model_params& params);

}  // namespace keyhole::llama_cpp
