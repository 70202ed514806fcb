// Traces: recorded keys, values and queries, on which index types are compared.
//
// FILE. A trace is a safetensors file. For every recorded layer L and KV head H it holds
//
//     layer.L.kv.H.keys               [n, d]     F16, BF16 or F32, after RoPE; row i is token i
//     layer.L.kv.H.values             [n, d]     the same dtype
//     layer.L.kv.H.queries            [m, g, d]  F16, BF16 or F32, after RoPE: the decode-time queries
//     layer.L.kv.H.training_queries   [t, g, d]  the same, of earlier tokens; absent where t = 0
//
// and for all of them together
//
//     query_positions                 [m]        U32, ascending: the token whose query row i is
//     training_positions              [t]        U32, ascending, all before query_positions[0]
//
// n = tokens, d = head_dim, g = q_heads / kv_heads. Query [i, j] of KV head H is query head H * g +
// j. A query at position p attends to the tokens 0..p. The metadata (strings) hold the shape and
// the origin: see TraceInfo; "keyhole_trace" is the format's version, 1.
//
// Sets of vectors (ann-benchmarks and VIBE HDF5, fbin, fvecs) are read as the trace of one head with g = 1 whose
// queries all come after the last key: tools/io/vector_trace.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/files/safetensors.h"

namespace keyhole::tools {

/// The RoPE that the model applied, in the words of config.json.
struct TraceRope {
  float theta = 0.0F;                                     ///< base; 0: no RoPE
  std::string scaling = "none";                           ///< none, linear or llama3
  float factor = 1.0F;                                    ///< linear and llama3
  float low_freq_factor = 1.0F, high_freq_factor = 1.0F;  ///< llama3
  uint32_t original_context = 0;                          ///< llama3
};

/// The description that a trace holds of itself. Metadata keys equal the field names ("rope_" before TraceRope's).
struct TraceInfo {
  uint32_t q_heads = 0;   ///< of the model
  uint32_t kv_heads = 0;  ///< of the model; every recorded layer holds all of them
  uint32_t head_dim = 0;
  float scale = 0.0F;    ///< logit = scale * q.k
  float softcap = 0.0F;  ///< > 0: logit = c * tanh(scale * q.k / c)
  TraceRope rope;
  std::vector<uint32_t> layers;  ///< recorded, ascending
  uint32_t tokens = 0;           ///< n
  std::string model;             ///< the folder's name
  std::string task;              ///< kv, passkey, prompt, vectors
  std::string prompt;            ///< a short description for people
  uint64_t seed = 0;             ///< of the task

  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
};

/// One KV head, as views that live as long as their Trace.
struct TraceHead {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  StoredTensor keys;                             ///< `[n, d]`
  std::optional<StoredTensor> values;            ///< `[n, d]`; absent in sets of vectors
  StoredTensor queries;                          ///< `[m, g, d]`
  std::optional<StoredTensor> training_queries;  ///< `[t, g, d]`
};

/// An open trace, checked: every tensor is there with the shape that the metadata promise,
/// positions ascend within the tokens. Views stay valid while the Trace lives.
class Trace {
 public:
  /// Opens a trace file. Throws std::runtime_error that names the file and what is wrong with it.
  [[nodiscard]] static Trace open(const std::filesystem::path& path);

  /// Makes a trace of one head in memory (sets of vectors). Throws as open() does; `name` begins its texts.
  struct Vectors {
    uint32_t dim = 0;
    std::vector<float> keys;      ///< `[n, dim]`
    std::vector<float> queries;   ///< `[m, dim]`
    std::vector<float> training;  ///< `[t, dim]`, may be empty
    std::vector<float> values;    ///< `[n, dim]`, may be empty
  };
  [[nodiscard]] static Trace from_vectors(const std::string& name, Vectors vectors);

  [[nodiscard]] const TraceInfo& info() const;
  [[nodiscard]] const std::vector<TraceHead>& heads() const;  ///< by layer, then KV head
  [[nodiscard]] std::span<const uint32_t> query_positions() const;
  /// The training positions; empty in sets of vectors, whose training queries have unknown positions.
  [[nodiscard]] std::span<const uint32_t> training_positions() const;

 private:
  struct Impl;
  explicit Trace(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// Borrowed fp32 rows: `count` rows of a width that the context gives, `stride` floats from one
/// row's start to the next. Row r of the keys of KV head H of K `[n, Hkv, d]` is {K + H*d, n,
/// Hkv*d}.
struct StridedRows {
  const float* data = nullptr;
  size_t count = 0;
  size_t stride = 0;
};

/// Writes a trace head by head, so that only one layer need lie in memory. The file appears under
/// its name when finish() succeeds.
class TraceWriter {
 public:
  struct Options {
    ElementType kv_type = ElementType::f16;
    ElementType query_type = ElementType::f32;
    std::vector<uint32_t> query_positions;     ///< `[m]`
    std::vector<uint32_t> training_positions;  ///< `[t]`, may be empty
  };
  /// Throws std::runtime_error for a shape or positions that Trace::open would refuse.
  TraceWriter(const std::filesystem::path& path, TraceInfo info, Options options);
  ~TraceWriter();

  /// Writes the next head, in the order of TraceInfo::layers and within a layer of KV heads.
  ///   keys, values       n rows of d floats
  ///   queries            m rows of g*d floats: the group's query heads side by side, as in Q `[m, Hq, d]`
  ///   training_queries   t rows of g*d floats
  /// Throws for a row count that differs from the declared one, and for a value that is not finite or overflows the
  /// file's type.
  void write_head(const StridedRows& keys, const StridedRows& values, const StridedRows& queries,
                  const StridedRows& training_queries);
  void finish();  ///< throws if heads are missing

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole::tools
