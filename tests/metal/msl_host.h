// Metal's names for `clang++ -x cl -cl-std=clc++2021` (C++ for OpenCL: C++17 with real address
// spaces). Force-included before the text that MLX generates. The roles of the four OpenCL
// spaces are chosen for their rules, not their names: only __global may hold a function-scope
// static, which is what threadgroup arrays become (see msl.py); __local has no rule of its own.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#include "msl_abi.h"

// clang-format off
typedef signed char int8_t;      typedef unsigned char uint8_t;   typedef unsigned char uchar;
typedef short int16_t;           typedef unsigned short uint16_t; typedef unsigned short ushort;
typedef int int32_t;             typedef unsigned int uint32_t;   typedef unsigned int uint;
typedef long int64_t;            typedef unsigned long uint64_t;  typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;    typedef __PTRDIFF_TYPE__ ptrdiff_t;

#define device __local
#define constant __constant
#define threadgroup __global
#define thread __private
#define local msl_local      // keywords of OpenCL, plain identifiers in Metal
#define global msl_global
#define generic msl_generic
#define pipe msl_pipe
#define MSL_TG_ARRAY __attribute__((section("msl_tgmem"), aligned(16))) static threadgroup
#define METAL_FUNC inline __attribute__((always_inline))

extern "C" {  // simt.cpp
void msl_barrier(int flags, int line);
void msl_simd_barrier(int flags, int line);
uint msl_exchange(const void* mine, void* all, uint size, int line);  // returns the active-lane mask
uint msl_lane(void);
float expf(float); float exp2f(float); float logf(float); float log2f(float); float log10f(float);
float sinf(float); float cosf(float); float tanf(float); float tanhf(float); float powf(float, float);
float fmodf(float, float);
}

#define MSL_VEC(T, N) typedef T T##N __attribute__((ext_vector_type(N)));
#define MSL_VECS(T) MSL_VEC(T, 2) MSL_VEC(T, 3) MSL_VEC(T, 4) \
  inline T##2 msl_##T##2(T a) { return (T##2)(a); } \
  inline T##3 msl_##T##3(T a) { return (T##3)(a); } \
  inline T##4 msl_##T##4(T a) { return (T##4)(a); } \
  inline T##2 msl_##T##2(T a, T b) { return (T##2)(a, b); } \
  inline T##3 msl_##T##3(T a, T b, T c) { return (T##3)(a, b, c); } \
  inline T##4 msl_##T##4(T a, T b, T c, T d) { return (T##4)(a, b, c, d); } \
  inline T##4 msl_##T##4(T##2 a, T##2 b) { return (T##4)(a, b); } \
  template <typename V> inline T##2 msl_##T##2(V v) { return __builtin_convertvector(v, T##2); } \
  template <typename V> inline T##3 msl_##T##3(V v) { return __builtin_convertvector(v, T##3); } \
  template <typename V> inline T##4 msl_##T##4(V v) { return __builtin_convertvector(v, T##4); }
MSL_VECS(float) MSL_VECS(half) MSL_VECS(int) MSL_VECS(uint) MSL_VECS(short) MSL_VECS(ushort)
MSL_VECS(char) MSL_VECS(uchar) MSL_VECS(long) MSL_VECS(ulong)
// ext_vector_type has no constructor syntax: float4(a, b, c, d) must become a call.
#define float2(...) msl_float2(__VA_ARGS__)
#define float3(...) msl_float3(__VA_ARGS__)
#define float4(...) msl_float4(__VA_ARGS__)
#define half2(...) msl_half2(__VA_ARGS__)
#define half4(...) msl_half4(__VA_ARGS__)
#define int2(...) msl_int2(__VA_ARGS__)
#define int4(...) msl_int4(__VA_ARGS__)
#define uint2(...) msl_uint2(__VA_ARGS__)
#define uint3(...) msl_uint3(__VA_ARGS__)
#define uint4(...) msl_uint4(__VA_ARGS__)

    // clang-format on

    template <typename To, typename From>
    METAL_FUNC constexpr To as_type(From v) {
  return __builtin_bit_cast(To, v);
}

// bfloat: converts to float by itself, never back (as in Metal); arithmetic rounds to bfloat.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  constexpr bfloat(const bfloat&) = default;
  constexpr bfloat(const constant bfloat& o) : bits(o.bits) {}
  constexpr explicit bfloat(float f) : bits(round(f)) {}
  constexpr explicit bfloat(float f) constant : bits(round(f)) {}
  bfloat& operator=(const bfloat&) = default;
  bfloat& operator=(const constant bfloat& o) {
    bits = o.bits;
    return *this;
  }
  constexpr operator float() const {
    return as_type<float>(uint(bits) << 16);
  }
  constexpr operator float() const constant {
    return as_type<float>(uint(bits) << 16);
  }
  static constexpr uint16_t round(float f) {
    uint u = as_type<uint>(f);
    return f != f ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};

