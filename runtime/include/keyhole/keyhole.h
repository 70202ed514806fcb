/* Keyhole: decoding with a long context while most of the KV cache lies in host memory.
 *
 * The first tokens (the attention sink) and the newest ones (the window) stay on the device; every
 * other key and value lives in host memory behind a vector index, and each decoding step reads only
 * the keys that carry attention weight. The partial attention of both is merged by log-sum-exp
 * (attention states; FlashInfer, RetrievalAttention).
 *
 * A decoder calls, per sequence:
 *
 *     keyhole_session_append(session, layer, k, v, q)      for each layer and chunk of the prompt
 *     keyhole_session_build(session, ...)                   once after the prefill
 *     keyhole_session_attend(session, layer, q, k, v, out)  for each layer of each decoding step
 *     keyhole_session_extend(session, layer, q, k, v, ...)  the same with several tokens: later turns, drafts
 *
 * WORDS   sink: the first S tokens. window: the newest tokens, W of them or up to a flush block
 *         more. resident: sink or window. offloaded: all others. indexed / pending: offloaded
 *         tokens that are in the index / not yet in it (attended exactly). group: the q_heads /
 *         kv_heads query heads that share a KV head. Every token is attended exactly once:
 *         resident, indexed or pending.
 *
 * SHAPES  Hq = q_heads, Hkv = kv_heads, d = head_dim, n = tokens. Hq % Hkv == 0, group 1..128
 *         and d a multiple of 16 from 64 to 576; on a CUDA device groups of 1..16 and d one of 64,
 *         80, 96, 128, 256. Query head h belongs to KV head h / (Hq / Hkv). K and q
 *         are passed after RoPE (rotate-half); RoPE's parameters are given so that an index can
 *         undo it. Values and outputs may have fewer components than d: see value_dim.
 *
 * ERRORS  Every function that can fail returns a keyhole_status: KEYHOLE_OK or a negative code. The
 *         text of the last failure (what was wrong, the value seen, the values allowed) is read
 *         with keyhole_last_error(), kept per thread. A failed call changes nothing unless its
 *         comment says what it changes: the object stays usable. After DEVICE_ERROR or TIMEOUT
 *         nothing is known of the tokens on the device: the session can be read, saved, forked and
 *         destroyed, and every other call returns that error (docs/embedding.md, Errors that come
 *         later). The library never prints, aborts, exits or throws.
 *
 * THREADS An engine is immutable and may be used from any number of threads. A session is used by
 *         one thread at a time; different sessions may run at once. A call into a session that
 *         another thread is using returns KEYHOLE_BUSY and changes nothing (detected at every
 *         entry). keyhole_plan, the functions that merge states and the text functions may be called from
 *         any thread. In a child of fork(2) the threads of its parent's objects are not there: calls with
 *         such an object return KEYHOLE_UNSUPPORTED, and its destroy function leaves it as it lies. The
 *         child may make an engine of its own (not with CUDA, which does not work in children).
 *
 * STRUCTS Config and result structs begin with struct_size, are filled by their *_init function,
 *         and only ever grow at the end (keyhole_budget, which lies inside others, into its
 *         reserved bytes). The library writes as many bytes as the caller's struct has, so a
 *         program compiled with an older header runs with a newer library. Programs that do not
 *         compile this header pass their struct's size to *_init_sized. A field that is
 *         KEYHOLE_AUTO (0 for most) is chosen by the library; the values in effect can be read
 *         back.
 *
 * LOGS    natural log everywhere. An empty set of tokens has lse = -inf and o = 0.
 *
 * keyhole/index.h declares one index by itself, for comparing index types. The installed docs/
 * folder has the longer explanations that comments here refer to.
 */
#ifndef KEYHOLE_KEYHOLE_H_
#define KEYHOLE_KEYHOLE_H_

#include <stddef.h>
#include <stdint.h>

#define KEYHOLE_VERSION_MAJOR 0
#define KEYHOLE_VERSION_MINOR 1
#define KEYHOLE_VERSION_PATCH 0
#define KEYHOLE_ABI_VERSION 3

#if defined(__GNUC__)
#define KEYHOLE_API __attribute__((visibility("default")))
#else
#define KEYHOLE_API
#endif

#if defined(__GNUC__)
#define KEYHOLE_MUST_USE __attribute__((warn_unused_result))
#else
#define KEYHOLE_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Versions, status, errors, log ----------------------------------------------------------- */

/* "0.1.0": the version of the library that runs, which may be newer than this header. */
KEYHOLE_API const char* keyhole_version(void);
/* KEYHOLE_ABI_VERSION of the library that runs. A program must not go on where it differs from the
 * header's. */
KEYHOLE_API uint32_t keyhole_abi_version(void);

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

/* Static text for a status, e.g. "invalid argument"; "unknown status" for others. Never NULL. */
KEYHOLE_API const char* keyhole_status_string(keyhole_status status);

/* Text of the last failed call of this thread; "" if none failed. Valid until the thread's next
 * failing call. Never NULL. */
KEYHOLE_API const char* keyhole_last_error(void);

enum { KEYHOLE_LOG_DEBUG = 0, KEYHOLE_LOG_INFO = 1, KEYHOLE_LOG_WARNING = 2 };
/* Receives messages instead of a terminal. May be called from any thread, those of the library
 * included, and from several at once; must not call back into the library. `text` is valid during
 * the call. */
typedef void (*keyhole_log_fn)(void* user, int32_t level, const char* text);

/* Called now and then from a long call with the share done (0..1) and what is being done. A return
 * of non-zero cancels: the call returns KEYHOLE_CANCELLED. Called from the calling thread or a
 * worker, one call at a time; must not call back into the library. */
typedef int32_t (*keyhole_progress_fn)(void* user, double fraction, const char* what);

/* ---- Tensors --------------------------------------------------------------------------------- */

typedef int32_t keyhole_dtype;
enum { KEYHOLE_F32 = 0, KEYHOLE_F16 = 1, KEYHOLE_BF16 = 2 };

typedef int32_t keyhole_memory;
enum { KEYHOLE_HOST = 0, KEYHOLE_PINNED = 1, KEYHOLE_DEVICE = 2 };

/* A borrowed array: the library reads (or writes) it during the call only, and never keeps the
 * pointer. `rank` is 1..4; shape[i] >= 0 for i < rank. `strides` are in elements; the last must be
 * 1; a stride of an axis of length 1 is ignored. In device memory longer: see STREAM STEPS. */
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

/* ---- Engine: model shape, device, threads, kernels ------------------------------------------- */

typedef struct keyhole_engine keyhole_engine;
typedef struct keyhole_session keyhole_session;
/* Several ranks that work together: keyhole/parallel.h. */
typedef struct keyhole_communicator keyhole_communicator;

enum { KEYHOLE_AUTO = 0 };

typedef int32_t keyhole_device;
enum {
  /* A CUDA device of compute capability 8.0 or higher where this build and machine have one and it takes
   * the model's shape, else the host. The log says which. */
  KEYHOLE_DEVICE_AUTO = 0,
  /* Resident tokens lie in host memory; the worker pool computes them. */
  KEYHOLE_DEVICE_HOST = 1,
  /* KEYHOLE_UNSUPPORTED where there is none, or none for the model's shape. */
  KEYHOLE_DEVICE_CUDA = 2
};

/* How the device's stream learns that the host's part of a step is done. */
typedef int32_t keyhole_signal;
enum {
  KEYHOLE_SIGNAL_AUTO = 0,
  /* A kernel waits for the host's flags: a few microseconds; can be captured in a graph. */
  KEYHOLE_SIGNAL_WAIT = 1,
  /* The caller's thread waits and then launches the merge: for systems that run one kernel at a
   * time (CUDA_LAUNCH_BLOCKING, sanitizers, WDDM). */
  KEYHOLE_SIGNAL_LAUNCH = 2
};

