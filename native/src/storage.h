// Where the data of a program lies: memory in large pieces, rows of floats, quantised rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "weight.h"

namespace paceline {

// 64-byte aligned, zeroed on first touch, released as a whole.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Float rows of one width. `wanted` buffers hold the rows whose output was asked for, others all rows.
struct Buffer {
  int64_t width;
  bool wanted;
  std::vector<float> data;
  float* row(int64_t r) { return data.data() + r * width; }
};

// Quantised rows, tile by tile as in ActTile; only the arrays that some consumer reads are kept.
struct Acts {
  int64_t width;
  bool wanted;
  std::vector<int8_t> q;
  std::vector<float> scale, sum, half_sum, f;
  std::vector<int32_t> shift, half_shift;
  std::vector<uint16_t> bf16;
  // Makes room for what a matrix of this kind reads.
  void serve(const Weight& consumer, int rows);
  ActTile tile(int first) const;
  ActTileOut out(int first, int64_t group, int rows);
};

}  // namespace paceline
