// IEEE binary16 and bfloat16 conversions, exact and round-to-nearest-even, without hardware help.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline {

inline float bits_to_float(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }

inline float bf16_to_float(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

inline uint16_t float_to_bf16(float f) {
  uint32_t b = float_to_bits(f);
  if ((b & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(b >> 16 | 0x40);
  return static_cast<uint16_t>((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

inline float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -tiny : tiny;
}

inline uint16_t float_to_half(float f) {
  uint32_t b = float_to_bits(f), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((a >> 13) & 0x3ff));
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (a < 0x38800000) {                                              // subnormal half
    float scaled = bits_to_float(a) + 0.5f;                          // 0.5 has ulp 2^-24: rounds to even there
    return static_cast<uint16_t>(sign | (float_to_bits(scaled) - 0x3f000000));
  }
  uint32_t rounded = a + 0xfff + ((a >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

}  // namespace paceline
