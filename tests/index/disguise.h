// Heads whose channels look different although no model can tell them apart: their sizes, and how channels are
// changed.
#pragma once

#include <initializer_list>
#include <vector>

#include "tests/index/keys.h"

namespace keyhole::index::test {

inline constexpr uint32_t kHeadDim = 64, kHeadGroup = 2;
inline constexpr size_t kHeadRows = 3300, kHeadTraining = 512, kHeadGroups = 12;

/// A disguise: 6 channels of keys are multiplied by `factor`, and those of their queries divided by it; 3 have
/// `offset` added.
struct Disguise {
  float factor, offset;

  /// Changes keys and queries. channels: all of them, shuffled.
  void put_on(const std::vector<uint32_t>& channels, std::vector<float>& keys,
              std::initializer_list<std::vector<float>*> queries) const {
    for (size_t c = 0; c < 6; ++c) {
      for (size_t i = channels[c]; i < keys.size(); i += kHeadDim) keys[i] *= factor;
      for (std::vector<float>* q : queries) {
        for (size_t i = channels[c]; i < q->size(); i += kHeadDim) (*q)[i] /= factor;
      }
    }
    for (size_t c = 5; c < 8; ++c) {
      for (size_t i = channels[c]; i < keys.size(); i += kHeadDim) keys[i] += offset;
    }
  }
};

}  // namespace keyhole::index::test
