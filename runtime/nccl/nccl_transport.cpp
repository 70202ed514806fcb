// A transport over NCCL, with a communicator and a stream of its own. The host never blocks in CUDA: it polls the
// stream, so that a rank that is gone ends a wait, and then the communicator is aborted, which ends NCCL's kernels.
#include <cuda_runtime_api.h>
#include <keyhole/nccl.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>

#include "runtime/ranks/transport_parts.h"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "libkeyhole_nccl needs NCCL 2.18 or newer, for ncclCommSplit"
#endif

namespace {

using Clock = std::chrono::steady_clock;

// After an abort NCCL's kernels see a flag and end. A device that hangs does not: its buffers are then left.
constexpr auto kAbortedStreamEnds = std::chrono::seconds(2);
constexpr size_t kMostOwnBytes = size_t{4} << 20;
constexpr size_t kMostAllBytes = size_t{64} << 20;
constexpr uint32_t kDefaultLongTimeoutMs = 3600000;

/// Makes a device current for a call, and its calls allowed beside another thread's capture.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    restore_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device;
    status_ = cudaSetDevice(device);
    relaxed_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
  }
  ~OnDevice() {
    if (relaxed_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    if (restore_) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  [[nodiscard]] cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  bool restore_ = false, relaxed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t status_ = cudaSuccess;
};

/// When a wait began, and when it ends.
struct Wait {
  explicit Wait(uint32_t timeout_ms)
      : begin(Clock::now()), end(begin + std::chrono::milliseconds(timeout_ms)), ms(timeout_ms) {}
  Clock::time_point begin, end;
  uint32_t ms;
};

class NcclTransport {
 public:
  NcclTransport() = default;
  ~NcclTransport();
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  /// Splits `parent`, and exchanges the first messages. Collective.
  keyhole_status open(ncclComm_t parent, uint32_t timeout_ms, char* text);
  keyhole_status gather(const char* own, char* all, size_t bytes, uint32_t timeout_ms, char* text);
  keyhole_status gather_on_stream(const void* own, void* all, size_t bytes, cudaStream_t stream,
                                  char* text);
  /// Ends NCCL's kernels, also those on callers' streams.
  void abort();
  [[nodiscard]] uint32_t rank() const { return rank_; }
  [[nodiscard]] uint32_t size() const { return size_; }
  /// Whether NCCL may still write to this object: a split was given up.
  [[nodiscard]] bool is_left() const { return is_left_; }

 private:
  keyhole_status allocate(char* text);
  keyhole_status gather_piece(const char* own, char* all, size_t n, size_t stride, const Wait& wait,
                              char* text);
  keyhole_status settle(ncclComm_t comm, ncclResult_t result, const char* what, const Wait& wait,
                        char* text);
  keyhole_status wait_for_stream(const Wait& wait, char* text);

  ncclComm_t comm_ = nullptr;  // null when it has been aborted
  cudaStream_t stream_ = nullptr;
  int device_ = 0;
  uint32_t rank_ = 0, size_ = 1;
  bool is_left_ = false;
  size_t piece_ = 0;        // bytes of a rank that the buffers hold
  char* pinned_ = nullptr;  // [1 + size, piece]: own, all; so is the device's
  char* memory_ = nullptr;
};

keyhole_status nccl_error(ncclResult_t result, ncclComm_t comm, const char* what, char* text) {
  const char* const detail = ncclGetLastError(comm);
  std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "%s: %s%s%.120s", what, ncclGetErrorString(result),
                detail == nullptr || *detail == 0 ? "" : ": ", detail == nullptr ? "" : detail);
  return KEYHOLE_RANK_FAILED;
}

keyhole_status cuda_error(cudaError_t error, const char* what, char* text) {
  std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "%s: %s", what, cudaGetErrorString(error));
  return KEYHOLE_RANK_FAILED;
}

/// A stream that is still at work is no error, but CUDA keeps it as the thread's last one.
cudaError_t query(cudaStream_t stream) {
  const cudaError_t state = cudaStreamQuery(stream);
  if (state == cudaErrorNotReady) (void)cudaGetLastError();
  return state;
}

/// Lets time pass until the next look; false: it is over.
bool pause(const Wait& wait, char* text) {
  const auto now = Clock::now();
  if (now >= wait.end) {
    std::snprintf(text, KEYHOLE_TRANSPORT_TEXT,
                  "the other ranks did not answer within %u ms: one has ended, hangs or is late",
                  wait.ms);
    return false;
  }
  keyhole::ranks::pause_since(wait.begin);
  return true;
}

