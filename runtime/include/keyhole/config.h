/* Keyhole: what an engine and a session are made by, field by field. keyhole/keyhole.h includes this header, and its
 * opening comment (words, shapes, structs) holds here.
 */
#ifndef KEYHOLE_CONFIG_H_
#define KEYHOLE_CONFIG_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KEYHOLE_API __attribute__((visibility("default")))
#define KEYHOLE_MUST_USE __attribute__((warn_unused_result))
#else
#define KEYHOLE_API
#define KEYHOLE_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The library chooses. */
enum { KEYHOLE_AUTO = 0 };

typedef int32_t keyhole_dtype;
enum { KEYHOLE_F32 = 0, KEYHOLE_F16 = 1, KEYHOLE_BF16 = 2 };

/* Several ranks that work together: keyhole/parallel.h. */
typedef struct keyhole_communicator keyhole_communicator;
/* One layer of a model whose layers differ: keyhole/layers.h. */
typedef struct keyhole_layer_config keyhole_layer_config;

/* ---- An engine: the model's shape, device, threads, kernels ------------------------------------ */

enum { KEYHOLE_LOG_DEBUG = 0, KEYHOLE_LOG_INFO = 1, KEYHOLE_LOG_WARNING = 2 };
/* Receives messages instead of a terminal. May be called from any thread, those of the library included, and from
 * several at once; must not call back into the library. `text` is valid during the call. */
typedef void (*keyhole_log_fn)(void* user, int32_t level, const char* text);

typedef int32_t keyhole_device;
enum {
  /* A CUDA device of compute capability 8.0 or higher where this build and machine have one and it takes the model's
   * shape, else the host. The log says which. */
  KEYHOLE_DEVICE_AUTO = 0,
  /* Resident tokens lie in host memory; the worker pool computes them. */
  KEYHOLE_DEVICE_HOST = 1,
  /* UNSUPPORTED where there is none, or none for the model's shape. */
  KEYHOLE_DEVICE_CUDA = 2
};

/* How the device's stream learns that the host's part of a step is done. */
typedef int32_t keyhole_signal;
enum {
  KEYHOLE_SIGNAL_AUTO = 0,
  /* A kernel waits for the host's flags: a few microseconds; can be captured in a graph. */
  KEYHOLE_SIGNAL_WAIT = 1,
  /* The caller's thread waits and then launches the merge: for systems that run one kernel at a time
   * (CUDA_LAUNCH_BLOCKING, sanitizers, WDDM). */
  KEYHOLE_SIGNAL_LAUNCH = 2
};

typedef int32_t keyhole_rope_scaling;
enum {
  KEYHOLE_ROPE_NONE = 0,
  KEYHOLE_ROPE_LINEAR = 1,
  KEYHOLE_ROPE_LLAMA3 = 2,
  /* arXiv:2309.00071. The factor that it puts on cos and sin is part of q and K as they come here. */
  KEYHOLE_ROPE_YARN = 3
};

/* A part of the library's parallel work: `index` of [0, count), see keyhole_run_fn. It returns when there is nothing
 * left to do, and waits for no other part. A stack of 128 KiB is enough for it. */
typedef void (*keyhole_task_fn)(void* context, uint32_t index);
/* Runs parallel work on threads of the caller's, in place of workers of the library (docs/embedding.md, Threads of the
 * caller): calls task(context, i) once for each i of [0, count), on any threads, this one among them or not, at once or
 * one after the other, and returns when all of these calls have returned. The parts share the work out among themselves
 * while they run, so that it does not matter when a thread comes: the results have the same bits.
 *   user   run_user of the engine
 *   count  from 2 to `threads` of the engine
 * It is called by threads that are in a call with the engine or an object made of it, so from several at once where
 * there are such calls at once; with a CUDA device by the thread of each session that serves steps on a stream, too. It
 * must not throw, nor call the library with the engine or its objects.
 * Why a parallel-for, and not a call by which thread ith of nth joins a step: a call of the library need not come from
 * inside a region of parallel work, no thread has to be told when the call is over, and none that stays away is waited
 * for. Who is called on nth threads at once (ggml's operations) makes this of it in some lines, which the document
 * has. */
typedef void (*keyhole_run_fn)(void* user, keyhole_task_fn task, void* context, uint32_t count);

