// For tests of lists of codes on the device: a layer whose keys lie in clusters, the lists that the device makes of it,
// and the right result of a step over them in double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "gpu/code_lists.h"
#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/cuda_codes.h"
#include "gpu/cuda/codes/launch_codes.h"
#include "gpu/cuda/codes/params.h"
#include "index/progress.h"
#include "index/scan/code_lists.h"
#include "index/scan/list_choice.h"
#include "tests/gpu/codes_fixture.h"
#include "tests/gpu/codes_layer.h"
#include "tests/gpu/list_case.h"
#include "tests/gpu/made_lists.h"
#include "tests/normal.h"

namespace keyhole::gpu::test {

class ListLayer {
 public:
  ListLayer(const ListCase& c, uint32_t seed) : case_(c), rng_(seed), shape_(c.shape()) {
    rows_ = std::make_unique<OffloadedLayer>(shape_, shape_.blocks * kCodeBlock);
    centres_ = random_floats(rng_, size_t{kCentres} * case_.kv_heads * c.dim);
    for (float& x : centres_) x *= c.apart;
    for (uint32_t i = 0; i < c.blocks * kCodeBlock; ++i) append_row();
    constexpr uint32_t kLearned = 64;  // of a KV head; from one alone a channel may get any scale
    rows_->learn(random_floats(rng_, size_t{kLearned} * case_.kv_heads * c.dim), kLearned);
    rows_->extend();
    q_ = random_floats(rng_, size_t{case_.kv_heads} * c.group * c.dim);
    codes_ = std::make_unique<CudaCodes>(shape_);
    rows_->tell(*codes_, 0);
    codes_->encode(0, 0, c.blocks, {});
    for (uint32_t h = 0; h < case_.kv_heads; ++h) {
      lists_.emplace_back(shape_.code, rows_->codes(h).balance());
    }
    const size_t rows = size_t{case_.kv_heads} * c.group;
    out_ = std::make_unique<DeviceVector<float>>(rows * c.dim);
    lse_ = std::make_unique<DeviceVector<float>>(rows);
    device_q_ = std::make_unique<DeviceVector<float>>(by_token(q_, c.dim));
    chosen_ = std::make_unique<DeviceVector<uint32_t>>(size_t{case_.kv_heads} * kMostDeviceRows);
    for (uint32_t begin = 0; begin < c.listed; begin += c.stretch) list(begin, c.stretch);
  }

  [[nodiscard]] uint32_t kv_heads() const { return shape_.kv_heads; }
  [[nodiscard]] CudaCodes& codes() { return *codes_; }
  [[nodiscard]] const CodesShape& shape() const { return shape_; }
  [[nodiscard]] OffloadedLayer& rows() { return *rows_; }
  [[nodiscard]] KvView head(uint32_t h) const { return rows_->head(h); }
  [[nodiscard]] std::vector<float> row(const RowsView& rows, uint32_t id) const {
    return rows_->row(rows, id);
  }
  [[nodiscard]] uint32_t blocks() const { return rows_->rows() / kCodeBlock; }
  [[nodiscard]] std::vector<float>& q() { return q_; }
  /// Of the last step, as q(): `[KV heads, rows of queries, dim]`.
  [[nodiscard]] std::vector<float> out() const { return by_kv_head(out_->read(), case_.dim); }
  [[nodiscard]] std::mt19937& rng() { return rng_; }