// bfloat is not trivially copyable, so as_type needs to be told.
template <>
constexpr uint16_t as_type<uint16_t, bfloat>(bfloat v) {
  return v.bits;
}
template <>
constexpr bfloat as_type<bfloat, uint16_t>(uint16_t v) {
  return bfloat(as_type<float>(uint(v) << 16));
}
// clang-format off
#define MSL_BF(op) \
  METAL_FUNC constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  METAL_FUNC bfloat& operator op##=(bfloat& a, bfloat b) { return a = bfloat(float(a) op float(b)); }
MSL_BF(+) MSL_BF(-) MSL_BF(*) MSL_BF(/)
METAL_FUNC constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
// clang-format on

namespace metal {
template <typename T, int N>
struct msl_vec {
  typedef T type __attribute__((ext_vector_type(N)));
};

// A class cannot be a vector's element.
template <>
struct msl_vec<bfloat, 2> {
  struct type {
    bfloat x, y;
  };
};
template <>
struct msl_vec<bfloat, 4> {
  struct type {
    bfloat x, y, z, w;
  };
};
template <typename T, int N>
using vec = typename msl_vec<T, N>::type;

// clang-format off
// Each function in float, half and bfloat; the narrow ones compute in float.
#define MSL_F1(n, e) \
  METAL_FUNC float n(float x) { return e; } \
  METAL_FUNC half n(half h) { float x = h; return half(e); } MSL_F1_BF(n, e)
#define MSL_F2(n, e) \
  METAL_FUNC float n(float x, float y) { return e; } \
  METAL_FUNC half n(half a, half b) { float x = a, y = b; return half(e); } MSL_F2_BF(n, e)
#define MSL_F1_BF(n, e) METAL_FUNC bfloat n(bfloat b) { float x = b; return bfloat(e); }
#define MSL_F2_BF(n, e) METAL_FUNC bfloat n(bfloat a, bfloat b) { float x = a, y = b; return bfloat(e); }
#define MSL_EXACT \
  MSL_F1(fabs, __builtin_fabsf(x)) MSL_F1(floor, __builtin_floorf(x)) MSL_F1(ceil, __builtin_ceilf(x)) \
  MSL_F1(trunc, __builtin_truncf(x)) MSL_F1(rint, __builtin_rintf(x)) MSL_F1(round, __builtin_roundf(x)) \
  MSL_F2(fmin, __builtin_fminf(x, y)) MSL_F2(fmax, __builtin_fmaxf(x, y)) MSL_F2(fmod, fmodf(x, y)) \
  MSL_F2(min, __builtin_fminf(x, y)) MSL_F2(max, __builtin_fmaxf(x, y)) MSL_F1(abs, __builtin_fabsf(x)) \
  METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#define MSL_PRECISE \
  MSL_F1(exp, expf(x)) MSL_F1(exp2, exp2f(x)) MSL_F1(log, logf(x)) MSL_F1(log2, log2f(x)) \
  MSL_F1(log10, log10f(x)) MSL_F1(sin, sinf(x)) MSL_F1(cos, cosf(x)) MSL_F1(tan, tanf(x)) \
  MSL_F1(tanh, tanhf(x)) MSL_F1(sqrt, __builtin_sqrtf(x)) MSL_F1(rsqrt, 1 / __builtin_sqrtf(x)) \
  MSL_F2(pow, powf(x, y)) MSL_F2(divide, x / y)

// The fast functions err by all that Metal's specification lets them (version 4.1, table 8.2; for sine and cosine its
// bound within one turn), to the side that the bits of the argument choose, so that errors do not cancel.
METAL_FUNC float msl_side(float x) {
  return __builtin_popcount(as_type<uint>(x)) & 1 ? -1.0f : 1.0f;
}
// v moved by a number of floats, if it is a number that has so many neighbours.
METAL_FUNC float msl_moved(float v, float x, float ulps) {
  const float size = __builtin_fabsf(v);
  return size > 1e-36f && size < 1e38f ? as_type<float>(as_type<uint>(v) + int(msl_side(x) * ulps)) : v;
}
METAL_FUNC float msl_steps(float x) {
  return 3 + __builtin_floorf(__builtin_fminf(__builtin_fabsf(2 * x), 1000));
}
METAL_FUNC float msl_log(float v, float x, float error, float ulps) {
  return x >= 0.5f && x <= 2 ? v + msl_side(x) * error : msl_moved(v, x, ulps);
}
#define MSL_FAST \
  MSL_F1(exp, msl_moved(expf(x), x, msl_steps(x))) MSL_F1(exp2, msl_moved(exp2f(x), x, msl_steps(x))) \
  MSL_F1(log, msl_log(logf(x), x, 4.76837158203125e-7f, 3)) MSL_F1(log2, msl_log(log2f(x), x, 2.384185791015625e-7f, 2)) \
  MSL_F1(log10, log2(x) * 0.30103f) MSL_F1(sin, sinf(x) + msl_side(x) * 0.0001220703125f) \
  MSL_F1(cos, cosf(x) + msl_side(x) * 0.0001220703125f) MSL_F1(tan, sin(x) * (1 / cos(x))) \
  MSL_F1(tanh, (exp(2 * x) - 1) / (exp(2 * x) + 1)) MSL_F1(rsqrt, msl_moved(1 / __builtin_sqrtf(x), x, 2)) \
  MSL_F1(sqrt, x > 0 && x < __builtin_inff() ? x * rsqrt(x) : __builtin_sqrtf(x)) \
  MSL_F2(pow, exp2(y * log2(x))) MSL_F2(divide, msl_moved(x / y, y, 2))
MSL_EXACT MSL_FAST  // the default from macOS 15 on
namespace precise { MSL_EXACT MSL_PRECISE }
namespace fast { MSL_EXACT MSL_FAST }
#define MSL_INT(T) \
  METAL_FUNC constexpr T min(T a, T b) { return a < b ? a : b; } \
  METAL_FUNC constexpr T max(T a, T b) { return a > b ? a : b; }
MSL_INT(int) MSL_INT(uint) MSL_INT(short) MSL_INT(ushort) MSL_INT(long) MSL_INT(ulong)
METAL_FUNC constexpr int abs(int a) { return a < 0 ? -a : a; }
// clang-format on

template <typename T>
METAL_FUNC T clamp(T v, T lo, T hi) {
  return min(max(v, lo), hi);
}
template <typename T>
METAL_FUNC T select(T a, T b, bool c) {
  return c ? b : a;
}
METAL_FUNC bool isnan(float x) {
  return x != x;
}
METAL_FUNC bool isinf(float x) {
  return __builtin_fabsf(x) == __builtin_inff();
}
METAL_FUNC uint popcount(uint x) {
  return __builtin_popcount(x);
}
METAL_FUNC float dot(::float4 a, ::float4 b) {
  ::float4 c = a * b;
  return c.x + c.y + c.z + c.w;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
METAL_FUNC void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) {
  msl_barrier(int(f), line);
}
METAL_FUNC void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) {
  msl_simd_barrier(int(f), line);
}

