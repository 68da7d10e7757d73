#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

namespace paceline {

// --------------------------------------------------------------------------------------------- memory

Memory::Memory(size_t bytes) : size_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, bytes, MADV_HUGEPAGE);  // a pass streams through all of it; small pages would thrash the TLB
  data_ = static_cast<uint8_t*>(p);
}
Memory::~Memory() {
  if (data_) munmap(data_, size_);
}
Memory::Memory(Memory&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; }
Memory& Memory::operator=(Memory&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

const Kernels& choose_kernels(const std::string& isa) {
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == "avx512bf16" || (isa == "auto" && bf16)) {
    if (!bf16) throw std::invalid_argument("this CPU lacks AVX-512 BF16");
    return kernels_avx512bf16();
  }
  if (isa == "avx512" || (isa == "auto" && avx512)) {
    if (!avx512) throw std::invalid_argument("this CPU lacks AVX-512 VNNI");
    return kernels_avx512();
  }
  if (isa == "avx2" || (isa == "auto" && avx2)) {
    if (!avx2) throw std::invalid_argument("this CPU lacks AVX2, FMA or F16C");
    return kernels_avx2();
  }
#endif
  if (isa == "portable" || isa == "auto") return kernels_portable();
  throw std::invalid_argument("unknown instruction set '" + isa + "'");
}

// ---------------------------------------------------------------------------------------- activations

void Acts::serve(const Weight& w, int rows) {
  size_t values = static_cast<size_t>(rows) * static_cast<size_t>(width);
  switch (w.scheme) {
    case Scheme::half: shift.resize(values / kGroup); break;
    case Scheme::half_min:
    case Scheme::super_min: sum.resize(values / kGroup); break;
    case Scheme::fine: half_shift.resize(values / 16); break;
    case Scheme::fine_min: half_sum.resize(values / 16); break;
    case Scheme::none:
      if (w.quant == Quant::bf16) bf16.resize(values);
      else f.resize(values);
      break;
  }
}

namespace {
template <class V>
auto* offset(V& v, size_t n) { return v.empty() ? nullptr : v.data() + n; }
}  // namespace

ActTile Acts::tile(int first) const {
  size_t n = static_cast<size_t>(first) * static_cast<size_t>(width), g = n / kGroup;
  return {q.data() + n,     scale.data() + g,          offset(sum, g), offset(half_sum, 2 * g),
          offset(shift, g), offset(half_shift, 2 * g), offset(f, n),
          offset(bf16, n)};
}

ActTileOut Acts::out(int first, int64_t group, int rows) {
  size_t g = static_cast<size_t>(first) * static_cast<size_t>(width) / kGroup + static_cast<size_t>(group) * static_cast<size_t>(rows);
  return {q.data() + g * kGroup, scale.data() + g,          offset(sum, g), offset(half_sum, 2 * g),
          offset(shift, g),      offset(half_shift, 2 * g), offset(f, g * kGroup),
          offset(bf16, g * kGroup)};
}

// ------------------------------------------------------------------------------------------------ ops

namespace {
// pass (20 bits), end (22), next (22)
constexpr uint64_t kMask = (1u << 22) - 1;
constexpr uint64_t packed(uint32_t pass, uint64_t end, uint64_t next) {
  return static_cast<uint64_t>(pass & 0xfffff) << 44 | end << 22 | next;
}
}  // namespace

void Deal::start(uint32_t pass, int members, Cut cut) {
  if (members_ != members) {  // before the first pass only: late members read both
    ranges_ = std::make_unique<Range[]>(static_cast<size_t>(members));
    members_ = members;
  }
  chunk_.store(cut.chunk, std::memory_order_relaxed);
  left_.store(packed(pass, 0, static_cast<uint64_t>(cut.units)), std::memory_order_relaxed);
  int chunks = (cut.units + cut.chunk - 1) / cut.chunk;
  for (int m = 0; m < members; ++m) {
    int next = chunks * m / members * cut.chunk, end = std::min(cut.units, chunks * (m + 1) / members * cut.chunk);
    ranges_[static_cast<size_t>(m)].state.store(packed(pass, static_cast<uint64_t>(end), static_cast<uint64_t>(next)), std::memory_order_release);
  }
}

