#include "weight.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace paceline {
namespace {

enum : int { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11,
             Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30 };

struct TypeRow { int type; FileBlock file; Quant quant; Scheme scheme; };

constexpr TypeRow kTypes[] = {
    {F32, {1, 4}, Quant::f32, Scheme::none},          {F16, {1, 2}, Quant::f16, Scheme::none},
    {BF16, {1, 2}, Quant::bf16, Scheme::none},        {Q4_0, {32, 18}, Quant::u4, Scheme::half},
    {Q4_1, {32, 20}, Quant::u4, Scheme::half_min},    {Q5_0, {32, 22}, Quant::u5, Scheme::half},
    {Q5_1, {32, 24}, Quant::u5, Scheme::half_min},    {Q8_0, {32, 34}, Quant::u8, Scheme::half},
    {Q2_K, {256, 84}, Quant::u4, Scheme::fine_min},   {Q3_K, {256, 110}, Quant::u4, Scheme::fine},
    {Q4_K, {256, 144}, Quant::u4, Scheme::super_min}, {Q5_K, {256, 176}, Quant::u5, Scheme::super_min},
    {Q6_K, {256, 210}, Quant::u8, Scheme::fine},      {IQ4_NL, {32, 18}, Quant::u8, Scheme::half},
    {IQ4_XS, {256, 136}, Quant::u8, Scheme::fine},
};

const TypeRow& type_row(int type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row;
  throw std::invalid_argument("tensor type " + std::to_string(type) + " has no kernel");
}

constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// One file block in plain form: at most 256 values and their scales.
struct Plain {
  uint8_t u[256];
  uint16_t d = 0, min = 0;            // f16, of the block
  uint8_t scale[16] = {}, low[16] = {};  // of each 16 or 32 values
};

uint16_t read16(const uint8_t* p) { uint16_t x; std::memcpy(&x, p, 2); return x; }
uint32_t read32(const uint8_t* p) { uint32_t x; std::memcpy(&x, p, 4); return x; }

void nibbles32(const uint8_t* q, uint8_t* u) {
  for (int i = 0; i < 16; ++i) { u[i] = q[i] & 15; u[i + 16] = q[i] >> 4; }
}

void decode_q5(const uint8_t* high, const uint8_t* q, uint8_t* u) {
  nibbles32(q, u);
  uint32_t bits = read32(high);
  for (int i = 0; i < 32; ++i) u[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// Six-bit scales and minima of Q4_K and Q5_K, packed in 12 bytes.
void decode_scales_k(const uint8_t* s, Plain& p) {
  for (int j = 0; j < 4; ++j) {
    p.scale[j] = s[j] & 63;
    p.low[j] = s[j + 4] & 63;
    p.scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
    p.low[j + 4] = static_cast<uint8_t>((s[j + 8] >> 4) | (s[j + 4] >> 6) << 4);
  }
}

void decode_q2k(const uint8_t* b, Plain& p) {
  for (int i = 0; i < 16; ++i) { p.scale[i] = b[i] & 15; p.low[i] = b[i] >> 4; }
  for (int i = 0; i < 256; ++i) p.u[i] = b[16 + (i / 128) * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
  p.d = read16(b + 80);
  p.min = read16(b + 82);
}

void decode_q3k(const uint8_t* b, Plain& p) {
  const uint8_t *mask = b, *q = b + 32, *s = b + 96;
  for (int i = 0; i < 256; ++i) {
    int low = q[(i / 128) * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3;
    int high = mask[i % 32] >> (i / 32) & 1;
    p.u[i] = static_cast<uint8_t>(low + 4 * high + 4);  // value low + 4 high - 4, zero point 8
  }
  for (int i = 0; i < 16; ++i) {
    int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    int high = s[8 + i % 4] >> (2 * (i / 4)) & 3;
    p.scale[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  p.d = read16(b + 108);
}

void decode_q4k(const uint8_t* b, Plain& p) {
  p.d = read16(b);
  p.min = read16(b + 2);
  decode_scales_k(b + 4, p);
  for (int j = 0; j < 4; ++j)
    for (int l = 0; l < 32; ++l) {
      p.u[64 * j + l] = b[16 + 32 * j + l] & 15;
      p.u[64 * j + 32 + l] = b[16 + 32 * j + l] >> 4;
    }
}

void decode_q5k(const uint8_t* b, Plain& p) {
  p.d = read16(b);
  p.min = read16(b + 2);
  decode_scales_k(b + 4, p);
  const uint8_t *high = b + 16, *q = b + 48;
  for (int j = 0; j < 4; ++j)
    for (int l = 0; l < 32; ++l) {
      p.u[64 * j + l] = static_cast<uint8_t>((q[32 * j + l] & 15) | (high[l] >> (2 * j) & 1) << 4);
      p.u[64 * j + 32 + l] = static_cast<uint8_t>(q[32 * j + l] >> 4 | (high[l] >> (2 * j + 1) & 1) << 4);
    }
}

void decode_q6k(const uint8_t* b, Plain& p) {
  for (int n = 0; n < 2; ++n)
    for (int l = 0; l < 32; ++l) {
      const uint8_t *low = b + 64 * n, high = b[128 + 32 * n + l];
      uint8_t* u = p.u + 128 * n + l;
      u[0] = static_cast<uint8_t>(((low[l] & 15) | (high & 3) << 4) + 96);  // value q - 32, zero point 128
      u[32] = static_cast<uint8_t>(((low[l + 32] & 15) | (high >> 2 & 3) << 4) + 96);
      u[64] = static_cast<uint8_t>((low[l] >> 4 | (high >> 4 & 3) << 4) + 96);
      u[96] = static_cast<uint8_t>((low[l + 32] >> 4 | (high >> 6) << 4) + 96);
    }
  std::memcpy(p.scale, b + 192, 16);
  p.d = read16(b + 208);
}

void decode_iq4xs(const uint8_t* b, Plain& p) {
  uint16_t high = read16(b + 2);
  for (int g = 0; g < 8; ++g) {
    int s = (b[4 + g / 2] >> (4 * (g % 2)) & 15) | (high >> (2 * g) & 3) << 4;
    p.scale[2 * g] = p.scale[2 * g + 1] = static_cast<uint8_t>(s - 32);
    nibbles32(b + 8 + 16 * g, p.u + 32 * g);
  }
  for (uint8_t& u : p.u) u = static_cast<uint8_t>(kNonlinear[u] + 128);
  p.d = read16(b);
}

void decode(int type, const uint8_t* b, Plain& p) {
  switch (type) {
    case Q4_0: p.d = read16(b); nibbles32(b + 2, p.u); break;
    case Q4_1: p.d = read16(b); p.min = read16(b + 2); nibbles32(b + 4, p.u); break;
    case Q5_0: p.d = read16(b); decode_q5(b + 2, b + 6, p.u); break;
    case Q5_1: p.d = read16(b); p.min = read16(b + 2); decode_q5(b + 4, b + 8, p.u); break;
    case Q8_0: p.d = read16(b); for (int i = 0; i < 32; ++i) p.u[i] = b[2 + i] ^ 0x80; break;
    case IQ4_NL:
      p.d = read16(b);
      nibbles32(b + 2, p.u);
      for (int i = 0; i < 32; ++i) p.u[i] = static_cast<uint8_t>(kNonlinear[p.u[i]] + 128);
      break;
    case Q2_K: decode_q2k(b, p); break;
    case Q3_K: decode_q3k(b, p); break;
    case Q4_K: decode_q4k(b, p); break;
    case Q5_K: decode_q5k(b, p); break;
    case Q6_K: decode_q6k(b, p); break;
    default: decode_iq4xs(b, p); break;
  }
}

constexpr size_t group_quant_bytes(Quant q) { return q == Quant::u4 ? 256 : q == Quant::u5 ? 320 : 512; }

constexpr size_t group_scale_bytes(Scheme s) { return s == Scheme::half_min || s == Scheme::fine_min ? 64 : 32; }
constexpr size_t header_bytes(Scheme s) {
  return s == Scheme::super_min || s == Scheme::fine_min ? 64 : s == Scheme::fine ? 32 : 0;
}

constexpr int64_t kGroups = kSuper / kGroup;  // groups of a super-block

// Offset within a block of the header before group g's super-block.
size_t header_offset(const Weight& w, int64_t g) {
  size_t group = group_quant_bytes(w.quant) + group_scale_bytes(w.scheme);
  return static_cast<size_t>(g / kGroups) * (header_bytes(w.scheme) + kGroups * group);
}
size_t quants_offset(const Weight& w, int64_t g) {
  size_t group = group_quant_bytes(w.quant) + group_scale_bytes(w.scheme);
  return header_offset(w, g) + header_bytes(w.scheme) + static_cast<size_t>(g % kGroups) * group;
}

void put_group_quants(Quant quant, const uint8_t* u, uint8_t* out, int lane) {
  for (int j = 0; j < 4; ++j) {
    uint32_t low = read32(u + 4 * j), high = read32(u + 4 * (j + 4));
    if (quant == Quant::u8) {
      std::memcpy(out + 64 * j + 4 * lane, &low, 4);
      std::memcpy(out + 64 * (j + 4) + 4 * lane, &high, 4);
      continue;
    }
    uint32_t both = (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4;
    std::memcpy(out + 64 * j + 4 * lane, &both, 4);
    if (quant == Quant::u5)
      for (int i = 0; i < 4; ++i) {
        int bit = 4 * lane + i;
        out[256 + 8 * j + bit / 8] |= static_cast<uint8_t>((low >> (8 * i + 4) & 1) << (bit % 8));
        out[256 + 8 * (j + 4) + bit / 8] |= static_cast<uint8_t>((high >> (8 * i + 4) & 1) << (bit % 8));
      }
  }
}

void put16(uint8_t* p, int lane, uint16_t x) { std::memcpy(p + 2 * lane, &x, 2); }

// s: the group's scales; header: of its super-block; within: which group of the file block.
void put_group_scales(Scheme scheme, const Plain& p, int within, uint8_t* s, uint8_t* header, int lane) {
  switch (scheme) {
    case Scheme::half: put16(s, lane, p.d); return;
    case Scheme::half_min: put16(s, lane, p.d); put16(s + 32, lane, p.min); return;
    case Scheme::super_min:
      s[lane] = p.scale[within];
      s[16 + lane] = p.low[within];
      break;
    case Scheme::fine:
      s[lane] = p.scale[2 * within];
      s[16 + lane] = p.scale[2 * within + 1];
      break;
    default:
      for (int h = 0; h < 2; ++h) {
        s[32 * h + lane] = p.scale[2 * within + h];
        s[32 * h + 16 + lane] = p.low[2 * within + h];
      }
      break;
  }
  put16(header, lane, p.d);
  if (scheme != Scheme::fine) put16(header + 32, lane, p.min);
}

int zero_point(Scheme scheme, Quant quant) {
  if (scheme == Scheme::half_min || scheme == Scheme::super_min || scheme == Scheme::fine_min) return 0;
  return quant == Quant::u4 ? 8 : quant == Quant::u5 ? 16 : 128;
}

bool finite_half(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

bool pack_row(const Weight& w, const uint8_t* file, uint8_t* block, int lane) {
  const TypeRow& row = type_row(w.type);
  Plain plain;
  bool finite = true;
  int64_t groups_per_file_block = row.file.values / kGroup;
  for (int64_t f = 0; f < w.cols / row.file.values; ++f) {
    decode(w.type, file + f * row.file.bytes, plain);
    finite = finite && finite_half(plain.d) && finite_half(plain.min);
    for (int64_t i = 0; i < groups_per_file_block; ++i) {
      int64_t g = f * groups_per_file_block + i;
      uint8_t* quants = block + quants_offset(w, g);
      put_group_quants(w.quant, plain.u + kGroup * i, quants, lane);
      put_group_scales(w.scheme, plain, static_cast<int>(i), quants + group_quant_bytes(w.quant), block + header_offset(w, g), lane);
    }
  }
  return finite;
}

float float_of(Quant quant, const uint8_t* p) {
  if (quant == Quant::f32) return bits_to_float(read32(p));
  return quant == Quant::f16 ? half_to_float(read16(p)) : bf16_to_float(read16(p));
}

bool pack_float_row(const Weight& w, const uint8_t* file, uint8_t* block, int lane) {
  size_t size = w.quant == Quant::f32 ? 4 : 2;
  bool finite = true;
  for (int64_t k = 0; k < w.cols; ++k, file += size) {
    finite = finite && std::isfinite(float_of(w.quant, file));
    std::memcpy(block + (static_cast<size_t>(k) * kBlockRows + static_cast<size_t>(lane)) * size, file, size);
  }
  return finite;
}

// Pairs of k-values in a word, with what products take for zero as zero.
bool pack_bf16_row(const Weight& w, const uint8_t* file, uint8_t* block, int lane) {
  bool finite = true;
  for (int64_t k = 0; k < w.cols; ++k, file += 2) {
    float value = bf16_to_float(read16(file));
    finite = finite && std::isfinite(value);
    if (std::abs(value) >= kLeastBf16) std::memcpy(block + (k / 2 * kBlockRows + lane) * 4 + k % 2 * 2, file, 2);
  }
  return finite;
}

// Value i of a decoded block.
float value_of(Scheme scheme, Quant quant, const Plain& p, int i) {
  float d = half_to_float(p.d), min = half_to_float(p.min);
  auto u = static_cast<float>(p.u[i]), signed_u = u - static_cast<float>(zero_point(scheme, quant));
  switch (scheme) {
    case Scheme::half: return d * signed_u;
    case Scheme::half_min: return d * u + min;
    case Scheme::super_min: return d * p.scale[i / 32] * u - min * p.low[i / 32];
    case Scheme::fine: return d * static_cast<int8_t>(p.scale[i / 16]) * signed_u;
    default: return d * p.scale[i / 16] * u - min * p.low[i / 16];
  }
}

}  // namespace

size_t group_offset(const Weight& w, int64_t g) {
  if (w.is_float()) return w.block_bytes / static_cast<size_t>(w.cols / kGroup) * static_cast<size_t>(g);
  return g % kGroups ? quants_offset(w, g) : header_offset(w, g);
}

FileBlock file_block(int type) { return type_row(type).file; }

Weight describe_weight(int type, int64_t rows, int64_t cols) {
  const TypeRow& row = type_row(type);
  if (rows < 1 || cols < 1 || cols % row.file.values || cols % kGroup)
    throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                " cannot be cut into blocks of " + std::to_string(row.file.values));
  Weight w{rows, cols, row.quant, row.scheme, type, 0, nullptr};
  if (w.is_float()) w.block_bytes = static_cast<size_t>(cols) * kBlockRows * static_cast<size_t>(row.file.bytes);
  else w.block_bytes = group_offset(w, cols / kGroup);
  return w;
}

bool pack_blocks(const Weight& w, const uint8_t* file, uint8_t* out, int64_t first, int64_t last) {
  const FileBlock fb = file_block(w.type);
  size_t row_bytes = static_cast<size_t>(w.cols / fb.values) * static_cast<size_t>(fb.bytes);
  bool finite = true;
  for (int64_t b = first; b < last; ++b) {
    uint8_t* block = out + static_cast<size_t>(b) * w.block_bytes;
    std::memset(block, 0, w.block_bytes);
    for (int lane = 0; lane < kBlockRows && b * kBlockRows + lane < w.rows; ++lane) {
      const uint8_t* row = file + static_cast<size_t>(b * kBlockRows + lane) * row_bytes;
      finite &= w.quant == Quant::bf16 ? pack_bf16_row(w, row, block, lane)
                : w.is_float()         ? pack_float_row(w, row, block, lane)
                                       : pack_row(w, row, block, lane);
    }
  }
  return finite;
}

void decode_row(int type, const uint8_t* file_row, int64_t cols, float* out) {
  const TypeRow& row = type_row(type);
  Plain plain;
  for (int64_t k = 0; k < cols; k += row.file.values, file_row += row.file.bytes) {
    if (row.scheme == Scheme::none) {
      out[k] = float_of(row.quant, file_row);
      continue;
    }
    decode(type, file_row, plain);
    for (int i = 0; i < row.file.values; ++i) out[k + i] = value_of(row.scheme, row.quant, plain, i);
  }
}

}  // namespace paceline
