// Matrices times tiles of activation rows, for the ops that do so. An op deals blocks of a matrix, and each block meets
// all rows, tile by tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "program.h"

namespace paceline {

// Blocks of one matrix that are worked on together, so that a stretch of activations serves all of them.
constexpr int kSet = 4;
using SetResult = float[kSet][8 * kBlockRows];

// A matrix with its kernels by number of rows. A tile's activations must share the first-level cache with the
// weights that stream through it: wide matrices are walked in stretches of 8 KiB of activations.
class Tiles {
 public:
  Tiles(const Program& p, const Weight& w) : w_(w) {
    for (int n = 1; n <= p.kernels_.max_tile; ++n) by_rows_[n] = p.kernels_.tile_fn(w, n);
  }
  // result[i][r][16] = block i . row r, for `blocks` blocks and the rows of the tile that starts at `first`. `next` is
  // where the walk through the weights goes on afterwards.
  void operator()(int64_t block, int blocks, const Acts& in, int first, int rows, SetResult& result, const uint8_t* next) const {
    const ActTile a = in.tile(first);
    auto groups = static_cast<int>(w_.cols / kGroup);
    // Sums of floating-point products start anew in each stretch, so it must not depend on the rows.
    int stretch = w_.is_float() ? 32 : std::max(32, 256 / rows / 8 * 8);
    for (int g = 0; g < groups; g += stretch) {
      int count = std::min(stretch, groups - g);
      ActTile here = shifted(a, static_cast<size_t>(g) * static_cast<size_t>(rows));
      for (int i = 0; i < blocks; ++i) {
        const uint8_t *piece = at(block + i) + group_offset(w_, g), *then = next;
        if (i + 1 < blocks) then = at(block + i + 1) + group_offset(w_, g);
        else if (g + count < groups) then = at(block) + group_offset(w_, g + count);
        by_rows_[rows](piece, count, here, result[i], g == 0, ahead(piece, then));
      }
    }
  }
  const uint8_t* at(int64_t block) const { return w_.data + static_cast<size_t>(block) * w_.block_bytes; }

 private:
  static ActTile shifted(const ActTile& a, size_t n) {
    auto by = [](const auto* p, size_t d) { return p ? p + d : p; };
    return {a.q + n * kGroup, a.scale + n, by(a.sum, n), by(a.half_sum, 2 * n), by(a.shift, n), by(a.half_shift, 2 * n), by(a.f, n * kGroup),
            by(a.bf16, n * kGroup)};
  }

  // From the weights at hand to those of the next piece of the walk. Small pieces lie one behind the other, and the
  // next one would be asked for too late.
  static ptrdiff_t ahead(const uint8_t* here, const uint8_t* next) {
    constexpr ptrdiff_t kLeast = 4096, kSteady = 8192;
    return next > here && next - here < kLeast ? kSteady : next - here;
  }

  const Weight& w_;
  Kernels::TileFn by_rows_[9] = {};
};

template <class F>
void each_tile(Program& p, int from, int to, F f) {
  for (int first = from; first < to; first += p.kernels_.max_tile) f(first, std::min(p.kernels_.max_tile, to - first));
}
template <class F>
void each_tile(Program& p, int rows, F f) { each_tile(p, 0, rows, f); }

// Chunks of some 32 KiB of weights, yet enough of them to balance.
inline int chunk_of(const Program& p, int units, size_t unit_bytes) {
  return std::clamp(units / (p.threads() * 4), 1, std::max(kSet, static_cast<int>((size_t{32} << 10) / unit_bytes)));
}

}  // namespace paceline
