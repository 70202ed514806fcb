/* Keyhole: attention states, for engines with attention of their own. Such an engine keeps sink and window itself,
 * appends with keyhole_session_append, and merges what the session returns of the other tokens with states of its own.
 * The opening comment of keyhole/keyhole.h (words, shapes, errors) holds here. docs/embedding.md, Engines with
 * attention of their own, shows the calls in order.
 *
 * Which tokens are offloaded keyhole_session_get_layer_tokens (keyhole/inspect.h) tells: all but the first `sink` and
 * the last `window` of them. Arrays lie in host memory, and so do tensors, whatever the engine's device; with a CUDA
 * device q, out and lse of keyhole_session_attend_offloaded and keyhole_session_attend_tokens may lie in device memory,
 * all of them: such a call waits for what is on the session's stream before it, and the state is there when it returns.
 * The lse of these two is a natural logarithm. Learned sinks are in no state here: the caller adds them once. The
 * functions that take a session are UNSUPPORTED in sliding layers, which have nothing offloaded.
 */
#ifndef KEYHOLE_ATTENTION_H_
#define KEYHOLE_ATTENTION_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The state of a layer's offloaded tokens alone, pending and indexed, as mode and budget say, without sink and window.
 * Nothing is appended; as in a step, blocks of pending tokens are taken into the index.
 *   q    `[Hq, d]`, any dtype
 *   out  `[Hq, d]`, any dtype;  lse NULL, or Hq floats
 * Where nothing is offloaded (or attended: KEYHOLE_MODE_RESIDENT) out is 0 and lse -inf, also in a layer without
 * tokens. Targets of a budget are relative to the offloaded tokens; the call is not audited. Errors: INVALID_ARGUMENT,
 * NOT_FINITE, BUSY, or the error of an earlier stream step; UNSUPPORTED where the device attends the layer by codes
 * (offload_placement = KEYHOLE_PLACE_HOST of the session's config keeps them on the host). out is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_attend_offloaded(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                                 const keyhole_tensor* out, float* lse);

/* The state of tokens that the caller has chosen, each exactly, in place of a search.
 *   counts  `[Hkv]`: how many tokens each KV head attends, 0 allowed
 *   ids     their positions, 0..total - 1 of keyhole_layer_tokens, those of KV head 0 first; of each head distinct, in
 *           any order (which changes results by rounding alone); NULL where all counts are 0
 *   with_resident  non-zero: sink and window are attended as well, by every head; ids of them count once
 *   q, out, lse    as in keyhole_session_attend_offloaded
 * Mode and budget do not matter. A head that attends nothing has (0, -inf). May allocate. Errors: INVALID_ARGUMENT
 * (names KV head, id and the ids allowed; an id that comes twice), NOT_FINITE, OUT_OF_MEMORY, BUSY, or the error of an
 * earlier stream step. out is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_tokens(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const uint32_t* ids,
    const uint32_t* counts, int32_t with_resident, const keyhole_tensor* out, float* lse);

/* The ids that a search chooses: of every query head the offloaded tokens with the largest inner products q . k, best
 * first, equal ones by position.
 *   q       `[Hq, d]`, any dtype;  top_k 1..max_tokens
 *   ids     `[Hq, top_k]` out: positions, as keyhole_session_attend_tokens takes them
 *   scores  NULL, or `[Hq, top_k]` out: q . k of the key as it is stored, unscaled
 *   counts  `[Hq]` out: how many each head has, min(top_k, offloaded tokens) or fewer where its index finds no more;
 *           what lies behind them is left as it was
 * Indexed tokens are sought in the head's index, with the effort that the index's parameters and top_k give; pending
 * tokens, and all of a head without an index (dense layers, layers that the device attends by codes) and of a session
 * in KEYHOLE_MODE_EXACT, are scored one by one. As in a step, blocks of pending tokens are taken into the index. May
 * allocate. Errors: INVALID_ARGUMENT, NOT_FINITE, OUT_OF_MEMORY, BUSY, or the error of an earlier stream step; what was
 * written is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_search_tokens(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                              uint32_t top_k, uint32_t* ids, float* scores, uint32_t* counts);

/* The base of the logarithm that is an lse. */
typedef int32_t keyhole_lse_base;
enum {
  /* ln of the sum of e^logit: all of this library's. */
  KEYHOLE_LSE_NATURAL = 0,
  /* log2 of the same sum, i.e. the natural one times log2(e): FlashInfer's. */
  KEYHOLE_LSE_LOG2 = 1
};

/* Merges n states in host memory by log-sum-exp.
 *   o    n pointers to `[heads, head_dim]` fp32;  lse  n pointers to `[heads]` fp32, to `base` (-inf: empty)
 *   out  `[heads, head_dim]`, out_lse `[heads]`, to `base`; may be one of the inputs
 * Any heads >= 1 and head_dim >= 1, not only those of an engine. Sums are fp32, in the order given; n = 0 gives (0,
 * -inf). States with lse = -inf are empty, and their o is not read; a NaN in a lse gives a NaN in the head's out and
 * out_lse. Errors: INVALID_ARGUMENT: NULL, heads or head_dim 0, base; OUT_OF_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states(uint32_t n, const float* const* o,
                                                                 const float* const* lse,
                                                                 uint32_t heads, uint32_t head_dim,
                                                                 keyhole_lse_base base, float* out,
                                                                 float* out_lse);

/* The same on a CUDA device, enqueued: returns at once, allocates nothing, can be captured in a graph.
 *   o        n pointers, in host memory, to `[rows, head_dim]` of o_dtype in device memory
 *   lse      n pointers, in host memory, to `[rows]` fp32 in device memory, to `base`
 *   rows     tokens * heads: each is merged by itself
 *   out      `[rows, head_dim]` of out_dtype, out_lse `[rows]` fp32, to `base`, in device memory; may be one of the
 *            inputs (out where the dtypes are equal)
 *   stream   a cudaStream_t of the thread's current device; NULL: the default stream
 * Any head_dim and rows from 1 on, n 0..2000; tensors are contiguous, aligned to their elements. Sums, empty states and
 * NaN as in keyhole_merge_states. The arrays o and lse may go when the call returns. Errors: INVALID_ARGUMENT;
 * UNSUPPORTED: a build without CUDA, a machine without a device; DEVICE_ERROR: the launch failed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states_device(
    uint32_t n, const void* const* o, const float* const* lse, uint32_t rows, uint32_t head_dim,
    keyhole_dtype o_dtype, keyhole_lse_base base, void* out, keyhole_dtype out_dtype,
    float* out_lse, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_ATTENTION_H_ */
