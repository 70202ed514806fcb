// What the sessions of an engine take together.
#include "keyhole/inspect.h"
#include "runtime/api/api_guard.h"
#include "runtime/api/api_objects.h"

using namespace keyhole;           // NOLINT: the C functions live outside the namespace
using namespace keyhole::runtime;  // NOLINT

extern "C" {

void keyhole_memory_use_init_sized(keyhole_memory_use* memory, size_t size) {
  init_struct(memory, size, {});
}

keyhole_status keyhole_engine_get_memory(const keyhole_engine* engine, keyhole_memory_use* memory) {
  return guarded([&] {
    require(engine, "engine");
    keyhole_memory_use all{};
    MemoryFigures sum;
    engine->sessions->look([&](SessionInterface& s) {
      s.enter(Needs::look);
      sum.add(s.memory());
      ++all.sessions;
    });
    all.host_bytes = sum.host();
    all.kv_bytes = sum.kv;
    all.resident_bytes = sum.resident;
    all.index_bytes = sum.indexes;
    all.work_bytes = sum.work;
    all.shared_page_bytes = sum.shared_pages;
    all.pinned_bytes = sum.pinned;
    all.device_bytes = sum.device;
    all.code_bytes = sum.codes;
    write_struct(memory, all, "memory");
  });
}

}  // extern "C"
