/* Ranks over NCCL: the library libkeyhole_nccl, a transport of keyhole/parallel.h whose ranks have a CUDA device each.
 * It is there where Keyhole was built with CUDA and NCCL (KEYHOLE_NCCL; NCCL_ROOT says where NCCL is), 2.18 or newer,
 * and needs the same NCCL as the program. It fills all_gather (of host memory) and all_gather_on_stream (of device
 * memory). */
#ifndef KEYHOLE_NCCL_H_
#define KEYHOLE_NCCL_H_

#include "keyhole/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A communicator over the ranks of an NCCL communicator.
 *   comm    points to an ncclComm_t; a void pointer, so that this header needs no nccl.h. It stays the caller's: what
 *           is used is one of its own, which ncclCommSplit makes of it with the same ranks, and shares no resources
 *           with it. So an error here aborts (ncclCommAbort) that one alone, and comm can go as soon as this call has
 *           returned
 *   config  NULL: the defaults
 * COLLECTIVE: like ncclCommSplit it waits for all ranks of comm, without an end where comm is blocking; the first
 * messages are then exchanged, within long_timeout_ms. No other call may use comm meanwhile. The device is that of
 * comm, whichever is current.
 *
 * WAITS. Host memory goes through buffers of the communicator's own, pinned and on the device, in pieces of at most 4
 * MiB a rank and 64 MiB of all, on a stream of its own. The host polls the stream and ncclCommGetAsyncError until the
 * timeout, which holds for a whole call. After a timeout or an error the communicator is aborted, so that NCCL's
 * kernels end, also those on callers' streams, whose results are then unspecified. TIMEOUT: a rank did not come;
 * RANK_FAILED: NCCL or CUDA returned an error, which the text names. What keyhole_communicator_gather_on_stream
 * enqueued is watched by nobody until the next call that waits. A blocking call inside NCCL (connections of a kind that
 * no message has used before) is not interrupted.
 *
 * The last use destroys it (ncclCommDestroy), which can wait for the other ranks of the host and for what is enqueued.
 * *out is NULL on failure. Errors: RANK_FAILED (NCCL or CUDA returns an error; comm is NULL or points to NULL),
 * TIMEOUT, INVALID_ARGUMENT (out, config), OUT_OF_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_communicator_from_nccl(
    const void* comm, const keyhole_communicator_config* config, keyhole_communicator** out);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_NCCL_H_ */
