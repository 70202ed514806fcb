/* Keyhole: decoding with a long context through a small opening.
 *
 * The attention sink and the recent window stay on the device; every other key and value lives in host
 * memory behind a vector index, and each decoding step reads only the few keys that matter. The partial
 * attention of both is merged by log-sum-exp (attention states; FlashInfer, RetrievalAttention).
 *
 * A decoder calls, per sequence:
 *
 *     keyhole_prefill(session, layer, k, v, q)      for each layer and chunk of the prompt
 *     keyhole_build(session, ...)                   once after the prefill
 *     keyhole_attend(session, layer, q, k, v, out)  for each layer of each decoding step
 *
 * WORDS   sink: the first S tokens. window: the newest tokens, W of them or up to a flush block more.
 *         resident: sink or window. offloaded: all others. indexed / pending: offloaded tokens that are
 *         in the index / not yet in it (attended exactly). group: the q_heads / kv_heads query heads
 *         that share a KV head. Every token is attended exactly once: resident, indexed or pending.
 *
 * SHAPES  Hq = q_heads, Hkv = kv_heads, d = head_dim, n = tokens. Hq % Hkv == 0, group 1..16,
 *         d one of 64, 80, 96, 128, 256. Query head h belongs to KV head h / (Hq / Hkv). K and q are
 *         passed after RoPE (rotate-half); RoPE's parameters are given so that an index can undo it.
 *
 * ERRORS  Every function that can fail returns a keyhole_status: KEYHOLE_OK or a negative code. The text
 *         of the last failure (what was wrong, the value seen, the values allowed) is read with
 *         keyhole_last_error(), kept per thread. A failed call changes nothing unless it says so: the
 *         object stays usable. The library never prints, aborts, exits or throws.
 *
 * THREADS An engine is immutable and may be used from any number of threads. A session is used by one
 *         thread at a time; different sessions may run at once. A call into a session that another
 *         thread is using returns KEYHOLE_BUSY and changes nothing (detected at every entry).
 *         keyhole_plan, keyhole_merge_states and the text functions may be called from any thread.
 *
 * STRUCTS Config and result structs begin with struct_size, are filled by their *_init function, and only
 *         ever grow at the end. The library writes as many bytes as the caller's struct has (*_init_sized is told,
 *         for those who do not compile this header), so a program runs with a newer library. Fields hold KEYHOLE_AUTO (0 for most) where the library shall choose;
 *         the values in effect can be read back.
 *
 * LOGS    natural log everywhere. An empty set of tokens has lse = -inf and o = 0.
 */
#ifndef KEYHOLE_KEYHOLE_H_
#define KEYHOLE_KEYHOLE_H_

#include <stddef.h>
#include <stdint.h>

#define KEYHOLE_VERSION_MAJOR 0
#define KEYHOLE_VERSION_MINOR 1
#define KEYHOLE_VERSION_PATCH 0
#define KEYHOLE_ABI_VERSION 1

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

/* ---- Versions, status, errors, log -------------------------------------------------------------- */

/* "0.1.0": the version of the library that runs, which may be newer than this header. */
KEYHOLE_API const char* keyhole_version(void);
/* KEYHOLE_ABI_VERSION of the library that runs; equal to the header's or the two do not fit. */
KEYHOLE_API uint32_t keyhole_abi_version(void);

typedef int32_t keyhole_status;
enum {
  KEYHOLE_OK = 0,
  KEYHOLE_INVALID_ARGUMENT = -1,     /* a value, shape or spec is outside what is allowed */
  KEYHOLE_UNSUPPORTED = -2,          /* valid, but this build or machine cannot do it */
  KEYHOLE_OUT_OF_MEMORY = -3,        /* host memory, or the cap that the caller set on it */
  KEYHOLE_OUT_OF_DEVICE_MEMORY = -4, /* device memory, or the cap that the caller set on it */
  KEYHOLE_DEVICE_ERROR = -5,         /* the device failed */
  KEYHOLE_TIMEOUT = -6,              /* the device or the host did not answer in time */
  KEYHOLE_IO = -7,                   /* a file cannot be opened, read or written */
  KEYHOLE_CORRUPT = -8,              /* a file contradicts itself or is cut short */
  KEYHOLE_VERSION_MISMATCH = -9,     /* a file or struct of a newer version */
  KEYHOLE_CANCELLED = -10,           /* the progress callback asked to stop */
  KEYHOLE_BUSY = -11,                /* in use by another thread, or begin without its end */
  KEYHOLE_NOT_FINITE = -12, /* NaN or Inf in K, V or q, or a value that overflows kv_dtype */
  KEYHOLE_INTERNAL = -13    /* a broken promise inside the library: please report it */
};

/* Static text for a status, e.g. "invalid argument"; "unknown status" for others. Never NULL. */
KEYHOLE_API const char* keyhole_status_string(keyhole_status status);

/* Text of the last failed call of this thread; "" if none failed. Valid until the thread's next failing
 * call. Never NULL. */
KEYHOLE_API const char* keyhole_last_error(void);

enum { KEYHOLE_LOG_DEBUG = 0, KEYHOLE_LOG_INFO = 1, KEYHOLE_LOG_WARNING = 2 };
/* Receives messages instead of a terminal. May be called from any thread that is inside a library call;
 * must not call back into the library. `text` is valid during the call. */
typedef void (*keyhole_log_fn)(void* user, int32_t level, const char* text);

/* Called now and then from a long call with the share done (0..1) and what is being done. A return of
 * non-zero cancels: the call returns KEYHOLE_CANCELLED. Called from the calling thread or a worker, one
 * call at a time; must not call back into the library. */
typedef int32_t (*keyhole_progress_fn)(void* user, double fraction, const char* what);

/* ---- Tensors -------------------------------------------------------------------------------------- */

