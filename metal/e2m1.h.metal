// needs: codes.h.metal
// E2M1 codes (OCP Microscaling 1.0): weight = scale * code, without a bias. A code has a sign, two bits of exponent and
// one bit of mantissa. If these are moved to the places of a float16's bits, they mean 2^-14 times the value, also for
// subnormal numbers.

// Codes j and j + 4 of a word.
inline half2 codes_halves(uint word, int j) {
  const uint moved = word << (12 - 4 * j);
  return as_type<half2>((moved & 0x80008000u) | ((moved >> 3) & 0x0E000E00u));
}

// acc[r] += one chunk of row r times the chunk of x that starts at `x`.
template <int R, int BITS, int GROUP, int CHUNK, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    P x,
    thread float* acc) {
  constexpr int COLUMNS = CHUNK < GROUP ? CHUNK : GROUP, GROUPS = CHUNK / COLUMNS, WORDS = CHUNK / 8;
  MLX_MTL_PRAGMA_UNROLL
  for (int g = 0; g < GROUPS; g++) {
    float low[R], high[R];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      low[r] = 0;
      high[r] = 0;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = g * COLUMNS / 8; i < (g + 1) * COLUMNS / 8; i++) {
      float v[8];
      codes_x8(x + 8 * i, v);
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < R; r++) {
        MLX_MTL_PRAGMA_UNROLL
        for (int j = 0; j < 4; j++) {
          const half2 pair = codes_halves(code[WORDS * r + i], j);
          low[r] = metal::fma(float(pair.x), v[j], low[r]);
          high[r] = metal::fma(float(pair.y), v[4 + j], high[r]);
        }
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      acc[r] = metal::fma(scale[GROUPS * r + g], (low[r] + high[r]) * 16384.0f, acc[r]);
    }
  }
}

// The weights of columns [8 i, 8 i + 8) of a chunk.
template <int BITS, int GROUP, int CHUNK>
inline void codes_weights(
    const thread uint* code, int i, const thread float* scale, const thread float* bias, thread float* w) {
  const int g = 8 * i / GROUP;
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const half2 pair = codes_halves(code[i], j);
    w[j] = float(pair.x) * 16384.0f * scale[g];
    w[4 + j] = float(pair.y) * 16384.0f * scale[g];
  }
}
