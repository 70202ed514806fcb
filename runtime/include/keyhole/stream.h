/* Keyhole: steps in the order of a CUDA stream, which can be captured in graphs; and a step in two halves, on any
 * device. The opening comment of keyhole/keyhole.h (words, errors, threads) holds here. docs/embedding.md, Steps on a
 * stream and CUDA graphs, shows the calls in order.
 *
 * With a CUDA device keyhole_session_attend, its two halves, keyhole_session_extend and keyhole_session_extend_batch
 * take q, k, v, out and lse in device memory: the step is enqueued on the session's stream, the call returns at once,
 * and it can be captured. These tensors are read and written when the stream comes to the step: q, k and v must stay as
 * they are, out and lse where they are, until it has done the step (both halves of it; of a graph, in each launch).
 * Errors of such a step, NOT_FINITE, TIMEOUT, DEVICE_ERROR and OUT_OF_MEMORY, are returned by the next call that uses
 * the session, at the latest by keyhole_session_synchronize; the session takes no more steps then.
 */
#ifndef KEYHOLE_STREAM_H_
#define KEYHOLE_STREAM_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cudaStream_t on which the session's steps are enqueued from now on; NULL: the default stream. Waits for steps on
 * the old one. UNSUPPORTED on a host device. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_stream(keyhole_session* session,
                                                                       void* stream);

/* Announces one launch of the graph that was captured last on the session's stream; it is called just before the
 * launch. Errors: INVALID_ARGUMENT: nothing was captured, a call failed during the capture, the session has changed
 * since, or the graph's tokens would pass max_tokens; OUT_OF_MEMORY: they would pass host_memory_limit; BUSY: during a
 * capture or inside a step; UNSUPPORTED on a host device; or the error of an earlier step. Nothing is announced
 * then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_announce(keyhole_session* session);

/* The number of the graph that was captured last: of the newest capture in which a step of the session was enqueued,
 * which may be under way; 0: there was none. UNSUPPORTED on a host device, and of a sequence over several ranks
 * (keyhole/parallel.h). */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_graph(const keyhole_session* session, uint64_t* graph);

/* keyhole_session_announce of a graph that others were captured after, by its number: for callers that have several, of
 * different numbers of tokens, and launch now one, now another. The session knows the newest 16. Errors as there;
 * INVALID_ARGUMENT also for a number that it does not know, or not any more. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_announce_graph(keyhole_session* session,
                                                                           uint64_t graph);

/* keyhole_session_announce_graph of the different sessions `[count]`, before one launch of a graph in which steps of
 * all of them were captured (keyhole_session_extend_batch): `graph` is the number that keyhole_session_get_graph gives
 * of each of them then, the same of all. Announces the launch to all sessions, or, on an error of any, to none, and
 * returns the first error in the order of the sessions. Errors: those of keyhole_session_announce_graph, and
 * INVALID_ARGUMENT: `sessions` or one of them is NULL, or `graph` is 0; BUSY: a session is there twice, or another call
 * uses it; UNSUPPORTED of sequences over several ranks (keyhole/parallel.h). A count of 0 does nothing. The call uses
 * all sessions until it returns: no other call may use one of them meanwhile. After an error the tokens of all sessions
 * are what they were, and other graphs stay as valid; what is done before every launch may have been done for some, so
 * that tokens have left their windows and are indexed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_announce_batch(keyhole_session* const* sessions, uint32_t count, uint64_t graph);

/* Waits until all steps that were enqueued or announced are done, and returns the first error among them. What is to be
 * pinned and encoded of prompts is then pinned, and its encoding enqueued; with KEYHOLE_PLACE_DEVICE also OUT_OF_MEMORY
 * where the system does not let it be pinned. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_synchronize(keyhole_session* session);

/* keyhole_session_attend in two halves: begin appends, publishes q and starts the work; the caller may do other work;
 * end waits and writes the result. Between the two only calls named get_ are allowed, but for get_audit; every other
 * call returns BUSY. q is copied by begin; in device memory it must stay as it is until the stream has done the work of
 * both halves. If begin fails there is no end to call. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_begin(keyhole_session* session,
                                                                         uint32_t layer,
                                                                         const keyhole_tensor* q,
                                                                         const keyhole_tensor* k,
                                                                         const keyhole_tensor* v);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_end(keyhole_session* session,
                                                                       const keyhole_tensor* out,
                                                                       float* lse);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_STREAM_H_ */
