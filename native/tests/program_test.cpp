// Runs a tiny model through every instruction set, thread count and weight type, for the sanitizers to watch, and
// checks on the way that a row's logits are the same bits in any company. No Python, no framework.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "program.h"

using paceline::Program;
using paceline::Rows;
using paceline::Shape;

namespace {

constexpr int kWidth = 256, kHidden = 512, kVocabulary = 72, kLayers = 2, kHeads = 4, kKvHeads = 2, kDim = 64, kPages = 24, kExperts = 5;
constexpr int kPrompt = 300;  // crosses a segment of 256 positions

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// Random file bytes whose f16 factors are small and finite.
std::vector<uint8_t> random_file(int type, int rows, int cols, std::mt19937& random) {
  paceline::FileBlock block = paceline::file_block(type);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows) * static_cast<size_t>(cols / block.values * block.bytes));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  if (block.values == 1) {
    for (size_t i = static_cast<size_t>(block.bytes) - 1; i < bytes.size(); i += static_cast<size_t>(block.bytes)) bytes[i] = 0x3a;
    return bytes;
  }
  // The factors stand at either end of a block; what else stands there may be anything.
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(block.bytes))
    for (size_t i : {size_t{1}, size_t{3}, static_cast<size_t>(block.bytes) - 3, static_cast<size_t>(block.bytes) - 1})
      bytes[at + i] = 0x10;
  return bytes;
}

struct Model {
  Model(const std::string& isa, int threads, int type) : program(threads, isa, Shape{512, 32, kPages, kLayers, kHeads, kKvHeads, kDim}) {
    std::mt19937 random(7);
    std::vector<float> ones(kWidth, 1.0f), bias(kHeads * kDim, 0.25f);
    auto matrix = [&](int rows, int cols) {
      std::vector<uint8_t> file = random_file(type, rows, cols, random);
      return program.weight(type, rows, cols, file.data(), file.size());
    };
    int x = program.buffer(kWidth, false), q = program.buffer(kHeads * kDim, false), out = program.buffer(kHeads * kDim, false);
    int k = program.buffer(kKvHeads * kDim, false), v = program.buffer(kKvHeads * kDim, false);
    int normed = program.acts(kWidth, false), attended = program.acts(kHeads * kDim, false), active = program.acts(kHidden, false);
    int last = program.acts(kWidth, true), gamma = program.vector(ones.data(), kWidth), offset = program.vector(bias.data(), kHeads * kDim);
    embedding = random_file(2, kVocabulary, kWidth, random);
    program.embed(2, kVocabulary, kWidth, embedding.data(), embedding.size(), x, 1.0f);
    int angles = program.angles(std::vector<double>(kDim / 2, 0.01), 1.0f), side = program.buffer(kWidth, false);
    int scores = program.buffer(kExperts, false), mixture = program.mixture(kExperts, 2, true, kWidth, kHidden);
    int head_gamma = program.vector(ones.data(), kDim);
    for (int layer = 0; layer < kLayers; ++layer) {
      bool plain = layer == 0;  // the other layer has everything a layer can have
      program.norm(x, gamma, 1e-5f, normed, 0);
      program.linear(normed, {matrix(kHeads * kDim, kWidth), matrix(kKvHeads * kDim, kWidth), matrix(kKvHeads * kDim, kWidth)},
                     {offset, -1, -1}, {q, k, v}, false);
      program.rope(layer, q, k, v, angles, plain, 0.125f, plain ? -1 : head_gamma, plain ? -1 : head_gamma, 1e-5f);
      program.attention(layer, q, out, plain ? 0 : 40, plain ? 0.0f : 2.0f);
      program.quantize(out, attended, 0);
      program.linear(attended, {matrix(kWidth, kHeads * kDim)}, {-1}, {plain ? x : side}, plain);
      if (!plain) program.float_norm(side, gamma, 1e-5f, x, true);
      program.norm(x, gamma, 1e-5f, normed, 0);
      if (!plain) {
        program.linear(normed, {matrix(kExperts, kWidth)}, {-1}, {scores}, false);
        program.experts(mixture, scores, x, gamma, 1e-5f, matrix(kExperts * kHidden, kWidth), matrix(kExperts * kHidden, kWidth),
                        matrix(kExperts * kWidth, kHidden));
        program.norm(x, gamma, 1e-5f, normed, 0);
      }
      int gate = matrix(kHidden, kWidth), up = matrix(kHidden, kWidth);
      program.gated(normed, gate, up, active, !plain);
      program.linear(active, {matrix(kWidth, kHidden)}, {-1}, {x}, true);
    }
    program.norm(x, gamma, 1e-5f, last, 0);
    program.head(last, matrix(kVocabulary, kWidth), 5.0f);
    for (int page = 0; page < kPages; ++page) table.push_back(kPages - 1 - page);
  }

