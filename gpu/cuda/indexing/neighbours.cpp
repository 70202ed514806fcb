// The order of a neighbour search: blocks of keys, for each of them batches of queries.
#include <memory>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/staging.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/common/supported_device.h"
#include "gpu/cuda/indexing/neighbour_kernels.h"
#include "gpu/cuda/indexing/neighbour_plan.h"
#include "gpu/cuda/indexing/workspaces.h"

namespace keyhole::gpu {
namespace {

class CudaNeighbours final : public NeighbourSearch {
 public:
  CudaNeighbours(int ordinal, const NeighbourConfig& config)
      : ordinal_(ordinal),
        plan_(config, processors_of(ordinal)),
        use_(std::make_unique<DeviceScope>(ordinal)) {
    use_.reset();
  }

  void run(const NeighbourTask& task, const NeighbourLists& lists) override {
    check_task(task, lists);
    figures_ = {};
    if (task.queries.tokens == 0) return;
    const DeviceScope use(ordinal_);
    try {
      search(task, lists);
    } catch (...) {
      // What was enqueued still reads our memory, and perhaps the caller's.
      (void)cudaStreamSynchronize(copies_.get());
      (void)cudaStreamSynchronize(stream_.get());
      staging_.drop();
      results_.drop();
      throw;
    }
  }

  [[nodiscard]] NeighbourFigures figures() const override { return figures_; }
  [[nodiscard]] size_t bytes() const override {
    size_t sum = 0;
    for (const ScratchBuffer* s : {&queries_,
                                   &limits_,
                                   &query_extra_,
                                   &scales_,
                                   &raw_,
                                   &whole_,
                                   &whole_extra_,
                                   &lists_,
                                   &list_sizes_,
                                   &maxima_,
                                   &thresholds_,
                                   &best_,
                                   &best_sizes_,
                                   &missed_,
                                   &counters_,
                                   &blocks_[0].keys,
                                   &blocks_[1].keys,
                                   &blocks_[0].extra,
                                   &blocks_[1].extra,
                                   &answers_[0].memory,
                                   &answers_[1].memory}) {
      sum += s->bytes();
    }
    return sum;
  }

 private:
  struct Block {
    ScratchBuffer keys, extra;
    Event ready, done;  // uploaded; no longer read
  };
  [[nodiscard]] static int processors_of(int ordinal) {
    int processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, ordinal),
          "the device's number of multiprocessors");
    return processors;
  }

  void search(NeighbourTask task, const NeighbourLists& lists);
  /// Thinning reads any key at any time: brings all of them to the device, packed.
  void load_whole(NeighbourTask& task);
  [[nodiscard]] static bool in_place(const NeighbourTask& task) {
    return task.keys.on_device() && task.keys.dtype != DType::f32 &&
           reinterpret_cast<uintptr_t>(task.keys.data) % 16 == 0 &&
           stride_bytes(task.keys) % 16 == 0;
  }
  /// Kernels and copies move rows as bytes.
  [[nodiscard]] static size_t stride_bytes(const TensorView& rows) {
    return rows.token_stride * dtype_size(rows.dtype);
  }
  void load_queries(const NeighbourTask& task, size_t first, size_t n);
  /// Enqueues what brings the block's keys into place, on the copy stream.
  void load_keys(const NeighbourTask& task, Block& block, TileArgs& args);
  /// Queries [first, first + n) of those that are held, against the block that args names.
  void search_batch(const NeighbourTask& task, TileArgs args, size_t first, size_t n);
  /// Sends their answers to places `to` and on of the caller's.
  void answer(const NeighbourTask& task, const NeighbourLists& lists, size_t to, size_t first,
              size_t n);
  [[nodiscard]] static size_t width_of(const NeighbourTask& task) {
    return task.thin != 0 ? task.thin : task.most;
  }
  [[nodiscard]] cudaError_t launch(const TileArgs& args) const {
    return type_ == DType::f16    ? launch_search_f16(args, stream_.get())
           : type_ == DType::bf16 ? launch_search_bf16(args, stream_.get())
                                  : launch_search_f32(args, stream_.get());
  }
  int ordinal_;
  NeighbourPlan plan_;
  std::unique_ptr<DeviceScope> use_;  // while members are made, and no longer
  OwnStream stream_, copies_;
  DType type_ = DType::f16;
  Staging staging_{2};  // to the device
  Staging results_{6};  // from it: those of two batches
  ScratchBuffer queries_, limits_, query_extra_, scales_, raw_, whole_, whole_extra_;
  ScratchBuffer lists_, list_sizes_, maxima_, thresholds_, best_, best_sizes_, missed_, counters_;
  Block blocks_[2];
  struct Answer {
    ScratchBuffer memory;
    Event ready, fetched;
  } answers_[2];
  size_t turn_ = 0;
  NeighbourFigures figures_;
};

