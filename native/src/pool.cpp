#include "pool.h"

#include <unistd.h>

namespace paceline {

Pool::Pool(int threads, Job job) : threads_(threads), process_(getpid()), job_(std::move(job)) {
  try {
    for (int m = 1; m < threads_; ++m) members_.emplace_back([this, m] { serve(m); });
  } catch (...) {
    dismiss();
    throw;
  }
}

Pool::~Pool() { dismiss(); }

void Pool::dismiss() {
  stop_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& t : members_) getpid() == process_ ? t.join() : t.detach();
}

void Pool::serve(int member) {
  constexpr int kSpins = 20000;  // a few hundred microseconds: the time between two passes
  const PlainArithmetic plain;
  for (uint32_t seen = 0;;) {
    for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) pause();
    round_.wait(seen, std::memory_order_acquire);
    seen = round_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    job_(member, seen);
  }
}

void Pool::start() {
  const PlainArithmetic plain;
  uint32_t round = round_.fetch_add(1, std::memory_order_acq_rel) + 1;
  round_.notify_all();
  job_(0, round);
}

void together(int threads, const std::function<void(int)>& job) {
  std::vector<std::jthread> others;
  for (int m = 1; m < threads; ++m) others.emplace_back(job, m);
  job(0);
}

}  // namespace paceline