bool Deal::take(uint32_t pass, int member, int& first, int& last) {
  for (int i = 0; i < members_; ++i) {
    std::atomic<uint64_t>& state = ranges_[static_cast<size_t>((member + i) % members_)].state;
    uint64_t now = state.load(std::memory_order_acquire);
    for (;;) {
      uint64_t end = now >> 22 & kMask, next = now & kMask;
      if (now >> 44 != (pass & 0xfffff) || next >= end) break;
      uint64_t to = std::min(end, next + static_cast<uint64_t>(chunk_.load(std::memory_order_relaxed)));
      if (!state.compare_exchange_weak(now, packed(pass, end, to), std::memory_order_acq_rel)) continue;
      first = static_cast<int>(next);
      last = static_cast<int>(to);
      return true;
    }
  }
  return false;
}

bool Deal::wait(uint32_t pass) const {
  uint64_t now = 0;
  spin_until([&] {
    now = left_.load(std::memory_order_acquire);
    return now >> 44 != (pass & 0xfffff) || (now & kMask) == 0;
  });
  return now >> 44 == (pass & 0xfffff);
}

namespace {

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
        by_rows_[rows](piece, count, here, result[i], g == 0, g + count == groups, ahead(piece, then));
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
int chunk_of(const Program& p, int units, size_t unit_bytes) {
  return std::clamp(units / (p.threads() * 4), 1, std::max(kSet, static_cast<int>((size_t{32} << 10) / unit_bytes)));
}

// Reads rows straight from the file: of a table with hundreds of thousands, a text uses few.
class EmbedOp : public Op {
 public:
  EmbedOp(int type, const uint8_t* file, Buffer& out, float scale) : Op("embed"), type_(type), file_(file), out_(out), scale_(scale) {
    FileBlock block = file_block(type);
    row_bytes_ = static_cast<size_t>(out.width / block.values) * static_cast<size_t>(block.bytes);
  }
  Cut plan(Program& p) override { return {p.rows_.count, 1}; }
  void work(Program& p, int, int first, int last) override {
    for (int r = first; r < last; ++r) {
      float* x = out_.row(r);
      decode_row(type_, file_ + static_cast<size_t>(p.rows_.tokens[r]) * row_bytes_, out_.width, x);
      if (scale_ != 1.0f)
        for (int64_t i = 0; i < out_.width; ++i) x[i] *= scale_;
    }
  }

 private:
  int type_;
  const uint8_t* file_;
  Buffer& out_;
  float scale_;
  size_t row_bytes_;
};

// Normalises (or not) and quantises. Rows of a tile lie interleaved, so members share a tile by columns:
// by rows, they would write to the same cache lines.
class NormOp : public Op {
 public:
  NormOp(Buffer& in, const std::vector<float>* gamma, float eps, Acts& out, int64_t column)
      : Op(gamma ? "norm" : "quantize"), in_(in), gamma_(gamma), eps_(eps), out_(out), group_(column / kGroup) {}
  Cut plan(Program& p) override {
    int tiles = (p.row_count(out_.wanted) + p.kernels_.max_tile - 1) / p.kernels_.max_tile;
    parts_ = tiles >= 4 * p.threads() ? 1 : p.threads();
    return {tiles * parts_, 1};
  }
  void work(Program& p, int, int first, int last) override {
    for (int u = first; u < last; ++u) part(p, u / parts_ * p.kernels_.max_tile, u % parts_);
  }

 private:
  void part(Program& p, int first, int part) {
    int rows = std::min(p.kernels_.max_tile, p.row_count(out_.wanted) - first);
    int64_t groups = in_.width / kGroup, begin = groups * part / parts_, end = groups * (part + 1) / parts_;
    const float* x[8];
    float factor[8];
    for (int r = 0; r < rows; ++r) {
      x[r] = in_.row(out_.wanted && !in_.wanted ? p.rows_.wanted[first + r] : first + r);
      if (gamma_) factor[r] = p.kernels_.rms_factor(x[r], in_.width, eps_);
    }
    p.kernels_.quantize(x, gamma_ ? gamma_->data() : nullptr, factor, begin, end - begin, out_.out(first, group_ + begin, rows), rows);
  }