typedef int32_t keyhole_dtype;
enum { KEYHOLE_F32 = 0, KEYHOLE_F16 = 1, KEYHOLE_BF16 = 2 };

typedef int32_t keyhole_memory;
enum { KEYHOLE_HOST = 0, KEYHOLE_PINNED = 1, KEYHOLE_DEVICE = 2 };

/* A borrowed array: the library reads (or writes) it during the call only, and never keeps the pointer.
 * `strides` are in elements; the last must be 1; a stride of an axis of length 1 is ignored. */
typedef struct keyhole_tensor {
  void* data;
  keyhole_dtype dtype;
  keyhole_memory memory;
  int32_t rank;       /* 1..4 */
  int64_t shape[4];   /* >= 0 */
  int64_t strides[4]; /* elements */
} keyhole_tensor;

/* A dense row-major host tensor, for convenience; shape[i] for i < rank. */
KEYHOLE_API keyhole_tensor keyhole_tensor_host(const void* data, keyhole_dtype dtype, int32_t rank,
                                               const int64_t* shape);

/* ---- Engine: model shape, device, threads, kernels ------------------------------------------------ */

typedef struct keyhole_engine keyhole_engine;
typedef struct keyhole_session keyhole_session;

enum { KEYHOLE_AUTO = 0 };

typedef int32_t keyhole_device;
enum {
  KEYHOLE_DEVICE_AUTO = 0, /* the best that this build and machine have; the log says which */
  KEYHOLE_DEVICE_HOST = 1, /* resident tokens in host memory, computed by the worker pool */
  KEYHOLE_DEVICE_CUDA = 2  /* KEYHOLE_UNSUPPORTED where it is absent */
};

/* How the device's stream comes to know that the host's part of a step is done. */
typedef int32_t keyhole_signal;
enum {
  KEYHOLE_SIGNAL_AUTO = 0,
  KEYHOLE_SIGNAL_WAIT =
      1, /* a kernel waits for the host's flags: a few microseconds; can be captured */
  KEYHOLE_SIGNAL_LAUNCH =
      2 /* the caller's thread waits and then launches the merge: where kernels are launched
                             * one at a time (CUDA_LAUNCH_BLOCKING, sanitizers, WDDM) */
};

/* Where a part of a session works. */
typedef int32_t keyhole_placement;
enum {
  KEYHOLE_PLACE_AUTO = 0, /* on the device where there is one and device_memory_limit leaves room */
  KEYHOLE_PLACE_HOST = 1,
  KEYHOLE_PLACE_DEVICE = 2 /* or an error */
};

typedef int32_t keyhole_rope_scaling;
enum { KEYHOLE_ROPE_NONE = 0, KEYHOLE_ROPE_LINEAR = 1, KEYHOLE_ROPE_LLAMA3 = 2 };

typedef struct keyhole_engine_config {
  size_t struct_size;
  uint32_t layers;        /* required, 1..1024 */
  uint32_t q_heads;       /* required: Hq */
  uint32_t kv_heads;      /* required: Hkv, divides Hq, Hq / Hkv <= 16 */
  uint32_t head_dim;      /* required: d, one of 64, 80, 96, 128, 256 */
  keyhole_dtype kv_dtype; /* how K and V are stored; default KEYHOLE_F16 */
  float scale;            /* of the logits; AUTO: 1 / sqrt(d) */
  float softcap;          /* c > 0: logit = c * tanh(scale*q.k / c); 0: none */
  float rope_theta;       /* base; 0: the model has no RoPE */
  keyhole_rope_scaling rope_scaling;
  float rope_factor;              /* linear and llama3: the factor, > 0 */
  float rope_low_freq_factor;     /* llama3 */
  float rope_high_freq_factor;    /* llama3 */
  uint32_t rope_original_context; /* llama3: original_max_position_embeddings */
  keyhole_device device;
  uint32_t
      threads; /* worker threads including the caller; AUTO: one per core of the process, with a CUDA device two less */
  int32_t pin_threads; /* non-zero: pin the workers to cores (the caller's thread is never moved) */
  uint32_t spin_us;    /* how long an idle worker spins before it sleeps; AUTO: 50; 1: barely */
  const char* cpu_level; /* "scalar", "avx2", "avx512", "avx512vnni"; NULL: environment variable
                             * KEYHOLE_CPU, else the best of the machine. Read back: the level in use */
  keyhole_log_fn log;    /* NULL: silent */
  void* log_user;
  const char*
      classifiers; /* path of a file that `keyhole train-saap` wrote for this model, read when the
                            * engine is made: partitions and query classifiers for indexes of type saap.
                            * NULL: none. Copied */
  /* KEYHOLE_DEVICE_CUDA only: */
  uint32_t device_ordinal; /* which of the machine's CUDA devices */
  keyhole_signal
      signal; /* AUTO: environment variable KEYHOLE_SIGNAL ("wait", "launch"), else by trying */
  uint32_t
      timeout_ms; /* device and host wait for each other so long, then KEYHOLE_TIMEOUT; AUTO: 10000 */
} keyhole_engine_config;

/* Fills in struct_size and the defaults; the required fields become 0. */
KEYHOLE_API void keyhole_engine_config_init_sized(keyhole_engine_config* config, size_t size);
static inline void keyhole_engine_config_init(keyhole_engine_config* config) {
  keyhole_engine_config_init_sized(config, sizeof *config);
}

/* Makes an engine; *out is NULL on failure. Copies the config. INVALID_ARGUMENT names the field; it is also
 * returned for classifiers of another model. IO, CORRUPT, VERSION_MISMATCH: the classifier file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_create(const keyhole_engine_config* config, keyhole_engine** out);
/* Accepts NULL. Sessions keep what they need of their engine: the order of destruction is free. */
KEYHOLE_API void keyhole_engine_destroy(keyhole_engine* engine);
/* Reads the values in effect into *config, whose struct_size the caller has set (by *_init). The
 * cpu_level string lives as long as the library. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_engine_get_config(const keyhole_engine* engine, keyhole_engine_config* config);

/* ---- Session: one sequence ------------------------------------------------------------------------ */

