// Rotary positions, the filing of keys and values, and attention over the cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "program.h"

namespace paceline {
namespace {

class AnglesOp : public Op {
 public:
  explicit AnglesOp(Angles& angles) : Op("rope"), angles_(angles) {}
  Cut plan(Program& p) override { return {p.rows_.count, 1}; }
  void work(Program& p, int, int first, int last) override {
    size_t half = angles_.frequencies.size();
    for (int r = first; r < last; ++r) {
      float* out = angles_.values.data() + static_cast<size_t>(r) * 2 * half;
      for (size_t i = 0; i < half; ++i) {
        double a = angles_.frequencies[i] * p.rows_.positions[r];
        out[i] = static_cast<float>(std::cos(a)) * angles_.magnitude;
        out[half + i] = static_cast<float>(std::sin(a)) * angles_.magnitude;
      }
    }
  }

 private:
  Angles& angles_;
};

// Norms of single heads, or none.
struct HeadNorms {
  const std::vector<float>*q = nullptr, *k = nullptr;
  float eps = 0;
};

// Turns queries and keys and files keys and values. A unit is one kv head of up to 32 rows: neighbouring
// positions share cache lines of the key blocks.
class RopeOp : public Op {
 public:
  RopeOp(int layer, Buffer* q, Buffer& k, Buffer& v, const Angles& angles, bool interleaved, float query_scale, HeadNorms norms)
      : Op("rope"), layer_(layer), q_(q), k_(k), v_(v), angles_(angles), interleaved_(interleaved), query_scale_(query_scale), norms_(norms) {}
  Cut plan(Program& p) override { return {(p.rows_.count + kRows - 1) / kRows * p.shape_.kv_heads, 1}; }
  void work(Program& p, int, int first, int last) override {
    for (int u = first; u < last; ++u) {
      int row = u / p.shape_.kv_heads * kRows;
      for (int r = row; r < std::min(row + kRows, p.rows_.count); ++r) head(p, r, u % p.shape_.kv_heads);
    }
  }

 private:
  static constexpr int kRows = 32, kLanes = 16;

  void normalize(Program& p, float* x, const std::vector<float>* gamma) const {
    if (!gamma) return;
    float factor = p.kernels_.rms_factor(x, p.shape_.head_dim, norms_.eps);
    for (int d = 0; d < p.shape_.head_dim; ++d) x[d] = x[d] * factor * (*gamma)[static_cast<size_t>(d)];
  }
  void rotate(float* x, const float* angles) const {
    auto half = static_cast<int>(angles_.frequencies.size());
    const float *cosine = angles, *sine = angles + half;
    if (interleaved_)
      for (int i = 0; i < half; ++i) turn(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
    else
      for (int i = 0; i < half; ++i) turn(x[i], x[i + half], cosine[i], sine[i]);
  }
  static void turn(float& a, float& b, float cosine, float sine) {
    float turned = a * cosine - b * sine;
    b = a * sine + b * cosine;
    a = turned;
  }
  void head(Program& p, int r, int h) {
    const Shape& s = p.shape_;
    const float* angles = angles_.row(r);
    int group = s.heads / s.kv_heads, dim = s.head_dim;
    if (q_) {
      float* q = q_->row(r) + h * group * dim;
      for (int i = 0; i < group; ++i) {
        normalize(p, q + i * dim, norms_.q);
        rotate(q + i * dim, angles);
      }
      for (int d = 0; d < group * dim; ++d) q[d] *= query_scale_;
    }

    int slot = p.rows_.slots[r], page = p.page_of(layer_, r, slot), block = slot % s.page_size / kLanes, lane = slot % kLanes;
    float* k = k_.row(r) + h * dim;
    normalize(p, k, norms_.k);
    rotate(k, angles);
    uint16_t *keys = p.k_block(layer_, page, h, block), *values = p.v_block(layer_, page, h, block) + lane * dim;
    alignas(64) uint16_t halves[kLanes];
    for (int d = 0; d < dim; d += kLanes) {
      p.kernels_.store_half(k + d, halves);
      for (int i = 0; i < kLanes; ++i) keys[(d + i) * kLanes + lane] = halves[i];
      p.kernels_.store_half(v_.row(r) + h * dim + d, values + d);
    }
  }

  int layer_;
  Buffer *q_, &k_, &v_;
  const Angles& angles_;
  bool interleaved_;
  float query_scale_;
  HeadNorms norms_;
};

// Context is walked in segments of 256 positions, fixed by absolute position, and folded in order. Whether the
// segments of a row are computed by one member or by several therefore does not change a bit.
class AttentionOp : public Op {
 public:
  AttentionOp(int layer, Buffer& q, Buffer& out, int window, float cap)
      : Op("attention"), layer_(layer), q_(q), out_(out), window_(window), cap_(cap) {}