  Buffer& in_;
  const std::vector<float>* gamma_;
  float eps_;
  Acts& out_;
  int64_t group_;
  int parts_ = 1;
};

// out += in normalised, or out = in normalised.
class FloatNormOp : public Op {
 public:
  FloatNormOp(Buffer& in, const std::vector<float>& gamma, float eps, Buffer& out, bool add)
      : Op("norm"), in_(in), gamma_(gamma), eps_(eps), out_(out), add_(add) {}
  Cut plan(Program& p) override { return {p.row_count(out_.wanted), 1}; }
  void work(Program& p, int, int first, int last) override {
    for (int r = first; r < last; ++r) {
      const float *x = in_.row(r), *gamma = gamma_.data();
      float *out = out_.row(r), factor = p.kernels_.rms_factor(x, in_.width, eps_);
      for (int64_t i = 0; i < in_.width; ++i) {
        float value = x[i] * factor * gamma[i];
        out[i] = add_ ? out[i] + value : value;
      }
    }
  }

 private:
  Buffer& in_;
  const std::vector<float>& gamma_;
  float eps_;
  Buffer& out_;
  bool add_;
};

// Rows of a buffer to or from the caller, at a column of its array; nothing where the caller has none.
class CopyOp : public Op {
 public:
  CopyOp(Buffer& buffer, int64_t column, bool out) : Op("copy"), buffer_(buffer), column_(column), out_(out) {}
  Cut plan(Program& p) override { return {active(p) ? p.rows_.count : 0, 8}; }
  void work(Program& p, int, int first, int last) override {
    auto bytes = sizeof(float) * static_cast<size_t>(buffer_.width);
    for (int r = first; r < last; ++r) {
      if (out_) std::memcpy(p.rows_.hidden + r * p.hidden_width() + column_, buffer_.row(r), bytes);
      else std::memcpy(buffer_.row(r), p.rows_.features + r * p.feature_width() + column_, bytes);
    }
  }
  // A tap that nobody asked for has no column.
  void place(int64_t column) { column_ = column; }
  int64_t width() const { return buffer_.width; }

 private:
  bool active(const Program& p) const { return column_ >= 0 && (out_ ? p.rows_.hidden != nullptr : p.rows_.features != nullptr); }
  Buffer& buffer_;
  int64_t column_;
  bool out_;
};

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

// out = quantise(activation(gate . x) * (up . x)): two blocks make one group of 32 for the next matrix.
class Gate {
 public:
  Gate(const Program& p, const Weight& gate, const Weight& up, bool gelu)
      : activate_(gelu ? p.kernels_.geglu : p.kernels_.swiglu), gate_(p, gate), up_(p, up) {}
  // `groups` groups of rows [from, to): those from g on of the matrices become those from out_g on.
  void operator()(Program& p, int g, int groups, const Acts& in, int from, int to, Acts& out, int out_g) const {
    for (int done = 0; done < groups; done += kSet / 2)
      set(p, g + done, std::min(kSet / 2, groups - done), in, from, to, out, out_g + done);
  }

 private:
  void set(Program& p, int g, int groups, const Acts& in, int from, int to, Acts& out, int out_g) const {
    alignas(64) SetResult gate, up;
    each_tile(p, from, to, [&](int first, int n) {
      gate_(2 * g, 2 * groups, in, first, n, gate, up_.at(2 * g));
      up_(2 * g, 2 * groups, in, first, n, up, gate_.at(2 * (g + groups)));
      for (int i = 0; i < groups; ++i) {
        const float *gates[2] = {gate[2 * i], gate[2 * i + 1]}, *ups[2] = {up[2 * i], up[2 * i + 1]};
        activate_(gates, ups, out.out(first, out_g + i, n), n);
      }
    });
  }

  decltype(Kernels::swiglu) activate_;
  Tiles gate_, up_;
};

class GatedOp : public Op {
 public:
  GatedOp(const Program& p, Acts& in, const Weight& gate, const Weight& up, Acts& out, bool gelu)
      : Op(gelu ? "geglu" : "swiglu"), in_(in), weight_(gate), gate_(p, gate, up, gelu), out_(out) {}
  Cut plan(Program& p) override {
    auto groups = static_cast<int>(weight_.blocks()) / 2;
    return {groups, chunk_of(p, groups, 4 * weight_.block_bytes)};
  }
  void work(Program& p, int, int first, int last) override {
    gate_(p, first, last - first, in_, 0, p.row_count(in_.wanted), out_, first);
  }

