#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kSpinsBeforeYield = 4000;   // tens of microseconds: longer than any phase imbalance
constexpr int kSpinsBeforeSleep = 20000;  // a few hundred: the time between two passes

template <class Done>
void spin_until(Done done) {
  for (int i = 0; !done(); ++i) i < kSpinsBeforeYield ? pause() : std::this_thread::yield();
}

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  for (int m = 1; m < threads_; ++m) members_.emplace_back([this, m] { serve(m); });
}

Pool::~Pool() {
  stop_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& t : members_) t.join();
}

void Pool::serve(int member) {
  uint32_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpinsBeforeSleep && generation_.load(std::memory_order_acquire) == seen; ++i) pause();
    generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    (*job_)(member);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::run(const std::function<void(int)>& job) {
  job_ = &job;
  running_.store(threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  job(0);
  spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
}

void Pool::barrier() {
  if (threads_ == 1) return;
  uint32_t phase = phase_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
    waiting_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
  } else {
    spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
  }
}

}  // namespace paceline
