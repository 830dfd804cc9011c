// What c10's CPU allocator holds, counted below torch and in every thread: preloaded (LD_PRELOAD)
// by tests that hold the tracer to it. c10 takes a tensor's bytes by posix_memalign and gives them
// back by free; other libraries' calls are told apart by where they come from.

#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <cstddef>

extern "C" void* __libc_memalign(size_t, size_t);
extern "C" void __libc_free(void*);

namespace {

constexpr size_t kSlots = size_t{1} << 20;
struct Slot { uintptr_t block; size_t size; };  // block 0: free
Slot slots[kSlots];
std::atomic_flag busy = ATOMIC_FLAG_INIT;
int64_t live = 0, peak = 0;

struct Lock {
  Lock() { while (busy.test_and_set(std::memory_order_acquire)) {} }
  ~Lock() { busy.clear(std::memory_order_release); }
};

size_t place(uintptr_t block) { return (block >> 6) * 0x9E3779B97F4A7C15ull >> 44; }

std::atomic<uintptr_t> first{0}, last{0};  // where libc10.so lies, once it is loaded

int look(dl_phdr_info* info, size_t, void*) {
  if (!strstr(info->dlpi_name, "libc10.so")) return 0;
  uintptr_t end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    uintptr_t here = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && here > end) end = here;
  }
  last = end;
  first = info->dlpi_addr;
  return 1;
}

bool from_c10(void* caller) {
  uintptr_t at = reinterpret_cast<uintptr_t>(caller);
  if (!first) dl_iterate_phdr(look, nullptr);
  return first && at >= first && at < last;
}

size_t next(size_t at) { return (at + 1) % kSlots; }

void made(uintptr_t block, size_t size) {
  Lock lock;
  size_t at = place(block);
  while (slots[at].block) at = next(at);
  slots[at] = {block, size};
  live += size;
  if (live > peak) peak = live;
}

// Those behind it that were put off by it move up, so that no search grows long.
void vacate(size_t hole) {
  for (size_t at = next(hole); slots[at].block; at = next(at)) {
    size_t home = place(slots[at].block);
    if ((at - home) % kSlots >= (at - hole) % kSlots) {
      slots[hole] = slots[at];
      hole = at;
    }
  }
  slots[hole].block = 0;
}

void gone(uintptr_t block) {
  Lock lock;
  for (size_t at = place(block); slots[at].block; at = next(at))
    if (slots[at].block == block) {
      live -= slots[at].size;
      return vacate(at);
    }
}

}  // namespace

extern "C" int posix_memalign(void** out, size_t alignment, size_t size) {
  void* block = __libc_memalign(alignment, size);
  if (!block) return ENOMEM;
  if (from_c10(__builtin_return_address(0))) made(reinterpret_cast<uintptr_t>(block), size);
  *out = block;
  return 0;
}

extern "C" void free(void* block) {
  if (block && !(reinterpret_cast<uintptr_t>(block) & 63)) gone(reinterpret_cast<uintptr_t>(block));
  __libc_free(block);
}

extern "C" int64_t c10_live_bytes() { Lock lock; return live; }
extern "C" int64_t c10_peak_bytes() { Lock lock; return peak; }
extern "C" void c10_restart_peak() { Lock lock; peak = live; }
