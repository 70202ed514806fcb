/* Ranks over MPI: the library libkeyhole_mpi, a transport of keyhole/parallel.h. It is there where Keyhole was built
 * with MPI (KEYHOLE_MPI; Debian and Ubuntu: libopenmpi-dev, openmpi-bin), and needs the same MPI as the program. */
#ifndef KEYHOLE_MPI_H_
#define KEYHOLE_MPI_H_

#include "keyhole/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A communicator over the ranks of an MPI communicator, which is duplicated: collective.
 *   comm    points to an MPI_Comm; a void pointer, so that this header needs no mpi.h. NULL: MPI_COMM_WORLD
 *   config  NULL: the defaults
 * MPI must be initialised (MPI_THREAD_SERIALIZED, or all calls from one thread) and not finalised before the
 * communicator and all that uses it are gone. Errors of MPI are returned, not fatal, and waits have an end: collectives
 * are begun, and tested until the timeout. After an error the process should end without MPI_Finalize, which may wait
 * for ranks that are gone. *out is NULL on failure. Errors: RANK_FAILED (MPI is not initialised, or
 * returns an error), INVALID_ARGUMENT (out, config), OUT_OF_MEMORY. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_communicator_from_mpi(
    const void* comm, const keyhole_communicator_config* config, keyhole_communicator** out);

/* Of the ranks of `comm` that are on this host: how many, and which of them this one is. Collective. For threads and
 * CPUs: see docs/parallel.md. Errors as above. */
KEYHOLE_API KEYHOLE_MUST_USE keyhole_status keyhole_mpi_local_ranks(const void* comm,
                                                                    uint32_t* local_rank,
                                                                    uint32_t* local_size);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KEYHOLE_MPI_H_ */
