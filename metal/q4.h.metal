// 4-bit weights in groups of 64 columns: weight = scale * code + bias, eight codes per word, low nibble first.
// A chunk is 16 bytes of a row: 32 codes, half a group. Chunk c of a row meets columns [32 c, 32 c + 32).
//
// Codes become floats without an int-to-float conversion. q4_pair() lays codes j and j + 4 of a word into the
// mantissas of two bfloat16 of value 128 to 143, so that
//     as float, the pair itself        is 128 + code[j + 4] + 2^-16 * (0x4300 + code[j])
//     as float, the pair shifted by 16 is 128 + code[j]
// One mask and at most two shifts so serve two codes. The sums of x that multiply the constants are subtracted once
// per chunk, and x[j] - 2^-16 * x[j + 4] in place of x[j] takes the trace of code[j] out of the first line.

#ifndef Q4_PAIR
#define Q4_PAIR(word) (((word) & 0x000F000Fu) | 0x43004300u)
#endif
#ifndef Q4_UNROLL  // chunks that a loop handles at once; left to the compiler where it has not been measured
#define Q4_UNROLL(count)
#endif

// Words from one slot's record to another can pass 4 GiB.
inline size_t q4_record(uint slot, uint words) {
  return size_t(slot) * words;
}

// Eight consecutive x as float. A row of x starts at a multiple of 16 bytes.
inline void q4_x8(const device float* x, thread float* v) {
  const float4 a = *(const device float4*)x;
  const float4 b = *(const device float4*)(x + 4);
  v[0] = a.x;
  v[1] = a.y;
  v[2] = a.z;
  v[3] = a.w;
  v[4] = b.x;
  v[5] = b.y;
  v[6] = b.z;
  v[7] = b.w;
}

inline void q4_bf16_pair(uint pair, thread float* v) {
  v[0] = as_type<float>(pair << 16);
  v[1] = as_type<float>(pair & 0xFFFF0000u);
}

inline void q4_x8(const device bfloat16_t* x, thread float* v) {
  const uint4 q = *(const device uint4*)x;
  q4_bf16_pair(q.x, v);
  q4_bf16_pair(q.y, v + 2);
  q4_bf16_pair(q.z, v + 4);
  q4_bf16_pair(q.w, v + 6);
}

inline void q4_f16_pair(uint pair, thread float* v) {
  const half2 h = as_type<half2>(pair);
  v[0] = float(h.x);
  v[1] = float(h.y);
}

inline void q4_x8(const device float16_t* x, thread float* v) {
  const uint4 q = *(const device uint4*)x;
  q4_f16_pair(q.x, v);
  q4_f16_pair(q.y, v + 2);
  q4_f16_pair(q.z, v + 4);
  q4_f16_pair(q.w, v + 6);
}

// One chunk of R rows; `row` holds their numbers, a row has COLS columns.
template <int R, int COLS, typename S>
inline void q4_load(
    const device uint32_t* w,
    const device S* scales,
    const device S* biases,
    const thread uint* row,
    uint chunk,
    thread uint4* code,
    thread float* scale,
    thread float* bias) {
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    code[r] = ((const device uint4*)w)[row[r] * (COLS / 32) + chunk];
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    const uint group = row[r] * (COLS / 64) + chunk / 2;
    scale[r] = float(scales[group]);
    bias[r] = float(biases[group]);
  }
}

// Eight x for q4_dot8, and their part of the sums over low (j < 4) and high columns.
template <typename X>
inline void q4_x8_split(const device X* x, thread float* v, thread float& low, thread float& high) {
  q4_x8(x, v);
  low += (v[0] + v[1]) + (v[2] + v[3]);
  high += (v[4] + v[5]) + (v[6] + v[7]);
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    v[j] = metal::fma(-1.52587890625e-05f, v[4 + j], v[j]);
  }
}

// low and high += one word of codes, each with its constant, times eight x.
inline void q4_dot8(uint word, const thread float* x, thread float& low, thread float& high) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint pair = Q4_PAIR(word >> (4 * j));
    low = metal::fma(as_type<float>(pair << 16), x[j], low);
    high = metal::fma(as_type<float>(pair), x[4 + j], high);
  }
}

inline uint q4_word(uint4 chunk, int i) {
  return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

// acc[r] += one chunk of row r times the chunk of x that starts at `x`.
template <int R, typename X>
inline void q4_dot(
    const thread uint4* code,
    const thread float* scale,
    const thread float* bias,
    const device X* x,
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
    q4_x8_split(x + 8 * i, v, x_low, x_high);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      q4_dot8(q4_word(code[r], i), v, low[r], high[r]);
    }
  }
  const float x_sum = x_low + x_high;
  const float constants = metal::fma(128.0f, x_low, 128.259765625f * x_high);
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    acc[r] = metal::fma(scale[r], low[r] + high[r] - constants, metal::fma(bias[r], x_sum, acc[r]));
  }
}

// The weights of one word: w[j] = scale * code[j] + bias.
inline void q4_weights(uint word, float scale, float bias, thread float* w) {
  const float base = metal::fma(-128.0f, scale, bias);
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint pair = Q4_PAIR(word >> (4 * j));
    w[j] = metal::fma(scale, as_type<float>(pair << 16), base);
    w[4 + j] = metal::fma(scale, as_type<float>(pair & 0xFFFF0000u), base);
  }
}
