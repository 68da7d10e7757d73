// A team of threads that runs one function on every member, and a barrier between its phases.
//
// The members spin for a short while after each job, since the next pass comes within microseconds while
// text is being written; then they sleep. A spinning barrier gives its time slice away when a partner is late,
// so that more threads than cores cost speed and not progress.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace paceline {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Calls job(member) once on every member, the caller being member 0; returns when all are done.
  void run(const std::function<void(int)>& job);
  // To be called by every member from within a job.
  void barrier();

 private:
  void serve(int member);

  int threads_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> members_;
};

}  // namespace paceline