typedef int32_t keyhole_mode;
enum {
  KEYHOLE_MODE_INDEXED = 0, /* resident + pending exactly, indexed tokens through the index */
  KEYHOLE_MODE_EXACT = 1,   /* everything exactly: the truth for tests, audits and dense layers */
  KEYHOLE_MODE_RESIDENT =
      2 /* sink and window only (StreamingLLM); offloaded tokens are kept, unread */
};

/* Which of the keys that an index search came upon are attended. A key that was scored has been read: its
 * value is all that attending to it costs more. */
typedef int32_t keyhole_attend_mode;
enum {
  KEYHOLE_ATTEND_TOPK = 0,   /* the top_k best of each head of the group, by all heads */
  KEYHOLE_ATTEND_SCORED = 1, /* every key that the search scored */
  KEYHOLE_ATTEND_WEIGHT = 2, /* every scored key whose softmax weight among the scored keys is above
                              * min_weight for a head of the group. Index types that score compressed
                              * keys weigh by those scores */
  KEYHOLE_ATTEND_NONE =
      3 /* none: the index is not searched, the partitions of the tail alone say what
                              * is read (a tail or a target is needed) */
};

/* What stands in for the indexed keys that a step has not attended: the tail. Beside its index, a head that
 * has a tail keeps partitions of its keys; those that were not read contribute an attention state made of
 * their means, merged like any other. A partition that was read in part counts with the rest of its keys. */
typedef int32_t keyhole_tail_mode;
enum {
  KEYHOLE_TAIL_NONE = 0, /* nothing: what is not read weighs nothing */
  KEYHOLE_TAIL_MEAN = 1, /* one mean value for all of it (SparQ's correction) */
  KEYHOLE_TAIL_CENTROID =
      2, /* per partition n * exp(scale * q . mean key) and the mean value (RetroInfer).
                              * A lower bound of the mass by Jensen's inequality */
  KEYHOLE_TAIL_SECOND = 3 /* with the second-order term of the keys' variance, capped */
};

/* What the library does when an audit finds more error than audit_bound. */
typedef int32_t keyhole_audit_action;
enum {
  KEYHOLE_AUDIT_REPORT = 0, /* counts it */
  KEYHOLE_AUDIT_WIDEN = 1,  /* and doubles what the head reads, up to 16 times its budget */
  KEYHOLE_AUDIT_EXACT = 2   /* and attends everything exactly from then on (this head) */
};

/* Who brings tokens that leave the window into a built index. Same results either way, bit for bit. */
typedef int32_t keyhole_append_mode;
enum {
  KEYHOLE_APPEND_BACKGROUND = 0, /* a thread of the session's own, while steps go on */
  KEYHOLE_APPEND_IN_STEP = 1     /* the step that takes a block in, on the engine's threads */
};

typedef struct keyhole_session_config {
  size_t struct_size;
  uint32_t max_tokens;  /* room for a context of this many tokens, 1..2^31; only address space is
                            * reserved, memory is taken as it fills. AUTO: 131072 */
  uint32_t sink;        /* S; default 128; 0 allowed */
  uint32_t window;      /* W >= 1; default 512 */
  uint32_t flush_block; /* the window overflows in blocks of this many tokens; AUTO: 64 */
  const char* index;    /* e.g. "ivf:C=1024,probe=32"; NULL: "flat". Copied. keyhole_index_help()
                            * lists the types */
  uint32_t top_k;       /* keys that the index returns per query head; default 100 */
  keyhole_mode mode;
  const uint32_t* dense_layers; /* layers with exact attention; copied; NULL: none */
  uint32_t dense_layer_count;
  uint32_t append_block; /* pending tokens of a layer are added to its built index in blocks of this
                            * many (more after a prefill); see PENDING TOKENS. AUTO: 1024 */
  uint32_t training_queries; /* prefill queries kept per KV head to guide index types that want them
                            * (evenly spread over the prompt, all heads of the group in turn); 0: none,
                            * default 4096 */
  size_t host_memory_limit; /* bytes of host memory that this session may take for K, V, indexes and
                            * buffers; 0: no limit. A prefill, attend or build that would pass it
                            * returns OUT_OF_MEMORY first */
  keyhole_attend_mode attend; /* default KEYHOLE_ATTEND_TOPK */
  float min_weight;           /* of KEYHOLE_ATTEND_WEIGHT, > 0 and < 1; AUTO: 1e-4 */
  keyhole_append_mode append_mode;
  /* The budget of every head, see keyhole_budget; top_k, attend and min_weight above belong to it too. */
  keyhole_tail_mode tail; /* default KEYHOLE_TAIL_NONE */
  float error_target;     /* 0: none */
  float mass_target;      /* 0: none */
  uint32_t min_keys;      /* see keyhole_budget */
  uint32_t max_keys;
  uint32_t tail_partition; /* keys per partition of the tail, 4..1024; AUTO: 16 */
  const char*
      budgets; /* path of a file that `keyhole calibrate` wrote for this model: index and budget
                            * of every head it names, in place of those above. Read when the session is
                            * made. NULL: none. Copied */
  double
      audit_share; /* share of (step, layer, KV head) that is audited, 0..1; 0: none. See AUDIT */
  keyhole_audit_action audit_action;
  float audit_bound; /* output error that audit_action and keyhole_audit.over_bound are about; AUTO:
                            * 1.5 * error_target of the head, or 0.1 without one */
  size_t
      device_memory_limit; /* bytes of device memory that this session may take; 0: what there is. A session,
                            * build or call that would pass it returns OUT_OF_DEVICE_MEMORY first */
  keyhole_placement
      partitions; /* where the partitions of tails are scored in stream steps, see STREAM STEPS */
} keyhole_session_config;

