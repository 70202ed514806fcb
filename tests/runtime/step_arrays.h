// Rows, indexes and results for steps that tests run without a session.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "index/tail/tail_tree.h"
#include "index/types/factory.h"
#include "runtime/step/decode_step.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

inline keyhole_engine_config step_engine(uint32_t threads) {
  keyhole_engine_config c = small_engine(threads);
  c.kv_dtype = KEYHOLE_F32;
  return c;
}

/// The same rows for every KV head, indexes over them, and queries.
class StepRows {
 public:
  StepRows(const runtime::Engine& engine, uint32_t rows, uint64_t seed)
      : engine_(&engine), count_(rows), numbers_(seed) {
    const uint32_t dim = engine.model().head_dim;
    keys_ = numbers_.many(size_t{rows} * dim);
    values_ = numbers_.many(size_t{rows} * dim);
    queries_ = numbers_.many(size_t{engine.model().q_heads} * dim);
  }

  [[nodiscard]] KvView view() const { return {view_of(keys_), view_of(values_)}; }
  [[nodiscard]] const std::vector<float>& queries() const { return queries_; }
  [[nodiscard]] const index::Index* index(const std::string& spec) const {
    auto& index = indexes_[spec];
    if (index == nullptr) {
      index = index::make_index(spec, engine_->model().head_dim, DType::f32,
                                engine_->index_context(0, 0));
      index::BuildInput input;
      input.keys = view().keys;
      index->build(input, nullptr);
    }
    return index.get();
  }
  [[nodiscard]] const index::TailTree* tail() const {
    if (tail_ == nullptr) {
      tail_ = std::make_unique<index::TailTree>(
          engine_->index_context(0, 0), engine_->model().head_dim, DType::f32, index::TailParams{});
      tail_->build(view(), {});
    }
    return tail_.get();
  }
  /// The work of attending all rows through an index.
  [[nodiscard]] runtime::HeadWork work(const std::string& spec,
                                       const runtime::SearchParams& search) const {
    runtime::HeadWork work;
    work.index = index(spec);
    work.kv = view();
    work.exact_begin = count_;
    work.search = search;
    return work;
  }

 private:
  [[nodiscard]] RowsView view_of(const std::vector<float>& rows) const {
    const uint32_t dim = engine_->model().head_dim;
    return dense_rows(rows.data(), count_, dim, DType::f32);
  }

  const runtime::Engine* engine_;
  uint32_t count_;
  Numbers numbers_;
  std::vector<float> keys_, values_, queries_;
  mutable std::map<std::string, std::unique_ptr<index::Index>> indexes_;
  mutable std::unique_ptr<index::TailTree> tail_;
};

/// Takes the results of steps that have no resident part.
class StepArrays final : public runtime::ResultSink {
 public:
  explicit StepArrays(const runtime::ModelShape& m)
      : arrays_(m.q_heads, size_t{m.q_heads} * m.head_dim), size_(size_t{m.q_heads} * m.head_dim) {
    arrays_.set_shape(m.of(0).group(), m.head_dim);
  }
  StateView slot(uint32_t kv_head) override { return arrays_.slot(kv_head); }
  void deliver(uint32_t /*kv_head*/) override { delivered_ += 1; }

  [[nodiscard]] uint32_t delivered() const { return delivered_; }
  [[nodiscard]] std::vector<float> o() const { return {arrays_.o(), arrays_.o() + size_}; }

 private:
  runtime::ResultArrays arrays_;
  size_t size_;
  std::atomic<uint32_t> delivered_{0};
};

}  // namespace keyhole::test
