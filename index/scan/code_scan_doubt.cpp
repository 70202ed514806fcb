// Where codes cannot tell which rows weigh.
//
// A logit by code is unbiased, off by a normal error of variance t = scale^2 |q'|^2 f^2 noise (index/scan/kv_codes.h):
// a share of the spread of the logits themselves (0.11 of their standard deviation at 4 bits, 0.37 at 2, 0.76 at 1),
// whatever their size. While t is small, codes say what a row weighs, and the few rows that weigh most are read
// exactly. In a head whose logits spread by 20 nats an error at 2 bits is of 7 nats: the row that outweighs all others
// may be the fiftieth by code. Long keys make such heads: a bias of the projection that RoPE turns, norms of hundreds.
//
// So after the chosen rows were read, for each head, with W the weight by code of what was not read and w that of its
// heaviest row, both as shares of all, and the limits `error` and `light` of DoubtLimits (cpu/code_doubt.h):
//
//     no doubt   the unread rows are off by sqrt((e^t - 1 + r) w W) at most, r being the squared error of a value by
//                its code; that is below `error` of the output, or even 16 unread rows cannot hold what is missing to
//                nine tenths of the weight: then errors of many rows are averaged, and reading some of them would not
//                help. The output is taken to be as long as values that are alike make it, or as it is, if that is
//                shorter: where most weight lies on a sink whose value is short, light rows count for as much as their
//                values are longer, and `light` is more
//     doubt      else; and where t > 2, when such sums say nothing, where an unread row may weigh e^-light: its logit
//                by code and 4 standard deviations. If most weight is unread, this is asked of the weights of such rows
//                only as far as their errors are likely to show
//
// In doubt every row whose logit by code and 4 standard deviations reach the log-sum-exp less `light` is read exactly,
// lists of rows that may hold one are read by their codes, and the rest is summed up without these rows. If the
// log-sum-exp was too large by the codes' errors, this is done again with what it has become. At most an eighth of the
// rows; if there are more, all are read exactly: one step of that head then costs what exact attention does. All are
// read, too, where a run holds a row that fp16 cannot hold in the balance that was learned from the first rows
// (kUnknownNoise), or a query is so long in that balance that its logits by code are no numbers (kLongestQuery).
//
// Of 32,768 normal keys and a group of 4 heads (bench/index/sharp_bench.cpp): logits of up to 2 nats' standard
// deviation read the chosen 16 rows alone; 8 nats 280 rows at 4 bits and 3,350 at 2, 50 nats 51 and 1,430. In between,
// where thousands of rows might be among some dozen that weigh, 2 bits read all from 4 to 5 nats.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention.h"
#include "cpu/attention_state.h"
#include "cpu/code_doubt.h"
#include "index/scan/code_scan.h"

