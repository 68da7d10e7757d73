// All kernels, written once over simd.h. Included by kernels_<isa>.cpp with PACELINE_ISA and PACELINE_NS.
//
// Row invariance: no operation mixes rows of a tile, and the order of operations on a row depends only on
// the weight and the row. Integer dot products are exact; each group adds one fused step per row, in order.

#include "kernels.h"
#include "simd.h"
#include "tile_bf16.inl"

namespace paceline::PACELINE_NS {
namespace {

// ------------------------------------------------------------------------------------ quantised weights

template <Quant Q>
constexpr size_t group_bytes() { return Q == Quant::u4 ? 256 : Q == Quant::u5 ? 320 : 512; }

template <Quant Q>
inline VB vector_of(const uint8_t* q, int j) {
  if constexpr (Q == Quant::u8) return load_bytes(q + 64 * j);
  VB bytes = load_bytes(q + 64 * (j & 3));
  VB w = j < 4 ? low_nibbles(bytes) : high_nibbles(bytes);
  if constexpr (Q == Quant::u5) w = or_bit4(w, q + 256 + 8 * j);
  return w;
}

constexpr bool has_min(Scheme s) { return s == Scheme::half_min || s == Scheme::super_min || s == Scheme::fine_min; }
constexpr bool is_fine(Scheme s) { return s == Scheme::fine || s == Scheme::fine_min; }

struct SuperScale { VF d, min; };

template <Scheme S>
inline SuperScale load_super(const uint8_t* s) {
  SuperScale r{};
  if constexpr (S != Scheme::half && S != Scheme::half_min) r.d = load_half(reinterpret_cast<const uint16_t*>(s));
  if constexpr (S == Scheme::super_min || S == Scheme::fine_min)
    r.min = sub(set1(0.0f), load_half(reinterpret_cast<const uint16_t*>(s + 32)));
  return r;
}

// Scale and minimum of half h of a group whose scales start at s.
template <Scheme S>
inline VF scale_at(const uint8_t* s, const SuperScale& super, int h) {
  if constexpr (S == Scheme::half || S == Scheme::half_min) return load_half(reinterpret_cast<const uint16_t*>(s));
  if constexpr (S == Scheme::super_min) return mul(super.d, load_u8(s));
  if constexpr (S == Scheme::fine) return mul(super.d, load_s8(s + 16 * h));
  return mul(super.d, load_u8(s + 32 * h));
}
template <Scheme S>
inline VF min_at(const uint8_t* s, const SuperScale& super, int h) {
  if constexpr (S == Scheme::half_min) return load_half(reinterpret_cast<const uint16_t*>(s + 32));
  if constexpr (S == Scheme::super_min) return mul(super.min, load_u8(s + 16));
  return mul(super.min, load_u8(s + 32 * h + 16));
}

template <Scheme S>
constexpr size_t group_scale_bytes() {
  return S == Scheme::half || S == Scheme::super_min || S == Scheme::fine ? 32 : 64;
}
template <Scheme S>
constexpr size_t super_bytes() {
  return S == Scheme::super_min || S == Scheme::fine_min ? 64 : S == Scheme::fine ? 32 : 0;
}

// One half (or whole) group: integer dots of R rows, then one fused step each.
template <Quant Q, Scheme S, int R, int kFirst, int kLast>
inline void accumulate(VF (&acc)[R], const uint8_t* q, VF scale, const int8_t* a, const float* a_scale,
                       const int32_t* start) {
  VI dot[R];
  for (int r = 0; r < R; ++r) {
    if constexpr (has_min(S)) dot[r] = set1(0);
    else dot[r] = shift_left(set1(start[r]), Q == Quant::u4 ? 0 : Q == Quant::u5 ? 1 : 4);
  }
#pragma GCC unroll 8
  for (int j = kFirst; j < kLast; ++j) {
    VB w = vector_of<Q>(q, j);
    for (int r = 0; r < R; ++r) dot[r] = dot4<Q == Quant::u8>(dot[r], w, a + 4 * (R * j + r));
  }
  for (int r = 0; r < R; ++r) acc[r] = fma(to_float(dot[r]), mul(scale, set1(a_scale[r])), acc[r]);
}

template <Quant Q, Scheme S, int R>
void tile(const uint8_t* q, int groups, const ActTile& a, float* out, bool first, ptrdiff_t ahead) {
  VF acc[R];
  for (int r = 0; r < R; ++r) acc[r] = first ? set1(0.0f) : load(out + kLanes * r);
  SuperScale super{};
  for (int g = 0; g < groups; ++g) {
    if constexpr (super_bytes<S>() != 0) {
      if (g % 8 == 0) { super = load_super<S>(q); q += super_bytes<S>(); }
    }
    const uint8_t* s = q + group_bytes<Q>();
    prefetch_ahead<group_bytes<Q>() + group_scale_bytes<S>()>(q + ahead);
    const auto at = static_cast<size_t>(g) * R;
    const int8_t* row = a.q + at * kGroup;
    if constexpr (is_fine(S)) {
      for (int h = 0; h < 2; ++h) {
        VF scale = scale_at<S>(s, super, h);
        const int32_t* start = a.half_shift + 2 * at + static_cast<size_t>(h) * R;
        if (h == 0) accumulate<Q, S, R, 0, 4>(acc, q, scale, row, a.scale + at, start);
        else accumulate<Q, S, R, 4, 8>(acc, q, scale, row, a.scale + at, start);
        if constexpr (has_min(S)) {
          VF low = min_at<S>(s, super, h);
          for (int r = 0; r < R; ++r) acc[r] = fma(low, set1(a.half_sum[2 * at + static_cast<size_t>(h * R + r)]), acc[r]);
        }
      }
    } else {
      accumulate<Q, S, R, 0, 8>(acc, q, scale_at<S>(s, super, 0), row, a.scale + at, a.shift + at);
      if constexpr (has_min(S)) {
        VF low = min_at<S>(s, super, 0);
        for (int r = 0; r < R; ++r) acc[r] = fma(low, set1(a.sum[at + static_cast<size_t>(r)]), acc[r]);
      }
    }
    q = s + group_scale_bytes<S>();
  }
  for (int r = 0; r < R; ++r) store(out + kLanes * r, acc[r]);
}

// ------------------------------------------------------------------------------ floating-point weights

template <Quant Q>
inline VF load_weight(const uint8_t* p) {
  if constexpr (Q == Quant::f32) return load(reinterpret_cast<const float*>(p));
  return load_half(reinterpret_cast<const uint16_t*>(p));
}

// Even and odd k have accumulators of their own: two chains hide the latency of a lone row.
template <Quant Q, Scheme, int R>
void float_tile(const uint8_t* w, int groups, const ActTile& a, float* out, bool first, ptrdiff_t ahead) {
  constexpr size_t kStep = kLanes * (Q == Quant::f32 ? 4 : 2);
  VF even[R], odd[R];
  unrolled<R>([&](auto r) { even[r] = odd[r] = set1(0.0f); });
  const float* f = a.f;
  for (int k = 0; k < groups * kGroup; k += 2, w += 2 * kStep, f += 2 * R) {
    prefetch_ahead<2 * kStep>(w + ahead);
    VF w0 = load_weight<Q>(w), w1 = load_weight<Q>(w + kStep);
    unrolled<R>([&](auto r) { even[r] = fma(w0, set1(f[r]), even[r]); });
    unrolled<R>([&](auto r) { odd[r] = fma(w1, set1(f[R + r]), odd[r]); });
  }
  unrolled<R>([&](auto r) {
    VF sum = add(even[r], odd[r]);
    store(out + kLanes * r, first ? sum : add(load(out + kLanes * r), sum));
  });
}

template <Quant Q, Scheme S, int R>
constexpr Kernels::TileFn pick() {
  if constexpr (S == Scheme::none) return float_tile<Q, S, R>;
  else return tile<Q, S, R>;
}

template <Quant Q, Scheme S>
Kernels::TileFn by_rows(int rows) {
  static constexpr Kernels::TileFn table[8] = {pick<Q, S, 1>(), pick<Q, S, 2>(), pick<Q, S, 3>(), pick<Q, S, 4>(),
                                               pick<Q, S, 5>(), pick<Q, S, 6>(), pick<Q, S, 7>(), pick<Q, S, 8>()};
  return table[rows - 1];
}

Kernels::TileFn tile_fn(const Weight& w, int rows) {
  switch (w.quant) {
    case Quant::f32: return by_rows<Quant::f32, Scheme::none>(rows);
    case Quant::f16: return by_rows<Quant::f16, Scheme::none>(rows);
    case Quant::bf16: return bf16_tile_fn(rows);
    case Quant::u8: return w.scheme == Scheme::half ? by_rows<Quant::u8, Scheme::half>(rows)
                                                    : by_rows<Quant::u8, Scheme::fine>(rows);
    case Quant::u5:
      return w.scheme == Scheme::half       ? by_rows<Quant::u5, Scheme::half>(rows)
             : w.scheme == Scheme::half_min ? by_rows<Quant::u5, Scheme::half_min>(rows)
                                            : by_rows<Quant::u5, Scheme::super_min>(rows);
    default: break;
  }
  switch (w.scheme) {
    case Scheme::half: return by_rows<Quant::u4, Scheme::half>(rows);
    case Scheme::half_min: return by_rows<Quant::u4, Scheme::half_min>(rows);
    case Scheme::super_min: return by_rows<Quant::u4, Scheme::super_min>(rows);
    case Scheme::fine: return by_rows<Quant::u4, Scheme::fine>(rows);
    default: return by_rows<Quant::u4, Scheme::fine_min>(rows);
  }
}

// ------------------------------------------------------------------------------------------ activations

// Symmetric int8 of one group of row r: its largest value becomes 127. Below 2^-60 everything is as good as zero.
inline void quantize_group(VF a, VF b, const ActTileOut& t, int64_t g, int rows, int r) {
  float most = reduce_max(max(abs(a), abs(b)));
  bool nothing = most < 0x1p-60f;
  float scale = nothing ? 0.0f : most / 127.0f;
  VF inverse = set1(nothing ? 0.0f : 127.0f / most);
  VI low = to_int(mul(a, inverse)), high = to_int(mul(b, inverse));
  alignas(32) int8_t bytes[kGroup];
  store_bytes(bytes, low);
  store_bytes(bytes + kLanes, high);
  int8_t* q = t.q + 4 * (g * 8 * rows + r);
  for (int j = 0; j < 8; ++j, q += 4 * rows) std::memcpy(q, bytes + 4 * j, 4);
  int64_t at = g * rows + r, half = 2 * g * rows + r;
  t.scale[at] = scale;
  if (t.shift) t.shift[at] = -8 * reduce_add(add(low, high));
  if (t.sum) t.sum[at] = scale * static_cast<float>(reduce_add(add(low, high)));
  if (t.half_shift) {
    t.half_shift[half] = -8 * reduce_add(low);
    t.half_shift[half + rows] = -8 * reduce_add(high);
  }
  if (t.half_sum) {
    t.half_sum[half] = scale * static_cast<float>(reduce_add(low));
    t.half_sum[half + rows] = scale * static_cast<float>(reduce_add(high));
  }
  if (t.f) {
    alignas(64) float values[kGroup];
    store(values, a);
    store(values + kLanes, b);
    for (int k = 0; k < kGroup; ++k) t.f[(g * kGroup + k) * rows + r] = values[k];
  }
  if (t.bf16) {
    const VF least = set1(kLeastBf16);
    alignas(64) uint16_t values[kGroup];
    store_bf16(values, zero_below(a, abs(a), least));
    store_bf16(values + kLanes, zero_below(b, abs(b), least));
    uint16_t* pair = t.bf16 + 2 * (g * (kGroup / 2) * rows + r);
    for (int j = 0; j < kGroup / 2; ++j, pair += 2 * rows) std::memcpy(pair, values + 2 * j, 4);
  }
}

void quantize(const float* const* x, const float* gamma, const float* factor, int64_t first, int64_t groups, const ActTileOut& out,
              int rows) {
  const ActTileOut t = out;  // a copy: stores of bytes might alias the original
  for (int r = 0; r < rows; ++r) {
    const float* row = x[r] + first * kGroup;
    const float* weight = gamma ? gamma + first * kGroup : nullptr;
    VF scale = set1(gamma ? factor[r] : 1.0f);
    for (int64_t g = 0; g < groups; ++g, row += kGroup) {
      VF a = load(row), b = load(row + kLanes);
      if (weight) {
        a = mul(mul(a, scale), load(weight + g * kGroup));
        b = mul(mul(b, scale), load(weight + g * kGroup + kLanes));
      }
      quantize_group(a, b, t, g, rows, r);
    }
  }
}

float rms_factor(const float* x, int64_t n, float eps) {
  VF even = set1(0.0f), odd = even;
  for (int64_t i = 0; i < n; i += kGroup) {
    even = fma(load(x + i), load(x + i), even);
    odd = fma(load(x + i + kLanes), load(x + i + kLanes), odd);
  }
  return 1.0f / std::sqrt(reduce_add(add(even, odd)) / static_cast<float>(n) + eps);
}

inline VF silu(VF x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

// x / 2 (1 + tanh u) = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3); arXiv:1606.08415.
inline VF gelu(VF x) {
  VF u = mul(x, fma(mul(x, x), set1(2 * 0.7978845608f * 0.044715f), set1(2 * 0.7978845608f)));
  return div(x, add(set1(1.0f), exp(sub(set1(0.0f), u))));
}

inline VF tanh(VF x) { return sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), exp(add(x, x))))); }