  Cut plan(Program& p) override {
    const Shape& s = p.shape_;
    first_segment_ = std::numeric_limits<int>::max();
    int end = 0;
    for (const RowTile& t : p.tiles_) {
      first_segment_ = std::min(first_segment_, first_seen(p, t.first) / kSegment);
      end = std::max(end, (p.seen(t.first + t.count - 1) - 1) / kSegment + 1);
    }
    segments_ = end - first_segment_;
    int units = static_cast<int>(p.tiles_.size()) * s.kv_heads;
    auto parts = static_cast<size_t>(p.rows_.count * s.heads * segments_) * static_cast<size_t>(s.head_dim + 2);
    split_ = segments_ > 1 && units < 4 * p.threads() && units % p.threads() && parts <= kMostParts;
    if (split_ && p.attention_parts_.size() < parts) p.attention_parts_.resize(parts);
    return {units * (split_ ? segments_ : 1), 1};
  }
  void work(Program& p, int, int u, int) override {
    int pieces = split_ ? segments_ : 1, unit_of = u / pieces;
    unit(p, p.tiles_[static_cast<size_t>(unit_of / p.shape_.kv_heads)], unit_of % p.shape_.kv_heads, split_ ? first_segment_ + u % pieces : -1);
  }
  // The second half of a split pass, as an op of its own: folds what the units left.
  int folds(const Program& p) const { return split_ ? p.rows_.count * p.shape_.heads : 0; }
  void fold(Program& p, int row, int head) {
    const Shape& s = p.shape_;
    thread_local std::vector<float> total;
    total.resize(static_cast<size_t>(s.head_dim));
    float best = 0, sum = 0;
    int from = first_seen(p, row) / kSegment;
    for (int seg = from; seg <= (p.seen(row) - 1) / kSegment; ++seg) {
      const float* part = part_at(p, row, head, seg);
      p.kernels_.merge(&best, &sum, total.data(), part[0], part[1], part + 2, s.head_dim, seg == from);
    }
    p.kernels_.finish(total.data(), sum, out_.row(row) + head * s.head_dim, s.head_dim);
  }

 private:
  static constexpr int kLanes = 16;
  static constexpr int kBlocks = kSegment / kLanes;
  static constexpr size_t kMostParts = size_t{16} << 20;  // 64 MiB; so many rows keep all members busy unsplit

  struct Scratch {
    std::vector<float> scores, best, sum, out, total_best, total_sum, total;
    std::vector<const float*> q;
    std::vector<int> visible, hidden;
    std::vector<uint16_t> tail;
    const uint16_t *k[kBlocks], *v[kBlocks];
    void resize(int queries, int dim) {
      auto n = static_cast<size_t>(queries);
      scores.resize(n * kSegment);
      for (auto* x : {&best, &sum, &total_best, &total_sum}) x->resize(n);
      for (auto* x : {&out, &total}) x->resize(n * static_cast<size_t>(dim));
      q.resize(n);
      visible.resize(n);
      hidden.resize(n);
    }
  };