KEYHOLE_API void keyhole_session_config_init_sized(keyhole_session_config* config, size_t size);
static inline void keyhole_session_config_init(keyhole_session_config* config) {
  keyhole_session_config_init_sized(config, sizeof *config);
}

/* PENDING TOKENS. Once a layer's index is built, tokens that leave the window are pending, attended exactly,
 * until a step takes them in. The offloaded tokens of layer l are cut into blocks of append_block, the cuts
 * of layer l shifted by l * append_block / layers so that layers take turns:
 *   - the step that finds tokens beyond the next cut begins a block: all that are pending then;
 *   - the step that finds tokens beyond the cut after that takes the block in, and begins the next.
 * In between, which is append_block steps, the block is worked out by a background thread (one per session,
 * started with the first block); searches never wait for it. A step that comes to take in a block which is
 * not finished does the rest itself on the engine's threads: that is the back-pressure. It is counted in
 * keyhole_statistics (append_waits, append_wait_seconds) and logged, the 1st, 2nd, 4th, 8th ... time. So a
 * layer that is only decoded never has more than 2 * append_block + flush_block pending tokens, and which
 * tokens a step finds in the index depends on the calls alone, never on how fast a thread was.
 * A block that fails (out of memory) is logged; its tokens stay pending and are tried again.
 * keyhole_build, keyhole_session_set_index and a keyhole_truncate into a block's tokens cancel it. Until it
 * is taken in, a block takes memory that no figure includes: of hnsw a second copy of the graph. */

/* AUDIT. With audit_share > 0 a share of all (step, layer, KV head), chosen by a hash of the three, is computed
 * again exactly, from all tokens that the step could have attended to: the output error, the recovered mass
 * (softmax weight of what was read), recall and the estimated beside the true weight of what was not read.
 * keyhole_get_audit() tells. An audit reads all offloaded K and V of its head once, some 2 ms at 32k tokens of
 * d = 128; a background thread does it (one per session, started with the first audit, of the lowest priority
 * that there is: it runs where a core is idle). Steps leave 16 audits behind, or 2 * kv_heads where that is
 * more, and go on; the step that finds no room for another does those itself on the engine's threads
 * (keyhole_audit.waits). So which steps are audited depends on the calls alone, and so do the figures, but for
 * waits and seconds.
 *   audit_action says what follows where an audit finds an error above audit_bound in a query head of a KV head
 * that has searched its index. It takes effect 16 steps of that layer after the step that was audited; that step
 * waits for the audit if it must, so that all answers depend on the calls alone, too. WIDEN multiplies top_k,
 * min_keys and max_keys by 2, 4, 8, 16, and divides min_weight, error_target and 1 - mass_target by as much:
 * audits of steps in between count once. The 1st, 2nd, 4th, 8th ... time is logged. A head falls back to its budget where a call changes the budget, and in
 * keyhole_session_set_index.
 *   keyhole_truncate, keyhole_save and keyhole_fork finish audits under way first; copies keep what actions have
 * done, and begin with no figures. */

/* BUDGETS FILES. JSON, by `keyhole calibrate` or by hand:
 *   {"keyhole_budgets": 1, "model": {"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
 *    "tail_partition": 16,
 *    "heads": [{"layer": "all", "kv_head": "all", "index": "ivf:probe=32", "top_k": 100},
 *              {"layer": 4, "kv_head": 1, "attend": "weight", "min_weight": 1e-4, "tail": "second",
 *               "error_target": 0.05, "mass_target": 0, "min_keys": 0, "max_keys": 0},
 *              {"layer": 0, "kv_head": "all", "dense": true}]}
 * Entries are taken in order, and each sets the fields that it names: those of keyhole_budget by the same
 * names, attend being topk, scored, weight or none, tail none, mean, centroid or second; "index" is a spec; "dense"
 * heads are attended exactly, like dense layers. What no entry names stays as the config has it.
 * "tail_partition", "target", "machine", "made_by" and, of a head, "measured" may be left out. */

/* Makes an empty session. INVALID_ARGUMENT names the field (and what the index spec allows). Of `budgets`:
 * IO where the file cannot be read; CORRUPT where it is no such file (wrong words, types, unknown or repeated
 * keys), VERSION_MISMATCH for another format, INVALID_ARGUMENT for another model's and for values that no
 * budget may have; the text begins with the path. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_create(
    keyhole_engine* engine, const keyhole_session_config* config, keyhole_session** out);
/* Accepts NULL. Must not be called while another thread is inside the session. */
KEYHOLE_API void keyhole_session_destroy(keyhole_session* session);
/* Reads the values in effect. `index` and `dense_layers` point into the session and are valid until
 * the next call that changes them. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_config(const keyhole_session* session, keyhole_session_config* config);

/* Changes the index type of every head, also of those that a budgets file made dense: drops the built
 * indexes; all offloaded tokens are pending (attended exactly) until the next keyhole_build. A bad spec changes
 * nothing. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_index(keyhole_session* session,
                                                                      const char* index);
/* Changes mode and top_k (1..max_tokens; 0: keep) for the following steps. May allocate. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_mode(keyhole_session* session,
                                                                     keyhole_mode mode,
                                                                     uint32_t top_k);

/* Changes what is attended of an index search, and min_weight (> 0 and < 1; 0: keep), for the following
 * steps. top_k keeps its meaning for the search itself: index types whose effort grows with it score more
 * keys. May allocate. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_attend(keyhole_session* session,
                                                                       keyhole_attend_mode attend,
                                                                       float min_weight);

/* How much of a KV head's indexed keys a step reads, and what stands in for the rest. */
typedef struct keyhole_budget {
  size_t struct_size;
  uint32_t top_k; /* keys that the search is asked for per query head, >= 1; default 100 */
  keyhole_attend_mode attend; /* which of the keys that it came upon are attended */
  float min_weight;           /* of KEYHOLE_ATTEND_WEIGHT; AUTO: 1e-4 */
  keyhole_tail_mode tail;
  /* Targets: after the search, the step reads more partitions of the tail, the most uncertain first, until
   * what it estimates of each query head's attention (resident tokens included) is good enough:
   * the output error |o - o*| / |o*| at most error_target, the share of the attention mass that was read
   * at least mass_target. In (0, 1); 0: no such target. Need partitions: they are kept where a head has
   * a target, whatever its tail. */
  float error_target;
  float mass_target;
  uint32_t
      min_keys; /* distinct indexed keys that a step with a tail or target attends at least; AUTO: 0 */
  uint32_t max_keys; /* and at most, beyond what the search found; AUTO: all of them */
} keyhole_budget;
KEYHOLE_API void keyhole_budget_init_sized(keyhole_budget* budget, size_t size);
static inline void keyhole_budget_init(keyhole_budget* budget) {
  keyhole_budget_init_sized(budget, sizeof *budget);
}