typedef struct keyhole_engine_config {
  size_t struct_size;
  /* Required, 1..1024. */
  uint32_t layers;
  /* Required: Hq, 1..4096. */
  uint32_t q_heads;
  /* Required: Hkv, divides Hq, Hq / Hkv <= 128. A CUDA device takes groups of up to 16. */
  uint32_t kv_heads;
  /* Required: d, a multiple of 16 from 64 to 576. A CUDA device takes 64, 80, 96, 128, 256
   * and 512. */
  uint32_t head_dim;
  /* How K and V are stored; default KEYHOLE_F16. Set it to the dtype of the model's K and V: a bf16 model stored as f16
   * has every value above 65504 refused (NOT_FINITE), and an f16 model stored as bf16 loses three bits of every value.
   * The first K or V of another 16-bit dtype is logged once per session. */
  keyhole_dtype kv_dtype;
  /* Of the logits. AUTO: 1 / sqrt(d). */
  float scale;
  /* c > 0: logit = c * tanh(scale * q.k / c). 0: none. */
  float softcap;
  /* RoPE's base; 0: the model has no RoPE. */
  float rope_theta;
  keyhole_rope_scaling rope_scaling;
  /* Of linear, llama3 and yarn scaling: the factor, > 0. */
  float rope_factor;
  /* Of llama3 scaling, as in the model's config.json: the two frequency factors and original_max_position_embeddings,
   * which yarn scaling has, too. */
  float rope_low_freq_factor;
  float rope_high_freq_factor;
  uint32_t rope_original_context;
  keyhole_device device;
  /* Worker threads including the caller, up to 1024; with `run` the most parts that work is cut into for it. AUTO: one
   * per core of the process, with a CUDA device two fewer. */
  uint32_t threads;
  /* Non-zero: pin the workers to cores (the caller's thread is never moved). */
  int32_t pin_threads;
  /* Microseconds that an idle worker spins before it sleeps. AUTO: 50. */
  uint32_t spin_us;
  /* "scalar", "avx2", "avx512" or "avx512vnni"; NULL: environment variable KEYHOLE_CPU, else the best of the machine.
   * Read back: the level in use. */
  const char* cpu_level;
  /* NULL: silent. */
  keyhole_log_fn log;
  void* log_user;
  /* Path of a file that `keyhole train-saap` wrote for this model, read when the engine is made: partitions and query
   * classifiers for indexes of type saap. NULL: none. Copied. */
  const char* classifiers;
  /* Of a CUDA device alone: which of the machine's. */
  uint32_t device_ordinal;
  /* Of a CUDA device alone. AUTO: environment variable KEYHOLE_SIGNAL ("wait", "launch"), else found by a trial when
   * the session is made. */
  keyhole_signal signal;
  /* Of a CUDA device alone: milliseconds that device and host wait for each other before KEYHOLE_TIMEOUT. AUTO: 10000,
   * and with a communicator its timeout_ms more, as steps then wait for other ranks, too. */
  uint32_t timeout_ms;
  /* Learned sinks: `[layers, Hq]` (of layers of different shapes: each layer's `[Hq]` behind that of the layer before)
   * or NULL: none. Copied. A head's number is a logit s without key and value that stands in the softmax of every step
   * beside those of the tokens: with (o, lse) of the tokens, the step returns o * e^(lse - lse') and lse' =
   * ln(e^lse + e^s). Its weight counts as read in targets and audits. -inf: the head has none; NaN and +inf are
   * refused. Functions that return or merge states of some tokens (keyhole/attention.h) leave it out. */
  const float* sink_logits;
  /* `[layer_count]` or NULL: all layers are alike. Copied. See keyhole/layers.h. Each element is as long as its
   * struct_size says, all of them alike. */
  const keyhole_layer_config* layer_configs;
  /* 0 with NULL, else `layers`. */
  uint32_t layer_count;
  /* Partial RoPE: so many first components of a head are turned, an even number up to d. AUTO: d. */
  uint32_t rope_dim;
  /* Of yarn scaling: pairs that turn more than beta_fast times within the original context stay as they are, those that
   * turn less than beta_slow times are slowed down by rope_factor. AUTO: 32 and 1. */
  float rope_beta_fast;
  float rope_beta_slow;
  /* Of yarn scaling, "truncate" of config.json: 1: the borders between the two lie on whole pairs; -1: they do not.
   * AUTO: 1. */
  int32_t rope_whole_pairs;
  /* Components of values and outputs where they are fewer than those of queries and keys (multi-head latent attention),
   * a multiple of 16 up to d. AUTO: d. Where it is less, v, out and the o of states are `[.., value_dim]` in every call
   * that says d; the engine runs on the host (docs/embedding.md, Layers and sinks of a model). */
  uint32_t value_dim;
  /* 1: a token's value is the first value_dim components of its key. v is NULL then in every call that takes k. */
  int32_t values_in_keys;
  /* Sessions are spread over these ranks, see keyhole/parallel.h; NULL: over none. */
  keyhole_communicator* communicator;
  /* Of a communicator: tokens of the text that stay together on a rank, 1..2^30. AUTO: 4096. */
  uint32_t context_block;
  /* Which components of a head RoPE turns into each other. 0: i and i + rope_dim / 2 (rotate-half, as Hugging Face's
   * models and GGUF's "neox" have them); 1: 2 i and 2 i + 1 (GGUF's "norm", e.g. llama). Read where RoPE is undone
   * (saap, ivf with rope=undo) and done again (keyhole_session_remove); q and K come here after RoPE in any case. */
  int32_t rope_interleaved;
  /* Not NULL: the engine starts no workers, and parallel work runs by this function, see keyhole_run_fn. pin_threads
   * has to be 0 then, and spin_us means nothing. What goes on beside calls stays on threads of the library's own, and
   * is not cut into parts: one for each session that appends to indexes in the background (KEYHOLE_APPEND_IN_STEP:
   * none), one where audits are made, and those of a CUDA device. */
  keyhole_run_fn run;
  void* run_user;
  /* Of keyhole_plan() alone, engines take no notice of it: ten times the compute capability of the CUDA device that is
   * planned for (89: 8.9; 120: 12.0), 80..999, where that is another than this machine's. It says whether layers have
   * lists of codes there: layers whose codes the host has keep the lists that their index names. AUTO: that of the GPU
   * device_ordinal, or where there is none, of one that lacks nothing. */
  uint32_t device_capability;
} keyhole_engine_config;

