#include "index/scan/code_lists.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "index/partitions/ivf_train.h"
#include "index/partitions/kmeans.h"

namespace keyhole::index {
namespace {

constexpr uint32_t kSeed = 1234;

size_t clusters_of(size_t rows, const ListConfig& config) {
  return std::max<size_t>((rows + config.rows / 2) / config.rows, 1);
}

/// Rows by cluster, clusters of more rows than a run can have in equal pieces of the text.
struct Lists {
  std::vector<uint32_t> ids, ends;
};

Lists lists_of(const std::vector<uint32_t>& labels, size_t clusters, size_t begin) {
  std::vector<uint32_t> ends(clusters + 1, 0);
  for (const uint32_t label : labels) ++ends[label + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  Lists lists;
  lists.ids.resize(labels.size());
  std::vector<uint32_t> next(ends.begin(), ends.end() - 1);
  for (size_t i = 0; i < labels.size(); ++i) {
    lists.ids[next[labels[i]]++] = static_cast<uint32_t>(begin + i);
  }
  for (size_t c = 0; c < clusters; ++c) {
    const uint32_t rows = ends[c + 1] - ends[c];
    const uint32_t pieces = (rows + kCodeBlock - 1) / kCodeBlock;
    for (uint32_t p = 1; p <= pieces; ++p) {
      lists.ends.push_back(ends[c] + static_cast<uint32_t>(uint64_t{rows} * p / pieces));
    }
  }
  return lists;
}

size_t to_line(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t codes_bytes(const CodeShape& shape, uint32_t rows) {
  return (rows + kCodeTile - 1) / kCodeTile * CodeLists::tile_bytes(shape);
}

/// Lays the lists of `chunk` out, all codes 0.
void lay_out(const CodeShape& shape, CodeChunk& chunk) {
  const size_t lists = chunk.lists();
  chunk.at.resize(lists);
  chunk.sizes.resize(lists);
  chunk.log_sizes.resize(lists);
  size_t bytes = 0;
  uint32_t begin = 0;
  for (size_t l = 0; l < lists; ++l) {
    chunk.at[l] = bytes;
    chunk.sizes[l] = static_cast<float>(chunk.ends[l] - begin);
    chunk.log_sizes[l] = std::log(chunk.sizes[l]);
    bytes += codes_bytes(shape, chunk.ends[l] - begin);
    begin = chunk.ends[l];
  }
  chunk.codes_bytes = bytes;
  chunk.means_bytes = 2 * lists * shape.dim * 2;
  const size_t codes_at = to_line(chunk.means_bytes);
  chunk.memory = std::make_shared<cpu::LineVector<std::byte>>(codes_at + bytes);
  chunk.means = chunk.memory->data();
  chunk.codes = chunk.means + codes_at;
  chunk.spreads.resize(lists);
  chunk.noises.resize(lists);
}

/// The parts of list `l`.
template <class Byte, class Chunk>
CodeRunOf<Byte> run_of(const CodeShape& shape, Chunk& chunk, size_t l) {
  const uint32_t rows = chunk.ends[l] - (l == 0 ? 0 : chunk.ends[l - 1]);
  const size_t tiles = (rows + kCodeTile - 1) / kCodeTile;
  Byte* codes = chunk.codes + chunk.at[l];
  Byte* values = codes + tiles * kCodeLanes * shape.key_words() * 4;
  const size_t row = size_t{shape.dim} * 2;
  return {.keys = codes,
          .values = values,
          .factors = values + tiles * kCodeLanes * shape.value_words() * 4,
          .key_mean = chunk.means + l * row,
          .value_mean = chunk.means + (chunk.lists() + l) * row,
          .noise = chunk.noises[l],
          .rows = rows};
}

/// A level of 1 is worth code_step() standard deviations of a row's components, about.
void find_widest(const CodeShape& shape, CodeChunk& chunk) {
  chunk.widest.resize(chunk.lists());
  for (size_t l = 0; l < chunk.lists(); ++l) {
    const float deviation =
        widest_factor(run_of<const std::byte>(shape, chunk, l)) / code_step(shape.key_bits);
    chunk.widest[l] = deviation * deviation;
  }
  chunk.has_unknown = std::any_of(chunk.noises.begin(), chunk.noises.end(),
                                  [](float noise) { return noise >= kUnknownNoise; });
}

}  // namespace

void join_memory(std::span<CodeChunk> chunks) {
  size_t bytes = 0;
  for (const CodeChunk& c : chunks) bytes += to_line(c.means_bytes) + to_line(c.codes_bytes);
  const auto memory = std::make_shared<cpu::LineVector<std::byte>>(bytes);
  std::byte* to = memory->data();
  for (CodeChunk& c : chunks) {
    std::copy_n(c.means, c.means_bytes, to);
    c.means = to;
    to += to_line(c.means_bytes);
    std::copy_n(c.codes, c.codes_bytes, to);
    c.codes = to;
    to += to_line(c.codes_bytes);
    c.memory = memory;
  }
}

double list_work(size_t rows, const ListConfig& config) {
  const size_t sample = kmeans_sample(rows, clusters_of(rows, config));
  return static_cast<double>(sample) * config.iterations + 2.0 * static_cast<double>(rows);
}

CodeChunk make_chunk(const Context& context, const CodeShape& shape, const Balance& balance,
                     const KvView& kv, size_t begin, size_t rows, const ListConfig& config,
                     ProgressMeter& meter) {
  const uint32_t dim = shape.dim;
  const size_t clusters = clusters_of(rows, config);
  std::vector<uint32_t> labels;
  {
    const std::vector<float> points =
        rows_as_f32(*context.kernels, kv.keys, begin, begin + rows, {}, balance.key_scale);
    labels = cluster_points(context, context.pool, points.data(), rows, dim,
                            {.clusters = static_cast<uint32_t>(clusters),
                             .iterations = config.iterations,
                             .nearness = Nearness::l2,
                             .seed = kSeed},
                            meter)
                 .labels;
  }
  CodeChunk chunk;
  chunk.begin = begin;
  chunk.rows = rows;
  Lists lists = lists_of(labels, clusters, begin);
  chunk.ids = std::move(lists.ids);
  chunk.ends = std::move(lists.ends);
  lay_out(shape, chunk);
  uint32_t first = 0;
  for (size_t l = 0; l < chunk.lists(); ++l) {
    const std::span<const uint32_t> ids(chunk.ids.data() + first, chunk.ends[l] - first);
    const CodeRunFigures figures =
        encode_rows(shape, balance, *context.kernels, kv, ids, run_of<std::byte>(shape, chunk, l));
    chunk.noises[l] = figures.noise;
    chunk.spreads[l] = figures.spread;
    first = chunk.ends[l];
    meter.advance(static_cast<double>(ids.size()));
  }
  find_widest(shape, chunk);
  return chunk;
}

// ---- One chunk -----------------------------------------------------------------------------------

size_t CodeChunk::bytes() const {
  return (ids.size() + ends.size()) * sizeof(uint32_t) + at.size() * sizeof(size_t) +
         (2 * sizes.size() + spreads.size() + noises.size() + widest.size()) * sizeof(float) +
         means_bytes + codes_bytes;
}

void CodeChunk::save(Writer& out) const {
  out.put(static_cast<uint64_t>(lists()));
  out.put_array(ids.data(), ids.size());
  out.put_array(ends.data(), ends.size());
  out.put_array(spreads.data(), spreads.size());
  out.put_array(noises.data(), noises.size());
  out.put_array(means, means_bytes);
  out.put_array(codes, codes_bytes);
}

CodeChunk CodeChunk::load(Reader& in, const CodeShape& shape, size_t begin, size_t end) {
  CodeChunk chunk;
  chunk.begin = begin;
  chunk.rows = end - begin;
  const auto lists = in.get<uint64_t>();
  require_sound(lists >= 1 && lists <= chunk.rows, "an impossible number of lists");
  chunk.ids = in.get_array<uint32_t>(chunk.rows);
  chunk.ends = in.get_array<uint32_t>(lists);
  uint32_t before = 0;
  for (const uint32_t e : chunk.ends) {
    require_sound(e > before && e - before <= kCodeBlock && e <= chunk.rows, "an impossible list");
    before = e;
  }
  require_sound(before == chunk.rows, "lists of other rows");
  std::vector<bool> seen(chunk.rows, false);
  for (const uint32_t id : chunk.ids) {
    require_sound(id >= begin && id < end && !seen[id - begin], "lists that repeat a row");
    seen[id - begin] = true;
  }
  const std::vector<float> spreads = in.get_array<float>(lists);
  const std::vector<float> noises = in.get_array<float>(lists);
  require_sound(std::all_of(spreads.begin(), spreads.end(),
                            [](float x) { return std::isfinite(x) && x >= 0.0F; }),
                "a list whose spread is not finite");
  const std::vector<uint16_t> means = in.get_array<uint16_t>(2 * lists * shape.dim);
  lay_out(shape, chunk);
  const std::vector<std::byte> codes = in.get_array<std::byte>(chunk.codes_bytes);
  std::memcpy(chunk.means, means.data(), chunk.means_bytes);
  std::copy(codes.begin(), codes.end(), chunk.codes);
  chunk.spreads = spreads;
  chunk.noises = noises;
  for (size_t l = 0; l < lists; ++l) {
    require_sound(is_sound_run(shape, run_of<const std::byte>(shape, chunk, l)),
                  "a list whose means or factors are not finite");
  }
  find_widest(shape, chunk);
  return chunk;
}

// ---- All chunks ----------------------------------------------------------------------------------

size_t CodeLists::chunk_of(size_t list) const {
  return static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), list) -
                             first_.begin()) -
         1;
}