#define KEYHOLE_ALL UINT32_MAX

/* The budget of one head, or of all heads of a layer or KV head or of all (KEYHOLE_ALL), from the next step
 * on. Sets nothing on an error. May allocate. A head without partitions that gets a tail or a target needs a
 * keyhole_build for them (which does nothing else where all is indexed); until then it has neither. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_budget(
    keyhole_session* session, uint32_t layer, uint32_t kv_head, const keyhole_budget* budget);
/* The budget of one head, or of all that KEYHOLE_ALL names: INVALID_ARGUMENT where these differ. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_get_budget(
    const keyhole_session* session, uint32_t layer, uint32_t kv_head, keyhole_budget* budget);

/* Appends n tokens of the prompt to one layer.
 *   k, v  `[n, Hkv, d]`, any dtype (converted to kv_dtype), host, pinned or, with a CUDA device, device memory
 *         (then everything on the session's stream before the call has to be done with, and the call waits for it;
 *         strides: heads side by side with tokens that do not overlap, or all rows equally far apart)
 *   q     `[n, Hq, d]` or NULL: queries of the same tokens, a sample of which guides the index
 * Layers are independent: all of layer 0 may come before layer 1. May follow decoding steps. The tokens
 * are attendable at once (pending until keyhole_build). On an error nothing is appended.
 * Errors: INVALID_ARGUMENT (layer, shape, dtype; more than max_tokens), NOT_FINITE (names tensor, token,
 * head), OUT_OF_MEMORY, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_prefill(keyhole_session* session,
                                                            uint32_t layer, const keyhole_tensor* k,
                                                            const keyhole_tensor* v,
                                                            const keyhole_tensor* q);

/* Brings every pending token of every layer into the index: builds where there is none yet, appends
 * where there is one. Does nothing for dense layers. May be called at any time. On CANCELLED or another
 * error, heads that were finished keep their index, the others stay pending: nothing is lost, and the
 * call can be repeated. progress may be NULL.
 *
 * A CUDA device helps with large builds (exact neighbours, k-means), in workspaces of at most 3 GB (1 GB
 * for 128k keys of d = 128) that are taken beside all plans and limits and given back at the end. Where there
 * is no room for them the host does it all, and the log says so. What a device has helped to build can differ
 * from what the host builds alone as far as scores are equal up to rounding; either is the same each time. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_build(keyhole_session* session,
                                                          keyhole_progress_fn progress, void* user);

/* One decoding step of one layer: appends the token's K and V, then attends to all tokens including it.
 *   q    `[Hq, d]`, any dtype
 *   k, v `[Hkv, d]`; both NULL: attend without appending
 *   out  `[Hq, d]`, any dtype
 *   lse  NULL, or Hq floats: log-sum-exp of the logits of all tokens attended
 * In steady state allocates nothing (a step that begins or takes in a block of pending tokens may).
 * Errors: as keyhole_prefill; INVALID_ARGUMENT for a layer without any token. On an error nothing is
 * appended and out is unspecified. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_attend(keyhole_session* session, uint32_t layer,
                                                           const keyhole_tensor* q,
                                                           const keyhole_tensor* k,
                                                           const keyhole_tensor* v,
                                                           const keyhole_tensor* out, float* lse);

/* The same in two halves: begin appends, publishes q and starts the work; the caller may do other work;
 * end waits and writes the result. Between the two every other call into the session that changes it
 * returns BUSY. q is copied by begin. If begin fails there is no end to call. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_attend_begin(keyhole_session* session,
                                                                 uint32_t layer,
                                                                 const keyhole_tensor* q,
                                                                 const keyhole_tensor* k,
                                                                 const keyhole_tensor* v);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_attend_end(keyhole_session* session,
                                                               const keyhole_tensor* out,
                                                               float* lse);

/* STREAM STEPS. With a CUDA device, keyhole_attend and keyhole_attend_begin/_end also take q, k, v and out in
 * device memory (KEYHOLE_DEVICE, all of them; `lse` is then a device pointer too). The step is enqueued on the
 * session's stream and the call returns: neither waits for the other. A thread of the session's own takes q when it
 * is there, searches on the engine's threads, and hands its states back; the stream goes on when it has them. So a
 * decoder enqueues a whole token - projections, attend, MLP, layer after layer - and waits once.
 *   Errors that come later (NOT_FINITE, TIMEOUT, DEVICE_ERROR, OUT_OF_MEMORY) are returned by the next call that
 * takes the session, at the latest by keyhole_session_synchronize; outputs since then are NaN or unspecified. The
 * session takes no more steps, for its device and the host may disagree; it can still be saved and forked, which copy
 * what all was complete, and the copy (truncated to what all layers hold) goes on.
 *   A caller may be one token ahead of the host: a step of a layer waits, on the calling thread, for the host's part of
 * that layer's step before. Targets (error_target, mass_target) are relative to the offloaded tokens alone, and steps
 * on a stream are not audited: their outputs do not pass the host.
 *   All other calls into the session first wait for the steps that are enqueued. Between attend_begin and attend_end
 * of a stream step other layers may not begin.
 *   GRAPHS. With KEYHOLE_SIGNAL_WAIT the calls can be captured in a CUDA graph (cudaStreamBeginCapture on the
 * session's stream, one or more steps, end): what is captured does not happen then. Before each launch of the graph
 * call keyhole_session_announce: it tells the session's thread that the captured steps are about to come. A graph
 * stays valid until the session's mode or stream changes, or the heads whose partitions are scored on the device do
 * (by an index, a budget, or growth beyond the device memory that was taken for them): _announce then says that it
 * must be captured again. Each capture replaces the one before it, also where that failed. A graph holds at most 4096
 * steps, and both halves of a step belong to the same one. Call keyhole_session_synchronize before a capture. Within
 * it steps with tensors in device memory can be enqueued, and counts, figures and settings be read; all other calls
 * return BUSY, and leave session and capture as they are.
 *   PARTITIONS. Heads whose budget has KEYHOLE_ATTEND_NONE, a tail of CENTROID or SECOND, and min_keys (no targets)
 * can have their partitions scored on the device (config.partitions): it chooses min_keys keys' worth of partitions,
 * lets the others stand for their keys, and the host reads just the chosen ones. A device chooses at most 1024: the
 * partitions of a head that wants more of them than that stay on the host. */

