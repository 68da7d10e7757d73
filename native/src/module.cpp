// Python bindings. Arrays are checked here, so that the program may trust its caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "program.h"
#include "suffix.h"

namespace nb = nanobind;
using paceline::ContextTree;
using paceline::Program;
using paceline::Rows;
using paceline::Shape;
using paceline::SuffixOffer;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check(bool ok, const char* what) {
  if (!ok) throw nb::value_error(what);
}

// The ids of both kinds of pages; without a table of their own, layers with a window take those of the others.
void check_pages(const Shape& s, const int32_t* table, const int32_t* window_table, int count) {
  int limit = s.window_pages && !window_table ? std::min(s.pages, s.window_pages) : s.pages;
  for (int i = 0; i < count; ++i) {
    check(table[i] >= 0 && table[i] < limit, "rows: page id out of range");
    check(!window_table || (window_table[i] >= 0 && window_table[i] < s.window_pages), "rows: window page id out of range");
  }
}

void check_rows(const Program& p, const Rows& r, int64_t vocabulary) {
  const Shape& s = p.shape_;
  check(r.count >= 1 && r.count <= s.max_rows, "rows: none, or more than max_rows");
  for (int i = 0; i < r.count; ++i) {
    check(r.tokens[i] >= 0 && (vocabulary == 0 || r.tokens[i] < vocabulary), "rows: token id outside the vocabulary");
    check(r.sequences[i] >= 0 && r.sequences[i] < r.sequences_count, "rows: sequence index out of range");
    check(r.positions[i] >= 0 && r.positions[i] <= r.slots[i], "rows: position negative or above its slot");
    check(r.slots[i] < r.table_width * s.page_size, "rows: slot beyond the page table");
    check(r.parents[i] >= -1 && r.parents[i] < i, "rows: parent not before its child");
    check(r.parents[i] < 0 || (r.sequences[r.parents[i]] == r.sequences[i] && r.positions[r.parents[i]] + 1 == r.positions[i]),
          "rows: parent of another sequence or position");
    check(r.parents[i] >= 0 || r.slots[i] == r.positions[i], "rows: a row without parent not in its own slot");
    if (r.reach) {
      check(r.parents[i] < 0 && r.reach[i] > r.positions[i] && r.reach[i] <= r.table_width * s.page_size, "rows: reach out of range");
      check(i == 0 || r.sequences[i - 1] != r.sequences[i] || r.reach[i - 1] <= r.reach[i], "rows: reach not ascending");
    }
    int pages = (r.reach ? r.reach[i] - 1 : r.slots[i]) / s.page_size + 1, skipped = r.sequences[i] * r.table_width;
    check_pages(s, r.tables + skipped, r.window_tables ? r.window_tables + skipped : nullptr, pages);
  }
  for (int i = 0; i < r.wanted_count; ++i)
    check(r.wanted[i] >= 0 && r.wanted[i] < r.count && (i == 0 || r.wanted[i] > r.wanted[i - 1]), "rows: wanted not ascending");
}

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void run(Program& p, Ints tokens, Ints positions, Ints slots, Ints parents, Ints sequences, Table tables, Ints wanted,
         nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> argmax,
         std::optional<Matrix> logits, std::optional<Matrix> hidden,
         std::optional<nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>> features, std::optional<Ints> reach, int part,
         std::optional<Table> window_tables) {
  Rows r;
  r.count = static_cast<int>(tokens.shape(0));
  r.wanted_count = static_cast<int>(wanted.shape(0));
  r.sequences_count = static_cast<int>(tables.shape(0));
  r.table_width = static_cast<int>(tables.shape(1));
  for (const Ints* a : {&positions, &slots, &parents, &sequences})
    check(a->shape(0) == tokens.shape(0), "rows: arrays of different length");
  check(argmax.shape(0) >= wanted.shape(0), "argmax shorter than wanted");
  r.tokens = tokens.data();
  r.positions = positions.data();
  r.slots = slots.data();
  r.parents = parents.data();
  r.sequences = sequences.data();
  r.tables = tables.data();
  if (window_tables) {
    check(window_tables->shape(0) == tables.shape(0) && window_tables->shape(1) == tables.shape(1), "window tables of another shape");
    r.window_tables = window_tables->data();
  }
  r.wanted = wanted.data();
  r.argmax = argmax.data();
  if (logits) {
    check(logits->shape(0) >= wanted.shape(0) && static_cast<int64_t>(logits->shape(1)) == p.vocabulary(), "logits of the wrong shape");
    r.logits = logits->data();
  }
  auto fits = [&](const auto& a, int64_t width) { return a->shape(0) == tokens.shape(0) && static_cast<int64_t>(a->shape(1)) == width; };
  if (hidden) {
    check(fits(hidden, p.hidden_width()), "hidden of the wrong shape");
    r.hidden = hidden->data();
  }
  if (features) {
    check(fits(features, p.feature_width()), "features of the wrong shape");
    r.features = features->data();
  }
  if (reach) {
    check(reach->shape(0) == tokens.shape(0), "rows: arrays of different length");
    r.reach = reach->data();
  }
  check(part >= 0 && part < p.parts(), "run: no such part");
  check_rows(p, r, p.embedded());
  nb::gil_scoped_release unlocked;
  p.run(r, part);
}