template <VF (*F)(VF)>
void gated(const float* const* gate, const float* const* up, const ActTileOut& out, int rows) {
  const ActTileOut t = out;
  for (int r = 0; r < rows; ++r) {
    int64_t at = kLanes * r;
    quantize_group(mul(F(load(gate[0] + at)), load(up[0] + at)), mul(F(load(gate[1] + at)), load(up[1] + at)), t, 0, rows, r);
  }
}

void highest(const float* y, int rows, float* out) {
  for (int r = 0; r < rows; ++r) out[r] = reduce_max(load(y + kLanes * r));
}

inline VF capped(VF x, VF limit) { return mul(limit, tanh(div(x, limit))); }

void cap(float* y, int rows, float limit) {
  for (int r = 0; r < rows; ++r, y += kLanes) store(y, capped(load(y), set1(limit)));
}

void deliver(const float* y, const float* bias, float* out, int64_t stride, int rows, bool add_to) {
  VF offset = bias ? load(bias) : set1(0.0f);
  for (int r = 0; r < rows; ++r, y += kLanes, out += stride) {
    VF value = load(y);
    if (bias) value = add(value, offset);
    store(out, add_to ? add(load(out), value) : value);
  }
}

void store_half16(const float* x, uint16_t* out) {
  const VF top = set1(65504.0f);  // a finite cache: masked positions are multiplied by zero
  store_half(out, min(max(load(x), sub(set1(0.0f), top)), top));
}

