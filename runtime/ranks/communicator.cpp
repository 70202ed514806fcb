#include "runtime/ranks/communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace keyhole::runtime {
namespace {

constexpr uint32_t kMostRanks = 65536;
constexpr uint32_t kDefaultTimeoutMs = 30000;
constexpr uint32_t kDefaultLongTimeoutMs = 3600000;
// Of sums and broadcasts: what is gathered at once, so that memory for it stays small.
constexpr size_t kChunkBytes = size_t{1} << 20;
constexpr size_t kWhatBytes = 36;

/// What comes before each payload. 64 bytes, so that payloads of floats are aligned.
struct Header {
  uint64_t number = 0;  ///< of the communicator's calls
  uint64_t detail = 0;
  uint64_t bytes = 0;
  int32_t status = 0;
  char what[kWhatBytes] = {};
};
static_assert(sizeof(Header) == 64);

std::string rank_text(uint32_t rank) { return "rank " + std::to_string(rank); }

/// Status and text of an exception.
std::pair<Status, std::string> read(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return {e.status(), e.what()};
  } catch (const std::bad_alloc&) {
    return {Status::out_of_memory, "host memory is exhausted"};
  } catch (const std::exception& e) {
    return {Status::internal, e.what()};
  } catch (...) {
    return {Status::internal, "unknown exception"};
  }
}

/// A communicator has one caller at a time.
class Inside {
 public:
  explicit Inside(std::atomic<bool>& flag) : flag_(&flag) {
    if (flag.exchange(true, std::memory_order_acquire)) {
      throw Error(Status::busy, "the communicator is in use by another thread");
    }
  }
  ~Inside() { flag_->store(false, std::memory_order_release); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  std::atomic<bool>* flag_;
};

}  // namespace

Communicator::Communicator(const keyhole_transport& transport,
                           const keyhole_communicator_config& config)
    : transport_(transport), config_(config) {
  const auto bad = [](const std::string& text) { throw Error(Status::invalid_argument, text); };
  if (transport.size == 0 || transport.size > kMostRanks) {
    bad("size is " + std::to_string(transport.size) + ", allowed: 1.." +
        std::to_string(kMostRanks));
  }
  if (transport.rank >= transport.size) {
    bad("rank is " + std::to_string(transport.rank) + ", allowed: 0.." +
        std::to_string(transport.size - 1));
  }
  if (transport.all_gather == nullptr) bad("all_gather is NULL");
  if (config_.timeout_ms == KEYHOLE_AUTO) config_.timeout_ms = kDefaultTimeoutMs;
  if (config_.long_timeout_ms == KEYHOLE_AUTO) config_.long_timeout_ms = kDefaultLongTimeoutMs;
}

Communicator::~Communicator() {
  if (transport_.release != nullptr) transport_.release(transport_.context);
}

void Communicator::throw_lost() const { throw Error(lost_status_, lost_text_); }

void Communicator::lose(Status status, const std::string& text) {
  lost_text_ = text;
  lost_status_ = status;
  // Whatever the reason: what is left on streams may wait for ranks that do not come.
  if (transport_.abort != nullptr) transport_.abort(transport_.context);
  throw_lost();
}

void Communicator::gather(const std::byte* own, std::byte* all, size_t bytes, Wait wait) {
  char text[KEYHOLE_TRANSPORT_TEXT] = {};
  const uint32_t timeout = wait == Wait::step ? config_.timeout_ms : config_.long_timeout_ms;
  const keyhole_status status =
      transport_.all_gather(transport_.context, own, all, bytes, timeout, text);
  if (status == KEYHOLE_OK) return;
  text[sizeof text - 1] = 0;
  lose_transport(status, text);
}

void Communicator::lose_transport(keyhole_status status, const char* text) {
  const std::string why = std::string(text).empty() ? "the transport failed" : text;
  lose(status == KEYHOLE_TIMEOUT ? Status::timeout : Status::rank_failed,
       rank_text(rank()) + " of " + std::to_string(size()) + ": " + why);
}

void Communicator::gather_on_stream(const void* own, void* all, size_t bytes, void* stream) {
  const Inside inside(in_use_);
  if (is_lost()) throw_lost();
  if (transport_.all_gather_on_stream == nullptr) {
    throw Error(Status::unsupported,
                "the transport has no all_gather_on_stream: gather host memory, or use one that "
                "has it (keyhole/nccl.h)");
  }
  char text[KEYHOLE_TRANSPORT_TEXT] = {};
  const keyhole_status status =
      transport_.all_gather_on_stream(transport_.context, own, all, bytes, stream, text);
  if (status == KEYHOLE_OK) return;
  text[sizeof text - 1] = 0;
  lose_transport(status, text);
}

