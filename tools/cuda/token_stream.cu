#include "tools/cuda/token_stream.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "tools/cuda/gemv.h"

namespace keyhole::tools {
namespace {

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string("CUDA, ") + what + ": " + cudaGetErrorString(error));
}

class DeviceMemory {
 public:
  explicit DeviceMemory(uint64_t bytes) {
    const cudaError_t error = cudaMalloc(&data_, std::max<uint64_t>(bytes, 16));
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    throw std::runtime_error("CUDA, " + std::to_string(bytes) +
                             " bytes of device memory: " + cudaGetErrorString(error));
  }
  ~DeviceMemory() { (void)cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] uint16_t* halves() const { return static_cast<uint16_t*>(data_); }
  [[nodiscard]] char* bytes() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

class Event {
 public:
  Event() { must(cudaEventCreate(&event_), "an event"); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

float microseconds(const Event& begin, const Event& end) {
  float milliseconds = 0;
  must(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "the time between events");
  return 1000 * milliseconds;
}

int selected(int ordinal) {
  must(cudaSetDevice(ordinal), "selecting the device");
  return ordinal;
}

struct Stream {
  Stream() { must(cudaStreamCreateWithFlags(&get, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { (void)cudaStreamDestroy(get); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get = nullptr;
};

class CudaTokenStream final : public TokenStream {
 public:
  explicit CudaTokenStream(const TokenStreamShape& shape)
      : ordinal_(selected(shape.ordinal)),
        shape_(shape),
        q_(size_t{shape.q_heads} * shape.head_dim),
        kv_(size_t{shape.kv_heads} * shape.head_dim),
        inputs_(token_bytes() * (shape.tokens + 1)),
        outputs_(shape.layers * q_ * sizeof(uint16_t)),
        weights_(weight_bytes(shape)),
        before_(shape.layers),
        after_(shape.layers) {
    // The scratch of the products: what a layer begins with, its queries, keys and values, the attention's
    // output projection, gate and up.
    const size_t widest = std::max<size_t>(
        {size_t{2} * shape.intermediate, shape.vocabulary, q_ + 2 * kv_, size_t{shape.hidden}});
    for (auto& buffer : scratch_)
      buffer = std::make_unique<DeviceMemory>(widest * sizeof(uint16_t));
    must(cudaMemsetAsync(outputs_.bytes(), 0, shape.layers * q_ * sizeof(uint16_t), stream_.get),
         "clearing outputs");
    must(cudaMemsetAsync(inputs_.bytes(), 0, token_bytes() * (shape.tokens + 1), stream_.get),
         "clearing inputs");
    if (shape.weights) {
      must(enqueue_random(scratch_[0]->halves(), NumberType::f16, shape.hidden, 1.0F, 1,
                          stream_.get),
           "an input");
      // Deviation 1 / sqrt(columns): products keep the size of their input.
      must(enqueue_random(weights_.halves(), NumberType::bf16,
                          weight_bytes(shape) / sizeof(uint16_t), 0.027F, 2, stream_.get),
           "random weights");
    }
    synchronize();
  }

  ~CudaTokenStream() override {
    (void)cudaStreamSynchronize(stream_.get);
    for (cudaGraphExec_t graph : graphs_) {
      if (graph != nullptr) (void)cudaGraphExecDestroy(graph);
    }
  }

  void* stream() override { return stream_.get; }

  std::string device() const override {
    cudaDeviceProp properties{};
    must(cudaGetDeviceProperties(&properties, ordinal_), "the device's properties");
    return properties.name;
  }

  void upload(uint32_t token, uint32_t layer, const uint16_t* rows) override {
    must(cudaMemcpy(input(token, layer), rows, layer_elements() * sizeof(uint16_t),
                    cudaMemcpyHostToDevice),
         "uploading a token");
  }

  void begin_token() override {
    weight_at_ = 0;
    tick(begin_);
  }

  Rows begin_layer(uint32_t token, uint32_t layer) override {
    product(0, 1, static_cast<uint32_t>(q_ + 2 * kv_), shape_.hidden);
    uint16_t* q = input(capturing_ ? shape_.tokens : token, layer);
    if (clocks_) tick(before_[layer]);
    return {q, q + q_, q + q_ + kv_, outputs_.halves() + layer * q_};
  }

  void end_layer(uint32_t layer) override {
    if (clocks_) tick(after_[layer]);
    if (!shape_.weights) return;
    product(outputs_.halves() + layer * q_, scratch_[2]->halves(), shape_.hidden,
            static_cast<uint32_t>(q_));
    product(2, 1, 2 * shape_.intermediate, shape_.hidden);
    product(1, 0, shape_.hidden, shape_.intermediate);
  }

  void end_token() override {
    product(0, 1, shape_.vocabulary, shape_.hidden);
    tick(end_);
  }

  void begin_capture(bool clocks) override {
    must(cudaStreamBeginCapture(stream_.get, cudaStreamCaptureModeThreadLocal), "a capture");
    capturing_ = true;
    clocks_ = clocks;
  }

  void end_capture() override {
    cudaGraphExec_t& graph = graphs_[clocks_ ? 1 : 0];
    capturing_ = false;
    clocks_ = true;
    cudaGraph_t captured = nullptr;
    must(cudaStreamEndCapture(stream_.get, &captured), "the end of a capture");
    if (graph != nullptr) (void)cudaGraphExecDestroy(graph);
    graph = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&graph, captured, 0);
    (void)cudaGraphDestroy(captured);
    must(error, "making a graph");
  }

  void launch(uint32_t token, bool clocks) override {
    must(cudaMemcpyAsync(input(shape_.tokens, 0), input(token, 0), token_bytes(),
                         cudaMemcpyDeviceToDevice, stream_.get),
         "a token's inputs");
    must(cudaGraphLaunch(graphs_[clocks ? 1 : 0], stream_.get), "launching a graph");
  }

  void synchronize() override { must(cudaStreamSynchronize(stream_.get), "waiting"); }

  void read_clocks(uint32_t layers, float* attends, float& token) override {
    for (uint32_t layer = 0; layer < layers; ++layer) {
      attends[layer] = microseconds(before_[layer], after_[layer]);
    }
    token = microseconds(begin_, end_);
  }

  std::vector<uint16_t> output(uint32_t layer) override {
    synchronize();
    std::vector<uint16_t> out(q_);
    must(cudaMemcpy(out.data(), outputs_.halves() + layer * q_, q_ * sizeof(uint16_t),
                    cudaMemcpyDeviceToHost),
         "reading an output");
    return out;
  }

  double copy_bandwidth() override {
    constexpr uint64_t kBytes = uint64_t{1} << 30U;  // many times any L2 cache
    const DeviceMemory memory(2 * kBytes);
    return 2 * rate(kBytes, 5, [&](int) {
             must(cudaMemcpyAsync(memory.bytes() + kBytes, memory.bytes(), kBytes,
                                  cudaMemcpyDeviceToDevice, stream_.get),
                  "copying");
           });
  }

  double host_copy_bandwidth(uint64_t bytes, uint64_t ring) override {
    const uint64_t piece = std::min(bytes, ring);
    const DeviceMemory target(piece);
    void* pinned = nullptr;
    must(cudaHostAlloc(&pinned, ring, cudaHostAllocDefault), "pinned memory for a ring");
    const std::unique_ptr<void, cudaError_t (*)(void*)> owner(pinned, cudaFreeHost);
    std::fill_n(static_cast<char*>(pinned), ring, 1);
    const uint64_t places = ring / piece;
    return rate(bytes, 8, [&](int round) {
      for (uint64_t at = 0, i = static_cast<uint64_t>(round); at < bytes; at += piece, ++i) {
        must(cudaMemcpyAsync(target.bytes(), static_cast<char*>(pinned) + i % places * piece,
                             std::min(piece, bytes - at), cudaMemcpyHostToDevice, stream_.get),
             "copying from pinned memory");
      }
    });
  }

 private:
  [[nodiscard]] size_t layer_elements() const { return q_ + 2 * kv_; }
  [[nodiscard]] size_t token_bytes() const {
    return shape_.layers * layer_elements() * sizeof(uint16_t);
  }
  // Slot `tokens` is the one that graphs read.
  [[nodiscard]] uint16_t* input(uint32_t token, uint32_t layer) const {
    return inputs_.halves() + (size_t{token} * shape_.layers + layer) * layer_elements();
  }

  void tick(const Event& event) {
    // Inside a graph an event is recorded for observers outside only with this flag.
    must(cudaEventRecordWithFlags(event.get(), stream_.get,
                                  capturing_ ? cudaEventRecordExternal : cudaEventRecordDefault),
         "recording an event");
  }

  // The next matrix.
  void product(const uint16_t* x, uint16_t* y, uint32_t rows, uint32_t columns) {
    must(enqueue_gemv(weights_.halves() + weight_at_, x, y, rows, columns, stream_.get),
         "a matrix product");
    weight_at_ += uint64_t{rows} * columns;
  }
  void product(size_t from, size_t to, uint32_t rows, uint32_t columns) {
    if (!shape_.weights) return;
    product(scratch_[from]->halves(), scratch_[to]->halves(), rows, columns);
  }

  // Bytes per second of `rounds` rounds, after one that does not count.
  template <class Round>
  double rate(uint64_t bytes, int rounds, Round&& round) {
    round(0);
    const Event begin;
    const Event end;
    must(cudaEventRecord(begin.get(), stream_.get), "recording an event");
    for (int i = 0; i < rounds; ++i) round(i);
    must(cudaEventRecord(end.get(), stream_.get), "recording an event");
    synchronize();
    return static_cast<double>(bytes) * rounds / (1e-6 * microseconds(begin, end));
  }

  const int ordinal_;
  const TokenStreamShape shape_;
  const size_t q_, kv_;
  Stream stream_;
  DeviceMemory inputs_, outputs_, weights_;
  std::unique_ptr<DeviceMemory> scratch_[3];
  std::vector<Event> before_, after_;
  Event begin_, end_;
  cudaGraphExec_t graphs_[2] = {};  ///< without clocks, with them
  bool capturing_ = false;
  bool clocks_ = true;
  uint64_t weight_at_ = 0;
};

}  // namespace

std::unique_ptr<TokenStream> make_token_stream(const TokenStreamShape& shape) {
  return std::make_unique<CudaTokenStream>(shape);
}

}  // namespace keyhole::tools
