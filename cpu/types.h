// Keyhole's glossary: the words of the system, in brackets the literature's words where they differ, and the types
// that every part shares.
//
// Attention
//   attention state   (o, lse) of a set of tokens for one query head: lse = ln sum exp(scale*q.k), o = sum
//                     exp(scale*q.k - lse)*v. Natural log. Empty set: lse = -inf, o = 0. (FlashInfer's word; partial
//                     softmax of FlashDecoding.)
//   score, logit      score = q.k; logit = scale*score, soft-capped where the model does so.
//   mass              share of a head's softmax weight, 0 to 1. (Attention mass, recovery ratio.)
//   group             the g = Hq/Hkv query heads that share one KV head. (Grouped-query attention.)
//   learned sink      a logit of a query head without key and value: the attention state (0, logit).
//
// Tokens of a sequence
//   sink              tokens [0, S): exact, on the device. (StreamingLLM's attention sinks.)
//   window            the newest tokens (at least W of them): exact, on the device. (Local window, recent tokens.)
//   sliding layer     a layer that attends to its newest W tokens alone: no sink, nothing offloaded. These tokens are
//                     its window, too (gpu/windows.h). (Sliding-window attention.)
//   resident          sink or window.
//   offloaded         every other token: its K and V lie in host memory.
//   indexed           offloaded and found through an index.
//   pending           offloaded and not yet in the index: attended exactly. (Unindexed tokens, delta buffer.)
//   row               number of an offloaded token: token = S + row. Of a matrix, a row as usual.
//   turn              several new tokens that are attended at once behind a context, such as a chat's next message.
//                     (Append, incremental prefill.) Threads and parts of a walk take turns in the usual sense.
//   stretch           the new tokens of one call that attends a prompt or a turn. A piece is some of its rows or
//                     bytes, a lot some of its heads. (Chunk.)
//   extend, accept    append several new tokens and attend by them; keep some of them, for example the drafts that
//                     were right. (Speculative decoding: verify, accept.)
//   pattern           which rows the queries of a prompt attend, head by head: all rows, or a choice of blocks or
//                     lines, which are columns and diagonals. (Sparse prefill: block-sparse attention; vertical-slash
//                     of MInference.) A head that looks up single tokens (lookups) attends all. (Retrieval head.)
//
// Searches
//   recall@k          share of the true top-k keys (by inner product) that a search returned.
//   scan fraction     keys whose score was computed / offloaded keys (also: selectivity).
//   partition         keys that are near each other, with their mean key. (Cluster; inverted list of an IVF.)
//   explore           search so that every scored key is returned with its scores, not only the best k. (All
//                     candidates.)
//   tail              what stands for the rows that a step does not read: nothing, or means of partitions. (Estimate
//                     of the unselected tokens; RetroInfer's estimation zone.) In `ivf` and `saap` also the newest
//                     rows, which are in no trained list yet.
//   balance           a factor s of each channel of a head: keys are multiplied and queries divided by it, so that
//                     all channels weigh alike where keys are compared or rounded. (Channel smoothing, equalisation:
//                     SmoothQuant.)
//   budget            how many rows a head reads exactly in a step. (Top-k, token budget.)
//   target            a bound on a step's estimated error, or on the mass that is attended exactly: rows are read
//                     until it is met. (Accuracy bound; top-p budget of Twilight.)
//   audit             exact recomputation of a sample of heads and steps, which gives the true error. (Sampled
//                     accuracy check, canary.)
//
// Codes
//   codes             1, 2 or 4 bits for each element of the keys and values of all rows: a step attends every row by
//                     its code, but the heaviest exactly. (Quantised KV cache, RaBitQ; the exact rows: re-ranking,
//                     refine.)
//   lists             partitions of rows in codes, of which a step reads those that weigh. (IVF with quantised
//                     lists.)
//   doubt             a query head is in doubt where the errors of codes may hide rows that weigh; more of its rows
//                     are then read exactly: the head is settled. (Error bound of an adaptive re-ranking.)
//   spread            how far keys, values or logits lie about their mean: a standard deviation, or where said a
//                     variance. A sequence is spread when its tokens lie on several ranks: the text is all of it, own
//                     tokens are those of one rank. (Dispersion; global sequence and local shards.)
//
// Calls, threads and machines
//   publish           a step on a stream writes q, k and v of its tokens to pinned memory and raises a flag for the
//                     host. (Producer of a ring buffer.)
//   deliver           the host writes its part of a step's output to where the stream waits for it.
//   announce          the caller says that a captured graph is about to be launched, so that the session's thread
//                     serves its steps. (Notification of a graph launch.)
//   family            steps of one launch whose sequences begin with the same blocks of codes, which are read once
//                     for all of them. (Shared-prefix or cascade attention.) A family of models shares an
//                     architecture.
//   rank              one of the processes that hold a sequence together. (MPI's word; context or sequence
//                     parallelism.) In index/ also a score and its row, packed into one integer that sorts by both.
//   identity          what a saved session says of the model and text that it belongs to. (Fingerprint.)
//   way, rival        in tools and benchmarks, a configuration that is measured, and another system's method.
//                     (Baseline.)
//
//   block             a piece of fixed size; the context says of what. (1) 256 rows in codes (kCodeBlock). (2) 64
//                     rows of K and V that prompt queries attend or skip (kPromptRows). (3) Tokens that leave the
//                     window together (flush block). (4) Rows that an index takes in at once (append block). (5)
//                     Consecutive tokens of a spread sequence that one rank holds. (6) A thread block of CUDA.
//
// Reading this file is enough to read the rest. How rows are passed from part to part: cpu/tensor_view.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace keyhole {

