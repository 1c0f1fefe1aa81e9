// Runs Metal kernels compiled by msl_host.h: one fiber per thread, 32 lanes per simdgroup, one
// threadgroup at a time.
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>
#include <xmmintrin.h>
#include "msl_abi.h"

struct MslBuffer {
  char* data;
  uint64_t size;
  uint32_t writable, pad;
};
struct MslLaunch {
  uint32_t grid[3], group[3];
  uint32_t order, n_buffers;  // 0 first-come, 1 last-come, else the seed of a random order
  MslBuffer* buffers;
  const MslImage* image;
  char error[512];
};

namespace {
using Entry = void (*)(const uint64_t* args, const MslThread* t);
constexpr size_t kStack = 64 << 10;
constexpr size_t kStride = kStack + 576;  // else the tops of all stacks compete for the same lines of a cache
constexpr unsigned kWidest = 16;         // bytes that a lane exchanges at most
constexpr unsigned kMemThreadgroup = 2;  // mem_flags::mem_threadgroup as msl_host.h numbers it
constexpr unsigned kFlush = 0x8040;      // denormal floats are zero, as results and as arguments
constexpr uint32_t kNone = ~0u;

enum State { kReady, kBarrier, kSimd, kDone };
struct Fiber {
  void* sp;
  char* stack;
  State state;
  int line;               // of the barrier or simdgroup operation it waits at
  unsigned size, active;  // bytes exchanged (a barrier: its flags); mask of the lanes that took part
  const void* mine;       // this lane's value, and where the values of all 32 go
  void* all;
  MslThread t;
};

// Who touched a byte of threadgroup memory last, and in which span between barriers.
struct Shadow {
  uint32_t writer, write_tg, write_sg, reader, reader_sg, read_tg, read_sg;
};

MslLaunch* launch;
uint64_t args[32];
Fiber root;
std::vector<Fiber> fibers;
std::deque<int> ready;
std::vector<uint32_t> sg_epoch;              // simdgroup_barriers passed, per simdgroup
std::vector<unsigned> sg_alive, sg_waiting;  // lanes that have not returned, and those at a simdgroup operation
uint32_t tg_epoch, n_threads, group_index;
int current;           // -1: the scheduler
bool failed;
std::mt19937 rng;
std::vector<Shadow> tg_shadow;
std::vector<std::vector<uint32_t>> writers;  // per output byte: the thread that wrote it

// Saves the registers a call must keep and the stack pointer, then returns on another stack.
extern "C" void msl_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden msl_switch
.globl msl_switch
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
void switch_to(Fiber& from, Fiber& to) {
  msl_switch(&from.sp, to.sp);
}

void go(int next) {
  Fiber& from = current < 0 ? root : fibers[current];
  current = next;
  switch_to(from, next < 0 ? root : fibers[next]);
}

// Keeps the first message and abandons the launch: the current thread never runs again.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  if (!failed) {
    va_list ap;
    va_start(ap, format);
    vsnprintf(launch->error, sizeof launch->error, format, ap);
    va_end(ap);
  }
  failed = true;
  if (current >= 0) go(-1);
}

// The next thread to run, by the launch's order; -1 if all wait or have returned.
int pick() {
  if (ready.empty()) return -1;
  if (launch->order == 1) {
    int f = ready.back();
    ready.pop_back();
    return f;
  }
  size_t i = launch->order ? rng() % ready.size() : 0;
  int f = ready[i];
  if (launch->order) {
    ready[i] = ready.back();
    ready.pop_back();
  } else {
    ready.pop_front();
  }
  return f;
}

void release(int f) {
  fibers[f].state = kReady;
  ready.push_back(f);
}

// Completes a simdgroup operation once every lane that has not returned has reached it: each gets the values of all
// active lanes; the others read as NaN.
void complete_simd(int lane) {
  const int base = lane & ~31, sg = lane / 32;
  const unsigned active = sg_waiting[sg];
  if (!active || active != sg_alive[sg]) return;
  Fiber* const lanes = &fibers[base];
  const Fiber& first = lanes[__builtin_ctz(active)];
  const unsigned size = first.size;
  char all[32 * kWidest];
  memset(all, 0xff, 32 * size);
  for (unsigned left = active; left; left &= left - 1) {
    const int i = __builtin_ctz(left);
    if (lanes[i].line != first.line || lanes[i].size != size)
      return fail("lanes of one simdgroup diverge: simdgroup operations at lines %d and %d", first.line,
                  lanes[i].line);
    if (size) memcpy(all + i * size, lanes[i].mine, size);
  }
  if (!size) sg_epoch[sg]++;  // a simdgroup_barrier
  sg_waiting[sg] = 0;
  for (unsigned left = active; left; left &= left - 1) {
    const int i = __builtin_ctz(left);
    if (size) memcpy(lanes[i].all, all, 32 * size);
    lanes[i].active = active;
    release(base + i);
  }
}

