// Partitions on the device of the tests, as its header says.
#include "tests/runtime/fake_partitions.h"

#include <algorithm>
#include <cmath>

#include "tests/runtime/exact_sums.h"

namespace keyhole::test {

void FakePartitions::upload(uint32_t layer, uint32_t kv_head, uint32_t first,
                            const gpu::PartitionRows& rows) {
  on_call();
  Head& h = head(layer, kv_head);
  const uint32_t d = shape_.head_dim;
  if (first + rows.count > shape_.partitions)
    throw Error(Status::invalid_argument, "planted: beyond the capacity");
  h.keys.resize(size_t{first} * d);
  h.values.resize(size_t{first} * d * dtype_size(shape_.dtype));
  h.sizes.resize(first);
  for (size_t i = 0; i < rows.count; ++i) {
    h.sizes.push_back(rows.sizes[i]);
    for (uint32_t j = 0; j < d; ++j) {
      h.keys.push_back(rows.center[j] + rows.scales[j] * static_cast<float>(rows.keys[i * d + j]));
    }
  }
  h.values.insert(h.values.end(), rows.values,
                  rows.values + size_t{rows.count} * d * dtype_size(shape_.dtype));
}

uint32_t FakePartitions::count(uint32_t layer, uint32_t kv_head) const {
  return static_cast<uint32_t>(
      const_cast<FakePartitions*>(this)->head(layer, kv_head).sizes.size());
}

void FakePartitions::set(uint32_t layer, uint32_t kv_head, uint32_t chosen,
                         gpu::PartitionsTail tail) {
  on_call();
  head(layer, kv_head).chosen = chosen;
  head(layer, kv_head).tail = tail;
}

std::vector<uint32_t> FakePartitions::run(uint32_t layer, uint32_t kv_head, const float* q,
                                          uint32_t group, const cpu::Kernels& kernels,
                                          StateView tail) {
  const Head& h = head(layer, kv_head);
  const uint32_t d = shape_.head_dim;
  const size_t n = h.sizes.size();
  std::vector<double> logits(group * n), share(n, 0.0);
  for (uint32_t g = 0; g < group; ++g) {
    double most = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      const double dot = exact_dot(q + g * d, h.keys.data() + i * d, d);
      logits[g * n + i] = shape_.logits_of(layer).scale * dot + std::log(h.sizes[i]);
      most = std::max(most, logits[g * n + i]);
    }
    for (size_t i = 0; i < n; ++i) sum += std::exp(logits[g * n + i] - most);
    for (size_t i = 0; i < n; ++i) share[i] += std::exp(logits[g * n + i] - most) / sum;
  }
  std::vector<uint32_t> ids(n);
  for (uint32_t i = 0; i < n; ++i) ids[i] = i;
  std::stable_sort(ids.begin(), ids.end(),
                   [&](uint32_t a, uint32_t b) { return share[a] > share[b]; });
  ids.resize(std::min<size_t>(n, h.chosen));
  std::sort(ids.begin(), ids.end());
  for (uint32_t g = 0; g < group; ++g) {
    std::vector<double> o(d, 0.0);
    double most = -INFINITY, sum = 0.0;
    const auto counts = [&](uint32_t i) {
      return h.tail != gpu::PartitionsTail::none && !std::binary_search(ids.begin(), ids.end(), i);
    };
    for (uint32_t i = 0; i < n; ++i) {
      if (counts(i)) most = std::max(most, logits[g * n + i]);
    }
    std::vector<float> value(d);
    for (uint32_t i = 0; i < n; ++i) {
      if (!counts(i)) continue;
      const double w = std::exp(logits[g * n + i] - most);
      sum += w;
      kernels.to_f32[static_cast<int>(shape_.dtype)](
          h.values.data() + size_t{i} * d * dtype_size(shape_.dtype), value.data(), d);
      add_weighted(o.data(), w, value.data(), d);
    }
    tail.lse[g] = sum == 0.0 ? kMinusInf : static_cast<float>(most + std::log(sum));
    for (uint32_t j = 0; j < d; ++j) {
      tail.o[g * d + j] = sum == 0.0 ? 0.0F : static_cast<float>(o[j] / sum);
    }
  }
  return ids;
}

FakePartitions::Head& FakePartitions::head(uint32_t layer, uint32_t kv_head) {
  return heads_[size_t{layer} * shape_.kv_heads + kv_head];
}

}  // namespace keyhole::test
