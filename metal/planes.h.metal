// needs: codes.h.metal bytes.h.metal
// Codes times integers, for GPUs with an instruction that multiplies four bytes by four bytes and adds the products.
// The codes are integers of 2 or 3 bits, weight = scale * code + bias, E2M1 codes, weight = scale * code / 2, or signed
// bytes, weight = scale * code (BITS is 8).
//
// With few bits a byte has many codes, so converting them to floats takes longer than reading them. Here four codes
// become the signed bytes of a word, and 64 columns of x become integers times one float, the factor. The integers are
// stored in threadgroup memory for all rows of a threadgroup, as PLANES planes of signed bytes, the lowest first. Sums
// are exact. Only x is rounded, by at most 2^-23 of the largest of its 64 columns, or 2^-16 with two planes.
//
// A block of 64 columns has 4 PLANES uint4 of planes, in the order in which codes_quads gives columns, and one uint4
// with floats: the factor, and the sums of x over each half of the block.

#define CODES_PLANES(columns) ((columns) / 64 * (4 * PLANES + 1))  // the number of uint4 for a row of x

// The integer of the largest x of a block. With it no sum of a block's products exceeds 31 bits.
template <int PLANES>
constexpr float codes_top() {
  return PLANES == 2 ? 32639.0f : 4161000.0f;
}

// The integer nearest to x * scale, at most codes_top, plus 128 in each byte but the highest, so that each byte can be
// taken without a carry. A float of 3 * 2^22 is added, which leaves the integer in the lowest bits.
template <int PLANES>
inline uint codes_integer(float x, float scale) {
  const float zero = PLANES == 2 ? 12583040.0f : 12615808.0f;  // 3 * 2^22 + 0x80, or + 0x8080
  const uint made = as_type<uint>(metal::fma(x, scale, zero));
  return PLANES == 2 ? made : made - 0x4B400000u;  // this changes only the third and the fourth byte
}

// A row of x in blocks, which begins with the first (side 0) or the second half of a block.
template <int PLANES, typename P>
struct codes_blocks {
  P first;
  uint side;
};

template <int PLANES, typename P>
inline codes_blocks<PLANES, P> operator+(codes_blocks<PLANES, P> row, uint columns) {
  return {row.first + CODES_PLANES(columns), columns / 32 % 2};
}

// Stores x[columns] in blocks in `room`. All THREADS threads call this, in whole simdgroups; `tid` is the number of
// the thread.
template <int BITS, int PLANES, int THREADS, typename X, typename P>
inline codes_blocks<PLANES, P> codes_lay(const device X* x, uint columns, uint tid, P room) {
  const uint pieces = columns / 16;  // four lanes share a block
  CODES_UNROLL(2)
  for (uint from = 0; from < pieces; from += THREADS) {
    const uint piece = metal::min(from + tid, pieces - 1), k = piece % 4;
    float v[16], sum = 0, peak = 1e-31f;
    MLX_MTL_PRAGMA_UNROLL
    for (int run = 0; run < 4; run++) {
      const uint column = BITS == 3 ? 32 * (k / 2) + 8 * run + 4 * (k % 2) : 16 * k + 4 * run;
      codes_x4(x + 64 * (piece / 4) + column, v + 4 * run);
      sum += (v[4 * run] + v[4 * run + 1]) + (v[4 * run + 2] + v[4 * run + 3]);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 16; i++) {
      peak = metal::fmax(peak, metal::fabs(v[i]));
    }
    sum += simd_shuffle_xor(sum, ushort(1));
    peak = metal::fmax(peak, simd_shuffle_xor(peak, ushort(1)));
    peak = metal::fmax(peak, simd_shuffle_xor(peak, ushort(2)));
    const float other = simd_shuffle_xor(sum, ushort(2)), scale = codes_top<PLANES>() / peak;
    if (from + tid < pieces) {
      P block = room + CODES_PLANES(64) * (piece / 4);
      uint made[4 * PLANES];
      MLX_MTL_PRAGMA_UNROLL
      for (int quad = 0; quad < 4; quad++) {
        uint m[4];
        MLX_MTL_PRAGMA_UNROLL
        for (int run = 0; run < 4; run++) {
          m[run] = codes_integer<PLANES>(BITS >= 4 ? v[4 * quad + run] : v[4 * run + quad], scale);
        }
        MLX_MTL_PRAGMA_UNROLL
        for (int p = 0; p < PLANES; p++) {
          const uint both = p | (p + 4) << 4;
          const uint four = CODES_BYTES(CODES_BYTES(m[0], m[1], both), CODES_BYTES(m[2], m[3], both), 0x5410u);
          made[4 * p + quad] = p + 1 < PLANES ? four ^ 0x80808080u : four;
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (int p = 0; p < PLANES; p++) {
        const uint4 four = {made[4 * p], made[4 * p + 1], made[4 * p + 2], made[4 * p + 3]};
        block[BITS == 3 ? 2 * PLANES * (k / 2) + 2 * p + k % 2 : PLANES * k + p] = four;
      }
      if (k == 0) {
        const float factor = peak * (1.0f / codes_top<PLANES>());
        const uint4 floats = {as_type<uint>(factor), as_type<uint>(sum), as_type<uint>(other), 0u};
        block[4 * PLANES] = floats;
      }
    }
  }
  return {room, 0};
}

// The sums of the planes' products as a float. Only with bytes can the whole sum exceed 31 bits.
template <int BITS, int PLANES>
inline float codes_whole_sum(const thread int* sum) {
  int whole = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int p = BITS == 8 ? 1 : PLANES - 1; p >= 0; p--) {
    whole = 256 * whole + sum[p];
  }
  return BITS == 8 && PLANES == 3 ? metal::fma(65536.0f, float(sum[PLANES - 1]), float(whole)) : float(whole);
}

// Unpacks codes to bytes, four to a word: 16 codes of 2 bits from one word, 32 of 3 bits from three, or 16 E2M1 codes
// from two.
template <int BITS>
inline void codes_quads(const thread uint* words, thread uint* quad) {
  if (BITS == 8) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 4; i++) {
      quad[i] = words[i];
    }
    return;
  }
  if (BITS == 2) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 4; i++) {
      quad[i] = (words[0] >> (2 * i)) & 0x03030303u;
    }
    return;
  }
  if (BITS == 4) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint word = words[i / 2] >> (16 * (i % 2)), size = word & 0x7777u;
      const uint plus = CODES_BYTES(0x03020100u, 0x0C080604u, size);
      const uint minus = CODES_BYTES(0xFDFEFF00u, 0xF4F8FAFCu, size);
      quad[i] = CODES_BYTES(plus, minus, ((word >> 1) & 0x4444u) | 0x3210u);
    }
    return;
  }
  codes_of_three_bits(words, quad);
}