/* Where a part of a session works. */
typedef int32_t keyhole_placement;
enum {
  /* On the device where there is one and device_memory_limit suffices, else on the host; codes of as many layers as it
   * suffices for, and pinned_memory_limit (but see exact_rows_by). */
  KEYHOLE_PLACE_AUTO = 0,
  KEYHOLE_PLACE_HOST = 1,
  /* On the device, or the call fails: with INVALID_ARGUMENT where no layer is attended by codes. */
  KEYHOLE_PLACE_DEVICE = 2
};

typedef int32_t keyhole_rope_scaling;
enum {
  KEYHOLE_ROPE_NONE = 0,
  KEYHOLE_ROPE_LINEAR = 1,
  KEYHOLE_ROPE_LLAMA3 = 2,
  /* arXiv:2309.00071. The factor that it puts on cos and sin is part of q and K as they come here. */
  KEYHOLE_ROPE_YARN = 3
};

/* What one layer has of its own; see LAYERS below. Fields that keyhole_engine_config has as well mean
 * the same here. */
typedef struct keyhole_layer_config {
  size_t struct_size;
  /* 0: the layer attends to all tokens. W > 0, up to 2^29: to its newest W, the new one included. */
  uint32_t window;
  /* Of a window: tokens behind it that are kept so that keyhole_session_truncate can take as many back, 0..2^29.
   * AUTO: 16. */
  uint32_t window_slack;
  float scale;
  float softcap;
  float rope_theta;
  keyhole_rope_scaling rope_scaling;
  float rope_factor;
  float rope_low_freq_factor;
  float rope_high_freq_factor;
  uint32_t rope_original_context;
  uint32_t rope_dim;
  float rope_beta_fast;
  float rope_beta_slow;
  int32_t rope_whole_pairs;
  /* Hq, Hkv and d of the layer, with the limits of the engine's. 0: the engine's. See LAYERS. */
  uint32_t head_dim;
  uint32_t kv_heads;
  uint32_t q_heads;
} keyhole_layer_config;

typedef struct keyhole_engine_config {
  size_t struct_size;
  /* Required, 1..1024. */
  uint32_t layers;
  /* Required: Hq, 1..4096. */
  uint32_t q_heads;
  /* Required: Hkv, divides Hq, Hq / Hkv <= 128. A CUDA device takes up to 16. Of shapes that it does not take
   * DEVICE_AUTO is the host, which the log tells, and DEVICE_CUDA is UNSUPPORTED. */
  uint32_t kv_heads;
  /* Required: d, a multiple of 16 from 64 to 576. A CUDA device takes 64, 80, 96, 128 and 256. */
  uint32_t head_dim;
  /* How K and V are stored; default KEYHOLE_F16. Set it to the dtype of the model's K and V: a bf16
   * model stored as f16 has every value above 65504 refused (NOT_FINITE), and an f16 model stored
   * as bf16 loses three bits of every value. The first K or V of another 16-bit dtype is logged
   * once per session. */
  keyhole_dtype kv_dtype;
  /* Of the logits. AUTO: 1 / sqrt(d). */
  float scale;
  /* c > 0: logit = c * tanh(scale * q.k / c). 0: none. */
  float softcap;
  /* RoPE's base; 0: the model has no RoPE. */
  float rope_theta;
  keyhole_rope_scaling rope_scaling;
  /* Of linear and llama3 scaling: the factor, > 0. */
  float rope_factor;
  /* Of llama3 scaling, as in the model's config.json: the two frequency factors and
   * original_max_position_embeddings. */
  float rope_low_freq_factor;
  float rope_high_freq_factor;
  uint32_t rope_original_context;
  keyhole_device device;
  /* Worker threads including the caller, up to 4096. AUTO: one per core of the process, with a CUDA
   * device two fewer. */
  uint32_t threads;
  /* Non-zero: pin the workers to cores (the caller's thread is never moved). */
  int32_t pin_threads;
  /* Microseconds that an idle worker spins before it sleeps. AUTO: 50. */
  uint32_t spin_us;
  /* "scalar", "avx2", "avx512" or "avx512vnni"; NULL: environment variable KEYHOLE_CPU, else the
   * best of the machine. Read back: the level in use. */
  const char* cpu_level;
  /* NULL: silent. */
  keyhole_log_fn log;
  void* log_user;
  /* Path of a file that `keyhole train-saap` wrote for this model, read when the engine is made:
   * partitions and query classifiers for indexes of type saap. NULL: none. Copied. */
  const char* classifiers;
  /* Of a CUDA device alone: which of the machine's. */
  uint32_t device_ordinal;
  /* Of a CUDA device alone. AUTO: environment variable KEYHOLE_SIGNAL ("wait", "launch"), else
   * found by a trial when the session is made. */
  keyhole_signal signal;
  /* Of a CUDA device alone: milliseconds that device and host wait for each other before
   * KEYHOLE_TIMEOUT. AUTO: 10000, and with a communicator its timeout_ms more, as steps then wait for other ranks, too. */
  uint32_t timeout_ms;
  /* Learned sinks: `[layers, Hq]` (of layers of different shapes: each layer's `[Hq]` behind that of the layer before) or NULL:
   * none. Copied. A head's number is a logit s without key and value that
   * stands in the softmax of every step beside those of the tokens: with (o, lse) of the tokens, the step
   * returns o * e^(lse - lse') and lse' = ln(e^lse + e^s). Its weight counts as read in targets and audits.
   * -inf: the head has none; NaN and +inf are refused. Never in keyhole_merge_states. */
  const float* sink_logits;
  /* LAYERS: `[layer_count]` or NULL: all layers are alike. Copied. Each element is as long as its struct_size says, all
   * of them alike. */
  const keyhole_layer_config* layer_configs;
  /* 0 with NULL, else `layers`. */
  uint32_t layer_count;
  /* Partial RoPE: so many first components of a head are turned, an even number up to d. AUTO: d. */
  uint32_t rope_dim;
  /* Of yarn scaling, beside rope_factor and rope_original_context: pairs that turn more than beta_fast times within
   * the original context stay as they are, those that turn less than beta_slow times are slowed down by rope_factor.
   * AUTO: 32 and 1. */
  float rope_beta_fast;
  float rope_beta_slow;
  /* Of yarn scaling, "truncate" of config.json: 1: the borders between the two lie on whole pairs; -1: they do not.
   * AUTO: 1. */
  int32_t rope_whole_pairs;
  /* Components of values and outputs where they are fewer than those of queries and keys, a multiple of 16 up to d.
   * AUTO: d. See VALUES NARROWER THAN KEYS. */
  uint32_t value_dim;
  /* 1: a token's value is the first value_dim components of its key. v is NULL then in every call that takes k. */
  int32_t values_in_keys;
  /* Sessions are spread over these ranks, see keyhole/parallel.h; NULL: over none. */
  keyhole_communicator* communicator;
  /* Of a communicator: tokens of the text that stay together on a rank, 1..2^30. AUTO: 4096. */
  uint32_t context_block;
} keyhole_engine_config;

/* Fills in struct_size and the defaults; the required fields become 0. */
KEYHOLE_API void keyhole_engine_config_init_sized(keyhole_engine_config* config, size_t size);
static inline void keyhole_engine_config_init(keyhole_engine_config* config) {
  keyhole_engine_config_init_sized(config, sizeof *config);
}

/* VALUES NARROWER THAN KEYS. With value_dim = dv < d (multi-head latent attention: one KV head of d = 576, dv = 512) tensors q and k
 * are `[.., d]`, v, out and the o of states `[.., dv]` in every call; read d as dv there. scale is the model's: AUTO is that of d.
 * Such models run on the host: KEYHOLE_DEVICE_AUTO takes it, which the log tells, and KEYHOLE_DEVICE_CUDA is UNSUPPORTED. Values
 * are kept as rows of d components, of which the last are 0, in memory, in files and in codes: they take d / dv of the memory and
 * time that rows of dv would. That holds with values_in_keys, too, where keys are kept twice. */

