// needs: codes.h.metal
// 4-bit codes: weight = scale * code + bias, eight codes to a word.
//
// Codes become floats without a conversion of integers. CODES_PAIR puts codes j and j + 4 of a word into the mantissas
// of two bfloat16 values, 128 to 143, so that
//     the pair, read as a float,               is 128 + code[j + 4] + 2^-16 * (0x4300 + code[j])
//     the pair, shifted by 16, read as a float is 128 + code[j]
// So one mask and at most two shifts serve two codes. The constants, times the sums of x, are subtracted once per
// chunk. The remainder of code[j] in the first line is removed by using x[j] - 2^-16 * x[j + 4] instead of x[j].

// Loads eight x for codes_dot8, and adds them to the sums over low (j < 4) and high columns.
template <typename P>
inline void codes_x8_split(P x, thread float* v, thread float& low, thread float& high) {
  codes_x8(x, v);
  low += (v[0] + v[1]) + (v[2] + v[3]);
  high += (v[4] + v[5]) + (v[6] + v[7]);
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    v[j] = metal::fma(-1.52587890625e-05f, v[4 + j], v[j]);
  }
}

// low and high += the codes of one word, each with its constant, times eight x.
inline void codes_dot8(uint word, const thread float* x, thread float& low, thread float& high) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint pair = CODES_PAIR(word >> (4 * j), 0x000F000Fu);
    low = metal::fma(as_type<float>(pair << 16), x[j], low);
    high = metal::fma(as_type<float>(pair), x[4 + j], high);
  }
}

// acc[r] += one chunk of row r times the chunk of x that starts at `x`.
template <int R, int BITS, int GROUP, int CHUNK, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    P x,
    thread float* acc) {
  float low[R], high[R];
  float x_low = 0, x_high = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    low[r] = 0;
    high[r] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    float v[8];
    codes_x8_split(x + 8 * i, v, x_low, x_high);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      codes_dot8(code[4 * r + i], v, low[r], high[r]);
    }
  }
  const float x_sum = x_low + x_high;
  const float constants = metal::fma(128.0f, x_low, 128.259765625f * x_high);
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    acc[r] = metal::fma(scale[r], low[r] + high[r] - constants, metal::fma(bias[r], x_sum, acc[r]));
  }
}

// The weights of columns [8 i, 8 i + 8) of a chunk: w[j] = scale * code[j] + bias.
template <int BITS, int GROUP, int CHUNK>
inline void codes_weights(
    const thread uint* code, int i, const thread float* scale, const thread float* bias, thread float* w) {
  const float base = metal::fma(-128.0f, scale[0], bias[0]);
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint pair = CODES_PAIR(code[i] >> (4 * j), 0x000F000Fu);
    w[j] = metal::fma(scale[0], as_type<float>(pair << 16), base);
    w[4 + j] = metal::fma(scale[0], as_type<float>(pair & 0xFFFF0000u), base);
  }
}
