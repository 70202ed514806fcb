#include "tools/rivals/step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace keyhole::tools {
namespace {

const StoredRows& attended_rows(const Rival& rival, const StoredRows& stored) {
  const StoredRows* own = rival.own_rows().rows;
  return own == nullptr ? stored : *own;
}

double bytes_of_row(const Rival& rival, const StoredRows& stored) {
  const Rival::OwnRows own = rival.own_rows();
  if (own.rows != nullptr) return own.row_bytes;
  return static_cast<double>(stored.keys.row_bytes() + stored.values.row_bytes());
}

}  // namespace

RivalStep::RivalStep(Rival& rival, const StoredRows& stored, const RivalShape& shape,
                     LogitRule rule, size_t k)
    : o(shape.group * shape.dim),
      lse(shape.group),
      rival_(rival),
      stored_(attended_rows(rival, stored)),
      row_bytes_(bytes_of_row(rival, stored)),
      shape_(shape),
      k_(std::min(k, shape.rows)),
      attention_(stored_, shape.dim, rule),
      seen_(shape.rows) {}

void RivalStep::run(const float* queries) {
  answer.reset(shape_.group);
  rival_.search(queries, shape_.group, k_, answer);

  if (++run_ == 0) {  // the marks of 2^32 runs ago look like those of now
    std::fill(seen_.begin(), seen_.end(), 0U);
    run_ = 1;
  }
  distinct.clear();
  uint64_t pairs = 0;
  for (const RivalRows& head : answer.heads) {
    pairs += head.rows.size();
    for (const uint32_t row : head.rows) {
      if (row >= shape_.rows) {
        throw std::runtime_error("the rival returned row " + std::to_string(row) + " of " +
                                 std::to_string(shape_.rows));
      }
      if (seen_[row] == run_) continue;
      seen_[row] = run_;
      distinct.push_back(row);
    }
  }
  if (answer.own_rows) {
    for (size_t j = 0; j < shape_.group; ++j) {
      attention_.attend(queries + j * shape_.dim, 1, answer.heads[j].rows,
                        answer.heads[j].log_weights, o.data() + j * shape_.dim, &lse[j]);
    }
  } else {
    attention_.attend(queries, shape_.group, distinct, {}, o.data(), lse.data());
    pairs = distinct.size() * shape_.group;
  }
  keys_scored = answer.keys_scored != 0 ? answer.keys_scored : pairs;
  bytes_read =
      answer.bytes_read + static_cast<uint64_t>(row_bytes_ * static_cast<double>(distinct.size()));
}

}  // namespace keyhole::tools