/* The cudaStream_t on which the session's steps are enqueued from now on; NULL: the default stream. Waits for steps
 * on the old one. UNSUPPORTED on a host device. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_stream(keyhole_session* session,
                                                                       void* stream);
/* Announces one launch of the graph that was captured last on the session's stream; call it just before the launch.
 * INVALID_ARGUMENT: nothing was captured, a call failed meanwhile, the session has changed since, or the graph's
 * tokens would pass max_tokens. Nothing is announced then. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_announce(keyhole_session* session);
/* Waits until all steps that were enqueued or announced are done, and returns the first error among them. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_synchronize(keyhole_session* session);

/* Forgets all tokens >= n_tokens, in every layer. Offloaded tokens stay offloaded: the window may be
 * shorter than W until it has filled again. n_tokens above a layer's count leaves that layer alone. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_truncate(keyhole_session* session,
                                                             uint32_t n_tokens);

/* An independent copy of the session (K, V, resident tokens); its indexes are rebuilt from the saved
 * form, so both answer alike. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_fork(keyhole_session* session,
                                                         keyhole_session** out);

/* Writes the session to a file: shape, config, K, V and indexes, with magic, format version and
 * checksums. save writes PATH.tmp and renames it: an old file is never damaged. load makes a session of
 * an engine with the same shape and kv_dtype. Errors: IO, CORRUPT, VERSION_MISMATCH, INVALID_ARGUMENT. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_save(keyhole_session* session,
                                                         const char* path);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_load(keyhole_engine* engine, const char* path,
                                                         keyhole_session** out);

/* Tokens that a layer holds: all, and how many of them are resident, indexed, pending (they add up). */
typedef struct keyhole_layer_tokens {
  size_t struct_size;
  uint32_t total, sink, window, indexed, pending;
} keyhole_layer_tokens;
KEYHOLE_API void keyhole_layer_tokens_init_sized(keyhole_layer_tokens* tokens, size_t size);
static inline void keyhole_layer_tokens_init(keyhole_layer_tokens* tokens) {
  keyhole_layer_tokens_init_sized(tokens, sizeof *tokens);
}
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_get_layer_tokens(const keyhole_session* session,
                                                                     uint32_t layer,
                                                                     keyhole_layer_tokens* tokens);

/* Sums over the life of the session (or since reset), for all layers. */
typedef struct keyhole_statistics {
  size_t struct_size;
  uint64_t attends;        /* layer steps done */
  uint64_t keys_scored;    /* by indexes: (key, query head) pairs */
  uint64_t keys_offered;   /* indexed tokens x query heads: the scan fraction's denominator */
  uint64_t keys_attended;  /* offloaded tokens x query heads that entered an attention state */
  uint64_t bytes_read;     /* by searches and offloaded attention, host memory */
  double attend_seconds;   /* wall time of attends, begin to end */
  double search_seconds;   /* worker time in index searches */
  double offload_seconds;  /* worker time in attention over offloaded tokens */
  double resident_seconds; /* worker time in resident attention (host device) */
  double append_seconds;   /* time in appends of K and V, flushes and index appends in attends */
  double build_seconds;    /* wall time of keyhole_build */
  /* Not sums: the state now. */
  uint64_t tokens;       /* of the longest layer */
  uint64_t host_bytes;   /* K, V, indexes, training queries, buffers */
  uint64_t index_bytes;  /* of which indexes */
  uint64_t device_bytes; /* resident K and V (host memory on a host device) */
  const char* device;    /* e.g. "host"; static */
  const char* cpu_level; /* e.g. "avx512vnni"; static */
  uint32_t threads;
  /* Sums again. */
  uint64_t append_blocks; /* blocks of pending tokens that steps took into the index of a layer */
  uint64_t append_waits;  /* of which came too early: the step had to finish the block itself */
  double append_wait_seconds; /* time that this took (contained in append_seconds) */
  double background_seconds;  /* time of the background thread in blocks that are over */
  uint64_t tail_bytes;        /* not a sum: of index_bytes, the partitions of the tails */
  double tail_seconds;  /* worker time in estimates of what was not read (within search_seconds) */
  uint64_t keys_opened; /* distinct keys read to meet a target, beyond what the search found */
  uint64_t
      targets_missed; /* (head, step) that stopped at max_keys with a target unmet, by the estimate */
  uint64_t stream_steps; /* of attends: enqueued on a stream */
  double
      device_wait_seconds; /* time that the stream stood still for the host: what overlap did not hide */
  double serve_seconds; /* of stream steps: from the arrival of q to the last state handed back */
  /* Not sums: */
  uint64_t pinned_bytes;                       /* exchange between host and device */
  uint64_t partition_bytes;                    /* of device_bytes: partitions of tails */
  uint64_t device_bytes_peak, host_bytes_peak; /* since the session was made */
  const char* signal;                          /* "wait", "launch"; "" on a host device; static */
} keyhole_statistics;
KEYHOLE_API void keyhole_statistics_init_sized(keyhole_statistics* statistics, size_t size);
static inline void keyhole_statistics_init(keyhole_statistics* statistics) {
  keyhole_statistics_init_sized(statistics, sizeof *statistics);
}
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_get_statistics(const keyhole_session* session,
                                                                   keyhole_statistics* statistics);
