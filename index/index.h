// The one interface of all index types: for the g queries of a group, which offloaded keys have the
// largest inner products? One object serves one (layer, KV head).
//
// An index never owns K and V: it is given a view of rows that stay in place while the index lives (the offload store
// reserves its space once), and answers with row numbers of that view. What it copies for its own use (regrouped
// keys, graph edges, codes) counts in IndexInfo::bytes. Indexes over copies of the same rows can share it, see
// share().
#pragma once

#include <algorithm>
#include <functional>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"

namespace keyhole::index {

class Accelerator;
class CodeLists;
class KvCodes;
struct Balance;
class QueryClassifier;
struct TypeDecl;

/// Which lists of codes a step reads (index/scan/list_choice.h): a share of the rows, but not fewer than `least`, and
/// more where the others may hold much of a head's output.
struct ListGoal {
  float share = 0.12F;  ///< share of all rows
  size_t least = 8192;  ///< rows, or all where there are fewer
  float miss = 0.0F;    ///< share of a head's output that unread lists may hold, see there; 0: any

  [[nodiscard]] size_t rows(size_t count) const {
    const auto shared = static_cast<size_t>(share * static_cast<float>(count));
    return std::min(count, std::max(shared, least));
  }
};

/// The environment of an index: kernels, threads, the model's logits. It outlives the index.
struct Context {
  const cpu::Kernels* kernels = nullptr;
  cpu::Pool* pool = nullptr;  ///< for builds; searches run on the calling thread alone
  const QueryClassifier* classifier = nullptr;  ///< trained for this layer and KV head; null: none
  /// The model's logits, for types that weigh keys as attention will. scale 0: 1 / sqrt(dim).
  LogitParams logits = {.scale = 0.0F, .softcap = 0.0F};
  Accelerator* accelerator = nullptr;  ///< for builds; null: none
};

/// RoPE as the model applied it (rotate-half), so that an index can undo it. theta = 0: none.
struct RopeParams {
  float theta = 0.0F;
  uint32_t rotary_dim = 0;            ///< 0: the whole head
  std::vector<float> inv_freq_scale;  ///< `[rotary_dim/2]` factor per frequency (scaling), empty: 1
  /// Components 2i and 2i + 1 are turned into each other; otherwise i and i + rotary_dim/2.
  bool interleaved = false;
};

/// Queries of the prefill that may guide a build: `[count, dim]` rows with their token positions.
struct TrainingQueries {
  RowsView rows;
  const uint32_t* positions = nullptr;  ///< `[rows.tokens]`, token positions; null where unknown
};

struct BuildInput {
  RowsView keys;                ///< rows [0, count) to index; data stays valid and in place
  TrainingQueries queries;      ///< may be empty
  uint32_t first_position = 0;  ///< token position of row 0 (the sink's size)
  const RopeParams* rope = nullptr;
  /// Values of the same rows, read while it builds; empty where they are not known.
  RowsView values{};
  /// The head's balanced space (scan/balance.h), in which keys are compared. Only the build reads it; the index keeps
  /// and saves what it needs of it. null: learned from `keys` and `queries`.
  const Balance* balance = nullptr;
};

/// Called now and then with the share done, in [0, 1]; returns false to cancel, upon which the build
/// throws Error(cancelled) and the index is as it was before. Empty: never cancelled. May be called
/// from any worker, one call at a time.
using Progress = std::function<bool(double)>;

/// A token position that the caller does not know.
inline constexpr uint32_t kUnknownPosition = 0xFFFFFFFF;

/// The arguments of one group search.
struct SearchArgs {
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;              ///< heads, 1..kMaxGroup
  uint32_t k = 0;                  ///< how many keys are wanted for each head; may exceed count()
  uint32_t position = kUnknownPosition;  ///< token position of the queries, to undo their RoPE
  /// The search does share `part` of `parts` of the work; the best k of what all parts find together is the answer.
  /// See Index::sharing().
  uint32_t part = 0;
  uint32_t parts = 1;

