/* Several ranks: processes (or threads) that work on one sequence together, on one machine or many. See
 * docs/parallel.md.
 *
 * Keyhole brings no transport of its own. A transport is a table with one function, all_gather, which MPI, NCCL,
 * sockets or threads of one process can fill; keyhole/mpi.h fills it with MPI, keyhole/nccl.h with NCCL. One function
 * suffices: attention states are merged, and sums are taken, by every rank from what it gathered, in the order of the
 * ranks, so that all ranks have the same bits on any transport. A reduction inside the transport promises that nowhere.
 * The library knows no transport by name and links none: the adapters of MPI and of NCCL are libraries of their own, so
 * that a program without them carries nothing of them.
 *
 * CONTEXT PARALLEL  An engine whose config has a communicator makes sessions whose tokens are spread over the ranks, by
 *                   blocks of `context_block` tokens in turn. All ranks make the same calls in the same order with the
 *                   same arguments; each attends its own tokens, and the states are merged over the ranks. See RANKS
 *                   below.
 * TENSOR PARALLEL   Each rank has an ordinary engine with the KV heads of its share, without a communicator in the
 *                   config, and the decoder adds up the ranks' output projections with keyhole_communicator_sum().
 *
 * RANKS  Of sessions of an engine with a communicator:
 *   - A token t is of rank (t / context_block) % size. The rank's own session has sink and window among its own tokens:
 *     so the first `sink` and the newest `window` tokens of the whole context are attended exactly, and up to size
 *     times as many others. Sliding layers are the same on every rank.
 *   - keyhole_session_create, _append, _build, _attend, _attend_end, _extend, _set_index, _fork, _save and _load are
 *     collective: each waits for all ranks. An error of one rank is returned by all, with the same text, which begins
 *     with the rank; what these calls change is then as the comments of each say, on all ranks (set_index: indexes of
 *     the ranks may differ; call it again). Budgets count on each rank: with top_k N each rank reads the best N of its
 *     own tokens, which the best N of all are among; a target is met by each rank for its own tokens.
 *   - max_tokens, keyhole_session_truncate and statistics.tokens are about the whole context. All other figures of
 *     statistics, audits and plans are this rank's; of keyhole_session_get_layer_tokens `total` is of the whole
 *     context, the others add up to this rank's share. Memory limits are each rank's.
 *   - keyhole_session_save writes a file for each rank beside `path` and a small one to `path` that names them; the old
 *     ones stay until the new are whole. keyhole_session_load takes `path` with the same number of ranks or another,
 *     with an engine without a communicator, too, and on ranks a file of an ordinary session. With another number each
 *     rank must be able to read all files, takes its tokens from them, memory of its share twice meanwhile, and leaves
 *     them pending: keyhole_session_build indexes them (without training queries, which are not carried over).
 *   - TENSORS IN DEVICE MEMORY (engines with a CUDA device). keyhole_session_attend, _attend_begin and _attend_end
 *     enqueue on the session's stream this rank's step, an all_gather_on_stream of the states (`[Hq, d + 1]` fp32 of
 *     each rank) and their merge; the first such call of a session waits for all ranks, the others for this rank's own
 *     step of the layer before, which stands behind the gathers before it. out has no gaps between heads. Where a
 *     rank's part fails, its call returns the error (of what is found while the stream runs, such as keys that are not
 *     finite, a later call), the answers of all ranks are NaN from then on, but of sliding layers, and the next
 *     collective call that waits returns the error on all ranks; keyhole_session_synchronize is one. After it there are
 *     no more steps, as after any error of a stream step. A stream that has not come by a gather within timeout_ms when
 *     a call waits for it (also keyhole_session_destroy, keyhole_session_get_statistics) is TIMEOUT: the gather is
 *     given up, see keyhole_transport.abort. Where the transport has no all_gather_on_stream, steps go by way of host
 *     memory and wait for all ranks, which take back one that fails; after an error of the device, or keys that are not
 *     finite, there are no more. keyhole_session_extend always goes that way.
 *   - GRAPHS. Such steps can be captured on transports with all_gather_on_stream, after a first one that was not. A
 *     graph is good for tokens of the same rank: at the end of a block all ranks capture again, which
 *     keyhole_session_announce says by INVALID_ARGUMENT, as for all that makes a graph invalid; so it does of
 *     max_tokens. It is not collective, and leaves the session ready for a capture. What else makes a graph invalid is
 *     a rank's own (memory that moves, a layer that goes to the host): it captures again alone, or makes the steps as
 *     single calls, while the others' streams wait in the gather. NCCL wants captures to be alike on all ranks where it
 *     registers buffers for graphs, which it does not for messages as short as these; NCCL_GRAPH_REGISTER=0 makes sure.
 *     After any other error of keyhole_session_announce, if the last capture was whole, the graph is not to be
 *     launched: what it would have done is enqueued with NaN as this rank's states, and goes on as after a step that
 *     has failed. Where a capture itself fails, the token's steps are made as single calls, which keep step with the
 *     others.
 *   - UNSUPPORTED: masks of keyhole_session_extend, paths of keyhole_session_accept, patterns of extends,
 *     keyhole_session_extend_batch, keyhole_session_attend_offloaded, _attend_tokens, _search_tokens, and index types
 *     that undo RoPE (saap, ivf with rope=undo), as a rank's tokens are not at their places in the text.
 *   - After RANK_FAILED or TIMEOUT the communicator is lost, and every collective call returns that error at once.
 *     Sessions can be destroyed.
 *
 * ERRORS and STRUCTS as in keyhole/keyhole.h. THREADS: a communicator is used by one thread at a time; BUSY otherwise.
 */