/// Limits of the contract. Head dimensions: multiples of 16 from 64 to 576.
inline constexpr uint32_t kMaxGroup = 128;
inline constexpr uint32_t kMaxHeadDim = 576;
/// Limits of the GPU kernels: models beyond them run on the host.
inline constexpr uint32_t kMaxDeviceGroup = 16;
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

[[nodiscard]] constexpr bool is_supported_head_dim(uint32_t dim) {
  return dim % 16 == 0 && dim >= 64 && dim <= kMaxHeadDim;
}
inline constexpr char kHeadDims[] = "multiples of 16 from 64 to 576";  ///< for texts

[[nodiscard]] constexpr bool is_device_head_dim(uint32_t dim) {
  return dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256 || dim == 512;
}
inline constexpr char kDeviceHeadDims[] = "64, 80, 96, 128, 256, 512";
/// Of the kernels that help builds of indexes, and of those that choose among rows.
[[nodiscard]] constexpr bool is_device_index_dim(uint32_t dim) {
  return is_device_head_dim(dim) && dim <= 256;
}

/// Storage type of keys, values and queries. Values equal the public keyhole_dtype.
enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };

[[nodiscard]] constexpr size_t dtype_size(DType t) {
  return t == DType::f32 ? 4 : (t == DType::i8 ? 1 : 2);
}
[[nodiscard]] constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::i8: return "i8";
  }
  return "unknown";
}

/// Outcome of an operation. Values equal the public keyhole_status (checked in runtime/).
enum class Status : int32_t {
  ok = 0,
  invalid_argument = -1,  ///< a value is outside what is allowed
  unsupported = -2,       ///< valid, but this build or machine cannot do it
  out_of_memory = -3,     ///< host memory, or a cap that was set on it
  out_of_device_memory = -4,
  device_error = -5,
  timeout = -6,
  io = -7,            ///< a file cannot be opened, read or written
  corrupt = -8,       ///< a file's content contradicts itself
  version = -9,       ///< made by a newer or other version
  cancelled = -10,    ///< the caller's progress callback asked to stop
  busy = -11,         ///< the object is in use by another thread, or begin without end
  not_finite = -12,   ///< NaN or Inf where a finite number is needed
  internal = -13,     ///< a failed assumption inside the library: please report
  rank_failed = -14,  ///< another process that works on the same failed, or does something else
};

/// The one exception of the project: a status and a text that says what was wrong, the value seen and
/// the values allowed. It never crosses the C boundary (runtime/ translates it).
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  [[nodiscard]] Status status() const { return status_; }

 private:
  Status status_;
};

/// How logits are made from inner products: logit = scale*q.k, and with a soft-cap c > 0
/// logit = c*tanh(scale*q.k / c).
struct LogitParams {
  float scale = 1.0F;
  float softcap = 0.0F;  ///< 0: none

  bool operator==(const LogitParams&) const = default;
};

/// The logit parameters of a layer: its own where layers differ (`own` has one for each), otherwise those of all.
[[nodiscard]] inline const LogitParams& logits_of_layer(const LogitParams& all,
                                                        const std::vector<LogitParams>& own,
                                                        uint32_t layer) {
  return own.empty() ? all : own[layer];
}

/// Borrowed attention states of a group: o is `[group, dim]` fp32 contiguous, lse is `[group]` fp32.
struct StateView {
  float* o = nullptr;
  float* lse = nullptr;
};

}  // namespace keyhole