/* LAYERS. A model whose layers differ gives an array of keyhole_layer_config, one for each layer. The fields that the engine
 * has too (scale, softcap, RoPE) then count in the array alone; of head_dim, kv_heads and q_heads the engine's stand for 0.
 *
 * Layers may have different shapes: wider heads, or fewer KV heads. Every call that takes a layer then has that layer's Hq,
 * Hkv and d where its comment says these, in tensors, ids, counts and lse. AUTO of scale and rope_dim is that of the layer's
 * d; values are as wide as the layer's keys, but for a value_dim below the engine's d, which holds for all layers: none may
 * have fewer components. kv_head means a KV head of the layer; with layer KEYHOLE_ALL it names those of the layers that have
 * it. Budgets files are of the largest q_heads, kv_heads and head_dim. A CUDA device takes such models where it takes the
 * shape of each layer (d of 64, 80, 96, 128 or 256, up to 16 query heads per KV head, values as wide as keys); else they run on
 * the host: KEYHOLE_DEVICE_AUTO takes it, which the log tells with the layer, and KEYHOLE_DEVICE_CUDA is UNSUPPORTED. A session has
 * parts on the device for each shape, all of which device_memory_limit and pinned_memory_limit are about. Classifiers are
 * UNSUPPORTED.
 *
 * A layer with a window W is a sliding layer. A step of it attends to its newest W tokens, no more and no fewer, exactly in every
 * mode: it has no sink and no index, offloads nothing, and keeps W + window_slack tokens (fewer, where max_tokens is less). sink,
 * window, flush_block and budgets of sessions do not concern it. It is saved, loaded and forked with its session, and load wants an
 * engine with the same windows. keyhole_session_truncate refuses what would leave it without tokens of its window.
 *
 * These tokens lie where the layer's last call had its tensors: in host memory, or on a CUDA device once
 * keyhole_session_append, keyhole_session_attend or keyhole_session_extend brought tensors in device memory. A call
 * with tensors in the other memory moves them first, which waits for copies of W + window_slack tokens. The first call
 * with tensors in device memory takes device memory for all sliding layers (OUT_OF_DEVICE_MEMORY: nothing has changed);
 * keyhole_plan counts it. Such a step has no host's part, and is not audited. The device finds q, k or v with a NaN or
 * an infinity: NOT_FINITE by a later call, at the latest keyhole_session_synchronize, and no more steps;
 * keyhole_session_save and keyhole_session_fork take the tokens before the first such k or v, where window_slack
 * reaches back to their window. What lies on a device that has failed is lost: then they return DEVICE_ERROR. */

/* Fills in struct_size and what `engine` says for all layers; NULL: zeros. window becomes 0. */
KEYHOLE_API void keyhole_layer_config_init_sized(keyhole_layer_config* layer, size_t size,
                                                 const keyhole_engine_config* engine);
static inline void keyhole_layer_config_init(keyhole_layer_config* layer,
                                             const keyhole_engine_config* engine) {
  keyhole_layer_config_init_sized(layer, sizeof *layer, engine);
}

/* Makes an engine; *out is NULL on failure. Copies the config. INVALID_ARGUMENT names the field; it
 * is also returned for classifiers of another model. IO, CORRUPT, VERSION_MISMATCH: the classifier
 * file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_create(const keyhole_engine_config* config, keyhole_engine** out);
/* Accepts NULL. Sessions keep what they need of their engine: the order of destruction is free. */
KEYHOLE_API void keyhole_engine_destroy(keyhole_engine* engine);
/* Reads the values in effect into *config, whose struct_size the caller has set (by *_init). The
 * cpu_level string lives as long as the library, what other pointers point to as long as the engine. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_get_config(const keyhole_engine* engine, keyhole_engine_config* config);

/* ---- Budget: what a step reads of one KV head's index ---------------------------------------- */

/* Which of the keys that an index search scored are attended. */
typedef int32_t keyhole_attend_mode;
enum {
  /* The top_k best of each head of the group, by all heads of the group. */
  KEYHOLE_ATTEND_TOPK = 0,
  /* Every key that the search scored. */
  KEYHOLE_ATTEND_SCORED = 1,
  /* Every scored key whose softmax weight among the scored keys is above min_weight for a head of
   * the group, and the heaviest key of a head where none is. Index types that score compressed keys
   * take the weights from those scores. */
  KEYHOLE_ATTEND_WEIGHT = 2,
  /* None: the index is not searched, the partitions of the tail alone decide what is read. Needs a
   * tail or a target. */
  KEYHOLE_ATTEND_NONE = 3
};

/* What stands in for the indexed keys that a step has not attended: the tail. Beside its index, a
 * head with a tail keeps partitions of its keys. Partitions that were not read contribute an
 * attention state made of their means, merged like any other. A partition that was read in part
 * counts with the rest of its keys. */
typedef int32_t keyhole_tail_mode;
enum {
  /* Nothing: keys that are not read have no weight. */
  KEYHOLE_TAIL_NONE = 0,
  /* One mean value for all of them (SparQ's correction). */
  KEYHOLE_TAIL_MEAN = 1,
  /* Per partition n * exp(scale * q . mean key) and the mean value (RetroInfer). A lower bound of
   * the mass by Jensen's inequality. */
  KEYHOLE_TAIL_CENTROID = 2,
  /* The same with the second-order term of the keys' variance, capped. */
  KEYHOLE_TAIL_SECOND = 3,
  /* Every key and value by its own code of a few bits, of an index of type codes; the top_k heaviest
   * rows of the KV head (not of each query head; at most 1024) are attended exactly in their place, none
   * with KEYHOLE_ATTEND_NONE. Takes no partitions and no target. */
  KEYHOLE_TAIL_CODES = 4
};

/* How much of a KV head's indexed keys a step reads, and what stands in for the rest. Part of
 * keyhole_session_config (every head) and of keyhole_search_options, and set per head with
 * keyhole_session_set_budget. In the config of a session and in keyhole_index_attend, a budget that is
 * as its init function left it becomes top_k 16 and tail KEYHOLE_TAIL_CODES for an index of type codes. */
typedef struct keyhole_budget {
  size_t struct_size;
  /* Keys that the search is asked for per query head, 1..2^31; default 100. */
  uint32_t top_k;
  /* Default KEYHOLE_ATTEND_TOPK. */
  keyhole_attend_mode attend;
  /* Of KEYHOLE_ATTEND_WEIGHT, > 0 and < 1. AUTO: 1e-4. */
  float min_weight;
  /* Default KEYHOLE_TAIL_NONE. */
  keyhole_tail_mode tail;
  /* Targets, each in (0, 1); 0: no such target. After the search the step reads more partitions of
   * the tail, those with the largest uncertainty first, until its estimate for every query head
   * (resident tokens included; in stream steps the offloaded tokens alone) is good enough: the
   * output error |o - o*| / |o*| at most error_target, the share of the attention mass that was
   * read at least mass_target. A head with a target keeps partitions, with or without a tail. */
  float error_target;
  float mass_target;
  /* A step with a tail or a target attends at least so many distinct indexed keys. AUTO: 0. */
  uint32_t min_keys;
  /* And at most so many, beyond those that the search found; at least min_keys. AUTO: all. */
  uint32_t max_keys;
  /* 0. Fields that later versions add take their place here, so that the structs around a budget
   * keep their layout. Other bytes than 0: VERSION_MISMATCH. */
  uint8_t reserved[24];
} keyhole_budget;
KEYHOLE_API void keyhole_budget_init_sized(keyhole_budget* budget, size_t size);
static inline void keyhole_budget_init(keyhole_budget* budget) {
  keyhole_budget_init_sized(budget, sizeof *budget);
}

