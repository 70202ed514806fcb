// The order of a neighbour search: blocks of keys, for each of them batches of queries.
#include "gpu/neighbours.h"

#include <cmath>
#include <string>

#include "gpu/cuda/neighbour_kernels.h"
#include "gpu/cuda/scratch.h"
#include "gpu/cuda/staging.h"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

constexpr size_t kBatch =
    8192;  // queries per launch: 32 tiles, of which 8 shares of the keys fill an H200 twice
constexpr size_t kHeld = 131072;  // queries whose lists are kept while the keys stream by
constexpr size_t kMemoryLimit = size_t{2} << 30U;
constexpr size_t kLeastShare = 512;  // keys: below, filling the pipeline costs more than it brings

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

/// Which of a query's group maxima becomes its threshold. Of its `most` best keys the sample has L = most / 16 on
/// average and almost never this many, so this many sampled keys reach down past them; some 22 * 16 of all keys do
/// for most = 100.
uint32_t sample_rank(uint32_t most) {
  const double mean = static_cast<double>(most) / kSampleEvery;
  return static_cast<uint32_t>(std::ceil(mean + 4.5 * std::sqrt(mean) + 4.0));
}

void check(const NeighbourTask& task, const NeighbourLists& lists) {
  const auto refuse = [](const std::string& text) {
    throw Error(Status::invalid_argument, "neighbour search: " + text);
  };
  if (task.most < 1 || task.most > kMostNeighbours) {
    refuse("most is " + std::to_string(task.most) + ", allowed: 1.." +
           std::to_string(kMostNeighbours));
  }
  if (!is_supported_head_dim(task.keys.dim) || task.queries.dim != task.keys.dim) {
    refuse("dimensions are " + std::to_string(task.keys.dim) + " of keys and " +
           std::to_string(task.queries.dim) +
           " of queries, allowed: the same of 64, 80, 96, 128, 256");
  }
  for (const DType type : {task.keys.dtype, task.queries.dtype}) {
    if (type == DType::i8) refuse("dtype i8, allowed: f32, f16, bf16");
  }
  constexpr size_t kMostRows = 0xFFFFFFFF - kMostBlockKeys;
  if (task.keys.count > kMostRows || task.queries.count > kMostRows)
    refuse("more than 2^32 - 2^17 - 1 rows");
  if (task.thin > task.most || (task.thin != 0 && lists.scores != nullptr) ||
      (task.thin != 0 && task.queries.count != task.keys.count)) {
    refuse("thin is " + std::to_string(task.thin) +
           ", allowed: 0, or 1..most where the queries are the keys and no scores are asked for");
  }
  if ((task.key_extra == nullptr) != (task.query_extra == nullptr)) {
    refuse("an extra coordinate of keys or of queries alone");
  }
  const bool no_data = (task.queries.count != 0 && task.queries.data == nullptr) ||
                       (task.keys.count != 0 && task.keys.data == nullptr);
  if (no_data || (task.queries.count != 0 && (lists.ids == nullptr || lists.counts == nullptr))) {
    refuse("a null pointer for keys, queries, ids or counts");
  }
}

