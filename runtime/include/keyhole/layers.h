/* Keyhole: models whose layers differ: in a sliding window, in shape, in scale, soft-cap or RoPE. The opening comment
 * of keyhole/keyhole.h (words, shapes, structs) holds here. docs/embedding.md, Layers and sinks of a model, has
 * examples.
 *
 * Such a model gives its engine an array of keyhole_layer_config, one for each layer. The fields that the engine has
 * too (scale, softcap, RoPE) then count in the array alone; of head_dim, kv_heads and q_heads the engine's stand for 0.
 *
 * SHAPES  Every call that takes a layer has that layer's Hq, Hkv and d where its comment says these, in tensors, ids,
 *         counts and lse. AUTO of scale and rope_dim is that of the layer's d; values are as wide as the layer's keys,
 *         but for a value_dim below the engine's d, which holds for all layers: none may have fewer components. kv_head
 *         means a KV head of the layer; with layer KEYHOLE_ALL it names those of the layers that have it. Budgets files
 *         are of the largest q_heads, kv_heads and head_dim. A CUDA device takes such models where it takes the shape
 *         of each layer, with values as wide as keys; else they run on the host: KEYHOLE_DEVICE_AUTO takes it, which
 *         the log tells with the layer, and KEYHOLE_DEVICE_CUDA is UNSUPPORTED. A session has parts on the device for
 *         each shape, all of which device_memory_limit and pinned_memory_limit are about. Classifiers are UNSUPPORTED.
 *
 * SLIDING A step of a layer with a window W attends to its newest W tokens, no more and no fewer, exactly in every
 *         mode: the layer has no sink and no index, offloads nothing, and keeps W + window_slack tokens (fewer, where
 *         max_tokens is less). sink, window, flush_block and budgets of sessions do not concern it. It is saved, loaded
 *         and forked with its session, and a load wants an engine with the same windows. keyhole_session_truncate
 *         refuses what would leave it without tokens of its window.
 *
 *         These tokens lie where the layer's last call had its tensors: in host memory, or on a CUDA device once
 *         append, attend or extend brought tensors in device memory. A call with tensors in the other memory moves them
 *         first, which waits for copies of W + window_slack tokens. The first call with tensors in device memory takes
 *         device memory for all sliding layers (OUT_OF_DEVICE_MEMORY: nothing has changed); keyhole_plan counts it.
 *         Such a step has no host's part, and is not audited. The device finds q, k or v with a NaN or an infinity:
 *         NOT_FINITE by a later call, at the latest keyhole_session_synchronize, and no more steps;
 *         keyhole_session_save and keyhole_session_fork take the tokens before the first such k or v, where
 *         window_slack reaches back to their window. What lies on a device that has failed is lost: then they return
 *         DEVICE_ERROR.
 */
#ifndef KEYHOLE_LAYERS_H_
#define KEYHOLE_LAYERS_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one layer has of its own. Fields that keyhole_engine_config has as well mean the same here. */
struct keyhole_layer_config {
  size_t struct_size;
  /* 0: the layer attends to all tokens. W > 0, up to 2^29: to its newest W, the new one included. */
  uint32_t window;
  /* Of a window: tokens behind it that are kept so that keyhole_session_truncate can take as many back, 0..2^29. AUTO:
   * 16. */
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
  /* Hq, Hkv and d of the layer, with the limits of the engine's. 0: the engine's. */
  uint32_t head_dim;
  uint32_t kv_heads;
  uint32_t q_heads;
  int32_t rope_interleaved;
};

/* Fills in struct_size and what `engine` says for all layers; NULL: zeros. window becomes 0. */
KEYHOLE_API void keyhole_layer_config_init_sized(keyhole_layer_config* layer, size_t size,
                                                 const keyhole_engine_config* engine);
static inline void keyhole_layer_config_init(keyhole_layer_config* layer,
                                             const keyhole_engine_config* engine) {
  keyhole_layer_config_init_sized(layer, sizeof *layer, engine);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_LAYERS_H_ */
