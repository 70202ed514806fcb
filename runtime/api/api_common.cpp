// The parts of the C API that belong to no object: versions, texts, tensors, plans.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/types.h"
#include "gpu/device.h"
#include "keyhole/inspect.h"
#include "runtime/api/api_guard.h"
#include "runtime/engine/device_choice.h"
#include "runtime/engine/engine.h"
#include "runtime/plan/auto_index.h"
#include "runtime/plan/planner.h"

#define KEYHOLE_TEXT_(x) #x
#define KEYHOLE_TEXT(x) KEYHOLE_TEXT_(x)

namespace keyhole::runtime {
namespace {

// The glossary's enums are the public ones by another name.
static_assert(static_cast<int>(Status::invalid_argument) == KEYHOLE_INVALID_ARGUMENT);
static_assert(static_cast<int>(Status::unsupported) == KEYHOLE_UNSUPPORTED);
static_assert(static_cast<int>(Status::out_of_memory) == KEYHOLE_OUT_OF_MEMORY);
static_assert(static_cast<int>(Status::out_of_device_memory) == KEYHOLE_OUT_OF_DEVICE_MEMORY);
static_assert(static_cast<int>(Status::device_error) == KEYHOLE_DEVICE_ERROR);
static_assert(static_cast<int>(Status::timeout) == KEYHOLE_TIMEOUT);
static_assert(static_cast<int>(Status::io) == KEYHOLE_IO);
static_assert(static_cast<int>(Status::corrupt) == KEYHOLE_CORRUPT);
static_assert(static_cast<int>(Status::version) == KEYHOLE_VERSION_MISMATCH);
static_assert(static_cast<int>(Status::cancelled) == KEYHOLE_CANCELLED);
static_assert(static_cast<int>(Status::busy) == KEYHOLE_BUSY);
static_assert(static_cast<int>(Status::not_finite) == KEYHOLE_NOT_FINITE);
static_assert(static_cast<int>(Status::internal) == KEYHOLE_INTERNAL);
static_assert(static_cast<int>(Status::rank_failed) == KEYHOLE_RANK_FAILED);
static_assert(static_cast<int>(DType::f32) == KEYHOLE_F32);
static_assert(static_cast<int>(DType::f16) == KEYHOLE_F16);
static_assert(static_cast<int>(DType::bf16) == KEYHOLE_BF16);
static_assert(static_cast<int>(Memory::host) == KEYHOLE_HOST);
static_assert(static_cast<int>(Memory::pinned) == KEYHOLE_PINNED);
static_assert(static_cast<int>(Memory::device) == KEYHOLE_DEVICE);

// A fixed array: keeping an error text must not itself run out of memory.
thread_local char last_error[1024] = "";

/// ModelShape::device_limits of a plan. What a GPU says that runs no kernels, or is not to be had now, is no error: a
/// plan needs none.
gpu::KernelLimits limits_of_plan(const keyhole_engine_config& engine) {
  constexpr uint32_t kLeast = 80, kMost = 999;
  const uint32_t capability = engine.device_capability;
  if (capability != KEYHOLE_AUTO && (capability < kLeast || capability > kMost)) {
    throw Error(Status::invalid_argument,
                "device_capability is " + std::to_string(capability) +
                    ", allowed: 0 (the GPU's that is here), 80..999 (8.0..99.9)");
  }
  if (engine.device == KEYHOLE_DEVICE_HOST) return {};
  if (capability != KEYHOLE_AUTO) {
    return gpu::limits_of_capability(static_cast<int>(capability) / 10,
                                     static_cast<int>(capability) % 10);
  }
  const std::vector<gpu::DeviceInfo> gpus = gpu::cuda_devices();
  const uint32_t ordinal = engine.device_ordinal;
  if (ordinal >= gpus.size() || !gpu::unsupported_reason(gpus[ordinal]).empty()) return {};
  try {
    return gpu::kernel_limits(static_cast<int>(ordinal));
  } catch (const Error& e) {
    if (e.status() == Status::invalid_argument) throw;
    return {};
  }
}

/// The spec, or as many of its whole settings as fit, and "...".
std::string shortened(const std::string& spec, size_t most) {
  constexpr std::string_view kMore = "...";
  if (spec.size() <= most) return spec;
  const size_t end = spec.find_last_of(":,", most - kMore.size() - 1);
  return spec.substr(0, end == std::string::npos ? most - kMore.size() : end + 1) +
         std::string(kMore);
}

}  // namespace

keyhole_status fail(Status status, const char* text) noexcept {
  std::strncpy(last_error, text, sizeof last_error - 1);
  return static_cast<keyhole_status>(status);
}

void require(const void* p, const char* name) {
  if (p == nullptr) throw Error(Status::invalid_argument, std::string(name) + " is NULL");
}

void refuse_child(const char* name) {
  throw Error(Status::unsupported,
              std::string(name) +
                  " was made by the process that this one was forked from, and its threads are not "
                  "here; allowed in a child: what it has made itself, and destroying the others");
}

std::function<bool(double, const char*)> progress_function(keyhole_progress_fn fn, void* user) {
  if (fn == nullptr) return {};
  return [fn, user](double fraction, const char* what) { return fn(user, fraction, what) == 0; };
}

}  // namespace keyhole::runtime

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

