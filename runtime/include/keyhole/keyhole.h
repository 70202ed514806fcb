/* Keyhole: decoding with a long context while most of the KV cache lies in host memory.
 *
 * The first tokens (the sink) and the newest ones (the window) stay on the device. Every other key and value lies in
 * host memory behind a vector index or codes, and each decoding step reads only the keys that carry attention weight.
 * The partial attention of both is merged by log-sum-exp (attention states; FlashInfer, RetrievalAttention).
 *
 * A decoder calls, with every status checked as that of attend is here:
 *
 *     keyhole_engine_config model;                              // once per model
 *     keyhole_engine_config_init(&model);
 *     model.layers = 32, model.q_heads = 32, model.kv_heads = 8, model.head_dim = 128;
 *     keyhole_engine_create(&model, &engine);
 *
 *     keyhole_session_config sequence;                          // once per sequence
 *     keyhole_session_config_init(&sequence);
 *     keyhole_session_create(engine, &sequence, &session);
 *
 *     keyhole_session_append(session, layer, &k, &v, &q);       // each layer and chunk of the prompt
 *     keyhole_session_build(session, NULL, NULL);               // once after the prompt
 *     if (keyhole_session_attend(session, layer, &q, &k, &v, &out, NULL) != KEYHOLE_OK)  // each layer of each step
 *       return keyhole_last_error();
 *
 *     keyhole_session_destroy(session);
 *     keyhole_engine_destroy(engine);
 *
 * keyhole_session_extend is attend for several tokens at once: later turns, drafts. Every field of the two configs
 * stands in keyhole/config.h, which this header includes. The rest stands in headers of its own, which a program
 * includes where it uses them, and which can be read after this one in any order:
 *
 *     keyhole/stream.h     steps in the order of a CUDA stream, and in graphs; a step in two halves
 *     keyhole/batch.h      several sessions in one call; drafts accepted in part; chunks that attend as prompts do
 *     keyhole/attention.h  attention states, for engines with attention of their own
 *     keyhole/save.h       copies of a session, in memory and in files
 *     keyhole/inspect.h    counts of tokens, statistics, audits; what memory a session will take
 *     keyhole/layers.h     models whose layers differ: sliding windows, shapes, RoPE
 *     keyhole/prefill.h    attention of prompts
 *     keyhole/index.h      one index by itself, to compare index types
 *     keyhole/parallel.h   several ranks; keyhole/mpi.h and keyhole/nccl.h are transports
 *
 * The installed docs/ folder has the longer explanations that comments refer to.
 */
#ifndef KEYHOLE_KEYHOLE_H_
#define KEYHOLE_KEYHOLE_H_

#include <stddef.h>
#include <stdint.h>

#include "keyhole/config.h"

#define KEYHOLE_VERSION_MAJOR 0
#define KEYHOLE_VERSION_MINOR 1
#define KEYHOLE_VERSION_PATCH 0
#define KEYHOLE_ABI_VERSION 3

