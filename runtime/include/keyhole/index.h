/* Keyhole: one index by itself, over the keys of one KV head, to compare index types on recorded
 * keys. A decoder needs keyhole/keyhole.h alone, whose opening comment (words, errors, structs)
 * holds here, too.
 *
 * An index is used by one thread at a time (searches too); a call from a second one returns
 * KEYHOLE_BUSY.
 */
#ifndef KEYHOLE_INDEX_H_
#define KEYHOLE_INDEX_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct keyhole_index keyhole_index;

/* Text that lists every index type with its parameters, defaults and allowed values. Static. */
KEYHOLE_API const char* keyhole_index_help(void);

/* An empty index over the keys of one KV head, on the engine's threads and kernels. kv_dtype is the
 * engine's; head_dim, scale, softcap and RoPE are the layer's. layer and kv_head, below those of the
 * engine's shape, say where in the model the head stands: an index type with trained data uses that
 * of its place. Keeps its engine alive. *out is NULL on failure. Errors: INVALID_ARGUMENT (spec,
 * layer, kv_head), OUT_OF_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_create(keyhole_engine* engine,
                                                                 const char* spec, uint32_t layer,
                                                                 uint32_t kv_head,
                                                                 keyhole_index** out);
/* Accepts NULL. */
KEYHOLE_API void keyhole_index_destroy(keyhole_index* index);

/* Builds over keys `[n, d]` (any dtype; copied to kv_dtype with values `[n, d]`, or `[n, value_dim]` where the engine
 * has one; values may be NULL if keyhole_index_attend is not used, and must be with values_in_keys). training_queries
 * `[m, d]` or NULL with their token positions (NULL: unknown); first_position is the token position of keys[0].
 * progress may be NULL. Replaces an earlier build. On an error the index is empty; it is as before on BUSY, and where
 * the shape, dtype or memory of `keys` was refused. Errors: INVALID_ARGUMENT, NOT_FINITE (names tensor
 * and row; also for a finite value that overflows kv_dtype), OUT_OF_MEMORY, CANCELLED, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_index_build(keyhole_index* index, const keyhole_tensor* keys, const keyhole_tensor* values,
                    const keyhole_tensor* training_queries, const uint32_t* training_positions,
                    uint32_t first_position, keyhole_progress_fn progress, void* user);

/* Gives a built index other search parameters, without building it again: `spec` must agree with
 * the index's in its type and in all parameters that a build fixes (INVALID_ARGUMENT names the
 * first that does not, and nothing changes). Before the build any valid spec is taken. Errors:
 * INVALID_ARGUMENT, OUT_OF_MEMORY, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_set_spec(keyhole_index* index,
                                                                   const char* spec);

/* Partitions the keys of a built index for tails and targets, `keys_per_partition` (4..1024; AUTO:
 * 16) keys each; the index must have values. Replaces earlier ones, which stay on an error.
 * progress may be NULL. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, CANCELLED, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_build_tail(keyhole_index* index,
                                                                     uint32_t keys_per_partition,
                                                                     keyhole_progress_fn progress,
                                                                     void* user);

#define KEYHOLE_POSITION_UNKNOWN UINT32_MAX

/* How an index is searched, and what of it is attended. */
typedef struct keyhole_search_options {
  size_t struct_size;
  /* budget.top_k is the number of keys wanted per query and the width of the caller's arrays; more
   * than there are keys is allowed. The other fields are for keyhole_index_attend alone; a tail or
   * a target needs keyhole_index_build_tail. */
  keyhole_budget budget;
  /* Token position of the queries, from which an index can undo their RoPE; default
   * KEYHOLE_POSITION_UNKNOWN. */
  uint32_t position;
  /* States of everything else that the queries attend to, o `[g, d]` (or value_dim), lse `[g]`: error and mass
   * targets are about them and the index's keys together. Both NULL: nothing else. */
  const float* other_o;
  const float* other_lse;
} keyhole_search_options;
KEYHOLE_API void keyhole_search_options_init_sized(keyhole_search_options* options, size_t size);
static inline void keyhole_search_options_init(keyhole_search_options* options) {
  keyhole_search_options_init_sized(options, sizeof *options);
}

/* What one search or attend cost. */
typedef struct keyhole_search_cost {
  size_t struct_size;
  /* (key, query head) pairs. */
  uint64_t keys_scored;
  uint64_t bytes_read;
  /* Distinct keys in the state (attend only). */
  uint32_t keys_attended;
  /* Of keys_attended: read to meet a target. This and what follows: attend with a tail or a target
   * only. */
  uint32_t keys_opened;
  /* Of bytes_read: means and variances of partitions. */
  uint64_t tail_bytes_read;
  /* Time spent on estimates. */
  double tail_seconds;
  /* `[g]` estimated share of the attention mass that was not read, out of all with other_lse; of more than
   * 16 queries those of the first 16. */
  float missing[16];
  /* Likewise the estimated output error, |o - o*| / |o*|. */
  float error[16];
} keyhole_search_cost;
KEYHOLE_API void keyhole_search_cost_init_sized(keyhole_search_cost* cost, size_t size);
static inline void keyhole_search_cost_init(keyhole_search_cost* cost) {
  keyhole_search_cost_init_sized(cost, sizeof *cost);
}

/* The keys of largest inner product for each of g queries `[g, d]`, g 1..128.
 *   options NULL: the defaults. k, below, is options->budget.top_k
 *   ids `[g, k]` best first, scores `[g, k]` inner products (NULL: not wanted), counts `[g]` found
 * Single-threaded on the caller. k above the number of keys is allowed: counts tell. cost may be
 * NULL. Errors: INVALID_ARGUMENT (also of an empty index), NOT_FINITE (queries), OUT_OF_MEMORY,
 * BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_search(
    keyhole_index* index, const keyhole_tensor* queries, const keyhole_search_options* options,
    uint32_t* ids, float* scores, uint32_t* counts, keyhole_search_cost* cost);

/* Search, then partial attention of all g heads over the keys that options->budget takes from it:
 * what a decoding step does for one KV head. o `[g, d]`, or value_dim of the
 * engine, lse `[g]` fp32.
 *   rows, row_count  the distinct keys attended, in no particular order; *rows points into the
 *                    index and is valid until its next call. Either may be NULL.
 * With a tail, (o, lse) is the state of the keys that were read merged with that of the tail.
 * Errors: as keyhole_index_search; INVALID_ARGUMENT also of an index without values. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_attend(
    keyhole_index* index, const keyhole_tensor* queries, const keyhole_search_options* options,
    float* o, float* lse, const uint32_t** rows, uint32_t* row_count, keyhole_search_cost* cost);

typedef struct keyhole_index_info {
  size_t struct_size;
  uint64_t keys;
  /* Held by the index beside K and V. */
  uint64_t bytes;
  double build_seconds;
  /* The spec in effect; valid until the next build, keyhole_index_set_spec or destroy. */
  const char* params;
  /* JSON object of numbers, e.g. {"mean_degree": 14.2}; valid as params. */
  const char* diagnostics;
  /* Held by the partitions of keyhole_index_build_tail. */
  uint64_t tail_bytes;
  double tail_build_seconds;
} keyhole_index_info;
KEYHOLE_API void keyhole_index_info_init_sized(keyhole_index_info* info, size_t size);
static inline void keyhole_index_info_init(keyhole_index_info* info) {
  keyhole_index_info_init_sized(info, sizeof *info);
}
/* An empty index has 0 keys and the spec that it was given. Errors: INVALID_ARGUMENT, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_get_info(const keyhole_index* index,
                                                                   keyhole_index_info* info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_INDEX_H_ */