void CudaNeighbours::load_whole(NeighbourTask& task) {
  const TensorView rows = task.keys;
  std::byte* to = whole_.reserve(rows.tokens * operand_bytes(task));
  if (!rows.on_device()) {
    staging_.send(rows, to, copies_.get());
    if (task.key_extra != nullptr) {
      float* extra = whole_extra_.reserve_of<float>(rows.tokens);
      check(cudaMemcpyAsync(extra, task.key_extra, rows.tokens * sizeof(float),
                            cudaMemcpyHostToDevice, copies_.get()),
            "copying to the device");
      task.key_extra = extra;
    }
  } else {
    check(launch_convert(rows, rows.dtype, reinterpret_cast<uint16_t*>(to), nullptr, nullptr,
                         copies_.get()),
          "copying keys");
  }
  task.keys =
      dense_tensor<const std::byte>(to, rows.tokens, 1, rows.dim, rows.dtype, Memory::device);
}

void CudaNeighbours::search(NeighbourTask task, const NeighbourLists& lists) {
  type_ = task.keys.dtype;
  const NeighbourSizes sizes = plan_.sizes_of(task);
  if (task.thin != 0 && type_ != DType::f32 && !in_place(task)) load_whole(task);
  const uint32_t most = task.most;
  queries_.reserve(sizes.held * operand_bytes(task));
  best_.reserve_of<Rank>(sizes.held * most);
  best_sizes_.reserve_of<uint32_t>(sizes.held);
  thresholds_.reserve_of<Rank>(sizes.held);
  const size_t lists_held = plan_.most_lists(sizes.batch, task.limits != nullptr);
  lists_.reserve_of<Rank>(lists_held * kListCapacity);
  list_sizes_.reserve_of<uint32_t>(lists_held);
  maxima_.reserve_of<float>(sizes.batch * kMostGroups);
  missed_.reserve_of<uint32_t>(1 + sizes.batch);
  auto* counters = counters_.reserve_of<unsigned long long>(2);
  check(cudaMemsetAsync(counters, 0, 2 * sizeof(unsigned long long), stream_.get()),
        "clearing counters");

  for (size_t held = 0; held < task.queries.tokens; held += sizes.held) {
    const size_t n = std::min(sizes.held, task.queries.tokens - held);
    load_queries(task, held, n);
    const size_t blocks = (task.keys.tokens + sizes.block - 1) / sizes.block;
    for (size_t b = 0; b < blocks; ++b) {
      Block& block = blocks_[b % 2];
      if (b >= 2) copies_.wait_for(block.done.get());
      TileArgs args;
      args.first_key = static_cast<uint32_t>(b * sizes.block);
      args.key_count =
          static_cast<uint32_t>(std::min(sizes.block, task.keys.tokens - b * sizes.block));
      args.dim = task.keys.dim;
      args.most = most;
      load_keys(task, block, args);
      block.ready.record(copies_.get());
      stream_.wait_for(block.ready.get());
      for (size_t first = 0; first < n; first += sizes.batch) {
        const size_t batch = std::min(sizes.batch, n - first);
        search_batch(task, args, first, batch);
        if (b + 1 == blocks) answer(task, lists, held + first, first, batch);
      }
      block.done.record(stream_.get());
      ++figures_.blocks;
    }
    if (blocks == 0) {
      check(cudaMemsetAsync(best_sizes_.as<uint32_t>(), 0, n * sizeof(uint32_t), stream_.get()),
            "clearing counts");
      for (size_t first = 0; first < n; first += sizes.batch) {
        answer(task, lists, held + first, first, std::min(sizes.batch, n - first));
      }
    }
    results_.receive_all();
    stream_.wait();
    copies_.wait();
  }
  unsigned long long counted[2];
  check(cudaMemcpy(counted, counters, sizeof counted, cudaMemcpyDeviceToHost), "reading counters");
  figures_.passed = counted[0];
  figures_.repeated = counted[1];
}

