// needs: codes.h.metal
// 4-bit codes as in affine4.h.metal, unpacked with few shifts, which take four times as long as other instructions on
// Apple GPUs.
//
// Read as a float16, a halfword with a code in its lowest four bits and zeros above is the subnormal number
// 2^-24 * code, and 2^-20 * code with the code in the next four bits. So two masks give codes 0 and 4, and 1 and 5 of a
// word, and after one shift by 8 the same masks give the other four. Apple GPUs take a float16 as an operand of an
// instruction for floats and keep subnormal ones. No constant is added to a code, so none is subtracted. The factor 16
// between the two places is taken out of x, once for all rows.

// acc[r] += one chunk of row r times the chunk of x that starts at `x`.
template <int R, int BITS, int GROUP, int CHUNK, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    P x,
    thread float* acc) {
  float low[R], high[R], x_sum = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    low[r] = 0;
    high[r] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    float v[8];
    codes_x8(x + 8 * i, v);
    x_sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 1; j < 8; j += 2) {
      v[j] *= 0.0625f;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < 4; j += 2) {
        const uint moved = code[4 * r + i] >> (4 * j);
        const half2 even = as_type<half2>(moved & 0x000F000Fu);
        const half2 odd = as_type<half2>(moved & 0x00F000F0u);
        low[r] = metal::fma(float(even.x), v[j], low[r]);
        high[r] = metal::fma(float(even.y), v[4 + j], high[r]);
        low[r] = metal::fma(float(odd.x), v[j + 1], low[r]);
        high[r] = metal::fma(float(odd.y), v[5 + j], high[r]);
      }
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    acc[r] = metal::fma(scale[r], (low[r] + high[r]) * 16777216.0f, metal::fma(bias[r], x_sum, acc[r]));
  }
}
