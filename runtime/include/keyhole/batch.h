/* Keyhole: more of keyhole_session_extend: drafts of which a part is accepted, several sessions in one call, and chunks
 * whose tokens attend by a pattern, as prompts do. The opening comment of keyhole/keyhole.h (words, shapes, errors)
 * holds here. docs/embedding.md, Several tokens, several sequences, says what is shared and how fast it is.
 */
#ifndef KEYHOLE_BATCH_H_
#define KEYHOLE_BATCH_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* After one keyhole_session_extend of the same n tokens in every layer that took part, or one launch of a graph that
 * extends layers so: keeps m of them, and drops the others in all these layers.
 *   path  NULL: the first m (0..n). Else m rising indexes below n, a path of the tree: they become the tokens that
 *         follow those before the call, in this order.
 * Drops as keyhole_session_truncate does: what was offloaded stays offloaded, and with KEYHOLE_KV_HOST_INT8 tokens that
 * had left the window come back rounded. One accept for each extend. Of up to 64 tokens in device memory, no more than
 * `window`, it is enqueued on the session's stream, waits for nothing, and graphs stay valid. Not during a capture.
 * Errors: INVALID_ARGUMENT (m, path; no keyhole_session_extend before; another call has changed a layer's tokens since;
 * layers with another n or other tokens before it; a sliding layer that no longer holds its window before the tokens
 * that go: window_slack is as many as can be), OUT_OF_MEMORY, BUSY, or the error of an earlier stream step; nothing
 * changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_accept(keyhole_session* session,
                                                                   uint32_t m,
                                                                   const uint32_t* path);

