// AVX-512 for CPUs that also multiply pairs of bf16; all but that product is the other AVX-512 set's.
#define PACELINE_ISA 3
#define PACELINE_NS isa_avx512bf16
#include "tile_bf16.inl"

namespace paceline {
namespace {

Kernels::TileFn tile_fn(const Weight& w, int rows) {
  return w.quant == Quant::bf16 ? isa_avx512bf16::bf16_tile_fn(rows) : kernels_avx512().tile_fn(w, rows);
}

}  // namespace

const Kernels& kernels_avx512bf16() {
  static const Kernels kernels = [] {
    Kernels k = kernels_avx512();
    k.name = "avx512bf16";
    k.tile_fn = tile_fn;
    return k;
  }();
  return kernels;
}

}  // namespace paceline
