// Functions for the L lanes that share a row in gated_delta_tokens.metal. A lane has M pieces of four columns of the
// row. The distance between its pieces is L pieces, so that neighbouring lanes read neighbouring pieces.

// The lane's part of a product. The two sums do not wait for each other, and neither do the sums of other rows.
template <int M>
inline float delta_dot(const thread float4* a, const thread float4* b) {
  float even = 0, odd = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < M; i++) {
    even = metal::fma(a[i].x, b[i].x, even);
    odd = metal::fma(a[i].y, b[i].y, odd);
    even = metal::fma(a[i].z, b[i].z, even);
    odd = metal::fma(a[i].w, b[i].w, odd);
  }
  return even + odd;
}

// decay * s + learnt * k
inline float4 delta_learn(float4 s, float decay, float learnt, float4 k) {
  s.x = metal::fma(learnt, k.x, decay * s.x);
  s.y = metal::fma(learnt, k.y, decay * s.y);
  s.z = metal::fma(learnt, k.z, decay * s.z);
  s.w = metal::fma(learnt, k.w, decay * s.w);
  return s;
}

// Sums each of COUNT values over the L lanes. The shuffles of one round do not wait for each other.
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

// The same sums, distributed over the lanes: value i * L + lane is left in v[i]. Of each two values, a lane keeps one
// and passes the other on.
template <int COUNT, int L>
inline void delta_shares(thread float* v, uint lane) {
  int count = COUNT;
  MLX_MTL_PRAGMA_UNROLL
  for (uint o = 1; o < L; o *= 2) {
    const bool odd = (lane & o) != 0;
    if (count > 1) {
      count /= 2;
      MLX_MTL_PRAGMA_UNROLL
      for (int i = 0; i < count; i++) {
        const float a = v[2 * i], b = v[2 * i + 1];
        v[i] = (odd ? b : a) + simd_shuffle_xor(odd ? a : b, ushort(o));
      }
    } else {
      v[0] += simd_shuffle_xor(v[0], ushort(o));
    }
  }
}