#ifndef KEYHOLE_PARALLEL_H_
#define KEYHOLE_PARALLEL_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of the text that a transport may write about an error, with the 0 at its end. */
#define KEYHOLE_TRANSPORT_TEXT 256

typedef struct keyhole_transport {
  size_t struct_size;
  /* The first argument of the functions. */
  void* context;
  /* Of size ranks, 1..65536, this one: 0..size - 1. */
  uint32_t rank, size;
  /* Writes `bytes` bytes of every rank to `all` `[size, bytes]`, in the order of the ranks, own ones included. `own`
   * and `all` do not overlap, and are not looked at after the return, whatever it is. Every rank calls it in turn with
   * the same `bytes`. Returns KEYHOLE_OK; or, after at most timeout_ms milliseconds, KEYHOLE_TIMEOUT where ranks have
   * not come; or KEYHOLE_RANK_FAILED. Of an error it writes why to `text` [KEYHOLE_TRANSPORT_TEXT]. It is not called
   * again after an error. It must not throw. */
  keyhole_status (*all_gather)(void* context, const void* own, void* all, size_t bytes,
                               uint32_t timeout_ms, char* text);
  /* Called once when the communicator and all that uses it are gone; NULL: nothing is to be done. */
  void (*release)(void* context);
  /* NULL: the transport has none. As all_gather, with `own` `[bytes]` and `all` `[size, bytes]` in the memory of the
   * rank's CUDA device, in the order of `stream`, a cudaStream_t of that device: it only enqueues, and both are in use
   * until the stream has come by. Ranks enqueue in the same order. Returns KEYHOLE_OK, KEYHOLE_TIMEOUT or
   * KEYHOLE_RANK_FAILED with `text`. */
  keyhole_status (*all_gather_on_stream)(void* context, const void* own, void* all, size_t bytes,
                                         void* stream, char* text);
  /* Called where the library gives up what it enqueued by all_gather_on_stream, as it has not ended in time: after it
   * that must end, with any result. It does not wait for other ranks, and none of the functions but release is called
   * after it. NULL: nothing is to be done. */
  void (*abort)(void* context);
} keyhole_transport;

