/* Keyhole: what a session holds, what it has done and cost, what its audits found; and what memory a session would
 * take. The opening comment of keyhole/keyhole.h (words, errors, structs) holds here.
 */
#ifndef KEYHOLE_INSPECT_H_
#define KEYHOLE_INSPECT_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tokens ---------------------------------------------------------------------------------- */

/* Tokens of a layer: all, and how many of them are sink, window, indexed, pending (these add up to
 * total; of a sliding layer total counts all tokens that came, window those that it attends). A token is
 * indexed here when it is so in every KV head that has an index: after a
 * build that was cancelled or failed, heads that it had finished search tokens that are pending in
 * others. */
typedef struct keyhole_layer_tokens {
  size_t struct_size;
  uint32_t total, sink, window, indexed, pending;
} keyhole_layer_tokens;
KEYHOLE_API void keyhole_layer_tokens_init_sized(keyhole_layer_tokens* tokens, size_t size);
static inline void keyhole_layer_tokens_init(keyhole_layer_tokens* tokens) {
  keyhole_layer_tokens_init_sized(tokens, sizeof *tokens);
}
/* While a stream is being captured this waits only for the host's part of steps enqueued before,
 * and does not touch the stream: of steps that were captured and not launched it knows nothing.
 * INVALID_ARGUMENT: layer. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_layer_tokens(
    const keyhole_session* session, uint32_t layer, keyhole_layer_tokens* tokens);

/* Copies K and V of tokens first..first + n - 1 of a layer, wherever they lie, as the session holds them: what an
 * engine needs to save its cache in its own format, or to go on with some of the tokens elsewhere.
 *   k, v  `[n, Hkv, d]`, any dtype, host or pinned memory, rows that do not overlap; either may be NULL, and v must be
 *         with values_in_keys
 * What was stored in kv_dtype comes back bit for bit where the tensor has that dtype. Of offloaded rows in int8 come
 * the numbers that they stand for, rounded to kv_dtype. Waits for steps on a stream; works after one has failed, too,
 * for what is in host memory.
 * INVALID_ARGUMENT: layer, shapes, tokens that the layer does not hold (a sliding layer keeps its newest ones).
 * NOT_FINITE: a number beyond what the tensor's dtype holds. UNSUPPORTED over several ranks. OUT_OF_MEMORY, BUSY. On an
 * error k and v are unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_rows(keyhole_session* session,
                                                                     uint32_t layer, uint32_t first,
                                                                     const keyhole_tensor* k,
                                                                     const keyhole_tensor* v);

/* Over all layers. Sums run since the session was made or keyhole_session_reset_statistics. */
typedef struct keyhole_statistics {
  size_t struct_size;
  /* Sum: steps of a layer that are done. */
  uint64_t attends;
  /* Sum: (key, query head) pairs that indexes have scored. */
  uint64_t keys_scored;
  /* Sum: indexed tokens x query heads. keys_scored / keys_offered is the scan fraction. */
  uint64_t keys_offered;
  /* Sum: offloaded tokens x query heads that entered an attention state. */
  uint64_t keys_attended;
  /* Sum: host memory read by searches and offloaded attention. What a batch of copies reads once is divided among
   * them. */
  uint64_t bytes_read;
  /* Sum: wall time of attends, begin to end; of stream steps, serve_seconds. */
  double attend_seconds;
  /* Sum: worker time in index searches. */
  double search_seconds;
  /* Sum: worker time in attention over offloaded tokens. */
  double offload_seconds;
  /* Sum: worker time in resident attention (host device). */
  double resident_seconds;
  /* Sum: time in appends of K and V, flushes and index appends in attends. */
  double append_seconds;
  /* Sum: wall time of keyhole_session_build. */
  double build_seconds;
  /* Now: of the longest layer. */
  uint64_t tokens;
  /* Now: K, V, indexes, training queries, buffers. */
  uint64_t host_bytes;
  /* Now: of host_bytes, the indexes. */
  uint64_t index_bytes;
  /* Now: resident K and V, rings of sliding layers that lie there, work space and codes (host memory on
   * a host device, without such rings). */
  uint64_t device_bytes;
  /* E.g. "host"; it lives as long as the engine and its sessions. */
  const char* device;
  /* E.g. "avx512vnni"; static. */
  const char* cpu_level;
  uint32_t threads;
  /* Sum: blocks of pending tokens that steps took into the index of a layer. */
  uint64_t append_blocks;
  /* Sum: of append_blocks, those that were not ready, so that the step finished them itself. */
  uint64_t append_waits;
  /* Sum: time that this took (contained in append_seconds). */
  double append_wait_seconds;
  /* Sum: time of the background thread in blocks that have been taken in. */
  double background_seconds;
  /* Now: of index_bytes, the partitions of the tails. */
  uint64_t tail_bytes;
  /* Sum: worker time in estimates of what was not read (within search_seconds). */
  double tail_seconds;
  /* Sum: distinct keys read to meet a target, or because codes could not tell which weigh (codes_doubted), beyond what
   * the search found. */
  uint64_t keys_opened;
  /* Sum: (head, step) that stopped at max_keys with a target unmet, by the estimate. */
  uint64_t targets_missed;
  /* Sum: of attends, those enqueued on a stream. */
  uint64_t stream_steps;
  /* Sum: time that the stream stood still for the host, which overlap did not hide. */
  double device_wait_seconds;
  /* Sum, of stream steps: from the arrival of q to the last state handed back. */
  double serve_seconds;
  /* Now: exchange between host and device, and offloaded tokens that the device reads by itself. */
  uint64_t pinned_bytes;
  /* The largest device_bytes and host_bytes since the session was made. */
  uint64_t device_bytes_peak, host_bytes_peak;
  /* "wait", "launch"; "" on a host device; static. */
  const char* signal;
  /* Now: of device_bytes, codes of offloaded tokens. */
  uint64_t code_bytes;
  /* Now: layers that the device attends by these codes. */
  uint32_t code_layers;
  /* Now: 1 where the host reads the tokens that they attend exactly, see exact_rows_by. */
  uint32_t rows_by_host;
  /* Now: of host_bytes, K, V, indexes and training queries that the session shares with its copies, or with the one of
   * which it is a copy, and that another of them counts: host_bytes - shared_bytes, summed over all sessions, is what
   * they take. Of what several share, the first that still has it counts it; memory of which one has taken a copy of
   * its own is not shared. */
  uint64_t shared_bytes;
  /* Sum: (KV head, step) whose codes could not tell which tokens weigh, so that more of them were read exactly than
   * the budget says: heads whose logits differ by much more than the codes' errors allow, and all heads whose query is
   * too long for codes. On a device where the host reads tokens (rows_by_host) heads in doubt are counted here alone,
   * and their answers are of the tokens of the budget: any error that docs/what-codes-hold.md rules out is in a head
   * that is counted. codes_given_up and keys_opened do not change there. */
  uint64_t codes_doubted;
  /* Sum: of codes_doubted, those where codes could not even say which tokens might weigh: all were read, at the cost of
   * exact attention (on a device, those that might weigh, if they were more than an eighth). Many of them: take codes
   * of more bits, or exact attention, for these heads. */
  uint64_t codes_given_up;
} keyhole_statistics;
KEYHOLE_API void keyhole_statistics_init_sized(keyhole_statistics* statistics, size_t size);
static inline void keyhole_statistics_init(keyhole_statistics* statistics) {
  keyhole_statistics_init_sized(statistics, sizeof *statistics);
}
/* Allowed between attend_begin and attend_end: a step under way is counted when it ends. While a
 * stream is being captured this waits only for the host's part of steps enqueued before, and does
 * not touch the stream. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_statistics(const keyhole_session* session, keyhole_statistics* statistics);
/* Sets the sums to 0, and the figures of audits. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_reset_statistics(keyhole_session* session);

/* What the open sessions of an engine take together, now, each page of memory once: of what copies share, the first
 * that still has it counts it. With several ranks, those of this rank. The four kinds of host memory do not overlap and
 * add up to host_bytes. docs/embedding.md, Memory, says how the system shows them. */
