// The classifiers of a model, read from the file that `keyhole train-saap` writes (its format is described in
// tools/saap/classifier_writer.h). Nothing in the file is trusted: sizes are checked before memory is taken.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "index/partitions/query_classifier.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Trained data by layer and KV head; heads may be without.
class Classifiers {
 public:
  /// None at all.
  Classifiers() = default;
  /// Reads a file for a model. Throws Error(io) where it cannot be read, Error(corrupt) where it contradicts
  /// itself, Error(version) for a newer format, Error(invalid_argument) where it is of another model. Every
  /// text begins with the path.
  /// ropes: one for all layers, or `[layers]`; the file is of the first layer's that does not slide.
  Classifiers(const std::string& path, const ModelShape& model,
              std::span<const index::RopeParams> ropes, const cpu::Kernels& kernels);

  /// Null where the head has none.
  [[nodiscard]] const index::QueryClassifier* of(uint32_t layer, uint32_t kv_head) const {
    const size_t at = size_t{layer} * kv_heads_ + kv_head;
    return at < heads_.size() ? heads_[at].get() : nullptr;
  }
  [[nodiscard]] size_t count() const;

 private:
  uint32_t kv_heads_ = 1;
  std::vector<std::unique_ptr<index::QueryClassifier>> heads_;
};

}  // namespace keyhole::runtime