/* Sets the sums to 0, and the figures of audits. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_reset_statistics(keyhole_session* session);

/* What audits have found since the session was made or its statistics were reset, see AUDIT; of one head or of
 * all of a layer, KV head or model (KEYHOLE_ALL). Errors and masses are per query head. Quantiles come from a
 * histogram of 64 steps per factor of 10, so they are right within 4 % (mass_p05: it, and what it lacks to 1).
 * 0 where nothing was audited. */
typedef struct keyhole_audit {
  size_t struct_size;
  uint64_t
      audits; /* (step, layer, query head) that were recomputed: the group's heads for each KV head */
  uint64_t waits; /* (step, layer, KV head) whose audit a step had to wait for, and made itself */
  uint64_t over_bound; /* of audits: output error above audit_bound */
  uint64_t actions;    /* times that audit_action took effect on a KV head */
  double error_mean, error_median, error_p95,
      error_max; /* |o - o*| / |o*| of the step's output before it
                                * is written to the caller's dtype; 1 where only o* is 0 */
  double mass_mean,
      mass_p05; /* share of the attention mass that was read, resident and pending included */
  double
      recall; /* mean share of the true top_k offloaded keys (of all, where there are fewer) that were
                  * attended by the group, pending ones included; of audits that had offloaded keys */
  double missing_mean; /* true mass of what was not read, 1 - mass, mean */
  double
      estimated_missing_mean; /* the tail's estimate of it when the step ended; 0 without tail or target */
  double missing_error_mean; /* mean |estimated - true| of single steps */
  double seconds;            /* time spent on audits, all threads */
} keyhole_audit;
KEYHOLE_API void keyhole_audit_init_sized(keyhole_audit* audit, size_t size);
static inline void keyhole_audit_init(keyhole_audit* audit) {
  keyhole_audit_init_sized(audit, sizeof *audit);
}
/* Finishes the audits under way first, on the engine's threads; so call it seldom. All 0 for a session without
 * audits. INVALID_ARGUMENT: layer or kv_head; BUSY: between attend_begin and attend_end. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_get_audit(keyhole_session* session,
                                                              uint32_t layer, uint32_t kv_head,
                                                              keyhole_audit* audit);

/* ---- Plan: memory before anything is allocated ----------------------------------------------------- */

typedef struct keyhole_memory_plan {
  size_t struct_size;
  uint64_t kv_bytes;     /* all K and V at this context */
  uint64_t host_bytes;   /* offloaded K and V + indexes + training queries + buffers */
  uint64_t index_bytes;  /* of which indexes */
  uint64_t device_bytes; /* resident K and V + work space on the device */
  uint64_t pinned_bytes; /* exchange buffers between host and device; 0 on a host device */
  uint32_t fits;         /* 1 if device_bytes + pinned_bytes and host_bytes are within the limits */
  uint32_t longest_context; /* the most tokens that fit both limits, up to 2^31; 0 if none does */
} keyhole_memory_plan;
KEYHOLE_API void keyhole_memory_plan_init_sized(keyhole_memory_plan* plan, size_t size);
static inline void keyhole_memory_plan_init(keyhole_memory_plan* plan) {
  keyhole_memory_plan_init_sized(plan, sizeof *plan);
}

/* Memory that a session of this shape takes at `context` tokens. Needs no engine, GPU or memory.
 * Limits in bytes, 0: none; device_limit is what is left for Keyhole after the weights. On a host device
 * device_bytes count against host_limit as well. Uses the shape, kv_dtype and device of `engine` and sink,
 * window, flush_block, index, top_k, attend, tail_partition, budgets, dense_layers, training_queries, audit_share
 * and audit_action of `session` (NULL: defaults). Errors: INVALID_ARGUMENT, also where a size passes 2^63; those of
 * the budgets file. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_plan(const keyhole_engine_config* engine,
                                                         const keyhole_session_config* session,
                                                         uint64_t context, uint64_t device_limit,
                                                         uint64_t host_limit,
                                                         keyhole_memory_plan* plan);

/* ---- Attention states ------------------------------------------------------------------------------ */

/* Merges n states by log-sum-exp, for embedders with attention kernels of their own.
 *   o   n pointers to `[heads, d]` fp32;  lse  n pointers to `[heads]` fp32 (-inf: empty)
 *   out `[heads, d]`, out_lse `[heads]`; may be one of the inputs
 * fp32, in the order given; empty sets give no NaN; n = 0 gives (0, -inf). */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_merge_states(uint32_t n, const float* const* o,
                                                                 const float* const* lse,
                                                                 uint32_t heads, uint32_t head_dim,
                                                                 float* out, float* out_lse);

/* ---- One index by itself, to compare types on recorded keys ----------------------------------------- */

typedef struct keyhole_index keyhole_index;

/* Text that lists every index type with its parameters, defaults and allowed values. Static. */
KEYHOLE_API const char* keyhole_index_help(void);

