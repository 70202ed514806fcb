// The plan of codes: which layers of a session have codes of their offloaded rows on the device, and of what shape.
//
// A layer can have codes on the device where every KV head's index is `codes` with the same bits and its budget lets
// the codes stand for all unread rows (KEYHOLE_TAIL_CODES); all such layers of a session share the bits of the first.
// Where there is no room for all of them, the first ones go to the host, which attends them by codes of the same
// bits. A token passes the layers one after the other, so host and device never work side by side in a sequence,
// wherever the host's layers lie. With the host's layers at the beginning, beside dense layers, which are mostly the
// first, the device has one unbroken run of layers, and in a prompt that is computed layer by layer the host's rows
// are the first to be there.
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
  /// Shape of the first layer's codes; where the shapes of layers differ, only the bits are those of all.
  CodeShape shape;
  uint32_t exact_rows = 0;    ///< N: rows of a KV head that a step reads exactly
  bool rows_by_host = false;  ///< who reads these (keyhole_rows_by)
  index::CodeListing lists;   ///< what steps choose among; where heads differ, there are none
  std::vector<char> layers;   ///< [layer] it has codes

  [[nodiscard]] bool any() const { return count() != 0; }
  [[nodiscard]] uint32_t count() const {
    return static_cast<uint32_t>(std::count(layers.begin(), layers.end(), char{1}));
  }
  /// The number of the first layer that has codes; 0 where none has.
  [[nodiscard]] uint32_t first() const;
  /// The layers that have codes, as text: "4 to 31" or the like.
  [[nodiscard]] std::string text() const;

  bool operator==(const CodePlan& o) const {
    return shape.key_bits == o.shape.key_bits && shape.value_bits == o.shape.value_bits &&
           exact_rows == o.exact_rows && rows_by_host == o.rows_by_host && lists == o.lists &&
           layers == o.layers;
  }
};

/// Bits of indexes with codes by their specs. Each spec is parsed once, because a session asks for those of all heads
/// whenever a budget changes, and mostly they are the same.
class CodeSpecs {
 public:
  struct Codes {
    index::CodeBits bits;
    index::CodeListing lists;
  };
  /// What a spec asks for; nothing: its index has no codes. Throws Error(invalid_argument) for an invalid spec.
  [[nodiscard]] std::optional<Codes> codes(const std::string& spec);
  /// Number of specs that were parsed so far.
  [[nodiscard]] size_t parsed() const { return parsed_; }

 private:
  static constexpr size_t kMost = 1024;  ///< as many as heads of a large model
  std::map<std::string, std::optional<Codes>> known_;
  size_t parsed_ = 0;
};

/// Plans which layers have codes. heads: `[layers, kv_heads]`.
[[nodiscard]] CodePlan plan_codes(const SessionParams& params, const ModelShape& model,
                                  std::span<const HeadParams* const> heads, CodeSpecs& specs);
/// Throws Error(invalid_argument) where KEYHOLE_PLACE_DEVICE asks for the device but none of the plan's layers that
/// are not dense goes there.
void check_placement(const CodePlan& plan, const SessionParams& params, const ModelShape& model);

/// Bytes of device memory and of pinned host memory.
struct CodeBytes {
  uint64_t device = 0;
  uint64_t pinned = 0;
};

/// The memory that the codes of the plan's layers take in sessions of at most `tokens` tokens, and that of K and V of
/// their rows or, where the host reads these, of the exchange with it. Throws Error(invalid_argument) for a shape
/// that no device has.
[[nodiscard]] CodeBytes code_bytes(const CodePlan& plan, uint64_t tokens,
                                   const SessionParams& params, const ModelShape& model);
/// Bytes that pinned_memory_limit leaves for K and V beside the exchange with the device; UINT64_MAX: no limit.
[[nodiscard]] uint64_t pinned_room(const SessionParams& params, const ModelShape& model);
/// Returns the plan with its exact rows read by the host, if exact_rows_by leaves that open and `pinned` has no room
/// for what the device would read.
[[nodiscard]] CodePlan with_rows_placed(CodePlan plan, uint64_t pinned, uint64_t tokens,
                                        const SessionParams& params, const ModelShape& model);
/// Returns the plan with as many of its layers as there is room for, the last ones. It loses its lists if that makes
/// room for more layers: a step is faster by all codes on a device than by the host. Where exact_rows_by leaves it
/// open, the host reads the exact rows if that makes room for more still.
[[nodiscard]] CodePlan fitting(CodePlan plan, const CodeBytes& room, uint64_t tokens,
                               const SessionParams& params, const ModelShape& model);

/// The number of offloaded rows of a layer, in whole blocks, that codes cover when a sequence has `tokens` tokens.
[[nodiscard]] uint64_t coded_rows(uint64_t tokens, const SessionParams& params);

/// The shape of the device's memory for a plan that has layers, in sessions of at most `tokens` tokens.
[[nodiscard]] gpu::CodesShape codes_shape(const CodePlan& plan, uint64_t tokens,
                                          const SessionParams& params, const ModelShape& model);

}  // namespace keyhole::runtime
