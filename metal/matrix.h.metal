// needs: codes.h.metal
// Products of small matrices that the lanes of a simdgroup hold together: CUDA's matrix units, and the same in plain
// operations. simdgroup.h.metal has the same names for Metal.
//
// d[16, 8] += a[16, 16] b[16, 8], where rows of a are weights and columns of b are rows of x. Lane 4 q + t has, of a,
// row q in a[0] and a[2] and row q + 8 in a[1] and a[3]; of b, column q; and of d, columns 2 t and 2 t + 1, of row q in
// d[0] and d[1] and of row q + 8 in d[2] and d[3]. a[0], a[1] and b.x are the first two of the lane's four places in
// the sum, a[2], a[3] and b.y the others. Which columns of a larger matrix these four are does not matter, as long as a
// and b agree.

// The number of rows of x of which a lane has values.
#define MATRIX_X 1

// The row of a, and of d, that a lane has; and which of the four lanes with this row it is.
inline uint matrix_row(uint lane) {
  return lane / 4;
}
inline uint matrix_place(uint lane) {
  return lane % 4;
}

// The first row of x that a lane has; and which of four chunks of columns it takes.
inline uint matrix_x_row(uint lane) {
  return lane / 4;
}
inline uint matrix_x_chunk(uint lane) {
  return lane % 4;
}

// Two weights, and eight values of each of the lane's rows of x.
typedef uint matrix_two;
typedef uint4 matrix_eight;

// Two values of X in a word, the first in the low bits.
template <typename X>
inline uint matrix_pair(float first, float second) {
  return uint(as_type<ushort>(X(first))) | uint(as_type<ushort>(X(second))) << 16;
}

// Of eight weights of a row, the two that belong together as number `two`.
template <typename X>
inline matrix_two matrix_weights(const thread float* w, uint two) {
  return matrix_pair<X>(w[2 * two], w[2 * two + 1]);
}

// Columns [column, column + 8) of the row that begins at x + at[0].
template <typename X>
inline matrix_eight matrix_load(const device X* x, const thread uint* at, uint column, uint) {
  return *(const device uint4*)(x + at[0] + column);
}

#ifndef MATRIX_PRODUCT
inline float matrix_dot(uint a, uint b, bfloat16_t) {
  return metal::fma(
      as_type<float>(a & 0xFFFF0000u), as_type<float>(b & 0xFFFF0000u),
      as_type<float>(a << 16) * as_type<float>(b << 16));
}

inline float matrix_dot(uint a, uint b, float16_t) {
  float u[2], v[2];
  codes_f16_pair(a, u);
  codes_f16_pair(b, v);
  return metal::fma(u[1], v[1], u[0] * v[0]);
}

// d += a b, where `kind` is of the type of a and b.
template <typename X>
inline void matrix_product(uint lane, const thread uint* a, uint low, uint high, X kind, thread float* d) {
  for (uint s = 0; s < 4; s++) {
    uint own[4];
    for (uint r = 0; r < 4; r++) {
      own[r] = simd_shuffle(a[r], ushort((lane & 28) + s));
    }
    for (uint c = 0; c < 2; c++) {
      const ushort column = ushort(4 * (2 * (lane & 3) + c) + s);
      const uint first = simd_shuffle(low, column), second = simd_shuffle(high, column);
      d[c] += matrix_dot(own[0], first, kind) + matrix_dot(own[2], second, kind);
      d[2 + c] += matrix_dot(own[1], first, kind) + matrix_dot(own[3], second, kind);
    }
  }
}
#endif

// d += the products of eight columns: a[2 i + r] are weights of row r of the lane's two, as `matrix_weights` numbers
// them.
template <typename X>
inline void matrix_multiply(uint lane, const thread matrix_two* a, matrix_eight b, thread float* d) {
  matrix_product(lane, a, b.x, b.y, X(0), d);
  matrix_product(lane, a + 4, b.z, b.w, X(0), d);
}
