// Metal's names for CUDA. mx.fast.cuda_kernel compiles a kernel after this file. A pointer's address space means
// nothing in CUDA; `threadgroup` declares shared memory. MLX passes the position in the grid only on Metal, so the
// attributes are macros here.
#define device
#define constant
#define thread
#define threadgroup __shared__
#define MLX_MTL_PRAGMA_UNROLL _Pragma("unroll")

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __nv_bfloat16 bfloat16_t;
typedef __half float16_t;
typedef __half2 half2;

#define threadgroup_position_in_grid blockIdx
#define thread_position_in_grid \
  (uint3{blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, 0u})
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

namespace mem_flags {
enum { mem_device = 1, mem_threadgroup = 2 };
}

inline void threadgroup_barrier(int) {
  __syncthreads();
}

inline void simdgroup_barrier(int) {
  __syncwarp();
}

template <typename T>
inline T simd_shuffle_xor(T v, ushort mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, v, mask);
}

template <typename T>
inline T simd_shuffle(T v, ushort lane) {
  return __shfl_sync(0xFFFFFFFFu, v, lane);
}

inline uint simd_broadcast(uint v, ushort lane) {
  return __shfl_sync(0xFFFFFFFFu, v, lane);
}

inline uint simd_prefix_exclusive_sum(uint v) {
  uint sum = v;
  for (int o = 1; o < 32; o *= 2) {
    const uint before = __shfl_up_sync(0xFFFFFFFFu, sum, o);
    sum += (threadIdx.x & 31u) < o ? 0 : before;
  }
  return sum - v;
}

#if __CUDA_ARCH__ >= 800
inline uint simd_max(uint v) {
  return __reduce_max_sync(0xFFFFFFFFu, v);
}
inline uint simd_min(uint v) {
  return __reduce_min_sync(0xFFFFFFFFu, v);
}
#else
inline uint simd_max(uint v) {
  for (int o = 1; o < 32; o *= 2) {
    const uint other = __shfl_xor_sync(0xFFFFFFFFu, v, o);
    v = other > v ? other : v;
  }
  return v;
}
inline uint simd_min(uint v) {
  return ~simd_max(~v);
}
#endif

inline float simd_max(float v) {
  for (int o = 1; o < 32; o *= 2) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, o));
  }
  return v;
}

// Metal's atomic integers; every access here is a relaxed one.
typedef uint atomic_uint;
enum { memory_order_relaxed };

inline void atomic_store_explicit(atomic_uint* place, uint v, int) {
  *(volatile uint*)place = v;
}
inline uint atomic_load_explicit(const atomic_uint* place, int) {
  return *(const volatile uint*)place;
}
inline uint atomic_fetch_add_explicit(atomic_uint* place, uint v, int) {
  return atomicAdd(place, v);
}

template <typename A, typename B>
inline A as_type(B b) {
  static_assert(sizeof(A) == sizeof(B), "as_type keeps the size");
  A a;
  memcpy(&a, &b, sizeof a);
  return a;
}

namespace metal {
namespace precise {
inline float exp(float v) {
  return expf(v);
}
inline float log(float v) {
  return logf(v);
}
inline float sqrt(float v) {
  return sqrtf(v);
}
inline float rsqrt(float v) {
  return rsqrtf(v);
}
inline float divide(float a, float b) {
  return a / b;
}
}  // namespace precise
namespace fast {
using precise::exp;
inline float exp2(float v) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(v));
  return made;
}
inline float cos(float v) {
  return cosf(v);
}
inline float sin(float v) {
  return sinf(v);
}
}  // namespace fast
inline float fma(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float fabs(float v) {
  return fabsf(v);
}
inline float rint(float v) {
  return rintf(v);
}
inline float fmax(float a, float b) {
  return fmaxf(a, b);
}
inline float fmin(float a, float b) {
  return fminf(a, b);
}
inline uint min(uint a, uint b) {
  return a < b ? a : b;
}
inline uint max(uint a, uint b) {
  return a > b ? a : b;
}
}  // namespace metal

// One LOP3 instruction; without the assembly the compiler takes two.
inline uint codes_over(uint word, uint mask, uint base) {
  uint made;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(made) : "r"(word), "r"(mask), "r"(base));
  return made;
}
#define CODES_READ(place) __ldg(place)  // keeps the compiler from cutting wide loads of codes in words
#define CODES_ADDRESSES  // numbers become pointers, which no Mac has shown to compile
#define CODES_AHEAD(place) asm volatile("prefetch.global.L2 [%0];" ::"l"(place))
#define CODES_OVER(word, mask, base) codes_over(word, mask, base)
#define CODES_NEAR_GRIDS  // a pointer may be to a threadgroup's memory, so grids are copied there
#define CODES_PRAGMA(text) _Pragma(#text)
#define CODES_UNROLL(count) CODES_PRAGMA(unroll count)

inline int codes_dot4(uint codes, uint x, int sum) {
  int made;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(made) : "r"(codes), "r"(x), "r"(sum));
  return made;
}
#define CODES_DOT4(codes, x, sum) codes_dot4(codes, x, sum)
#define CODES_BYTES(low, high, which) __byte_perm(low, high, which)

