#include "deal.h"

#include <algorithm>

#include "pool.h"

namespace paceline {
namespace {

// pass (20 bits), end (22), next (22)
constexpr uint64_t kMask = (1u << 22) - 1;
constexpr uint64_t packed(uint32_t pass, uint64_t end, uint64_t next) {
  return static_cast<uint64_t>(pass & 0xfffff) << 44 | end << 22 | next;
}

}  // namespace

void Deal::start(uint32_t pass, int members, Cut cut) {
  if (members_ != members) {  // before the first pass only: late members read both
    ranges_ = std::make_unique<Range[]>(static_cast<size_t>(members));
    members_ = members;
  }
  chunk_.store(cut.chunk, std::memory_order_relaxed);
  left_.store(packed(pass, 0, static_cast<uint64_t>(cut.units)), std::memory_order_relaxed);
  int chunks = (cut.units + cut.chunk - 1) / cut.chunk;
  for (int m = 0; m < members; ++m) {
    int next = chunks * m / members * cut.chunk, end = std::min(cut.units, chunks * (m + 1) / members * cut.chunk);
    ranges_[static_cast<size_t>(m)].state.store(packed(pass, static_cast<uint64_t>(end), static_cast<uint64_t>(next)), std::memory_order_release);
  }
}

bool Deal::take(uint32_t pass, int member, int& first, int& last) {
  for (int i = 0; i < members_; ++i) {
    std::atomic<uint64_t>& state = ranges_[static_cast<size_t>((member + i) % members_)].state;
    uint64_t now = state.load(std::memory_order_acquire);
    for (;;) {
      uint64_t end = now >> 22 & kMask, next = now & kMask;
      if (now >> 44 != (pass & 0xfffff) || next >= end) break;
      uint64_t to = std::min(end, next + static_cast<uint64_t>(chunk_.load(std::memory_order_relaxed)));
      if (!state.compare_exchange_weak(now, packed(pass, end, to), std::memory_order_acq_rel)) continue;
      first = static_cast<int>(next);
      last = static_cast<int>(to);
      return true;
    }
  }
  return false;
}

bool Deal::wait(uint32_t pass) const {
  uint64_t now = 0;
  spin_until([&] {
    now = left_.load(std::memory_order_acquire);
    return now >> 44 != (pass & 0xfffff) || (now & kMask) == 0;
  });
  return now >> 44 == (pass & 0xfffff);
}

}  // namespace paceline
