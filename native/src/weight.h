// Weight matrices repacked for the kernels: the file's own integers and scales in another order.
//
// Sixteen output rows make a block; lane l of every vector belongs to output row 16 b + l. A block is one
// stream of groups of 32 k-values, each its quants and then its scales; in the schemes with super-blocks a
// header with the f16 factors stands before every eight groups. The quants of a group:
//
//   u4  256 bytes a group: byte 4l+i of vector j holds k = 4j+i (low nibble) and 4(j+4)+i (high), j < 4
//   u5  the same, then eight 64-bit masks with bit 4 of k = 4j+i at bit 4l+i of mask j
//   u8  512 bytes a group: byte 4l+i of vector j holds k = 4j+i, j < 8
//
// Floating-point weights have no scales: 16 values of each k follow each other, of bf16 each pair of k.
//
// A stored u stands for u - zero (8, 16 or 128), except in the schemes with minima, where zero is 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace paceline {

constexpr int kBlockRows = 16;
constexpr int kGroup = 32;
constexpr int kSuper = 256;

enum class Quant : uint8_t { u4, u5, u8, f32, f16, bf16 };

enum class Scheme : uint8_t {
  half,       // f16 scale per group                                        Q4_0 Q5_0 Q8_0 IQ4_NL
  half_min,   // f16 scale and f16 minimum per group                        Q4_1 Q5_1
  super_min,  // per 256: f16 d, f16 dmin; per group: u8 scale, u8 minimum  Q4_K Q5_K
  fine,       // per 256: f16 d; per 16: s8 scale                           Q3_K Q6_K IQ4_XS
  fine_min,   // per 256: f16 d, f16 dmin; per 16: u8 scale, u8 minimum     Q2_K
  none,       // floating-point weights
};

// Products with bf16 weights treat weights and activations below this as zero. All products are then multiples of
// 2^-126, and no sum of them is a subnormal number, on which instruction sets differ.
constexpr float kLeastBf16 = 0x1p-56f;

struct Weight {
  int64_t rows = 0, cols = 0;
  Quant quant{};
  Scheme scheme{};
  int type = 0;                 // ggml id, for reports
  size_t block_bytes = 0;
  const uint8_t* data = nullptr;

  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  size_t bytes() const { return static_cast<size_t>(blocks()) * block_bytes; }
  bool is_float() const { return scheme == Scheme::none; }
};

// Offset of group g within a block, header included when g begins a super-block.
size_t group_offset(const Weight& weight, int64_t g);

// Geometry of a ggml type: k-values and bytes of a file block; throws std::invalid_argument if unknown.
struct FileBlock { int values; int bytes; };
FileBlock file_block(int type);

// Shape and layout, without data. Throws std::invalid_argument on a type or shape that has no kernel.
Weight describe_weight(int type, int64_t rows, int64_t cols);

// Repacks blocks [first, last) from the file's bytes into `out` (the start of the whole matrix). Returns false if
// a scale or a floating-point weight is infinite or not a number.
bool pack_blocks(const Weight& weight, const uint8_t* file, uint8_t* out, int64_t first, int64_t last);

// One row of a file's matrix as floats.
void decode_row(int type, const uint8_t* file_row, int64_t cols, float* out);

}  // namespace paceline