// -------------------------------------------------------------------------------------------- attention

template <int N>
void scores_of(const AttentionPart& p, int first) {
  const float* q[N];
  unrolled<N>([&](auto i) { q[i] = p.q[first + i]; });
  for (int b = 0; b < p.blocks; ++b) {
    VF acc[N];
    unrolled<N>([&](auto i) { acc[i] = set1(0.0f); });
    const uint16_t *k = p.k[b], *then = p.k[std::min(b + 2, p.blocks - 1)], *value = p.v[b];
    for (int d = 0; d < p.dim; ++d) {
      if (first == 0 && d % 2 == 0) {  // a line; pieces of the cache are too small for the hardware to foresee
        prefetch(then + kLanes * d);
        prefetch(value + kLanes * d);
      }
      VF key = load_half(k + kLanes * d);
      unrolled<N>([&](auto i) { acc[i] = fma(key, set1(q[i][d]), acc[i]); });
    }
    for (int i = 0; i < N; ++i) {
      float* s = p.scores + (first + i) * kSegment + kLanes * b;
      store(s, p.cap == 0.0f ? acc[i] : capped(acc[i], set1(p.cap)));
      for (int lane = std::max(0, p.visible[first + i] - kLanes * b); lane < kLanes; ++lane) s[lane] = -INFINITY;
      for (int lane = std::min(kLanes, p.hidden[first + i] - kLanes * b); lane-- > 0;) s[lane] = -INFINITY;
    }
  }
}

