// What it costs to make host memory readable by the device: first writes to fresh pages, and the driver's lock on pages
// that are there, by page size, piece size and number of threads; and what both cost a thread that enqueues work
// meanwhile.
//
//   gpu_host_pin_bench [MiB of a measurement]
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "gpu/cuda/common/check.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace {

using namespace keyhole;
using namespace keyhole::gpu;
using Clock = std::chrono::steady_clock;

constexpr size_t kMiB = size_t{1} << 20U;
constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Fresh pages on a boundary of 2 MiB.
class Pages {
 public:
  Pages(size_t bytes, bool huge) : mapped_(bytes + 2 * kMiB), bytes_(bytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) throw Error(Status::out_of_memory, "no address space");
    const auto address = reinterpret_cast<uintptr_t>(base_);
    data_ = reinterpret_cast<std::byte*>((address + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB));
    (void)madvise(data_, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~Pages() { munmap(base_, mapped_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  void* base_;
  size_t mapped_, bytes_;
  std::byte* data_;
};

/// f(data, bytes) for all pieces, from `threads` threads that take one after the other. Seconds.
template <class F>
double over_pieces(const Pages& pages, size_t piece, unsigned threads, F&& f) {
  std::atomic<size_t> next{0};
  const auto begin = Clock::now();
  std::vector<std::thread> all;
  for (unsigned t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      for (;;) {
        const size_t at = next.fetch_add(piece);
        if (at >= pages.bytes()) return;
        f(pages.data() + at, std::min(piece, pages.bytes() - at));
      }
    });
  }
  for (std::thread& t : all) t.join();
  return seconds_since(begin);
}

bool populates = true;

void populate(std::byte* data, size_t bytes) {
  if (populates && madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
  populates = false;  // a kernel before 5.14: write to every page
  for (size_t at = 0; at < bytes; at += 4096) const_cast<volatile std::byte&>(data[at]) = {};
}

void pin(std::byte* data, size_t bytes) {
  check(cudaHostRegister(data, bytes, kFlags), "cudaHostRegister");
}
void unpin(std::byte* data, size_t) { check(cudaHostUnregister(data), "cudaHostUnregister"); }

double rate(size_t bytes, double seconds) { return static_cast<double>(bytes) / seconds * 1e-9; }

void first_writes(size_t bytes) {
  std::printf("first writes, GB/s (pieces of 2 MiB)        1 thread   4 threads  16 threads\n");
  for (const bool huge : {false, true}) {
    std::printf("  %-40s", huge ? "huge pages advised" : "4 KiB pages");
    for (const unsigned threads : {1U, 4U, 16U}) {
      const Pages pages(bytes, huge);
      const double s = over_pieces(pages, 2 * kMiB, threads, populate);
      std::printf("%10.2f  ", rate(bytes, s));
    }
    std::printf("\n");
  }
}

/// Rows copied to fresh memory in tasks of 256 KiB, as a prompt's are.
void rows(size_t bytes) {
  const Pages from(bytes, true);
  (void)over_pieces(from, 2 * kMiB, 4, populate);
  const auto copy = [&](const Pages& to, unsigned threads) {
    return over_pieces(to, kMiB / 4, threads, [&](std::byte* data, size_t n) {
      std::memcpy(data, from.data() + (data - to.data()), n);
    });
  };
  std::printf("rows copied in pieces of 256 KiB to fresh huge pages, GB/s\n");
  for (const unsigned threads : {4U, 14U}) {
    const Pages to(bytes, true);
    const double s = copy(to, threads);
    std::printf("  by %2u threads: %.2f; to memory that is there: %.2f\n", threads, rate(bytes, s),
                rate(bytes, copy(to, threads)));
  }
  for (const unsigned threads : {1U, 2U, 4U, 6U, 8U, 14U}) {
    const Pages to(bytes, true);
    const double first = over_pieces(to, 2 * kMiB, threads, populate);
    const double all = first + copy(to, 14);
    std::printf("  taken by %2u threads before, %.2f, then copied by 14: %.2f together\n", threads,
                rate(bytes, first), rate(bytes, all));
  }
}

void locks(size_t bytes) {
  std::printf(
      "lock of pages that are there / unlock, GB/s   1 thread        2 threads       4 threads\n");
  for (const bool huge : {false, true}) {
    for (const size_t piece : {kMiB / 4, 2 * kMiB, 64 * kMiB}) {
      std::printf("  %-12s pieces of %6zu KiB         ", huge ? "huge" : "4 KiB pages",
                  piece >> 10U);
      for (const unsigned threads : {1U, 2U, 4U}) {
        const Pages pages(bytes, huge);
        (void)over_pieces(pages, 2 * kMiB, 16, populate);
        const double s = over_pieces(pages, piece, threads, pin);
        const double d = over_pieces(pages, piece, threads, unpin);
        std::printf("%6.2f /%6.2f  ", rate(bytes, s), rate(bytes, d));
      }
      std::printf("\n");
    }
  }
  for (const bool huge : {false, true}) {
    const Pages pages(bytes, huge);
    const double s = over_pieces(pages, 2 * kMiB, 1, pin);
    std::printf("  lock of fresh pages, %s, 1 thread: %.2f GB/s\n", huge ? "huge" : "4 KiB",
                rate(bytes, s));
    (void)over_pieces(pages, 2 * kMiB, 1, unpin);
  }
  for (const unsigned flags : {0U, unsigned{cudaHostRegisterReadOnly}}) {
    const Pages pages(bytes, true);
    (void)over_pieces(pages, 2 * kMiB, 16, populate);
    bool refused = false;
    const double s = over_pieces(pages, 2 * kMiB, 1, [&](std::byte* data, size_t n) {
      refused = cudaHostRegister(data, n, flags) != cudaSuccess || refused;
    });
    (void)cudaGetLastError();
    std::printf("  flags %u: %s%.2f GB/s\n", flags, refused ? "refused " : "", rate(bytes, s));
    if (!refused) (void)over_pieces(pages, 2 * kMiB, 1, unpin);
  }
  for (const size_t piece : {2 * kMiB, 64 * kMiB}) {
    const auto begin = Clock::now();
    std::vector<void*> all;
    for (size_t at = 0; at < bytes; at += piece) {
      void* p = nullptr;
      check(cudaHostAlloc(&p, piece, cudaHostAllocPortable), "cudaHostAlloc");
      all.push_back(p);
    }
    std::printf("  cudaHostAlloc in pieces of %zu KiB: %.2f GB/s\n", piece >> 10U,
                rate(bytes, seconds_since(begin)));
    for (void* p : all) check(cudaFreeHost(p), "cudaFreeHost");
  }
}

/// What a thread pays for a launch, and for waiting for it, while another locks pages.
void launches(size_t bytes) {
  void* word = nullptr;
  check(cudaMalloc(&word, 4096), "cudaMalloc");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::printf("a launch / the wait for it, us: p50, p99, most\n");
  for (const size_t piece : {size_t{0}, kMiB / 4, 2 * kMiB, 64 * kMiB}) {
    const Pages pages(bytes, true);
    (void)over_pieces(pages, 2 * kMiB, 16, populate);
    std::atomic<bool> ends{false};
    std::thread other([&] {
      if (piece != 0) (void)over_pieces(pages, piece, 1, pin);
      if (piece == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ends = true;
    });
    std::vector<double> launch, wait;
    while (!ends) {
      auto begin = Clock::now();
      check(cudaMemsetAsync(word, 0, 4096, stream), "launch");
      launch.push_back(seconds_since(begin) * 1e6);
      begin = Clock::now();
      check(cudaStreamSynchronize(stream), "wait");
      wait.push_back(seconds_since(begin) * 1e6);
    }
    other.join();
    const auto print = [](std::vector<double>& x) {
      std::sort(x.begin(), x.end());
      std::printf("%8.1f %8.1f %9.1f", x[x.size() / 2], x[x.size() * 99 / 100], x.back());
    };
    std::printf("  pieces of %6zu KiB: ", piece >> 10U);
    print(launch);
    std::printf("  / ");
    print(wait);
    std::printf("   (%zu)\n", launch.size());
    if (piece != 0) (void)over_pieces(pages, piece, 1, unpin);
  }
  check(cudaStreamDestroy(stream), "stream");
  check(cudaFree(word), "cudaFree");
}

}  // namespace

int main(int argc, char** argv) {
  const size_t bytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 512) * kMiB;
  try {
    int pageable = 0, tables = 0;
    check(cudaFree(nullptr), "a device");
    check(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), "attribute");
    check(cudaDeviceGetAttribute(&tables, cudaDevAttrPageableMemoryAccessUsesHostPageTables, 0),
          "attribute");
    std::printf("the device reads memory that is not pinned: %s, by the host's tables: %s\n",
                pageable != 0 ? "yes" : "no", tables != 0 ? "yes" : "no");
    first_writes(bytes);
    std::printf("again, memory that the system has had in use:\n");
    first_writes(bytes);
    rows(bytes);
    locks(bytes);
    launches(bytes);
  } catch (const Error& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
  return 0;
}