/* ---- Session: one sequence ------------------------------------------------------------------- */

typedef int32_t keyhole_mode;
enum {
  /* Resident and pending tokens exactly, indexed tokens through the index. */
  KEYHOLE_MODE_INDEXED = 0,
  /* Everything exactly: the truth for tests, audits and dense layers. */
  KEYHOLE_MODE_EXACT = 1,
  /* Sink and window only (StreamingLLM); offloaded tokens are kept and not read. */
  KEYHOLE_MODE_RESIDENT = 2
};

/* What the library does when an audit finds more error than audit_bound. */
typedef int32_t keyhole_audit_action;
enum {
  /* Counts it. */
  KEYHOLE_AUDIT_REPORT = 0,
  /* Counts it and doubles what the head reads, up to 16 times its budget. */
  KEYHOLE_AUDIT_WIDEN = 1,
  /* Counts it and attends everything exactly from then on (this head). */
  KEYHOLE_AUDIT_EXACT = 2
};

/* Which thread brings tokens that leave the window into an index. Same results either way, bit for
 * bit. */
typedef int32_t keyhole_append_mode;
enum {
  /* A thread of the session's own, while steps go on. */
  KEYHOLE_APPEND_BACKGROUND = 0,
  /* The step that takes a block in, on the engine's threads. */
  KEYHOLE_APPEND_IN_STEP = 1
};

/* How K and V of offloaded tokens lie in host memory. */
typedef int32_t keyhole_kv_host;
enum {
  /* As they come: in the engine's kv_dtype. */
  KEYHOLE_KV_HOST_SAME = 0,
  /* In int8, half the memory of 16 bits: of every 256 tokens and channel one scale in bf16, 1/127 of the largest
   * element, so that no element is off by more than half a scale (1.5 within half a percent of the dtype's largest
   * number). Every index type, tail, mode and device attends what these stand for; sink, window and tokens that have
   * not left it are as they came. Tokens leave the window in blocks of 256, so that flush_block is a multiple of 256. A
   * truncation that cuts a block returns what is left of it to the window, rounded as it is; it is rounded again when it
   * leaves once more. */
  KEYHOLE_KV_HOST_INT8 = 1
};

/* Who reads the offloaded tokens that a step over codes on a CUDA device attends exactly. The answers have the same bits,
 * but of heads in doubt (codes_doubted of keyhole_statistics), of which the device reads more tokens and the host does not. */
typedef int32_t keyhole_rows_by;
enum {
  /* The device, where memory of all layers' tokens can be pinned for it; else the host. */
  KEYHOLE_ROWS_BY_AUTO = 0,
  /* The device by itself, over the bus, from pinned memory: no host thread is in a step's path. Layers whose memory cannot be
   * pinned are attended by the host. */
  KEYHOLE_ROWS_BY_DEVICE = 1,
  /* A thread of the session, to which the device names them and which hands them over; next to nothing is pinned. Each step
   * waits for that thread. */
  KEYHOLE_ROWS_BY_HOST = 2
};

typedef struct keyhole_session_config {
  size_t struct_size;
  /* The longest context that the session can hold, in tokens, 1..2^31. Only address space is
   * reserved; memory is taken as tokens arrive. AUTO: 131072. */
  uint32_t max_tokens;
  /* S, 0..2^29; default 128. */
  uint32_t sink;
  /* W, 1..2^29; default 512. */
  uint32_t window;
  /* The window overflows in blocks of this many tokens, 1..2^29. AUTO: 256 on a CUDA device or with
   * KEYHOLE_KV_HOST_INT8, else 64. Codes on a CUDA device need a multiple of 256: offloaded tokens then come in whole
   * blocks of 256, and what is left over stays in the window, which so holds up to flush_block tokens more than W. */
  uint32_t flush_block;
  keyhole_mode mode;
  /* Spec of every head's index, e.g. "ivf:C=1024,probe=32". NULL or "auto": codes of all tokens and the heaviest
   * of them exactly, on a CUDA device with the most bits (4 or 2) that device_memory_limit, or half of the memory
   * that is free, has room for, of as many layers as it has room for; on the host with 4 bits, in lists of which a step
   * reads 12 % of the tokens (8,192 at least); up to 8,192 offloaded tokens are attended exactly there.
   * keyhole_session_get_config() tells. Copied.
   * keyhole_index_help() of keyhole/index.h lists the types. */
  const char* index;
  /* Of every head that `budgets` does not name. */
  keyhole_budget budget;
  /* Keys per partition of the tail, 4..1024. AUTO: 16. */
  uint32_t tail_partition;
  /* Where the codes of offloaded tokens lie (docs/embedding.md, Codes on the device). What has no codes is the host's. */
  keyhole_placement offload_placement;
  /* Path of a file that `keyhole calibrate` wrote for this model: index and budget of every head
   * that it names, in place of those above (docs/formats.md, Budgets files). Read when the session
   * is made. NULL: none. Copied. */
  const char* budgets;
  /* Layers with exact attention; copied; NULL: none. */
  const uint32_t* dense_layers;
  uint32_t dense_layer_count;
  /* Pending tokens of a layer are added to its index in blocks of this many, 1..2^31 (more after a
   * prefill); see docs/embedding.md, Pending tokens. AUTO: 1024. */
  uint32_t append_block;
  keyhole_append_mode append_mode;
  /* Prefill queries kept per KV head to guide index types that use them (evenly spread over the
   * prompt, all heads of the group in turn), 0..2^24; 0: none; default 4096. */
  uint32_t training_queries;
  /* Bytes of host memory that this session may take for K, V, indexes and buffers; 0: no limit. A
   * prefill, attend or build that would pass it returns OUT_OF_MEMORY and changes nothing. */
  size_t host_memory_limit;
  /* Bytes of device memory that this session may take; 0: what there is, codes of KEYHOLE_PLACE_AUTO half of it. A
   * session, build or call that would pass it returns OUT_OF_DEVICE_MEMORY and changes nothing. */
  size_t device_memory_limit;
  /* Share of (step, layer, KV head) that is audited, 0..1; 0: none (docs/choosing.md, Audits). */
  double audit_share;
  keyhole_audit_action audit_action;
  /* Output error that audit_action and keyhole_audit.over_bound compare with. AUTO: 1.5 *
   * error_target of the head, or 0.1 without one. */
  float audit_bound;
  keyhole_kv_host kv_host;
  /* Bytes of host memory that this session may pin for a CUDA device, which reads offloaded tokens there beside their
   * codes; 0: as much as the system lets it. Where it is too little for all layers at max_tokens, exact_rows_by decides
   * (docs/embedding.md, Codes on the device). A session whose exchange with the device alone needs more is refused:
   * OUT_OF_MEMORY. */
  size_t pinned_memory_limit;
  keyhole_rows_by exact_rows_by;
} keyhole_session_config;

KEYHOLE_API void keyhole_session_config_init_sized(keyhole_session_config* config, size_t size);
static inline void keyhole_session_config_init(keyhole_session_config* config) {
  keyhole_session_config_init_sized(config, sizeof *config);
}

/* PENDING TOKENS. A session that only decodes has at most 2 * append_block + flush_block pending
 * tokens per layer (plus the tokens of one graph launch, during which nothing is taken in): it
 * indexes the others by itself. See docs/embedding.md, Pending tokens. */

/* AUDITS. A share of all steps is computed again exactly, beside the decoding; keyhole_session_get_audit tells
 * the errors found, and audit_action can act on them (not in steps on a stream, which are counted alone).
 * See docs/choosing.md, Audits. */