/* Fills in struct_size and the defaults; the required fields become 0. */
KEYHOLE_API void keyhole_engine_config_init_sized(keyhole_engine_config* config, size_t size);
static inline void keyhole_engine_config_init(keyhole_engine_config* config) {
  keyhole_engine_config_init_sized(config, sizeof *config);
}

/* ---- A budget: what a step reads of a KV head -------------------------------------------------- */

/* Which of the keys that an index search scored are attended. */
typedef int32_t keyhole_attend_mode;
enum {
  /* The top_k best of each search, by all heads of the group. */
  KEYHOLE_ATTEND_TOPK = 0,
  /* Every key that the search scored. */
  KEYHOLE_ATTEND_SCORED = 1,
  /* Every scored key whose softmax weight among the scored keys is above min_weight for a head of the group, and the
   * heaviest key of a head where none is. Index types that score compressed keys take the weights from those scores. */
  KEYHOLE_ATTEND_WEIGHT = 2,
  /* None: nothing is searched, the tail alone decides what is read. Needs a tail or a target. */
  KEYHOLE_ATTEND_NONE = 3
};

/* What stands in for the indexed keys that a step has not attended: the tail. Beside its index, a head with a tail of
 * MEAN, CENTROID or SECOND keeps partitions of its keys. Partitions that were not read contribute an attention state
 * made of their means, merged like any other. A partition that was read in part counts with the rest of its keys. */
typedef int32_t keyhole_tail_mode;
enum {
  /* Nothing: keys that are not read have no weight. */
  KEYHOLE_TAIL_NONE = 0,
  /* One mean value for all of them (SparQ's correction). */
  KEYHOLE_TAIL_MEAN = 1,
  /* Per partition n * exp(scale * q . mean key) and the mean value (RetroInfer). A lower bound of the mass by Jensen's
   * inequality. */
  KEYHOLE_TAIL_CENTROID = 2,
  /* The same with the second-order term of the keys' variance, capped. */
  KEYHOLE_TAIL_SECOND = 3,
  /* Every key and value by its own code of a few bits, of an index of type codes; the rows that the search of the codes
   * finds are attended exactly in their place, none with KEYHOLE_ATTEND_NONE. Takes no partitions and no target. */
  KEYHOLE_TAIL_CODES = 4
};

/* How much of a KV head's indexed keys a step reads, and what stands in for the rest. Part of keyhole_session_config
 * (every head) and of keyhole_search_options, and set per head with keyhole_session_set_budget. In the config of a
 * session and in keyhole_index_attend, a budget that is as its init function left it becomes top_k 16 and tail
 * KEYHOLE_TAIL_CODES for an index of type codes. One with any field set keeps its tail: of KEYHOLE_TAIL_NONE beside
 * codes only the top_k keys count. */
