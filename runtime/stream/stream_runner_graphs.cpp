// Steps in graphs: recorded while the stream is captured, and submitted each time a graph is about to be launched.
#include <algorithm>
#include <string>

#include "runtime/stream/stream_runner.h"

namespace keyhole::runtime {

void StreamRunner::prepare_capture(uint64_t id, uint32_t layer) {
  captures_.enter(id, graph_version());
  try {
    if (codes_->layer_has(layer) && !codes_->is_current(layer)) {
      throw Error(Status::invalid_argument,
                  "capture: layer " + std::to_string(layer) +
                      " has tokens without codes; call keyhole_session_synchronize before "
                      "cudaStreamBeginCapture");
    }
    if (captures_.newest().steps().size() >= StreamServer::kCapacity) {
      throw Error(Status::invalid_argument,
                  "capture: a step of layer " + std::to_string(layer) + " after " +
                      std::to_string(captures_.newest().steps().size()) + " others, allowed: " +
                      std::to_string(StreamServer::kCapacity) + " steps in a graph");
    }
  } catch (...) {
    captures_.newest().spoil();
    throw;
  }
}

uint64_t StreamRunner::capture_of_step() const {
  const uint64_t id = steps_->capture_id(stream_);
  if (id == gpu::kLostCapture) {
    throw Error(Status::busy,
                "the capture on the session's stream has failed, or another stream is being "
                "captured and the session's is the default stream: end that capture first");
  }
  return id;
}

const Capture& StreamRunner::ready_graph(uint64_t graph) {
  failure_.rethrow();
  check_not_capturing();
  check_no_open_step();
  const Capture* known = graph == 0 ? &captures_.newest() : captures_.find(graph);
  if (known == nullptr) {
    throw Error(Status::invalid_argument, "no graph has the number " + std::to_string(graph) +
                                              ", or " + std::to_string(Captures::kMost) +
                                              " others were captured since: capture it again");
  }
  const auto captured = known->steps();
  if (known->is_spoiled()) {
    throw Error(Status::invalid_argument,
                "a call failed while the graph was captured: capture it again");
  }
  if (captured.empty()) {
    throw Error(Status::invalid_argument, "no step was captured on the session's stream");
  }
  server_.drain();
  note_device_failure();
  failure_.rethrow();
  // All is checked before anything is submitted: the graph runs as a whole or not at all.
  std::fill(ahead_.begin(), ahead_.end(), 0U);
  for (const StreamStep& step : captured) {
    check_tokens(step.layer, step.appends, ahead_[step.layer]);
    ahead_[step.layer] += step.appends;
  }
  for (const StreamStep& step : captured) update_index(step.layer);
  place_windows(captured);
  for (const StreamStep& step : captured) {
    if (model_.slides(step.layer)) continue;
    make_room(step.layer, ahead_[step.layer]);
    update_codes(step.layer);
  }
  if (known->version() != graph_version()) {
    throw Error(Status::invalid_argument,
                "the session has changed since the graph was captured: capture it again");
  }
  if (params_->host_memory_limit != 0) {
    know_held_bytes();
    uint64_t offloaded = 0;
    for (uint32_t l = 0; l < model_.layers; ++l) {
      if (!model_.slides(l)) offloaded += offloaded_bytes(l, ahead_[l]);
    }
    check_memory(offloaded);
  }
  return *known;
}

void StreamRunner::submit_graph(const Capture& graph) noexcept {
  for (const StreamStep& step : graph.steps()) {
    if (model_.slides(step.layer)) {
      note_window_step(step.layer, step.appends);
    } else {
      submit(counted(step));
    }
  }
}

}  // namespace keyhole::runtime