/* BUDGETS FILES. JSON with an index and a budget per head, by `keyhole calibrate` or by hand. See
 * docs/formats.md, Budgets files. */

/* Makes an empty session; config NULL: the defaults. *out is NULL on failure. INVALID_ARGUMENT
 * names the field (and what the index spec allows). Of `budgets`: IO where the file cannot be read;
 * CORRUPT where it is no such file (wrong words, types, unknown or repeated keys), VERSION_MISMATCH
 * for another format, INVALID_ARGUMENT for another model's and for values that no budget may have;
 * the text begins with the path. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_create(
    keyhole_engine* engine, const keyhole_session_config* config, keyhole_session** out);
/* Accepts NULL. Must not be called while another thread is inside the session. Steps that a stream has not come to are given
 * up, and their outputs mean nothing: keyhole_session_synchronize() before, where somebody wants them. */
KEYHOLE_API void keyhole_session_destroy(keyhole_session* session);
/* Reads the values in effect. `index`, `budgets` and `dense_layers` point into the session and are
 * valid until the next call that changes them. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_config(const keyhole_session* session, keyhole_session_config* config);

/* Changes the index type of every head, also of those that a budgets file made dense: drops the
 * built indexes. All offloaded tokens are pending (attended exactly) until keyhole_session_build or the
 * session's own appends have indexed them. Budgets that the index type chose, and tails of codes that
 * the new one has not, become its own. "auto" stands for what it stands for in the config of a session
 * with these budgets: where that is codes, they become the tail of every budget without a tail. Errors:
 * INVALID_ARGUMENT (the spec), OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY (codes that must lie on the device),
 * BUSY; nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_index(keyhole_session* session,
                                                                      const char* index);
/* Changes mode and, for every head, also those that a budgets file names, top_k (1..max_tokens; 0:
 * keep), for the following steps. May allocate. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_mode(keyhole_session* session,
                                                                     keyhole_mode mode,
                                                                     uint32_t top_k);

/* Changes, for every head, also those that a budgets file names, what is attended of an index
 * search, and min_weight (> 0 and < 1; 0: keep), for the following steps. top_k keeps its meaning
 * for the search itself: index types whose effort grows with it score more keys. May allocate. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_attend(keyhole_session* session,
                                                                       keyhole_attend_mode attend,
                                                                       float min_weight);

#define KEYHOLE_ALL UINT32_MAX

/* The budget of one head, or of all heads of a layer or KV head or of all (KEYHOLE_ALL), from the
 * next step on. Sets nothing on an error. May allocate. A head without partitions that gets a tail
 * or a target needs a keyhole_session_build for them (which does nothing else where all is indexed); until
 * then it has neither. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_budget(
    keyhole_session* session, uint32_t layer, uint32_t kv_head, const keyhole_budget* budget);
/* The budget of one head, or of all that KEYHOLE_ALL names: INVALID_ARGUMENT where these differ. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_budget(
    const keyhole_session* session, uint32_t layer, uint32_t kv_head, keyhole_budget* budget);

/* Appends n tokens of the prompt to one layer.
 *   k, v  `[n, Hkv, d]`, any dtype (converted to kv_dtype), host, pinned or, with a CUDA device,
 *         device memory (then the caller's work on the session's stream must have been enqueued
 *         before, and the call waits for it; strides: heads side by side with tokens that do not
 *         overlap, or all rows equally far apart)
 *   q     `[n, Hq, d]` or NULL: queries of the same tokens, a sample of which guides the index (in device memory
 *         no others are read)
 * Layers are independent: all of layer 0 may come before layer 1. May follow decoding steps. The
 * tokens can be attended at once (they are pending until they are indexed). On an error nothing is
 * appended. Errors: INVALID_ARGUMENT (layer, shape, dtype; more than max_tokens), NOT_FINITE (names
 * tensor, token, head; also for a finite value that overflows kv_dtype), OUT_OF_MEMORY, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_append(keyhole_session* session,
                                                                   uint32_t layer,
                                                                   const keyhole_tensor* k,
                                                                   const keyhole_tensor* v,
                                                                   const keyhole_tensor* q);

/* Brings every pending token of every layer into the index: builds where there is none yet, appends
 * where there is one. Fewer tokens than the index's `from`, where its spec has one, stay pending. Does nothing for dense
 * layers. May be called at any time. On CANCELLED or another error, heads that were finished keep their index, the tokens of
 * the others stay pending: nothing is lost, and the call can be repeated. progress may be NULL. Errors: CANCELLED,
 * OUT_OF_MEMORY (the memory or host_memory_limit), BUSY, or the error of an earlier stream step.
 *
 * A session in KEYHOLE_MODE_INDEXED without keyhole_session_build indexes by itself while it decodes. After
 * a large prompt that was never built it takes at most 8 * append_block tokens of a layer in a
 * round, so that no step waits for a whole build; until the last round the rest is attended
 * exactly, and the log says once that keyhole_session_build was not called.
 *
 * A CUDA device helps with large builds (exact neighbours, k-means), in workspaces of at most 3 GB
 * (1 GB for 128k keys of d = 128) that are taken beside all plans and limits and given back at the
 * end. Where the device has too little memory for them the host does all of the build, and the log
 * says so. What a device has helped to build can differ from what the host builds alone as far as
 * scores are equal up to rounding; either is the same each time. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_build(keyhole_session* session,
                                                                  keyhole_progress_fn progress,
                                                                  void* user);

/* One decoding step of one layer: appends the token's K and V, then attends to all tokens including
 * it.
 *   q    `[Hq, d]`, any dtype
 *   k, v `[Hkv, d]`; both NULL: attend without appending
 *   out  `[Hq, d]`, any dtype
 *   lse  NULL, or Hq floats: log-sum-exp of the logits of all tokens attended
 * In steady state allocates nothing (a step that begins or takes in a block of pending tokens may).
 * Errors: as keyhole_session_append; INVALID_ARGUMENT for a layer without any token. On an error nothing
 * is appended and out is unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const keyhole_tensor* k,
    const keyhole_tensor* v, const keyhole_tensor* out, float* lse);

/* The same in two halves: begin appends, publishes q and starts the work; the caller may do other
 * work; end waits and writes the result. Between the two only calls that read counts and settings
 * are allowed (get_layer_tokens, get_statistics, get_config, get_budget); every other call returns
 * BUSY. q is copied by begin; in device memory it must stay as it is until the stream has done the work of
 * both halves. If begin fails there is no end to call. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_begin(keyhole_session* session,
                                                                         uint32_t layer,
                                                                         const keyhole_tensor* q,
                                                                         const keyhole_tensor* k,
                                                                         const keyhole_tensor* v);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_end(keyhole_session* session,
                                                                       const keyhole_tensor* out,
                                                                       float* lse);

/* SEVERAL TOKENS. A turn of a chat, a chunk of a prompt after the build, drafts that are to be verified: n new tokens of
 * one layer at once. See docs/embedding.md, Several tokens, several sequences. */

