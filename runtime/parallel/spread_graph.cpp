// Launches of graphs of a spread session. At the end of a block all ranks capture again. One that has to for a reason
// of its own does so while the others' streams wait for it: no rank asks another whether it is ready.
#include "runtime/parallel/spread_graph.h"

#include <string>
#include <vector>

#include "runtime/parallel/spread_session.h"

namespace keyhole::runtime {
namespace {

/// f(step, tokens of the text that its layer holds before it).
template <class F>
void for_each_step(const SpreadGraph& graph, std::vector<uint32_t> held, F&& f) {
  for (const SpreadGraphStep& step : graph.steps()) {
    f(step, held[step.layer]);
    held[step.layer] += step.appends ? 1 : 0;
  }
}

[[noreturn]] void refuse_graph_numbers() {
  throw Error(Status::unsupported,
              "a sequence over several ranks has one graph, that which was captured last, "
              "and no numbers of graphs");
}

}  // namespace

void SpreadSession::check_graph_room() const {
  for_each_step(graph_, tokens_, [&](const SpreadGraphStep& step, uint32_t held) {
    const uint32_t most = own_->params().max_tokens;
    if (step.appends && held >= most) {
      throw Error(Status::invalid_argument,
                  "layer " + std::to_string(step.layer) + " would hold " +
                      std::to_string(held + 1) +
                      " tokens of the text, allowed: max_tokens = " + std::to_string(most));
    }
    if (!step.appends) check_holds(step.layer, held);
  });
}

void SpreadSession::check_graph_parts() const {
  for_each_step(graph_, tokens_, [&](const SpreadGraphStep& step, uint32_t held) {
    const RankPart now = part_of(step.layer, held, step.appends);
    if (now == step.part) return;
    throw Error(Status::invalid_argument, "layer " + std::to_string(step.layer) +
                                              ": the graph was captured for tokens of rank " +
                                              std::to_string(step.part.owner) +
                                              ", the next one is of rank " +
                                              std::to_string(now.owner) + ": capture it again");
  });
}

void SpreadSession::announce_own() {
  try {
    graph_.check();
    check_graph_parts();
    bool asks = false, is_due = false;
    for (const SpreadGraphStep& step : graph_.steps()) {
      asks = asks || step.part.asks;
      is_due = is_due || (!shares_.is_whole(step.layer) && own_->append_will_be_due(step.layer));
    }
    // Taking a block in waits for the stream, on which a gather may be that never ends.
    if (is_due) wait_for_stream();
    if (asks) own_->announce(0);
  } catch (const Error& e) {
    if (e.status() != Status::invalid_argument) throw;
    // What a capture needs of this rank: keyhole_session_synchronize would wait for the others.
    wait_for_stream();
    own_->synchronize();
    throw;
  }
}

uint64_t SpreadSession::last_graph() { refuse_graph_numbers(); }

void SpreadSession::announce(uint64_t graph) {
  if (graph != 0) refuse_graph_numbers();
  if (has_ended_) std::rethrow_exception(failure_);
  own_->stream().check_not_capturing();
  // What stands in for the graph's steps must be as many as the others make.
  if (!graph_.is_whole()) check_failure();
  check_graph_room();
  std::exception_ptr error = failure_;
  try {
    if (error == nullptr) announce_own();
  } catch (const Error& e) {
    if (e.status() == Status::invalid_argument) throw;
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  is_enqueued_ = true;
  for (const SpreadGraphStep& step : graph_.steps()) {
    if (step.appends) {
      ++tokens_[step.layer];
      extended_[step.layer] = {};
    }
    if (error == nullptr || shares_.is_whole(step.layer)) continue;
    try {
      // The graph is not launched on this rank, while the others wait for its states.
      merge_on_stream(step.layer, true, step.out, step.lse);
    } catch (...) {  // NOLINT: ranks that are lost; `error` came first
    }
  }
  if (error == nullptr) return;
  failure_ = error;
  std::rethrow_exception(error);
}

}  // namespace keyhole::runtime
