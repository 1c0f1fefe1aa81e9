// needs: codes.h.metal bytes.h.metal
// Codes times integers, as in planes.h.metal, for groups of 16 columns and for codes of 2 to 6 bits: an instruction
// multiplies two bytes by two integers of 16 bits and adds both products. weight = scale * code + bias.
//
// 64 columns of x become integers of 16 bits times one float, the factor; x is rounded by at most 2^-16 of the largest
// of its 64 columns. A block of 64 columns has two uint4 of pairs for each 16 columns, in the order in which
// codes_quads gives codes, and two of sums of these integers and the factor (codes_lay_sums).
//
// Groups of 16 with codes of 2 and 3 bits have so few columns that scales stay bytes too: the types codes_..._bytes.

#define CODES_PLANES(columns) ((columns) / 64 * (4 * PLANES + 2))  // the number of uint4 for a row of x

#ifndef CODES_DOT2
// sum + the products of both halves of `x` and two bytes of `codes`, from byte 2 `high` on.
inline int codes_dot2(uint x, uint codes, uint high, int sum) {
  const uint two = codes >> (16 * high);
  return sum + int(short(x & 0xFFFFu)) * int(two & 0xFFu) + int(short(x >> 16)) * int((two >> 8) & 0xFFu);
}
#define CODES_DOT2(x, codes, high, sum) codes_dot2(x, codes, high, sum)
#endif

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

// The column, of 16, whose x is number `which` of pair n. Codes of 3 and 5 bits are unpacked eight by eight, those of 2
// and 6 bits four by four, and of those of 4 bits the even ones of a word first.
template <int BITS>
constexpr int codes_column(int n, int which) {
  return BITS % 2    ? 8 * which + n
         : BITS == 4 ? 8 * (n / 4) + n / 2 % 2 + 4 * (n % 2) + 2 * which
                     : 8 * (n / 4) + 4 * which + n % 4;
}

typedef codes_shared<12, 16> codes_q2_k_bytes;
typedef codes_shared<13, 12> codes_q3_k_bytes;

// Four scales and minima as bytes instead of the first scale and bias, and d and -m instead of the second.
template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q2_k_bytes* scales, const device codes_super2* supers, uint row, uint chunk, thread float* scale,
    thread float* bias) {
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  const uint word = codes_q2_bytes((const device uint*)(scales + place.block), place.group / 4);
  const half2 d = as_type<half2>(CODES_READ((const device uint*)(supers + place.block)));
  scale[0] = as_type<float>(word & 0x0F0F0F0Fu);
  bias[0] = as_type<float>((word >> 4) & 0x0F0F0F0Fu);
  scale[1] = float(d.x);
  bias[1] = -float(d.y);
}

template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q3_k_bytes* scales, const device codes_super1* supers, uint row, uint chunk, thread float* scale,
    thread float*) {
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  scale[0] = as_type<float>(codes_q3_bytes((const device uint*)(scales + place.block), place.group / 4));
  scale[1] = float(*(const device float16_t*)(supers + place.block));
}

// Stores the sums of the integers of four times 16 columns, and the factor: for codes of 2 bits 16 high + low of each
// sum, pairs of high and bytes of low; for groups of 32 the sums of two, as floats; else the four sums.
template <int BITS, typename P>
inline void codes_lay_sums(const thread int* sum, float factor, P to) {
  uint4 sums = {uint(sum[0]), uint(sum[1]), uint(sum[2]), uint(sum[3])};
  uint4 rest = {as_type<uint>(factor), 0u, 0u, 0u};
  if (BITS == 2) {
    rest.y = CODES_BYTES(uint(sum[0] >> 4), uint(sum[1] >> 4), 0x5410u);
    rest.z = CODES_BYTES(uint(sum[2] >> 4), uint(sum[3] >> 4), 0x5410u);
    rest.w = (sums.x & 15u) | (sums.y & 15u) << 8 | (sums.z & 15u) << 16 | (sums.w & 15u) << 24;
  } else if (BITS == 4 || BITS == 5) {
    rest.y = as_type<uint>(float(sum[0] + sum[1]));
    rest.z = as_type<uint>(float(sum[2] + sum[3]));
  }
  to[0] = sums;
  to[1] = rest;
}