  /// Has the device make lists of blocks [begin, begin + count), and waits until they are in use.
  void list(uint32_t begin, uint32_t count) {
    ASSERT_TRUE(codes_->make_lists(0, begin * kCodeBlock, count * kCodeBlock));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    codes_->use_lists(0, {});
    ASSERT_EQ(codes_->listed(0), (begin + count) * kCodeBlock);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (uint32_t h = 0; h < case_.kv_heads; ++h) {
      std::vector<index::CodeLists::Chunk> more;
      more.emplace_back(made(h).chunk(static_cast<uint32_t>(lists_[h].lists()),
                                      size_t{begin} * kCodeBlock, size_t{count} * kCodeBlock));
      lists_[h].append(std::move(more));
    }
  }
  [[nodiscard]] MadeLists made(uint32_t h) const { return {step(), h}; }
  /// The host's lists of the same rows of a KV head.
  [[nodiscard]] index::CodeChunk host_lists(uint32_t h, uint32_t begin, uint32_t count) const {
    index::Context context;
    context.kernels = &cpu::select_kernels();
    const index::Progress progress;
    index::ProgressMeter meter(progress, 1.0);
    return index::make_chunk(context, shape_.code, rows_->codes(h).balance(), rows_->head(h),
                             size_t{begin} * kCodeBlock, size_t{count} * kCodeBlock,
                             {.rows = case_.list_rows}, meter);
  }
  /// Appends blocks of rows on both sides.
  void append(uint32_t count) {
    const uint32_t before = blocks();
    for (uint32_t i = 0; i < count * kCodeBlock; ++i) append_row();
    rows_->extend();
    codes_->encode(0, before, count, {});
  }
  /// Makes all keys of a group equal, where group_of says for each row which is its own, and encodes all blocks anew.
  template <class GroupOf>
  void group_keys(const GroupOf& group_of) {
    const size_t width = size_t{case_.kv_heads} * case_.dim;
    std::map<uint32_t, std::vector<float>> keys;
    for (uint32_t i = 0; i < rows_->rows(); ++i) {
      std::vector<float>& key = keys[group_of(i)];
      if (key.empty()) key = random_floats(rng_, width);
      rows_->write(i, key, random_floats(rng_, width));
    }
    codes_->encode(0, 0, blocks(), {});
  }
  /// Makes every element of a key the same.
  void set_key(uint32_t row, float x) {
    const size_t width = size_t{case_.kv_heads} * case_.dim;
    rows_->write(row, std::vector<float>(width, x), random_floats(rng_, width));
    codes_->encode(0, 0, blocks(), {});
  }
  void truncate(uint32_t blocks) {
    rows_->cut(blocks * kCodeBlock);
    codes_->truncate(0, blocks, {});
    for (index::CodeLists& lists : lists_) lists.truncate(size_t{blocks} * kCodeBlock);
  }
  /// Of the steps from now on. Prepares their kernels, so that a capture finds them so.
  void take(const ListWay& way) {
    case_.way = way;
    (void)step();
  }
  [[nodiscard]] std::vector<ListWay> ways() const { return case_.ways(); }
  /// The counters of the thread blocks that choose by memory, `[KV heads]`.
  [[nodiscard]] std::vector<uint32_t> arrivals() const {
    std::vector<uint32_t> counters(kv_heads());
    EXPECT_EQ(cudaMemcpy(counters.data(), step().lists.arrivals, counters.size() * 4,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return counters;
  }
  /// ListShare::miss of the steps from now on; one without it chooses by the share alone.
  void set_miss(float miss) { case_.miss = miss; }
  void draw_queries() {
    q_ = random_floats(rng_, q_.size());
    device_q_->write(by_token(q_, case_.dim));
  }
  void set_query(uint32_t head, const std::vector<float>& q) {
    std::copy(q.begin(), q.end(), q_.begin() + static_cast<ptrdiff_t>(head * case_.dim));
    device_q_->write(by_token(q_, case_.dim));
  }

  [[nodiscard]] CodesStep step() const {
    const auto heads = static_cast<uint32_t>(shape_.q_heads);
    const auto tensor = [&](float* x) {
      return dense_tensor(reinterpret_cast<std::byte*>(x), case_.tokens, heads, case_.dim,
                          DType::f32, Memory::device);
    };
    CodesStep s = codes_->describe(0, tensor(device_q_->get()), case_.tokens);
    s.out = tensor(out_->get());
    s.lse = lse_->get();
    s.chosen = chosen_->get();
    s.lists.share.miss = case_.miss;
    if (s.lists.list_capacity != 0) prepare(s);
    s.lists.kept = std::min(s.lists.kept, case_.kept);
    return s;
  }
  void enqueue(cudaStream_t stream = nullptr) const {
    const CodesStep s = step();
    ASSERT_EQ(attend_codes(s, stream, codes_->launches_ahead()), cudaSuccess);
    ASSERT_EQ(finish_codes(s, stream, codes_->launches_ahead()), cudaSuccess);
    ASSERT_EQ(settle_codes(s, stream), cudaSuccess);
  }
  void run() const {
    out_->write(std::vector<float>(out_->read().size(), NAN));
    enqueue();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  /// Checks the last step against the host's choice, with all else in double precision. Lists that are read by
  /// ListShare::miss are those of the step, and checked apart.
  void check() {
    SCOPED_TRACE("blocks " + std::to_string(blocks()) + ", listed " +
                 std::to_string(codes_->listed(0)));
    const uint32_t dim = case_.dim, group = case_.group;
    const std::vector<float> out = this->out(), lse = by_kv_head(lse_->read(), 1);
    const std::vector<uint32_t> all = chosen_->read();
    const uint32_t exact_rows = step().exact_rows;  // of all tokens
    for (uint32_t h = 0; h < case_.kv_heads; ++h) {
      index::ListChoice choice;
      choose(h, choice);
      std::vector<uint32_t> exact;
      if (exact_rows != 0) {
        const auto* from = all.data() + size_t{h} * exact_rows;
        exact.assign(from, from + exact_rows);
        std::sort(exact.begin(), exact.end());
        ASSERT_EQ(std::adjacent_find(exact.begin(), exact.end()), exact.end()) << "a row twice";
      }
      const bool in_blocks = reads_blocks(h);
      const std::vector<bool> read =
          in_blocks ? std::vector<bool>(lists_[h].lists()) : lists_read(h);
      if (!in_blocks) check_lists(h, choice, read);
      const Truth truth = truth_of(h, choice, read, in_blocks);
      check_rows(truth, exact);
      for (uint32_t g = 0; g < group; ++g) {
        std::vector<double> o;
        const double right = state_of(truth, h, g, exact, o);
        const size_t number = size_t{h} * group + g;
        double difference = 0.0, norm = 1e-30;
        for (uint32_t j = 0; j < dim; ++j) {
          const double x = out[number * dim + j];
          difference += (x - o[j]) * (x - o[j]);
          norm += o[j] * o[j];
        }
        EXPECT_LT(std::sqrt(difference / norm), 4e-3) << "KV head " << h << ", head " << g;
        EXPECT_NEAR(lse[number], right, 4e-3) << "KV head " << h << ", head " << g;
      }
    }
  }
  /// The relative error of a head of the last step against exact attention to all rows.
  [[nodiscard]] std::vector<double> errors() const {
    EXPECT_EQ(case_.tokens, 1U);
    const States right = rows_->attend_exactly(q_);
    const std::vector<float> out = out_->read();
    std::vector<double> errors;
    for (size_t h = 0; h < shape_.q_heads; ++h) {
      double difference = 0.0, norm = 1e-30;
      for (size_t j = h * case_.dim; j < (h + 1) * case_.dim; ++j) {
        difference += (out[j] - right.o[j]) * (out[j] - right.o[j]);
        norm += right.o[j] * right.o[j];
      }
      errors.push_back(std::sqrt(difference / norm));
    }
    return errors;
  }
  /// The host's choice for a KV head.
  void choose(uint32_t h, index::ListChoice& choice) const {
    const index::CodeLists& lists = lists_[h];
    choice.begin(lists, cpu::select_kernels(), q_.data() + size_t{h} * case_.group * case_.dim,
                 case_.group, shape_.logits);
    for (uint32_t p = 0; p < index::ListChoice::rank_parts(lists.lists()); ++p) choice.rank(p);
    choice.choose({.share = case_.share, .least = case_.least});
  }
  [[nodiscard]] const index::CodeLists& lists(uint32_t h) const { return lists_[h]; }
  /// What the steps so far have left for those to come.
  [[nodiscard]] ListMemory memory() const {
    ListMemory memory;
    EXPECT_EQ(cudaMemcpy(&memory, step().lists.memory, sizeof(memory), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(memory.sums, 0U) << "a step has not come to its end";
    return memory;
  }
  /// Whether the last step has read all blocks of a KV head in place of lists (ListShare::most).
  [[nodiscard]] bool reads_blocks(uint32_t h) const {
    const codes::ChosenLists ends = chosen_lists(h).first;
    if (ends.reads_all != 0) {
      EXPECT_EQ(ends.pairs, blocks() * (kCodeBlock / kPairRows));
    }
    return ends.reads_all != 0;
  }
  /// The lists of a KV head that the last step has read, by its table, which must have each of their pairs once.
  [[nodiscard]] std::vector<bool> lists_read(uint32_t h) const {
    std::vector<size_t> rows(lists_[h].lists()), pairs(rows.size());
    std::vector<uint32_t> places;
    for (const ListedPair& entry : table(h)) {
      if ((entry.owner & ListedPair::kOfBlock) != 0) continue;
      const uint32_t list = entry.owner & ((1U << ListedPair::kRowsAt) - 1);
      EXPECT_LT(list, rows.size());
      if (list >= rows.size()) continue;
      rows[list] += (entry.owner >> ListedPair::kRowsAt & (kPairRows - 1)) + 1;
      places.push_back(entry.pair);
    }
    std::sort(places.begin(), places.end());
    EXPECT_EQ(std::adjacent_find(places.begin(), places.end()), places.end()) << "a pair twice";
    std::vector<bool> read(rows.size());
    for (size_t l = 0; l < rows.size(); ++l) {
      read[l] = rows[l] != 0;
      if (!read[l]) continue;
      EXPECT_EQ(rows[l], lists_[h].ids(static_cast<uint32_t>(l)).size()) << l;
    }
    return read;
  }

 private:
  static constexpr uint32_t kCentres = 40;

  /// Where row r of a KV head's queries is among those of a step, whose tokens have their heads one behind the other.
  [[nodiscard]] size_t place(uint32_t h, uint32_t r) const {
    const uint32_t heads = case_.group / case_.tokens;  // of a KV head and token
    return (size_t{r / heads} * case_.kv_heads + h) * heads + r % heads;
  }
  /// Rows of `width` numbers by KV head, as the step has them, and the other way round.
  [[nodiscard]] std::vector<float> by_token(const std::vector<float>& x, uint32_t width) const {
    std::vector<float> to(x.size());
    for (uint32_t i = 0; i < case_.kv_heads * case_.group; ++i) {
      const size_t at = place(i / case_.group, i % case_.group);
      std::copy_n(x.data() + size_t{i} * width, width, to.data() + at * width);
    }
    return to;
  }
  [[nodiscard]] std::vector<float> by_kv_head(const std::vector<float>& x, uint32_t width) const {
    std::vector<float> to(x.size());
    for (uint32_t i = 0; i < case_.kv_heads * case_.group; ++i) {
      const size_t at = place(i / case_.group, i % case_.group);
      std::copy_n(x.data() + at * width, width, to.data() + size_t{i} * width);
    }
    return to;
  }

  /// Has a step chosen among its lists by the case's thread blocks, and in its way.
  void prepare(CodesStep& s) const {
    const ListWay& way = case_.way;
    if (case_.choosers == 0 && !way.by_memory && way.cluster && !way.narrow) return;
    if (case_.choosers != 0) s.lists.blocks = case_.choosers;
    s.lists.by_memory = s.lists.by_memory || way.by_memory;
    s.cluster = s.cluster && way.cluster;
    s.narrow = s.narrow || way.narrow;
    EXPECT_EQ(prepare_codes(s, 0), cudaSuccess);
    EXPECT_NE(s.lists.blocks, 0U) << "the device cannot choose in this way";
    EXPECT_LE(codes_work_bytes(s), CodesLayout(shape_).work_bytes);
  }
  /// What the choice of the last step has come to for a KV head, and where its table lies.
  [[nodiscard]] std::pair<codes::ChosenLists, const ListedPair*> chosen_lists(uint32_t h) const {
    const CodesStep s = step();
    codes::CodesParams params;
    (void)codes::lay_out(s, codes::kernels_of(s), params);
    codes::ChosenLists ends;
    EXPECT_EQ(cudaMemcpy(&ends, params.list_ends + h, sizeof(ends), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return {ends, params.list_pairs + size_t{h} * codes::most_groups(s)};
  }
  /// The table that the last step has read a KV head's pairs by.
  [[nodiscard]] std::vector<ListedPair> table(uint32_t h) const {
    const auto [ends, from] = chosen_lists(h);
    std::vector<ListedPair> pairs(ends.pairs);
    EXPECT_EQ(
        cudaMemcpy(pairs.data(), from, pairs.size() * sizeof(ListedPair), cudaMemcpyDeviceToHost),
        cudaSuccess);
    return pairs;
  }

  /// Log weights of rows, and of means, by code; values rotated.
  struct Part {
    uint32_t row = ~0U;               ///< ~0: the mean of a list
    std::vector<double> log_weights;  ///< `[group]`
    std::vector<float> value;
  };
  struct Truth {
    std::vector<Part> parts;
    std::vector<double> lse;  ///< `[group]` of all parts
  };

  void append_row() {
    const size_t width = size_t{case_.kv_heads} * case_.dim;
    std::vector<float> k = random_floats(rng_, width), v = random_floats(rng_, width);
    const size_t c = rng_() % kCentres;
    for (size_t j = 0; j < width; ++j) {
      k[j] += centres_[c * width + j];
      v[j] = 2.0F * v[j] + 1.0F;
    }
    rows_->append(k, v);
  }
  struct Logit {
    double logit, slope;
  };
  [[nodiscard]] Logit of_score(double score) const {
    const double scale = shape_.logits.scale, cap = shape_.logits.softcap, x = score * scale;
    if (cap <= 0.0) return {x, scale};
    const double t = std::tanh(x / cap);
    return {cap * t, scale * (1.0 - t * t)};
  }
  /// What the rule of index/scan/list_choice.h knows of a list for a head.
  struct Judged {
    double log_weight;  ///< of its rows together
    double hope;
  };
  [[nodiscard]] Judged judge(const index::ListChoice& choice, uint32_t h, size_t list,
                             uint32_t g) const {
    const uint32_t dim = case_.dim;
    const index::CodeLists& lists = lists_[h];
    const index::CodeRunReader reader(shape_.code, lists.run(list));
    size_t chunk = 0;
    while (lists.first_list(chunk + 1) <= list) ++chunk;
    const double spread = lists.chunk(chunk).spreads[list - lists.first_list(chunk)];
    const double ln = std::log(static_cast<double>(lists.ids(list).size()));
    double score = 0.0, norm = 0.0;
    const float* q = choice.rows() + size_t{g} * dim;
    for (uint32_t j = 0; j < dim; ++j) {
      score += double{q[j]} * reader.key_mean(j);
      norm += double{q[j]} * q[j];
    }
    const Logit at = of_score(score);
    const double t = at.slope * at.slope * norm * spread;
    const double mean = t > 2.0 * ln ? at.logit + std::sqrt(2.0 * t * ln) - ln : at.logit + t / 2;
    return {std::min(mean, double{choice.tops()[g]}) + ln,
            at.logit + (t <= 16.0 ? t : 8.0 * std::sqrt(t) - 16.0) + ln};
  }
  /// What a head has in lists, relative to its largest mean logit.
  struct Weighed {
    std::vector<double> weights;  ///< `[lists]`
    std::vector<double>
        below;  ///< `[lists]` the head's most hope less the list's, in bins of 1/32 nat
    double all = 0.0;
    [[nodiscard]] double left(const std::vector<bool>& read) const {
      double sum = 0.0;
      for (size_t l = 0; l < weights.size(); ++l) sum += read[l] ? 0.0 : weights[l];
      return sum;
    }
  };
  [[nodiscard]] Weighed weighed(const index::ListChoice& choice, uint32_t h, uint32_t g) const {
    Weighed head;
    double top = -INFINITY;
    for (uint32_t l = 0; l < lists_[h].lists(); ++l) {
      const Judged judged = judge(choice, h, l, g);
      head.weights.push_back(std::exp(judged.log_weight - choice.tops()[g]));
      head.below.push_back(-32.0 * judged.hope);
      top = std::max(top, judged.hope);
      head.all += head.weights.back();
    }
    for (double& x : head.below) x += 32.0 * top;
    return head;
  }
  /// The most that a head may leave, with the length of its output taken from its first `components`.
  [[nodiscard]] double most_left(const Weighed& head, uint32_t h, uint32_t components) const {
    std::vector<double> o(components);
    for (uint32_t l = 0; l < lists_[h].lists(); ++l) {
      const index::CodeRunReader reader(shape_.code, lists_[h].run(l));
      for (uint32_t j = 0; j < components; ++j) o[j] += head.weights[l] * reader.value_mean(j);
    }
    double square = 0.0;
    for (const double x : o) square += x * x;
    return std::max(double{case_.miss} * std::sqrt(square / components), head.all / 64.0);
  }
  /// The bin of hope up to which a head has more lists read; below 0: it has none.
  static int last_bin(const Weighed& head, const std::vector<bool>& by_rows, double most) {
    if (head.left(by_rows) <= most) return -1;
    std::vector<double> bins(512);
    for (size_t l = 0; l < by_rows.size(); ++l) {
      if (!by_rows[l]) bins[bin_of(head.below[l])] += head.weights[l];
    }
    double behind = 0.0;
    for (size_t b = bins.size() - 1; b > 0; --b) {
      behind += bins[b];
      if (behind > most) return static_cast<int>(b);
    }
    return 0;
  }
  static size_t bin_of(double below) { return static_cast<size_t>(std::clamp(below, 0.0, 511.0)); }
  /// The lists that a step has read are those of the host's choice by the share of the rows, and by ListShare::miss
  /// those that double precision has in its limits, up to one bin of the order and two percent of the limit. No head
  /// leaves more than 1.6 times what the host's limit, from all components of the output, allows.
  void check_lists(uint32_t h, const index::ListChoice& choice,
                   const std::vector<bool>& read) const {
    std::vector<bool> by_rows(read.size());
    for (const uint32_t l : choice.chosen()) by_rows[l] = true;
    std::vector<bool> least = by_rows, most = by_rows;
    for (uint32_t g = 0; g < case_.group && case_.miss > 0.0F; ++g) {
      const Weighed head = weighed(choice, h, g);
      constexpr uint32_t kSampled = 32;
      const double limit = most_left(head, h, kSampled);
      const int first = last_bin(head, by_rows, 1.02 * limit) - 1;
      const int last = last_bin(head, by_rows, 0.98 * limit) + 1;
      for (size_t l = 0; l < read.size(); ++l) {
        const auto bin = static_cast<int>(bin_of(head.below[l]));
        if (bin <= first) least[l] = true;
        if (last > 0 && bin <= last) most[l] = true;
      }
      EXPECT_LE(head.left(read), 1.6 * most_left(head, h, case_.dim)) << "head " << g;
    }
    for (size_t l = 0; l < read.size(); ++l) {
      EXPECT_TRUE(read[l] || !least[l]) << "list " << l << " is not read, KV head " << h;
      EXPECT_TRUE(!read[l] || most[l]) << "list " << l << " is read, KV head " << h;
    }
  }
  /// in_blocks: the step has read all blocks in place of lists.
  [[nodiscard]] Truth truth_of(uint32_t h, const index::ListChoice& choice,
                               const std::vector<bool>& read, bool in_blocks) const {
    const uint32_t dim = case_.dim, group = case_.group;
    const index::CodeLists& lists = lists_[h];
    Truth truth;
    std::vector<double> norms(group);
    const float* q = choice.rows();
    for (uint32_t g = 0; g < group; ++g) {
      for (uint32_t j = 0; j < dim; ++j) norms[g] += double{q[g * dim + j]} * q[g * dim + j];
    }
    const auto add_run = [&](const index::CodeRun& run, const auto& id_of) {
      const index::CodeRunReader reader(shape_.code, run);
      std::vector<double> key(dim);
      for (uint32_t i = 0; i < run.rows; ++i) {
        Part part{id_of(i), {}, std::vector<float>(dim)};
        const double f = reader.key_factor(i);
        for (uint32_t j = 0; j < dim; ++j) {
          key[j] = double{reader.key_mean(j)} + f * reader.key_level(i, j);
        }
        reader.rotated_value(i, part.value.data());
        for (uint32_t g = 0; g < group; ++g) {
          double score = 0.0;
          for (uint32_t j = 0; j < dim; ++j) score += q[g * dim + j] * key[j];
          const Logit at = of_score(score);
          const double bias = 0.5 * at.slope * at.slope * norms[g] * f * f * reader.noise();
          part.log_weights.push_back(at.logit - std::min<double>(bias, kMostNoiseBias));
        }
        truth.parts.push_back(std::move(part));
      }
    };
    for (uint32_t l = 0; l < lists.lists(); ++l) {
      if (read[l]) add_run(lists.run(l), [&](uint32_t i) { return lists.ids(l)[i]; });
    }
    for (uint32_t b = in_blocks ? 0 : codes_->listed(0) / kCodeBlock; b < blocks(); ++b) {
      add_run(rows_->codes(h).run(b), [&](uint32_t i) { return b * kCodeBlock + i; });
    }
    for (uint32_t l = 0; l < lists.lists(); ++l) {
      if (read[l] || in_blocks) continue;
      const index::CodeRunReader reader(shape_.code, lists.run(l));
      Part part{~0U, {}, std::vector<float>(dim)};
      for (uint32_t j = 0; j < dim; ++j) part.value[j] = reader.value_mean(j);
      for (uint32_t g = 0; g < group; ++g) {
        part.log_weights.push_back(judge(choice, h, l, g).log_weight);
      }
      truth.parts.push_back(std::move(part));
    }
    for (uint32_t g = 0; g < group; ++g) {
      double top = -INFINITY, sum = 0.0;
      for (const Part& part : truth.parts) top = std::max(top, part.log_weights[g]);
      for (const Part& part : truth.parts) sum += std::exp(part.log_weights[g] - top);
      truth.lse.push_back(top + std::log(sum));
    }
    return truth;
  }
  /// The rows that were read exactly are among those that weigh most by their codes, up to the rounding of queries.
  void check_rows(const Truth& truth, const std::vector<uint32_t>& exact) const {
    std::vector<double> weights;
    std::vector<double> of_row(size_t{blocks()} * kCodeBlock, -INFINITY);
    for (const Part& part : truth.parts) {
      if (part.row == ~0U) continue;
      double weight = -INFINITY;
      for (uint32_t g = 0; g < case_.group; ++g) {
        weight = std::max(weight, part.log_weights[g] - truth.lse[g]);
      }
      of_row[part.row] = weight;
      weights.push_back(weight);
    }
    std::sort(weights.begin(), weights.end(), std::greater<>());
    for (const uint32_t row : exact) {
      ASSERT_LT(row, of_row.size());
      EXPECT_GT(of_row[row], weights[exact.size() - 1] - 0.05) << "row " << row;
    }
  }
  double state_of(const Truth& truth, uint32_t h, uint32_t g, const std::vector<uint32_t>& exact,
                  std::vector<double>& o) const {
    const uint32_t dim = case_.dim;
    std::vector<double> rotated(dim, 0.0);
    double sum = 0.0;
    for (const Part& part : truth.parts) {
      if (std::binary_search(exact.begin(), exact.end(), part.row)) continue;
      const double w = std::exp(part.log_weights[g] - truth.lse[g]);
      sum += w;
      for (uint32_t j = 0; j < dim; ++j) rotated[j] += w * part.value[j];
    }
    std::vector<float> back(dim);
    for (uint32_t j = 0; j < dim; ++j) {
      back[j] = static_cast<float>(lists_[h].balance().value_scale * rotated[j]);
    }
    index::rotate_codes_back(back.data(), dim);
    o.assign(back.begin(), back.end());
    const float* q = q_.data() + (size_t{h} * case_.group + g) * dim;
    const KvView kv = rows_->head(h);
    for (const uint32_t row : exact) {
      const std::vector<float> k = rows_->row(kv.keys, row), v = rows_->row(kv.values, row);
      double dot = 0.0;
      for (uint32_t j = 0; j < dim; ++j) dot += double{q[j]} * k[j];
      const double w = std::exp(of_score(dot).logit - truth.lse[g]);
      sum += w;
      for (uint32_t j = 0; j < dim; ++j) o[j] += w * v[j];
    }
    for (double& x : o) x /= sum;
    return truth.lse[g] + std::log(sum);
  }

  ListCase case_;
  std::mt19937 rng_;
  CodesShape shape_;
  std::unique_ptr<OffloadedLayer> rows_;
  std::vector<float> centres_, q_;
  std::unique_ptr<CudaCodes> codes_;
  std::vector<index::CodeLists> lists_;
  std::unique_ptr<DeviceVector<float>> out_, lse_, device_q_;
  std::unique_ptr<DeviceVector<uint32_t>> chosen_;
};

}  // namespace keyhole::gpu::test