/* keyhole_session_extend (without masks) of `count` different sessions of one engine, whose work the engine's threads
 * share. With tensors in device memory each is enqueued on the stream of its session; steps that are alike, of sessions
 * with a stream in common, go by one launch, also in a capture. Sequences may join and leave between calls. Results may
 * differ by rounding from those of keyhole_session_extend.
 *   q, out       `[total, Hq, d]`, total = query_start[count]: the tokens of session 0, then those of session 1, ...
 *   k, v         `[total, Hkv, d]`
 *   query_start  `[count + 1]`, rising from 0: tokens query_start[i] to query_start[i + 1] are session i's; none: the
 *                session is left alone
 *   lse          NULL, or `[total, Hq]` floats
 *   statuses     NULL, or `[count]`: what keyhole_session_extend would have returned for each
 * What fails for one session (NOT_FINITE in its rows, its OUT_OF_MEMORY, BUSY, ...) leaves that session as it was and
 * its rows of out and lse unspecified; the others go on. A launch that fails is a failure of each session in it.
 * Returns KEYHOLE_OK if all succeeded, else the first failure in the order of the sessions, whose text
 * keyhole_last_error() gives. Arguments that concern all (tensors, query_start, layer, a NULL session, sessions of
 * several engines) are checked first: INVALID_ARGUMENT or UNSUPPORTED, and no session has changed; statuses then hold
 * that status. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_extend_batch(
    keyhole_session* const* sessions, uint32_t count, uint32_t layer, const keyhole_tensor* q,
    const keyhole_tensor* k, const keyhole_tensor* v, const uint32_t* query_start,
    const keyhole_tensor* out, float* lse, keyhole_status* statuses);

/* Answers n >= 1 queries of one layer by the tokens that it holds, and appends nothing: each attends to all of them, as
 * mode and budget say, as keyhole_session_attend does with k and v NULL, up to rounding (of a sliding layer to its
 * newest `window` tokens). Tokens of another text that look at this one, embeddings, a cache that somebody else fills.
 *   q    `[n, Hq, d]`, any dtype, host or pinned memory
 *   out  `[n, Hq, d]`, any dtype, host or pinned memory, rows that do not overlap; may be q
 *   lse  NULL, or `[n, Hq]` floats: log-sum-exp of the logits of all tokens attended
 * Queries share their reading of keys and codes as the new tokens of keyhole_session_extend do; indexes on the host
 * take blocks of pending tokens in as in one step. Waits for steps on a stream. Targets and audits see these queries as
 * those of steps. May allocate. Errors: INVALID_ARGUMENT, also for a layer without any token, NOT_FINITE,
 * OUT_OF_MEMORY, BUSY, or the error of an earlier stream step; UNSUPPORTED: tensors in device memory, several ranks. On
 * an error out and lse are unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_attend_queries(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                               const keyhole_tensor* out, float* lse);

/* Says by which pattern a session's extends of many new tokens attend: calls, also in a batch, of at least `tokens` new
 * tokens without a mask. Such a call looks at K and V themselves, in no index: of all tokens that there are, offloaded
 * ones as they lie (int8, too), and of the new ones. Each tile of 128 new tokens chooses blocks of 64 tokens among all
 * before it as keyhole_prompt_attend of keyhole/prefill.h does, with the same q, k and v up to the rounding of stored K
 * and V; "dense" is exact.
 *   pattern  text as of keyhole_prompt_create(); NULL, as a session begins: none, and extends attend as steps do
 *   tokens   1..2^31; KEYHOLE_AUTO: 128, and of tensors in device memory no fewer than are attended at once in any
 *            case, see keyhole_session_extend(). Fewer new tokens attend as steps do
 * With tensors in device memory the device chooses and attends, on the session's stream, for which the call waits; it
 * takes device memory for K and V of some heads and for the choice, which counts against device_memory_limit and is
 * kept. Where there is no such memory, where rows of out are not aligned to 8 bytes, or behind 4,194,240 tokens, the
 * call is exact in place of the pattern. Host memory for the choice, up to some 300 MiB, counts against
 * host_memory_limit and is given back with the next step.
 * "codes:blocks=B" is about codes on the device, and there such calls look at no K and V but what weighs much: each
 * tile of 128 query rows of a KV head (32 tokens of 4 query heads) attends by code the B blocks of 256 offloaded tokens
 * whose mean keys weigh most for the mean query of one of its heads, the two newest among them, exactly those of their
 * tokens whose weight is more than 1/512 of what the mean keys of all blocks weigh (of what it attends itself that is
 * more: an eighth for a head that looks at everything and attends a 64th), and as ever sink, window and the new tokens
 * themselves. No head is in doubt then. It takes some 150 MiB of device memory. The pattern is followed with head
 * dimensions of 64, 128 or 256, at most 16 query heads for a KV head, all with this pattern, more than `from` and 256 B
 * offloaded tokens and at most 4,194,304, more than which have no codes. Else all of them are attended, which
 * keyhole_session_get_extend_blocks() does not count: exactly; or by code, where they have codes and that is estimated
 * to be faster. Exactly in any case are layers that have no codes on the device, or codes whose exact tokens the host
 * reads, or are 0; chunks of a prompt (keyhole_session_set_prompt_chunk); and calls for which codes do not do: still
 * too many tokens weigh that much, or the codes of some may be off by anything
 * (docs/what-codes-hold.md). Sliding layers, KEYHOLE_MODE_RESIDENT, captures, and with tensors in device memory K and V
 * in f32 and head dimensions other than 64, 80, 96, 128, 256 know no patterns: such calls attend as without one. Audits
 * do not look at such calls.
 * Copies of the session have the pattern, files do not.
 * Errors: INVALID_ARGUMENT (pattern, tokens), UNSUPPORTED (a value_dim that is not head_dim, several ranks), IO,
 * CORRUPT, VERSION_MISMATCH (a file of budgets), BUSY; then nothing has changed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_set_extend_pattern(keyhole_session* session, const char* pattern, uint32_t tokens);

/* Says that a session's extends of at least `tokens` new tokens, without a mask, are chunks of a prompt: a sample of
 * their queries guides the index as that of keyhole_session_append does, and they bring nothing into an index. Their
 * tokens stay pending until keyhole_session_build, or until steps and shorter extends, which end the prompt, index them
 * in rounds.
 *   tokens   1..2^31; KEYHOLE_AUTO, as a session begins: no extend is a prompt's
 * Of tensors in device memory all that holds of calls that attend all tokens at once (keyhole_session_extend). Copies
 * of the session have it, files do not. Errors: INVALID_ARGUMENT, UNSUPPORTED (several ranks), BUSY; then nothing has
 * changed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_set_prompt_chunk(keyhole_session* session, uint32_t tokens);

/* Blocks of 64 tokens, summed over tiles of 128 new tokens and query heads, of all such calls of the session that were
 * not dense: those attended, and those that the new tokens see. Of "codes:blocks=B" four for a block of 256 tokens, and
 * everything else that the call attends. Errors: BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_extend_blocks(
    const keyhole_session* session, uint64_t* attended, uint64_t* seen);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_BATCH_H_ */
