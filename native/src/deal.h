// How the threads of a pass share the work of one op.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace paceline {

// How one op of a pass is cut: units of work, dealt `chunk` at a time.
struct Cut { int units, chunk; };

// The units of one op, dealt in chunks: every member walks a range of its own, so that it reads memory as one
// stream, and then helps the others with theirs. A pass never waits for a member, only for units: one that the
// system has put to sleep delays nothing but the chunk in its hands. All state carries the number of its pass, so
// a member that wakes up in a later one finds nothing to take.
class Deal {
 public:
  void start(uint32_t pass, int members, Cut cut);
  // The next chunk for `member`: [first, last), or false when nothing of this pass is left to take.
  bool take(uint32_t pass, int member, int& first, int& last);
  void finish(int units) { left_.fetch_sub(static_cast<uint64_t>(units), std::memory_order_acq_rel); }
  // Returns true when all units of the pass are finished, false when the pass is over without us.
  bool wait(uint32_t pass) const;

 private:
  struct alignas(64) Range { std::atomic<uint64_t> state{0}; };  // pass, end, next
  std::unique_ptr<Range[]> ranges_;
  int members_ = 0;
  std::atomic<int> chunk_{1};
  alignas(64) std::atomic<uint64_t> left_{0};  // pass, unfinished units
};

}  // namespace paceline