// Takes in what a list of tokens holds beyond what the tree has seen of it.
void follow(ContextTree& tree, const nb::list& tokens) {
  for (auto i = static_cast<size_t>(tree.size()); i < nb::len(tokens); ++i) tree.add(nb::cast<int32_t>(tokens[i]));
}

SuffixOffer offer(const ContextTree& own, const ContextTree& shared, int budget, const std::vector<double>& weights, double luck) {
  check(weights.size() == SuffixOffer::kFeatures, "suffix: one weight per feature");
  return SuffixOffer(own, shared, budget, weights, luck);
}

// [(token, chance, features)] of a place: -1 is the root, else a node.
nb::list guesses(const SuffixOffer& offer, int place) {
  nb::list all;
  if (place + 1 < 0 || static_cast<size_t>(place + 1) >= offer.places.size()) return all;
  for (const paceline::Guess& guess : offer.places[static_cast<size_t>(place + 1)]) {
    const int32_t* f = guess.features;
    all.append(nb::make_tuple(guess.token, guess.chance, nb::make_tuple(f[0], f[1], f[2], f[3])));
  }
  return all;
}

// Bytes per second that `threads` threads read from memory, best of several sweeps over 512 MiB.
double read_bandwidth(int threads) {
  constexpr size_t kBytes = size_t{512} << 20;
  paceline::Memory memory(kBytes);
  std::memset(memory.data(), 1, kBytes);
  const auto* words = reinterpret_cast<const uint64_t*>(memory.data());
  size_t share = kBytes / 8 / static_cast<size_t>(threads);
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int sweep = 0; sweep < 6; ++sweep) {
    auto start = std::chrono::steady_clock::now();
    paceline::together(threads, [&](int m) { sink += paceline::choose_kernels("auto").read(words + static_cast<size_t>(m) * share, share); });
    std::chrono::duration<double> t = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(share) * 8 * threads / t.count());
  }
  return best;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
    try {
      paceline::choose_kernels(name);
      names.emplace_back(name);
    } catch (const std::invalid_argument&) {
    }
  }
  return names;
}

}  // namespace

// Gives back to the system what the allocator keeps of freed memory: loading frees a good part of what it took.
static void trim_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

