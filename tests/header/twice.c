/* A public header, alone and first, twice; then each constant it promises to a preprocessor. */
#ifndef KEYHOLE_TEST_HEADER
#define KEYHOLE_TEST_HEADER "keyhole/keyhole.h"
#endif
#include KEYHOLE_TEST_HEADER
#include KEYHOLE_TEST_HEADER
#include "keyhole/index.h"
#include "keyhole/inspect.h"

#if KEYHOLE_VERSION_MAJOR < 0 || KEYHOLE_VERSION_MINOR < 0 || KEYHOLE_VERSION_PATCH < 0
#error "the version must be usable in #if"
#endif
#if KEYHOLE_ABI_VERSION < 0
#error "the ABI version must be usable in #if"
#endif

#ifdef KEYHOLE_TEST_BREAK
KEYHOLE_API keyhole_status
keyhole_version(void); /* conflicts: the compiler must see the header's */
#endif

/* Struct sizes come first, so that a config of another version can be told. */
int keyhole_test_offsets(void);
int keyhole_test_offsets(void) {
  return (
      int)(offsetof(keyhole_engine_config, struct_size) +
           offsetof(keyhole_session_config, struct_size) +
           offsetof(keyhole_layer_tokens, struct_size) + offsetof(keyhole_statistics, struct_size) +
           offsetof(keyhole_memory_plan, struct_size) + offsetof(keyhole_search_cost, struct_size) +
           offsetof(keyhole_index_info, struct_size) +
           offsetof(keyhole_search_options, struct_size));
}
