// Sixteen-lane vectors for one instruction set per translation unit.
//
// Every kernel is written once against this file and compiled three times (AVX-512, AVX2, portable), products
// with bf16 weights a fourth time (AVX-512 BF16).
// The operations below are exact or correctly rounded (IEEE 754), and reductions follow one fixed tree,
// so all give the same bits. Nothing here may use an approximate instruction (rcp, rsqrt).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "half.h"

#if PACELINE_ISA
#include <immintrin.h>
#endif

namespace paceline::PACELINE_NS {

constexpr int kLanes = 16;

#if PACELINE_ISA >= 2  // ---------------------------------------------------------------- AVX-512 VNNI

constexpr int kMaxTile = 8;  // rows per tile: 8 float and 8 integer accumulators beside 8 weight vectors
struct VF { __m512 v; };
struct VI { __m512i v; };
struct VB { __m512i v; };  // 64 bytes: 4 consecutive k of 16 output rows

inline VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
inline VF set1(float x) { return {_mm512_set1_ps(x)}; }
inline VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
inline VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
inline VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
inline VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
inline VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline VF abs(VF a) { return {_mm512_abs_ps(a.v)}; }
inline VF load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, VF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline VF load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline VF load_s8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline VI set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline VI add(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline VI shift_left(VI a, int n) { return {_mm512_slli_epi32(a.v, n)}; }
inline VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline VI to_int(VF a) { return {_mm512_cvtps_epi32(a.v)}; }
inline void store_bf16(uint16_t* p, VF a) {
  __m512i bits = _mm512_castps_si512(a.v), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
  __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store_bytes(int8_t* p, VI a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
// 2^n for integral n in a float known to lie in the normal range.
inline VF exp2_int(VF n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// where x < limit: 0, else a
inline VF zero_below(VF a, VF x, VF limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
inline float reduce_add(VF a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(VF a) { return _mm512_reduce_max_ps(a.v); }
inline int32_t reduce_add(VI a) { return _mm512_reduce_add_epi32(a.v); }

inline VB load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Each pair of bf16 as floats: the first, the second.
inline VF low_halves(VB a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline VF high_halves(VB a) { return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(-0x10000)))}; }
#if PACELINE_ISA == 3
// acc[lane] + w[lane][1] * a[1], rounded, + w[lane][0] * a[0], rounded, when nothing is subnormal.
inline VF dot2(VF acc, VB w, const uint16_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(_mm512_set1_epi32(word)))};
}
#endif
inline VB low_nibbles(VB a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline VB high_nibbles(VB a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline VB or_bit4(VB a, const uint8_t* mask) {
  __mmask64 m;
  std::memcpy(&m, mask, 8);
  return {_mm512_mask_add_epi8(a.v, m, a.v, _mm512_set1_epi8(16))};
}
// acc[lane] += sum over 4 bytes of w[lane][i] * a[i], exactly.
template <bool kWide>
inline VI dot4(VI acc, VB w, const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(word))};
}
inline void prefetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

#elif PACELINE_ISA == 1  // ------------------------------------------------------------ AVX2, FMA, F16C

constexpr int kMaxTile = 4;
struct VF { __m256 a, b; };
struct VI { __m256i a, b; };
struct VB { __m256i a, b; };

inline VF load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, VF x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline VF set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline VF add(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline VF sub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline VF mul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline VF div(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline VF max(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline VF min(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline VF fma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline VF abs(VF x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
inline VF load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_half(uint16_t* p, VF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m128i load8(const void* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline VF load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(p + 8)))};
}
inline VF load_s8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p + 8)))};
}
inline VI set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline VI add(VI x, VI y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline VI shift_left(VI x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
inline VF to_float(VI x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline VI to_int(VF x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store_bf16(uint16_t* p, VF x) {
  auto one = [](__m256 y) {
    __m256i bits = _mm256_castps_si256(y), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q)));
  };
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(one(x.a), one(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline void store_bytes(int8_t* p, VI x) {
  alignas(32) int32_t t[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(t), x.a);
  _mm256_store_si256(reinterpret_cast<__m256i*>(t + 8), x.b);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i]);
}
inline VF exp2_int(VF n) {
  auto one = [](__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  };
  return {one(n.a), one(n.b)};
}
inline VF zero_below(VF x, VF y, VF limit) {
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(y.a, limit.a, _CMP_NLT_UQ)),
          _mm256_and_ps(x.b, _mm256_cmp_ps(y.b, limit.b, _CMP_NLT_UQ))};
}
inline float reduce_add(VF x) {
  __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline float reduce_max(VF x) {
  __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_shuffle_ps(d, d, 1)));
}
inline int32_t reduce_add(VI x) {
  __m256i h = _mm256_add_epi32(x.a, x.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline VB load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline VF low_halves(VB x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
inline VF high_halves(VB x) {
  __m256i m = _mm256_set1_epi32(-0x10000);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.a, m)), _mm256_castsi256_ps(_mm256_and_si256(x.b, m))};
}
inline VB low_nibbles(VB x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline VB high_nibbles(VB x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
inline __m256i spread_bits(const uint8_t* mask) {  // 32 bits to 32 bytes, each 0 or 16
  int32_t word;
  std::memcpy(&word, mask, 4);
  const __m256i pick = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                        2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  __m256i x = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), pick), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(x, bit), _mm256_set1_epi8(16));
}
inline VB or_bit4(VB x, const uint8_t* mask) {
  return {_mm256_or_si256(x.a, spread_bits(mask)), _mm256_or_si256(x.b, spread_bits(mask + 4))};
}
inline __m256i dot4_narrow(__m256i w, __m256i a) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1));
}
// vpmaddubsw saturates on full bytes; nibbles stay within 16 bits, so wide weights go in two halves.
template <bool kWide>
inline VI dot4(VI acc, VB w, const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  __m256i a = _mm256_set1_epi32(word);
  if constexpr (!kWide) {
    return {_mm256_add_epi32(acc.a, dot4_narrow(w.a, a)), _mm256_add_epi32(acc.b, dot4_narrow(w.b, a))};
  } else {
    VB lo = low_nibbles(w), hi = high_nibbles(w);
    auto one = [&](__m256i s, __m256i l, __m256i h) {
      return _mm256_add_epi32(s, _mm256_add_epi32(dot4_narrow(l, a), _mm256_slli_epi32(dot4_narrow(h, a), 4)));
    };
    return {one(acc.a, lo.a, hi.a), one(acc.b, lo.b, hi.b)};
  }
}
inline void prefetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