void softmax_of(const AttentionPart& p, int i) {
  float* s = p.scores + i * kSegment;
  VF top = set1(-INFINITY);
  for (int b = 0; b < p.blocks; ++b) top = max(load(s + kLanes * b), top);
  p.best[i] = reduce_max(top);
  VF total = set1(0.0f), best = set1(p.best[i]);
  for (int b = 0; b < p.blocks; ++b) {
    VF e = exp(sub(load(s + kLanes * b), best));
    store(s + kLanes * b, e);
    total = add(total, e);
  }
  p.sum[i] = reduce_add(total);
}

// Columns [c, c + 16 C) of the outputs of N queries.
template <int N, int C>
void values_of(const AttentionPart& p, int first, int c, int positions) {
  VF acc[N][C];
  const float* weights[N];
  unrolled<N>([&](auto i) {
    weights[i] = p.scores + (first + i) * kSegment;
    unrolled<C>([&](auto j) { acc[i][j] = set1(0.0f); });
  });
  for (int t = 0; t < positions; ++t) {
    const uint16_t* v = p.v[t / kLanes] + (t % kLanes) * p.dim + c;
    VF value[C];
    unrolled<C>([&](auto j) { value[j] = load_half(v + kLanes * j); });
    unrolled<N>([&](auto i) {
      VF weight = set1(weights[i][t]);
      unrolled<C>([&](auto j) { acc[i][j] = fma(value[j], weight, acc[i][j]); });
    });
  }
  unrolled<N>([&](auto i) {
    unrolled<C>([&](auto j) { store(p.out + (first + i) * p.dim + c + kLanes * j, acc[i][j]); });
  });
}