  /// The first of this part's share of n things.
  [[nodiscard]] size_t begin_of(size_t n) const { return n * part / parts; }
  [[nodiscard]] size_t end_of(size_t n) const { return n * (part + 1) / parts; }
};

/// How the parts of one search divide its work.
enum class Sharing {
  none,  ///< the search has only one part
  rows,  ///< each part scores other keys; together they score those of the undivided search
  heads  ///< each part searches for other heads of the group, and may find keys that another part finds, too
};

/// The answer to one group search. The caller provides the arrays, `[group, k]` and `[group]`.
struct Hits {
  uint32_t* ids = nullptr;     ///< rows, best first, distinct within a head
  float* scores = nullptr;     ///< their inner products with that head's query (unscaled)
  uint32_t* counts = nullptr;  ///< how many were found for each head, <= k
  /// Sum over heads of the keys whose score was computed for it, from the whole key or its code.
  uint64_t keys_scored = 0;
  uint64_t bytes_read = 0;  ///< keys, codes, edges and centroids that the search loaded
  /// Rows whose whole key was read to score them, not only its code. flat and roargraph report it; the figure of
  /// other types may be anything.
  uint64_t exact_rows = 0;
  /// Out, `[group]`, or null: the share of a head's softmax mass over all indexed keys that lies, by the
  /// search's approximate scores, in the rows that it read whole: those that it returns for any head of the
  /// group (SparQ's alpha). Types that cannot tell leave it as it is, as does a search without keys.
  float* coverage = nullptr;
};

/// Every key that a group search scored. Points into the scratch: valid until its next search, and the
/// caller's to overwrite.
struct Scored {
  std::span<uint32_t> rows;  ///< distinct, in the order in which they were scored
  float* scores = nullptr;   ///< scores[h * stride + i] = queries[h] . key rows[i] (unscaled)
  size_t stride = 0;
  bool exact = true;         ///< false: the scores are those of quantised keys
  uint64_t keys_scored = 0;  ///< as in Hits
  uint64_t bytes_read = 0;
};

/// An append that has been prepared and not yet taken in; see Index::prepare_append().
class Addition {
 public:
  virtual ~Addition() = default;
};

struct IndexInfo {
  std::string type;
  std::string params;          ///< the effective parameters, as a spec that builds the same index
  size_t count = 0;            ///< rows indexed
  size_t bytes = 0;            ///< held by the index itself, K and V not counted
  double build_seconds = 0.0;  ///< of build() and all append()s
  std::vector<std::pair<std::string, double>> diagnostics;  ///< e.g. mean_degree, reachable_share
  /// Why this index is a poor one, as a text for people; empty: nothing is known.
  std::string warning;
};

/// Working memory of one searching thread; made once, reused by every search (which allocates nothing).
/// A scratch serves every index of the same type, of any size: a search through a larger index than
/// before grows it (the only time a search allocates), so that one scratch per worker serves all heads.
class Scratch {
 public:
  virtual ~Scratch() = default;
};

class Index {
 public:
  virtual ~Index() = default;

  /// Indexes all rows of input.keys; replaces what was there. Strong guarantee: on an exception the
  /// index is unchanged. The result does not depend on the number of threads.
  virtual void build(const BuildInput& input, const Progress& progress) = 0;

  /// Adds rows [count(), keys.tokens); keys is the same growing array as before.
  void append(const RowsView& keys, const Progress& progress) {
    (void)commit_append(prepare_append(keys, progress));
  }
  void append_kv(const KvView& kv, const Progress& progress) {
    (void)commit_append(prepare_append_kv(kv, progress));
  }

  /// The two halves of append(). prepare_append() does the work and changes nothing: it may run on one
  /// thread while others search. commit_append() takes the result in, in the time that it takes to copy it,
  /// while no search runs; it throws Error(internal), and changes nothing, if the index was built, truncated,
  /// loaded or appended to since. It returns what the addition has replaced, which can be a whole graph: to
  /// be destroyed where there is time for it.
  [[nodiscard]] virtual std::unique_ptr<Addition> prepare_append(
      const RowsView& keys, const Progress& progress) const = 0;
  /// prepare_append() for types that were built with values and hold something of them.
  [[nodiscard]] virtual std::unique_ptr<Addition> prepare_append_kv(
      const KvView& kv, const Progress& progress) const {
    return prepare_append(kv.keys, progress);
  }
  virtual std::unique_ptr<Addition> commit_append(std::unique_ptr<Addition> addition) = 0;

