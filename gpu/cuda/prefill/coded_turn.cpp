#include "gpu/cuda/prefill/coded_turn.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/kernel_generation.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kMostPasses = 5;
constexpr uint32_t kListCapacity = 256;  ///< of a query in the first pass
constexpr uint32_t kMostFetched = 8192;  ///< rows of a KV head
constexpr uint32_t kMostSplitsOfTurn = 32;

uint32_t padded_rows(uint32_t rows) {
  return (rows + kCodedQueries - 1) / kCodedQueries * kCodedQueries;
}

}  // namespace

CodedTurn::CodedTurn(const SessionMemory& session, bool hopper)
    : session_(session),
      hopper_(hopper),
      launches_ahead_(kernels_have_clusters(session.ordinal())) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, session.ordinal()),
        "the device's attributes");
  processors_ = static_cast<uint32_t>(processors);
}

bool CodedTurn::supports(const CodedRows& rows) {
  const uint32_t d = rows.code.dim, bits = rows.code.key_bits;
  return rows.blocks_at != nullptr && rows.keys != nullptr && bits == rows.code.value_bits &&
         (bits == 2 || bits == 4) && (d == 64 || d == 80 || d == 96 || d == 128 || d == 256);
}

bool CodedTurn::chooses(const CodedRows& rows, uint32_t group) {
  return rows.chosen_blocks > kNewestBlocks && rows.chosen_blocks < rows.blocks &&
         has_coded_choice(rows.code.dim) && can_choose_coded(rows.blocks, group);
}

void CodedTurn::give_back() {
  if (memory_.bytes() == 0) return;
  const size_t bytes = memory_.bytes();
  memory_ = DeviceBuffer();
  session_.release(bytes);
}

uint32_t CodedTurn::splits_of(uint32_t padded) const {
  // Every thread block has a multiprocessor of its own: as few splits as leave few of these idle at the end.
  const uint32_t blocks = padded / kCodedQueries * params_.rows.kv_heads;
  const uint32_t attended =
      params_.chosen_blocks != 0 ? params_.chosen_blocks : params_.rows.blocks;
  const uint32_t most = std::clamp(attended / 2, 1U, kMostSplitsOfTurn);
  uint32_t best = 1;
  double best_use = 0.0;
  for (uint32_t splits = 1; splits <= most; ++splits) {
    const uint32_t waves = (blocks * splits + processors_ - 1) / processors_;
    const double use = double{1.0} * blocks * splits / (double{1.0} * waves * processors_);
    if (use > best_use + 0.02) {
      best = splits;
      best_use = use;
    }
    if (best_use > 0.92) break;
  }
  return best;
}

size_t CodedTurn::list_entries() const {
  // In doubt few queries list many rows each, and behind a short context all may list all rows.
  return std::max(size_t{params_.padded} * kListCapacity,
                  std::min(size_t{params_.padded} * params_.row_capacity,
                           size_t{kCodedQueries} * kMostFetched));
}

void CodedTurn::lay_out(std::byte* base, size_t& end) {
  CodedParams& p = params_;
  end = 0;
  const auto take = [&](auto*& pointer, size_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = base == nullptr ? nullptr : reinterpret_cast<T*>(base + end);
    end += (count * sizeof(T) + 255) / 256 * 256;
  };
  const size_t heads = p.rows.kv_heads, dim = p.rows.code.dim, padded = p.padded;
  const size_t rows = heads * padded, queries = size_t{p.n} * p.q_heads;
  take(p.o, queries * dim);
  take(p.sums, queries);
  take(p.q, rows * coded_columns(p.rows.code.dim));
  take(p.queries, rows);
  take(p.part_o, p.splits * rows * dim);
  take(p.part_sums, p.splits * rows);
  take(p.lists, heads * list_entries());
  take(p.list_counts, rows);
  take(p.status, 1);
  take(p.found, heads * p.rows.blocks * 8);
  take(p.before, heads * p.rows.blocks * 8);
  take(p.fetched, heads * p.row_capacity);
  take(p.fetched_counts, heads);
  take(p.fetched_rows, heads * p.row_capacity * 2 * p.rows.row_bytes);
  for (uint32_t*& list : lists_of_queries_) take(list, 2 * queries + heads);
  take(chosen_, rows / kCodedQueries * p.chosen_blocks);
}

void CodedTurn::reserve() {
  size_t bytes = 0;
  lay_out(nullptr, bytes);
  if (bytes > memory_.bytes()) {
    give_back();
    const BesideCapture beside;
    session_.claim(bytes, "many tokens over codes");
    try {
      memory_ = DeviceBuffer(bytes);
    } catch (...) {
      session_.release(bytes);
      throw;
    }
  }
  if (answer_.bytes() == 0) {
    const BesideCapture beside;
    before_.emplace();
    told_.emplace();
    answer_ = PinnedBuffer(sizeof(CodedStatus));
  }
  lay_out(memory_.data(), bytes);
}

