#define PACELINE_ISA 2
#define PACELINE_NS isa_avx512
#define PACELINE_NAME "avx512"
#include <algorithm>
#include "kernels.inl"

namespace paceline {
const Kernels& kernels_avx512() { return isa_avx512::kKernels; }
}  // namespace paceline
