/* Keyhole: copies of a session, in memory and in files, and what a saved session is known by. The opening comment of
 * keyhole/keyhole.h (words, errors, structs) holds here. docs/embedding.md, Sequences, says what copies share, and
 * docs/formats.md what a file holds.
 */
#ifndef KEYHOLE_SAVE_H_
#define KEYHOLE_SAVE_H_

#include "keyhole/keyhole.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An independent copy of the session. It copies resident tokens and the config; offloaded K and V, indexes, codes and
 * training queries it shares with the session until one of the two changes them: that one takes a copy of its own
 * first, of what it changes. Where there is no memory for it, tokens stay pending, or keyhole_session_build returns
 * OUT_OF_MEMORY. See shared_bytes of keyhole_statistics. Both give the same answers, to the last bit, as long as they
 * have indexed the same tokens (with KEYHOLE_APPEND_BACKGROUND a block is indexed when it is ready). A session and its
 * copies may be used by different threads at once, and destroyed in any order. The caller destroys *out. BUSY leaves
 * *out as it was; it is NULL on other failures. Errors: OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY, DEVICE_ERROR, BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_fork(keyhole_session* session,
                                                                 keyhole_session** out);

/* Writes the session to a file: shape, config, K, V and indexes, with magic, format version and checksum, for its owner
 * to read alone (mode 0600). A file of another name is written beside it and then renamed: a failed save leaves an old
 * file as it was, and several may save to one path. Links are followed; a device or a pipe is written as it is (not by
 * a session of several ranks). Errors: IO, OUT_OF_MEMORY, BUSY, DEVICE_ERROR where tokens lie on a device that
 * failed. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_save(keyhole_session* session,
                                                                 const char* path);

/* What a load insists on: of which model a file is, and that its tokens are the first of a prompt that it may be
 * continued with. */
typedef struct keyhole_load_options {
  size_t struct_size;
  /* The id of the model, as keyhole_session_set_identity was given it; read during the call alone. NULL: any. */
  const char* model;
  /* The ids of the prompt's tokens, token_count of them; read during the call alone. NULL with token_count 0: any
   * tokens. */
  const int32_t* tokens;
  uint64_t token_count;
} keyhole_load_options;
KEYHOLE_API void keyhole_load_options_init_sized(keyhole_load_options* options, size_t size);
static inline void keyhole_load_options_init(keyhole_load_options* options) {
  keyhole_load_options_init_sized(options, sizeof *options);
}

/* Makes a session from a file, of an engine with the same shape and kv_dtype; its config is the saved one, whose
 * budgets file is not read again. options NULL: any file of that shape. What a file must not be by them, also one that
 * does not say what it holds, or that holds more or fewer tokens than it names, is INVALID_ARGUMENT, with what the file
 * says and what was asked for, before K and V are read; how many of the tokens the session holds
 * keyhole_session_get_identity tells. The caller destroys *out; it is NULL on failure. Errors: IO, CORRUPT,
 * VERSION_MISMATCH, INVALID_ARGUMENT, OUT_OF_MEMORY, OUT_OF_DEVICE_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_load(keyhole_engine* engine, const char* path, const keyhole_load_options* options,
                     keyhole_session** out);

/* What a session's tokens are, so that a saved context is not taken for another one: the id of a model and the ids of
 * the tokens, from the first one on. The caller sets it, save writes it, fork copies it. A truncation below token_count
 * forgets the tokens (not the model), and so does a keyhole_session_accept that drops or moves any of them. The library
 * keeps their hash alone. */
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
/* model: up to 255 bytes; NULL: keeps the one there is. tokens: the ids of all tokens that the session holds, `count`
 * of them; NULL with count 0: not known. Tokens that follow those may stay unnamed, but a file with such tokens is not
 * loaded for its text. INVALID_ARGUMENT (also a count of more tokens than there are), BUSY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_session_set_identity(keyhole_session* session,
                                                                         const char* model,
                                                                         const int32_t* tokens,
                                                                         uint64_t count);
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status
keyhole_session_get_identity(const keyhole_session* session, keyhole_identity* identity);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_SAVE_H_ */