#ifdef __cplusplus
extern "C" {
#endif

/* What holds for all of these headers.
 *
 * WORDS   sink: the first S tokens. window: the newest tokens, W of them or up to a flush block more. resident: sink
 *         or window. offloaded: all others. indexed / pending: offloaded tokens that are in the index / not yet in it
 *         (attended exactly). group: the q_heads / kv_heads query heads that share a KV head. search: one choice of
 *         the heaviest offloaded tokens; an index is searched by each query head, codes by each KV head. Every token
 *         is attended exactly once: resident, indexed or pending.
 *
 * SHAPES  Hq = q_heads, Hkv = kv_heads, d = head_dim, n = tokens. Query head h belongs to KV head h / (Hq / Hkv). K and
 *         q are passed after RoPE; RoPE's parameters are given so that an index can undo it. Values and
 *         outputs may have fewer components than d: see value_dim. Tensors `[n, H, d]` of one token may come as
 *         `[H, d]`, and those `[H, d]` as `[1, H, d]`.
 *
 * ERRORS  A function that can fail returns KEYHOLE_OK or a negative status. The text of the thread's last failure (what
 *         was wrong, the value seen, the values allowed) is read with keyhole_last_error(). A failed call changes
 *         nothing unless its comment says what it changes: the object stays usable. After DEVICE_ERROR or TIMEOUT
 *         nothing is known of the tokens on the device: the session can be read, saved, forked and destroyed, and
 *         every other call returns that error (docs/embedding.md, Steps on a stream). The library never prints,
 *         aborts, exits or throws.
 *
 * THREADS An engine is immutable and may be used from any number of threads. A session is used by one thread at a time;
 *         different sessions may run at once. A call into a session that another thread is using returns BUSY and
 *         changes nothing (it is detected at every entry). keyhole_plan, merges of states and the functions that
 *         return a text may be called from any thread. In a child of fork(2) the threads of its parent's objects are
 *         not there: calls with such an object return UNSUPPORTED, and its destroy function leaves it as it lies
 *         (docs/embedding.md, Threads).
 *
 * STRUCTS Config and result structs begin with struct_size, are filled by their *_init function, and only ever grow at
 *         the end (keyhole_budget, which lies inside others, into its reserved bytes). The library reads and writes as
 *         many bytes as the caller's struct has, so a program compiled with an older header runs with a newer library.
 *         Programs that do not compile these headers pass their struct's size to *_init_sized. A field that is
 *         KEYHOLE_AUTO (0 for most) is chosen by the library; get_config reads back the values in effect.
 *
 * NAMES   What follows keyhole_ is what a function makes or takes: engine, session, index, prompt, communicator. A
 *         function that reads back what one of them knows has get_ behind it.
 *
 * LOGS    Logarithms are natural, but where a function takes their base. An empty set of tokens has lse = -inf and
 *         o = 0. */

/* ---- Status, errors, versions ---------------------------------------------------------------- */

typedef int32_t keyhole_status;
enum {
  KEYHOLE_OK = 0,
  /* A value, shape or spec is outside what is allowed. */
  KEYHOLE_INVALID_ARGUMENT = -1,
  /* Valid, but this build or machine cannot do it. */
  KEYHOLE_UNSUPPORTED = -2,
  /* Host memory is exhausted, or the limit that the caller set on it is reached. */
  KEYHOLE_OUT_OF_MEMORY = -3,
  /* Device memory is exhausted, or the limit that the caller set on it is reached. */
  KEYHOLE_OUT_OF_DEVICE_MEMORY = -4,
  /* The device failed. */
  KEYHOLE_DEVICE_ERROR = -5,
  /* The device or the host did not answer in time. */
  KEYHOLE_TIMEOUT = -6,
  /* A file cannot be opened, read or written. */
  KEYHOLE_IO = -7,
  /* A file contradicts itself or is cut short. */
  KEYHOLE_CORRUPT = -8,
  /* A file or struct of another version. */
  KEYHOLE_VERSION_MISMATCH = -9,
  /* The progress callback asked to stop. */
  KEYHOLE_CANCELLED = -10,
  /* In use by another thread, or a begin without its end. */
  KEYHOLE_BUSY = -11,
  /* NaN or Inf in K, V or q, or a value that overflows kv_dtype. */
  KEYHOLE_NOT_FINITE = -12,
  /* An assumption inside the library does not hold: please report it. */
  KEYHOLE_INTERNAL = -13,
  /* A rank of a communicator (keyhole/parallel.h) failed, or made another call than the others. */
  KEYHOLE_RANK_FAILED = -14
};

/* The text of the last failed call of this thread; "" if none failed. It is valid until the thread's next failing call,
 * and never NULL. */
KEYHOLE_API const char* keyhole_last_error(void);
/* Static text for a status, e.g. "invalid argument"; "unknown status" for others. Never NULL. */
KEYHOLE_API const char* keyhole_status_string(keyhole_status status);
/* "0.1.0": the version of the library that runs, which may be newer than this header. */
KEYHOLE_API const char* keyhole_version(void);
/* KEYHOLE_ABI_VERSION of the library that runs. A program must not go on where it differs from the header's. */
KEYHOLE_API uint32_t keyhole_abi_version(void);

/* ---- Tensors --------------------------------------------------------------------------------- */

typedef int32_t keyhole_memory;
enum { KEYHOLE_HOST = 0, KEYHOLE_PINNED = 1, KEYHOLE_DEVICE = 2 };

/* A borrowed array: the library reads (or writes) it during the call only, and never keeps the pointer; arrays in
 * device memory until the stream has done the work (keyhole/stream.h). rank is 1..4, shape[i] >= 0 for i < rank.
 * strides are in elements; the last must be 1, and a stride of an axis of length 1 is ignored. Rows in device memory
 * lie in one of two ways: the heads of a token side by side and tokens that do not overlap, or all rows equally far
 * apart. */
typedef struct keyhole_tensor {
  void* data;
  keyhole_dtype dtype;
  keyhole_memory memory;
  int32_t rank;
  int64_t shape[4];
  int64_t strides[4];
} keyhole_tensor;

/* A dense row-major host tensor, for convenience; shape[i] for i < rank. */
KEYHOLE_API keyhole_tensor keyhole_tensor_host(const void* data, keyhole_dtype dtype, int32_t rank,
                                               const int64_t* shape);

/* ---- Engine: a model on this machine. Session: one of its sequences -------------------------- */

typedef struct keyhole_engine keyhole_engine;
typedef struct keyhole_session keyhole_session;

/* Makes an engine; *out is NULL on failure. The config is copied. INVALID_ARGUMENT names the field; it is also returned
 * for classifiers of another model. IO, CORRUPT, VERSION_MISMATCH: the classifier file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_create(const keyhole_engine_config* config, keyhole_engine** out);
/* Accepts NULL. Sessions keep what they need of their engine: the order of destruction is free. */
KEYHOLE_API void keyhole_engine_destroy(keyhole_engine* engine);
/* Reads the values in effect into *config, whose struct_size the caller has set (by *_init). The cpu_level string lives
 * as long as the library, what other pointers point to as long as the engine. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_get_config(const keyhole_engine* engine, keyhole_engine_config* config);

/* Makes an empty session, one sequence; config NULL: the defaults. *out is NULL on failure. INVALID_ARGUMENT names the
 * field (and what the index spec allows). Of the budgets file: IO where it cannot be read, CORRUPT where it is no such
 * file, VERSION_MISMATCH for another format, INVALID_ARGUMENT for another model's and for values that no budget may
 * have; the text begins with the path. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_create(
    keyhole_engine* engine, const keyhole_session_config* config, keyhole_session** out);
/* Accepts NULL. Must not be called while another thread is inside the session. Steps that a stream has not come to are
 * given up, and their outputs mean nothing: keyhole_session_synchronize() before, where somebody wants them. */
KEYHOLE_API void keyhole_session_destroy(keyhole_session* session);
/* Reads the values in effect. `index`, `budgets` and `dense_layers` point into the session and are valid until the next
 * call that changes them, or keyhole_session_remove. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_config(const keyhole_session* session, keyhole_session_config* config);

/* ---- A sequence: append, build, attend, extend, truncate -------------------------------------- */

/* Appends n tokens of the prompt to one layer: stores their K and V, and attends to nothing.
 *   k, v  `[n, Hkv, d]`, any dtype (converted to kv_dtype), host, pinned or, with a CUDA device, device memory (then
 *         the caller's work on the session's stream must have been enqueued before, and the call waits for it)
 *   q     `[n, Hq, d]` or NULL: queries of the same tokens, a sample of which guides the index (in device memory no
 *         others are read)
 * Layers are independent: all of layer 0 may come before layer 1. May follow decoding steps. The tokens can be attended
 * at once (they are pending until they are indexed). On an error nothing is appended. Errors: INVALID_ARGUMENT (layer,
 * shape, dtype; more than max_tokens), NOT_FINITE (names tensor, token, head; also for a finite value that overflows
 * kv_dtype), OUT_OF_MEMORY, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_append(keyhole_session* session,
                                                                   uint32_t layer,
                                                                   const keyhole_tensor* k,
                                                                   const keyhole_tensor* v,
                                                                   const keyhole_tensor* q);

/* Called now and then from a long call with the share done (0..1) and what is being done. A return of non-zero cancels:
 * the call returns KEYHOLE_CANCELLED. Called from the calling thread or a worker, one call at a time; must not call
 * back into the library. */
typedef int32_t (*keyhole_progress_fn)(void* user, double fraction, const char* what);

/* Brings every pending token of every layer into the index: builds where there is none yet, appends where there is one.
 * Fewer tokens than the index's `from`, where its spec has one, stay pending. Does nothing for dense layers. May be
 * called at any time; a session for which it is not called indexes by itself while it decodes, in rounds of at most
 * 8 * append_block tokens (docs/embedding.md, Pending tokens). A CUDA device helps with large builds, in up to 3 GB of
 * workspaces beside all plans and limits; what it has helped to build can differ from what the host builds alone as far
 * as scores are equal up to rounding, and is the same each time. progress may be NULL. On CANCELLED or another error,
 * heads that were finished keep their index, the tokens of the others stay pending: nothing is lost, and the call can
 * be repeated. Errors: CANCELLED, OUT_OF_MEMORY (the memory or host_memory_limit), BUSY, or the error of an earlier
 * stream step. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_build(keyhole_session* session,
                                                                  keyhole_progress_fn progress,
                                                                  void* user);

/* One decoding step of one layer: appends the token's K and V, then attends to all tokens including it.
 *   q    `[Hq, d]`, any dtype
 *   k, v `[Hkv, d]`; both NULL: attend without appending
 *   out  `[Hq, d]`, any dtype
 *   lse  NULL, or Hq floats: log-sum-exp of the logits of all tokens attended
 * With a CUDA device all of them may lie in device memory: keyhole/stream.h. In steady state allocates nothing (a step
 * that begins or takes in a block of pending tokens may). Errors: as keyhole_session_append; INVALID_ARGUMENT for a
 * layer without any token. On an error nothing is appended and out is unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const keyhole_tensor* k,
    const keyhole_tensor* v, const keyhole_tensor* out, float* lse);

/* Attends with n >= 1 new tokens of one layer, then appends them: a turn of a chat, a chunk of a prompt after the
 * build, drafts. Each attends to all tokens before the call, as mode and budget say (audits and targets see them
 * together with the new ones), and exactly to the new ones: all up to itself, as they are stored in kv_dtype. attend is
 * n = 1, up to rounding. How many share one reading, on the host and on a device: docs/embedding.md, Several tokens.
 *   q     `[n, Hq, d]`, any dtype
 *   k, v  `[n, Hkv, d]`
 *   mask  NULL: causal. Else, for trees of drafts, n words, n <= 64: bit j of word i says that new token i attends to
 *         new token j. Bit i must be set, bits above i must not.
 *   out   `[n, Hq, d]`, any dtype, rows that do not overlap; may be q
 *   lse   NULL, or `[n, Hq]` floats: log-sum-exp of the logits of all tokens attended
 * Tokens are appended as by keyhole_session_append, so that n is not bound to the window; no queries are sampled (but
 * see keyhole_session_set_prompt_chunk of keyhole/batch.h). A sliding layer attends one token after the other, each to
 * the newest `window` tokens that it sees. May allocate.
 * With a CUDA device q, k, v, out and lse may all lie in device memory: the work is enqueued on the session's stream.
 * Where that is faster, and not in a capture, all tokens are attended at once, and the call waits for the stream: up to
 * 1024 by the layer's codes, where the device has kernels for that, else exactly, whatever the budget. A mask of more
 * tokens than `window`, or in a layer without codes on the device, needs that: else UNSUPPORTED. A sliding layer takes
 * masks in device memory with a window_slack of n - 1 or more, or where max_tokens is no more than it keeps.
 * Errors: as keyhole_session_attend; INVALID_ARGUMENT also for n = 0, the mask and the window_slack. On an error
 * nothing is appended (of a capture: the graph is lost) and out and lse are unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_extend(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const keyhole_tensor* k,
    const keyhole_tensor* v, const uint64_t* mask, const keyhole_tensor* out, float* lse);

/* Drops all tokens >= n_tokens, in every layer. Offloaded tokens stay offloaded: the window may be shorter than W until
 * it has filled again. A layer of at most n_tokens tokens is left alone. Errors: BUSY, or the error of an earlier
 * stream step; INVALID_ARGUMENT where a sliding layer no longer holds all of its window before n_tokens (window_slack),
 * unless n_tokens is 0: nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_truncate(keyhole_session* session,
                                                                     uint32_t n_tokens);

/* Takes tokens first..first + count - 1 out of every layer, as far as there are any (UINT32_MAX: all from `first` on);
 * those behind them follow the tokens before, in their order.
 *   shift  positions by which the keys behind are turned, by the RoPE that the engine's config describes: 0: they stay
 *          as they were given; -count: they take the places of those that went, as a context shift wants. With count 0
 *          all from `first` on are turned. Keys are turned as they are stored, and rounded to kv_dtype again: many
 *          small shifts add up. Layers with rope_theta 0 have nothing to turn
 * What lies before `first` stays as and where it is, indexed and shared with copies. All behind is stored anew, as
 * keyhole_session_append stores it (rows in int8 are rounded once more), and pending until steps or
 * keyhole_session_build index it; sampled queries that guide indexes move along. An index that undoes RoPE (rope=undo,
 * saap) takes tokens to be at the positions that they have by count. keyhole_session_accept knows of no extend after
 * it, the session's identity forgets its tokens where it named any from `first` on, and what keyhole_session_get_config
 * has pointed to is not valid any more. While it works, memory of the tokens behind is taken a second time, which
 * host_memory_limit does not count.
 * On an error nothing has changed. Errors: INVALID_ARGUMENT: shift without rope_theta or with values_in_keys; a sliding
 * layer that no longer has the tokens that its window would hold (window_slack keeps more); NOT_FINITE: a turned key
 * beyond kv_dtype; UNSUPPORTED: sessions with a CUDA device, several ranks; OUT_OF_MEMORY, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_remove(keyhole_session* session,
                                                                   uint32_t first, uint32_t count,
                                                                   int32_t shift);

/* ---- Changing a session ------------------------------------------------------------------------ */

/* All layers, KV heads or query heads, where a function takes the number of one. */
#define KEYHOLE_ALL UINT32_MAX

/* Changes the index type of every head, also of those that a budgets file made dense: drops the built indexes. All
 * offloaded tokens are pending (attended exactly) until keyhole_session_build or the session's own appends have indexed
 * them. Budgets that the index type chose, and tails of codes that the new one has not, become its own. "auto" stands
 * for what it stands for in the config of a session with these budgets: where that is codes, they become the tail of
 * every budget without a tail; one that codes cannot be the tail of (keyhole_budget) is refused. "exact" sets the mode
 * KEYHOLE_MODE_EXACT, too, which stays until keyhole_session_set_mode. Errors: INVALID_ARGUMENT (the spec, a budget),
 * OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY (codes that must lie on the device), BUSY; nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_index(keyhole_session* session,
                                                                      const char* index);
/* Changes mode and, for every head, also those that a budgets file names, top_k (1..max_tokens; 0: keep), for the
 * following steps. May allocate. INVALID_ARGUMENT where that makes a budget which keyhole_session_set_budget refuses;
 * nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_mode(keyhole_session* session,
                                                                     keyhole_mode mode,
                                                                     uint32_t top_k);
/* Changes, for every head, also those that a budgets file names, what is attended of an index search, and min_weight
 * (> 0 and < 1; 0: keep), for the following steps. top_k keeps its meaning for the search itself: index types whose
 * effort grows with it score more keys. May allocate. Refuses budgets as keyhole_session_set_mode does. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_attend(keyhole_session* session,
                                                                       keyhole_attend_mode attend,
                                                                       float min_weight);
/* The budget of one head, or of all heads of a layer or KV head or of all (KEYHOLE_ALL), from the next step on. Sets
 * nothing on an error. May allocate. A head without partitions that gets a tail or a target needs a
 * keyhole_session_build for them (which does nothing else where all is indexed); until then it has neither. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_budget(
    keyhole_session* session, uint32_t layer, uint32_t kv_head, const keyhole_budget* budget);
/* The budget of one head, or of all that KEYHOLE_ALL names: INVALID_ARGUMENT where these differ. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_budget(
    const keyhole_session* session, uint32_t layer, uint32_t kv_head, keyhole_budget* budget);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_KEYHOLE_H_ */