/* Attends with n >= 1 new tokens of one layer, then appends them. Each attends to all tokens before the call, as mode and
 * budget say (audits and targets see them together with the new ones), and exactly to the new ones: all up to itself, as
 * they are stored in kv_dtype. keyhole_session_attend is n = 1, up to rounding.
 *   q     `[n, Hq, d]`, any dtype
 *   k, v  `[n, Hkv, d]`
 *   mask  NULL: causal. Else, for trees of drafts, n words, n <= 64: bit j of word i says that new token i attends to new
 *         token j. Bit i must be set, bits above i must not.
 *   out   `[n, Hq, d]`, any dtype, rows that do not overlap; may be q
 *   lse   NULL, or `[n, Hq]` floats: log-sum-exp of the logits of all tokens attended
 * Tokens are appended as by keyhole_session_append, so that n is not bound to the window; no queries are sampled. Small
 * n on a host device read keys and codes once for as many tokens as make up 16 query heads of a KV head, where the
 * index type searches for each query head by itself (flat, codes), without partitions and without audits; with codes
 * the heavy rows of these tokens are chosen together, top_k for each token. A sliding layer attends one token after the
 * other, each to the newest `window` tokens that it sees, of those before the call and the new ones together. May
 * allocate. Hundreds of tokens may attend as prompts do: keyhole_session_set_extend_pattern().
 * With a CUDA device q, k, v, out and lse may all lie in device memory: the work is enqueued on the session's stream. A few
 * tokens are steps over codes (16 query heads of a KV head at once, their heavy rows chosen together, 64 at most), or one step
 * each where a layer has no codes on the device; these may be captured in a graph, and steps of several tokens are not audited.
 * Where that is faster, and not in a capture, all are attended at once and exactly, whatever the budget: offloaded K and V
 * cross the bus once, and the call waits for the stream (K and V in f16 or bf16; device memory for it is taken then and kept,
 * within device_memory_limit). A mask in a layer without codes on the device, or of more tokens than
 * `window`, needs that: else UNSUPPORTED. A sliding layer takes one step for each token there, with a mask, too, and
 * all of it may be captured; a token sees what its layer still keeps when it comes, so that n tokens of a tree need a window_slack of
 * n - 1 (INVALID_ARGUMENT names the layer and what it needs), or max_tokens of no more than the layer keeps.
 * Errors: as keyhole_session_attend; INVALID_ARGUMENT also for n = 0 and the mask. On an error nothing is appended (of
 * a capture: the graph is lost) and out and lse are unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_extend(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const keyhole_tensor* k,
    const keyhole_tensor* v, const uint64_t* mask, const keyhole_tensor* out, float* lse);

/* By which pattern a session's keyhole_session_extend and keyhole_session_extend_batch of many new tokens attend: those of at least
 * `tokens` of them, without a mask. Such a call looks at K and V themselves, in no index: of
 * all tokens that there are, offloaded ones as they lie (int8, too), and of the new ones. Each tile of 128 new tokens
 * chooses blocks of 64 tokens among all before it as keyhole_prompt_attend of keyhole/prefill.h does, with the same q, k
 * and v up to the rounding of stored K and V; "dense" is exact.
 *   pattern  text as of keyhole_prompt_create(); NULL, as a session begins: none, and extends attend as steps do
 *   tokens   1..2^31; KEYHOLE_AUTO: 128, and of tensors in device memory no fewer than are attended at once in any case, see
 *            keyhole_session_extend(). Fewer new tokens attend as steps do
 * With tensors in device memory the device chooses and attends, on the session's stream, for which the call waits: offloaded K and V
 * cross the bus once, all of them, as the choice is by all keys; a dense pattern, or one that is dense up to as many tokens as there are
 * (`from`), is exact there. K and V of a few KV heads at a time lie on the device whole: that takes up to 128 MiB, or two heads' where
 * that is more, and up to some 150 MiB for the new tokens and their choice, which counts against
 * device_memory_limit and is kept. Where there is no such memory, where rows of out are not aligned to 8 bytes, or
 * behind 4,194,240 tokens, the call is exact in place of the pattern.
 * Sliding layers, KEYHOLE_MODE_RESIDENT, captures, and with tensors in device memory K and V in f32 and head
 * dimensions other than 64, 80, 96, 128, 256 know no patterns: such calls attend as without one. Audits
 * do not look at such calls. Copies of the session have the pattern, files do not. Host memory for the choice, up to some
 * 300 MiB, counts against host_memory_limit and is given back with the next step. Errors: INVALID_ARGUMENT (pattern,
 * tokens), UNSUPPORTED (a value_dim that is not head_dim), IO, CORRUPT, VERSION_MISMATCH (a file of budgets), BUSY;
 * then nothing has changed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_set_extend_pattern(keyhole_session* session, const char* pattern, uint32_t tokens);
/* As keyhole_prompt_get_blocks(), of all such calls of the session that were not dense: blocks attended, and those that the
 * new tokens see. Errors: BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_extend_blocks(
    const keyhole_session* session, uint64_t* attended, uint64_t* seen);

/* After one keyhole_session_extend of the same n tokens in every layer that took part, or one launch of a graph that extends
 * layers so: keeps m of them, and drops the others in all these layers.
 *   path  NULL: the first m (0..n). Else m rising indexes below n, a path of the tree: they become the tokens that follow
 *         those before the call, in this order.
 * Drops as keyhole_session_truncate does: what was offloaded stays offloaded, and with KEYHOLE_KV_HOST_INT8 tokens that
 * had left the window come back rounded. One accept for each extend. Of up to 64 tokens in device memory, no more than
 * `window`, it is enqueued on the session's stream, waits for nothing, and graphs stay valid. Not during a capture.
 * Errors: INVALID_ARGUMENT (m, path; no keyhole_session_extend before; another call has changed a layer's tokens since;
 * layers with another n or other tokens before it; a sliding layer that no longer holds its window before the tokens
 * that go: window_slack is as many as can be), OUT_OF_MEMORY, BUSY,
 * or the error of an earlier stream step; nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_accept(keyhole_session* session,
                                                                   uint32_t m,
                                                                   const uint32_t* path);

/* keyhole_session_extend (without masks) of `count` different sessions of one engine, whose work the engine's threads share. With
 * tensors in device memory each is enqueued on the stream of its session. Of those that have a stream in common and whose layer
 * the device attends by codes, steps that are alike (compute capability 9.0 or newer, 2 or 4 bits of keys and values, heads of 64
 * or 128 components, up to 8 query heads for a KV head and step) go by one launch for up to 16 sessions, also in a capture: short
 * sequences then fill the device together. It shares its thread blocks by their lengths as they are when the kernels run, so a
 * session's result may differ by rounding from that of keyhole_session_extend. A launch that fails is a failure of each
 * session in it. Sequences may join and leave between calls. On a host device what copies (keyhole_session_fork) have
 * in common of codes without lists, and of K and V that are attended exactly, is read once for all of them: results
 * differ by rounding from those of keyhole_session_extend, at most.
 *   q, out       `[total, Hq, d]`, total = query_start[count]: the tokens of session 0, then those of session 1, ...
 *   k, v         `[total, Hkv, d]`
 *   query_start  `[count + 1]`, rising from 0: tokens query_start[i] to query_start[i + 1] are session i's; none: the
 *                session is left alone
 *   lse          NULL, or `[total, Hq]` floats
 *   statuses     NULL, or `[count]`: what keyhole_session_extend would have returned for each
 * What fails for one session (NOT_FINITE in its rows, its OUT_OF_MEMORY, BUSY, ...) leaves that session as it was and its
 * rows of out and lse unspecified; the others go on. Returns KEYHOLE_OK if all succeeded, else the first failure in
 * the order of the sessions, whose text keyhole_last_error() gives. Arguments that concern all (tensors, query_start,
 * layer, a NULL session, sessions of several engines) are checked first: INVALID_ARGUMENT or UNSUPPORTED, and no session has
 * changed; statuses then hold that status. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_extend_batch(
    keyhole_session* const* sessions, uint32_t count, uint32_t layer, const keyhole_tensor* q,
    const keyhole_tensor* k, const keyhole_tensor* v, const uint32_t* query_start,
    const keyhole_tensor* out, float* lse, keyhole_status* statuses);
/* ENGINES WITH ATTENTION OF THEIR OWN keep sink and window themselves, append with keyhole_session_append, and
 * merge what these two calls return with their own states (keyhole_merge_states_base and
 * keyhole_merge_states_device). Arrays lie in host memory, and so do tensors, whatever the engine's
 * device; with a CUDA device q, out and lse of the first two may lie in device memory, all of them: such a call waits for what is on
 * the session's stream before it, and the state is there when it returns. lse is a natural logarithm. Which tokens are
 * offloaded keyhole_session_get_layer_tokens tells: all but the first `sink` and the last `window` of them. Learned
 * sinks are in none of these states: the caller adds them once. UNSUPPORTED in sliding layers, which have nothing
 * offloaded. See docs/embedding.md, Engines with attention of their own. */