namespace keyhole::index {
namespace {

// Where lists' logits spread by more than 4 nats, a row of an unread list may be anything.
constexpr float kWideList = 16.0F;
// Elsewhere lists are asked for rows that outweigh all others. If 16 rows of unread lists hold 0.9 of the weight, one
// of them weighs 9/16 of what all others do: this many nats below their log-sum-exp.
constexpr float kHiddenLight = 0.575F;
// By how much the log-sum-exp rises if such a row was there.
constexpr float kHiddenRise = 0.1F;

/// HeadDoubt::square of two states merged, whose log-sum-exp is `lse`.
float square_of(const CodeSearch& s, uint32_t head, float lse, const StateView& exact,
                const StateView& coded) {
  const uint32_t dim = s.shape().dim;
  const float scale = s.rows.balance().value_scale;
  const float of_exact = std::exp(exact.lse[head] - lse) / scale;
  const float of_coded = std::exp(coded.lse[head] - lse) / scale;
  const float *from_exact = exact.o + size_t{head} * dim,
              *from_coded = coded.o + size_t{head} * dim;
  float square = 0.0F;
  for (uint32_t j = 0; j < dim; ++j) {
    const float o = of_exact * from_exact[j] + of_coded * from_coded[j];
    square += o * o;
  }
  return square / static_cast<float>(dim);
}

}  // namespace

struct CodeScan::Doubt {
  bool any = false;
  float lses[kMaxGroup];    ///< of all rows
  float lights[kMaxGroup];  ///< light_of() each head
  float cuts[kMaxGroup];    ///< products with keys that no unread row is above by its code
  float bounds[kMaxGroup];  ///< products from which on a row matters
  float units
      [kMaxGroup];  ///< standard deviations of a product by code that are possible, for f^2 noise = 1
};

CodeScan::Doubt CodeScan::doubt(const CodeSearch& s, const CodeParts& parts, const StateView& exact,
                                const StateView& coded) const {
  const DoubtLimits limits = doubt_limits(s.shape());
  float widest = 0.0F, usual = -1.0F;
  for (uint32_t p = 0; p < s.rows.parts(); ++p) widest = std::max(widest, parts.widest_[p]);
  Doubt d;
  for (uint32_t h = 0; h < s.group; ++h) {
    HeadDoubt head;
    head.lse = cpu::add_logs(exact.lse[h], coded.lse[h]);
    head.unread = coded.lse[h];
    head.heaviest = coded_lses_[h] + cut_;
    head.spread = s.logits.scale * s.logits.scale * norms_[h];
    head.widest = widest;
    head.rows = static_cast<float>(std::max<size_t>(chosen_.size(), 1));
    head.softcap = s.logits.softcap;
    head.square = square_of(s, h, head.lse, exact, coded);
    d.lses[h] = head.lse;
    d.lights[h] = light_of(head, limits);
    d.units[h] = kDoubtDeviations * std::sqrt(norms_[h]);
    // The cut is of a weight, from which the noise was taken.
    const float most_bias = std::min(0.5F * head.spread * widest, kMostNoiseBias);
    d.cuts[h] = cpu::score_of(head.heaviest + most_bias, s.logits);
    if (head.unread == kMinusInf) continue;
    d.any = d.any || is_in_doubt(head, limits, [&] {
              if (usual < 0.0F) usual = mean_noise(s);
              return usual;
            });
  }
  set_bounds(s, d.lights, d);
  return d;
}

float CodeScan::mean_noise(const CodeSearch& s) {
  constexpr size_t kSample = 16;
  const size_t runs = s.runs();
  float sum = 0.0F, rows = 0.0F;
  for (size_t r = 0; r < runs; r += (runs + kSample - 1) / kSample) {
    const CodeRun run = s.run(s.run_number(r));
    float factors[2 * kCodeBlock], squares = 0.0F;
    s.kernels->to_f32[kHalf](run.factors, factors, size_t{2} * run.rows);
    for (uint32_t i = 0; i < run.rows; ++i) squares += factors[2 * i] * factors[2 * i];
    sum += squares * run.noise;
    rows += static_cast<float>(run.rows);
  }
  return rows > 0.0F ? sum / rows : 0.0F;
}

bool CodeScan::find_doubted(const CodeSearch& s, const Doubt& d, bool all_runs) {
  const size_t most = std::min<size_t>(s.rows.count() / 8, kMostDoubtedRows);
  const size_t runs = s.runs();
  // Products by code, which score_codes() gives for a scale of 1 and no noise.
  CodeSearch plain = s;
  plain.logits = {1.0F, 0.0F};
  float norms[kMaxGroup];
  std::copy_n(norms_, s.group, norms);
  std::fill_n(norms_, s.group, 0.0F);
  places_.clear();
  for (size_t r = 0; r < runs && places_.size() <= most; ++r) {
    const size_t number = s.run_number(r);
    const CodeRun run = s.run(number);
    float units[kMaxGroup];
    const float noise = std::sqrt(run.noise), widest = widest_factor(run);
    bool may = all_runs;
    for (uint32_t h = 0; h < s.group; ++h) {
      units[h] = d.units[h] * noise;
      may = may || d.cuts[h] + units[h] * widest > d.bounds[h];
    }
    if (!may) continue;
    float offsets[kMaxGroup], maxima[kMaxGroup], factors[2 * kCodeBlock];
    score_mean(s, run, offsets);
    weigh_run(plain, run, offsets, cpu::kCodeParts, maxima, nullptr);
    s.kernels->to_f32[kHalf](run.factors, factors, size_t{2} * run.rows);
    for (uint32_t i = 0; i < run.rows && places_.size() <= most; ++i) {
      bool reaches = false;
      for (uint32_t h = 0; h < s.group; ++h) {
        const float product = scores_[h * kCodeBlock + i];
        reaches = reaches || product + units[h] * factors[2 * i] > d.bounds[h];
      }
      if (reaches) places_.push_back(first_place(number) + i);
    }
  }
  std::copy_n(norms, s.group, norms_);
  return places_.size() <= most;
}

void CodeScan::read_doubted(const CodeSearch& s, const KvView& kv, CodeParts& parts,
                            StateView exact, StateView coded) {
  read_rows_.clear();
  for (const uint32_t place : places_) read_rows_.push_back(s.row_at(place));
  cpu::attend_ids(*s.kernels, kv, read_rows_, s.queries, s.group, s.logits, exact);
  scan_others(s, places_, parts);
  put_state(s, places_.size() == s.rows.count(), coded);
}

CodeDoubt CodeScan::read_all(const CodeSearch& s, const KvView& kv, StateView exact,
                             StateView coded) const {
  const size_t count = s.rows.count();
  cpu::attend_range(*s.kernels, {kv.keys.slice(0, count), kv.values.slice(0, count)}, s.queries,
                    s.group, s.logits, exact);
  cpu::clear_state(coded, s.group, s.shape().dim);
  return {.any = true, .all = true, .more = static_cast<uint32_t>(count - chosen_.size())};
}

bool CodeScan::has_unknown(const CodeSearch& s, const CodeParts& parts) {
  if (s.rows.lists != nullptr) {
    // An unread list is not among the parts.
    for (size_t c = 0; c < s.rows.lists->chunks(); ++c) {
      if (s.rows.lists->chunk(c).has_unknown) return true;
    }
    return false;
  }
  const float* const widest = parts.widest_.data();
  return std::any_of(widest, widest + s.rows.parts(), [](float x) { return std::isinf(x); });
}

void CodeScan::set_bounds(const CodeSearch& s, const float* lights, Doubt& d) {
  for (uint32_t h = 0; h < s.group; ++h) {
    d.bounds[h] = cpu::score_of(d.lses[h] - lights[h], s.logits);
  }
}

// Unread lists weigh what second order says. Behind a soft-cap this may be many times what their rows can, as half of
// the rows of a list whose mean is at the cap are far below it: the log-sum-exp would seem to be out of the reach of
// any row.
void CodeScan::least_logits(const CodeSearch& s, const Doubt& d, const float* lights,
                            float* least) {
  const float cap = s.logits.softcap;
  for (uint32_t h = 0; h < s.group; ++h) {
    least[h] = (cap > 0.0F ? std::min(d.lses[h], cap) : d.lses[h]) - lights[h];
  }
}

bool CodeScan::may_widen(const CodeSearch& s, const Doubt& d, const float* lights, float wide) {
  if (s.choice == nullptr) return false;
  float least[kMaxGroup];
  least_logits(s, d, lights, least);
  return s.choice->may_widen(least, wide, kDoubtDeviations);
}

CodeDoubt CodeScan::settle(const CodeSearch& s, const KvView& kv, CodeParts& parts, StateView exact,
                           StateView coded) {
  CodeDoubt out;
  const size_t count = s.rows.count();
  if (chosen_.size() == count) return out;
  // Logits that are no numbers: a scale of logits may be anything.
  const bool is_known = !has_beyond_ && std::none_of(coded.lse, coded.lse + s.group, [](float lse) {
    return std::isnan(lse) || lse == std::numeric_limits<float>::infinity();
  });
  if (!is_known) return read_all(s, kv, exact, coded);
  if (s.wanted == 0) return out;
  if (has_unknown(s, parts)) return read_all(s, kv, exact, coded);
  Doubt d = doubt(s, parts, exact, coded);
  const float* lights = d.lights;
  bool wider = may_widen(s, d, lights, kWideList);
  out.any = d.any || wider;
  float hidden[kMaxGroup];
  std::fill_n(hidden, s.group, kHiddenLight);
  if (!out.any) {
    lights = hidden;
    if (!may_widen(s, d, lights, 0.0F)) return out;
    set_bounds(s, lights, d);
  }
  for (uint32_t round = 0; round < kDoubtRounds; ++round) {
    if (s.choice != nullptr) {
      float least[kMaxGroup];
      least_logits(s, d, lights, least);
      wider = s.choice->widen(least, kDoubtDeviations) || wider;
    }
    if (!find_doubted(s, d, wider)) return read_all(s, kv, exact, coded);
    places_.insert(places_.end(), chosen_.begin(), chosen_.end());
    std::sort(places_.begin(), places_.end());
    places_.erase(std::unique(places_.begin(), places_.end()), places_.end());
    if (round == 0 && !wider && places_.size() == chosen_.size()) return {};
    read_doubted(s, kv, parts, exact, coded);
    out.more = static_cast<uint32_t>(places_.size() - chosen_.size());
    bool falls = false, rises = false;
    for (uint32_t h = 0; h < s.group; ++h) {
      const float lse = cpu::add_logs(exact.lse[h], coded.lse[h]);
      falls = falls || lse < d.lses[h] - kDoubtFall;
      rises = rises || lse > d.lses[h] + kHiddenRise;
      d.lses[h] = lse;
    }
    const bool was_hidden = !out.any && out.more != 0 && rises;
    if (was_hidden) lights = d.lights;
    out.any = out.any || out.more != 0;
    if (!falls && !was_hidden) return out;
    set_bounds(s, lights, d);
  }
  // What lists weigh by their means has changed each time, and no row was hidden.
  return out.any ? read_all(s, kv, exact, coded) : out;
}

}  // namespace keyhole::index
