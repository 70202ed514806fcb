// The part of a decoder on a GPU beside Keyhole, for benchmarks: a stream, tensors in device memory, the dense
// products between the attends, clocks in the order of the stream, and graphs. Including it needs no CUDA header; in
// a build without CUDA making one throws.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace keyhole::tools {

struct TokenStreamShape {
  uint32_t layers = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t tokens = 0;  ///< whose queries, keys and values are uploaded
  int ordinal = 0;      ///< which CUDA device

  /// The products of a Llama: bf16 matrices of random numbers, `[q + 2 kv heads, hidden]`, `[hidden, q heads]`,
  /// `[2 intermediate, hidden]`, `[hidden, intermediate]` in each layer and `[vocabulary, hidden]` at the end.
  bool weights = false;
  uint32_t hidden = 0, intermediate = 0, vocabulary = 0;  ///< hidden = q_heads * head_dim
};

/// Bytes of the shape's matrices; each token reads them once.
[[nodiscard]] uint64_t weight_bytes(const TokenStreamShape& shape);

/// The stream, for one thread at a time. Functions enqueue and return, unless they say that they wait. All throw
/// std::runtime_error with CUDA's text.
class TokenStream {
 public:
  virtual ~TokenStream() = default;

  [[nodiscard]] virtual void* stream() = 0;              ///< a cudaStream_t
  [[nodiscard]] virtual std::string device() const = 0;  ///< e.g. "NVIDIA H200"

  /// Uploads queries `[q_heads, d]`, keys and values `[kv_heads, d]` of a token of a layer, fp16, one after the
  /// other. Waits.
  virtual void upload(uint32_t token, uint32_t layer, const uint16_t* rows) = 0;

  /// The tensors of an attend, all fp16 in device memory.
  struct Rows {
    void *q, *k, *v;
    void* out;  ///< `[q_heads, d]`, one for each layer
  };
  // A token is begin_token, then for the first `layers` layers in order begin_layer, the attend, end_layer; then
  // end_token. Clocks tick right before and right after the attend.
  virtual void begin_token() = 0;
  [[nodiscard]] virtual Rows begin_layer(uint32_t token, uint32_t layer) = 0;
  virtual void end_layer(uint32_t layer) = 0;
  virtual void end_token() = 0;

  /// begin_capture() and end_capture(): what is enqueued between the two becomes a graph and does not happen now; the
  /// graph reads the token that launch() names, not begin_layer's. There are two graphs, with the attends' clocks and
  /// without, because clocks keep the kernels of two layers apart, which costs some 6 us a layer.
  virtual void begin_capture(bool clocks) = 0;
  virtual void end_capture() = 0;
  virtual void launch(uint32_t token, bool clocks) = 0;

  /// Waits for the stream.
  virtual void synchronize() = 0;
  /// Reads the clocks of the token that was enqueued last, once it is done: microseconds of each attend, where these
  /// were clocked, and of the whole token.
  virtual void read_clocks(uint32_t layers, float* attends, float& token) = 0;
  /// The output of the last attend of a layer, `[q_heads, d]` fp16. Waits.
  [[nodiscard]] virtual std::vector<uint16_t> output(uint32_t layer) = 0;

  // The following measure floors. All wait.
  /// Bytes read and written per second by a large copy within the device.
  [[nodiscard]] virtual double copy_bandwidth() = 0;
  /// Bytes per second from pinned host memory to the device, in copies of `bytes` out of a ring of `ring` bytes.
  [[nodiscard]] virtual double host_copy_bandwidth(uint64_t bytes, uint64_t ring) = 0;
};

[[nodiscard]] std::unique_ptr<TokenStream> make_token_stream(const TokenStreamShape& shape);

}  // namespace keyhole::tools