void CudaNeighbours::load_queries(const NeighbourTask& task, size_t first, size_t n) {
  TensorView rows = task.queries.slice(first, n);
  const bool on_host = !rows.on_device();
  const auto kind = on_host ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToDevice;
  const auto copy_numbers = [&](const auto* from, ScratchBuffer& to) {
    check(cudaMemcpyAsync(to.reserve(n * sizeof *from), from + first, n * sizeof *from, kind,
                          copies_.get()),
          "copying to the device");
  };
  if (task.limits != nullptr) copy_numbers(task.limits, limits_);
  if (task.query_extra != nullptr) copy_numbers(task.query_extra, query_extra_);
  const bool rounds = type_ != DType::f32 && rows.dtype != type_;
  if (rounds) scales_.reserve_of<float>(n);

  if (on_host) {
    std::byte* raw = rows.dtype == type_ && type_ != DType::f32
                         ? queries_.as<std::byte>()
                         : raw_.reserve(n * rows.row_bytes());
    staging_.send(rows, raw, copies_.get());
    rows = dense_rows(raw, n, rows.dim, rows.dtype);
  }
  if (rows.data != queries_.as<std::byte>()) {
    check(launch_convert(
              rows, type_, queries_.as<uint16_t>(), rounds ? scales_.as<float>() : nullptr,
              task.query_extra != nullptr ? query_extra_.as<float>() : nullptr, copies_.get()),
          "converting queries");
  }
}

void CudaNeighbours::load_keys(const NeighbourTask& task, Block& block, TileArgs& args) {
  TensorView rows = task.keys.slice(args.first_key, args.key_count);
  const bool on_host = !rows.on_device();
  if (task.key_extra != nullptr) {
    const float* extra = task.key_extra + args.first_key;
    if (on_host) {
      float* to = block.extra.reserve_of<float>(rows.tokens);
      check(cudaMemcpyAsync(to, extra, rows.tokens * sizeof(float), cudaMemcpyHostToDevice,
                            copies_.get()),
            "copying to the device");
      extra = to;
    }
    args.key_extra = extra;
  }
  const bool as_they_are = type_ != DType::f32;
  if (in_place(task)) {
    args.keys = rows.data;
    args.key_stride = stride_bytes(rows);
    return;
  }
  args.key_stride = operand_bytes(task);
  std::byte* to = block.keys.reserve(rows.tokens * args.key_stride);
  args.keys = to;
  if (on_host) {
    std::byte* raw = as_they_are ? to : raw_.reserve(rows.tokens * rows.row_bytes());
    staging_.send(rows, raw, copies_.get());
    if (as_they_are) return;
    rows = dense_rows(raw, rows.tokens, rows.dim, rows.dtype);
  }
  check(
      launch_convert(rows, type_, reinterpret_cast<uint16_t*>(to), nullptr, nullptr, copies_.get()),
      "converting keys");
}

void CudaNeighbours::search_batch(const NeighbourTask& task, TileArgs args, size_t first,
                                  size_t n) {
  const bool limited = task.limits != nullptr;
  const auto divide = [&](TileArgs& a, size_t keys, size_t shares) {
    a.share_keys = static_cast<uint32_t>(round_up((keys + shares - 1) / shares, kTileKeys));
    a.shares = static_cast<uint32_t>((keys + a.share_keys - 1) / a.share_keys);
  };
  const size_t width = operand_bytes(task) / sizeof(uint16_t);
  args.rows = static_cast<uint32_t>(n);
  args.queries = queries_.as<uint16_t>() + first * width;
  if (args.key_extra != nullptr) args.query_extra = query_extra_.as<float>() + first;
  if (limited) args.limits = limits_.as<uint32_t>() + first;
  divide(args, args.key_count, plan_.shares_of(n, args.key_count, limited));
  args.lists = lists_.as<Rank>();
  args.list_sizes = list_sizes_.as<uint32_t>();

  Rank* thresholds = thresholds_.as<Rank>() + first;
  const bool is_first = args.first_key == 0;
  const uint32_t rank = sample_rank(args.most);
  const bool estimates = is_first && args.key_count >= 4 * kSampleEvery * rank;
  if (estimates) {
    TileArgs sample = args;
    const size_t rows = (args.key_count + kSampleEvery - 1) / kSampleEvery;
    const size_t tiles = (rows + kTileKeys - 1) / kTileKeys;
    divide(sample, rows, std::min(plan_.shares_of(n, args.key_count, false), tiles));
    sample.maxima = maxima_.as<float>();
    sample.groups = static_cast<uint32_t>(4 * tiles);
    check(launch(sample), "sampling scores");
    check(
        launch_thresholds(sample.maxima, args.rows, sample.groups, rank, thresholds, stream_.get()),
        "estimating thresholds");
  }
  if (estimates || !is_first) args.thresholds = thresholds;
  check(launch(args), "searching for neighbours");

  uint32_t* missed = missed_.as<uint32_t>();
  if (estimates) {
    check(cudaMemsetAsync(missed, 0, sizeof(uint32_t), stream_.get()), "clearing a counter");
  }
  MergeArgs merge;
  merge.lists = args.lists;
  merge.list_sizes = args.list_sizes;
  merge.rows = args.rows;
  merge.shares = args.shares;
  merge.most = args.most;
  merge.best = best_.as<Rank>() + first * args.most;
  merge.best_sizes = best_sizes_.as<uint32_t>() + first;
  merge.with_earlier = !is_first;
  merge.thresholds = thresholds;
  merge.missed = estimates ? missed + 1 : nullptr;
  merge.missed_count = missed;
  merge.counters = counters_.as<unsigned long long>();
  merge.limits = args.limits;
  merge.key_count = args.key_count;
  check(launch_merge(merge, stream_.get()), "merging lists");
  if (!estimates) return;
  args.chosen = merge.chosen = missed + 1;
  args.chosen_count = merge.chosen_count = missed;
  merge.missed = nullptr;
  check(launch(args), "searching for neighbours again");
  check(launch_merge(merge, stream_.get()), "merging lists again");
}