CodeRun CodeLists::run(size_t list) const {
  const size_t c = chunk_of(list);
  return run_of<const std::byte>(shape_, *chunks_[c], list - first_[c]);
}

std::span<const uint32_t> CodeLists::ids(size_t list) const {
  const size_t c = chunk_of(list);
  const CodeChunk& chunk = *chunks_[c];
  const size_t l = list - first_[c];
  const uint32_t begin = l == 0 ? 0 : chunk.ends[l - 1];
  return {chunk.ids.data() + begin, chunk.ends[l] - begin};
}

void CodeLists::count_lists() {
  first_.resize(chunks_.size() + 1);
  for (size_t c = 0; c < chunks_.size(); ++c) first_[c + 1] = first_[c] + chunks_[c]->lists();
}

std::vector<size_t> CodeLists::cuts(size_t rows) const {
  // The largest power of 2 that ends at the last row: what lies in it becomes one chunk.
  size_t size = kCodeBlock;
  while (size < kListSegment && rows % (2 * size) == 0) size *= 2;
  size_t begin = std::min(count(), rows - size);
  // Chunks are replaced as a whole.
  for (const Chunk& chunk : chunks_) {
    if (chunk->begin <= begin && begin < chunk->begin + chunk->rows) begin = chunk->begin;
  }
  std::vector<size_t> cuts;
  for (; begin < rows; begin = (begin / kListSegment + 1) * kListSegment) cuts.push_back(begin);
  return cuts;
}

