// Products with bf16 weights, over simd.h. Words of two k-values: [k/2][16] of weights against [k/2][R] of
// activations, both of which hold nothing between zero and kLeastBf16.
//
// A word adds two fused steps to its row's sum, the odd k first: what AVX-512 BF16 does in one instruction, except
// that it takes subnormal numbers for zero, of which there are none.

#include "kernels.h"
#include "simd.h"

namespace paceline::PACELINE_NS {
namespace {

#if PACELINE_ISA == 3

// Activations of one group.
template <int R>
struct PairGroup {
  const uint16_t* pairs;  // [16][R][2]
  explicit PairGroup(const uint16_t* p) : pairs(p) {}
  VF step(VF acc, VB w, int i) const { return dot2(acc, w, pairs + 2 * i); }
};

#else

template <int R>
struct PairGroup {
  alignas(64) float low[kLanes * R], high[kLanes * R];
  explicit PairGroup(const uint16_t* p) {
    for (int i = 0; i < R; ++i) {
      VB words = load_bytes(reinterpret_cast<const uint8_t*>(p) + 64 * i);
      store(low + kLanes * i, low_halves(words));
      store(high + kLanes * i, high_halves(words));
    }
  }
  VF step(VF acc, VB w, int i) const { return fma(low_halves(w), set1(low[i]), fma(high_halves(w), set1(high[i]), acc)); }
};

#endif

// Words take turns between two sums: two chains hide the latency of a lone row.
template <int R>
void bf16_tile(const uint8_t* w, int groups, const ActTile& a, float* out, bool first, ptrdiff_t ahead) {
  constexpr int kWords = kGroup / 2;
  VF even[R], odd[R];
  unrolled<R>([&](auto r) { even[r] = odd[r] = set1(0.0f); });
  const uint16_t* x = a.bf16;
  for (int g = 0; g < groups; ++g, w += 64 * kWords, x += kGroup * R) {
    prefetch_ahead<64 * kWords>(w + ahead);
    const PairGroup<R> group(x);
    unrolled<kWords / 2>([&](auto j) {
      VB w0 = load_bytes(w + 128 * j), w1 = load_bytes(w + 128 * j + 64);
      unrolled<R>([&](auto r) { even[r] = group.step(even[r], w0, 2 * R * j + r); });
      unrolled<R>([&](auto r) { odd[r] = group.step(odd[r], w1, 2 * R * j + R + r); });
    });
  }
  unrolled<R>([&](auto r) {
    VF sum = add(even[r], odd[r]);
    store(out + kLanes * r, first ? sum : add(load(out + kLanes * r), sum));
  });
}

Kernels::TileFn bf16_tile_fn(int rows) {
  static constexpr Kernels::TileFn table[8] = {bf16_tile<1>, bf16_tile<2>, bf16_tile<3>, bf16_tile<4>,
                                               bf16_tile<5>, bf16_tile<6>, bf16_tile<7>, bf16_tile<8>};
  return table[rows - 1];
}

}  // namespace
}  // namespace paceline::PACELINE_NS
