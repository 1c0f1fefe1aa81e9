// needs: codes.h.metal
// E4M3 codes (OCP 8-bit floating point 1.0): weight = scale * code, without a bias. A code has a sign, four bits of
// exponent and three bits of mantissa. If these are moved to the places of a float16's bits, they mean 2^-8 times the
// value, also for subnormal numbers.

// Bytes 0 and 2 of a word, or bytes 1 and 3 if `odd` is 1.
inline half2 codes_halves(uint word, int odd) {
  const uint moved = odd ? word : word << 8;
  return as_type<half2>((moved & 0x80008000u) | ((moved >> 1) & 0x3F803F80u));
}

// acc[r] += one chunk of row r times the chunk of x that starts at `x`. The chunk is within one group.
template <int R, int BITS, int GROUP, int CHUNK, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    P x,
    thread float* acc) {
  float even[R], odd[R];
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    even[r] = 0;
    odd[r] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < CHUNK / 8; i++) {
    float v[8];
    codes_x8(x + 8 * i, v);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < 8; j += 4) {
        const uint word = code[CHUNK / 4 * r + 2 * i + j / 4];
        const half2 first = codes_halves(word, 0), second = codes_halves(word, 1);
        even[r] = metal::fma(float(first.x), v[j], even[r]);
        odd[r] = metal::fma(float(second.x), v[j + 1], odd[r]);
        even[r] = metal::fma(float(first.y), v[j + 2], even[r]);
        odd[r] = metal::fma(float(second.y), v[j + 3], odd[r]);
      }
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    acc[r] = metal::fma(scale[r], (even[r] + odd[r]) * 256.0f, acc[r]);
  }
}

// The weights of columns [8 i, 8 i + 8) of a chunk.
template <int BITS, int GROUP, int CHUNK>
inline void codes_weights(
    const thread uint* code, int i, const thread float* scale, const thread float* bias, thread float* w) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j += 4) {
    const half2 even = codes_halves(code[2 * i + j / 4], 0), odd = codes_halves(code[2 * i + j / 4], 1);
    w[j] = float(even.x) * 256.0f * scale[0];
    w[j + 1] = float(odd.x) * 256.0f * scale[0];
    w[j + 2] = float(even.y) * 256.0f * scale[0];
    w[j + 3] = float(odd.y) * 256.0f * scale[0];
  }
}
