// The interface of a rival for compare: it is built over the offloaded keys of one KV head, and says for the query
// heads of one step which rows they attend, with which weights.
//
// Rivals are other people's ways of finding or approximating attention over offloaded keys, written from their papers
// or called in their libraries. They are only here to be compared with: no index type and no session has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/rivals/params.h"
#include "tools/rivals/stored_rows.h"

namespace keyhole::tools {

/// The facts that are known before anything is built.
struct RivalShape {
  size_t rows = 0;  ///< offloaded keys
  size_t dim = 0;
  size_t group = 0;          ///< query heads of the KV head
  size_t training_rows = 0;  ///< queries that may guide a build
};

/// The data that a rival is built over. Borrowed during build() only, except `stored`, which outlives the rival.
struct RivalData {
  RivalShape shape;
  const float* keys = nullptr;      ///< `[rows, d]`, exactly as they are stored
  const float* training = nullptr;  ///< `[training_rows, d]`, by position, then query head
  std::span<const uint32_t>
      training_positions;  ///< `[training_rows / group]` ascending tokens; empty: unknown
  size_t first_token = 0;  ///< row i is token first_token + i
  const StoredRows* stored = nullptr;  ///< the rows that a step attends
  LogitRule rule = {};                 ///< from inner products to logits
  unsigned threads = 1;                ///< that the build may use
};

/// The rows that one query head attends.
struct RivalRows {
  std::vector<uint32_t> rows;  ///< each once, in any order
  /// The logarithm of each row's weight in sums of exp(logit); empty: all weights are 1.
  std::vector<float> log_weights;

  void clear() {
    rows.clear();
    log_weights.clear();
  }
};

/// The answer to one step, reused from step to step.
struct RivalAnswer {
  std::vector<RivalRows> heads;  ///< `[g]`
  /// Whether each head attends its own rows. False: all heads attend the union of all rows, as with an index of the
  /// library.
  bool own_rows = false;
  /// Number of (key, query head) pairs whose score was computed. 0: those that are attended.
  uint64_t keys_scored = 0;
  /// Bytes that the search loaded; the step counts what is attended.
  uint64_t bytes_read = 0;

  void reset(size_t group) {
    heads.resize(group);
    for (RivalRows& head : heads) head.clear();
    own_rows = false;
    keys_scored = bytes_read = 0;
  }
};

/// One rival over one KV head. One thread at a time.
class Rival {
 public:
  Rival() = default;
  virtual ~Rival() = default;
  Rival(const Rival&) = delete;
  Rival& operator=(const Rival&) = delete;

  /// Builds, once. Throws std::exception where the rival's library fails.
  virtual void build(const RivalData& data) = 0;
  /// Takes the search parameters of a spec that is built_alike() with the one that the rival was made of.
  virtual void set_spec(const RivalSpec& spec) = 0;
  /// Finds rows for the heads of one step. queries `[g, d]`; k: keys wanted per head, for rivals that ask for them.
  /// `answer` was reset to g heads.
  virtual void search(const float* queries, size_t group, size_t k, RivalAnswer& answer) = 0;
  /// Bytes held beside K and V.
  [[nodiscard]] virtual uint64_t bytes() const = 0;
  /// A rival that keeps keys and values in a form of its own: what that form gives back, which a step attends in place
  /// of RivalData::stored, and the bytes that a row's key and value have in it, on average.
  struct OwnRows {
    const StoredRows* rows = nullptr;
    double row_bytes = 0.0;
  };
  /// The own rows, valid while the rival lives and is not built again; rows null: it has none.
  [[nodiscard]] virtual OwnRows own_rows() const { return {}; }
};

}  // namespace keyhole::tools
