/* A whole program: 4096 random tokens behind an index, then one decoding step of one layer. */
#include <keyhole/keyhole.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) \
  if ((call) != KEYHOLE_OK) return fprintf(stderr, "%s\n", keyhole_last_error()), EXIT_FAILURE

static float k[4096 * 2 * 64], v[4096 * 2 * 64], q[8 * 64], out[8 * 64];
static const int64_t prompt[] = {4096, 2, 64}, kv_token[] = {2, 64}, q_token[] = {8, 64};

int main(void) {
  for (int i = 0; i < 4096 * 2 * 64; ++i) {
    k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    q[i % (8 * 64)] = k[i];
  }
  keyhole_engine_config model;
  keyhole_engine_config_init(&model);
  model.layers = 1, model.q_heads = 8, model.kv_heads = 2, model.head_dim = 64;
  keyhole_session_config sequence;
  keyhole_session_config_init(&sequence);
  sequence.index = "ivf:C=64,probe=8";
  keyhole_engine* engine;
  keyhole_session* session;
  CHECK(keyhole_engine_create(&model, &engine));
  CHECK(keyhole_session_create(engine, &sequence, &session));

  keyhole_tensor keys = keyhole_tensor_host(k, KEYHOLE_F32, 3, prompt);
  keyhole_tensor values = keyhole_tensor_host(v, KEYHOLE_F32, 3, prompt);
  CHECK(keyhole_session_append(session, 0, &keys, &values, NULL));
  CHECK(keyhole_session_build(session, NULL, NULL));

  keyhole_tensor key = keyhole_tensor_host(k, KEYHOLE_F32, 2, kv_token);
  keyhole_tensor value = keyhole_tensor_host(v, KEYHOLE_F32, 2, kv_token);
  keyhole_tensor query = keyhole_tensor_host(q, KEYHOLE_F32, 2, q_token);
  keyhole_tensor result = keyhole_tensor_host(out, KEYHOLE_F32, 2, q_token);
  CHECK(keyhole_session_attend(session, 0, &query, &key, &value, &result, NULL));
  printf("keyhole %s: head 0 attends to %.3f %.3f %.3f ...\n", keyhole_version(), out[0], out[1],
         out[2]);

  keyhole_session_destroy(session);
  keyhole_engine_destroy(engine);
  return EXIT_SUCCESS;
}