  // Logits of the last row of `count` rows from position `first` on; tokens are a function of the position.
  std::vector<float> pass(int first, int count, std::vector<int32_t> slots = {}, std::vector<int32_t> parents = {}) {
    std::vector<int32_t> tokens, positions, sequences(static_cast<size_t>(count), 0), wanted{count - 1};
    for (int i = 0; i < count; ++i) {
      int position = parents.empty() || parents[static_cast<size_t>(i)] < 0 ? first + i : positions[static_cast<size_t>(parents[static_cast<size_t>(i)])] + 1;
      positions.push_back(position);
      tokens.push_back((position * 31) % kVocabulary);
    }
    if (slots.empty()) slots = positions;
    if (parents.empty()) parents.assign(static_cast<size_t>(count), -1);
    std::vector<float> logits(kVocabulary);
    int32_t best = -1;
    Rows rows;
    rows.count = count;
    rows.wanted_count = rows.sequences_count = 1;
    rows.table_width = kPages;
    rows.tokens = tokens.data();
    rows.positions = positions.data();
    rows.slots = slots.data();
    rows.parents = parents.data();
    rows.sequences = sequences.data();
    rows.tables = table.data();
    rows.wanted = wanted.data();
    rows.logits = logits.data();
    rows.argmax = &best;
    program.run(rows, 0);
    for (int i = 0; i < kVocabulary; ++i)
      require(logits[static_cast<size_t>(best)] > logits[static_cast<size_t>(i)] || best <= i, "argmax is not the lowest best");
    return logits;
  }

  std::vector<uint8_t> embedding;
  std::vector<int32_t> table;
  Program program;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

std::vector<float> check(const std::string& isa, int threads, int type) {
  std::string where = isa + ", " + std::to_string(threads) + " threads, type " + std::to_string(type);
  Model model(isa, threads, type);
  std::vector<float> together = model.pass(0, kPrompt);
  model.pass(0, kPrompt - 9);
  std::vector<float> draft = model.pass(kPrompt - 9, 9);
  require(same(together, draft), "nine rows differ from a prefill: " + where);
  model.pass(kPrompt - 9, 8);
  require(same(together, model.pass(kPrompt - 1, 1)), "a lone row differs from a prefill: " + where);
  // The last row again as a second child, filed behind its sibling, and then moved to its place.
  std::vector<float> sibling = model.pass(kPrompt - 2, 3, {kPrompt - 2, kPrompt - 1, kPrompt}, {-1, -1, 0});
  require(same(together, sibling), "a sibling differs: " + where);
  int32_t from = kPrompt, to = kPrompt - 1;
  model.program.move(model.table.data(), nullptr, &from, &to, 1);
  std::vector<float> next = model.pass(kPrompt, 1);
  model.program.copy_page(model.table[0], 0, false);
  model.table[0] = 0;
  require(same(next, model.pass(kPrompt, 1)), "a copied page differs: " + where);
  return next;
}

}  // namespace

int main() {
  for (int type : {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30}) {
    std::vector<float> first;
    for (const char* isa : {"avx512bf16", "avx512", "avx2", "portable"})
      for (int threads : {1, 2, 5}) {
        try {
          paceline::choose_kernels(isa);
        } catch (const std::invalid_argument&) {
          continue;
        }
        if (std::string(isa) == "portable" && threads != 2) continue;  // slow, and the same code path
        std::vector<float> logits = check(isa, threads, type);
        if (first.empty()) first = logits;
        require(same(first, logits), std::string(isa) + " differs from the first, type " + std::to_string(type));
      }
    std::printf("type %d ok\n", type);
  }
}