  /// Forgets rows >= count; they are never returned again, and may be appended anew with other content. Throws
  /// Error(out_of_memory), and then the index is as it was or can only be destroyed.
  virtual void truncate(size_t count) = 0;

  /// Makes an index of the same rows that finds the same; `keys` is a copy of at least count() of them. Both share
  /// their memory until one changes it, which first copies what it changes. From then on they are two objects: each
  /// may be used, changed and destroyed by a thread of its own, in any order. Meanwhile others may search this index
  /// or prepare an append.
  [[nodiscard]] virtual std::unique_ptr<Index> share(const RowsView& keys) const = 0;

  [[nodiscard]] virtual size_t count() const = 0;
  /// Number of components of a key.
  [[nodiscard]] virtual uint32_t dim() const = 0;

  /// The declaration of the index's type. Indexes of the same type and dimension share their scratch.
  [[nodiscard]] virtual const TypeDecl& type() const = 0;

  [[nodiscard]] virtual Sharing sharing() const { return Sharing::none; }
  /// Whether the best k of all parts are those of the whole search, bit for bit, for any number of parts.
  [[nodiscard]] virtual bool same_in_parts() const { return false; }

  /// Whether what a search finds for a head depends neither on the other heads of the group nor on the position. Then
  /// heads of several tokens can be searched as one group.
  [[nodiscard]] virtual bool finds_per_head() const { return false; }

  /// Scratch for searches of up to `max_group` heads and `max_k` results.
  [[nodiscard]] virtual std::unique_ptr<Scratch> make_scratch(uint32_t max_group,
                                                              uint32_t max_k) const = 0;

  /// Makes a scratch of this type and dimension, perhaps made by another index, large enough for searches in this
  /// one. Otherwise the first search would allocate.
  virtual void reserve_search(Scratch& /*scratch*/) const {}

  /// Takes the memory of an explore() in an index of up to count() rows now, so that explore() allocates nothing.
  virtual void reserve_explore(Scratch& scratch) const = 0;

  /// Finds for each head (approximately) the k rows of largest inner product. Equal scores: the smaller row first.
  /// Const and thread-safe with one scratch per thread; allocates nothing; fills all of `hits`.
  virtual void search(const SearchArgs& args, Scratch& scratch, Hits& hits) const = 0;
  void search(const float* queries, uint32_t group, uint32_t k, Scratch& scratch,
              Hits& hits) const {
    search({.queries = queries, .group = group, .k = k}, scratch, hits);
  }

  /// Searches like search(), but returns every key that it scored, with its scores for all heads: attending a scored
  /// key then costs only the read of its value.
  virtual void explore(const SearchArgs& args, Scratch& scratch, Scored& scored) const = 0;

  /// The codes by which every row of the index's complete blocks can be attended (index/scan/kv_codes.h); null: the
  /// index has none. Valid until the index changes.
  [[nodiscard]] virtual const KvCodes* codes() const { return nullptr; }
  /// The codes in lists, of which a step reads those that weigh (index/scan/code_lists.h). At most one of codes() and
  /// lists() is not null.
  [[nodiscard]] virtual const CodeLists* lists() const { return nullptr; }
  /// How many of lists() a step reads, see ListGoal.
  [[nodiscard]] virtual ListGoal list_goal() const { return {}; }

  /// Measures the whole index, in a time that grows with it; bytes() gives IndexInfo::bytes alone, at once.
  [[nodiscard]] virtual IndexInfo info() const = 0;
  [[nodiscard]] virtual size_t bytes() const = 0;
  /// The part of bytes() that another index counts: shared memory is counted by the first of its holders.
  [[nodiscard]] virtual size_t bytes_of_others() const = 0;

  /// Takes those parameters of `spec` that only searches read. Throws Error(invalid_argument), and changes nothing,
  /// where the spec is of another type or differs in what the build has fixed. No search may run meanwhile; scratch
  /// stays good, and grows where the new searches need more.
  virtual void set_search_params(std::string_view spec) = 0;

  /// Writes all that load() needs, K and V not included. load() takes the keys' view again and throws
  /// Error(corrupt) for bytes that save() cannot have written.
  virtual void save(std::ostream& out) const = 0;
  virtual void load(std::istream& in, const RowsView& keys) = 0;
};

}  // namespace keyhole::index
