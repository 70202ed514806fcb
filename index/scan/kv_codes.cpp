#include "index/scan/kv_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace keyhole::index {

void encode_block(const CodeShape& shape, const Balance& balance, const cpu::Kernels& kernels,
                  const KvView& kv, size_t first, std::byte* out) {
  std::memset(out, 0, shape.block_bytes());
  uint32_t ids[kCodeBlock];
  std::iota(ids, ids + kCodeBlock, static_cast<uint32_t>(first));
  const CodeRunFigures figures = encode_rows(shape, balance, kernels, kv, ids,
                                             {.keys = out,
                                              .values = out + shape.values_at(),
                                              .factors = out + shape.factors_at(),
                                              .key_mean = out + shape.key_mean_at(),
                                              .value_mean = out + shape.value_mean_at()});
  std::memcpy(out + shape.noise_at(), &figures.noise, sizeof figures.noise);
}

CodeRun KvCodes::run(size_t i) const {
  const std::byte* at = block(i);
  CodeRun run{.keys = at,
              .values = at + shape_.values_at(),
              .factors = at + shape_.factors_at(),
              .key_mean = at + shape_.key_mean_at(),
              .value_mean = at + shape_.value_mean_at(),
              .rows = kCodeBlock};
  std::memcpy(&run.noise, at + shape_.noise_at(), sizeof run.noise);
  return run;
}

void KvCodes::extend(const cpu::Kernels& kernels, const KvView& kv) {
  const size_t begin = blocks();
  const size_t end = std::max(begin, kv.keys.tokens / kCodeBlock);
  std::vector<std::byte> more((end - begin) * shape_.block_bytes());
  for (size_t b = begin; b < end; ++b) {
    encode_block(shape_, balance_, kernels, kv, b * kCodeBlock,
                 more.data() + (b - begin) * shape_.block_bytes());
  }
  append(more);
}

void KvCodes::append(const std::vector<std::byte>& more) {
  if (more.empty()) return;
  const size_t begin = blocks(), end = begin + more.size() / shape_.block_bytes();
  if (!pieces_.empty() && !pieces_.back().data.is_shared()) {
    Piece& last = pieces_.back();
    Data& data = last.data.own();
    data.resize((last.end - last.begin) * shape_.block_bytes());
    data.insert(data.end(), more.begin(), more.end());
    last.end = end;
    return;
  }
  Data data;
  if (pieces_.size() < kMostPieces) {
    data.assign(more.begin(), more.end());
    Piece piece{cpu::Shared(std::move(data)), begin, end};
    pieces_.push_back(std::move(piece));
    return;
  }
  data.reserve(end * shape_.block_bytes());
  for (const Piece& piece : pieces_) {
    const std::byte* from = piece.data->data();
    data.insert(data.end(), from, from + (piece.end - piece.begin) * shape_.block_bytes());
  }
  data.insert(data.end(), more.begin(), more.end());
  Piece all{cpu::Shared(std::move(data)), 0, end};
  pieces_.front() = std::move(all);
  pieces_.erase(pieces_.begin() + 1, pieces_.end());
}

void KvCodes::truncate(size_t rows) noexcept {
  const size_t end = std::min(blocks(), rows / kCodeBlock);
  while (!pieces_.empty() && pieces_.back().begin >= end) pieces_.pop_back();
  if (pieces_.empty()) return;
  Piece& last = pieces_.back();
  last.end = end;
  if (!last.data.is_shared()) last.data.own().resize((end - last.begin) * shape_.block_bytes());
}

size_t KvCodes::common_blocks(const KvCodes& other) const {
  size_t common = 0;
  for (size_t p = 0; p < std::min(pieces_.size(), other.pieces_.size()); ++p) {
    const Piece &mine = pieces_[p], &theirs = other.pieces_[p];
    if (mine.data.get() != theirs.data.get()) break;
    common = std::min(mine.end, theirs.end);
    if (mine.end != theirs.end) break;
  }
  return common;
}

