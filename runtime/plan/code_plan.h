// Which layers of a session have codes of their offloaded rows on the device, and what these look like.
//
// A layer can have them where every KV head's index is `codes` with the same bits and its budget lets the codes stand for
// all rows that are not read (KEYHOLE_TAIL_CODES); all such layers of a session share the bits of the first. Where there is no room
// for all of them, the first ones go to the host, which attends them by codes of the same bits. A token passes the layers
// one after the other, so host and device never work side by side in a sequence, wherever the host's layers lie. Together
// at the beginning, beside dense layers, which are mostly the first, they leave the device one unbroken run of layers, and
// in a prompt that is computed layer by layer the host's rows are the first to be there.
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
  CodeShape shape;            ///< of the first; of layers of different shapes the bits of all
  uint32_t exact_rows = 0;    ///< N: rows of a KV head that a step reads exactly
  bool rows_by_host = false;  ///< who reads these (keyhole_rows_by)
  std::vector<char> layers;   ///< [layer] it has codes

  [[nodiscard]] bool any() const { return count() != 0; }
  [[nodiscard]] uint32_t count() const {
    return static_cast<uint32_t>(std::count(layers.begin(), layers.end(), char{1}));
  }
  /// The first layer that has codes; 0 where none has.
  [[nodiscard]] uint32_t first() const;
  /// "4 to 31" or the like: the layers that have codes.
  [[nodiscard]] std::string text() const;

  bool operator==(const CodePlan& o) const {
    return shape.key_bits == o.shape.key_bits && shape.value_bits == o.shape.value_bits &&
           exact_rows == o.exact_rows && rows_by_host == o.rows_by_host && layers == o.layers;
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
/// Throws Error(invalid_argument) where KEYHOLE_PLACE_DEVICE asks for the device, and of the layers that are not dense the plan
/// has none for it.
void check_placement(const CodePlan& plan, const SessionParams& params, const ModelShape& model);

/// Bytes of device memory, and of pinned host memory.
struct CodeBytes {
  uint64_t device = 0;
  uint64_t pinned = 0;
};

/// What the codes of the plan's layers take, and K and V of their rows, or where the host reads these the exchange with it, in
/// sessions of at most so many tokens. Throws Error(invalid_argument) for a shape that no device has.
[[nodiscard]] CodeBytes code_bytes(const CodePlan& plan, uint64_t tokens,
                                   const SessionParams& params, const ModelShape& model);
/// What pinned_memory_limit leaves for K and V beside the exchange with the device; UINT64_MAX: no limit.
[[nodiscard]] uint64_t pinned_room(const SessionParams& params, const ModelShape& model);
/// The plan, whose exact rows the host reads where exact_rows_by leaves that open and there is less room than `pinned` for what
/// the device would read.
[[nodiscard]] CodePlan with_rows_placed(CodePlan plan, uint64_t pinned, uint64_t tokens,
                                        const SessionParams& params, const ModelShape& model);
/// The plan with as many of its layers, the last ones, as there is room for; by with_rows_placed() if those are more.
[[nodiscard]] CodePlan fitting(CodePlan plan, const CodeBytes& room, uint64_t tokens,
                               const SessionParams& params, const ModelShape& model);

/// Offloaded rows of a layer that codes cover, in whole blocks, when a sequence has so many tokens.
[[nodiscard]] uint64_t coded_rows(uint64_t tokens, const SessionParams& params);

/// Shape of the device's memory for a plan with layers, in sessions of at most so many tokens.
[[nodiscard]] gpu::CodesShape codes_shape(const CodePlan& plan, uint64_t tokens,
                                          const SessionParams& params, const ModelShape& model);

}  // namespace keyhole::runtime
