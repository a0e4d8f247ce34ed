// Tells the thread sanitizer what OpenMP does.
//
// The sanitizer knows an order between threads from what it compiled and from
// calls of the C library. OpenMP's runtime is neither: its barriers are system
// calls. A parallel region would look like a race between its threads and what
// is before and after it. To suppress reports from OpenMP's threads would
// suppress races between them too. Instead this takes the place of the function
// that compilers call for a region, and names the order: what was before comes
// before each thread's part, and that before what follows. Threads of a region
// remain unordered, and so do regions of different threads.
#if defined(__SANITIZE_THREAD__)
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

namespace {

using Part = void (*)(void*);
using Parallel = void (*)(Part, void*, unsigned, unsigned);

struct Region {
  Part part;
  void* data;
  char begin;
  char end;
};

void Run(void* pointer) {
  auto* region = static_cast<Region*>(pointer);
  __tsan_acquire(&region->begin);
  region->part(region->data);
  __tsan_release(&region->end);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void GOMP_parallel(
    Part part, void* data, unsigned threads, unsigned flags) {
  static const auto parallel =
      reinterpret_cast<Parallel>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{part, data, 0, 0};
  __tsan_release(&region.begin);
  parallel(Run, &region, threads, flags);
  __tsan_acquire(&region.end);
}
#endif
