// needs: codes.h.metal bytes.h.metal
// Codes of 2 and 3 bits in groups of 16 (Q2_K, Q3_K) times integers, as in planes.h.metal, but an instruction
// multiplies two bytes by two integers of 16 bits and adds both products, so that it stays within a group.
//
// 64 columns of x become integers of 16 bits times one float, the factor; x is rounded by at most 2^-16 of the largest
// of its 64 columns. A block of 64 columns has two uint4 of pairs for each 16 columns, in the order in which
// codes_quads gives codes, one with the sums of these integers, and one with the factor and the sums in pieces: 16 high
// + low, pairs of high and bytes of low. So the scales and minima of four groups, which are bytes, are multiplied as
// integers too; codes_groups gives the bytes.

#define CODES_PLANES(columns) ((columns) / 64 * (4 * PLANES + 2))  // the number of uint4 for a row of x

#ifndef CODES_DOT2
// sum + the products of both halves of `x` and two bytes of `codes`, from byte 2 `high` on. They are below 128.
inline int codes_dot2(uint x, uint codes, uint high, int sum) {
  const uint two = codes >> (16 * high);
  return sum + int(short(x & 0xFFFFu)) * int(two & 0xFFu) + int(short(x >> 16)) * int((two >> 8) & 0xFFu);
}
#define CODES_DOT2(x, codes, high, sum) codes_dot2(x, codes, high, sum)
#endif

// A row of x in blocks.
template <int PLANES, typename P>
struct codes_blocks {
  P first;
};

template <int PLANES, typename P>
inline codes_blocks<PLANES, P> operator+(codes_blocks<PLANES, P> row, uint columns) {
  return {row.first + CODES_PLANES(columns)};
}

typedef codes_shared<12, 16> codes_q2_k_bytes;
typedef codes_shared<13, 12> codes_q3_k_bytes;

// The bytes of four groups instead of the first scale, and d, or d and m, instead of the second.
template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q2_k_bytes* scales, const device codes_super2* supers, uint row, uint chunk, thread float* scale,
    thread float*) {
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  scale[0] = as_type<float>(codes_q2_bytes((const device uint*)(scales + place.block), place.group / 4));
  scale[1] = as_type<float>(CODES_READ((const device uint*)(supers + place.block)));
}

template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q3_k_bytes* scales, const device codes_super1* supers, uint row, uint chunk, thread float* scale,
    thread float*) {
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  scale[0] = as_type<float>(codes_q3_bytes((const device uint*)(scales + place.block), place.group / 4));
  scale[1] = float(*(const device float16_t*)(supers + place.block));
}

// The column, of 16, whose x is number `which` of pair n: codes of 3 bits are unpacked eight by eight, those of 2 bits
// four by four.
template <int BITS>
constexpr int codes_column(int n, int which) {
  return BITS == 3 ? 8 * which + n : 8 * (n / 4) + 4 * which + n % 4;
}

// Stores x[columns] in blocks in `room`. All THREADS threads call this, in whole simdgroups; `tid` is the number of
// the thread.
template <int BITS, int PLANES, int THREADS, typename X, typename P>
inline codes_blocks<PLANES, P> codes_lay(const device X* x, uint columns, uint tid, P room) {
  const uint pieces = columns / 16;  // four lanes share a block
  CODES_UNROLL(2)
  for (uint from = 0; from < pieces; from += THREADS) {
    const uint piece = metal::min(from + tid, pieces - 1), k = piece % 4;
    float v[16], peak = 1e-31f;
    codes_x8(x + 16 * piece, v);
    codes_x8(x + 16 * piece + 8, v + 8);
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 16; i++) {
      peak = metal::fmax(peak, metal::fabs(v[i]));
    }
    peak = metal::fmax(peak, simd_shuffle_xor(peak, ushort(1)));
    peak = metal::fmax(peak, simd_shuffle_xor(peak, ushort(2)));
    const float scale = 32767.0f / peak;
    uint m[16], total = 0;  // integers beside the bits of 3 * 2^22
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 16; i++) {
      m[i] = as_type<uint>(metal::fma(v[i], scale, 12582912.0f));
      total += m[i];
    }
    const int own = int(total - 16u * 0x4B400000u), second = simd_shuffle_xor(own, ushort(1));
    const int third = simd_shuffle_xor(own, ushort(2)), fourth = simd_shuffle_xor(second, ushort(2));
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
        const uint4 sums = {uint(own), uint(second), uint(third), uint(fourth)};
        const uint4 rest = {
            as_type<uint>(peak * (1.0f / 32767.0f)), CODES_BYTES(uint(own >> 4), uint(second >> 4), 0x5410u),
            CODES_BYTES(uint(third >> 4), uint(fourth >> 4), 0x5410u),
            (sums.x & 15u) | (sums.y & 15u) << 8 | (sums.z & 15u) << 16 | (sums.w & 15u) << 24};
        block[4 * PLANES] = sums;
        block[4 * PLANES + 1] = rest;
      }
    }
  }
  return {room};
}

