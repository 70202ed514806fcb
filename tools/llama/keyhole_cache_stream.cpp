// Steps of a cache in the order of a stream: enqueued one by one, and captured in graphs.
#include <array>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "keyhole/stream.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

void KeyholeCache::use_stream(void* stream) {
  check(keyhole_session_set_stream(session_.get(), stream));
  stream_ = stream;
}

void KeyholeCache::enqueue_attend(uint32_t layer, const float* q, const float* k, const float* v,
                                  float* out, float* room) {
  const auto own = [&](const float* data, uint32_t all, uint32_t count) {
    return own_rows(data, all, count, 1, KEYHOLE_DEVICE);
  };
  const keyhole_tensor queries = own(q, q_heads_, own_q_heads_);
  const keyhole_tensor keys = own(k, kv_heads_, own_kv_heads_);
  const keyhole_tensor values = own(v, kv_heads_, own_kv_heads_);
  const keyhole_tensor result = heads(shares_heads() ? room : out, own_q_heads_, KEYHOLE_DEVICE);
  check(keyhole_session_attend(session_.get(), places_[layer], &queries, &keys, &values, &result,
                               nullptr));
  if (!shares_heads()) return;
  // One token's heads: those of the ranks lie behind each other in their order.
  check(keyhole_communicator_gather_on_stream(
      heads_of_ranks_, room, out, size_t{own_q_heads_} * head_dim_ * sizeof(float), stream_));
}

void KeyholeCache::enqueue_extend(uint32_t layer, uint32_t n, const float* q, const float* k,
                                  const float* v, float* out) {
  const auto tokens = [&](const float* data, uint32_t heads) {
    const int64_t shape[] = {n, heads, head_dim_};
    keyhole_tensor t = keyhole_tensor_host(data, KEYHOLE_F32, 3, shape);
    t.memory = KEYHOLE_DEVICE;
    return t;
  };
  const keyhole_tensor queries = tokens(q, q_heads_), keys = tokens(k, kv_heads_);
  const keyhole_tensor values = tokens(v, kv_heads_), result = tokens(out, q_heads_);
  check(keyhole_session_extend(session_.get(), places_[layer], &queries, &keys, &values, nullptr,
                               &result, nullptr));
}

void KeyholeCache::synchronize() {
  // Sessions that share tokens meet by themselves. Those that share heads do not know of each other: they meet before
  // they wait for the stream, which may stand in a gather, and once they know how the step went.
  meet_ranks();
  try {
    check(keyhole_session_synchronize(session_.get()));
  } catch (const std::exception& e) {
    meet_ranks(&e);
    throw;
  }
  meet_ranks();
}

void KeyholeCache::meet_ranks(const std::exception* why) {
  if (!shares_heads()) return;
  std::array<char, 256> own{};
  if (why != nullptr) std::strncpy(own.data(), why->what(), own.size() - 1);
  std::vector<std::array<char, 256>> all(keyhole_communicator_get_size(heads_of_ranks_));
  check(keyhole_communicator_gather(heads_of_ranks_, own.data(), all.data(), own.size()));
  for (size_t r = 0; r < all.size() && why == nullptr; ++r) {
    if (all[r][0] == 0) continue;
    throw std::runtime_error("rank " + std::to_string(r) + ": " + all[r].data());
  }
}

bool KeyholeCache::can_be_captured() const {
  return on_device_ && std::string_view(statistics().signal) == "wait";
}

bool KeyholeCache::announce() {
  const keyhole_status status = keyhole_session_announce(session_.get());
  if (status == KEYHOLE_INVALID_ARGUMENT) return false;
  check(status);
  return true;
}

}  // namespace keyhole::tools
