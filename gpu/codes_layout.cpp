#include "gpu/codes_layout.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "gpu/alignment.h"
#include "gpu/layer_kinds.h"

namespace keyhole::gpu {
namespace {

constexpr size_t kWorkBeside = size_t{1} << 16U;  // alignment of its parts, counters
constexpr uint32_t kCopiedBlocks = 4;             // 4 MiB for 8 heads of 128 components in 16 bits
constexpr size_t kLineBytes = 128;                // no two KV heads share one
constexpr uint32_t kMaximaOfBlock = 8;            // one for every 32 rows
// 4M tokens: the choice of the heaviest rows has shared memory for a little more.
constexpr uint32_t kMostBlocks = 1U << 14;
// Of rows whose lists are made: 8 KV heads of 128 components in 16 bits, so that their products fill the device.
constexpr size_t kMostListedBytes = size_t{64} << 20U;

[[noreturn]] void refuse(const std::string& what, uint64_t seen, const std::string& allowed) {
  throw Error(Status::invalid_argument,
              "codes: " + what + " is " + std::to_string(seen) + ", allowed: " + allowed);
}

/// The product of `factors`, rounded up to kPartAlignment.
size_t aligned_product(std::initializer_list<size_t> factors) {
  size_t bytes = 1;
  bool too_large = false;
  for (const size_t f : factors) too_large |= __builtin_mul_overflow(bytes, f, &bytes);
  too_large |= __builtin_add_overflow(bytes, kPartAlignment - 1, &bytes);
  if (too_large) throw Error(Status::invalid_argument, "codes: the size in bytes exceeds 2^64 - 1");
  return bytes / kPartAlignment * kPartAlignment;
}

void check_codes(const CodesShape& s) {
  if (s.kv_heads == 0 || s.kv_heads > 65535) refuse("kv_heads", s.kv_heads, "1 to 65535");
  if (s.q_heads % s.kv_heads != 0 || s.q_heads == 0 || s.q_heads / s.kv_heads > kMaxDeviceGroup) {
    refuse("q_heads", s.q_heads, "1 to 16 times kv_heads (" + std::to_string(s.kv_heads) + ")");
  }
  if (!is_device_head_dim(s.code.dim)) refuse("head_dim", s.code.dim, kDeviceHeadDims);
  const auto is_width = [](uint32_t bits) { return bits == 1 || bits == 2 || bits == 4; };
  if (!is_width(s.code.key_bits)) refuse("key_bits", s.code.key_bits, "1, 2, 4");
  if (!is_width(s.code.value_bits) && s.code.value_bits != 0) {
    refuse("value_bits", s.code.value_bits, "0, 1, 2, 4");
  }
  if (static_cast<uint32_t>(s.dtype) > static_cast<uint32_t>(DType::i8)) {
    refuse("dtype", static_cast<uint64_t>(s.dtype), "f32, f16, bf16, i8");
  }
  if (s.exact_rows > kMostDeviceRows) {
    refuse("exact_rows", s.exact_rows, "0 to " + std::to_string(kMostDeviceRows));
  }
  if (s.coded_layers > s.layers) {
    refuse("coded_layers", s.coded_layers, "0 to layers (" + std::to_string(s.layers) + ")");
  }
  if (s.list_rows > kCodeBlock) {
    refuse("list_rows", s.list_rows, "0 to " + std::to_string(kCodeBlock));
  }
  if (s.blocks > kMostBlocks) refuse("blocks", s.blocks, "0 to " + std::to_string(kMostBlocks));
}

}  // namespace

ListWorkLayout::ListWorkLayout(const CodesShape& shape) {
  const size_t capacity = std::max(shape.blocks, 1U);
  rows = static_cast<uint32_t>(std::min<size_t>(kListStretch, capacity * kCodeBlock));
  const size_t of_head = size_t{rows} * shape.code.dim * dtype_size(shape.dtype);
  heads = static_cast<uint32_t>(
      std::clamp<size_t>(kMostListedBytes / (2 * of_head), 1, shape.kv_heads));
  const ListStretch stretch(rows, shape.list_rows);
  const size_t clusters = (stretch.clusters + 7) / 8 * 8;
  const auto take = [&](std::initializer_list<size_t> factors) {
    const size_t offset = bytes;
    bytes += aligned_product(factors);
    return offset;
  };
  keys = take({heads, of_head});
  values = take({heads, of_head});
  labels = take({heads, rows, sizeof(uint16_t)});
  order = take({heads, rows, sizeof(uint16_t)});
  counts = take({heads, rows / kCodeBlock, clusters, sizeof(uint16_t)});
  starts = take({heads, clusters + 1, sizeof(uint32_t)});
  centroids = take({heads, clusters, shape.code.dim, sizeof(uint16_t)});
  offsets = take({heads, clusters, sizeof(float)});
  begins = take({heads, stretch.lists, sizeof(uint32_t)});
}

CodesLayout::CodesLayout(const CodesShape& shape) {
  check_codes(shape);
  const size_t dim = shape.code.dim;
  const size_t kv_heads = shape.kv_heads;
  const size_t group = shape.q_heads / shape.kv_heads;
  const size_t layers = coded_layers(shape);
  const size_t capacity = shape.blocks == 0 ? 1 : shape.blocks;
  const size_t splits = most_code_splits(shape.kv_heads);
  head_stride = shape.code.block_bytes();
  block_stride = kv_heads * head_stride;
  layer_stride = capacity * block_stride;
  const auto add = [](size_t& to, size_t more) {
    if (!__builtin_add_overflow(to, more, &to)) return;
    throw Error(Status::invalid_argument, "codes: the size in bytes exceeds 2^64 - 1");
  };
  const auto take = [&](std::initializer_list<size_t> factors) {
    const size_t offset = others_bytes;
    add(others_bytes, aligned_product(factors));
    return offset;
  };
  blocks_bytes = aligned_product({layers, layer_stride});
  key_scales = take({layers, kv_heads, dim, sizeof(float)});
  value_scales = take({layers, kv_heads, sizeof(float)});
  counts = take({layers, 2, sizeof(uint32_t)});
  if (shape.dtype == DType::i8) {
    row_scales = take({layers, capacity, kv_heads, 2, dim, sizeof(uint16_t)});
  }
  if (shape.rows_by_host) {
    row_steps = take({kv_heads, sizeof(uint32_t)});
    copied_blocks = static_cast<uint32_t>(std::min<size_t>(capacity, kCopiedBlocks));
    copied = take({2, kv_heads, copied_blocks, kCodeBlock, dim, dtype_size(shape.dtype)});
  }
  if (shape.sinks != nullptr) sinks = take({shape.layers, shape.q_heads, sizeof(float)});
  // A maximum of every 32 rows and padded head, and the splits' states: o, a maximum, a sum, and the codes'
  // log-sum-exp. Of several tokens as many heads as the largest step has.
  const auto of_token = static_cast<uint32_t>(group);
  const uint32_t tokens = most_codes_tokens(shape);
  const size_t heads = std::max<size_t>(group * tokens, 1);
  // A maximum for each row of queries with those that fill tiles, and a bit for every row and four heads: the most of
  // any number of tokens and any parts of it. Of 512 components tiles have 8 heads at least.
  const auto of_part = [&](size_t rows) {
    const size_t least = dim > 256 ? 8 : 4;
    return std::max<size_t>(padded_rows(rows), least) + (rows + kDoubtHeads - 1) / kDoubtHeads;
  };
  size_t maxima = 0;
  for (uint32_t n = 1; n <= tokens; ++n) {
    for (uint32_t each = 1; each <= step_parts(of_token, n).tokens; ++each) {
      maxima = std::max(maxima, parts_of_tokens(n, each).count * of_part(group * each));
    }
  }
  work_bytes = kWorkBeside * tokens +
               aligned_product({maxima, kv_heads, capacity, kMaximaOfBlock, sizeof(float)}) +
               aligned_product({kv_heads, splits, heads, dim + 3, sizeof(float)});
  if (has_lists(shape)) {
    lists = ListSizes(static_cast<uint32_t>(capacity), shape.list_rows);
    // Maxima of all pairs and the table of these; scores, weights and bins.
    const size_t rows = padded_rows(group * most_listed_tokens(shape));
    add(work_bytes, aligned_product({kv_heads, lists.groups, rows + 2, sizeof(float)}));
    add(work_bytes, aligned_product({kv_heads, lists.lists, 2 * rows + 1, sizeof(float)}));
    add(work_bytes, aligned_product({kv_heads, kEndsOfLists}));
    add(work_bytes,
        aligned_product({kv_heads, kMostListGridBlocks, told_bytes(static_cast<uint32_t>(rows))}));
    const auto take_of_lists = [&](std::initializer_list<size_t> factors) {
      const size_t offset = list_stride;
      add(list_stride, aligned_product(factors));
      return offset;
    };
    list_pairs = take_of_lists({kv_heads, lists.pairs, list_pair_bytes(shape.code)});
    list_ids = take_of_lists({kv_heads, lists.pairs, kPairRows, sizeof(uint32_t)});
    list_places = take_of_lists({kv_heads, lists.lists, sizeof(ListPlace)});
    list_figures = take_of_lists({kv_heads, lists.lists, sizeof(ListFigures)});
    list_key_means = take_of_lists({kv_heads, lists.lists, dim, sizeof(uint16_t)});
    list_value_means = take_of_lists({kv_heads, lists.lists, dim, sizeof(uint16_t)});
    list_mean_tiles = take_of_lists({kv_heads, lists.lists, dim, sizeof(uint16_t)});
    list_counts = take_of_lists({1 + kv_heads, sizeof(uint32_t)});
    list_memory = take_of_lists({kMemoryOfLists});
    list_arrivals = take_of_lists({kv_heads, sizeof(uint32_t)});
    list_totals = take_of_lists({1 + capacity, kv_heads, 2, sizeof(uint32_t)});
    list_bytes = aligned_product({layers, list_stride});
    list_work = ListWorkLayout(shape);
    add(list_bytes, list_work.bytes);
  }
  work = take({work_bytes});
  figures = take({layers, kv_heads, sizeof(CodeFigures)});
  arrivals = take({capacity, kv_heads, sizeof(uint32_t)});
  doubt = take({DoubtLayout(kv_heads, heads, dim, tokens).bytes});
  bytes = blocks_bytes;
  add(bytes, others_bytes);
  add(bytes, list_bytes);
}

RowExchangeLayout::RowExchangeLayout(const CodesShape& shape) {
  check_codes(shape);
  constexpr uint32_t kWordsOfLine = kLineBytes / sizeof(uint64_t);
  request_words = (1 + shape.exact_rows + kWordsOfLine - 1) / kWordsOfLine * kWordsOfLine;
  row_bytes = size_t{shape.code.dim} * dtype_size(shape.dtype);
  answers = aligned_product({shape.kv_heads, request_words, sizeof(uint64_t)});
  rows = answers + aligned_product({shape.kv_heads, kLineBytes});
  bytes = rows + aligned_product({shape.kv_heads, shape.exact_rows, 2, row_bytes});
}

namespace {

/// Of all parts that have codes.
template <class Bytes>
size_t sum_of_coded(const CodesShape& shape, const Bytes& bytes) {
  std::vector<float> sinks;
  const bool is_whole = shape.shapes.empty();
  return sum_of_parts(parts_of(shape, sinks), [&](const CodesShape& part) {
    return is_whole || part.layers != 0 ? bytes(part) : size_t{0};
  });
}

}  // namespace

size_t codes_pinned_bytes(const CodesShape& shape) {
  if (!shape.rows_by_host) return 0;
  return sum_of_coded(shape, [](const CodesShape& part) { return RowExchangeLayout(part).bytes; });
}

size_t codes_bytes(const CodesShape& shape) {
  return sum_of_coded(shape, [](const CodesShape& part) { return CodesLayout(part).bytes; });
}

std::string why_no_codes(const CodesShape& shape) {
  if (!shape.shapes.empty()) {
    std::vector<float> sinks;
    for (const CodesShape& part : parts_of(shape, sinks)) {
      if (part.layers == 0) continue;
      if (std::string why = why_no_codes(part); !why.empty()) return why;
    }
    return {};
  }
  check_codes(shape);
  const uint32_t keys = shape.code.key_bits, values = shape.code.value_bits;
  if (keys == values && keys != 1) return {};
  // Codes of the host alone: they would double the kernels. 1 bit is not enough for answers, and unequal bits have
  // shown no use.
  return "no device has kernels for codes with key_bits " + std::to_string(keys) +
         " and value_bits " + std::to_string(values) + "; allowed are 2 of both or 4 of both";
}

bool chooses_among_lists(const CodesShape& shape, const KernelLimits& limits) {
  if (shape.rows_by_host || shape.list_rows == 0) return false;
  if (!shape.shapes.empty()) {
    std::vector<float> sinks;
    const std::vector<CodesShape> parts = parts_of(shape, sinks);
    return std::any_of(parts.begin(), parts.end(), [&](const CodesShape& part) {
      return part.layers != 0 && chooses_among_lists(part, limits);
    });
  }
  if (!has_lists(shape)) return false;
  const uint32_t blocks = std::max(shape.blocks, 1U), kv_heads = std::max(shape.kv_heads, 1U);
  const uint32_t group = shape.q_heads / kv_heads;
  const size_t places = size_t{blocks} * kMaximaOfBlock + ListSizes(blocks, shape.list_rows).lists;
  constexpr uint32_t kPlaces = kChoosingBlocks * kChoosingThreads;  // a number of each thread
  const size_t turns = (places + kPlaces - 1) / kPlaces;
  const size_t by_cluster =
      finish_bytes(shape.code.dim, group) + turns * kChoosingThreads * sizeof(float);
  if (limits.clusters && by_cluster <= limits.shared_of_block) return true;
  // A cluster that chooses among lists for 16 heads of 256 takes 117 KiB.
  const bool by_clusters = limits.clusters && (shape.code.dim <= 128 || group <= 8);
  const bool run_at_once = size_t{kv_heads} * kListGridBlocks <= limits.multiprocessors;
  return (by_clusters || run_at_once) &&
         lone_bytes(shape.code.dim, group) <= limits.shared_of_block;
}

}  // namespace keyhole::gpu