typedef struct keyhole_budget {
  size_t struct_size;
  /* Keys that one search finds, 1..2^31; default 100. An index is searched by each query head of the group, so that a
   * step may attend up to top_k keys for each of them; codes (KEYHOLE_TAIL_CODES) are searched once for the KV head, at
   * most 1024. */
  uint32_t top_k;
  /* Default KEYHOLE_ATTEND_TOPK. */
  keyhole_attend_mode attend;
  /* Of KEYHOLE_ATTEND_WEIGHT, > 0 and < 1. AUTO: 1e-4. */
  float min_weight;
  /* Default KEYHOLE_TAIL_NONE. */
  keyhole_tail_mode tail;
  /* Targets, each in (0, 1); 0: no such target. After the search the step reads more partitions of the tail, those with
   * the largest uncertainty first, until its estimate for every query head (resident tokens included; in stream steps
   * the offloaded tokens alone) is good enough: the output error |o - o*| / |o*| at most error_target, the share of the
   * attention mass that was read at least mass_target. A head with a target keeps partitions, with or without a
   * tail. */
  float error_target;
  float mass_target;
  /* A step with a tail or a target attends at least so many distinct indexed keys. AUTO: 0. */
  uint32_t min_keys;
  /* And at most so many, beyond those that the search found; at least min_keys. AUTO: all. */
  uint32_t max_keys;
  /* 0. Fields that later versions add take their place here, so that the structs around a budget keep their layout.
   * Other bytes than 0: VERSION_MISMATCH. */
  uint8_t reserved[24];
} keyhole_budget;
KEYHOLE_API void keyhole_budget_init_sized(keyhole_budget* budget, size_t size);
static inline void keyhole_budget_init(keyhole_budget* budget) {
  keyhole_budget_init_sized(budget, sizeof *budget);
}

/* ---- A session: one sequence ------------------------------------------------------------------- */

typedef int32_t keyhole_mode;
enum {
  /* Resident and pending tokens exactly, indexed tokens through the index. */
  KEYHOLE_MODE_INDEXED = 0,
  /* Everything exactly: the truth for tests, audits and dense layers. */
  KEYHOLE_MODE_EXACT = 1,
  /* Sink and window only (StreamingLLM); offloaded tokens are kept and not read. */
  KEYHOLE_MODE_RESIDENT = 2
};

/* Where the codes of offloaded tokens lie (docs/embedding.md, Codes on the device). */
typedef int32_t keyhole_placement;
enum {
  /* On the device where there is one and device_memory_limit suffices, else on the host; codes of as many layers as it
   * suffices for, and pinned_memory_limit (but see exact_rows_by). */
  KEYHOLE_PLACE_AUTO = 0,
  KEYHOLE_PLACE_HOST = 1,
  /* On the device, or the call fails: with INVALID_ARGUMENT where it is the host, or no layer is attended by codes. */
  KEYHOLE_PLACE_DEVICE = 2
};

/* Who reads the offloaded tokens that a step over codes on a CUDA device attends exactly. The answers have the same
 * bits, but of heads in doubt (codes_doubted of keyhole_statistics), of which the device reads more tokens and the host
 * does not, of codes in lists, among which steps choose where the device reads, and of many tokens at once, which
 * attend codes then. See docs/embedding.md, Rows that the host reads. */
typedef int32_t keyhole_rows_by;
enum {
  /* The device, where memory of all layers' tokens can be pinned for it; else the host. */
  KEYHOLE_ROWS_BY_AUTO = 0,
  /* The device by itself, over the bus, from pinned memory: no host thread is in a step's path. Layers whose memory
   * cannot be pinned are attended by the host. */
  KEYHOLE_ROWS_BY_DEVICE = 1,
  /* A thread of the session, which every step waits for; next to nothing is pinned. */
  KEYHOLE_ROWS_BY_HOST = 2
};

/* How K and V of offloaded tokens lie in host memory. */
typedef int32_t keyhole_kv_host;
enum {
  /* As they come: in the engine's kv_dtype. */
  KEYHOLE_KV_HOST_SAME = 0,
  /* In int8 with a scale for every 256 tokens and channel, half the memory of 16 bits (docs/choosing.md, K and V in
   * int8). flush_block is a multiple of 256 then. A truncation that cuts a block of 256 returns what is left of it to
   * the window, rounded as it is; it is rounded again when it leaves once more. */
  KEYHOLE_KV_HOST_INT8 = 1
};

