// Every kernel set against plain loops, at the edges of the arrays it is given: sanitizers watch them.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "half.h"
#include "kernels.h"
#include "storage.h"

using namespace paceline;
using paceline::test::Random;

namespace {

const std::vector<int> kTypes = {0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23};

// Kernel sets of this machine.
std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
    try {
      choose_kernels(name);
      names.emplace_back(name);
    } catch (const std::invalid_argument&) {
    }
  }
  return names;
}

// Where the f16 factors of a file block lie.
std::vector<int> factor_offsets(int type) {
  switch (type) {
    case 3: case 7: case 12: case 13: return {0, 2};
    case 10: return {80, 82};
    case 11: return {108};
    case 14: return {208};
    default: return {0};
  }
}

// A matrix in a file's format, with random fields and scales that make values of about -1 to 1.
std::vector<uint8_t> random_matrix(int type, int64_t rows, int64_t cols, Random& random) {
  FileBlock block = file_block(type);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * (cols / block.values)) * static_cast<size_t>(block.bytes));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next());
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(block.bytes)) {
    if (type == 0) {
      float f = random.unit();
      std::memcpy(&bytes[at], &f, 4);
    } else if (type == 1 || type == 30) {
      uint16_t h = type == 1 ? float_to_half(random.unit()) : static_cast<uint16_t>(float_to_bits(random.unit()) >> 16);
      std::memcpy(&bytes[at], &h, 2);
    } else {
      for (int offset : factor_offsets(type)) {
        uint16_t h = float_to_half(0.002f + 0.001f * random.unit());
        std::memcpy(&bytes[at + static_cast<size_t>(offset)], &h, 2);
      }
    }
  }
  return bytes;
}

bool close(float a, double b, double magnitude) { return std::abs(a - b) <= 1e-5 * magnitude + 1e-30; }

void halves_round_trip() {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    float f = half_to_float(static_cast<uint16_t>(h));
    if (f == f) CHECK(float_to_half(f) == h);
    f = bf16_to_float(static_cast<uint16_t>(h));
    if (f == f) CHECK(float_to_bf16(f) == h);
    else CHECK(std::isnan(bf16_to_float(float_to_bf16(f))));
  }
  CHECK(float_to_bf16(0x1.01p0f) == 0x3f80);  // a tie goes to even
  CHECK(float_to_bf16(0x1.03p0f) == 0x3f82);
  CHECK(float_to_bf16(0x1.010002p0f) == 0x3f81);
  CHECK(std::isinf(bf16_to_float(float_to_bf16(0x1.ffp127f))));
  CHECK(float_to_half(65519.0f) == 0x7bff);
  CHECK(float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(0x1p-25f) == 0);  // a tie goes to even
  CHECK(float_to_half(0x1.8p-25f) == 1);
}

struct Matrix {
  Weight weight;
  std::vector<uint8_t> file, packed;
  Matrix(int type, int64_t rows, int64_t cols, Random& random)
      : weight(describe_weight(type, rows, cols)), file(random_matrix(type, rows, cols, random)), packed(weight.bytes()) {
    CHECK(pack_blocks(weight, file.data(), packed.data(), 0, weight.blocks()));
    weight.data = packed.data();
  }
  std::vector<float> row(int64_t r) const {
    FileBlock block = file_block(weight.type);
    std::vector<float> out(static_cast<size_t>(weight.cols));
    decode_row(weight.type, file.data() + r * (weight.cols / block.values) * block.bytes, weight.cols, out.data());
    return out;
  }
};

// Results [r][16] of block b for `rows` rows of activations.
std::vector<float> products(const Kernels& k, const Matrix& m, const std::vector<std::vector<float>>& x, int64_t b) {
  auto rows = static_cast<int>(x.size());
  Acts acts;
  acts.width = m.weight.cols;
  acts.wanted = false;
  acts.q.resize(static_cast<size_t>(rows * m.weight.cols));
  acts.scale.resize(acts.q.size() / kGroup);
  acts.serve(m.weight, rows);
  std::vector<const float*> at;
  for (const auto& row : x) at.push_back(row.data());
  k.quantize(at.data(), nullptr, nullptr, 0, m.weight.cols / kGroup, acts.out(0, 0, rows), rows);
  std::vector<float> out(static_cast<size_t>(rows * kBlockRows));
  k.tile_fn(m.weight, rows)(m.weight.data + static_cast<size_t>(b) * m.weight.block_bytes, static_cast<int>(m.weight.cols / kGroup),
                            acts.tile(0), out.data(), true, 8192);
  return out;
}

