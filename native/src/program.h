// A model as a recorded list of operations, run by all threads together.
//
// Python describes an architecture once, op by op; a pass then runs the whole list in a single call. Every
// thread walks the list and takes its share of each op, see deal.h. The ops are in ops_*.cpp, each with the member of
// Program that records it below.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "deal.h"
#include "kernels.h"
#include "pool.h"
#include "storage.h"
#include "weight.h"

namespace paceline {

// Layers with a window have cache pages of their own, for they give them back as a text grows.
struct Shape {
  int max_rows, page_size, pages, layers, heads, kv_heads, head_dim;
  int window_pages = 0;
  std::vector<bool> windowed = {};  // of each layer; empty: none is
};

// The rows of one pass as the caller gives them; see paceline.core.Rows.
struct Rows {
  int count = 0, wanted_count = 0, sequences_count = 0, table_width = 0;
  const int32_t *tokens = nullptr, *positions = nullptr, *slots = nullptr, *parents = nullptr, *sequences = nullptr,
                *tables = nullptr, *wanted = nullptr;
  const int32_t* window_tables = nullptr;  // of layers with a window; null: `tables` serve these too
  const int32_t* reach = nullptr;     // [count] a row sees the positions below it; null: those up to its own
  const float* features = nullptr;    // [count][feature_width] for `feed`, or null
  float* hidden = nullptr;            // [count][hidden_width] of the taps listened to, or null
  float* logits = nullptr;      // [wanted][vocab] or null
  int32_t* argmax = nullptr;    // [wanted]
};

// Rows of one sequence that share their reads of the cache, or one row of a tree.
struct RowTile {
  int first, count;
  std::vector<int> tree_slots;  // slots of positions base.. of a tree row, itself last
  int base;                     // positions below it lie at their own slots
};

// A mixture of experts: what each row of a pass chose, and the rows of each expert side by side. A place is one row
// at one expert; there are `used` times as many as rows.
struct Mixture {
  int experts, used;
  bool normalised;                // shares of a row are divided by their sum
  std::vector<int> chosen, place; // [rows][used]
  std::vector<float> share;       // [rows][used]
  std::vector<int> start;         // [experts + 1] first place of each expert
  std::vector<int> row;           // [places]
  Acts in, hidden;                // [places]
  Buffer out;                     // [places]
};

class Program;

class Op {
 public:
  explicit Op(std::string label) : name(std::move(label)) {}
  virtual ~Op() = default;
  // Called before the pass, by one thread.
  virtual Cut plan(Program& program) = 0;
  virtual void work(Program& program, int member, int first, int last) = 0;
  std::string name;
  uint64_t nanoseconds = 0;
  Deal deal;
};

// Cosines and sines of every row's position, for one set of frequencies.
struct Angles {
  std::vector<double> frequencies;
  float magnitude;
  std::vector<float> values;  // [rows][cos..., sin...]
  const float* row(int r) const { return values.data() + static_cast<size_t>(r) * 2 * frequencies.size(); }
};

class Program {
 public:
  Program(int threads, const std::string& isa, Shape shape);

  // Description. Handles are indices; all sizes were checked by the caller.
  int weight(int type, int64_t rows, int64_t cols, const uint8_t* file, size_t file_bytes);
  int vector(const float* values, int64_t n);
  int buffer(int64_t width, bool wanted);
  int acts(int64_t width, bool wanted);
  // `file` must outlive the program: rows are read from it as they are asked for.
  void embed(int type, int64_t rows, int64_t cols, const uint8_t* file, size_t file_bytes, int out, float scale);
  // column: where in wider activations the result goes, a multiple of 32
  void norm(int in, int gamma, float eps, int out, int64_t column);
  void quantize(int in, int out, int64_t column);
  // parts: (weight, bias vector or -1, destination buffer); add: destination += result
  void linear(int in, const std::vector<int>& weights, const std::vector<int>& biases, const std::vector<int>& outs, bool add);
  // out = quantised activation(gate . in) * (up . in); the activation is silu or gelu
  void gated(int in, int gate, int up, int out, bool gelu);
  // to += norm(in)
  void float_norm(int in, int gamma, float eps, int to, bool add);
  // Room for the experts of all layers, which use it in turn.
  int mixture(int experts, int used, bool normalised, int64_t width, int64_t hidden);
  // x += the sum over the experts with the highest scores of share * down(silu(gate(norm(x))) * up(norm(x))); a share
  // is the softmax of the scores. Each matrix holds those of all experts, one below the other.
  void experts(int mixture, int scores, int x, int gamma, float eps, int gate, int up, int down);
  int angles(std::vector<double> frequencies, float magnitude);
  // Turns queries and keys, each head first normalised where gammas [head_dim] are given (else -1), and files keys
  // and values in the cache.
  void rope(int layer, int q, int k, int v, int angles, bool interleaved, float query_scale, int q_gamma, int k_gamma, float eps);
  // window: positions a row sees, its own included, or 0 for all; cap: see AttentionPart
  void attention(int layer, int q, int out, int window, float cap);
  void head(int in, int weight, float cap);