extern "C" {

const char* keyhole_version(void) {
  return KEYHOLE_TEXT(KEYHOLE_VERSION_MAJOR) "." KEYHOLE_TEXT(
      KEYHOLE_VERSION_MINOR) "." KEYHOLE_TEXT(KEYHOLE_VERSION_PATCH);
}

uint32_t keyhole_abi_version(void) { return KEYHOLE_ABI_VERSION; }

const char* keyhole_status_string(keyhole_status status) {
  switch (status) {
    case KEYHOLE_OK: return "ok";
    case KEYHOLE_INVALID_ARGUMENT: return "invalid argument";
    case KEYHOLE_UNSUPPORTED: return "unsupported";
    case KEYHOLE_OUT_OF_MEMORY: return "out of host memory";
    case KEYHOLE_OUT_OF_DEVICE_MEMORY: return "out of device memory";
    case KEYHOLE_DEVICE_ERROR: return "device error";
    case KEYHOLE_TIMEOUT: return "timeout";
    case KEYHOLE_IO: return "input or output failed";
    case KEYHOLE_CORRUPT: return "corrupt file";
    case KEYHOLE_VERSION_MISMATCH: return "version mismatch";
    case KEYHOLE_CANCELLED: return "cancelled";
    case KEYHOLE_BUSY: return "busy";
    case KEYHOLE_NOT_FINITE: return "not a finite number";
    case KEYHOLE_INTERNAL: return "internal error";
    case KEYHOLE_RANK_FAILED: return "a rank failed";
    default: return "unknown status";
  }
}

const char* keyhole_last_error(void) { return last_error; }

keyhole_tensor keyhole_tensor_host(const void* data, keyhole_dtype dtype, int32_t rank,
                                   const int64_t* shape) {
  keyhole_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.memory = KEYHOLE_HOST;
  t.rank = rank;
  int64_t stride = 1;
  for (int32_t i = (rank < 1 || rank > 4 || shape == nullptr ? 0 : rank) - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    // An absurd shape is refused where the tensor is used; here it must only not overflow.
    if (__builtin_mul_overflow(stride, shape[i], &stride)) stride = 0;
  }
  return t;
}

void keyhole_memory_plan_init_sized(keyhole_memory_plan* plan, size_t size) {
  init_struct(plan, size, {});
}

keyhole_status keyhole_plan(const keyhole_engine_config* engine,
                            const keyhole_session_config* session, uint64_t context,
                            uint64_t device_limit, uint64_t host_limit, keyhole_memory_plan* plan) {
  return guarded([&] {
    require(plan, "plan");
    keyhole_engine_config engine_defaults;
    keyhole_engine_config_init(&engine_defaults);
    keyhole_session_config session_defaults;
    keyhole_session_config_init(&session_defaults);
    const auto e = read_struct(engine, engine_defaults, "engine");
    auto s =
        session == nullptr ? session_defaults : read_struct(session, session_defaults, "session");
    // The plan is about `context`, not about the longest that the session allows.
    check_device(e.device);
    check_threads(e.threads);
    ModelShape model = check_model(e);
    model.device_limits = limits_of_plan(e);
    const std::string why_host = unsupported_on_device(model);
    if (e.device == KEYHOLE_DEVICE_CUDA && !why_host.empty()) refuse_cuda(why_host);
    const bool host_device = e.device == KEYHOLE_DEVICE_HOST || !why_host.empty();
    CodeRoom room;
    if (!host_device) {
      room = [&](const gpu::ResidentShape& shape) -> uint64_t {
        const uint64_t resident = gpu::cuda_resident_bytes(shape);
        if (device_limit == 0) return UINT64_MAX;
        return device_limit > resident ? device_limit - resident : 0;
      };
    }
    const auto params_at = [&](uint64_t tokens) {
      s.max_tokens = static_cast<uint32_t>(std::clamp<uint64_t>(tokens, 1, kMaxTokens));
      SessionParams params = check_session(s, model, room);
      if (host_device) check_host_placement(params);
      params.max_tokens = kMaxTokens;
      return params;
    };
    const SessionParams params = params_at(context);
    if (context > kMaxTokens) {
      throw Error(Status::invalid_argument, "context is " + std::to_string(context) +
                                                ", allowed: 0.." + std::to_string(kMaxTokens));
    }
    const uint32_t threads = e.threads == KEYHOLE_AUTO ? 16 : e.threads;
    const MemoryPlan p = plan_memory(model, params, context, threads, host_device, device_limit);
    keyhole_memory_plan result;
    keyhole_memory_plan_init(&result);
    result.kv_bytes = p.kv_bytes;
    result.host_bytes = p.host_bytes;
    result.index_bytes = p.index_bytes;
    result.device_bytes = p.device_bytes;
    result.pinned_bytes = p.pinned_bytes;
    result.code_bytes = p.code_bytes;
    result.pinned_kv_bytes = p.pinned_kv_bytes;
    result.code_layers = p.code_layers;
    result.first_code_layer = p.first_code_layer;
    result.rows_by_host = p.rows_by_host ? 1 : 0;
    shortened(params.index, sizeof result.index - 1).copy(result.index, sizeof result.index - 1);
    result.fits =
        plan_fits(p, device_limit, host_limit, params.pinned_memory_limit, host_device) ? 1 : 0;
    const auto fits = [&](const SessionParams& at, uint64_t tokens) {
      return plan_fits(plan_memory(model, at, tokens, threads, host_device, device_limit),
                       device_limit, host_limit, at.pinned_memory_limit, host_device);
    };
    // "auto" is chosen for each length: codes of fewer bits leave room for more tokens. A length may fit and a shorter
    // one not, then, so the search begins with one that is known to.
    const bool is_auto = s.index == nullptr || s.index == kAutoIndex;
    const uint64_t least = is_auto && result.fits != 0 ? std::max<uint64_t>(context, 1) : 1;
    result.longest_context = longest_context(least, [&](uint64_t tokens) {
      return is_auto ? fits(params_at(tokens), tokens) : fits(params, tokens);
    });
    write_struct(plan, result, "plan");
  });
}

}  // extern "C"