// simd_*: all 32 lanes' values, inactive lanes replaced by the reduction's identity.
template <typename T>
struct msl_lanes {
  T v[32];
  uint active;
  static_assert(sizeof(T) <= 16, "simt.cpp exchanges 16 bytes at most");
  msl_lanes(T x, int line) : active(msl_exchange(&x, v, sizeof(T), line)) {}
};

// clang-format off
#define MSL_REDUCE(name, type, identity, expr) \
  template <typename T> METAL_FUNC T name(T x, int line = __builtin_LINE()) { \
    msl_lanes<T> l(x, line); type w[32]; \
    for (uint i = 0; i < 32; i++) w[i] = (l.active >> i) & 1 ? type(l.v[i]) : type(identity); \
    for (uint o = 1; o < 32; o *= 2) \
      for (uint i = 0; i < 32; i += 2 * o) { type a = w[i], b = w[i + o]; w[i] = type(expr); } \
    return T(w[0]); \
  }
template <typename T> struct msl_acc { typedef T type; };        // half adds in half,
template <> struct msl_acc<bfloat> { typedef float type; };      // bfloat in float (MLX's preamble)
MSL_REDUCE(simd_sum, typename msl_acc<T>::type, 0, a + b)
MSL_REDUCE(simd_product, typename msl_acc<T>::type, 1, a * b)
MSL_REDUCE(simd_max, typename msl_acc<T>::type, l.v[__builtin_ctz(l.active)], a > b ? a : b)
MSL_REDUCE(simd_min, typename msl_acc<T>::type, l.v[__builtin_ctz(l.active)], a < b ? a : b)
// clang-format on
template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane, int line = __builtin_LINE()) {
  return msl_lanes<T>(x, line).v[lane & 31];
}
template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane, int line = __builtin_LINE()) {
  return msl_lanes<T>(x, line).v[lane & 31];
}
template <typename T>
METAL_FUNC T simd_broadcast_first(T x, int line = __builtin_LINE()) {
  msl_lanes<T> l(x, line);
  return l.v[__builtin_ctz(l.active)];
}
template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort m, int line = __builtin_LINE()) {
  return msl_lanes<T>(x, line).v[(msl_lane() ^ m) & 31];
}
template <typename T>
METAL_FUNC T simd_shuffle_down(T x, ushort d, int line = __builtin_LINE()) {
  msl_lanes<T> l(x, line);
  uint s = msl_lane() + d;
  return s < 32 ? l.v[s] : x;
}
template <typename T>
METAL_FUNC T simd_shuffle_up(T x, ushort d, int line = __builtin_LINE()) {
  msl_lanes<T> l(x, line);
  uint s = msl_lane() - d;
  return s < 32 ? l.v[s] : x;
}
template <typename T>
METAL_FUNC T simd_prefix_inclusive_sum(T x, int line = __builtin_LINE()) {
  msl_lanes<T> l(x, line);
  T s = T(0);
  for (uint i = 0; i <= msl_lane(); i++)
    if ((l.active >> i) & 1) s = s + l.v[i];
  return s;
}
template <typename T>
METAL_FUNC T simd_prefix_exclusive_sum(T x, int line = __builtin_LINE()) {
  return simd_prefix_inclusive_sum(x, line) - x;
}
METAL_FUNC bool simd_any(bool x, int line = __builtin_LINE()) {
  return simd_max(uint(x), line) != 0;
}
METAL_FUNC bool simd_all(bool x, int line = __builtin_LINE()) {
  return simd_min(uint(x), line) != 0;
}

enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
#define MSL_ATOMIC __attribute__((noinline, no_sanitize("thread")))  // the race check must not see it
template <typename T, typename U>
MSL_ATOMIC T atomic_fetch_add_explicit(device atomic<T>* p, U v, memory_order) {
  T old = p->value;
  p->value = old + T(v);
  return old;
}
template <typename T>
MSL_ATOMIC T atomic_load_explicit(const device atomic<T>* p, memory_order) {
  return p->value;
}
#define atomic_uint metal::atomic<uint>  // OpenCL has one of its own
MSL_ATOMIC uint atomic_fetch_add_explicit(threadgroup atomic_uint* p, uint v, memory_order) {
  const uint old = p->value;
  p->value = old + v;
  return old;
}
MSL_ATOMIC uint atomic_load_explicit(const threadgroup atomic_uint* p, memory_order) {
  return p->value;
}
MSL_ATOMIC void atomic_store_explicit(threadgroup atomic_uint* p, uint v, memory_order) {
  p->value = v;
}
}  // namespace metal

// What the kernels use of MLX's preamble (metal::utils()). Unrolling is left out: it only costs compile time
// here.
using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
#define MLX_MTL_PRAGMA_UNROLL
template <typename T, typename U>
inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}

// Metal's products of small matrices. Apple does not say which two values of a matrix a lane has; MLX's kernels expect these
// (mlx/backend/metal/kernels/steel/gemm/mma.h).
namespace metal {
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLUMNS == 8, "Metal has matrices of 8 rows and 8 columns only");
  vec<T, 2> msl_own;
  thread vec<T, 2>& thread_elements() thread {
    return msl_own;
  }
};

// d = a b + c
METAL_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<float, 8, 8>& d, thread simdgroup_matrix<float, 8, 8>& a,
    thread simdgroup_matrix<float, 8, 8>& b, thread simdgroup_matrix<float, 8, 8>& c, int line = __builtin_LINE()) {
  ::float4 own;
  own.xy = a.msl_own;
  own.zw = b.msl_own;
  const msl_lanes<::float4> all(own, line);
  const uint lane = msl_lane(), row = lane / 16 * 4 + lane / 2 % 4, pair = lane / 8 % 2 * 2 + lane % 2;
  vec<float, 2> sum = c.msl_own;
  for (uint k = 0; k < 8; k++) {
    const uint left = row / 4 * 16 + k / 4 * 8 + row % 4 * 2 + k / 2 % 2;
    const uint right = k / 4 * 16 + pair / 2 * 8 + k % 4 * 2 + pair % 2;
    sum.x = fma(all.v[left][k % 2], all.v[right].z, sum.x);
    sum.y = fma(all.v[left][k % 2], all.v[right].w, sum.y);
  }
  d.msl_own = sum;
}
}  // namespace metal
