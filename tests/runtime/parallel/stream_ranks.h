// Ranks that are threads, each with a device and a stream that need no GPU. Their transport gathers on the streams,
// too.
#pragma once

#include <atomic>
#include <vector>

#include "tests/runtime/fake_stream.h"
#include "tests/runtime/parallel/thread_ranks.h"

namespace keyhole::test {

class StreamRanks {
 public:
  explicit StreamRanks(uint32_t size) : host(size), on_streams_(size), ends_(size) {}

  /// The transport of a rank. on_streams: whether it gathers there.
  [[nodiscard]] keyhole_transport transport(uint32_t rank, bool on_streams) {
    End& end = ends_[rank];
    end = {host.transport(rank), on_streams_.transport(rank), nullptr, this};
    keyhole_transport t = end.host;
    t.context = &end;
    t.all_gather = [](void* context, const void* own, void* all, size_t bytes, uint32_t timeout_ms,
                      char* text) {
      const keyhole_transport& h = static_cast<End*>(context)->host;
      return h.all_gather(h.context, own, all, bytes, timeout_ms, text);
    };
    t.release = [](void* context) {
      auto* e = static_cast<End*>(context);
      e->host.release(e->host.context);
      e->on_stream.release(e->on_stream.context);
    };
    if (!on_streams) return t;
    t.all_gather_on_stream = [](void* context, const void* own, void* all, size_t bytes, void*,
                                char*) -> keyhole_status {
      auto* e = static_cast<End*>(context);
      ++e->ranks->gathers;
      e->stream->push([e, own, all, bytes] {
        char text[KEYHOLE_TRANSPORT_TEXT];
        const keyhole_transport& s = e->on_stream;
        (void)s.all_gather(s.context, own, all, bytes, 600000, text);
      });
      return KEYHOLE_OK;
    };
    t.abort = [](void* context) {
      auto* e = static_cast<End*>(context);
      ++e->ranks->aborts;
      e->ranks->on_streams_.abort();
    };
    return t;
  }
  /// Sets the stream of a rank, before anything is gathered on it.
  void attach(uint32_t rank, FakeStream& stream) { ends_[rank].stream = &stream; }

  ThreadRanks host;
  std::atomic<uint32_t> gathers = 0, aborts = 0;

 private:
  struct End {
    keyhole_transport host{}, on_stream{};
    FakeStream* stream = nullptr;
    StreamRanks* ranks = nullptr;
  };
  ThreadRanks on_streams_;
  std::vector<End> ends_;
};

}  // namespace keyhole::test