// Unpacks codes to bytes, four to a word: 32 codes of 3 bits from three words, or 16 of 2 bits from one.
template <int BITS>
inline void codes_quads(const thread uint* words, thread uint* quad) {
  if (BITS == 3) {
    codes_of_three_bits(words, quad);
    return;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    quad[i] = (words[0] >> (2 * i)) & 0x03030303u;
  }
}

// What four groups of 16, whose sums of products are sum[4], are without the factor of x. The sums of Q3_K are of codes
// less 4.
template <int BITS>
inline float codes_of_bytes(const thread int* sum, const thread float* scale, uint4 rest) {
  const uint both = as_type<uint>(scale[0]), bytes = BITS == 2 ? both & 0x0F0F0F0Fu : both;
  int total = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int g = 0; g < 4; g++) {
    total += int(CODES_BYTES(bytes, 0u, uint(0x4440 + g))) * sum[g];
  }
  if (BITS == 3) {
    return scale[1] * float(total - 32 * (sum[0] + sum[1] + sum[2] + sum[3]));
  }
  const uint minima = (both >> 4) & 0x0F0F0F0Fu;
  const half2 d = as_type<half2>(scale[1]);
  const int high = CODES_DOT2(rest.z, minima, 1, CODES_DOT2(rest.y, minima, 0, 0));
  return metal::fma(-float(d.y), float(CODES_DOT4(minima, rest.w, 16 * high)), float(d.x) * float(total));
}

// acc[r] += one chunk of row r, which is a block, times the block of x at `x`.
template <int R, int BITS, int GROUP, int CHUNK, int PLANES, typename P>
inline void codes_dot(
    const thread uint* code,
    const thread float* scale,
    const thread float*,
    codes_blocks<PLANES, P> x,
    thread float* acc) {
  constexpr int WORDS = CHUNK * BITS / 32, SIXTEENS = BITS == 3 ? 2 : 1, QUADS = 4 * SIXTEENS;  // unpacked at once
  int sum[4 * R], start[4] = {0, 0, 0, 0};
  if (BITS == 3) {
    const uint4 sums = x.first[4 * PLANES];
    start[0] = -4 * int(sums.x);
    start[1] = -4 * int(sums.y);
    start[2] = -4 * int(sums.z);
    start[3] = -4 * int(sums.w);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4 * R; i++) {
    sum[i] = start[i % 4];
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int first = 0; first < 4; first += SIXTEENS) {
    uint quad[R * QUADS], pair[8 * SIXTEENS];
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      codes_quads<BITS>(code + r * WORDS + first * BITS / 2, quad + r * QUADS);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < 2 * SIXTEENS; i++) {
      const uint4 four = x.first[2 * first + i];
      pair[4 * i] = four.x;
      pair[4 * i + 1] = four.y;
      pair[4 * i + 2] = four.z;
      pair[4 * i + 3] = four.w;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      MLX_MTL_PRAGMA_UNROLL
      for (int q = 0; q < QUADS; q++) {  // the high bytes of a quad are of the second group of 3 bits
        const int low = 4 * r + first, high = low + SIXTEENS - 1;
        sum[low] = CODES_DOT2(pair[q], quad[r * QUADS + q], 0, sum[low]);
        sum[high] = CODES_DOT2(pair[QUADS + q], quad[r * QUADS + q], 1, sum[high]);
      }
    }
  }
  const uint4 rest = x.first[4 * PLANES + 1];
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    const float total = codes_of_bytes<BITS>(sum + 4 * r, scale + 4 * r, rest);
    acc[r] = metal::fma(as_type<float>(rest.x), total, acc[r]);
  }
}