void matrices() {
  for (int type : kTypes) {
    Random random(static_cast<uint64_t>(type));
    Matrix m(type, 37, 512, random);
    std::vector<std::vector<float>> x(8, std::vector<float>(512));
    for (auto& row : x)
      for (float& f : row) f = static_cast<float>(random.below(255) - 127) / 16;  // exact in int8 with a scale of 2^-4
    for (auto& row : x)
      for (size_t g = 0; g < 512; g += 32) row[g] = 127.0f / 16;
    std::vector<float> first;
    for (const std::string& isa : instruction_sets()) {
      const Kernels& k = choose_kernels(isa);
      for (int rows = 1; rows <= k.max_tile; ++rows)
        for (int64_t b = 0; b < m.weight.blocks(); ++b) {
          std::vector<float> y = products(k, m, {x.begin(), x.begin() + rows}, b);
          for (int r = 0; r < rows; ++r)
            for (int64_t lane = 0; lane < kBlockRows && b * kBlockRows + lane < m.weight.rows; ++lane) {
              std::vector<float> w = m.row(b * kBlockRows + lane);
              double sum = 0, magnitude = 0;
              for (size_t i = 0; i < 512; ++i) {
                sum += static_cast<double>(w[i]) * x[static_cast<size_t>(r)][i];
                magnitude += std::abs(static_cast<double>(w[i]) * x[static_cast<size_t>(r)][i]);
              }
              CHECK(close(y[static_cast<size_t>(r * kBlockRows + lane)], sum, magnitude));
            }
          if (rows == 4 && b == 1) {
            if (first.empty()) first = y;
            CHECK(std::memcmp(first.data(), y.data(), first.size() * sizeof(float)) == 0);
          }
        }
    }
  }
}

// What a product with bf16 weights is, to the last bit: two sums that take words of two by turns, the second k first.
float bf16_product(const std::vector<float>& w, const std::vector<float>& x) {
  float sums[2] = {};
  for (size_t word = 0; word < w.size() / 2; ++word)
    for (size_t i : {2 * word + 1, 2 * word}) {
      float weight = std::abs(w[i]) < kLeastBf16 ? 0 : w[i], value = std::abs(x[i]) < kLeastBf16 ? 0 : x[i];
      sums[word % 2] = std::fma(weight, bf16_to_float(float_to_bf16(value)), sums[word % 2]);
    }
  return sums[0] + sums[1];
}

// Weights and activations of any size, most of all near the least, where an instruction might flush what others keep.
void bf16_products() {
  for (int turn = 0; turn < 40; ++turn) {
    Random random(static_cast<uint64_t>(turn));
    Matrix m(30, kBlockRows, 256, random);
    int spread = turn % 2 ? 4 : 60;
    auto scaled = [&](float f) { return std::ldexp(f, random.below(2 * spread) - spread - 54); };
    for (size_t i = 0; i < m.file.size(); i += 2) {
      uint16_t h = float_to_bf16(scaled(random.unit()));
      std::memcpy(&m.file[i], &h, 2);
    }
    CHECK(pack_blocks(m.weight, m.file.data(), m.packed.data(), 0, 1));
    std::vector<std::vector<float>> x(8, std::vector<float>(256));
    for (auto& row : x)
      for (float& f : row) f = scaled(random.unit());
    for (const std::string& isa : instruction_sets()) {
      const Kernels& k = choose_kernels(isa);
      for (int rows = 1; rows <= k.max_tile; ++rows) {
        std::vector<float> y = products(k, m, {x.begin(), x.begin() + rows}, 0);
        for (int r = 0; r < rows; ++r)
          for (int lane = 0; lane < kBlockRows; ++lane)
            CHECK(float_to_bits(y[static_cast<size_t>(r * kBlockRows + lane)]) ==
                  float_to_bits(bf16_product(m.row(lane), x[static_cast<size_t>(r)])));
      }
    }
  }
}