size_t KvCodes::bytes() const {
  size_t bytes = balance_.key_scale.size() * sizeof(float);
  for (const Piece& piece : pieces_) bytes += piece.data->size();
  return bytes;
}

size_t KvCodes::bytes_of_others() const {
  size_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.data.is_first() ? 0 : piece.data->size();
  return bytes;
}

CodeQueries KvCodes::queries(const float* q, uint32_t group) const {
  const uint32_t dim = shape_.dim;
  CodeQueries out;
  out.group = group;
  out.rows.resize(size_t{group} * dim);
  (void)rotate_queries(balance_, q, group, out.rows.data());
  return out;
}

void KvCodes::score(const CodeQueries& queries, float* scores, size_t stride) const {
  const uint32_t dim = shape_.dim;
  for (size_t b = 0; b < blocks(); ++b) {
    const CodeRunReader block(shape_, run(b));
    for (uint32_t h = 0; h < queries.group; ++h) {
      const float* q = queries.rows.data() + size_t{h} * dim;
      double of_mean = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        of_mean += double{q[j]} * block.key_mean(j);
      }
      for (uint32_t i = 0; i < kCodeBlock; ++i) {
        double product = 0.0;
        for (uint32_t j = 0; j < dim; ++j) product += double{q[j]} * block.key_level(i, j);
        scores[h * stride + b * kCodeBlock + i] =
            static_cast<float>(block.key_factor(i) * product + of_mean);
      }
    }
  }
}

void KvCodes::attend(const CodeQueries& queries, const LogitParams& logits,
                     std::span<const uint32_t> skipped, StateView out) const {
  const uint32_t dim = shape_.dim;
  const size_t n = count();
  std::vector<float> scores(n * queries.group);
  score(queries, scores.data(), n);
  for (uint32_t h = 0; h < queries.group; ++h) {
    double norm = 0.0;
    for (uint32_t j = 0; j < dim; ++j) {
      norm += double{queries.rows[size_t{h} * dim + j]} * queries.rows[size_t{h} * dim + j];
    }
    // Log weights first, so that the sums can be relative to the largest.
    std::vector<double> log_weights(n, double{kMinusInf});
    double largest = kMinusInf;
    for (size_t i = 0; i < n; ++i) {
      if (std::binary_search(skipped.begin(), skipped.end(), static_cast<uint32_t>(i))) continue;
      const CodeRunReader block(shape_, run(i / kCodeBlock));
      double logit = double{logits.scale} * scores[h * n + i];
      double slope = logits.scale;
      if (logits.softcap > 0.0F) {
        const double t = std::tanh(logit / logits.softcap);
        slope *= 1.0 - t * t;
        logit = logits.softcap * t;
      }
      const double f = block.key_factor(static_cast<uint32_t>(i % kCodeBlock));
      const double bias = 0.5 * slope * slope * norm * f * f * block.noise();
      log_weights[i] = logit - std::min<double>(bias, kMostNoiseBias);
      largest = std::max(largest, log_weights[i]);
    }
    float* o = out.o + size_t{h} * dim;
    std::fill_n(o, dim, 0.0F);
    out.lse[h] = kMinusInf;
    if (largest == double{kMinusInf}) continue;
    std::vector<double> rotated(dim, 0.0);
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) {
      const double w = std::exp(log_weights[i] - largest);
      if (w == 0.0) continue;
      const CodeRunReader block(shape_, run(i / kCodeBlock));
      const auto row = static_cast<uint32_t>(i % kCodeBlock);
      sum += w;
      const double g = w * block.value_factor(row);
      for (uint32_t j = 0; j < dim; ++j) {
        rotated[j] += g * block.value_level(row, j) + w * block.value_mean(j);
      }
    }
    for (uint32_t j = 0; j < dim; ++j) {
      o[j] = balance_.value_scale * static_cast<float>(rotated[j] / sum);
    }
    rotate_codes_back(o, dim);
    out.lse[h] = static_cast<float>(largest + std::log(sum));
  }
}

}  // namespace keyhole::index
