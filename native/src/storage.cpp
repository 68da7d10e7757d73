#include "storage.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace paceline {

Memory::Memory(size_t bytes) : size_(bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, bytes, MADV_HUGEPAGE);  // a pass streams through all of it; small pages would thrash the TLB
  data_ = static_cast<uint8_t*>(p);
}
Memory::~Memory() {
  if (data_) munmap(data_, size_);
}
Memory::Memory(Memory&& o) noexcept : data_(o.data_), size_(o.size_) { o.data_ = nullptr; }
Memory& Memory::operator=(Memory&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

void Acts::serve(const Weight& w, int rows) {
  size_t values = static_cast<size_t>(rows) * static_cast<size_t>(width);
  switch (w.scheme) {
    case Scheme::half: shift.resize(values / kGroup); break;
    case Scheme::half_min:
    case Scheme::super_min: sum.resize(values / kGroup); break;
    case Scheme::fine: half_shift.resize(values / 16); break;
    case Scheme::fine_min: half_sum.resize(values / 16); break;
    case Scheme::none:
      if (w.quant == Quant::bf16) bf16.resize(values);
      else f.resize(values);
      break;
  }
}

namespace {
template <class V>
auto* offset(V& v, size_t n) { return v.empty() ? nullptr : v.data() + n; }
}  // namespace

ActTile Acts::tile(int first) const {
  size_t n = static_cast<size_t>(first) * static_cast<size_t>(width), g = n / kGroup;
  return {q.data() + n,     scale.data() + g,          offset(sum, g), offset(half_sum, 2 * g),
          offset(shift, g), offset(half_shift, 2 * g), offset(f, n),
          offset(bf16, n)};
}

ActTileOut Acts::out(int first, int64_t group, int rows) {
  size_t g = static_cast<size_t>(first) * static_cast<size_t>(width) / kGroup + static_cast<size_t>(group) * static_cast<size_t>(rows);
  return {q.data() + g * kGroup, scale.data() + g,          offset(sum, g), offset(half_sum, 2 * g),
          offset(shift, g),      offset(half_shift, 2 * g), offset(f, g * kGroup),
          offset(bf16, g * kGroup)};
}

}  // namespace paceline
