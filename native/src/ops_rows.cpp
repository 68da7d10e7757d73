// Ops that treat each row by itself: embedding, norms, copies from and to the caller.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace paceline {
namespace {

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

void Program::float_norm(int in, int gamma, float eps, int to, bool add) {
  record(std::make_unique<FloatNormOp>(at(buffers_, in), vectors_.at(static_cast<size_t>(gamma)), eps, at(buffers_, to), add));
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

}  // namespace paceline