  // What is recorded from here on runs apart from what came before, over the same weights, buffers and cache.
  // Angles belong to the part that records them.
  int part();
  // A weight of another program, which must outlive this one.
  int adopt(const Program& other, int weight);
  // Rows of a buffer for the caller, in passes that listen.
  int tap(int buffer);
  void listen(const std::vector<int>& taps);
  // Rows of a buffer from the caller's features.
  void feed(int buffer, int64_t column);

  void run(const Rows& rows, int part);
  // window_table: null as in Rows
  void move(const int32_t* table, const int32_t* window_table, const int32_t* from, const int32_t* to, int count);
  // Of the layers with a window, or of the others.
  void copy_page(int from, int to, bool windowed);

  // Bytes of weights and cache entries that a one-row pass reads, and nanoseconds per op since the last call.
  size_t weight_bytes() const { return pass_bytes_; }
  size_t memory_bytes() const;
  std::vector<std::pair<std::string, double>> timings();
  void time_ops(bool on) { timing_ = on; }
  int64_t vocabulary() const { return vocabulary_; }
  int64_t embedded() const { return embedded_; }
  int64_t hidden_width() const { return hidden_width_; }
  int64_t feature_width() const { return feature_width_; }
  int parts() const { return static_cast<int>(parts_.size()); }
  int weights() const { return static_cast<int>(weights_.size()); }

  // For ops.
  int threads() const { return pool_.threads(); }
  int seen(int row) const { return rows_.reach ? rows_.reach[row] : rows_.positions[row] + 1; }
  int row_count(bool wanted) const { return wanted ? rows_.wanted_count : rows_.count; }
  uint16_t* k_block(int layer, int page, int kv_head, int block) { return cache_block(layer, 0, page, kv_head, block); }
  uint16_t* v_block(int layer, int page, int kv_head, int block) { return cache_block(layer, 1, page, kv_head, block); }
  uint16_t* cache_block(int layer, int which, int page, int kv_head, int block);
  int page_of(int layer, int row, int slot) const {
    const int32_t* tables = shelves_[static_cast<size_t>(layer)].windowed && rows_.window_tables ? rows_.window_tables : rows_.tables;
    return tables[rows_.sequences[row] * rows_.table_width + slot / shape_.page_size];
  }

  const Kernels& kernels_;
  Shape shape_;
  Rows rows_;
  std::vector<RowTile> tiles_;
  std::vector<std::unique_ptr<Weight>> weights_;
  std::deque<std::vector<float>> vectors_;  // ops keep pointers to the elements
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<Acts>> acts_;
  std::vector<std::unique_ptr<Angles>> angles_;
  std::vector<std::unique_ptr<Mixture>> mixtures_;
  std::vector<float> attention_parts_;  // of split attention; one op at a time uses them

 private:
  uint8_t* allocate(size_t bytes);
  void make_room(Acts& acts, int64_t width, bool wanted, int rows) const;
  void plan_tiles();
  void walk(int member, uint32_t pass);
  void copy_slot(int layer, int page_from, int offset_from, int page_to, int offset_to);

  using Ops = std::vector<std::unique_ptr<Op>>;

  void record(std::unique_ptr<Op> op) { parts_.back().push_back(std::move(op)); }
  // The thing behind a handle.
  template <class T>
  static auto& at(std::vector<T>& v, int i) { return *v.at(static_cast<size_t>(i)); }

  std::vector<Ops> parts_{1};
  std::atomic<Ops*> running_{nullptr};  // a member that wakes late reads it while the next pass begins
  std::vector<Op*> taps_;
  int64_t hidden_width_ = 0, feature_width_ = 0;
  std::vector<Memory> arenas_;
  size_t arena_used_ = 0;
  // Pages of all layers of one kind side by side, so that a short text touches little memory.
  struct Cache { Memory memory; size_t page = 0; };  // values of a page
  struct Shelf { uint16_t* data; size_t page; bool windowed; };  // a layer's part of page 0, values of a page
  Cache caches_[2];  // of layers that see everything, of those with a window
  std::vector<Shelf> shelves_;
  size_t pass_bytes_ = 0;
  int64_t vocabulary_ = 0, embedded_ = 0;
  bool timing_ = false;
  Pool pool_;  // last: its threads end before what they walk over
};

}  // namespace paceline
