// Which layers of a session have codes of their offloaded rows on the device, and what these look like.
//
// A layer has them where every KV head's index is `codes` with the same bits and its budget lets the codes stand for all
// rows that are not read (KEYHOLE_TAIL_CODES); all such layers of a session share one shape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cpu/code_layout.h"
#include "gpu/codes.h"
#include "index/types/factory.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

struct CodePlan {
  CodeShape shape;
  uint32_t exact_rows = 0;   ///< N: rows of a KV head that a step reads exactly
  std::vector<char> layers;  ///< [layer] it has codes

  [[nodiscard]] bool any() const {
    return std::find(layers.begin(), layers.end(), char{1}) != layers.end();
  }

  bool operator==(const CodePlan& o) const {
    return shape.key_bits == o.shape.key_bits && shape.value_bits == o.shape.value_bits &&
           exact_rows == o.exact_rows && layers == o.layers;
  }
};

/// The bits of indexes with codes by their specs, each of which is parsed once: a session asks for those of all heads
/// whenever a budget changes, and mostly they are one.
class CodeSpecs {
 public:
  /// None: the index has no codes. Throws Error(invalid_argument) for no spec.
  [[nodiscard]] std::optional<index::CodeBits> bits(const std::string& spec);
  /// Specs that were parsed so far.
  [[nodiscard]] size_t parsed() const { return parsed_; }

 private:
  static constexpr size_t kMost = 1024;  ///< as many as heads of a large model
  std::map<std::string, std::optional<index::CodeBits>> known_;
  size_t parsed_ = 0;
};

/// heads: `[layers, kv_heads]`.
[[nodiscard]] CodePlan plan_codes(const SessionParams& params, const ModelShape& model,
                                  std::span<const HeadParams* const> heads, CodeSpecs& specs);

/// Shape of the device's memory for a plan with layers, in sessions of at most so many tokens.
[[nodiscard]] gpu::CodesShape codes_shape(const CodePlan& plan, uint64_t tokens,
                                          const SessionParams& params, const ModelShape& model);

}  // namespace keyhole::runtime