// Stores x[columns] in blocks in `room`. All THREADS threads call this, in whole simdgroups; `tid` is the number of
// the thread.
template <int BITS, int PLANES, int THREADS, typename X, typename P>
inline codes_blocks<PLANES, P> codes_lay(const device X* x, uint columns, uint tid, P room) {
  const uint pieces = columns / 16;  // four lanes share a block
  CODES_UNROLL(2)
  for (uint from = 0; from < pieces; from += THREADS) {
    const uint piece = metal::min(from + tid, pieces - 1), k = piece % 4;
    float v[16];
    uint top = as_type<uint>(1e-31f);  // as an integer NaN is the largest, so that the factor becomes NaN too
    codes_x8(x + 16 * piece, v);
    codes_x8(x + 16 * piece + 8, v + 8);
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 16; i++) {
      top = metal::max(top, as_type<uint>(v[i]) & 0x7FFFFFFFu);
    }
    top = metal::max(top, simd_shuffle_xor(top, ushort(1)));
    top = metal::max(top, simd_shuffle_xor(top, ushort(2)));
    const float peak = as_type<float>(top), scale = 32767.0f / peak;
    uint m[16], total = 0;  // integers beside the bits of 3 * 2^22
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 16; i++) {
      m[i] = as_type<uint>(metal::fma(v[i], scale, 12582912.0f));
      total += m[i];
    }
    const int own = int(total - 16u * 0x4B400000u), second = simd_shuffle_xor(own, ushort(1));
    const int sum[4] = {own, second, simd_shuffle_xor(own, ushort(2)), simd_shuffle_xor(second, ushort(2))};
    if (from + tid < pieces) {
      P block = room + CODES_PLANES(64) * (piece / 4);
      MLX_MTL_PRAGMA_UNROLL
      for (int part = 0; part < 2; part++) {
        uint pair[4];
        MLX_MTL_PRAGMA_UNROLL
        for (int i = 0; i < 4; i++) {
          const int n = 4 * part + i;
          pair[i] = CODES_BYTES(m[codes_column<BITS>(n, 0)], m[codes_column<BITS>(n, 1)], 0x5410u);
        }
        const uint4 four = {pair[0], pair[1], pair[2], pair[3]};
        block[2 * k + part] = four;
      }
      if (k == 0) {
        codes_lay_sums<BITS>(sum, peak * (1.0f / 32767.0f), block + 4 * PLANES);
      }
    }
  }
  return {room, 0};
}

// Bytes of four words, one of each: two of `low` and `second` with two of `third` and `high`.
inline uint codes_four(uint low, uint second, uint which, uint third, uint high, uint others) {
  return CODES_BYTES(CODES_BYTES(low, second, which), CODES_BYTES(third, high, others), 0x5410u);
}

// Unpacks codes to bytes, four to a word: 32 codes of 3 or 5 bits, else 16.
template <int BITS>
inline void codes_quads(const thread uint* words, thread uint* quad) {
  if (BITS == 2) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 4; i++) {
      quad[i] = (words[0] >> (2 * i)) & 0x03030303u;
    }
  } else if (BITS == 3) {
    codes_of_three_bits(words, quad);
  } else if (BITS == 4) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 4; i++) {
      quad[i] = (words[i / 2] >> (4 * (i % 2))) & 0x0F0F0F0Fu;
    }
  } else if (BITS == 6) {
    uint a, b, c;
    codes_triples(words, &a, &b, &c);
    quad[0] = a & 0x3F3F3F3Fu;
    quad[1] = ((a >> 6) & 0x03030303u) | ((b << 2) & 0x3C3C3C3Cu);
    quad[2] = ((b >> 4) & 0x0F0F0F0Fu) | ((c << 4) & 0x30303030u);
    quad[3] = (c >> 2) & 0x3F3F3F3Fu;
  } else {
    // Eight codes of 5 bits are five bytes. a has the first bytes of four of these fives, e the last ones.
    const uint a = codes_four(words[0], words[1], 0x50u, words[2], words[3], 0x72u);
    const uint b = codes_four(words[0], words[1], 0x61u, words[2], words[4], 0x43u);
    const uint c = codes_four(words[0], words[1], 0x72u, words[3], words[4], 0x50u);
    const uint d = codes_four(words[0], words[2], 0x43u, words[3], words[4], 0x61u);
    const uint e = codes_four(words[1], words[2], 0x50u, words[3], words[4], 0x72u);
    quad[0] = a & 0x1F1F1F1Fu;
    quad[1] = ((a >> 5) & 0x07070707u) | ((b << 3) & 0x18181818u);
    quad[2] = (b >> 2) & 0x1F1F1F1Fu;
    quad[3] = ((b >> 7) & 0x01010101u) | ((c << 1) & 0x1E1E1E1Eu);
    quad[4] = ((c >> 4) & 0x0F0F0F0Fu) | ((d << 4) & 0x10101010u);
    quad[5] = (d >> 1) & 0x1F1F1F1Fu;
    quad[6] = ((d >> 6) & 0x03030303u) | ((e << 2) & 0x1C1C1C1Cu);
    quad[7] = (e >> 3) & 0x1F1F1F1Fu;
  }
}

