#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace paceline {

// ------------------------------------------------------------------------------------------ description

Program::Program(int threads, const std::string& isa, Shape shape)
    : kernels_(choose_kernels(isa)), shape_(shape), pool_(threads, [this](int member, uint32_t pass) { walk(member, pass); }) {
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

int Program::part() {
  parts_.emplace_back();
  return static_cast<int>(parts_.size()) - 1;
}

int Program::adopt(const Program& other, int weight) {
  weights_.push_back(std::make_unique<Weight>(*other.weights_.at(static_cast<size_t>(weight))));
  return static_cast<int>(weights_.size()) - 1;
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
  if (from != to && cache.page)
    std::memcpy(data + static_cast<size_t>(to) * cache.page, data + static_cast<size_t>(from) * cache.page, cache.page * sizeof(uint16_t));
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
