// What the L lanes that share a row do in gated_delta_tokens.metal. A lane has N of the row's columns: pieces of four,
// L pieces from one of its own to the next, so that the lanes read side by side.

// `from` is the lane's first column, at a multiple of 16 bytes.
template <int N, int L>
inline void delta_load(const device float* from, thread float* to) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; i += 4) {
    const float4 piece = *(const device float4*)(from + i * L);
    to[i] = piece.x;
    to[i + 1] = piece.y;
    to[i + 2] = piece.z;
    to[i + 3] = piece.w;
  }
}

// The lane's part of a product: four sums that do not wait for each other.
template <int N>
inline float delta_dot(const thread float* a, const thread float* b) {
  float sum[4] = {0, 0, 0, 0};
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < N; i++) {
    sum[i % 4] = metal::fma(a[i], b[i], sum[i % 4]);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Each of COUNT values, summed over the L lanes; the shuffles of one round do not wait for each other.
template <int COUNT, int L>
inline void delta_sums(thread float* v) {
  MLX_MTL_PRAGMA_UNROLL
  for (int o = 1; o < L; o *= 2) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < COUNT; i++) {
      v[i] += simd_shuffle_xor(v[i], ushort(o));
    }
  }
}
