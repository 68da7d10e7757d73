// Gated feed-forward layers: a single one, or a mixture of experts of which each row chooses some.
#include <algorithm>
#include <cmath>

#include "tiles.h"

namespace paceline {
namespace {

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

}  // namespace

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

}  // namespace paceline