void broken_weights_are_noticed() {
  Random random(1);
  for (int type : kTypes) {
    Weight w = describe_weight(type, 3, 512);
    std::vector<uint8_t> file(random_matrix(type, 3, 512, random)), packed(w.bytes());
    CHECK(pack_blocks(w, file.data(), packed.data(), 0, 1));
    for (size_t i = file.size() - static_cast<size_t>(file_block(type).bytes); i < file.size(); ++i) file[i] = 0xff;
    CHECK(!pack_blocks(w, file.data(), packed.data(), 0, 1));
  }
  for (auto [type, rows, cols] : {std::tuple{2, 0, 32}, {2, 16, 48}, {12, 16, 128}, {0, 16, 20}, {99, 16, 32}}) {
    bool refused = false;
    try {
      describe_weight(type, rows, cols);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

// One segment of 5 blocks against a plain softmax; query i sees the positions from i * window to i * 9 + 1.
void attention(int window, float cap) {
  for (int dim : {16, 80, 128})
    for (const std::string& isa : instruction_sets()) {
      constexpr int kBlocks = 5, kQueries = 9;
      Random random(static_cast<uint64_t>(dim));
      auto size = static_cast<size_t>(16 * dim);
      std::vector<uint16_t> keys(kBlocks * size), values(kBlocks * size);
      for (auto* a : {&keys, &values})
        for (uint16_t& h : *a) h = float_to_half(random.unit());
      std::vector<std::vector<float>> q(kQueries, std::vector<float>(static_cast<size_t>(dim)));
      const float* q_at[kQueries];
      int visible[kQueries], hidden[kQueries];
      for (int i = 0; i < kQueries; ++i) {
        for (float& f : q[static_cast<size_t>(i)]) f = random.unit();
        q_at[i] = q[static_cast<size_t>(i)].data();
        visible[i] = i * 9 + 1;
        hidden[i] = i * window;
      }
      const uint16_t *k[kBlocks], *v[kBlocks];
      for (size_t b = 0; b < kBlocks; ++b) k[b] = keys.data() + b * size, v[b] = values.data() + b * size;
      std::vector<float> scores(kQueries * kSegment), best(kQueries), sum(kQueries), out(kQueries * static_cast<size_t>(dim));
      choose_kernels(isa).attention({k, v, kBlocks, dim, kQueries, q_at, visible, hidden, cap, scores.data(), best.data(), sum.data(), out.data()});
      for (int i = 0; i < kQueries; ++i) {
        std::vector<double> chance;
        double most = -1e30, total = 0;
        for (int t = hidden[i]; t < visible[i]; ++t) {
          double s = 0;
          for (int d = 0; d < dim; ++d) s += static_cast<double>(half_to_float(k[t / 16][d * 16 + t % 16])) * q_at[i][d];
          if (cap != 0.0f) s = cap * std::tanh(s / cap);
          chance.push_back(s);
          most = std::max(most, s);
        }
        for (double& c : chance) total += c = std::exp(c - most);
        CHECK(close(best[static_cast<size_t>(i)], most, 10));
        CHECK(close(sum[static_cast<size_t>(i)], total, total));
        for (int d = 0; d < dim; ++d) {
          double mixed = 0;
          for (int t = hidden[i]; t < visible[i]; ++t) mixed += chance[static_cast<size_t>(t - hidden[i])] * half_to_float(v[t / 16][t % 16 * dim + d]);
          CHECK(close(out[static_cast<size_t>(i * dim + d)], mixed, total));
        }
      }
    }
}

}  // namespace

int main() {
  halves_round_trip();
  matrices();
  bf16_products();
  broken_weights_are_noticed();
  attention(0, 0.0f);
  attention(8, 0.0f);
  attention(2, 3.0f);
  return test::result();
}