// Suspends the current thread at a barrier or a simdgroup operation.
void wait(State state, int line, unsigned size = 0, const void* mine = nullptr, void* all = nullptr) {
  const int self = current;
  Fiber& f = fibers[self];
  f.state = state;
  f.line = line;
  f.size = size;
  f.mine = mine;
  f.all = all;
  if (state == kSimd) {
    sg_waiting[self / 32] |= 1u << self % 32;
    complete_simd(self);
  }
  const int next = pick();
  if (next != self) go(next);
}

void finish() {
  fibers[current].state = kDone;
  sg_alive[current / 32] &= ~(1u << current % 32);
  complete_simd(current);
  go(pick());
}

void start() {
  Entry(launch->image->entry)(args, &fibers[current].t);
  finish();
}

// Every thread waits or has returned: lets all pass a barrier that all have reached, else reports who is
// stuck.
void pass_barrier() {
  unsigned at_barrier = 0, at_simd = 0;
  int line = 0, simd_line = 0;
  bool same = true;
  for (unsigned i = 0; i < n_threads; i++) {
    const Fiber& f = fibers[i];
    if (f.state == kSimd) at_simd++, simd_line = f.line;
    if (f.state != kBarrier) continue;
    same &= !at_barrier || line == f.line;
    at_barrier++, line = f.line;
  }
  if (at_barrier != n_threads || !same)
    return fail(
        "stuck: of %u threads, %u wait at threadgroup_barrier (line %d), %u at a simdgroup operation (line "
        "%d), "
        "%u have returned",
        n_threads, at_barrier, line, at_simd, simd_line, n_threads - at_barrier - at_simd);
  tg_epoch += fibers[0].size & kMemThreadgroup ? 1 : 0;
  for (unsigned i = 0; i < n_threads; i++) release(launch->order == 1 ? n_threads - 1 - i : i);
}

bool all_returned() {
  return std::all_of(fibers.begin(), fibers.begin() + n_threads,
                     [](const Fiber& f) { return f.state == kDone; });
}

void run_group() {
  while (!failed) {
    const int next = pick();
    if (next >= 0)
      go(next);
    else if (all_returned())
      return;
    else
      pass_barrier();
  }
}

// ---- memory checks

unsigned long image_offset(const void* pc) {
  return (const char*)pc - launch->image->begin;
}

// A byte of threadgroup memory may be touched by another thread only after a barrier.
void threadgroup_access(const char* p, unsigned n, bool write, const void* pc) {
  const uint32_t self = current, sg = current / 32;
  for (unsigned i = 0; i < n; i++) {
    Shadow& s = tg_shadow[p - launch->image->tg_begin + i];
    const bool after_write = s.writer == kNone || s.writer == self || s.write_tg < tg_epoch ||
                             (s.writer / 32 == sg && s.write_sg < sg_epoch[sg]);
    const bool after_read = s.reader == kNone || s.reader == self || s.read_tg < tg_epoch ||
                            (s.reader_sg == sg && s.read_sg < sg_epoch[sg]);
    if (!after_write || (write && !after_read))
      return fail(
          "race on threadgroup memory: thread %u %s byte %ld that thread %d %s with no barrier between [pc "
          "0x%lx]",
          self, write ? "writes" : "reads", long(p - launch->image->tg_begin + i), int(after_write ? s.reader : s.writer),
          after_write ? "read" : "wrote", image_offset(pc));
    if (write) {
      s.writer = self, s.write_tg = tg_epoch, s.write_sg = sg_epoch[sg];
      continue;
    }
    const bool fresh = s.reader == kNone || s.read_tg < tg_epoch;
    s.reader = fresh || s.reader == self ? self : kNone - 1;
    s.reader_sg = fresh || s.reader_sg == sg ? sg : kNone - 1;
    s.read_tg = tg_epoch, s.read_sg = sg_epoch[sg];
  }
}

// A byte of an output belongs to the thread that writes it; inputs are read only.
void buffer_access(unsigned b, const char* p, unsigned n, bool write, const void* pc) {
  const MslBuffer& u = launch->buffers[b];
  if (write && !u.writable)
    return fail("write to input buffer %u at byte %ld [pc 0x%lx]", b, long(p - u.data), image_offset(pc));
  if (!u.writable) return;
  const uint32_t self = group_index * 1024 + current;
  for (unsigned i = 0; i < n; i++) {
    uint32_t& w = writers[b][p - u.data + i];
    if (w != kNone && w != self)
      return fail("race on buffer %u: two threads touch byte %ld [pc 0x%lx]", b, long(p - u.data),
                  image_offset(pc));
    if (write) w = self;
  }
}