  int first_seen(const Program& p, int row) const { return window_ == 0 ? 0 : std::max(0, p.rows_.positions[row] + 1 - window_); }

  // Rows of `tile` against kv head h; one segment into parts_, or all of them into the output.
  void unit(Program& p, const RowTile& tile, int h, int only) {
    const Shape& s = p.shape_;
    int group = s.heads / s.kv_heads, queries = tile.count * group, dim = s.head_dim;
    thread_local Scratch scratch;
    scratch.resize(queries, dim);
    for (int i = 0; i < queries; ++i)
      scratch.q[static_cast<size_t>(i)] = q_.row(tile.first + i / group) + (h * group + i % group) * dim;
    if (!tile.tree_slots.empty()) gather(p, tile, h, scratch);
    int from = first_seen(p, tile.first) / kSegment, last = (p.seen(tile.first + tile.count - 1) - 1) / kSegment;
    for (int seg = std::max(from, only); seg <= (only < 0 ? last : std::min(only, last)); ++seg) {
      segment(p, tile, h, seg, queries, scratch);
      for (int i = 0; i < queries; ++i) {
        auto n = static_cast<size_t>(i);
        if (scratch.visible[n] <= 0) continue;
        const float* out = scratch.out.data() + i * dim;
        if (only < 0) {
          bool fresh = seg == first_seen(p, tile.first + i / group) / kSegment;
          p.kernels_.merge(&scratch.total_best[n], &scratch.total_sum[n], scratch.total.data() + i * dim, scratch.best[n],
                           scratch.sum[n], out, dim, fresh);
        } else {
          float* part = part_at(p, tile.first + i / group, h * group + i % group, seg);
          part[0] = scratch.best[n];
          part[1] = scratch.sum[n];
          std::copy_n(out, dim, part + 2);
        }
      }
    }
    if (only >= 0) return;
    for (int i = 0; i < queries; ++i)
      p.kernels_.finish(scratch.total.data() + i * dim, scratch.total_sum[static_cast<size_t>(i)],
                        out_.row(tile.first + i / group) + (h * group + i % group) * dim, dim);
  }

  void segment(Program& p, const RowTile& tile, int h, int seg, int queries, Scratch& scratch) {
    const Shape& s = p.shape_;
    // Blocks that no row sees any more are left out: what is hidden adds exact zeros.
    int group = s.heads / s.kv_heads, start = std::max(seg * kSegment, first_seen(p, tile.first) / kLanes * kLanes);
    int end = std::min(seg * kSegment + kSegment, p.seen(tile.first + tile.count - 1));
    for (int i = 0; i < queries; ++i) {
      int row = tile.first + i / group, hidden = first_seen(p, row) - start;
      scratch.hidden[static_cast<size_t>(i)] = hidden;
      scratch.visible[static_cast<size_t>(i)] = hidden < end - start ? p.seen(row) - start : 0;
    }
    int blocks = (end - start + kLanes - 1) / kLanes, tail_block = tile.base / kLanes;
    for (int b = 0; b < blocks; ++b) {
      int absolute = start / kLanes + b;
      if (!tile.tree_slots.empty() && absolute >= tail_block) {
        size_t at = static_cast<size_t>(absolute - tail_block) * 2 * static_cast<size_t>(kLanes * s.head_dim);
        scratch.k[b] = scratch.tail.data() + at;
        scratch.v[b] = scratch.k[b] + kLanes * s.head_dim;
        continue;
      }
      int slot = absolute * kLanes, page = p.page_of(layer_, tile.first, slot);
      scratch.k[b] = p.k_block(layer_, page, h, slot % s.page_size / kLanes);
      scratch.v[b] = p.v_block(layer_, page, h, slot % s.page_size / kLanes);
    }
    p.kernels_.attention({scratch.k, scratch.v, blocks, s.head_dim, queries, scratch.q.data(), scratch.visible.data(), scratch.hidden.data(),
                          cap_, scratch.scores.data(), scratch.best.data(), scratch.sum.data(), scratch.out.data()});
  }

