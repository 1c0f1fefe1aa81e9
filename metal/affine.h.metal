// needs: codes.h.metal
// Codes of 1, 2, 3, 5, 6 or 8 bits: weight = scale * code + bias.
//
// affine4.h.metal explains how two codes become floats without conversions: one word holds them in the mantissas of two
// bfloat16 values, each added to 128. Here these are codes i and i + HALF of a block of 2 HALF codes, where HALF codes
// fill SPAN halfwords. Halfwords k and k + SPAN of a block make one word, in which the two codes are at the same
// place. The mantissa of a bfloat16 has 7 bits and so room for PLACES codes; one shift serves all of them. A code is
// masked at its place, which multiplies it by 2^(BITS * place), and each place has its own sum. A code that crosses
// into the next halfword needs a shift for each of its two parts. Codes of 8 bits do not fit: each becomes a float
// by itself, added to 256.

// Half the number of codes in a block.
template <int BITS>
constexpr int codes_half() {
  return BITS == 2 || BITS == 6 ? 8 : 16;
}

// The number of codes that one shift serves. Codes of one bit use as many places as codes of two bits, so that the sums
// stay in registers.
template <int BITS>
constexpr int codes_places() {
  return BITS == 1 ? 3 : BITS < 7 ? 7 / BITS : 1;
}

// The place of code i.
template <int BITS>
inline int codes_place(int i) {
  const int at = i * BITS % 16;
  return at + BITS <= 16 ? at / BITS % codes_places<BITS>() : 0;
}

// Codes i and i + HALF as a pair, each added to 128. `lanes` are the joined halfwords of a block.
template <int BITS>
inline uint codes_pair(const thread uint* lanes, int i) {
  const uint mask = ((1u << BITS) - 1) * 0x00010001u;
  const int k = i * BITS / 16, at = i * BITS % 16, place = codes_place<BITS>(i);
  if (at + BITS <= 16) {
    return CODES_PAIR(lanes[k] >> (at - place * BITS), mask << (place * BITS));
  }
  const int left = 16 - at;
  const uint low = ((1u << left) - 1) * 0x00010001u;
  return ((lanes[k] >> at) & low) | CODES_PAIR(lanes[k + 1] << left, mask & ~low);
}

// Joins halfwords k and k + SPAN of a block of SPAN words.
template <int SPAN>
inline void codes_lanes(const thread uint* words, thread uint* lanes) {
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < SPAN; k++) {
    const uint low = words[k / 2], high = words[(k + SPAN) / 2];
    const uint first = k % 2 ? low >> 16 : low & 0xFFFFu;
    lanes[k] = first | ((k + SPAN) % 2 ? high & 0xFFFF0000u : high << 16);
  }
}

// dot[r] += the product of x and codes of row r, of the sums over places; `constants` are the sums' own.
template <int R, int BITS>
inline void codes_of_places(const thread float* sums, const thread float* constants, thread float* dot) {
  constexpr int PLACES = codes_places<BITS>();
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    dot[r] = sums[r * PLACES] - constants[0];
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 1; i < PLACES; i++) {
      dot[r] = metal::fma(1.0f / float(1 << (BITS * i)), sums[r * PLACES + i] - constants[i], dot[r]);
    }
  }
}