void out_of_bounds(const char* p, unsigned n, bool write, const void* pc) {
  long best = 0;
  unsigned nearest = 0;
  for (unsigned b = 0; b < launch->n_buffers; b++) {
    const MslBuffer& u = launch->buffers[b];
    const long distance = p < u.data ? u.data - p : p - (u.data + u.size);
    if (b == 0 || distance < best) nearest = b, best = distance;
  }
  const MslBuffer& u = launch->buffers[nearest];
  fail("%s of %u bytes out of bounds: byte %ld of buffer %u, which has %lu [pc 0x%lx]",
       write ? "write" : "read", n, long(p - u.data), nearest, (unsigned long)u.size, image_offset(pc));
}

// Called by code compiled with -fsanitize=thread, whose own runtime is not linked.
void access(const void* pointer, unsigned n, bool write, const void* pc) {
  if (current < 0) return;
  const char* p = (const char*)pointer;
  const char* stack = fibers[current].stack;
  if (p >= stack && p < stack + kStack) return;
  const MslImage& image = *launch->image;
  if (p >= image.tg_begin && p + n <= image.tg_end) return threadgroup_access(p, n, write, pc);
  for (unsigned b = 0; b < launch->n_buffers; b++) {
    const MslBuffer& u = launch->buffers[b];
    if (p >= u.data && p + n <= u.data + u.size) return buffer_access(b, p, n, write, pc);
  }
  const bool constant_table = !write && p >= image.begin && p + n <= image.end;
  if (!constant_table) out_of_bounds(p, n, write, pc);
}

void aligned_access(const void* p, unsigned n, bool write, const void* pc) {
  if ((uint64_t)p % n) return fail("misaligned access of %u bytes [pc 0x%lx]", n, image_offset(pc));
  access(p, n, write, pc);
}
}  // namespace

#define HERE __builtin_return_address(0)
#define CHECK(n)                                       \
  extern "C" void __tsan_read##n(void* p) {            \
    aligned_access(p, n, false, HERE);                 \
  }                                                    \
  extern "C" void __tsan_write##n(void* p) {           \
    aligned_access(p, n, true, HERE);                  \
  }                                                    \
  extern "C" void __tsan_unaligned_read##n(void* p) {  \
    access(p, n, false, HERE);                         \
  }                                                    \
  extern "C" void __tsan_unaligned_write##n(void* p) { \
    access(p, n, true, HERE);                          \
  }
CHECK(1)
CHECK(2)
CHECK(4)
CHECK(8)
CHECK(16)
extern "C" void* __tsan_memset(void* p, int v, uint64_t n) {
  if (n) access(p, n, true, HERE);
  return memset(p, v, n);
}
extern "C" void* __tsan_memcpy(void* p, const void* q, uint64_t n) {
  if (n) access(q, n, false, HERE), access(p, n, true, HERE);
  return memcpy(p, q, n);
}
extern "C" void* __tsan_memmove(void* p, const void* q, uint64_t n) {
  if (n) access(q, n, false, HERE), access(p, n, true, HERE);
  return memmove(p, q, n);
}
extern "C" void __tsan_init() {}  // the instrumented code's constructor
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// Undefined behaviour, called by code compiled with -fsanitize=shift,... (no sanitizer runtime either).
struct Where {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, text)                       \
  extern "C" void __ubsan_handle_##name(Where* w) { \
    fail(text " at line %u", w->line);              \
  }
UNDEFINED(shift_out_of_bounds, "shift by too much")
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(divrem_overflow, "division by zero")
UNDEFINED(float_cast_overflow, "float does not fit the integer")
UNDEFINED(builtin_unreachable, "unreachable code reached")

extern "C" unsigned msl_lane() {
  return current & 31;
}
extern "C" void msl_barrier(int flags, int line) {
  wait(kBarrier, line, flags);
}
extern "C" void msl_simd_barrier(int, int line) {
  wait(kSimd, line);
}
extern "C" unsigned msl_exchange(const void* mine, void* all, unsigned size, int line) {
  wait(kSimd, line, size, mine, all);
  return fibers[current].active;
}