/* An empty index over the keys of one KV head, on the engine's threads and kernels. head_dim, scale,
 * softcap and RoPE are the engine's. layer and kv_head, below those of the engine's shape, say where in the
 * model the head stands: an index type with trained data uses that of its place. One thread at a time
 * (searches too). Keeps its engine alive. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_create(keyhole_engine* engine,
                                                                 const char* spec, uint32_t layer,
                                                                 uint32_t kv_head,
                                                                 keyhole_index** out);
KEYHOLE_API void keyhole_index_destroy(keyhole_index* index);

/* Builds over keys `[n, d]` (any dtype; copied to kv_dtype with values `[n, d]`; values may be NULL if
 * keyhole_index_attend is not used). training_queries `[m, d]` or NULL with their token positions
 * (NULL: unknown); first_position is the token position of keys[0]. progress may be NULL. Replaces an
 * earlier build; on an error the index is empty. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_index_build(keyhole_index* index, const keyhole_tensor* keys, const keyhole_tensor* values,
                    const keyhole_tensor* training_queries, const uint32_t* training_positions,
                    uint32_t first_position, keyhole_progress_fn progress, void* user);

/* Gives a built index other search parameters, without building it again: `spec` must agree with the
 * index's in its type and in all parameters that a build fixes (INVALID_ARGUMENT names the first that does
 * not, and nothing changes). Before the build any spec will do. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_set_spec(keyhole_index* index,
                                                                   const char* spec);

/* Partitions the keys of a built index for tails and targets, `keys_per_partition` (4..1024; AUTO: 16) keys
 * each; the index must have values. Replaces earlier ones. progress may be NULL. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_build_tail(keyhole_index* index,
                                                                     uint32_t keys_per_partition,
                                                                     keyhole_progress_fn progress,
                                                                     void* user);

#define KEYHOLE_POSITION_UNKNOWN UINT32_MAX

/* How an index is searched, and what of it is attended. */
typedef struct keyhole_search_options {
  size_t struct_size;
  uint32_t k; /* keys wanted per query, >= 1; default 100. More than there are is allowed */
  keyhole_attend_mode attend; /* keyhole_index_attend only; default KEYHOLE_ATTEND_TOPK */
  float min_weight;           /* of KEYHOLE_ATTEND_WEIGHT, > 0 and < 1; AUTO: 1e-4 */
  uint32_t position; /* token position of the queries, from which an index can undo their RoPE;
                               * default KEYHOLE_POSITION_UNKNOWN */
  /* keyhole_index_attend only, as in keyhole_budget. Other than NONE and 0 need keyhole_index_build_tail. */
  keyhole_tail_mode tail;
  float error_target, mass_target;
  uint32_t min_keys, max_keys;
  /* What error and mass targets are about beside the index's keys: the states of everything else that the
   * queries attend to, o `[g, d]`, lse `[g]`. NULL: nothing else. */
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
  uint64_t keys_scored; /* (key, query head) pairs */
  uint64_t bytes_read;
  uint32_t keys_attended; /* distinct keys in the state (attend only) */
  /* keyhole_index_attend with a tail or a target: */
  uint32_t keys_opened;     /* of keys_attended: read to meet a target */
  uint64_t tail_bytes_read; /* of bytes_read: means and variances of partitions */
  double tail_seconds;      /* time spent on estimates */
  float missing
      [16]; /* [g] estimated share of the attention mass that was not read, other_lse included */
  float error[16]; /* [g] estimated output error, |o - o*| / |o*| */
} keyhole_search_cost;
KEYHOLE_API void keyhole_search_cost_init_sized(keyhole_search_cost* cost, size_t size);
static inline void keyhole_search_cost_init(keyhole_search_cost* cost) {
  keyhole_search_cost_init_sized(cost, sizeof *cost);
}

/* The keys of largest inner product for each of g queries `[g, d]`, g 1..16.
 *   options NULL: the defaults. k is the width of the arrays
 *   ids `[g, k]` best first, scores `[g, k]` inner products (NULL: not wanted), counts `[g]` found
 * Single-threaded on the caller. k above the number of keys is allowed: counts tell. cost may be NULL. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_search(
    keyhole_index* index, const keyhole_tensor* queries, const keyhole_search_options* options,
    uint32_t* ids, float* scores, uint32_t* counts, keyhole_search_cost* cost);

/* Search, then partial attention of all g heads over the keys that options->attend takes from it: what a
 * decoding step does for one KV head. o `[g, d]`, lse `[g]` fp32.
 *   rows, row_count  the distinct keys attended, in no particular order; *rows points into the index and
 *                    is valid until its next call. Either may be NULL.
 * With a tail, (o, lse) is the state of the keys that were read merged with that of the tail. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_attend(
    keyhole_index* index, const keyhole_tensor* queries, const keyhole_search_options* options,
    float* o, float* lse, const uint32_t** rows, uint32_t* row_count, keyhole_search_cost* cost);

typedef struct keyhole_index_info {
  size_t struct_size;
  uint64_t keys;
  uint64_t bytes; /* held by the index beside K and V */
  double build_seconds;
  const char* params;      /* the effective spec; valid until the next build or destroy */
  const char* diagnostics; /* JSON object of numbers, e.g. {"mean_degree": 14.2}; valid as params */
  uint64_t tail_bytes;     /* held by the partitions of keyhole_index_build_tail */
  double tail_build_seconds;
} keyhole_index_info;
KEYHOLE_API void keyhole_index_info_init_sized(keyhole_index_info* info, size_t size);
static inline void keyhole_index_info_init(keyhole_index_info* info) {
  keyhole_index_info_init_sized(info, sizeof *info);
}
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_index_get_info(const keyhole_index* index,
                                                                   keyhole_index_info* info);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_KEYHOLE_H_ */
