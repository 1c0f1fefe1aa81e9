// The sum over the L lanes that share a row; every one of them gets it. L is a power of two.
template <int L>
inline float lane_sum(float v) {
  MLX_MTL_PRAGMA_UNROLL
  for (int o = 1; o < L; o *= 2) {
    v += simd_shuffle_xor(v, ushort(o));
  }
  return v;
}