NB_MODULE(_core, m) {
  // A process that ends while a thread of it still loads a model leaves objects behind, and that is no fault.
  nb::set_leak_warnings(false);
  m.def("read_bandwidth", &read_bandwidth, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second that this many threads read from memory together.");
  m.def("packed_bytes", [](int type, int64_t rows, int64_t cols) { return paceline::describe_weight(type, rows, cols).bytes(); },
        nb::arg("type"), nb::arg("rows"), nb::arg("cols"), "Bytes that a weight matrix takes in memory.");
  m.def("trim_memory", &trim_memory, "Give freed memory back to the system.");
  m.def("instruction_sets", &instruction_sets, "Kernel sets this CPU can run, best first.");

  nb::class_<ContextTree>(m, "ContextTree").def(nb::init<>()).def("follow", &follow, nb::arg("tokens"));
  nb::class_<SuffixOffer>(m, "SuffixOffer")
      .def_ro("tokens", &SuffixOffer::tokens)
      .def_ro("parents", &SuffixOffer::parents)
      .def_ro("chances", &SuffixOffer::chances)
      .def("guesses", &guesses, nb::arg("place"))
      .def("child", &SuffixOffer::child, nb::arg("place"), nb::arg("token"));
  m.def("suffix_offer", &offer, nb::arg("own"), nb::arg("shared"), nb::arg("budget"), nb::arg("weights"), nb::arg("luck"));

  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, int threads, const std::string& isa, int max_rows, int page_size, int pages, int layers, int heads,
              int kv_heads, int head_dim, std::vector<bool> windowed, int window_pages) {
             check(threads >= 1 && threads <= 1024, "threads out of range");
             check(max_rows >= 1 && layers >= 1 && pages >= 1 && kv_heads >= 1, "sizes must be positive");
             check(page_size >= 16 && page_size % 16 == 0, "page_size must be a multiple of 16");
             check(head_dim % 16 == 0 && heads % kv_heads == 0 && heads / kv_heads <= 64, "head geometry");
             check(windowed.empty() || static_cast<int>(windowed.size()) == layers, "windowed: one for each layer");
             bool some = std::find(windowed.begin(), windowed.end(), true) != windowed.end();
             check(some ? window_pages >= 1 : window_pages == 0, "window_pages: some, just if there are layers with a window");
             new (self) Program(threads, isa, Shape{max_rows, page_size, pages, layers, heads, kv_heads, head_dim, window_pages, std::move(windowed)});
           },
           nb::kw_only(), nb::arg("threads"), nb::arg("isa"), nb::arg("max_rows"), nb::arg("page_size"), nb::arg("pages"),
           nb::arg("layers"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("windowed") = std::vector<bool>{},
           nb::arg("window_pages") = 0)
      .def("weight",
           [](Program& p, int type, int64_t rows, int64_t cols, Bytes data) {
             nb::gil_scoped_release unlocked;
             return p.weight(type, rows, cols, data.data(), data.shape(0));
           },
           nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"))
      .def("vector", [](Program& p, Floats v) { return p.vector(v.data(), static_cast<int64_t>(v.shape(0))); })
      .def("buffer", &Program::buffer, nb::arg("width"), nb::arg("wanted") = false)
      .def("acts", &Program::acts, nb::arg("width"), nb::arg("wanted") = false)
      .def("embed",
           [](Program& p, int type, int64_t rows, int64_t cols, Bytes data, int out, float scale) {
             p.embed(type, rows, cols, data.data(), data.shape(0), out, scale);
           },
           nb::arg("type"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"), nb::arg("out"), nb::arg("scale") = 1.0f,
           nb::keep_alive<1, 5>())
      .def("norm", &Program::norm, nb::arg("source"), nb::arg("gamma"), nb::arg("eps"), nb::arg("out"), nb::arg("column") = 0)
      .def("quantize", &Program::quantize, nb::arg("source"), nb::arg("out"), nb::arg("column") = 0)
      .def("linear", &Program::linear, nb::arg("source"), nb::arg("weights"), nb::arg("biases"), nb::arg("outs"), nb::arg("add") = false)
      .def("float_norm", &Program::float_norm, nb::arg("source"), nb::arg("gamma"), nb::arg("eps"), nb::arg("to"), nb::arg("add") = false)
      .def("gated", &Program::gated, nb::arg("source"), nb::arg("gate"), nb::arg("up"), nb::arg("out"), nb::arg("gelu") = false)
      .def("mixture",
           [](Program& p, int experts, int used, bool normalised, int64_t width, int64_t hidden) {
             check(used >= 1 && used <= experts, "mixture: more experts used than there are");
             return p.mixture(experts, used, normalised, width, hidden);
           },
           nb::kw_only(), nb::arg("experts"), nb::arg("used"), nb::arg("normalised"), nb::arg("width"), nb::arg("hidden"))
      .def("experts", &Program::experts, nb::arg("mixture"), nb::arg("scores"), nb::arg("x"), nb::arg("gamma"), nb::arg("eps"),
           nb::arg("gate"), nb::arg("up"), nb::arg("down"))
      .def("angles", &Program::angles, nb::arg("frequencies"), nb::arg("magnitude") = 1.0f)
      .def("rope", &Program::rope, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("angles"), nb::arg("interleaved"),
           nb::arg("query_scale"), nb::arg("q_gamma") = -1, nb::arg("k_gamma") = -1, nb::arg("eps") = 0.0f)
      .def("attention", &Program::attention, nb::arg("layer"), nb::arg("q"), nb::arg("out"), nb::arg("window") = 0, nb::arg("cap") = 0.0f)
      .def("head", &Program::head, nb::arg("source"), nb::arg("weight"), nb::arg("cap") = 0.0f)
      .def("part", &Program::part)
      .def("adopt",
           [](Program& p, const Program& other, int weight) {
             check(weight >= 0 && weight < other.weights(), "adopt: no such weight");
             return p.adopt(other, weight);
           },
           nb::arg("other"), nb::arg("weight"), nb::keep_alive<1, 2>())
      .def("tap", &Program::tap, nb::arg("buffer"))
      .def("listen", &Program::listen, nb::arg("taps"))
      .def("feed", &Program::feed, nb::arg("buffer"), nb::arg("column") = 0)
      .def("run", &run, nb::arg("tokens"), nb::arg("positions"), nb::arg("slots"), nb::arg("parents"), nb::arg("sequences"),
           nb::arg("tables"), nb::arg("wanted"), nb::arg("argmax"), nb::arg("logits").none(), nb::arg("hidden").none() = nb::none(),
           nb::arg("features").none() = nb::none(), nb::arg("reach").none() = nb::none(), nb::arg("part") = 0, nb::arg("window_tables").none() = nb::none())
      .def("move",
           [](Program& p, Ints table, Ints from, Ints to, std::optional<Ints> window_table) {
             check(from.shape(0) == to.shape(0), "move: arrays of different length");
             check(!window_table || window_table->shape(0) == table.shape(0), "move: tables of different length");
             auto end = static_cast<int32_t>(table.shape(0)) * p.shape_.page_size;
             const int32_t* window = window_table ? window_table->data() : nullptr;
             check_pages(p.shape_, table.data(), window, static_cast<int>(table.shape(0)));
             for (size_t i = 0; i < from.shape(0); ++i)
               check(from.data()[i] >= 0 && from.data()[i] < end && to.data()[i] >= 0 && to.data()[i] < end, "move: slot out of range");
             p.move(table.data(), window, from.data(), to.data(), static_cast<int>(from.shape(0)));
           },
           nb::arg("table"), nb::arg("sources"), nb::arg("targets"), nb::arg("window_table").none() = nb::none())
      .def("copy_page",
           [](Program& p, int from, int to, bool windowed) {
             int pages = windowed ? p.shape_.window_pages : p.shape_.pages;
             check(from >= 0 && to >= 0 && from < pages && to < pages, "copy_page: page out of range");
             p.copy_page(from, to, windowed);
           },
           nb::arg("source"), nb::arg("target"), nb::arg("windowed") = false)
      .def("time_ops", &Program::time_ops)
      .def("timings", &Program::timings)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("memory_bytes", &Program::memory_bytes)
      .def_prop_ro("vocabulary", &Program::vocabulary)
      .def_prop_ro("hidden_width", &Program::hidden_width)
      .def_prop_ro("feature_width", &Program::feature_width)
      .def_prop_ro("threads", &Program::threads)
      .def_prop_ro("isa", [](const Program& p) { return std::string(p.kernels_.name); });
}
