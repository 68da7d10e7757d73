// The pool and the dealing of work: every unit once, whatever the members do and however many there are.
#include <cfenv>
#include <chrono>
#include <memory>
#include <thread>

#include "check.h"
#include "deal.h"
#include "pool.h"

using namespace paceline;
using paceline::test::Random;

namespace {

constexpr int kOps = 5, kUnits = 64;

// Passes over a few ops, as Program::walk does them.
struct Work {
  explicit Work(int threads) : done(kOps * kUnits), pool(threads, [this](int member, uint32_t pass) { walk(member, pass); }) {}

  void run(int units, int chunk) {
    for (auto& d : done) d.store(0, std::memory_order_relaxed);
    uint32_t pass = pool.next();
    for (auto& deal : deals) deal.start(pass, pool.threads(), {units, chunk});
    pool.start();
    for (int op = 0; op < kOps; ++op)
      for (int u = 0; u < kUnits; ++u) CHECK(done[static_cast<size_t>(op * kUnits + u)].load() == (u < units ? 1 : 0));
  }
  void walk(int member, uint32_t pass) {
    for (int op = 0; op < kOps; ++op) {
      auto& deal = deals[static_cast<size_t>(op)];
      for (int from, to; deal.take(pass, member, from, to); deal.finish(to - from)) {
        for (int u = from; u < to; ++u) {
          // What the op before wrote must be visible: not atomic, so that the thread sanitizer watches.
          plain[op + 1][u] = op ? plain[op][(u + 1) % kUnits] + 1 : u;
          done[static_cast<size_t>(op * kUnits + u)].fetch_add(1);
        }
      }
      if (!deal.wait(pass)) return;
    }
  }

  std::vector<std::atomic<int>> done;
  int plain[kOps + 1][kUnits] = {};
  std::vector<Deal> deals = std::vector<Deal>(kOps);
  Pool pool;
};

void every_unit_once() {
  for (int threads : {1, 2, 3, 8}) {
    Work work(threads);
    Random random(static_cast<uint64_t>(threads));
    for (int pass = 0; pass < 500; ++pass) work.run(1 + random.below(kUnits), 1 + random.below(9));
    for (int pass = 0; pass < 20; ++pass) {  // members fall asleep in between
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      work.run(kUnits, 1);
    }
    for (int u = 0; u < kUnits; ++u) CHECK(work.plain[kOps][u] == (u + kOps - 1) % kUnits + kOps - 1);
  }
}

void come_and_go() {
  for (int i = 0; i < 100; ++i) {
    Work work(1 + i % 8);
    if (i % 3) work.run(kUnits, 1 + i % 5);
  }
}

void many_at_once() {
  std::vector<std::unique_ptr<Work>> works;
  for (int i = 0; i < 4; ++i) works.push_back(std::make_unique<Work>(4));
  std::vector<std::thread> callers;
  for (auto& work : works)
    callers.emplace_back([&work] { for (int pass = 0; pass < 100; ++pass) work->run(kUnits, 3); });
  for (auto& caller : callers) caller.join();
}

void together_runs_on_all() {
  for (int threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(threads));
    together(threads, [&](int m) { calls[static_cast<size_t>(m)].fetch_add(1); });
    for (auto& c : calls) CHECK(c.load() == 1);
  }
}

void rounding_is_to_nearest_for_members_and_restored_for_the_caller() {
  std::fesetround(FE_UPWARD);
  std::atomic<int> wrong{0};
  {
    Pool pool(3, [&](int, uint32_t) { wrong += std::fegetround() != FE_TONEAREST; });
    for (int i = 0; i < 10; ++i) pool.start();
  }
  CHECK(wrong.load() == 0);
  CHECK(std::fegetround() == FE_UPWARD);
  std::fesetround(FE_TONEAREST);
}

}  // namespace

int main() {
  every_unit_once();
  come_and_go();
  many_at_once();
  together_runs_on_all();
  rounding_is_to_nearest_for_members_and_restored_for_the_caller();
  return test::result();
}
