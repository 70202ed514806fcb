// A transport over MPI. Collectives are begun and tested until they are done or the time is up, so that a rank that is
// gone ends a wait. MPI may still write to the memory of one that was given up: that memory is never given back.
#include <keyhole/mpi.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/ranks/transport_parts.h"

namespace {

using Clock = std::chrono::steady_clock;

struct MpiTransport {
  MPI_Comm comm = MPI_COMM_NULL;
  uint32_t size = 0;
  std::vector<char> own, all;  // of the collective under way
  bool lost = false;
};

void write_mpi_text(int code, const char* what, char* text) {
  char own[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, own, &length) != MPI_SUCCESS) length = 0;
  std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "%s: %.*s", what, std::min(length, 200), own);
}

keyhole_status wait_for(MPI_Request& request, uint32_t timeout_ms, char* text) {
  const auto begin = Clock::now(), end = begin + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) {
      write_mpi_text(code, "MPI_Test", text);
      return KEYHOLE_RANK_FAILED;
    }
    if (done != 0) return KEYHOLE_OK;
    const auto now = Clock::now();
    if (now >= end) {
      std::snprintf(text, KEYHOLE_TRANSPORT_TEXT,
                    "the other ranks did not answer within %u ms: one has ended, hangs or is late",
                    timeout_ms);
      return KEYHOLE_TIMEOUT;
    }
    keyhole::ranks::pause_since(begin);
  }
}

keyhole_status all_gather(void* context, const void* own, void* all, size_t bytes,
                          uint32_t timeout_ms, char* text) {
  auto& t = *static_cast<MpiTransport*>(context);
  // MPI counts with int: in pieces.
  const size_t most = std::max<size_t>(1, size_t{INT_MAX} / t.size);
  for (size_t begin = 0; begin < bytes; begin += most) {
    const size_t n = std::min(most, bytes - begin);
    try {
      t.own.resize(n);
      t.all.resize(n * t.size);
    } catch (...) {
      std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "no memory for a message");
      return KEYHOLE_RANK_FAILED;
    }
    std::memcpy(t.own.data(), static_cast<const char*>(own) + begin, n);
    MPI_Request request = MPI_REQUEST_NULL;
    const int count = static_cast<int>(n);
    const int code = MPI_Iallgather(t.own.data(), count, MPI_BYTE, t.all.data(), count, MPI_BYTE,
                                    t.comm, &request);
    keyhole_status status = KEYHOLE_RANK_FAILED;
    if (code == MPI_SUCCESS) {
      status = wait_for(request, timeout_ms, text);
    } else {
      write_mpi_text(code, "MPI_Iallgather", text);
    }
    if (status != KEYHOLE_OK) {
      t.lost = true;
      return status;
    }
    for (uint32_t r = 0; r < t.size; ++r) {
      std::memcpy(static_cast<char*>(all) + r * bytes + begin, t.all.data() + r * n, n);
    }
  }
  return KEYHOLE_OK;
}

void release(void* context) {
  std::unique_ptr<MpiTransport> t(static_cast<MpiTransport*>(context));
  if (t->lost) {
    (void)t.release();  // MPI may still write to it
    return;
  }
  int finalized = 0;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) MPI_Comm_free(&t->comm);
}

MPI_Comm handle_of(const void* comm) {
  return comm == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(comm);
}

keyhole_status fail(const char* text) { return keyhole::ranks::fail(KEYHOLE_RANK_FAILED, text); }

bool is_running() {
  int begun = 0, ended = 0;
  return MPI_Initialized(&begun) == MPI_SUCCESS && begun != 0 &&
         MPI_Finalized(&ended) == MPI_SUCCESS && ended == 0;
}

}  // namespace

extern "C" {

keyhole_status keyhole_communicator_from_mpi(const void* comm,
                                             const keyhole_communicator_config* config,
                                             keyhole_communicator** out) {
  if (out != nullptr) *out = nullptr;
  if (!is_running()) return fail("MPI is not initialised, or finalised: call MPI_Init before");
  std::unique_ptr<MpiTransport> t;
  try {
    t = std::make_unique<MpiTransport>();
  } catch (...) {
    return KEYHOLE_OUT_OF_MEMORY;
  }
  char text[KEYHOLE_TRANSPORT_TEXT] = {};
  int rank = 0, size = 0;
  int code = MPI_Comm_dup(handle_of(comm), &t->comm);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(t->comm, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(t->comm, &rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(t->comm, &size);
  if (code != MPI_SUCCESS) {
    write_mpi_text(code, "MPI_Comm_dup", text);
    return fail(text);
  }
  t->size = static_cast<uint32_t>(size);
  keyhole_transport table;
  keyhole_transport_init(&table);
  table.rank = static_cast<uint32_t>(rank);
  table.size = t->size;
  table.all_gather = all_gather;
  table.release = release;
  table.context = t.release();
  return keyhole_communicator_create(&table, config, out);
}

keyhole_status keyhole_mpi_local_ranks(const void* comm, uint32_t* local_rank,
                                       uint32_t* local_size) {
  if (local_rank == nullptr || local_size == nullptr)
    return fail("local_rank or local_size is NULL");
  if (!is_running()) return fail("MPI is not initialised, or finalised: call MPI_Init before");
  MPI_Comm local = MPI_COMM_NULL;
  int rank = 0, size = 0;
  int code = MPI_Comm_split_type(handle_of(comm), MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(local, &rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(local, &size);
  if (code == MPI_SUCCESS) code = MPI_Comm_free(&local);
  if (code != MPI_SUCCESS) {
    char text[KEYHOLE_TRANSPORT_TEXT] = {};
    write_mpi_text(code, "MPI_Comm_split_type", text);
    return fail(text);
  }
  *local_rank = static_cast<uint32_t>(rank);
  *local_size = static_cast<uint32_t>(size);
  return KEYHOLE_OK;
}

}  // extern "C"
