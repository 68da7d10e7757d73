#define PACELINE_ISA 0
#define PACELINE_NS isa_portable
#define PACELINE_NAME "portable"
#include <algorithm>
#include "kernels.inl"

namespace paceline {
const Kernels& kernels_portable() { return isa_portable::kKernels; }
}  // namespace paceline