void Communicator::abandon(Status status, const std::string& text) {
  const Inside inside(in_use_);
  if (is_lost()) throw_lost();
  lose(status, rank_text(rank()) + " of " + std::to_string(size()) + ": " + text);
}

void Communicator::check_calls(const Call& call, size_t bytes, size_t stride) {
  for (uint32_t r = 0; r < size(); ++r) {
    Header header;
    std::memcpy(&header, all_.data() + r * stride, sizeof header);
    header.what[kWhatBytes - 1] = 0;
    if (header.number == calls_ && header.detail == call.detail && header.bytes == bytes &&
        std::string(header.what) == std::string(call.what).substr(0, kWhatBytes - 1)) {
      continue;
    }
    const auto name = [](const char* what, uint64_t number, uint64_t detail) {
      return std::string(what) + " (call " + std::to_string(number) + ", " +
             std::to_string(detail) + ")";
    };
    lose(Status::rank_failed,
         rank_text(r) + " is in " + name(header.what, header.number, header.detail) + ", " +
             rank_text(rank()) + " in " + name(call.what, calls_, call.detail) +
             ": all ranks must make the same calls in the same order");
  }
}

void Communicator::throw_first_error(const Call& call, const std::exception_ptr& error,
                                     size_t stride) {
  uint32_t first = size();
  Header header;
  for (uint32_t r = 0; r < size() && first == size(); ++r) {
    std::memcpy(&header, all_.data() + r * stride, sizeof header);
    if (header.status != 0) first = r;
  }
  if (first == size()) return;
  char text[KEYHOLE_TRANSPORT_TEXT] = {};
  if (error != nullptr) std::snprintf(text, sizeof text, "%s", read(error).second.c_str());
  all_.resize(sizeof text * size());
  gather(reinterpret_cast<const std::byte*>(text), all_.data(), sizeof text, call.wait);
  const char* const its = reinterpret_cast<const char*>(all_.data()) + first * sizeof text;
  throw Error(static_cast<Status>(header.status),
              rank_text(first) + ": " + std::string(its, strnlen(its, sizeof text)));
}

Communicator::Payloads Communicator::exchange(const Call& call, std::span<const std::byte> own,
                                              const std::exception_ptr& error) {
  const Inside inside(in_use_);
  if (is_lost()) throw_lost();
  const size_t most = all_.max_size() / size() - sizeof(Header);
  if (own.size() > most) {
    throw Error(Status::invalid_argument, std::to_string(own.size()) + " bytes of each of " +
                                              std::to_string(size()) + " ranks, allowed: up to " +
                                              std::to_string(most));
  }
  const size_t stride = sizeof(Header) + own.size();
  // Whoever has no memory makes no call: it is not counted, and can be made again.
  own_.resize(stride);
  all_.resize(stride * size());
  ++calls_;
  Header header;
  header.number = calls_;
  header.detail = call.detail;
  header.bytes = own.size();
  header.status = error == nullptr ? 0 : static_cast<int32_t>(read(error).first);
  std::snprintf(header.what, sizeof header.what, "%s", call.what);
  std::memcpy(own_.data(), &header, sizeof header);
  std::copy(own.begin(), own.end(), own_.begin() + sizeof header);
  gather(own_.data(), all_.data(), stride, call.wait);
  check_calls(call, own.size(), stride);
  throw_first_error(call, error, stride);
  return {all_.data() + sizeof header, stride};
}

void Communicator::together(const Call& call, const std::function<void()>& part) {
  std::exception_ptr error;
  try {
    part();
  } catch (...) {
    error = std::current_exception();
  }
  agree(call, error);
}

void Communicator::sum(std::span<float> values) {
  constexpr size_t kChunk = kChunkBytes / sizeof(float);
  for (size_t begin = 0; begin < values.size(); begin += kChunk) {
    const std::span<float> part = values.subspan(begin, std::min(kChunk, values.size() - begin));
    const Payloads all = exchange({"sum", values.size(), Wait::step}, std::as_bytes(part));
    for (uint32_t r = 0; r < size(); ++r) {
      const auto* from = reinterpret_cast<const float*>(all.of(r));
      for (size_t i = 0; i < part.size(); ++i) part[i] = r == 0 ? from[i] : part[i] + from[i];
    }
  }
}

void Communicator::broadcast(std::span<std::byte> data, uint32_t root) {
  if (root >= size()) {
    throw Error(Status::invalid_argument,
                "root is " + std::to_string(root) + ", allowed: 0.." + std::to_string(size() - 1));
  }
  for (size_t begin = 0; begin < data.size(); begin += kChunkBytes) {
    const std::span<std::byte> part =
        data.subspan(begin, std::min(kChunkBytes, data.size() - begin));
    const Payloads all = exchange({"broadcast", data.size(), Wait::work}, part);
    std::copy_n(all.of(root), part.size(), part.begin());
  }
}

}  // namespace keyhole::runtime
