// hnswlib: the graph and the search of hnswlib, one query head at a time.
//
// Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using Hierarchical Navigable Small
// World graphs", TPAMI 2020; https://github.com/nmslib/hnswlib. The library chooses its distances by what the compiler
// may use, which is SSE in a program for every x86-64: it is given a dot product that is chosen when the program starts
// instead, the best that its users have. Its headers define functions that are not inline (0.6.2): they belong into
// this file alone.
#ifdef KEYHOLE_SANITIZED
// To prefetch, it reads the link behind the last one of a list, which lies in what malloc rounds up and is used for
// nothing.
#define NO_MANUAL_VECTORIZATION
#endif
#include <hnswlib/hnswlib.h>

#include <algorithm>
#include <mutex>

#include "tools/llama/vector_math.h"
#include "tools/rivals/graph_params.h"
#include "tools/rivals/lifted_rows.h"
#include "tools/rivals/rival.h"
#include "tools/rivals/rivals.h"
#include "tools/terminal/interrupt.h"

namespace keyhole::tools {
namespace {

// 1 - a . b, as hnswlib's own space of inner products has it; counts.
class CountedDots : public hnswlib::SpaceInterface<float> {
 public:
  explicit CountedDots(size_t width) : width_(width) {}

  size_t get_data_size() override { return width_ * sizeof(float); }
  hnswlib::DISTFUNC<float> get_dist_func() override { return distance; }
  void* get_dist_func_param() override { return this; }

  uint64_t count = 0;

 private:
  static float distance(const void* a, const void* b, const void* space) {
    auto* self = static_cast<CountedDots*>(const_cast<void*>(space));
    ++self->count;
    float dot = 0;
    matrix_vector(static_cast<const float*>(a), self->width_, static_cast<const float*>(b), 0, 1,
                  &dot);
    return 1 - dot;
  }

  const size_t width_;
};

class HnswlibGraph : public Rival {
 public:
  explicit HnswlibGraph(const RivalSpec& spec) : spec_(spec) {}

  void build(const RivalData& data) override {
    const size_t n = data.shape.rows;
    dim_ = data.shape.dim;
    const bool lift = spec_[GraphParams::lift] != 0;
    width_ = dim_ + (lift ? 1 : 0);
    const std::vector<float> rows = lift ? lifted_rows(data.keys, n, dim_)
                                         : std::vector<float>(data.keys, data.keys + n * dim_);
    space_ = std::make_unique<CountedDots>(width_);
    graph_ = std::make_unique<hnswlib::HierarchicalNSW<float>>(
        space_.get(), n, spec_.size(GraphParams::m), spec_.size(GraphParams::efc));
    for (size_t row = 0; row < n; ++row) {
      if (row % 256 == 0) throw_if_interrupted();
      graph_->addPoint(rows.data() + row * width_, row);
    }
    query_.assign(width_, 0.0F);
    set_spec(spec_);
  }
  void set_spec(const RivalSpec& spec) override {
    spec_ = spec;
    graph_->setEf(spec_.size(GraphParams::ef));
  }

  void search(const float* queries, size_t group, size_t k, RivalAnswer& answer) override {
    const uint64_t distances = space_->count;
    const auto links = static_cast<uint64_t>(graph_->metric_distance_computations.load());
    for (size_t j = 0; j < group; ++j) {
      std::copy_n(queries + j * dim_, dim_, query_.begin());
      auto found = graph_->searchKnn(query_.data(), k);
      for (; !found.empty(); found.pop()) {
        answer.heads[j].rows.push_back(static_cast<uint32_t>(found.top().second));
      }
    }
    answer.keys_scored = space_->count - distances;
    // What the library calls distance computations are the links that it looked at.
    answer.bytes_read =
        answer.keys_scored * width_ * sizeof(float) +
        (static_cast<uint64_t>(graph_->metric_distance_computations.load()) - links) *
            sizeof(hnswlib::tableint);
  }

  // Rows, links and what every key has besides; not the 65,536 locks of updates, which are of no use here.
  [[nodiscard]] uint64_t bytes() const override {
    uint64_t out = graph_->max_elements_ * (graph_->size_data_per_element_ + sizeof(char*) +
                                            sizeof(std::mutex) + sizeof(int));
    for (const int level : graph_->element_levels_) {
      out += static_cast<uint64_t>(level) * graph_->size_links_per_element_;
    }
    return out;
  }

 private:
  RivalSpec spec_;
  size_t dim_ = 0, width_ = 0;
  std::unique_ptr<CountedDots> space_;
  std::unique_ptr<hnswlib::HierarchicalNSW<float>> graph_;
  std::vector<float> query_;  // `[width]`, its last component 0 where keys are lifted
};

}  // namespace

const RivalType kHnswlib = {.name = "hnswlib",
                            .meaning = "hnswlib's graph and search",
                            .params = GraphParams::kTable,
                            .asks_for_k = true,
                            .make = [](const RivalSpec& spec) -> std::unique_ptr<Rival> {
                              return std::make_unique<HnswlibGraph>(spec);
                            }};

}  // namespace keyhole::tools