void CodedTurn::enqueue_pass(cudaStream_t stream) {
  const size_t words = size_t{params_.rows.kv_heads} * params_.rows.blocks * 8;
  // The status lies before the words.
  const size_t bytes = static_cast<size_t>(reinterpret_cast<std::byte*>(params_.found + words) -
                                           reinterpret_cast<std::byte*>(params_.status));
  check(cudaMemsetAsync(params_.status, 0, bytes, stream), "rows of codes");
  launch_coded_prepare(params_, stream);
  if (params_.chosen_blocks != 0) launch_coded_choice(params_, chosen_, stream);
  launch_coded_attend(params_, hopper_, stream);
  launch_coded_fetch(params_, stream);
  launch_coded_merge(params_, stream);
  check(cudaMemcpyAsync(answer_.data(), params_.status, sizeof(CodedStatus), cudaMemcpyDeviceToHost,
                        stream),
        "many tokens over codes");
  told_->record(stream);
}

CodedStatus CodedTurn::wait_for_status() {
  told_->wait("many tokens over codes");
  CodedStatus status;
  std::memcpy(&status, answer_.data(), sizeof status);
  return status;
}

CodedAttention CodedTurn::attend(const CodedRows& rows, const BlockedParams& queries, DType dtype,
                                 const float* sinks, cudaStream_t stream,
                                 const std::function<void()>& meanwhile) {
  CodedParams& p = params_;
  p = CodedParams{};
  p.rows = rows;
  p.n = queries.n;
  p.q_heads = queries.q_heads;
  p.group = queries.q_heads / rows.kv_heads;
  p.logits = queries.logits;
  p.raw = queries.q;
  p.raw_low = queries.q_low;
  p.dtype = dtype;
  p.sinks = sinks;
  p.o_before = queries.o;
  p.sums_before = queries.sums;
  p.padded = padded_rows(p.n * p.group);
  p.launches_ahead = launches_ahead_;
  if (chooses(rows, p.group)) p.chosen_blocks = rows.chosen_blocks;
  p.splits = splits_of(p.padded);
  p.list_capacity = kListCapacity;
  p.row_capacity = std::min(rows.blocks * kCodeBlock, kMostFetched);
  reserve();
  if (p.chosen_blocks != 0) p.chosen = chosen_;
  const size_t part_rows = size_t{p.splits} * p.padded, entries = list_entries();
  const size_t of_list = size_t{p.n} * p.q_heads;

  before_->record(stream);
  CodedAttention end;
  end.chosen_blocks = p.chosen_blocks;
  while (true) {
    const auto place = [&](uint32_t* list, auto& number, auto& lse, auto& counts) {
      number = list;
      lse = reinterpret_cast<float*>(list + of_list);
      counts = list + 2 * of_list;
    };
    place(lists_of_queries_[end.passes % 2], p.next_rows, p.next_lse, p.next_counts);
    enqueue_pass(stream);
    if (end.passes == 0 && meanwhile) {
      before_->wait("many tokens over codes");
      try {
        meanwhile();
      } catch (...) {
        (void)cudaStreamSynchronize(stream);  // nothing may use the memory here afterwards
        throw;
      }
    }
    const CodedStatus status = wait_for_status();
    ++end.passes;
    end.rows = std::max(end.rows, status.rows);
    if (end.passes == 1) {
      end.doubted = status.doubted;
      end.heads = status.heads;
    }
    // A pass that was refused before it looked gives all heads up.
    constexpr uint32_t kNone = CodedStatus::kUnknown | CodedStatus::kTooMany;
    if ((status.flags & kNone) != 0) end.heads = rows.kv_heads;
    end.refused = status.flags != 0 || (status.doubted != 0 && end.passes == kMostPasses);
    if (end.refused || status.doubted == 0) return end;
    // Those that listed more rows than there was room for attend all blocks.
    p.chosen = nullptr;
    p.chosen_blocks = 0;
    p.pass_rows = p.next_rows;
    p.pass_lse = p.next_lse;
    p.pass_counts = p.next_counts;
    p.padded = padded_rows(status.most_doubted);
    p.splits = std::min(splits_of(p.padded), static_cast<uint32_t>(part_rows / p.padded));
    p.list_capacity = static_cast<uint32_t>(entries / p.padded);
  }
}

}  // namespace keyhole::gpu
