// A transport's function for streams: called where it is there, and missed by name in tables of callers that are older.
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "tests/runtime/fixture.h"
#include "tests/runtime/parallel/thread_ranks.h"

namespace keyhole::test {
namespace {

/// Gathers on a "stream" of host memory: one rank, whose bytes are all.
keyhole_status copy_on_stream(void* context, const void* own, void* all, size_t bytes, void* stream,
                              char* text) {
  if (stream == nullptr) {
    std::snprintf(text, KEYHOLE_TRANSPORT_TEXT, "the stream of the test");
    return KEYHOLE_TIMEOUT;
  }
  ++*static_cast<int*>(context);
  std::memcpy(all, own, bytes);
  return KEYHOLE_OK;
}

keyhole_transport one_rank(int* calls) {
  keyhole_transport t;
  keyhole_transport_init(&t);
  t.context = calls;
  t.size = 1;
  t.all_gather = [](void*, const void* own, void* all, size_t bytes, uint32_t, char*) {
    std::memcpy(all, own, bytes);
    return static_cast<keyhole_status>(KEYHOLE_OK);
  };
  t.all_gather_on_stream = copy_on_stream;
  return t;
}

TEST(Communicator, GathersOnAStreamByTheTransportsFunction) {
  int calls = 0;
  const keyhole_transport t = one_rank(&calls);
  keyhole_communicator* made = nullptr;
  ASSERT_OK(keyhole_communicator_create(&t, nullptr, &made));
  const CommunicatorPtr c(made);
  const int own = 5;
  int all = 0, stream = 0;
  EXPECT_OK(keyhole_communicator_gather_on_stream(c.get(), &own, &all, sizeof own, &stream));
  EXPECT_EQ(all, 5);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), &own, &all, 0, &stream),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), nullptr, &all, 4, &stream),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), &own, nullptr, 4, &stream),
            KEYHOLE_INVALID_ARGUMENT);
  // Its error loses the communicator for all calls.
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), &own, &all, sizeof own, nullptr),
            KEYHOLE_TIMEOUT);
  expect_error_text("the stream of the test");
  EXPECT_EQ(keyhole_communicator_gather(c.get(), &own, &all, sizeof own), KEYHOLE_TIMEOUT);
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), &own, &all, sizeof own, &stream),
            KEYHOLE_TIMEOUT);
  EXPECT_EQ(calls, 1);
}

TEST(Communicator, AnOlderTransportHasNoGatherOnStreams) {
  int calls = 0;
  keyhole_transport t = one_rank(&calls);
  // What lies behind an older caller's struct is not looked at.
  t.struct_size = offsetof(keyhole_transport, all_gather_on_stream);
  keyhole_communicator* made = nullptr;
  ASSERT_OK(keyhole_communicator_create(&t, nullptr, &made));
  const CommunicatorPtr c(made);
  const int own = 5;
  int all = 0, stream = 0;
  EXPECT_EQ(keyhole_communicator_gather_on_stream(c.get(), &own, &all, sizeof own, &stream),
            KEYHOLE_UNSUPPORTED);
  expect_error_text("all_gather_on_stream");
  EXPECT_EQ(calls, 0);
  // Which loses nothing.
  EXPECT_OK(keyhole_communicator_gather(c.get(), &own, &all, sizeof own));
  EXPECT_EQ(all, 5);
  // A newer caller whose further fields are 0 is served, others are told.
  struct {
    keyhole_transport known;
    void* more;
  } newer{one_rank(&calls), nullptr};
  newer.known.struct_size = sizeof newer;
  made = nullptr;
  ASSERT_OK(keyhole_communicator_create(&newer.known, nullptr, &made));
  keyhole_communicator_destroy(made);
}

}  // namespace
}  // namespace keyhole::test