/// A communicator whose owner made it nonblocking returns from calls before they are done.
keyhole_status NcclTransport::settle(ncclComm_t comm, ncclResult_t result, const char* what,
                                     const Wait& wait, char* text) {
  while (result == ncclInProgress) {
    if (!pause(wait, text)) return KEYHOLE_TIMEOUT;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
    if (asked != ncclSuccess) return nccl_error(asked, comm, "ncclCommGetAsyncError", text);
  }
  return result == ncclSuccess ? KEYHOLE_OK : nccl_error(result, comm, what, text);
}

keyhole_status NcclTransport::wait_for_stream(const Wait& wait, char* text) {
  for (;;) {
    const cudaError_t done = query(stream_);
    if (done == cudaSuccess) return KEYHOLE_OK;
    if (done != cudaErrorNotReady) return cuda_error(done, "a gather", text);
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess) return nccl_error(asked, comm_, "ncclCommGetAsyncError", text);
    if (state != ncclSuccess && state != ncclInProgress) {
      return nccl_error(state, comm_, "ncclAllGather", text);
    }
    if (!pause(wait, text)) return KEYHOLE_TIMEOUT;
  }
}

keyhole_status NcclTransport::open(ncclComm_t parent, uint32_t timeout_ms, char* text) {
  const Wait wait(timeout_ms);
  int rank = 0, size = 0;
  ncclResult_t result = ncclCommCuDevice(parent, &device_);
  if (result == ncclSuccess) result = ncclCommUserRank(parent, &rank);
  if (result == ncclSuccess) result = ncclCommCount(parent, &size);
  if (result != ncclSuccess) return nccl_error(result, parent, "ncclCommUserRank", text);
  rank_ = static_cast<uint32_t>(rank);
  size_ = static_cast<uint32_t>(size);
  const OnDevice on(device_);
  if (on.status() != cudaSuccess) return cuda_error(on.status(), "cudaSetDevice", text);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // A nonblocking communicator starts a thread for every call. What could block is the first use of a connection,
  // below.
  config.blocking = 1;
  config.splitShare = 0;  // an abort must not reach the parent
  keyhole_status status =
      settle(parent, ncclCommSplit(parent, 0, rank, &comm_, &config), "ncclCommSplit", wait, text);
  if (status != KEYHOLE_OK) {
    is_left_ = status == KEYHOLE_TIMEOUT;
    return status;
  }
  status = allocate(text);
  // NCCL connects ranks at the first use of an algorithm, which depends on the size: small messages, and the largest.
  for (const size_t bytes : {std::min<size_t>(64, piece_), piece_}) {
    if (status == KEYHOLE_OK) status = gather_piece(nullptr, nullptr, bytes, 0, wait, text);
  }
  if (status != KEYHOLE_OK) abort();
  return status;
}

keyhole_status NcclTransport::allocate(char* text) {
  piece_ = std::max<size_t>(1, std::min(kMostOwnBytes, kMostAllBytes / size_));
  const size_t bytes = piece_ * (size_ + size_t{1});
  cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMallocHost(reinterpret_cast<void**>(&pinned_), bytes);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&memory_), bytes);
  // The memory goes round before anybody has written to it.
  if (error == cudaSuccess) error = cudaMemsetAsync(memory_, 0, bytes, stream_);
  if (error != cudaSuccess) return cuda_error(error, "a stream and memory for messages", text);
  std::memset(pinned_, 0, bytes);
  return KEYHOLE_OK;
}

/// own null: the buffers are exchanged with whatever is in them, and the result stays there.
keyhole_status NcclTransport::gather_piece(const char* own, char* all, size_t n, size_t stride,
                                           const Wait& wait, char* text) {
  char* const got = pinned_ + n;
  if (own != nullptr) std::memcpy(pinned_, own, n);
  cudaError_t error = cudaMemcpyAsync(memory_, pinned_, n, cudaMemcpyHostToDevice, stream_);
  if (error != cudaSuccess) return cuda_error(error, "cudaMemcpyAsync", text);
  keyhole_status status =
      settle(comm_, ncclAllGather(memory_, memory_ + piece_, n, ncclInt8, comm_, stream_),
             "ncclAllGather", wait, text);
  if (status != KEYHOLE_OK) return status;
  error = cudaMemcpyAsync(got, memory_ + piece_, n * size_, cudaMemcpyDeviceToHost, stream_);
  if (error != cudaSuccess) return cuda_error(error, "cudaMemcpyAsync", text);
  status = wait_for_stream(wait, text);
  if (status != KEYHOLE_OK || own == nullptr) return status;
  for (uint32_t r = 0; r < size_; ++r) std::memcpy(all + r * stride, got + r * n, n);
  return KEYHOLE_OK;
}