#else  // -------------------------------------------------------------------------------- portable C++

constexpr int kMaxTile = 4;
struct VF { float v[16]; };
struct VI { int32_t v[16]; };
struct VB { uint8_t v[64]; };

template <class F>
inline VF each(F f) { VF r; for (int i = 0; i < 16; ++i) r.v[i] = f(i); return r; }
inline VF load(const float* p) { VF r; std::memcpy(r.v, p, 64); return r; }
inline void store(float* p, VF a) { std::memcpy(p, a.v, 64); }
inline VF set1(float x) { return each([&](int) { return x; }); }
inline VF add(VF a, VF b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline VF sub(VF a, VF b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline VF mul(VF a, VF b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline VF div(VF a, VF b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
// x86's rule for NaN and equal operands: the second one.
inline VF max(VF a, VF b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline VF min(VF a, VF b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline VF fma(VF a, VF b, VF c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
inline VF abs(VF a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
inline VF load_half(const uint16_t* p) { return each([&](int i) { return half_to_float(p[i]); }); }
inline void store_half(uint16_t* p, VF a) { for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]); }
inline void store_bf16(uint16_t* p, VF a) { for (int i = 0; i < 16; ++i) p[i] = float_to_bf16(a.v[i]); }
inline VF load_u8(const uint8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
inline VF load_s8(const uint8_t* p) { return each([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); }); }
inline VI set1(int32_t x) { VI r; for (int32_t& e : r.v) e = x; return r; }
inline VI add(VI a, VI b) { for (int i = 0; i < 16; ++i) a.v[i] += b.v[i]; return a; }
inline VI shift_left(VI a, int n) { for (int32_t& e : a.v) e = static_cast<int32_t>(static_cast<uint32_t>(e) << n); return a; }
inline VF to_float(VI a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline VI to_int(VF a) {
  VI r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] < 2147483648.0f && a.v[i] >= -2147483648.0f ? static_cast<int32_t>(std::nearbyint(a.v[i])) : INT32_MIN;
  return r;
}
inline void store_bytes(int8_t* p, VI a) { for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]); }
inline VF exp2_int(VF n) {
  return each([&](int i) {
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  });
}
inline VF zero_below(VF a, VF x, VF limit) { return each([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : a.v[i]; }); }
inline float reduce_add(VF a) {
  for (int w = 8; w; w >>= 1) for (int i = 0; i < w; ++i) a.v[i] += a.v[i + w];
  return a.v[0];
}
inline float reduce_max(VF a) {
  for (int w = 8; w; w >>= 1) for (int i = 0; i < w; ++i) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}
inline int32_t reduce_add(VI a) {
  int32_t s = 0;
  for (int32_t e : a.v) s += e;
  return s;
}
inline VB load_bytes(const uint8_t* p) { VB r; std::memcpy(r.v, p, 64); return r; }
inline VF halves(VB a, int which) {
  return each([&](int i) { return bf16_to_float(static_cast<uint16_t>(a.v[4 * i + 2 * which] | a.v[4 * i + 2 * which + 1] << 8)); });
}
inline VF low_halves(VB a) { return halves(a, 0); }
inline VF high_halves(VB a) { return halves(a, 1); }
inline VB low_nibbles(VB a) { for (uint8_t& e : a.v) e &= 15; return a; }
inline VB high_nibbles(VB a) { for (uint8_t& e : a.v) e >>= 4; return a; }
inline VB or_bit4(VB a, const uint8_t* mask) {
  for (int i = 0; i < 64; ++i) a.v[i] |= static_cast<uint8_t>((mask[i >> 3] >> (i & 7) & 1) << 4);
  return a;
}
template <bool kWide>
inline VI dot4(VI acc, VB w, const int8_t* a) {
  for (int i = 0; i < 16; ++i) {
    int32_t s = 0;
    for (int j = 0; j < 4; ++j) s += static_cast<int32_t>(w.v[4 * i + j]) * a[j];
    acc.v[i] += s;
  }
  return acc;
}
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

#endif

// f(0) ... f(N - 1) with constants for arguments, so that arrays indexed by them live in registers.
template <int N, class F>
inline void unrolled(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) { (f(std::integral_constant<int, i>()), ...); }(std::make_integer_sequence<int, N>());
}

// Asks for kBytes of weights, into the second-level cache: kernels compute for longer than weights take to arrive, or
// memory takes longer to answer than the hardware's prefetchers run ahead, which end at each page besides.
template <size_t kBytes>
inline void prefetch_ahead(const uint8_t* weights) {
  for (size_t line = 0; line < kBytes; line += 64) prefetch(weights + line);
}

// e^x with about 1 ulp of error; 0 below -87.3, where a float result would leave the normal range.
// Cephes-style reduction x = n ln2 + r and a degree-6 polynomial, all in fused steps.
inline VF exp(VF x) {
  const VF limit = set1(-87.33654f);
  VF y = min(max(x, limit), set1(88.37f));
  VF shifted = fma(y, set1(1.44269504f), set1(12582912.0f));
  VF n = sub(shifted, set1(12582912.0f));
  VF r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  VF p = set1(1.3981999507e-3f);
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(mul(r, r), p, r);
  p = add(p, set1(1.0f));
  return zero_below(mul(p, exp2_int(n)), x, limit);
}

}  // namespace paceline::PACELINE_NS
