// The table of kernels one instruction set provides; the ops of a program call nothing else that computes.
#pragma once

#include <cstdint>
#include <string>

#include "weight.h"

namespace paceline {

// One tile of activation rows, quantised: int8 values, and a scale per row and group of 32.
// The rows of a tile are interleaved so that a kernel walks one pointer: q[(k/4)*R*4 + 4r + k%4], scale[g*R + r].
struct ActTile {
  const int8_t* q;
  const float* scale;       // [groups][R]
  const float* sum;         // [groups][R]      scale * sum of q
  const float* half_sum;    // [2 groups][R]    the same per 16
  const int32_t* shift;     // [groups][R]      -8 * sum of q, the start that makes zero point 8
  const int32_t* half_shift;
  const float* f;           // [cols][R]        only for f16 and f32 weights
  const uint16_t* bf16;     // [cols/2][R][2]   only for bf16 weights: rounded, and zero below kLeastBf16
};

struct ActTileOut {         // an array that no consumer reads is null
  int8_t* q;
  float *scale, *sum, *half_sum;
  int32_t *shift, *half_shift;
  float* f;
  uint16_t* bf16;
};

// Queries of one kv head against `blocks` blocks of 16 positions (at most 16 of them, one segment).
struct AttentionPart {
  const uint16_t* const* k;   // [blocks] -> [dim][16] f16
  const uint16_t* const* v;   // [blocks] -> [16][dim] f16
  int blocks, dim, queries;
  const float* const* q;      // [queries] -> [dim], already scaled
  const int* visible;         // [queries] positions visible within this segment, may be <= 0
  const int* hidden;          // [queries] of these, how many a window hides again from the start on, may be <= 0
  float cap;                  // scores s become cap * tanh(s / cap), unless it is 0
  float* scores;              // scratch [queries][256]
  float *best, *sum, *out;    // results [queries], [queries], [queries][dim]
};

constexpr int kSegment = 256;  // positions; segments are fixed by absolute position

struct Kernels {
  const char* name;
  int max_tile;
  // Adds `groups` groups of a block, from `at` on, to acc[r][16] for R interleaved rows; the first call of a block
  // starts from zero. What lies `ahead` bytes from the weights at hand is needed next, and asked for meanwhile.
  using TileFn = void (*)(const uint8_t* at, int groups, const ActTile&, float* acc, bool first, ptrdiff_t ahead);
  TileFn (*tile_fn)(const Weight&, int rows);
  float (*rms_factor)(const float* x, int64_t n, float eps);  // 1 / root mean square
  // Quantises groups [first, first + groups) of each row x[r], times gamma and factor[r] unless gamma is null.
  void (*quantize)(const float* const* x, const float* gamma, const float* factor, int64_t first, int64_t groups,
                   const ActTileOut& out, int rows);
  // One group: silu(gate) * up, quantised; two blocks of results each, [r][16].
  void (*swiglu)(const float* const* gate, const float* const* up, const ActTileOut& out, int rows);
  // The same with gelu(gate) in its form with tanh.
  void (*geglu)(const float* const* gate, const float* const* up, const ActTileOut& out, int rows);
  void (*highest)(const float* y, int rows, float* out);  // of each row of 16
  void (*cap)(float* y, int rows, float limit);           // y = limit * tanh(y / limit) for rows of 16
  // out[r * stride] (+)= y[r] + bias for rows of 16; bias may be null.
  void (*deliver)(const float* y, const float* bias, float* out, int64_t stride, int rows, bool add);
  void (*attention)(const AttentionPart&);
  // Folds a part into a running (best, sum, out); `fresh` starts from it.
  void (*merge)(float* best, float* sum, float* out, float part_best, float part_sum, const float* part, int dim, bool fresh);
  void (*finish)(const float* acc, float sum, float* out, int dim);
  void (*store_half)(const float* x, uint16_t* out);  // 16 values
  uint64_t (*read)(const uint64_t* words, size_t n);     // sums memory, to time the reading of it
};

const Kernels& kernels_avx512bf16();
const Kernels& kernels_avx512();
const Kernels& kernels_avx2();
const Kernels& kernels_portable();

// By name, or "auto" for the best that this CPU runs; throws if it cannot run them or there are none of that name.
const Kernels& choose_kernels(const std::string& isa);

}  // namespace paceline