// Few queries are done in fewer walks over the values; with many, two columns at a time leave registers for all of them.
template <int N>
void values_all(const AttentionPart& p, int first, int positions) {
  constexpr int kColumns = N > 4 ? 2 : 4;
  int c = 0;
  for (; c + kLanes * kColumns <= p.dim; c += kLanes * kColumns) values_of<N, kColumns>(p, first, c, positions);
  for (; c < p.dim; c += kLanes) values_of<N, 1>(p, first, c, positions);
}

// f(N, first) for queries first to first + N, eight at a time as long as there are so many.
template <class F>
void by_eights(int queries, F f) {
  int i = 0;
  for (; i + 8 <= queries; i += 8) f(std::integral_constant<int, 8>(), i);
  switch (queries - i) {
    case 7: f(std::integral_constant<int, 7>(), i); break;
    case 6: f(std::integral_constant<int, 6>(), i); break;
    case 5: f(std::integral_constant<int, 5>(), i); break;
    case 4: f(std::integral_constant<int, 4>(), i); break;
    case 3: f(std::integral_constant<int, 3>(), i); break;
    case 2: f(std::integral_constant<int, 2>(), i); break;
    case 1: f(std::integral_constant<int, 1>(), i); break;
    default: break;
  }
}

void attention(const AttentionPart& p) {
  by_eights(p.queries, [&](auto n, int first) { scores_of<n()>(p, first); });
  int positions = 0;
  for (int i = 0; i < p.queries; ++i) {
    positions = std::max(positions, std::min(p.visible[i], p.blocks * kLanes));
    if (p.visible[i] > 0) softmax_of(p, i);
    else {
      p.best[i] = -INFINITY;
      p.sum[i] = 0.0f;
      std::memset(p.scores + i * kSegment, 0, kSegment * sizeof(float));
    }
  }
  by_eights(p.queries, [&](auto n, int first) { values_all<n()>(p, first, positions); });
}

void merge(float* best, float* sum, float* out, float part_best, float part_sum, const float* part, int dim, bool fresh) {
  if (fresh) {
    *best = part_best;
    *sum = part_sum;
    std::memcpy(out, part, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  float top = part_best > *best ? part_best : *best;
  alignas(64) float factor[kLanes] = {*best - top, part_best - top};
  store(factor, exp(load(factor)));
  *sum = std::fma(part_sum, factor[1], *sum * factor[0]);
  for (int d = 0; d < dim; d += kLanes)
    store(out + d, fma(load(part + d), set1(factor[1]), mul(load(out + d), set1(factor[0]))));
  *best = top;
}

void finish(const float* acc, float sum, float* out, int dim) {
  for (int d = 0; d < dim; d += kLanes) store(out + d, div(load(acc + d), set1(sum)));
}

uint64_t read(const uint64_t* words, size_t n) {
  const auto* x = reinterpret_cast<const float*>(words);
  VF a = set1(0.0f), b = a, c = a, d = a;
  for (size_t i = 0; i + 64 <= 2 * n; i += 64) {
    a = max(load(x + i), a);
    b = max(load(x + i + 16), b);
    c = max(load(x + i + 32), c);
    d = max(load(x + i + 48), d);
  }
  return reduce_max(max(max(a, b), max(c, d))) > 0.5f;
}

}  // namespace

const Kernels kKernels = {PACELINE_NAME, kMaxTile, tile_fn, rms_factor, quantize, gated<silu>, gated<gelu>, highest, cap, deliver, attention, merge, finish, store_half16, read};

}  // namespace paceline::PACELINE_NS
