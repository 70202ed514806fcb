#include "tools/engines/llama.cpp/parallel_for.h"

#include <ggml-backend.h>
#include <ggml.h>

#include <exception>
#include <new>
#include <string>

#include "tools/engines/llama.cpp/log.h"

namespace keyhole::llama_cpp {

ParallelFor::~ParallelFor() {
  if (memory_ != nullptr) ggml_free(memory_);
}

bool ParallelFor::keeps_threads() {
  ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (cpu == nullptr) return false;
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(cpu);
  const auto features = reinterpret_cast<ggml_backend_get_features_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_get_features"));
  if (features == nullptr) return false;
  for (const ggml_backend_feature* f = features(registry); f->name != nullptr; ++f) {
    if (std::string(f->name) == "OPENMP") return std::string(f->value) == "1";
  }
  return false;
}

void ParallelFor::open() {
  if (graph_ != nullptr) return;
  constexpr size_t kNodes = 8;
  if (memory_ == nullptr) {
    memory_ = ggml_init(
        {ggml_graph_overhead_custom(kNodes, false) + ggml_tensor_overhead(), nullptr, true});
  }
  if (memory_ == nullptr) throw std::bad_alloc();
  ggml_tensor* node = ggml_custom_4d(
      memory_, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0,
      [](ggml_tensor* /*node*/, int /*thread*/, int /*threads*/, void* self) {
        static_cast<ParallelFor*>(self)->help();
      },
      GGML_N_TASKS_MAX, this);
  graph_ = ggml_new_graph_custom(memory_, kNodes, false);
  ggml_build_forward_expand(graph_, node);
}

void ParallelFor::help() {
  for (uint32_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
       i = next_.fetch_add(1, std::memory_order_relaxed)) {
    task_(context_, i);
  }
}

void ParallelFor::run(Task task, void* context, uint32_t count) noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    for (uint32_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  task_ = task;
  context_ = context;
  count_ = count;
  next_.store(0, std::memory_order_relaxed);
  try {
    open();
    cpu_.compute(graph_);
  } catch (const std::exception& error) {
    log(Level::kWarning, std::string("parallel work on one thread: ") + error.what());
  }
  help();  // there is something to do where the graph was not computed
}

}  // namespace keyhole::llama_cpp