// d * S - m * M of four groups of 16, whose sums of products are sum[4]: S and M are bytes.
template <int BITS>
inline float codes_of_bytes(const thread int* sum, const thread float* scale, const thread float* bias, uint4 rest) {
  const uint bytes = as_type<uint>(scale[0]);
  int total = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int g = 0; g < 4; g++) {
    total += int(CODES_BYTES(bytes, 0u, uint(0x4440 + g))) * sum[g];
  }
  if (BITS == 3) {
    return scale[1] * float(total - 32 * (sum[0] + sum[1] + sum[2] + sum[3]));
  }
  const uint minima = as_type<uint>(bias[0]);
  const int high = CODES_DOT2(rest.z, minima, 1, CODES_DOT2(rest.y, minima, 0, 0));
  return metal::fma(bias[1], float(CODES_DOT4(minima, rest.w, 16 * high)), scale[1] * float(total));
}

// acc[r] += one chunk of row r, which is a block or half a block, times the part of x that begins at `x`. Codes of
// groups of 16 have a zero instead of a bias, except those of 2 bits.
template <int R, int BITS, int GROUP, int CHUNK, int PLANES, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float* bias,
    codes_blocks<PLANES, P> x,
    thread float* acc) {
  constexpr int GROUPS = GROUP < CHUNK ? CHUNK / GROUP : 1, WORDS = CHUNK * BITS / 32;
  constexpr int SIXTEENS = BITS % 2 ? 2 : 1, QUADS = 4 * SIXTEENS;  // of codes that are unpacked at once
  constexpr int ZERO = BITS == 3 ? 4 : 32;
  int sum[R * GROUPS], start[4] = {0, 0, 0, 0};
  if (BITS == 3 || BITS == 6) {
    const uint4 sums = x.first[4 * PLANES];
    start[0] = -ZERO * int(x.side ? sums.z : sums.x);
    start[1] = -ZERO * int(x.side ? sums.w : sums.y);
    start[2] = -ZERO * int(sums.z);
    start[3] = -ZERO * int(sums.w);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < R * GROUPS; i++) {
    sum[i] = start[i % GROUPS];
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int first = 0; first < CHUNK / 16; first += SIXTEENS) {
    uint quad[R * QUADS], pair[8 * SIXTEENS];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      codes_quads<BITS>(code + r * WORDS + first * BITS / 2, quad + r * QUADS);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 2 * SIXTEENS; i++) {
      const uint4 four = x.first[4 * x.side + 2 * first + i];
      pair[4 * i] = four.x;
      pair[4 * i + 1] = four.y;
      pair[4 * i + 2] = four.z;
      pair[4 * i + 3] = four.w;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      MLX_MTL_PRAGMA_UNROLL
      for (int q = 0; q < QUADS; q++) {
        const int low = BITS == 4 ? 2 * q : q, high = BITS % 2 ? q + 8 : BITS == 4 ? 2 * q + 1 : q + 4;
        const int at = r * GROUPS + 16 * first / GROUP, next = r * GROUPS + 16 * (first + SIXTEENS - 1) / GROUP;
        sum[at] = CODES_DOT2(pair[low], quad[r * QUADS + q], 0, sum[at]);
        sum[next] = CODES_DOT2(pair[high], quad[r * QUADS + q], 1, sum[next]);
      }
    }
  }
  const uint4 rest = x.first[4 * PLANES + 1];
  const float factor = as_type<float>(rest.x), x_sum = as_type<float>(x.side ? rest.z : rest.y);
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    float total = 0;
    if (BITS < 4) {
      total = codes_of_bytes<BITS>(sum + r * GROUPS, scale + r * GROUPS, bias + r * GROUPS, rest);
    } else if (BITS == 6) {
      total = metal::fma(scale[r * GROUPS + 1], float(sum[r * GROUPS + 1]), scale[r * GROUPS] * float(sum[r * GROUPS]));
    } else {
      total = metal::fma(scale[r], float(sum[r]), bias[r] * x_sum);
    }
    acc[r] = metal::fma(factor, total, acc[r]);
  }
}