// acc[r] += one chunk of row r, which is a block or half a block, times the part of x that begins at `x`.
template <int R, int BITS, int GROUP, int CHUNK, int PLANES, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    codes_blocks<PLANES, P> x,
    thread float* acc) {
  constexpr int COLUMNS = GROUP < CHUNK ? GROUP : CHUNK, GROUPS = CHUNK / COLUMNS, WORDS = CHUNK * BITS / 32;
  constexpr int UNIT = BITS == 3 ? 32 : 16, UNITS = COLUMNS / UNIT, QUADS = UNIT / 4;
  const uint4 floats = x.first[4 * PLANES];
  const float factor = (BITS == 4 ? 0.5f : 1.0f) * as_type<float>(floats.x);
  const float low = as_type<float>(floats.y), high = as_type<float>(floats.z);
  MLX_MTL_PRAGMA_UNROLL
  for (int g = 0; g < GROUPS; g++) {
    int sum[R * PLANES];
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < R * PLANES; i++) {
      sum[i] = 0;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int unit = g * UNITS; unit < (g + 1) * UNITS; unit++) {
      uint quad[R * QUADS];
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < R; r++) {
        codes_quads<BITS>(code + r * WORDS + unit * (UNIT * BITS / 32), quad + r * QUADS);
      }
      MLX_MTL_PRAGMA_UNROLL
      for (int p = 0; p < PLANES; p++) {
        MLX_MTL_PRAGMA_UNROLL
        for (int q = 0; q < QUADS; q += 4) {
          const uint4 v = x.first[(((x.side * (32 / UNIT) + unit) * PLANES + p) * QUADS + q) / 4];
          MLX_MTL_PRAGMA_UNROLL
          for (int r = 0; r < R; r++) {
            const thread uint* four = quad + r * QUADS + q;
            int s = CODES_DOT4(four[0], v.x, sum[r * PLANES + p]);
            s = CODES_DOT4(four[1], v.y, s);
            s = CODES_DOT4(four[2], v.z, s);
            sum[r * PLANES + p] = CODES_DOT4(four[3], v.w, s);
          }
        }
      }
    }
    const float x_sum = GROUPS == 1 ? low + high : g == 0 ? low : high;
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      const float whole = codes_whole_sum<BITS, PLANES>(sum + r * PLANES);
      const int at = r * GROUPS + g;
      const float b = BITS >= 4 ? 0.0f : bias[at];  // 0 * NaN is NaN, as it should be
      acc[r] = metal::fma(scale[at] * factor, whole, metal::fma(b, x_sum, acc[r]));
    }
  }
}