// acc[r] += the product of x and the columns of row r that share a scale, or of two groups if HALF columns share one.
// `code` holds STRIDE words of each row.
template <int R, int BITS, int COLUMNS, int STRIDE, typename P>
inline void codes_dot_unit(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    int groups,
    P x,
    thread float* acc) {
  constexpr int HALF = codes_half<BITS>(), SPAN = HALF * BITS / 16, PLACES = codes_places<BITS>();
  constexpr bool APART = COLUMNS == HALF;  // high codes have another scale than low ones, so the sums are not added
  float low[R * PLACES], high[R * PLACES], x_low[PLACES], x_high[PLACES];
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < R * PLACES; i++) {
    low[i] = 0;
    high[i] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < PLACES; i++) {
    x_low[i] = 0;
    x_high[i] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int block = 0; block < (APART ? 1 : COLUMNS / (2 * HALF)); block++) {
    uint lanes[R * SPAN];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      codes_lanes<SPAN>(code + r * STRIDE + block * SPAN, lanes + r * SPAN);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int from = 0; from < HALF; from += 8) {
      float a[8], b[8];
      codes_x8(x + 2 * HALF * block + from, a);
      codes_x8(x + 2 * HALF * block + from + HALF, b);
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < 8; j++) {
        const int place = codes_place<BITS>(from + j);
        x_low[place] += a[j];
        x_high[place] += b[j];
        if (!APART) {
          a[j] = metal::fma(-1.52587890625e-05f, b[j], a[j]);
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < R; r++) {
        MLX_MTL_PRAGMA_UNROLL
        for (int j = 0; j < 8; j++) {
          const uint pair = codes_pair<BITS>(lanes + r * SPAN, from + j);
          const int sum = r * PLACES + codes_place<BITS>(from + j);
          low[sum] = metal::fma(as_type<float>(pair << 16), a[j], low[sum]);
          high[sum] = metal::fma(as_type<float>(APART ? pair & 0xFFFF0000u : pair), b[j], high[sum]);
        }
      }
    }
  }
  float x_sum[2] = {0, 0}, constants[2 * PLACES], dot[2 * R];
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < PLACES; i++) {
    x_sum[0] += APART ? x_low[i] : x_low[i] + x_high[i];
    x_sum[1] += x_high[i];
    constants[i] = APART ? 128.0f * x_low[i] : metal::fma(128.0f, x_low[i], 128.259765625f * x_high[i]);
    constants[PLACES + i] = 128.0f * x_high[i];
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < R * PLACES; i++) {
    low[i] += APART ? 0.0f : high[i];
  }
  codes_of_places<R, BITS>(low, constants, dot);
  if (APART) {
    codes_of_places<R, BITS>(high, constants + PLACES, dot + R);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    MLX_MTL_PRAGMA_UNROLL
    for (int g = 0; g < (APART ? 2 : 1); g++) {
      const int at = r * groups + g;
      acc[r] = metal::fma(scale[at], dot[g * R + r], metal::fma(bias[at], x_sum[g], acc[r]));
    }
  }
}

// The same for codes of 8 bits.
template <int R, int COLUMNS, int STRIDE, typename P>
inline void codes_dot_bytes(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    int groups,
    P x,
    thread float* acc) {
  float dot[R], x_sum = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    dot[r] = 0;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < COLUMNS / 8; i++) {
    float v[8];
    codes_x8(x + 8 * i, v);
    x_sum += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < 8; j++) {
        const uint word = code[r * STRIDE + 2 * i + j / 4];
        const int at = 8 * (j % 4);
        const uint moved = at < 15 ? word << (15 - at) : word >> (at - 15);
        dot[r] = metal::fma(as_type<float>(CODES_OVER(moved, 0x007F8000u, 0x43800000u)), v[j], dot[r]);
      }
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    const float sum = metal::fma(-256.0f, x_sum, dot[r]);
    acc[r] = metal::fma(scale[r * groups], sum, metal::fma(bias[r * groups], x_sum, acc[r]));
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
  constexpr int COLUMNS = CHUNK < GROUP ? CHUNK : GROUP, GROUPS = CHUNK / COLUMNS, WORDS = CHUNK * BITS / 32;
  constexpr int STEP = COLUMNS == codes_half<BITS>() && BITS != 8 ? 2 : 1;  // groups at a time
  MLX_MTL_PRAGMA_UNROLL
  for (int g = 0; g < GROUPS; g += STEP) {
    if (BITS == 8) {
      codes_dot_bytes<R, COLUMNS, WORDS>(
          code + g * (WORDS / GROUPS), scale + g, bias + g, GROUPS, x + g * COLUMNS, acc);
    } else {
      codes_dot_unit<R, BITS, COLUMNS, WORDS>(
          code + g * WORDS / GROUPS, scale + g, bias + g, GROUPS, x + g * COLUMNS, acc);
    }
  }
}

// The weights of columns [8 i, 8 i + 8) of a chunk.
template <int BITS, int GROUP, int CHUNK>
inline void codes_weights(
    const thread uint* code, int i, const thread float* scale, const thread float* bias, thread float* w) {
  const int g = 8 * i / GROUP;
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    const int k = (8 * i + j) * BITS / 32, at = (8 * i + j) * BITS % 32;
    uint bits = code[k] >> at;
    if (at + BITS > 32) {
      bits |= code[k + 1] << (32 - at);
    }
    const float value = as_type<float>(CODES_OVER(bits, (1u << BITS) - 1, 0x4B000000u)) - 8388608.0f;
    w[j] = metal::fma(scale[g], value, bias[g]);
  }
}