// `high` is a constant, 0 or 1.
inline int codes_dot2(uint x, uint codes, uint high, int sum) {
  return high ? __dp2a_hi(int(x), int(codes), sum) : __dp2a_lo(int(x), int(codes), sum);
}
#define CODES_DOT2(x, codes, high, sum) codes_dot2(x, codes, high, sum)

// The matrix units (matrix.h.metal). Capabilities below 8.0 have none for bfloat16.
#if __CUDA_ARCH__ >= 800
#define MATRIX_PRODUCT
#define MATRIX_PRODUCT_OF(kind, name)                                                                     \
  inline void matrix_product(uint, const uint* a, uint low, uint high, kind, float* d) {                  \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
        "{%8, %9}, {%0, %1, %2, %3};"                                                                     \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));                               \
  }
MATRIX_PRODUCT_OF(bfloat16_t, "bf16")
MATRIX_PRODUCT_OF(float16_t, "f16")

// b of two products (span.h.metal), of rows that lanes 0 to 15 point to, each with 8 values of 16 bits; the other lanes
// point to the next 8.
inline void matrix_turned(const void* row, uint* b) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(uint(__cvta_generic_to_shared(row))));
}

#define COPIES_AHEAD
#define LARGE_MEMORY extern __shared__ __align__(1024)  // as much as the launch names
typedef unsigned char uchar;
inline void copy_begin(void* to, const void* from, bool there) {
  const uint place = uint(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(there ? 16 : 0) : "memory");
}
inline void copies_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for units that read this memory themselves
#endif
}
#endif

// The matrix units of capability 9.0, which take 64 rows of four simdgroups at once, and operands from a threadgroup's
// memory in the order of span.h.metal. Other capabilities do not have them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SPAN_UNITS
#define SPAN_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SPAN_32(d, i) SPAN_8(d, i), SPAN_8(d, i + 8), SPAN_8(d, i + 16), SPAN_8(d, i + 24)

// Describes an operand: its first byte, 1,024 bytes from eight rows to the next, and the order of units.
inline unsigned long long span_operand(const void* tile) {
  return (__cvta_generic_to_shared(tile) & 0x3FFFF) >> 4 | 64ull << 32 | 1ull << 62;
}
// No sum is written behind this, nor read before `span_units_end`, which waits for all products.
template <int N>
inline void span_settle(float* d) {
#pragma unroll
  for (int i = 0; i < N; i += 32) {
    asm volatile("" : SPAN_32(d, i)::"memory");
  }
}
template <int N>
inline void span_units_begin(float* d) {
  span_settle<N>(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int N>
inline void span_units_end(float* d) {
  asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
  span_settle<N>(d);
}
#define SPAN_UNITS_OF(kind, name)                                                                          \
  inline void span_units_product(unsigned long long a, unsigned long long b, int adds, kind, float* d) {   \
    asm volatile(                                                                                          \
        "{.reg .pred adds; setp.ne.b32 adds, %66, 0;"                                                      \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {" SPAN_D64                         \
        "}, %64, %65, adds, 1, 1, 0, 0;}"                                                                  \
        : SPAN_32(d, 0), SPAN_32(d, 32)                                                                    \
        : "l"(a), "l"(b), "r"(adds));                                                                      \
  }                                                                                                        \
  inline void span_units_product(const uint* a, unsigned long long b, kind, float* d) {                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" SPAN_D32                 \
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                                               \
                 : SPAN_32(d, 0)                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }
#define SPAN_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPAN_D64 \
  SPAN_D32 \
  ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
SPAN_UNITS_OF(bfloat16_t, "bf16")
SPAN_UNITS_OF(float16_t, "f16")

// `span_scores` of 128 keys, where `row` is the first one of the simdgroup.
template <uint D, uint ROWS, typename X>
inline void span_units_scores(const X* queries, const X* keys, uint row, X kind, float* score) {
  span_units_begin<64>(score);
#pragma unroll
  for (uint step = 0; step < D / 16; step++) {
    const uint part = step / 4, at = step % 4 * 16;
    const X* own = queries + (part * ROWS + row / 64 * 64) * 64 + at;
    span_units_product(span_operand(own), span_operand(keys + part * 128 * 64 + at), step > 0, kind, score);
  }
  span_units_end<64>(score);
}

// `span_sums` of 128 keys.
template <uint V, typename X>
inline void span_units_sums(uint* weight, const X* values, X kind, float* acc) {
#pragma unroll
  for (uint i = 0; i < 32; i++) {
    asm volatile("" : "+r"(weight[i])::"memory");
  }
  span_units_begin<V / 2>(acc);
#pragma unroll
  for (uint some = 0; some < 8; some++) {
#pragma unroll
    for (uint part = 0; part < V / 64; part++) {
      span_units_product(weight + 4 * some, span_operand(values + (part * 128 + 16 * some) * 64), kind, acc + 32 * part);
    }
  }
  span_units_end<V / 2>(acc);
}
#endif
