#define PACELINE_ISA 1
#define PACELINE_NS isa_avx2
#define PACELINE_NAME "avx2"
#include <algorithm>
#include "kernels.inl"

namespace paceline {
const Kernels& kernels_avx2() { return isa_avx2::kKernels; }
}  // namespace paceline
