// Products with a matrix: linear layers, and the head with its argmax.
#include <algorithm>
#include <cstring>
#include <limits>

#include "tiles.h"

namespace paceline {
namespace {

struct Part { const Weight* w; Tiles tiles; const std::vector<float>* bias; Buffer* out; int first_block; };

class LinearOp : public Op {
 public:
  LinearOp(Acts& in, std::vector<Part> parts, bool add) : Op(add ? "linear+" : "linear"), in_(in), parts_(std::move(parts)), add_(add) {
    for (Part& part : parts_) {
      part.first_block = blocks_;
      blocks_ += static_cast<int>(part.w->blocks());
    }
  }
  Cut plan(Program& p) override { return {blocks_, chunk_of(p, blocks_, parts_[0].w->block_bytes)}; }
  void work(Program& p, int, int first, int last) override {
    for (int b = first, count; b < last; b += count) {
      const Part* part = &parts_.back();
      while (part->first_block > b) --part;
      int end = part->first_block + static_cast<int>(part->w->blocks());
      count = std::min({kSet, last - b, end - b});
      set(p, *part, b - part->first_block, count, p.row_count(in_.wanted));
    }
  }

 private:
  void set(Program& p, const Part& part, int b, int count, int rows) {
    alignas(64) SetResult result;
    each_tile(p, rows, [&](int first, int n) {
      part.tiles(b, count, in_, first, n, result, part.tiles.at(b + count));
      for (int i = 0; i < count; ++i) {
        int64_t column = static_cast<int64_t>(b + i) * kBlockRows;
        int lanes = static_cast<int>(std::min<int64_t>(kBlockRows, part.w->rows - column));
        const float* bias = part.bias ? part.bias->data() + column : nullptr;
        float* out = part.out->row(first) + column;
        if (lanes == kBlockRows) p.kernels_.deliver(result[i], bias, out, part.out->width, n, add_);
        else deliver(result[i], bias, out, part.out->width, n, lanes);
      }
    });
  }
  // The last block of a matrix whose rows do not fill it.
  void deliver(const float* y, const float* bias, float* out, int64_t stride, int rows, int lanes) const {
    for (int r = 0; r < rows; ++r, y += kBlockRows, out += stride)
      for (int i = 0; i < lanes; ++i) {
        float value = bias ? y[i] + bias[i] : y[i];
        out[i] = add_ ? out[i] + value : value;
      }
  }

  Acts& in_;
  std::vector<Part> parts_;
  int blocks_ = 0;
  bool add_;
};

class HeadOp : public Op {
 public:
  HeadOp(const Program& p, Acts& in, const Weight& w, float cap)
      : Op("head"), in_(in), w_(w), tiles_(p, w), cap_(cap), best_(static_cast<size_t>(p.threads())) {}
  Cut plan(Program& p) override {
    for (auto& b : best_) b.assign(static_cast<size_t>(p.rows_.wanted_count), {-std::numeric_limits<float>::infinity(), -1});
    auto blocks = static_cast<int>(w_.blocks());
    return {blocks, chunk_of(p, blocks, w_.block_bytes)};
  }
  void work(Program& p, int member, int first, int last) override {
    for (int b = first; b < last; b += kSet)
      set(p, b, std::min(kSet, last - b), p.rows_.wanted_count, best_[static_cast<size_t>(member)]);
  }
  // After all blocks: equal bests go to the lowest id, whoever found them; -1 if no logit is a number.
  void decide(Program& p) const {
    for (size_t r = 0; r < static_cast<size_t>(p.rows_.wanted_count); ++r) {
      Best top = best_[0][r];
      for (const auto& b : best_)
        if (b[r].value > top.value || (b[r].value == top.value && b[r].id < top.id)) top = b[r];
      p.rows_.argmax[r] = top.id;
    }
  }

 private:
  struct Best { float value; int32_t id; };

  void set(Program& p, int b, int count, int rows, std::vector<Best>& best) {
    alignas(64) SetResult result;
    each_tile(p, rows, [&](int first, int n) {
      tiles_(b, count, in_, first, n, result, tiles_.at(b + count));
      for (int i = 0; i < count; ++i) block(p, static_cast<int64_t>(b + i) * kBlockRows, first, n, result[i], best.data() + first);
    });
  }
  // Logits of the ids from first_id on, for n rows.
  void block(Program& p, int64_t first_id, int first, int n, float* result, Best* best) {
    float highest[8];
    int lanes = static_cast<int>(std::min<int64_t>(kBlockRows, w_.rows - first_id));
    if (cap_ != 0.0f) p.kernels_.cap(result, n, cap_);
    for (int r = 0; r < n; ++r)
      for (int i = lanes; i < kBlockRows; ++i) result[r * kBlockRows + i] = -std::numeric_limits<float>::infinity();
    p.kernels_.highest(result, n, highest);
    for (int r = 0; r < n; ++r) {
      const float* y = result + r * kBlockRows;
      if (highest[r] >= best[r].value) update(best[r], y, highest[r], first_id);
      if (p.rows_.logits) std::memcpy(p.rows_.logits + (first + r) * w_.rows + first_id, y, sizeof(float) * static_cast<size_t>(lanes));
    }
  }
  static void update(Best& best, const float* y, float highest, int64_t first_id) {
    for (int i = 0; i < kBlockRows; ++i) {
      auto id = static_cast<int32_t>(first_id) + i;
      if (y[i] != highest) continue;
      if (highest > best.value || id < best.id) best = {highest, id};
      return;
    }
  }

  Acts& in_;
  const Weight& w_;
  Tiles tiles_;
  float cap_;
  std::vector<std::vector<Best>> best_;
};

class DecideOp : public Op {
 public:
  explicit DecideOp(const HeadOp& head) : Op("head"), head_(head) {}
  Cut plan(Program&) override { return {1, 1}; }
  void work(Program& p, int, int, int) override { head_.decide(p); }

 private:
  const HeadOp& head_;
};

}  // namespace

void Program::linear(int in, const std::vector<int>& weights, const std::vector<int>& biases, const std::vector<int>& outs, bool add) {
  std::vector<Part> parts;
  Acts& a = at(acts_, in);
  for (size_t i = 0; i < weights.size(); ++i) {
    const Weight& w = at(weights_, weights[i]);
    a.serve(w, shape_.max_rows);
    pass_bytes_ += w.bytes();
    parts.push_back({&w, Tiles(*this, w), biases[i] < 0 ? nullptr : &vectors_.at(static_cast<size_t>(biases[i])), &at(buffers_, outs[i]), 0});
  }
  record(std::make_unique<LinearOp>(a, std::move(parts), add));
}

void Program::head(int in, int weight, float cap) {
  Acts& a = at(acts_, in);
  const Weight& w = at(weights_, weight);
  a.serve(w, shape_.max_rows);
  pass_bytes_ += w.bytes();
  vocabulary_ = w.rows;
  auto op = std::make_unique<HeadOp>(*this, a, w, cap);
  auto decide = std::make_unique<DecideOp>(*op);
  record(std::move(op));
  record(std::move(decide));
}

}  // namespace paceline