keyhole_status NcclTransport::gather(const char* own, char* all, size_t bytes, uint32_t timeout_ms,
                                     char* text) {
  const Wait wait(timeout_ms);
  if (comm_ == nullptr) {
    std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "the NCCL communicator was aborted");
    return KEYHOLE_RANK_FAILED;
  }
  const OnDevice on(device_);
  keyhole_status status = KEYHOLE_OK;
  if (on.status() != cudaSuccess) status = cuda_error(on.status(), "cudaSetDevice", text);
  for (size_t begin = 0; begin < bytes && status == KEYHOLE_OK; begin += piece_) {
    status =
        gather_piece(own + begin, all + begin, std::min(piece_, bytes - begin), bytes, wait, text);
  }
  if (status != KEYHOLE_OK) abort();
  return status;
}

keyhole_status NcclTransport::gather_on_stream(const void* own, void* all, size_t bytes,
                                               cudaStream_t stream, char* text) {
  if (comm_ == nullptr) {
    std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "the NCCL communicator was aborted");
    return KEYHOLE_RANK_FAILED;
  }
  const OnDevice on(device_);
  keyhole_status status = KEYHOLE_OK;
  if (on.status() != cudaSuccess) {
    status = cuda_error(on.status(), "cudaSetDevice", text);
  } else {
    const ncclResult_t result = ncclAllGather(own, all, bytes, ncclInt8, comm_, stream);
    if (result != ncclSuccess) status = nccl_error(result, comm_, "ncclAllGather", text);
  }
  if (status != KEYHOLE_OK) abort();
  return status;
}

void NcclTransport::abort() {
  if (comm_ != nullptr) (void)ncclCommAbort(comm_);
  comm_ = nullptr;
}

NcclTransport::~NcclTransport() {
  const OnDevice on(device_);
  if (comm_ != nullptr) (void)ncclCommDestroy(comm_);
  if (stream_ == nullptr) return;
  const auto begin = Clock::now(), end = begin + kAbortedStreamEnds;
  cudaError_t done = query(stream_);
  while (done == cudaErrorNotReady && Clock::now() < end) {
    keyhole::ranks::pause_since(begin);
    done = query(stream_);
  }
  if (done == cudaErrorNotReady) return;  // the device still has the buffers
  (void)cudaFreeHost(pinned_);
  (void)cudaFree(memory_);
  (void)cudaStreamDestroy(stream_);
}

keyhole_status all_gather(void* context, const void* own, void* all, size_t bytes,
                          uint32_t timeout_ms, char* text) {
  return static_cast<NcclTransport*>(context)->gather(
      static_cast<const char*>(own), static_cast<char*>(all), bytes, timeout_ms, text);
}

keyhole_status all_gather_on_stream(void* context, const void* own, void* all, size_t bytes,
                                    void* stream, char* text) {
  return static_cast<NcclTransport*>(context)->gather_on_stream(
      own, all, bytes, static_cast<cudaStream_t>(stream), text);
}

void abort_all(void* context) { static_cast<NcclTransport*>(context)->abort(); }

void release(void* context) { delete static_cast<NcclTransport*>(context); }

}  // namespace

extern "C" keyhole_status keyhole_communicator_from_nccl(const void* comm,
                                                         const keyhole_communicator_config* config,
                                                         keyhole_communicator** out) {
  if (out != nullptr) *out = nullptr;
  const ncclComm_t parent = comm == nullptr ? nullptr : *static_cast<const ncclComm_t*>(comm);
  if (parent == nullptr)
    return keyhole::ranks::fail(KEYHOLE_RANK_FAILED, "comm is NULL, or points to NULL");
  std::unique_ptr<NcclTransport> t;
  try {
    t = std::make_unique<NcclTransport>();
  } catch (...) {
    return KEYHOLE_OUT_OF_MEMORY;
  }
  const size_t needed = offsetof(keyhole_communicator_config, long_timeout_ms) + sizeof(uint32_t);
  const bool told =
      config != nullptr && config->struct_size >= needed && config->long_timeout_ms != KEYHOLE_AUTO;
  char text[KEYHOLE_TRANSPORT_TEXT] = {};
  const keyhole_status opened =
      t->open(parent, told ? config->long_timeout_ms : kDefaultLongTimeoutMs, text);
  if (opened != KEYHOLE_OK) {
    if (t->is_left()) (void)t.release();
    t.reset();
    return keyhole::ranks::fail(opened, text);
  }
  keyhole_transport table;
  keyhole_transport_init(&table);
  table.rank = t->rank();
  table.size = t->size();
  table.all_gather = all_gather;
  table.all_gather_on_stream = all_gather_on_stream;
  table.release = release;
  table.abort = abort_all;
  table.context = t.release();
  return keyhole_communicator_create(&table, config, out);
}
