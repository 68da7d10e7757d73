// The whole test framework: conditions that are counted, and random numbers that are the same everywhere.
#pragma once

#include <cstdint>
#include <cstdio>

namespace paceline::test {

inline int failures = 0;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
      ++paceline::test::failures;                                               \
    }                                                                           \
  } while (false)

inline int result() { return failures ? 1 : 0; }

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // -1 to 1

 private:
  uint64_t state_;
};

}  // namespace paceline::test