  // The blocks of a tree row from its first provisional position on, put into position order.
  void gather(Program& p, const RowTile& tile, int h, Scratch& scratch) {
    const Shape& s = p.shape_;
    int first = tile.base / kLanes * kLanes, end = tile.base + static_cast<int>(tile.tree_slots.size());
    int blocks = (end - first + kLanes - 1) / kLanes, block_size = kLanes * s.head_dim;
    scratch.tail.assign(static_cast<size_t>(blocks * 2 * block_size), 0);
    for (int position = first; position < end; ++position) {
      int slot = position < tile.base ? position : tile.tree_slots[static_cast<size_t>(position - tile.base)];
      int page = p.page_of(layer_, tile.first, slot), block = slot % s.page_size / kLanes, lane = slot % kLanes;
      uint16_t* k = scratch.tail.data() + (position - first) / kLanes * 2 * block_size;
      const uint16_t* from = p.k_block(layer_, page, h, block);
      for (int d = 0; d < s.head_dim; ++d) k[d * kLanes + position % kLanes] = from[d * kLanes + lane];
      std::copy_n(p.v_block(layer_, page, h, block) + lane * s.head_dim, s.head_dim, k + block_size + position % kLanes * s.head_dim);
    }
  }

  float* part_at(Program& p, int row, int head, int seg) const {
    const Shape& s = p.shape_;
    auto index = (static_cast<size_t>(row) * static_cast<size_t>(s.heads) + static_cast<size_t>(head)) * static_cast<size_t>(segments_);
    return p.attention_parts_.data() + (index + static_cast<size_t>(seg - first_segment_)) * static_cast<size_t>(s.head_dim + 2);
  }

  int layer_;
  Buffer &q_, &out_;
  int window_;
  float cap_;
  bool split_ = false;
  int first_segment_ = 0, segments_ = 1;
};

class FoldOp : public Op {
 public:
  explicit FoldOp(AttentionOp& attention) : Op("attention"), attention_(attention) {}
  Cut plan(Program& p) override { return {attention_.folds(p), 4}; }
  void work(Program& p, int, int first, int last) override {
    for (int i = first; i < last; ++i) attention_.fold(p, i / p.shape_.heads, i % p.shape_.heads);
  }

 private:
  AttentionOp& attention_;
};

}  // namespace

int Program::angles(std::vector<double> frequencies, float magnitude) {
  auto a = std::make_unique<Angles>();
  a->values.resize(static_cast<size_t>(shape_.max_rows) * 2 * frequencies.size());
  a->frequencies = std::move(frequencies);
  a->magnitude = magnitude;
  record(std::make_unique<AnglesOp>(*a));
  angles_.push_back(std::move(a));
  return static_cast<int>(angles_.size()) - 1;
}

void Program::rope(int layer, int q, int k, int v, int angles, bool interleaved, float query_scale, int q_gamma, int k_gamma, float eps) {
  auto gamma = [&](int i) { return i < 0 ? nullptr : &vectors_.at(static_cast<size_t>(i)); };
  record(std::make_unique<RopeOp>(layer, q < 0 ? nullptr : &at(buffers_, q), at(buffers_, k), at(buffers_, v), at(angles_, angles), interleaved,
                                          query_scale, HeadNorms{gamma(q_gamma), gamma(k_gamma), eps}));
}

void Program::attention(int layer, int q, int out, int window, float cap) {
  auto op = std::make_unique<AttentionOp>(layer, at(buffers_, q), at(buffers_, out), window, cap);
  auto fold = std::make_unique<FoldOp>(*op);
  record(std::move(op));
  record(std::move(fold));
}

}  // namespace paceline
