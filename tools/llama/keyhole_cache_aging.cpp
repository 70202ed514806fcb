// A cache whose tokens age: the session is brought to what such a cache holds between any two steps.
#include <algorithm>
#include <vector>

#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

void KeyholeCache::hold(const LayerChunk& chunk) {
  if (given_all_) withdraw(given_settled_);
  aging_->add(places_[chunk.layer], chunk.k, chunk.v, chunk.tokens);
}

void KeyholeCache::withdraw(uint32_t settled) {
  check(keyhole_session_truncate(session_.get(), settled));
  given_settled_ = settled;
  given_all_ = false;
}

void KeyholeCache::deliver() {
  if (!aging_ || !aging_->level()) return;
  const uint32_t tokens = aging_->tokens(0);
  const AgingRows::State now = aging_->state(tokens);
  if (given_all_ && now == given_) return;
  if (given_all_) withdraw(given_settled_);
  const uint32_t count = tokens - given_settled_;
  if (count > 0) {
    std::vector<float> k, v;
    for (uint32_t place = 0; place < places_.size(); ++place) {
      aging_->content(place, given_settled_, k, v);
      const keyhole_tensor keys = own_rows(k.data(), kv_heads_, own_kv_heads_, count);
      const keyhole_tensor values = own_rows(v.data(), kv_heads_, own_kv_heads_, count);
      check(keyhole_session_append(session_.get(), place, &keys, &values, nullptr));
    }
  }
  given_ = now;
  given_settled_ = aging_->settled(tokens);
  given_all_ = true;
  aging_->forget_old();
}

void KeyholeCache::truncate_aging(uint32_t tokens) {
  aging_->truncate(tokens);
  withdraw(std::min(given_settled_, aging_->settled(tokens)));
}

}  // namespace keyhole::tools