/* The state of a layer's offloaded tokens alone, pending and indexed, as mode and budget say, without
 * sink and window. Nothing is appended; as in a step, blocks of pending tokens are taken into the index.
 *   q    `[Hq, d]`, any dtype
 *   out  `[Hq, d]`, any dtype;  lse NULL, or Hq floats
 * Where nothing is offloaded (or attended: KEYHOLE_MODE_RESIDENT) out is 0 and lse -inf, also in a layer
 * without tokens. Targets of a budget are relative to the offloaded tokens; the call is not audited.
 * Errors: INVALID_ARGUMENT, NOT_FINITE, BUSY, or the error of an earlier stream step; UNSUPPORTED where
 * the device attends the layer by codes (keyhole_session_config.offload_placement = KEYHOLE_PLACE_HOST keeps them
 * on the host). out is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_attend_offloaded(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                                 const keyhole_tensor* out, float* lse);

/* The state of tokens that the caller has chosen, each exactly, in place of a search.
 *   counts  `[Hkv]`: how many tokens each KV head attends, 0 allowed
 *   ids     their positions, 0..total - 1 of keyhole_layer_tokens, those of KV head 0 first; of each head
 *           distinct, in any order (which changes results by rounding alone); NULL where all counts are 0
 *   with_resident  non-zero: sink and window are attended as well, by every head; ids of them count once
 *   q, out, lse    as in keyhole_session_attend_offloaded
 * Mode and budget do not matter. A head that attends nothing has (0, -inf). May allocate. Errors:
 * INVALID_ARGUMENT (names KV head, id and the ids allowed; an id that comes twice), NOT_FINITE,
 * OUT_OF_MEMORY, BUSY, or the error of an earlier stream step. out is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_attend_tokens(
    keyhole_session* session, uint32_t layer, const keyhole_tensor* q, const uint32_t* ids,
    const uint32_t* counts, int32_t with_resident, const keyhole_tensor* out, float* lse);

/* The ids that a search chooses: of every query head the offloaded tokens with the largest inner products
 * q . k, best first, equal ones by position.
 *   q       `[Hq, d]`, any dtype;  top_k 1..max_tokens
 *   ids     `[Hq, top_k]` out: positions, as keyhole_session_attend_tokens takes them
 *   scores  NULL, or `[Hq, top_k]` out: q . k of the key as it is stored, unscaled
 *   counts  `[Hq]` out: how many each head has, min(top_k, offloaded tokens) or fewer where its index finds
 *           no more; what lies behind them is left as it was
 * Indexed tokens are sought in the head's index, with the effort that the index's parameters and top_k
 * give; pending tokens, and all of a head without an index (dense layers, layers that the device attends
 * by codes) and of a session in KEYHOLE_MODE_EXACT, are scored one by one. As in a step, blocks of pending
 * tokens are taken into the index. May allocate. Errors: INVALID_ARGUMENT, NOT_FINITE, OUT_OF_MEMORY, BUSY,
 * or the error of an earlier stream step; what was written is unspecified then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_search_tokens(keyhole_session* session, uint32_t layer, const keyhole_tensor* q,
                              uint32_t top_k, uint32_t* ids, float* scores, uint32_t* counts);

/* STREAM STEPS. With a CUDA device the calls above also take q, k, v, out and lse in device memory:
 * the step is enqueued on the session's stream, and can be captured. Other than the borrowed arrays of
 * a call, these tensors are read and written when the stream comes to the step: q, k and v must stay
 * as they are, out and lse where they are, until it has done the step (both halves of it; of a graph, in
 * each launch). See docs/embedding.md, Steps on a stream. */

/* The cudaStream_t on which the session's steps are enqueued from now on; NULL: the default stream.
 * Waits for steps on the old one. UNSUPPORTED on a host device. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_stream(keyhole_session* session,
                                                                       void* stream);
/* Announces one launch of the graph that was captured last on the session's stream; call it just
 * before the launch. Errors: INVALID_ARGUMENT: nothing was captured, a call failed during the
 * capture, the session has changed since, or the graph's tokens would pass max_tokens;
 * OUT_OF_MEMORY: they would pass host_memory_limit; BUSY: during a capture or inside a step;
 * UNSUPPORTED on a host device; or the error of an earlier step. Nothing is announced then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_announce(keyhole_session* session);
/* Waits until all steps that were enqueued or announced are done, and returns the first error among
 * them. What is to be pinned and encoded of prompts is then pinned, and its encoding enqueued; with
 * KEYHOLE_PLACE_DEVICE also OUT_OF_MEMORY where the system does not let it be pinned. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_synchronize(keyhole_session* session);

/* Drops all tokens >= n_tokens, in every layer. Offloaded tokens stay offloaded: the window may be
 * shorter than W until it has filled again. A layer of at most n_tokens tokens is left alone.
 * Errors: BUSY, or the error of an earlier stream step; INVALID_ARGUMENT where a sliding layer no longer holds
 * all of its window before n_tokens (window_slack), unless n_tokens is 0: nothing changes then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_truncate(keyhole_session* session,
                                                                     uint32_t n_tokens);

/* An independent copy of the session. It copies resident tokens and the config; offloaded K and V, indexes, codes and
 * training queries it shares with the session until one of the two changes them. That one takes a copy of its own first, of
 * what it changes: of an index that grows or is cut, all of that head's (codes and the lists of ivf and saap stay shared);
 * of K and V, a page of each array; of codes on a device, pages of it. Where there is no memory for it, tokens stay
 * pending, or keyhole_session_build returns OUT_OF_MEMORY. See shared_bytes of keyhole_statistics. Both give the same
 * answers, to the last bit, as long as they have indexed the same tokens (with KEYHOLE_APPEND_BACKGROUND a block is
 * indexed when it is ready). A session and its copies may be used by different threads at once, and destroyed in any
 * order. The caller destroys *out. BUSY leaves *out as it was; it is NULL on other failures. Errors: OUT_OF_MEMORY,
 * OUT_OF_DEVICE_MEMORY, DEVICE_ERROR, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_fork(keyhole_session* session,
                                                                 keyhole_session** out);

/* Writes the session to a file: shape, config, K, V and indexes, with magic, format version and
 * checksum, for its owner to read alone (mode 0600). save writes a file of another name beside it and
 * renames that: a failed save leaves an old file as it was, and several may save to one path. Links
 * are followed; a device or a pipe is written as it is (not by a session of several ranks). load
 * makes a session of an engine with the same shape and kv_dtype; the config is the saved one, whose
 * budgets file is not read again. The caller destroys *out; it is NULL on failure. Errors: IO,
 * CORRUPT, VERSION_MISMATCH, INVALID_ARGUMENT, OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY; of save also
 * BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_save(keyhole_session* session,
                                                                 const char* path);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_load(keyhole_engine* engine,
                                                                 const char* path,
                                                                 keyhole_session** out);

/* What a session's tokens are, so that a saved context is not taken for another one: the id of a model and
 * the ids of the tokens, from the first one on. The caller sets it, save writes it, fork copies it, a
 * truncation below token_count forgets the tokens (not the model). The library keeps their hash alone. */
