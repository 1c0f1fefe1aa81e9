// needs: codes.h.metal
// Products of small matrices with Metal's simdgroup_matrix, with the names of matrix.h.metal.
//
// A simdgroup_matrix<float, 8, 8> has two values in each lane. Apple does not say which; MLX's kernels rely on
// neighbours in one row (mlx/backend/metal/kernels/steel/gemm/mma.h), and so does this text. The left matrix has
// weights of 8 rows; the right one has 8 rows of x as its columns, so a lane has one place in the sum for two rows of
// x. Weights and x are multiplied as floats, so weights are not rounded to x's type, which may be float too.

#define MATRIX_X 2

inline uint matrix_row(uint lane) {
  return (lane / 4 & 4) + lane / 2 % 4;
}
inline uint matrix_place(uint lane) {
  return (lane / 4 & 2) + lane % 2;
}

inline uint matrix_x_row(uint lane) {
  return 2 * matrix_place(lane);
}
inline uint matrix_x_chunk(uint lane) {
  return matrix_row(lane) / 2;
}

typedef float2 matrix_two;
struct matrix_eight {  // of eight columns the first or the last four, for each of two rows
  float v[8];
};

// Columns `two` and 4 + `two`, so that a lane with every second place in the sum has four neighbouring columns of x.
template <typename X>
inline matrix_two matrix_weights(const thread float* w, uint two) {
  float2 both;
  both.x = w[two];
  both.y = w[4 + two];
  return both;
}

template <typename X>
inline matrix_eight matrix_load(const device X* x, const thread uint* at, uint column, uint lane) {
  matrix_eight made;
  const device X* from = x + column + 4 * (matrix_row(lane) % 2);
  codes_x4(from + at[0], made.v);
  codes_x4(from + at[1], made.v + 4);
  return made;
}

inline void matrix_set(thread simdgroup_matrix<float, 8, 8>& matrix, float first, float second) {
  matrix.thread_elements()[0] = first;
  matrix.thread_elements()[1] = second;
}

template <typename X>
inline void matrix_multiply(uint, const thread matrix_two* a, matrix_eight b, thread float* d) {
  simdgroup_matrix<float, 8, 8> weights, x, sum[2];
  matrix_set(sum[0], d[0], d[1]);
  matrix_set(sum[1], d[2], d[3]);
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    matrix_set(x, b.v[i], b.v[4 + i]);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < 2; r++) {
      matrix_set(weights, a[2 * i + r].x, a[2 * i + r].y);
      simdgroup_multiply_accumulate(sum[r], weights, x, sum[r]);
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < 2; r++) {
    d[2 * r] = sum[r].thread_elements()[0];
    d[2 * r + 1] = sum[r].thread_elements()[1];
  }
}