void CodeLists::append(std::vector<Chunk> chunks) {
  if (chunks.empty()) return;
  std::vector<Chunk> next = chunks_;
  while (!next.empty() && next.back()->begin >= chunks.front()->begin) next.pop_back();
  for (Chunk& chunk : chunks) next.push_back(std::move(chunk));
  std::vector<size_t> first = first_;
  first.reserve(next.size() + 1);
  first_.swap(first);
  chunks_.swap(next);
  count_lists();
}

void CodeLists::truncate(size_t rows) {
  while (!chunks_.empty() && count() > rows) chunks_.pop_back();
  count_lists();
}

size_t CodeLists::common_rows(const CodeLists& other) const {
  size_t n = 0;
  while (n < std::min(chunks(), other.chunks()) && &chunk(n) == &other.chunk(n)) ++n;
  return n == 0 ? 0 : end_of(n - 1);
}

size_t CodeLists::bytes() const {
  size_t bytes = balance_.key_scale.size() * sizeof(float) + first_.size() * sizeof(size_t);
  for (const Chunk& chunk : chunks_) bytes += chunk->bytes();
  return bytes;
}

size_t CodeLists::bytes_of_others() const {
  size_t bytes = 0;
  for (const Chunk& chunk : chunks_) bytes += chunk.is_first() ? 0 : chunk->bytes();
  return bytes;
}

}  // namespace keyhole::index
