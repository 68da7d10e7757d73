// Threads that walk one job again and again, together with the caller.
//
// The members spin for a short while after each round, since the next pass comes within microseconds while text
// is being written; then they sleep. Nobody waits for a member: the caller returns when its own part of the round
// is done, and the job sees to it that all work is. A member that oversleeps joins late, perhaps in a later round.
#pragma once

#include <atomic>
#include <cfenv>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {

// Rounding to nearest and no flushing of denormals for as long as it lives, whatever some library has set on this
// thread: results must not depend on who calls.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { std::fesetenv(&before_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  std::fenv_t before_;
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for tens of microseconds, longer than members are apart in a pass, and then gives its time slices away:
// whoever is waited for may need this very core.
template <class Done>
void spin_until(Done done) {
  constexpr int kSpins = 2000;
  for (int i = 0; !done(); ++i) i < kSpins ? pause() : std::this_thread::yield();
}

class Pool {
 public:
  // Runs in every member with plain arithmetic.
  using Job = std::function<void(int member, uint32_t round)>;

  Pool(int threads, Job job);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Number of the round that start() will begin.
  uint32_t next() const { return round_.load(std::memory_order_relaxed) + 1; }
  // Begins a round and takes part in it as member 0.
  void start();

 private:
  void serve(int member);
  void dismiss();

  int threads_;
  int process_;  // the members live in this one; a forked child has none of them, and does all work itself
  Job job_;
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> members_;
};

// Calls job(member) once on each of `threads` threads, the caller being member 0; returns when all are done.
void together(int threads, const std::function<void(int)>& job);

}  // namespace paceline