typedef struct keyhole_identity {
  size_t struct_size;
  /* Ends with 0; "": not known. */
  char model[256];
  /* Tokens that were named; 0: not known. */
  uint64_t token_count;
  /* XXH3 (64 bits) of their ids as little-endian int32; 0 where token_count is 0. */
  uint64_t token_hash;
} keyhole_identity;
KEYHOLE_API void keyhole_identity_init_sized(keyhole_identity* identity, size_t size);
static inline void keyhole_identity_init(keyhole_identity* identity) {
  keyhole_identity_init_sized(identity, sizeof *identity);
}
/* model: up to 255 bytes; NULL: keeps the one there is. tokens: the ids of all tokens that the session
 * holds, `count` of them; NULL with count 0: not known. INVALID_ARGUMENT, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_identity(keyhole_session* session,
                                                                         const char* model,
                                                                         const int32_t* tokens,
                                                                         uint64_t count);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_identity(const keyhole_session* session, keyhole_identity* identity);
/* keyhole_session_load of a file whose model is `model` (NULL: any) and whose tokens are the first of `tokens`, a
 * prompt that it may be continued with (NULL: any). Anything else, also a file that does not say what it
 * holds, or that holds more tokens than it names: INVALID_ARGUMENT, with what the file says and what was
 * asked for, before K and V are read. How many of the tokens the session holds
 * keyhole_session_get_identity tells. Other errors as keyhole_session_load. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_load_expecting(keyhole_engine* engine, const char* path, const char* model,
                               const int32_t* tokens, uint64_t count, keyhole_session** out);

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
  /* Sum: host memory read by searches and offloaded attention. What a batch of copies reads once is divided among them. */
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
  /* E.g. "host"; static. */
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
  /* Now: of host_bytes, K, V, indexes and training queries that the session shares with its copies, or with the one of which
   * it is a copy, and that another of them counts: host_bytes - shared_bytes, summed over all sessions, is what they take.
   * Of what several share, the first that still has it counts it; memory of which one has taken a copy of its own is not
   * shared. */
  uint64_t shared_bytes;
  /* Sum: (KV head, step) whose codes could not tell which tokens weigh, so that more of them were read exactly than
   * the budget says: heads whose logits differ by much more than the codes' errors allow. On a device where the host reads
   * them (rows_by_host) such heads are counted, and no more are read. */
  uint64_t codes_doubted;
  /* Sum: of codes_doubted, those where codes could not even say which tokens might weigh: all were read, at the cost of exact
   * attention (on a device, those that might weigh, if they were more than an eighth). Many of them: take codes of more bits, or
   * exact attention, for these heads. */
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
  /* Exchange buffers between host and device; 0 on a host device. */
  uint64_t pinned_bytes;
  /* 1 if device_bytes is within device_limit, host_bytes + pinned_bytes within host_limit and pinned_bytes +
   * pinned_kv_bytes within pinned_memory_limit. */
  uint32_t fits;
  /* The most tokens that fit all limits, up to 2^31; 0 if none does. */
  uint32_t longest_context;
  /* Of device_bytes, codes of offloaded tokens. */
  uint64_t code_bytes;
  /* Of host_bytes, memory of offloaded tokens that is pinned, as the device reads it. A session pins, and takes, up to 2 MiB
   * more for K and for V of each KV head of a layer, ahead of the tokens. */
  uint64_t pinned_kv_bytes;
  /* The index of the session: what "auto" stands for. */
  char index[64];
  /* Layers whose codes lie on the device. Where there is no room for all, they are the last ones of those that could:
   * layers below first_code_layer (0 if code_layers is 0) are attended by the host. */
  uint32_t code_layers;
  uint32_t first_code_layer;
  /* 1 where the host reads the tokens that these layers attend exactly, see exact_rows_by; pinned_kv_bytes is 0 then. */
  uint32_t rows_by_host;
} keyhole_memory_plan;
KEYHOLE_API void keyhole_memory_plan_init_sized(keyhole_memory_plan* plan, size_t size);
static inline void keyhole_memory_plan_init(keyhole_memory_plan* plan) {
  keyhole_memory_plan_init_sized(plan, sizeof *plan);
}

/* Memory that a session of this shape takes at `context` tokens. Needs no engine, GPU or memory.
 * Limits in bytes, 0: none; device_limit is what is left for Keyhole after the weights. On a host
 * device device_bytes count against host_limit as well. Uses the shape, kv_dtype, device (AUTO: as
 * CUDA, or as the host where CUDA does not take the shape) and threads (AUTO: 16) of `engine` and
 * sink, window, flush_block, index, budget, tail_partition, partitions, budgets, dense_layers, training_queries, audit_share, audit_action,
 * kv_host, pinned_memory_limit and exact_rows_by of `session` (NULL: defaults).
 * Errors: INVALID_ARGUMENT, also where a size passes 2^63; UNSUPPORTED: a shape that DEVICE_CUDA does not
 * take; those of the budgets file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_plan(const keyhole_engine_config* engine,
                                                         const keyhole_session_config* session,
                                                         uint64_t context, uint64_t device_limit,
                                                         uint64_t host_limit,
                                                         keyhole_memory_plan* plan);

/* ---- Attention states ------------------------------------------------------------------------ */

/* Merges n states by log-sum-exp, for embedders with attention kernels of their own.
 *   o   n pointers to `[heads, head_dim]` fp32;  lse  n pointers to `[heads]` fp32 (-inf: empty)
 *   out `[heads, head_dim]`, out_lse `[heads]`; may be one of the inputs
 * Any heads >= 1 and head_dim >= 1, not only those of an engine. fp32, in the order given; empty
 * sets give no NaN; n = 0 gives (0, -inf). INVALID_ARGUMENT: NULL, heads or head_dim 0. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states(uint32_t n, const float* const* o,
                                                                 const float* const* lse,
                                                                 uint32_t heads, uint32_t head_dim,
                                                                 float* out, float* out_lse);

/* The base of the logarithm that is an lse. */
typedef int32_t keyhole_lse_base;
enum {
  /* ln of the sum of e^logit: all of this library's. */
  KEYHOLE_LSE_NATURAL = 0,
  /* log2 of the same sum, i.e. the natural one times log2(e): FlashInfer's. */
  KEYHOLE_LSE_LOG2 = 1
};

/* keyhole_merge_states with the base of lse and out_lse. States with lse = -inf are empty, and their o is
 * not read; a NaN in a lse gives a NaN in the head's out and out_lse. INVALID_ARGUMENT also: base;
 * OUT_OF_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states_base(
    uint32_t n, const float* const* o, const float* const* lse, uint32_t heads, uint32_t head_dim,
    keyhole_lse_base base, float* out, float* out_lse);

/* The same on a CUDA device, enqueued: returns at once, allocates nothing, can be captured in a graph.
 *   o        n pointers, in host memory, to `[rows, head_dim]` of o_dtype in device memory
 *   lse      n pointers, in host memory, to `[rows]` fp32 in device memory, to `base`
 *   rows     tokens * heads: each is merged by itself
 *   out      `[rows, head_dim]` of out_dtype, out_lse `[rows]` fp32, to `base`, in device memory; may be
 *            one of the inputs (out where the dtypes are equal)
 *   stream   a cudaStream_t of the thread's current device; NULL: the default stream
 * Any head_dim and rows from 1 on, n 0..2000; tensors are contiguous, aligned to their elements. Sums in
 * fp32. Empty states and NaN as in keyhole_merge_states_base. The arrays o and lse may go when the call
 * returns. Errors: INVALID_ARGUMENT; UNSUPPORTED: a build without CUDA, a machine without a device;
 * DEVICE_ERROR: the launch failed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states_device(
    uint32_t n, const void* const* o, const float* const* lse, uint32_t rows, uint32_t head_dim,
    keyhole_dtype o_dtype, keyhole_lse_base base, void* out, keyhole_dtype out_dtype,
    float* out_lse, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_KEYHOLE_H_ */