typedef struct keyhole_memory_use {
  size_t struct_size;
  /* Open sessions of the engine, copies and loaded ones among them. */
  uint64_t sessions;
  /* Host memory of all kinds. */
  uint64_t host_bytes;
  /* K and V of offloaded tokens, with the scales of int8, and of sliding layers. */
  uint64_t kv_bytes;
  /* K and V of sink and window, with their full capacity: on a host device the memory in which they lie, on a CUDA
   * device the host's copy. */
  uint64_t resident_bytes;
  /* Indexes, partitions of tails, samples of queries. */
  uint64_t index_bytes;
  /* What steps, searches, audits and extends work in, and staging buffers. */
  uint64_t work_bytes;
  /* Of kv_bytes, what lies in pages that several addresses can share (MAP_SHARED): all offloaded K and V, but where a
   * system has no such memory. RssShmem of a process has them, RssAnon has not. */
  uint64_t shared_page_bytes;
  /* Sum of the sessions' pinned_bytes (keyhole_statistics), in which a page that several have pinned counts for
   * each. */
  uint64_t pinned_bytes;
  /* Device memory, as in keyhole_statistics; 0 on a host device, whose resident tokens are resident_bytes. */
  uint64_t device_bytes;
  /* Of device_bytes, codes of offloaded tokens. */
  uint64_t code_bytes;
} keyhole_memory_use;
KEYHOLE_API void keyhole_memory_use_init_sized(keyhole_memory_use* memory, size_t size);
static inline void keyhole_memory_use_init(keyhole_memory_use* memory) {
  keyhole_memory_use_init_sized(memory, sizeof *memory);
}
/* From any thread, at any time: it looks at one session after the other, waits for the call that another thread has
 * inside it (a build may take seconds), and no call is BUSY because of it. Sessions that change meanwhile count as they
 * were when it came to them. Waits for the host's part of steps on a stream. Errors: INVALID_ARGUMENT, OUT_OF_MEMORY;
 * UNSUPPORTED in a child process. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_engine_get_memory(const keyhole_engine* engine,
                                                                      keyhole_memory_use* memory);

/* What audits have found since the session was made or its statistics were reset (docs/choosing.md,
 * Audits); of one head, or of all of a layer, KV head or model (KEYHOLE_ALL). Errors and masses are
 * per query head. Quantiles come from a histogram of 64 steps per factor of 10: error_median,
 * error_p95 and error_p99 are right within 4 %, and so are mass_p05 and 1 - mass_p05. Every figure
 * is 0 where nothing was audited. */
