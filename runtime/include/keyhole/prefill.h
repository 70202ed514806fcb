/* Keyhole: attention of a prompt, exact or over the blocks of tokens that matter (MInference and what
 * came after), for a decoder that computes prompts with K and V of a layer in the memory of the engine's
 * device: a CUDA device or the host. Nothing is stored: keyhole_session_append of keyhole/keyhole.h takes K and V for
 * the decoding. The opening comment of that header (words, errors, structs) holds here, too.
 */
#ifndef KEYHOLE_PREFILL_H_
#define KEYHOLE_PREFILL_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One prompt's attention after the other; used by one thread at a time (a call from a second one
 * returns KEYHOLE_BUSY). */
typedef struct keyhole_prompt keyhole_prompt;

/* Text that lists the patterns with their parameters, defaults and allowed values. Static. */
KEYHOLE_API const char* keyhole_prompt_help(void);

/* For the heads, scale, soft-caps, learned sinks and sliding windows of each of the engine's
 * layers. pattern: "dense" (exact), "a-shape:..", "sampled:..", "vertical-slash:..",
 * "pooled:.."; or NULL or "auto", which is exact up to 16,384 tokens and attends what holds 95 % of the
 * weight beyond; or "budgets:PATH", by which a file of budgets says it of each (layer, query head), and
 * heads that it does not name are dense; or "codes:..", which is dense here, and of extends of sessions says which of
 * their codes they attend (keyhole/batch.h). Sliding layers are always exact, and on a CUDA device heads of 512.
 * Keeps its engine alive. *out is NULL on failure. Errors: INVALID_ARGUMENT (the pattern),
 * UNSUPPORTED (on a CUDA device head dimensions other than 64, 80, 96, 128, 256, 512; a
 * value_dim that is not head_dim), IO, CORRUPT, VERSION_MISMATCH (the file), OUT_OF_MEMORY, DEVICE_ERROR. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_prompt_create(keyhole_engine* engine,
                                                                  const char* pattern,
                                                                  keyhole_prompt** out);
/* Another pattern for a query head of a layer, or for all of a layer, of a head number or of both
 * (KEYHOLE_ALL), from the next call on: text as of keyhole_prompt_create(), not NULL. Errors: INVALID_ARGUMENT,
 * IO, CORRUPT, VERSION_MISMATCH (the file), OUT_OF_MEMORY, BUSY; then nothing has changed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_prompt_set_pattern(keyhole_prompt* prompt,
                                                                       uint32_t layer,
                                                                       uint32_t q_head,
                                                                       const char* pattern);
/* Waits for what was enqueued. Accepts NULL. */
KEYHOLE_API void keyhole_prompt_destroy(keyhole_prompt* prompt);

/* Enqueues causal attention of the last n of m tokens of a prompt.
 *   q       `[n, Hq, d]` in f32, f16 or bf16
 *   k, v    `[m, Hkv, d]`, n <= m, the dtype of q, strides alike: all tokens so far; v NULL with values_in_keys
 *   out     `[n, Hq, d]`, any dtype, rows that do not overlap
 *   lse     NULL, or `[n, Hq]` floats in device memory: log-sum-exp of the logits attended, natural
 *   stream  a cudaStream_t of the engine's device; NULL: the default stream
 * All in device memory, rows aligned to 16 bytes (of out to 8), m up to 4,194,240; they stay as they
 * are until the stream has done it. A prompt may come in one piece or in many; the choice of blocks is
 * each tile of 128 queries' own, counted from the first query of a call; columns and diagonals are those of a call's
 * last queries; which heads are dense as they look up single tokens is found for each call anew.
 * Products of fp16 numbers are summed in fp32, softmax weights are rounded to fp16 (two bf16): relative
 * error some 5e-4. Numbers in f32 are sums of two fp16, as softmax weights are then: relative error some 1e-6, or
 * 6e-8 of single numbers below 0.06, in three times the time, with a copy of q, k and v in device memory; numbers
 * beyond 1.3e5 are not held. k and v are rounded to one fp16, up to 65504, where blocks are chosen.
 * Numbers that are not finite give outputs that are not. Device memory for the
 * choice, of 32 query heads some 160 MiB up to 512k tokens and 300 MiB at 1M, is taken when it is needed and kept.
 * Dense patterns of f16 or bf16 without learned sinks can be captured in a graph.
 * On an engine on the host all of this is the caller's memory, lse too, and it is done when the call
 * returns; stream is not looked at. q, k and v may each be f32, f16 or bf16, at any address and with strides of
 * their own, out may be q; there is no limit to m. Sums are fp32, on the engine's threads. Memory for the choice, up to
 * some 300 MiB, is kept. Errors:
 * INVALID_ARGUMENT, OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_ERROR, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_prompt_attend(
    keyhole_prompt* prompt, uint32_t layer, const keyhole_tensor* q, const keyhole_tensor* k,
    const keyhole_tensor* v, const keyhole_tensor* out, float* lse, void* stream);

/* Blocks of 64 tokens, summed over tiles of 128 queries and query heads, of all calls that were not
 * dense: those attended, and those that the queries see. Waits for them. Errors: DEVICE_ERROR, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_prompt_get_blocks(keyhole_prompt* prompt,
                                                                      uint64_t* attended,
                                                                      uint64_t* seen);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_PREFILL_H_ */