 private:
  Acts& in_;
  const Weight& weight_;
  Gate gate_;
  Acts& out_;
};

// Each row's experts, best first, and their shares.
class ChooseOp : public Op {
 public:
  ChooseOp(Buffer& scores, Mixture& m) : Op("route"), scores_(scores), m_(m) {}
  Cut plan(Program& p) override { return {p.rows_.count, 4}; }
  void work(Program&, int, int first, int last) override {
    for (int r = first; r < last; ++r) choose(scores_.row(r), m_.chosen.data() + r * m_.used, m_.share.data() + r * m_.used);
  }

 private:
  void choose(float* scores, int* chosen, float* share) const {
    float best = *std::max_element(scores, scores + m_.experts), total = 0;
    for (int e = 0; e < m_.experts; ++e) total += scores[e] = std::exp(scores[e] - best);
    float sum = 0;
    for (int i = 0; i < m_.used; ++i) {
      int top = -1;  // equals go to the lowest
      for (int e = 0; e < m_.experts; ++e)
        if (std::find(chosen, chosen + i, e) == chosen + i && (top < 0 || scores[e] > scores[top])) top = e;
      chosen[i] = top;
      sum += scores[top];
    }
    for (int i = 0; i < m_.used; ++i) share[i] = scores[chosen[i]] / (m_.normalised ? sum : total);
  }

  Buffer& scores_;
  Mixture& m_;
};

// Places: by expert, and within one by row.
class PlaceOp : public Op {
 public:
  explicit PlaceOp(Mixture& m) : Op("route"), m_(m) {}
  Cut plan(Program&) override { return {1, 1}; }
  void work(Program& p, int, int, int) override {
    int places = p.rows_.count * m_.used;
    std::fill(m_.start.begin(), m_.start.end(), 0);
    for (int i = 0; i < places; ++i) ++m_.start[static_cast<size_t>(m_.chosen[static_cast<size_t>(i)]) + 1];
    for (size_t e = 1; e < m_.start.size(); ++e) m_.start[e] += m_.start[e - 1];
    next_ = m_.start;
    for (int i = 0; i < places; ++i) {
      int place = next_[static_cast<size_t>(m_.chosen[static_cast<size_t>(i)])]++;
      m_.place[static_cast<size_t>(i)] = place;
      m_.row[static_cast<size_t>(place)] = i / m_.used;
    }
  }

 private:
  Mixture& m_;
  std::vector<int> next_;
};

// Ops of a mixture whose units are equal parts of every expert.
class ExpertOp : public Op {
 public:
  ExpertOp(std::string label, Mixture& m, int parts, size_t part_bytes) : Op(std::move(label)), m_(m), parts_(parts), part_bytes_(part_bytes) {}
  Cut plan(Program& p) override { return {m_.experts * parts_, std::min(parts_, chunk_of(p, m_.used * parts_, part_bytes_))}; }
  void work(Program& p, int, int first, int last) override {
    for (int u = first, count; u < last; u += count) {
      int expert = u / parts_, part = u % parts_;
      count = std::min(last - u, parts_ - part);
      int from = m_.start[static_cast<size_t>(expert)], to = m_.start[static_cast<size_t>(expert) + 1];
      if (from < to) run(p, expert, part, count, from, to);
    }
  }

 protected:
  // Parts [part, part + count) of an expert for the rows at places [from, to).
  virtual void run(Program& p, int expert, int part, int count, int from, int to) = 0;
  Mixture& m_;
  int parts_;

 private:
  size_t part_bytes_;
};

// The rows of each expert, normalised and quantised.
class GatherOp : public ExpertOp {
 public:
  GatherOp(Mixture& m, Buffer& x, const std::vector<float>& gamma, float eps) : ExpertOp("norm", m, 1, 1), x_(x), gamma_(gamma), eps_(eps) {}