typedef struct keyhole_audit {
  size_t struct_size;
  /* (step, layer, query head) that were recomputed: of a KV head all query heads of its group. */
  uint64_t audits;
  /* (step, layer, KV head) whose audit a step had to wait for, and made itself. */
  uint64_t waits;
  /* Of audits: output error above audit_bound. */
  uint64_t over_bound;
  /* Times that audit_action took effect on a KV head. */
  uint64_t actions;
  /* |o - o*| / |o*| of the step's output before it is written to the caller's dtype; 1 where only
   * o* is 0, infinite where o is not finite. */
  double error_mean, error_median, error_p95, error_max;
  /* Share of the attention mass that was read, resident and pending included. Where codes on a
   * device stand for tokens it is not known which rows were read exactly: the sum of all weights of
   * the step over the true one, at most 1. */
  double mass_mean, mass_p05;
  /* Mean share of the true top_k offloaded keys (of all, where there are fewer) that were attended
   * by the group, pending ones included; of audits that had offloaded keys, and no codes on a device. */
  double recall;
  /* True mass of what was not read, 1 - mass, mean. */
  double missing_mean;
  /* The tail's estimate of it when the step ended, mean; 0 without tail or target. */
  double estimated_missing_mean;
  /* Mean |estimated - true| of single steps. */
  double missing_error_mean;
  /* Time spent on audits, all threads. */
  double seconds;
  /* As error_p95, of which 99 of 100 outputs are below. */
  double error_p99;
} keyhole_audit;
KEYHOLE_API void keyhole_audit_init_sized(keyhole_audit* audit, size_t size);
static inline void keyhole_audit_init(keyhole_audit* audit) {
  keyhole_audit_init_sized(audit, sizeof *audit);
}
/* Waits for the session's stream, and finishes the audits under way first, on the engine's threads,
 * each of which reads all offloaded K and V of its head; so call it seldom. All 0 for a session without
 * audits. INVALID_ARGUMENT: layer or kv_head; BUSY: between attend_begin and attend_end. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_audit(keyhole_session* session,
                                                                      uint32_t layer,
                                                                      uint32_t kv_head,
                                                                      keyhole_audit* audit);

/* ---- Plan: memory before anything is allocated ----------------------------------------------- */

