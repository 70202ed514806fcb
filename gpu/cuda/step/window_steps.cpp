#include "gpu/cuda/step/window_steps.h"

#include <atomic>
#include <span>
#include <string>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/stream.h"
#include "gpu/cuda/exchange/host_merge.h"
#include "gpu/cuda/rings/step_kernel.h"
#include "gpu/cuda/windows/windows_store.h"

namespace keyhole::gpu {
namespace {

class CudaWindows final : public Windows {
 public:
  CudaWindows(const ResidentPlace& place, const WindowsShape& shape) : store_(place, shape) {
    const DeviceScope device(store_.ordinal());
    const BesideCapture beside;
    launcher_ = std::make_unique<StepLauncher>(store_.attended());
    failure_ = PinnedBuffer(sizeof(FailureLine));
  }

  void fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
            const std::byte* v) override {
    store_.fill(layer, first, n, k, v);
  }
  void keep(uint32_t layer, uint32_t first, uint32_t n) override { store_.keep(layer, first, n); }
  void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const override {
    store_.read(layer, first, n, k, v);
  }
  void append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
              const TensorView& v, Stream stream) override {
    store_.append(layer, first, kept, k, v, stream_of(stream));
  }
  bool are_finite(uint32_t /*layer*/, const TensorView& rows, DType as, Stream stream) override {
    return store_.are_finite(rows, as, stream_of(stream));
  }
  void keep_newest(std::span<const uint32_t> layers, uint32_t of, std::span<const uint32_t> kept,
                   Stream stream) override {
    store_.keep_newest(layers, of, kept, stream_of(stream));
  }
  size_t bytes() const override { return store_.bytes(); }

  void step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
            const SeenDrafts& drafts, const TensorOut& out, float* lse, Stream stream) override {
    check_window_rows(out, "out");
    check_drafts(drafts);
    StepParams p = step_params(layer, q, k, v);
    if (drafts.drafts != 0) {
      p.drafts = drafts.drafts;
      p.sees[0] = drafts.seen_within(p.window);
      p.window = drafts.reach(p.window);
    }
    p.merges = true;
    p.merge.out = out;
    p.merge.lse = lse;
    const DeviceScope device(store_.ordinal());
    launcher_->launch(p, stream_of(stream));
  }
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
             Stream stream) override {
    const StepParams p = step_params(layer, q, k, v);
    const DeviceScope device(store_.ordinal());
    launcher_->launch(p, stream_of(stream));
  }
  void end(uint32_t layer, const TensorOut& out, float* lse, Stream stream) override {
    store_.check_layer(layer);
    check_window_rows(out, "out");
    MergeParams m = merge_params(layer);
    m.out = out;
    m.lse = lse;
    const DeviceScope device(store_.ordinal());
    launch_host_merge(m, store_.states(layer), store_.shape().kv_heads, launcher_->ahead(),
                      stream_of(stream));
  }

  Status failure(std::string& text) override {
    auto& line = *failure_.as<FailureLine>();
    const uint64_t word = std::atomic_ref(line.word).exchange(0);
    if (word == 0) return Status::ok;
    const auto kind = static_cast<FailureKind>(word >> 56U);
    text = std::string("tensor ") +
           (kind == FailureKind::bad_q   ? "q"
            : kind == FailureKind::bad_k ? "k"
                                         : "v") +
           " of step " + std::to_string(static_cast<uint32_t>(word)) + " of layer " +
           std::to_string((word >> 44U) & 0xfffU) + ", KV head " +
           std::to_string((word >> 32U) & 0xfffU) + ": a NaN or an infinity" +
           (kind == FailureKind::bad_q
                ? ""
                : std::string(" (as ") + dtype_name(store_.shape().dtype) + ")");
    return Status::not_finite;
  }

 private:
  static void check_drafts(const SeenDrafts& d) {
    if (d.drafts <= kMostDrafts && (d.drafts == 0 || d.sees >> (d.drafts - 1) == 1)) return;
    refuse_windows("a step among " + std::to_string(d.drafts) + " drafts that sees " +
                   std::to_string(d.sees) + "; allowed are " + std::to_string(kMostDrafts) +
                   ", its own the last that it sees");
  }

  [[nodiscard]] MergeParams merge_params(uint32_t layer) const {
    MergeParams m;
    store_.set_end(layer, m);
    m.failure = failure_.device<FailureLine>();
    return m;
  }

  [[nodiscard]] StepParams step_params(uint32_t layer, const TensorView& q, const TensorView* k,
                                       const TensorView* v) const {
    store_.check_layer(layer);
    check_window_rows(q, "q");
    if ((k == nullptr) != (v == nullptr)) refuse_windows("a step takes k and v, or neither");
    if (k != nullptr) {
      check_window_rows(*k, "k");
      check_window_rows(*v, "v");
    }
    StepParams p;
    store_.set_ring(layer, p);
    p.q = q;
    if (k != nullptr) p.k = *k;
    if (v != nullptr) p.v = *v;
    p.merge = merge_params(layer);
    return p;
  }

  WindowsStore store_;
  std::unique_ptr<StepLauncher> launcher_;
  PinnedBuffer failure_;
};

}  // namespace

std::unique_ptr<Windows> make_cuda_windows(const ResidentPlace& place, const WindowsShape& shape) {
  return std::make_unique<CudaWindows>(place, shape);
}

}  // namespace keyhole::gpu