void CudaNeighbours::answer(const NeighbourTask& task, const NeighbourLists& lists, size_t to,
                            size_t first, size_t n) {
  const size_t width = width_of(task);
  const bool on_host = lists.in == Memory::host;
  Answer& a = answers_[turn_++ % 2];
  uint32_t* ids = lists.ids + to * width;
  uint32_t* counts = lists.counts + to;
  float* scores = lists.scores != nullptr ? lists.scores + to * width : nullptr;
  if (on_host) {
    const size_t numbers = n * (width * (scores != nullptr ? 2 : 1) + 1);
    if (numbers * sizeof(uint32_t) > a.memory.bytes()) a.fetched.wait();
    ids = a.memory.reserve_of<uint32_t>(numbers);
    counts = ids + n * width;
    if (scores != nullptr) scores = reinterpret_cast<float*>(counts + n);
    stream_.wait_for(a.fetched.get());
    // Entries past a count are copied with the others.
    check(cudaMemsetAsync(ids, 0, numbers * sizeof(uint32_t), stream_.get()), "clearing an answer");
  }
  const Rank* best = best_.as<Rank>() + first * task.most;
  const uint32_t* sizes = best_sizes_.as<uint32_t>() + first;
  if (task.thin != 0 && type_ != DType::f32) {
    ThinArgs thin;
    thin.keys = task.keys.data;
    thin.key_stride = stride_bytes(task.keys);
    thin.key_extra = task.key_extra;
    thin.dim = task.keys.dim;
    thin.dtype = type_;
    thin.best = best;
    thin.best_sizes = sizes;
    thin.rows = static_cast<uint32_t>(n);
    thin.most = task.most;
    thin.first_query = static_cast<uint32_t>(to);
    thin.thin = task.thin;
    thin.ids = ids;
    thin.counts = counts;
    check(launch_thin(thin, stream_.get()), "thinning lists");
  } else {
    const bool scaled = type_ != DType::f32 && task.queries.dtype != type_;
    check(launch_unpack(best, sizes, scaled ? scales_.as<float>() + first : nullptr,
                        static_cast<uint32_t>(n), task.most, static_cast<uint32_t>(width), ids,
                        scores, counts, stream_.get()),
          "unpacking an answer");
  }
  if (!on_host) return;
  a.ready.record(stream_.get());
  copies_.wait_for(a.ready.get());
  results_.receive(ids, n * width * sizeof(uint32_t), lists.ids + to * width, copies_.get());
  if (scores != nullptr) {
    results_.receive(scores, n * width * sizeof(float), lists.scores + to * width, copies_.get());
  }
  results_.receive(counts, n * sizeof(uint32_t), lists.counts + to, copies_.get());
  a.fetched.record(copies_.get());
}

}  // namespace

std::unique_ptr<NeighbourSearch> make_cuda_neighbours(int ordinal, const NeighbourConfig& config) {
  require_device(ordinal, "neighbour search");
  return std::make_unique<CudaNeighbours>(ordinal, config);
}

}  // namespace keyhole::gpu