typedef struct keyhole_memory_plan {
  size_t struct_size;
  /* All K and V at this context, in kv_dtype. */
  uint64_t kv_bytes;
  /* Offloaded K and V as kv_host has them, indexes, training queries, buffers. */
  uint64_t host_bytes;
  /* Of host_bytes, the indexes. */
  uint64_t index_bytes;
  /* Resident K and V and work space on the device. */
  uint64_t device_bytes;
  /* Exchange buffers between host and device; 0 on a host device. A session that was given tokens of a prompt in device
   * memory has pinned 16 MiB more, through which they come: neither keyhole_statistics nor pinned_memory_limit counts
   * these. */
  uint64_t pinned_bytes;
  /* 1 if device_bytes is within device_limit, host_bytes + pinned_bytes within host_limit and pinned_bytes +
   * pinned_kv_bytes within pinned_memory_limit. */
  uint32_t fits;
  /* The most tokens that fit all limits, up to 2^31; 0 if none does. */
  uint32_t longest_context;
  /* Of device_bytes, codes of offloaded tokens. */
  uint64_t code_bytes;
  /* Of host_bytes, memory of offloaded tokens that is pinned, as the device reads it. A session pins, and takes, up to
   * 2 MiB more for K and for V of each KV head of a layer, ahead of the tokens. */
  uint64_t pinned_kv_bytes;
  /* The index of the session: what "auto" stands for. Of a longer spec as many whole settings as fit, and "...". */
  char index[64];
  /* Layers whose codes lie on the device. Where there is no room for all, they are the last ones of those that could:
   * layers below first_code_layer (0 if code_layers is 0) are attended by the host. */
  uint32_t code_layers;
  uint32_t first_code_layer;
  /* 1 where the host reads the tokens that these layers attend exactly, see exact_rows_by; pinned_kv_bytes is 0
   * then. */
  uint32_t rows_by_host;
} keyhole_memory_plan;
KEYHOLE_API void keyhole_memory_plan_init_sized(keyhole_memory_plan* plan, size_t size);
static inline void keyhole_memory_plan_init(keyhole_memory_plan* plan) {
  keyhole_memory_plan_init_sized(plan, sizeof *plan);
}

/* Memory that a session of this shape takes at `context` tokens. Needs no engine, GPU or memory. Limits in bytes, 0:
 * none; device_limit is what is left for Keyhole after the weights. On a host device device_bytes count against
 * host_limit too. Uses the shape, kv_dtype, device (AUTO: as CUDA, or as the host where CUDA does not take the shape),
 * device_capability or that of device_ordinal (whether it has lists of codes; a GPU that is here is asked for its
 * attributes alone, which takes none of its memory) and threads (AUTO: 16) of `engine` and sink, window, flush_block,
 * index, budget, tail_partition, offload_placement, budgets, dense_layers, training_queries, audit_share, audit_action,
 * kv_host, pinned_memory_limit and exact_rows_by of `session` (NULL: defaults).
 * Errors: INVALID_ARGUMENT, also where a size passes 2^63; UNSUPPORTED: a shape that DEVICE_CUDA does not
 * take; those of the budgets file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_plan(const keyhole_engine_config* engine,
                                                         const keyhole_session_config* session,
                                                         uint64_t context, uint64_t device_limit,
                                                         uint64_t host_limit,
                                                         keyhole_memory_plan* plan);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_INSPECT_H_ */