/* Which thread brings tokens that leave the window into an index. Same results either way, bit for bit. */
typedef int32_t keyhole_append_mode;
enum {
  /* A thread of the session's own, while steps go on. */
  KEYHOLE_APPEND_BACKGROUND = 0,
  /* The step that takes a block in, on the engine's threads. */
  KEYHOLE_APPEND_IN_STEP = 1
};

/* What the library does when an audit finds more error than audit_bound (docs/choosing.md, Audits). */
typedef int32_t keyhole_audit_action;
enum {
  /* Counts it, which is all that steps on a stream do. */
  KEYHOLE_AUDIT_REPORT = 0,
  /* Counts it and doubles what the head reads, up to 16 times its budget. */
  KEYHOLE_AUDIT_WIDEN = 1,
  /* Counts it and attends everything exactly from then on (this head). */
  KEYHOLE_AUDIT_EXACT = 2
};

typedef struct keyhole_session_config {
  size_t struct_size;
  /* The longest context that the session can hold, in tokens, 1..2^31. Only address space is reserved; memory is taken
   * as tokens arrive. AUTO: 131072. */
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
  /* Spec of every head's index, e.g. "ivf:C=1024,probe=32"; keyhole_index_help() of keyhole/index.h lists the types.
   * NULL or "auto": codes of all tokens and the heaviest of them exactly, on a CUDA device with the most bits (4 or 2)
   * that device_memory_limit, or half of the memory that is free, has room for, of as many layers as it has room for;
   * on the host with 4 bits, in lists of which a step reads at least 12 % of the tokens and 8,192; up to 8,192
   * offloaded tokens are attended exactly there. "exact": mode KEYHOLE_MODE_EXACT, and the type flat, which builds
   * nothing. keyhole_session_get_config() tells. Copied. */
  const char* index;
  /* Of every head that `budgets` does not name. */
  keyhole_budget budget;
  /* Keys per partition of the tail, 4..1024. AUTO: 16. */
  uint32_t tail_partition;
  /* Where codes lie. What has no codes is the host's. */
  keyhole_placement offload_placement;
  /* Path of a file that `keyhole calibrate` wrote for this model: index and budget of every head that it names, in
   * place of those above (docs/formats.md, Budgets files). Read when the session is made. NULL: none. Copied. */
  const char* budgets;
  /* Layers with exact attention; copied; NULL: none. */
  const uint32_t* dense_layers;
  uint32_t dense_layer_count;
  /* Pending tokens of a layer are added to its index in blocks of this many, 1..2^31 (more after a prompt). A session
   * that only decodes has at most 2 * append_block + flush_block pending tokens per layer, plus the tokens of one graph
   * launch (docs/embedding.md, Pending tokens). AUTO: 1024. */
  uint32_t append_block;
  keyhole_append_mode append_mode;
  /* Queries of keyhole_session_append kept per KV head to guide index types that use them (evenly spread over the
   * prompt, all heads of the group in turn), 0..2^24; 0: none; default 4096. */
  uint32_t training_queries;
  /* Bytes of host memory that this session may take for K, V, indexes and buffers; 0: no limit. An append, attend or
   * build that would pass it returns OUT_OF_MEMORY and changes nothing; tokens that indexes have no room for stay
   * pending. */
  size_t host_memory_limit;
  /* Bytes of device memory that this session may take; 0: what there is, codes of KEYHOLE_PLACE_AUTO half of it. A
   * session, build or call that would pass it returns OUT_OF_DEVICE_MEMORY and changes nothing. */
  size_t device_memory_limit;
  /* Share of (step, layer, KV head) that is audited, i.e. computed again exactly beside the decoding, 0..1; 0: none.
   * keyhole_session_get_audit (keyhole/inspect.h) tells the errors found. */
  double audit_share;
  keyhole_audit_action audit_action;
  /* Output error that audit_action and keyhole_audit.over_bound compare with. AUTO: 1.5 * error_target of the head, or
   * 0.1 without one. */
  float audit_bound;
  keyhole_kv_host kv_host;
  /* Bytes of host memory that this session may pin for a CUDA device, which reads offloaded tokens there beside their
   * codes; 0: as much as the system lets it. Where it is too little for all layers at max_tokens, exact_rows_by
   * decides. A session whose exchange with the device alone needs more is refused: OUT_OF_MEMORY. */
  size_t pinned_memory_limit;
  keyhole_rows_by exact_rows_by;
} keyhole_session_config;

KEYHOLE_API void keyhole_session_config_init_sized(keyhole_session_config* config, size_t size);
static inline void keyhole_session_config_init(keyhole_session_config* config) {
  keyhole_session_config_init_sized(config, sizeof *config);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_CONFIG_H_ */