/* Fills in struct_size; everything else becomes 0. */
KEYHOLE_API void keyhole_transport_init_sized(keyhole_transport* transport, size_t size);
static inline void keyhole_transport_init(keyhole_transport* transport) {
  keyhole_transport_init_sized(transport, sizeof *transport);
}

typedef struct keyhole_communicator_config {
  size_t struct_size;
  /* Milliseconds that a rank waits in a step for the others: keyhole_session_attend and _extend,
   * keyhole_communicator_gather and _sum. AUTO: 30000. */
  uint32_t timeout_ms;
  /* The same where ranks may arrive much later than others: appends, builds, saves, loads,
   * keyhole_communicator_broadcast. AUTO: 3600000, an hour. */
  uint32_t long_timeout_ms;
} keyhole_communicator_config;
KEYHOLE_API void keyhole_communicator_config_init_sized(keyhole_communicator_config* config,
                                                        size_t size);
static inline void keyhole_communicator_config_init(keyhole_communicator_config* config) {
  keyhole_communicator_config_init_sized(config, sizeof *config);
}

/* Makes a communicator, which copies the table and owns its context from then on, also where the call fails. config
 * NULL: the defaults. *out is NULL on failure. INVALID_ARGUMENT names the field. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_communicator_create(const keyhole_transport* transport,
                            const keyhole_communicator_config* config, keyhole_communicator** out);
/* Accepts NULL. Engines and sessions keep what they need: the order of destruction is free. */
KEYHOLE_API void keyhole_communicator_destroy(keyhole_communicator* communicator);

/* 0 for NULL. */
KEYHOLE_API uint32_t keyhole_communicator_get_rank(const keyhole_communicator* communicator);
/* 1 for NULL. */
KEYHOLE_API uint32_t keyhole_communicator_get_size(const keyhole_communicator* communicator);

/* `bytes` bytes of every rank, to `all` `[size, bytes]` on every rank. Collective. Errors: TIMEOUT, RANK_FAILED (of the
 * transport; also where ranks make different calls), INVALID_ARGUMENT (more bytes than a process has addresses for),
 * OUT_OF_MEMORY, BUSY; after these three the call can be made again, by all ranks. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_communicator_gather(
    keyhole_communicator* communicator, const void* own, void* all, size_t bytes);
/* The same of device memory, in the order of `stream`, where the transport has all_gather_on_stream: it enqueues, and
 * the host waits for nobody. For states of each rank's own session that keyhole_merge_states_device then merges: see
 * docs/parallel.md.
 *   own     `[bytes]`, all `[size, bytes]`, in memory of the rank's CUDA device; they do not overlap, and stay until
 *           the stream has come by. bytes is at least 1
 *   stream  a cudaStream_t of that device; NULL: its default stream
 * All ranks call it in the same order with the same bytes, between the same other calls; that is not checked, as no
 * message of the library's goes with it. A rank that does not come is noticed by the next call that waits, such as
 * keyhole_communicator_gather: until then the stream stands still. Errors: UNSUPPORTED: the transport has no such
 * function; INVALID_ARGUMENT; TIMEOUT and RANK_FAILED of the transport, after which the communicator is lost; BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_communicator_gather_on_stream(
    keyhole_communicator* communicator, const void* own, void* all, size_t bytes, void* stream);
/* values[i] becomes its sum over all ranks, added in fp32 in the order of the ranks: the same bits everywhere.
 * Collective. Errors as of keyhole_communicator_gather; values are unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_communicator_sum(keyhole_communicator* communicator, float* values, size_t count);
/* `data` of rank `root` on every rank. For what is small or seldom: it is gathered. Waits up to long_timeout_ms. Errors
 * as of keyhole_communicator_gather; INVALID_ARGUMENT: root. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_communicator_broadcast(
    keyhole_communicator* communicator, void* data, size_t bytes, uint32_t root);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_PARALLEL_H_ */