 protected:
  void run(Program& p, int, int, int, int from, int to) override {
    each_tile(p, from, to, [&](int first, int n) {
      const float* x[8];
      float factor[8];
      for (int i = 0; i < n; ++i) {
        x[i] = x_.row(m_.row[static_cast<size_t>(first + i)]);
        factor[i] = p.kernels_.rms_factor(x[i], x_.width, eps_);
      }
      p.kernels_.quantize(x, gamma_.data(), factor, 0, x_.width / kGroup, m_.in.out(first, 0, n), n);
    });
  }

 private:
  Buffer& x_;
  const std::vector<float>& gamma_;
  float eps_;
};

class ExpertGateOp : public ExpertOp {
 public:
  ExpertGateOp(const Program& p, Mixture& m, const Weight& gate, const Weight& up)
      : ExpertOp("experts", m, static_cast<int>(m.hidden.width / kGroup), 4 * gate.block_bytes), gate_(p, gate, up, false) {}

 protected:
  void run(Program& p, int expert, int part, int count, int from, int to) override {
    gate_(p, expert * parts_ + part, count, m_.in, from, to, m_.hidden, part);
  }

 private:
  Gate gate_;
};

class ExpertDownOp : public ExpertOp {
 public:
  ExpertDownOp(const Program& p, Mixture& m, const Weight& down)
      : ExpertOp("experts", m, static_cast<int>(m.out.width / kBlockRows), down.block_bytes), tiles_(p, down) {}

 protected:
  void run(Program& p, int expert, int part, int count, int from, int to) override {
    alignas(64) SetResult result;
    for (int b = part; b < part + count; b += kSet) {
      int blocks = std::min(kSet, part + count - b);
      each_tile(p, from, to, [&](int first, int n) {
        tiles_(expert * parts_ + b, blocks, m_.hidden, first, n, result, tiles_.at(expert * parts_ + b + blocks));
        for (int i = 0; i < blocks; ++i)
          p.kernels_.deliver(result[i], nullptr, m_.out.row(first) + (b + i) * kBlockRows, m_.out.width, n, false);
      });
    }
  }

 private:
  Tiles tiles_;
};

// x += share * out, best expert first.
class MixOp : public Op {
 public:
  MixOp(Mixture& m, Buffer& x) : Op("route"), m_(m), x_(x) {}
  Cut plan(Program& p) override { return {p.rows_.count, 1}; }
  void work(Program&, int, int first, int last) override {
    for (int at = first * m_.used; at < last * m_.used; ++at) {
      float *x = x_.row(at / m_.used), share = m_.share[static_cast<size_t>(at)];
      const float* out = m_.out.row(m_.place[static_cast<size_t>(at)]);
      for (int64_t i = 0; i < x_.width; ++i) x[i] += share * out[i];
    }
  }

