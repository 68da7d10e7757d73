#include "kernels.h"

#include <stdexcept>
#include <string>

namespace paceline {

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

}  // namespace paceline