class CudaNeighbours final : public NeighbourSearch {
 public:
  explicit CudaNeighbours(const NeighbourConfig& config)
      : config_(config), use_(std::make_unique<UseDevice>(config.ordinal)) {
    if (config_.memory_limit == 0) config_.memory_limit = kMemoryLimit;
    if (config_.block_keys == 0) config_.block_keys = kMostBlockKeys;
    if (config_.block_keys % 1024 != 0 || config_.block_keys > kMostBlockKeys) {
      throw Error(Status::invalid_argument, "block_keys is " + std::to_string(config_.block_keys) +
                                                ", allowed: multiples of 1024 up to 131072");
    }
    check_cuda(
        cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, config_.ordinal),
        "asking for a device's size");
    use_.reset();
  }

  void run(const NeighbourTask& task, const NeighbourLists& lists) override {
    check(task, lists);
    figures_ = {};
    if (task.queries.count == 0) return;
    const UseDevice use(config_.ordinal);
    try {
      search(task, lists);
    } catch (...) {
      // What was enqueued still reads our memory, and perhaps the caller's.
      (void)cudaStreamSynchronize(copies_);
      (void)cudaStreamSynchronize(stream_);
      staging_.drop();
      results_.drop();
      throw;
    }
  }

  [[nodiscard]] NeighbourFigures figures() const override { return figures_; }
  [[nodiscard]] size_t bytes() const override {
    size_t sum = 0;
    for (const Scratch* s : {&queries_,
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
    Scratch keys, extra;
    OwnEvent ready, done;  // uploaded; no longer read
  };
  struct Sizes {
    size_t held, batch, block;
  };

  /// Thread blocks of a launch: whole waves of them; more and smaller ones where limits make them unequal.
  [[nodiscard]] size_t waves(bool limited) const {
    return (limited ? 4 : 2) * static_cast<size_t>(processors_);
  }
  [[nodiscard]] size_t shares_of(size_t rows, size_t keys, bool limited) const {
    const size_t tiles = (rows + kTileQueries - 1) / kTileQueries;
    const size_t wanted = waves(limited) / tiles;
    return std::clamp<size_t>(std::min(wanted, keys / kLeastShare), 1, kMostShares);
  }
  /// Most lists of a batch of at most `rows` queries: one per query and share.
  [[nodiscard]] size_t most_lists(size_t rows, bool limited) const {
    const size_t full = kTileQueries * waves(limited);
    return std::max(rows, std::min(round_up(rows, kTileQueries) * kMostShares, full));
  }
  [[nodiscard]] size_t operand_bytes(const NeighbourTask& task) const {
    return size_t{task.keys.dim} * (task.keys.dtype == DType::f32 ? 6 : 2);
  }
  [[nodiscard]] size_t bytes_of(const NeighbourTask& task, const Sizes& s) const {
    const size_t row = operand_bytes(task);
    const size_t lists = most_lists(s.batch, task.limits != nullptr);
    const size_t raw = type_ == DType::f32 || task.queries.dtype != type_ ? 4 * task.keys.dim : 0;
    return s.held * (row + task.most * sizeof(Rank) + 28) + 2 * s.block * (row + 4) +
           std::max(s.held, s.block) * raw + (task.thin != 0 ? task.keys.count * (row + 4) : 0) +
           lists * (kListRoom * sizeof(Rank) + 4) +
           s.batch * (kMostGroups * sizeof(float) + 16 * size_t{task.most});
  }
  [[nodiscard]] Sizes choose_sizes(const NeighbourTask& task) const {
    Sizes s = {std::min(task.queries.count, kHeld), std::min(task.queries.count, kBatch),
               std::min(round_up(std::max<size_t>(task.keys.count, 1), 1024), config_.block_keys)};
    while (bytes_of(task, s) > config_.memory_limit) {
      if (s.batch > 2048) {
        s.batch /= 2;
      } else if (s.held > std::max<size_t>(s.batch, 8192)) {
        s.held /= 2;
      } else if (s.block > 8192) {
        s.block = round_up(s.block / 2, 1024);
      } else {
        throw Error(Status::out_of_device_memory,
                    "neighbour search: " + std::to_string(bytes_of(task, s)) +
                        " bytes are needed, " + std::to_string(config_.memory_limit) + " allowed");
      }
    }
    return s;
  }

  void search(NeighbourTask task, const NeighbourLists& lists);
  /// Thinning reads any key at any time: brings all of them to the device, packed.
  void load_whole(NeighbourTask& task);
  [[nodiscard]] static bool in_place(const NeighbourTask& task) {
    return task.keys_in == Memory::device && task.keys.dtype != DType::f32 &&
           reinterpret_cast<uintptr_t>(task.keys.data) % 16 == 0 && task.keys.stride % 16 == 0;
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
    return type_ == DType::f16    ? launch_search_f16(args, stream_)
           : type_ == DType::bf16 ? launch_search_bf16(args, stream_)
                                  : launch_search_f32(args, stream_);
  }
  NeighbourConfig config_;
  std::unique_ptr<UseDevice> use_;  // while members are made, and no longer
  OwnStream stream_, copies_;
  int processors_ = 1;
  DType type_ = DType::f16;
  Staging staging_{2};  // to the device
  Staging results_{6};  // from it: those of two batches
  Scratch queries_, limits_, query_extra_, scales_, raw_, whole_, whole_extra_;
  Scratch lists_, list_sizes_, maxima_, thresholds_, best_, best_sizes_, missed_, counters_;
  Block blocks_[2];
  struct Answer {
    Scratch memory;
    OwnEvent ready, fetched;
  } answers_[2];
  size_t turn_ = 0;
  NeighbourFigures figures_;
};

void CudaNeighbours::load_whole(NeighbourTask& task) {
  const RowsView rows = task.keys;
  const size_t row_bytes = operand_bytes(task);
  std::byte* to = whole_.reserve(rows.count * row_bytes);
  if (task.keys_in == Memory::host) {
    staging_.send(rows.data, rows.stride, rows.count, row_bytes, to, copies_);
    if (task.key_extra != nullptr) {
      float* extra = whole_extra_.reserve_of<float>(rows.count);
      check_cuda(cudaMemcpyAsync(extra, task.key_extra, rows.count * sizeof(float),
                                 cudaMemcpyHostToDevice, copies_),
                 "copying to the device");
      task.key_extra = extra;
    }
  } else {
    check_cuda(launch_convert(rows.data, rows.stride, rows.dtype, static_cast<uint32_t>(rows.count),
                              rows.dim, rows.dtype, reinterpret_cast<uint16_t*>(to), nullptr,
                              nullptr, copies_),
               "copying keys");
  }
  task.keys.data = to;
  task.keys.stride = row_bytes;
  task.keys_in = Memory::device;
}

void CudaNeighbours::search(NeighbourTask task, const NeighbourLists& lists) {
  type_ = task.keys.dtype;
  const Sizes sizes = choose_sizes(task);
  if (task.thin != 0 && type_ != DType::f32 && !in_place(task)) load_whole(task);
  const uint32_t most = task.most;
  queries_.reserve(sizes.held * operand_bytes(task));
  best_.reserve_of<Rank>(sizes.held * most);
  best_sizes_.reserve_of<uint32_t>(sizes.held);
  thresholds_.reserve_of<Rank>(sizes.held);
  const size_t room = most_lists(sizes.batch, task.limits != nullptr);
  lists_.reserve_of<Rank>(room * kListRoom);
  list_sizes_.reserve_of<uint32_t>(room);
  maxima_.reserve_of<float>(sizes.batch * kMostGroups);
  missed_.reserve_of<uint32_t>(1 + sizes.batch);
  auto* counters = counters_.reserve_of<unsigned long long>(2);
  check_cuda(cudaMemsetAsync(counters, 0, 2 * sizeof(unsigned long long), stream_),
             "clearing counters");

  for (size_t held = 0; held < task.queries.count; held += sizes.held) {
    const size_t n = std::min(sizes.held, task.queries.count - held);
    load_queries(task, held, n);
    const size_t blocks = (task.keys.count + sizes.block - 1) / sizes.block;
    for (size_t b = 0; b < blocks; ++b) {
      Block& block = blocks_[b % 2];
      if (b >= 2) check_cuda(cudaStreamWaitEvent(copies_, block.done), "ordering streams");
      TileArgs args;
      args.first_key = static_cast<uint32_t>(b * sizes.block);
      args.key_count =
          static_cast<uint32_t>(std::min(sizes.block, task.keys.count - b * sizes.block));
      args.dim = task.keys.dim;
      args.most = most;
      load_keys(task, block, args);
      block.ready.record(copies_);
      check_cuda(cudaStreamWaitEvent(stream_, block.ready), "ordering streams");
      for (size_t first = 0; first < n; first += sizes.batch) {
        const size_t batch = std::min(sizes.batch, n - first);
        search_batch(task, args, first, batch);
        if (b + 1 == blocks) answer(task, lists, held + first, first, batch);
      }
      block.done.record(stream_);
      ++figures_.blocks;
    }
    if (blocks == 0) {
      check_cuda(cudaMemsetAsync(best_sizes_.as<uint32_t>(), 0, n * sizeof(uint32_t), stream_),
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
  check_cuda(cudaMemcpy(counted, counters, sizeof counted, cudaMemcpyDeviceToHost),
             "reading counters");
  figures_.passed = counted[0];
  figures_.repeated = counted[1];
}

void CudaNeighbours::load_queries(const NeighbourTask& task, size_t first, size_t n) {
  const RowsView rows = task.queries.slice(first, n);
  const auto kind =
      task.queries_in == Memory::host ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToDevice;
  const auto copy_numbers = [&](const auto* from, Scratch& to) {
    check_cuda(cudaMemcpyAsync(to.reserve(n * sizeof *from), from + first, n * sizeof *from, kind,
                               copies_),
               "copying to the device");
  };
  if (task.limits != nullptr) copy_numbers(task.limits, limits_);
  if (task.query_extra != nullptr) copy_numbers(task.query_extra, query_extra_);
  const bool rounds = type_ != DType::f32 && rows.dtype != type_;
  if (rounds) scales_.reserve_of<float>(n);

  const size_t row_bytes = rows.dim * dtype_size(rows.dtype);
  const std::byte* from = rows.data;
  size_t stride = rows.stride;
  if (task.queries_in == Memory::host) {
    std::byte* raw = rows.dtype == type_ && type_ != DType::f32 ? queries_.as<std::byte>()
                                                                : raw_.reserve(n * row_bytes);
    staging_.send(rows.data, rows.stride, n, row_bytes, raw, copies_);
    from = raw;
    stride = row_bytes;
  }
  if (from != queries_.as<std::byte>()) {
    check_cuda(
        launch_convert(from, stride, rows.dtype, static_cast<uint32_t>(n), rows.dim, type_,
                       queries_.as<uint16_t>(), rounds ? scales_.as<float>() : nullptr,
                       task.query_extra != nullptr ? query_extra_.as<float>() : nullptr, copies_),
        "converting queries");
  }
}

void CudaNeighbours::load_keys(const NeighbourTask& task, Block& block, TileArgs& args) {
  const RowsView rows = task.keys.slice(args.first_key, args.key_count);
  const size_t row_bytes = rows.dim * dtype_size(rows.dtype);
  const bool on_host = task.keys_in == Memory::host;
  if (task.key_extra != nullptr) {
    const float* extra = task.key_extra + args.first_key;
    if (on_host) {
      float* to = block.extra.reserve_of<float>(rows.count);
      check_cuda(
          cudaMemcpyAsync(to, extra, rows.count * sizeof(float), cudaMemcpyHostToDevice, copies_),
          "copying to the device");
      extra = to;
    }
    args.key_extra = extra;
  }
  const bool as_they_are = type_ != DType::f32;
  if (in_place(task)) {
    args.keys = rows.data;
    args.key_stride = rows.stride;
    return;
  }
  args.key_stride = operand_bytes(task);
  std::byte* to = block.keys.reserve(rows.count * args.key_stride);
  args.keys = to;
  const std::byte* from = rows.data;
  size_t stride = rows.stride;
  if (on_host) {
    std::byte* raw = as_they_are ? to : raw_.reserve(rows.count * row_bytes);
    staging_.send(rows.data, rows.stride, rows.count, row_bytes, raw, copies_);
    if (as_they_are) return;
    from = raw;
    stride = row_bytes;
  }
  check_cuda(launch_convert(from, stride, rows.dtype, args.key_count, rows.dim, type_,
                            reinterpret_cast<uint16_t*>(to), nullptr, nullptr, copies_),
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
  divide(args, args.key_count, shares_of(n, args.key_count, limited));
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
    divide(sample, rows, std::min(shares_of(n, args.key_count, false), tiles));
    sample.maxima = maxima_.as<float>();
    sample.groups = static_cast<uint32_t>(4 * tiles);
    check_cuda(launch(sample), "sampling scores");
    check_cuda(
        launch_thresholds(sample.maxima, args.rows, sample.groups, rank, thresholds, stream_),
        "estimating thresholds");
  }
  if (estimates || !is_first) args.thresholds = thresholds;
  check_cuda(launch(args), "searching for neighbours");

  uint32_t* missed = missed_.as<uint32_t>();
  if (estimates) {
    check_cuda(cudaMemsetAsync(missed, 0, sizeof(uint32_t), stream_), "clearing a counter");
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
  check_cuda(launch_merge(merge, stream_), "merging lists");
  if (!estimates) return;
  args.chosen = merge.chosen = missed + 1;
  args.chosen_count = merge.chosen_count = missed;
  merge.missed = nullptr;
  check_cuda(launch(args), "searching for neighbours again");
  check_cuda(launch_merge(merge, stream_), "merging lists again");
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
    check_cuda(cudaStreamWaitEvent(stream_, a.fetched), "ordering streams");
    // Entries past a count are copied with the others.
    check_cuda(cudaMemsetAsync(ids, 0, numbers * sizeof(uint32_t), stream_), "clearing an answer");
  }
  const Rank* best = best_.as<Rank>() + first * task.most;
  const uint32_t* sizes = best_sizes_.as<uint32_t>() + first;
  if (task.thin != 0 && type_ != DType::f32) {
    ThinArgs thin;
    thin.keys = task.keys.data;
    thin.key_stride = task.keys.stride;
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
    check_cuda(launch_thin(thin, stream_), "thinning lists");
  } else {
    const bool scaled = type_ != DType::f32 && task.queries.dtype != type_;
    check_cuda(launch_unpack(best, sizes, scaled ? scales_.as<float>() + first : nullptr,
                             static_cast<uint32_t>(n), task.most, static_cast<uint32_t>(width), ids,
                             scores, counts, stream_),
               "unpacking an answer");
  }
  if (!on_host) return;
  a.ready.record(stream_);
  check_cuda(cudaStreamWaitEvent(copies_, a.ready), "ordering streams");
  results_.receive(ids, n * width * sizeof(uint32_t), lists.ids + to * width, copies_);
  if (scores != nullptr) {
    results_.receive(scores, n * width * sizeof(float), lists.scores + to * width, copies_);
  }
  results_.receive(counts, n * sizeof(uint32_t), lists.counts + to, copies_);
  a.fetched.record(copies_);
}

}  // namespace

std::unique_ptr<NeighbourSearch> make_cuda_neighbours(const NeighbourConfig& config) {
  require_tensor_cores(config.ordinal, "neighbour search");
  return std::make_unique<CudaNeighbours>(config);
}

}  // namespace keyhole::gpu