 private:
  Mixture& m_;
  Buffer& x_;
};

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

// ------------------------------------------------------------------------------------------ description

Program::Program(int threads, const std::string& isa, Shape shape) : kernels_(choose_kernels(isa)), shape_(shape), pool_(threads, [this](int member, uint32_t pass) { walk(member, pass); }) {
  if (shape_.windowed.empty()) shape_.windowed.assign(static_cast<size_t>(shape.layers), false);
  size_t values = 2 * static_cast<size_t>(shape.kv_heads * shape.head_dim * shape.page_size);  // of a layer's part of a page
  for (bool windowed : shape_.windowed) caches_[windowed].page += values;
  for (int kind : {0, 1}) {
    size_t pages = static_cast<size_t>(kind ? shape.window_pages : shape.pages), bytes = caches_[kind].page * pages * sizeof(uint16_t);
    if (bytes) caches_[kind].memory = Memory(bytes);
  }
  size_t next[2] = {0, 0};
  for (bool windowed : shape_.windowed) {
    const Cache& cache = caches_[windowed];
    shelves_.push_back({reinterpret_cast<uint16_t*>(cache.memory.data()) + next[windowed], cache.page, windowed});
    next[windowed] += values;
  }
}

uint8_t* Program::allocate(size_t bytes) {
  constexpr size_t kArena = size_t{64} << 20;
  bytes = (bytes + 63) / 64 * 64;
  if (arenas_.empty() || arena_used_ + bytes > arenas_.back().size()) {
    arenas_.emplace_back(std::max(bytes, kArena));
    arena_used_ = 0;
  }
  uint8_t* p = arenas_.back().data() + arena_used_;
  arena_used_ += bytes;
  return p;
}

int Program::weight(int type, int64_t rows, int64_t cols, const uint8_t* file, size_t file_bytes) {
  auto w = std::make_unique<Weight>(describe_weight(type, rows, cols));
  FileBlock fb = file_block(type);
  if (file_bytes != static_cast<size_t>(rows) * static_cast<size_t>(cols / fb.values) * static_cast<size_t>(fb.bytes))
    throw std::invalid_argument("weight data has " + std::to_string(file_bytes) + " bytes");
  uint8_t* data = allocate(w->bytes());
  std::atomic<int64_t> next{0};
  std::atomic<bool> finite{true};
  together(threads(), [&](int) {
    constexpr int64_t kChunk = 64;
    for (int64_t b; (b = next.fetch_add(kChunk)) < w->blocks();)
      if (!pack_blocks(*w, file, data, b, std::min(b + kChunk, w->blocks()))) finite.store(false);
  });
  if (!finite.load()) throw std::invalid_argument("weights that are infinite or not a number");
  w->data = data;
  weights_.push_back(std::move(w));
  return static_cast<int>(weights_.size()) - 1;
}

int Program::vector(const float* values, int64_t n) {
  vectors_.emplace_back(values, values + n);
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::buffer(int64_t width, bool wanted) {
  auto b = std::make_unique<Buffer>();
  b->width = width;
  b->wanted = wanted;
  b->data.resize(static_cast<size_t>(width) * static_cast<size_t>(shape_.max_rows));
  buffers_.push_back(std::move(b));
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::acts(int64_t width, bool wanted) {
  auto a = std::make_unique<Acts>();
  make_room(*a, width, wanted, shape_.max_rows);
  acts_.push_back(std::move(a));
  return static_cast<int>(acts_.size()) - 1;
}

void Program::make_room(Acts& a, int64_t width, bool wanted, int rows) const {
  a.width = width;
  a.wanted = wanted;
  a.q.resize(static_cast<size_t>(rows) * static_cast<size_t>(width));
  a.scale.resize(a.q.size() / kGroup);
}

namespace {
template <class T>
auto& at(std::vector<T>& v, int i) { return *v.at(static_cast<size_t>(i)); }
}  // namespace

void Program::embed(int type, int64_t rows, int64_t cols, const uint8_t* file, size_t file_bytes, int out, float scale) {
  FileBlock fb = file_block(type);
  Buffer& buffer = at(buffers_, out);
  if (cols != buffer.width || cols % fb.values ||
      file_bytes != static_cast<size_t>(rows) * static_cast<size_t>(cols / fb.values) * static_cast<size_t>(fb.bytes))
    throw std::invalid_argument("embedding data has " + std::to_string(file_bytes) + " bytes");
  embedded_ = rows;
  record(std::make_unique<EmbedOp>(type, file, buffer, scale));
}

void Program::norm(int in, int gamma, float eps, int out, int64_t column) {
  record(std::make_unique<NormOp>(at(buffers_, in), &vectors_.at(static_cast<size_t>(gamma)), eps, at(acts_, out), column));
}

void Program::quantize(int in, int out, int64_t column) {
  record(std::make_unique<NormOp>(at(buffers_, in), nullptr, 0.0f, at(acts_, out), column));
}

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

void Program::float_norm(int in, int gamma, float eps, int to, bool add) {
  record(std::make_unique<FloatNormOp>(at(buffers_, in), vectors_.at(static_cast<size_t>(gamma)), eps, at(buffers_, to), add));
}

void Program::gated(int in, int gate, int up, int out, bool gelu) {
  Acts& a = at(acts_, in);
  const Weight &g = at(weights_, gate), &u = at(weights_, up);
  a.serve(g, shape_.max_rows);
  a.serve(u, shape_.max_rows);
  pass_bytes_ += g.bytes() + u.bytes();
  record(std::make_unique<GatedOp>(*this, a, g, u, at(acts_, out), gelu));
}

int Program::mixture(int experts, int used, bool normalised, int64_t width, int64_t hidden) {
  auto m = std::make_unique<Mixture>();
  m->experts = experts;
  m->used = used;
  m->normalised = normalised;
  int places = shape_.max_rows * used;
  for (auto* v : {&m->chosen, &m->place, &m->row}) v->resize(static_cast<size_t>(places));
  m->share.resize(static_cast<size_t>(places));
  m->start.resize(static_cast<size_t>(experts) + 1);
  make_room(m->in, width, false, places);
  make_room(m->hidden, hidden, false, places);
  m->out.width = width;
  m->out.data.resize(static_cast<size_t>(places) * static_cast<size_t>(width));
  mixtures_.push_back(std::move(m));
  return static_cast<int>(mixtures_.size()) - 1;
}

void Program::experts(int mixture, int scores, int x, int gamma, float eps, int gate, int up, int down) {
  Mixture& m = at(mixtures_, mixture);
  const Weight &g = at(weights_, gate), &u = at(weights_, up), &d = at(weights_, down);
  int places = shape_.max_rows * m.used;
  m.in.serve(g, places);
  m.in.serve(u, places);
  m.hidden.serve(d, places);
  pass_bytes_ += (g.bytes() + u.bytes() + d.bytes()) / static_cast<size_t>(m.experts) * static_cast<size_t>(m.used);
  Buffer& to = at(buffers_, x);
  record(std::make_unique<ChooseOp>(at(buffers_, scores), m));
  record(std::make_unique<PlaceOp>(m));
  record(std::make_unique<GatherOp>(m, to, vectors_.at(static_cast<size_t>(gamma)), eps));
  record(std::make_unique<ExpertGateOp>(*this, m, g, u));
  record(std::make_unique<ExpertDownOp>(*this, m, d));
  record(std::make_unique<MixOp>(m, to));
}

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

int Program::part() {
  parts_.emplace_back();
  return static_cast<int>(parts_.size()) - 1;
}

int Program::adopt(const Program& other, int weight) {
  weights_.push_back(std::make_unique<Weight>(*other.weights_.at(static_cast<size_t>(weight))));
  return static_cast<int>(weights_.size()) - 1;
}

int Program::tap(int buffer) {
  auto op = std::make_unique<CopyOp>(at(buffers_, buffer), -1, true);
  taps_.push_back(op.get());
  record(std::move(op));
  return static_cast<int>(taps_.size()) - 1;
}

void Program::listen(const std::vector<int>& taps) {
  for (Op* op : taps_) static_cast<CopyOp*>(op)->place(-1);
  hidden_width_ = 0;
  for (int i : taps) {
    auto* op = static_cast<CopyOp*>(taps_.at(static_cast<size_t>(i)));
    op->place(hidden_width_);
    hidden_width_ += op->width();
  }
}

void Program::feed(int buffer, int64_t column) {
  Buffer& b = at(buffers_, buffer);
  feature_width_ = std::max(feature_width_, column + b.width);
  record(std::make_unique<CopyOp>(b, column, false));
}

// ------------------------------------------------------------------------------------------------ passes

uint16_t* Program::cache_block(int layer, int which, int page, int kv_head, int block) {
  const Shelf& shelf = shelves_[static_cast<size_t>(layer)];
  size_t blocks = static_cast<size_t>(shape_.page_size / 16), size = static_cast<size_t>(16 * shape_.head_dim);
  size_t index = static_cast<size_t>(kv_head) * 2 + static_cast<size_t>(which);
  return shelf.data + static_cast<size_t>(page) * shelf.page + (index * blocks + static_cast<size_t>(block)) * size;
}

void Program::plan_tiles() {
  tiles_.clear();
  const Rows& rows = rows_;
  const int most = std::max(1, 64 / (shape_.heads / shape_.kv_heads));
  for (int r = 0; r < rows.count; ++r) {
    RowTile tile{r, 1, {}, rows.positions[r]};
    for (int a = r; rows.parents[a] >= 0; a = rows.parents[a]) {
      tile.tree_slots.push_back(rows.slots[a]);
      tile.base = rows.positions[rows.parents[a]];
      if (rows.parents[rows.parents[a]] < 0) tile.tree_slots.push_back(rows.slots[rows.parents[a]]);
    }
    std::reverse(tile.tree_slots.begin(), tile.tree_slots.end());
    bool straight = true;
    for (size_t i = 0; i < tile.tree_slots.size(); ++i) straight &= tile.tree_slots[i] == tile.base + static_cast<int>(i);
    if (straight) tile.tree_slots.clear();
    if (straight && !tiles_.empty()) {
      RowTile& before = tiles_.back();
      if (before.tree_slots.empty() && before.count < most && rows.sequences[before.first] == rows.sequences[r] &&
          rows.positions[r] > rows.positions[r - 1]) {
        ++before.count;
        continue;
      }
    }
    tiles_.push_back(std::move(tile));
  }
}

void Program::run(const Rows& rows, int part) {
  rows_ = rows;
  Ops& ops = parts_.at(static_cast<size_t>(part));
  running_.store(&ops, std::memory_order_release);
  plan_tiles();
  uint32_t pass = pool_.next();
  for (auto& op : ops) op->deal.start(pass, threads(), op->plan(*this));
  pool_.start();
}

void Program::walk(int member, uint32_t pass) {
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  for (auto& op : *running_.load(std::memory_order_acquire)) {
    int done = 0;
    for (int from, to; op->deal.take(pass, member, from, to); done += to - from) op->work(*this, member, from, to);
    op->deal.finish(done);
    if (!op->deal.wait(pass)) return;
    if (member != 0 || !timing_) continue;
    auto now = Clock::now();
    op->nanoseconds += static_cast<uint64_t>(std::chrono::nanoseconds(now - last).count());
    last = now;
  }
}

void Program::copy_slot(int layer, int page_from, int offset_from, int page_to, int offset_to) {
  int dim = shape_.head_dim;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const uint16_t* k = k_block(layer, page_from, h, offset_from / 16) + offset_from % 16;
    uint16_t* to = k_block(layer, page_to, h, offset_to / 16) + offset_to % 16;
    for (int d = 0; d < dim; ++d) to[16 * d] = k[16 * d];
    std::copy_n(v_block(layer, page_from, h, offset_from / 16) + offset_from % 16 * dim, dim,
                v_block(layer, page_to, h, offset_to / 16) + offset_to % 16 * dim);
  }
}

void Program::move(const int32_t* table, const int32_t* window_table, const int32_t* from, const int32_t* to, int count) {
  int size = shape_.page_size;
  for (int i = 0; i < count; ++i)
    for (int layer = 0; layer < shape_.layers && from[i] != to[i]; ++layer) {
      const int32_t* pages = shelves_[static_cast<size_t>(layer)].windowed && window_table ? window_table : table;
      copy_slot(layer, pages[from[i] / size], from[i] % size, pages[to[i] / size], to[i] % size);
    }
}

void Program::copy_page(int from, int to, bool windowed) {
  const Cache& cache = caches_[windowed];
  auto* data = reinterpret_cast<uint16_t*>(cache.memory.data());
  if (from != to && cache.page) std::memcpy(data + static_cast<size_t>(to) * cache.page, data + static_cast<size_t>(from) * cache.page, cache.page * sizeof(uint16_t));
}

size_t Program::memory_bytes() const {
  size_t total = caches_[0].memory.size() + caches_[1].memory.size();
  for (const auto& w : weights_) total += w->bytes();
  for (const auto& b : buffers_) total += b->data.size() * sizeof(float);
  for (const auto& a : acts_) total += a->q.size() * 2;
  for (const auto& m : mixtures_) total += (m->in.q.size() + m->hidden.q.size()) * 2 + m->out.data.size() * sizeof(float);
  return total;
}

std::vector<std::pair<std::string, double>> Program::timings() {
  std::vector<std::pair<std::string, double>> sums;
  for (auto& ops : parts_) for (auto& op : ops) {
    auto it = std::find_if(sums.begin(), sums.end(), [&](auto& s) { return s.first == op->name; });
    if (it == sums.end()) it = sums.insert(sums.end(), {op->name, 0.0});
    it->second += static_cast<double>(op->nanoseconds) * 1e-9;
    op->nanoseconds = 0;
  }
  return sums;
}

}  // namespace paceline
