// A few threads that share loops, for the decoder's own arithmetic.
//
// Why not OpenMP: libgomp's idle threads spin for milliseconds after each loop, which takes the cores
// from Keyhole's workers in the attention that follows, and ThreadSanitizer cannot see its hand-offs.
// Why not oneTBB: steps of the bundled model took 1.03 times as long on an arena (two busy cores, bench/RESULTS.md), so
// time decides neither way; with the order that ThreadSanitizer has to see it is 24 lines of 148 less here, and one
// more library that the command needs.
// The threads of a Team sleep on a futex as soon as they have nothing to do, and a caller never waits for
// a thread that has not yet woken up: on a busy machine it does the work itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace keyhole::tools {

class Team {
 public:
  /// Starts threads; `threads` counts all of them, the caller's included; 0: as many as the machine has cores. At
  /// most 64, which Debian's OpenBLAS serves at once.
  explicit Team(unsigned threads = 0);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  [[nodiscard]] unsigned size() const { return static_cast<unsigned>(threads_.size()) + 1; }

  /// Calls body(item, member) for every item in [0, count), each once, in rising order of their start, and returns
  /// when all are done. member < size() tells scratch space apart; member 0 is the caller. One caller at a time. body
  /// may throw on member 0 only (a progress callback that gives up): items that no thread has begun are then left
  /// out.
  template <class Body>
  void for_each(size_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run({[](void* context, size_t item, unsigned member) {
           (*static_cast<Plain*>(context))(item, member);
         },
         const_cast<void*>(static_cast<const void*>(&body)), count});
  }

 private:
  struct Work {
    void (*call)(void* context, size_t item, unsigned member) = nullptr;
    void* context = nullptr;
    size_t count = 0;
  };

  static constexpr uint32_t kClosed = 1U << 31;

  void run(const Work& work);
  void take_items(unsigned member);
  void close();
  void worker(unsigned member);

  Work work_;
  std::atomic<size_t> next_{0};     // first item that no thread has taken
  std::atomic<uint32_t> round_{0};  // raised when work_ is new: what idle workers wait on
  // Number of workers inside the current round, and kClosed when no more may enter.
  std::atomic<uint32_t> inside_{kClosed};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace keyhole::tools
