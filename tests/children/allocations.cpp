// What c10's CPU allocator holds, counted below torch and in every thread: preloaded (LD_PRELOAD)
// by tests that hold the tracer to it. c10 takes a tensor's bytes by posix_memalign and gives them
// back by free; other libraries' calls are told apart by where they come from.

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include <atomic>
#include <cstddef>

extern "C" void* __libc_memalign(size_t, size_t);
extern "C" void __libc_free(void*);

namespace {

constexpr size_t kSlots = size_t{1} << 20;
struct Slot { uintptr_t block; size_t size; };  // block 0: never used, 1: given back
Slot slots[kSlots];
std::atomic_flag busy = ATOMIC_FLAG_INIT;
int64_t live = 0, peak = 0;

struct Lock {
  Lock() { while (busy.test_and_set(std::memory_order_acquire)) {} }
  ~Lock() { busy.clear(std::memory_order_release); }
};

size_t place(uintptr_t block) { return (block >> 6) * 0x9E3779B97F4A7C15ull >> 44; }

bool from_c10(void* caller) {
  static std::atomic<void*> known{nullptr};
  if (caller == known.load()) return true;
  Dl_info info;
  if (!dladdr(caller, &info) || !strstr(info.dli_fname, "libc10.so")) return false;
  known.store(caller);
  return true;
}

void made(uintptr_t block, size_t size) {
  Lock lock;
  size_t at = place(block);
  while (slots[at].block > 1) at = (at + 1) % kSlots;
  slots[at] = {block, size};
  live += size;
  if (live > peak) peak = live;
}

void gone(uintptr_t block) {
  Lock lock;
  for (size_t at = place(block); slots[at].block; at = (at + 1) % kSlots)
    if (slots[at].block == block) {
      live -= slots[at].size;
      slots[at].block = 1;
      return;
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