namespace {
// Sizes of the grid in threads and threadgroups; the last threadgroup of an axis may be smaller, as
// dispatchThreads has it.
struct Extent {
  unsigned full[3], groups[3];
};

Extent extent_of(const MslLaunch& l) {
  Extent e;
  for (int d = 0; d < 3; d++) {
    e.full[d] = std::min(l.group[d], l.grid[d]);
    e.groups[d] = (l.grid[d] + e.full[d] - 1) / e.full[d];
  }
  return e;
}

// The attributes of thread `i` of the threadgroup at `at`, which has `size` threads.
MslThread attributes(const Extent& e, const unsigned* at, const unsigned* size, unsigned i) {
  MslThread t;
  const unsigned in[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
  for (int d = 0; d < 3; d++) {
    t.thread_position_in_threadgroup[d] = in[d];
    t.thread_position_in_grid[d] = at[d] * e.full[d] + in[d];
    t.threadgroup_position_in_grid[d] = at[d];
    t.threadgroups_per_grid[d] = e.groups[d];
    t.threads_per_grid[d] = t.grid_size[d] = launch->grid[d];
    t.threads_per_threadgroup[d] = size[d];
    t.dispatch_threads_per_threadgroup[d] = e.full[d];
    t.grid_origin[d] = 0;
  }
  const unsigned threads = size[0] * size[1] * size[2], most = e.full[0] * e.full[1] * e.full[2];
  t.thread_index_in_threadgroup = i;
  t.thread_index_in_simdgroup = i % 32;
  t.simdgroup_index_in_threadgroup = i / 32;
  t.thread_index_in_quadgroup = i % 4;
  t.quadgroup_index_in_threadgroup = i / 4;
  t.simdgroups_per_threadgroup = (threads + 31) / 32;
  t.quadgroups_per_threadgroup = (threads + 3) / 4;
  t.dispatch_simdgroups_per_threadgroup = (most + 31) / 32;
  t.dispatch_quadgroups_per_threadgroup = (most + 3) / 4;
  t.threads_per_simdgroup = t.thread_execution_width = 32;
  return t;
}

// An empty stack that msl_switch() enters at start(), with a call's alignment and a null return address.
void prepare(Fiber& f, char* stack) {
  f.stack = stack;
  uint64_t* sp = (uint64_t*)(((uint64_t)stack + kStack) & ~15ull);
  *--sp = 0;
  *--sp = (uint64_t)start;
  for (int r = 0; r < 6; r++) *--sp = 0;
  f.sp = sp;
}

long tg_bytes() {
  return launch->image->tg_end - launch->image->tg_begin;
}

void prepare_group(const Extent& e, const unsigned* at, char* stacks) {
  unsigned size[3];
  for (int d = 0; d < 3; d++) size[d] = std::min(e.full[d], launch->grid[d] - at[d] * e.full[d]);
  n_threads = size[0] * size[1] * size[2];
  memset(launch->image->tg_begin, 0xff, tg_bytes());  // NaN: threadgroup memory starts undefined
  tg_shadow.assign(tg_bytes(), {kNone, 0, 0, kNone, 0, 0, 0});
  const unsigned simdgroups = (n_threads + 31) / 32;
  sg_epoch.assign(simdgroups, 0);
  sg_waiting.assign(simdgroups, 0);
  sg_alive.assign(simdgroups, ~0u);
  if (n_threads % 32) sg_alive.back() = ~(~0u << n_threads % 32);
  tg_epoch = 0;
  ready.clear();
  for (unsigned i = 0; i < n_threads; i++) {
    fibers[i].t = attributes(e, at, size, i);
    prepare(fibers[i], stacks + i * kStride);
    release(launch->order == 1 ? n_threads - 1 - i : i);
  }
}

void bind_buffers() {
  writers.assign(launch->n_buffers, {});
  for (unsigned b = 0; b < launch->n_buffers; b++) {
    args[b] = (uint64_t)launch->buffers[b].data;
    if (launch->buffers[b].writable) writers[b].assign(launch->buffers[b].size, kNone);
  }
}
}  // namespace

// Runs the whole grid, one threadgroup after another; 1 and launch->error if a check failed.
extern "C" int msl_launch(MslLaunch* l) {
  launch = l;
  failed = false;
  current = -1;
  group_index = 0;
  l->error[0] = 0;
  rng.seed(l->order);
  bind_buffers();
  const Extent e = extent_of(*l);
  const unsigned most = e.full[0] * e.full[1] * e.full[2];
  if (tg_bytes() > 32768) fail("%ld bytes of threadgroup memory; Metal has 32768", tg_bytes());
  if (most > 1024) fail("%u threads per threadgroup; Metal has 1024 at most", most);
  static std::unique_ptr<char[]> stacks;
  if (!failed && fibers.size() < most) {
    stacks.reset(new char[most * kStride]);
    fibers.assign(most, Fiber());
  }
  const unsigned count = e.groups[0] * e.groups[1] * e.groups[2], mode = _mm_getcsr();
  _mm_setcsr(mode | kFlush);
  for (; group_index < count && !failed; group_index++) {
    const unsigned at[3] = {group_index % e.groups[0], group_index / e.groups[0] % e.groups[1],
                            group_index / (e.groups[0] * e.groups[1])};
    prepare_group(e, at, stacks.get());
    run_group();
  }
  _mm_setcsr(mode);
  return failed;
}
