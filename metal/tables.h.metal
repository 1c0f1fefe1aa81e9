// needs: codes.h.metal affine.h.metal bytes.h.metal
// Forms whose codes name entries of tables, or are digits: weight = scale * q with q from -127 to 113
// (moeflux_mlx/ops/table_values.py has the parts of a matrix and where the fields are). The codes of 32 columns become
// 32 bytes q + 128 when they are loaded; from there on they are codes of 8 bits with the bias -128 * scale, as
// affine.h.metal reads them: BITS is 8, CHUNK is 32 or 64, and GROUP columns share a scale. For planes.h.metal they
// become bytes q. The types of scales tell the forms apart.

#ifdef CODES_PLANES
#define CODES_ZERO 0u
#ifdef CODES_NEAR_GRIDS
#define CODES_PREPARED 1  // the grid of iq2_xxs is that of codes_near
#endif
#else
#define CODES_ZERO 0x80808080u  // 128 in each byte
#endif

#ifndef CODES_PREPARED
#define CODES_PREPARED 0
#endif

// The grid of a form: words of four magnitudes.
struct codes_grid {
  uint four;
};

// The scales of COLUMNS columns, in halfwords, of which the first is d. The codes of 32 columns are WORDS_EACH words,
// and the grid has BYTES. KIND is only a name.
template <int KIND, int COLUMNS, int WORDS_EACH, int HALFWORDS, int BYTES>
struct codes_table {
  enum { BLOCK = COLUMNS, WORDS = WORDS_EACH, GRID = BYTES, PREPARED = CODES_PREPARED && KIND == 4 };
  ushort part[HALFWORDS];
};
typedef codes_table<0, 32, 4, 1, 0> codes_iq4_nl;
typedef codes_table<1, 256, 4, 4, 0> codes_iq4_xs;
typedef codes_table<2, 256, 3, 1, 1024> codes_iq3_xxs;
typedef codes_table<3, 256, 3, 7, 2048> codes_iq3_s;
typedef codes_table<4, 256, 2, 1, 2048> codes_iq2_xxs;
typedef codes_table<5, 256, 2, 5, 4096> codes_iq2_xs;
typedef codes_table<6, 256, 2, 9, 8192> codes_iq2_s;
typedef codes_table<7, 256, 1, 9, 16384> codes_iq1_s;
typedef codes_table<8, 256, 1, 12, 16384> codes_iq1_m;
typedef codes_table<9, 256, 1, 11, 0> codes_tq1_0;
typedef codes_table<10, 256, 2, 1, 0> codes_tq2_0;

// As codes_from_row and codes_words_each of nested.h.metal.
template <int KIND, int COLUMNS, int WORDS_EACH, int HALFWORDS, int BYTES>
inline const device codes_table<KIND, COLUMNS, WORDS_EACH, HALFWORDS, BYTES>* codes_from_row(
    const device codes_table<KIND, COLUMNS, WORDS_EACH, HALFWORDS, BYTES>* part, uint row, uint columns, uint) {
  return part + row * (columns / COLUMNS);
}

inline const device codes_grid* codes_from_row(const device codes_grid* grid, uint, uint, uint) {
  return grid;
}

template <int KIND, int COLUMNS, int WORDS_EACH, int HALFWORDS, int BYTES>
inline uint codes_words_each(const device codes_table<KIND, COLUMNS, WORDS_EACH, HALFWORDS, BYTES>*, uint) {
  return WORDS_EACH;
}

// Byte i of the halfwords after d.
template <typename S>
inline uint codes_table_byte(const device S* block, uint i) {
  return (uint(block->part[1 + i / 2]) >> (8 * (i % 2))) & 0xFFu;
}

template <typename S>
inline float codes_table_d(const device S* block) {
  return float(as_type<float16_t>(block->part[0]));
}

// n + 1/2, without a conversion: the bits of n become the mantissa of a float of 2^23.
inline float codes_and_half(uint n) {
  return as_type<float>(n | 0x4B000000u) - 8388607.5f;
}

// Four codes, where the magnitudes of q are the bytes of `four`, and bits 0 to 3 of `signs` are their signs.
// Multiplied by 2^0 + 2^7 + 2^14 + 2^21, four bits have copies of which the lowest bits of the bytes are these bits.
inline uint codes_signed(uint four, uint signs) {
  const uint minus = ((signs & 15u) * 0x00204081u) & 0x01010101u;
  return ((four ^ (minus * 255u)) + minus) ^ CODES_ZERO;
}

// Four times seven signs from the lowest bits on: four bytes, of which each has an even number of bits.
inline uint codes_even(uint word) {
  const uint low = (word & 0x7Fu) | ((word << 1) & 0x7F00u);
  const uint sevens = low | ((word << 2) & 0x7F0000u) | ((word << 3) & 0x7F000000u);
  uint folded = sevens ^ (sevens >> 4);
  folded ^= folded >> 2;
  folded ^= folded >> 1;
  return sevens | (folded & 0x01010101u) << 7;
}

#ifdef CODES_NEAR_GRIDS
#define CODES_NEAR (S::PREPARED ? 96 : S::GRID / 16 + 1)  // the number of uint4 for a grid

// The numbers 0, 1 and 2 of the magnitudes 8, 25 and 43, in 4 bits each.
inline uint codes_numbers(uint four) {
  const uint each = (four >> 4) & 0x0F0F0F0Fu, pairs = (each | each >> 4) & 0x00FF00FFu;
  return (pairs | pairs >> 8) & 0xFFFFu;
}

// Bit k of eight as bit 4 k + 2.
inline uint codes_apart(uint bits) {
  const uint halves = (bits | bits << 12) & 0x000F000Fu, pairs = (halves | halves << 6) & 0x03030303u;
  return ((pairs | pairs << 3) & 0x11111111u) << 2;
}

// Copies a grid to `room`. One that is prepared has a word for each entry, the numbers of its magnitudes, and then for
// each seven signs the word that makes these numbers those of signed magnitudes. All THREADS threads call this; `tid` is
// the number of the thread.
template <typename S, int THREADS, typename P>
inline const device codes_grid* codes_near(const device codes_grid* grid, P room, uint tid) {
  if (S::PREPARED) {
    device uint* words = (device uint*)room;
    for (uint i = tid; i < 384; i += THREADS) {
      const uint2 eight = ((const device uint2*)grid)[i % 256];
      const uint numbers = codes_numbers(eight.x) | codes_numbers(eight.y) << 16;
      words[i] = i < 256 ? numbers : codes_apart(codes_even(i - 256) & 0xFFu);
    }
    return (const device codes_grid*)room;
  }
  for (uint i = tid; i < S::GRID / 16; i += THREADS) {
    room[i] = ((const device uint4*)grid)[i];
  }
  return S::GRID ? (const device codes_grid*)room : grid;
}
#endif

// 32 bytes of eight entries of four magnitudes: index[i] for columns 4 i and on; byte k of `signs` has the signs of
// eight columns.
inline void codes_of_fours(const device codes_grid* grid, const thread uint* index, uint signs, thread uint* code) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 8; i++) {
    code[i] = codes_signed(grid[index[i]].four, signs >> (4 * i));
  }
}

// The same of four entries of eight magnitudes.
inline void codes_of_eights(const device codes_grid* grid, const thread uint* index, uint signs, thread uint* code) {
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < 4; k++) {
    const uint2 eight = ((const device uint2*)grid)[index[k]];
    code[2 * k] = codes_signed(eight.x, signs >> (8 * k));
    code[2 * k + 1] = codes_signed(eight.y, signs >> (8 * k + 4));
  }
}

// 32 bytes of codes of 4 bits: byte i of four words has the code of column i in its low half, that of column i + 16 in
// its high half.
#if defined(CODES_NEAR_GRIDS) || defined(CODES_PLANES)  // CUDA has an instruction for CODES_BYTES
inline uint codes_iq4_values(uint four) {  // of the four lowest codes
  const uint size = four & 0x7777u;
  const uint minus = CODES_BYTES(0xBFAD9881u ^ CODES_ZERO, 0xF6EADDCFu ^ CODES_ZERO, size);
  const uint plus = CODES_BYTES(0x26190D01u ^ CODES_ZERO, 0x71594535u ^ CODES_ZERO, size);
  return CODES_BYTES(minus, plus, ((four >> 1) & 0x4444u) | 0x3210u);
}

inline void codes_of_iq4(const thread uint* words, thread uint* code) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    const uint first = codes_iq4_values(words[i]), last = codes_iq4_values(words[i] >> 16);
    code[i] = CODES_BYTES(first, last, 0x6420u);
    code[4 + i] = CODES_BYTES(first, last, 0x7531u);
  }
}
#else
constant uint codes_iq4_values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

inline void codes_of_iq4(const thread uint* words, thread uint* code) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 4; i++) {
    code[i] = 0;
    code[4 + i] = 0;
    MLX_MTL_PRAGMA_UNROLL
    for (int at = 0; at < 32; at += 8) {
      code[i] |= codes_iq4_values[(words[i] >> at) & 15u] << at;
      code[4 + i] |= codes_iq4_values[(words[i] >> (at + 4)) & 15u] << at;
    }
  }
}
#endif

// The codes of columns [32 unit, 32 unit + 32) of a block, and their one or two scales.
inline void codes_from_table(
    const thread uint* words, const device codes_iq4_nl* block, uint, const device codes_grid*, thread uint* code,
    thread float* scale) {
  codes_of_iq4(words, code);
  scale[0] = codes_table_d(block);
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq4_xs* block, uint unit, const device codes_grid*, thread uint* code,
    thread float* scale) {
  codes_of_iq4(words, code);
  const uint2 all = *(const device uint2*)block;
  const uint low = (all.y >> (4 * unit)) & 15u, high = (all.x >> (16 + 2 * unit)) & 3u;
  const float d = float(as_type<float16_t>(ushort(all.x & 0xFFFFu)));
  scale[0] = d * (as_type<float>(low | high << 4 | 0x4B000000u) - 8388640.0f);
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq3_xxs* block, uint, const device codes_grid* grid, thread uint* code,
    thread float* scale) {
  uint index[8];
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 8; i++) {
    index[i] = (words[i / 4] >> (8 * (i % 4))) & 0xFFu;
  }
  codes_of_fours(grid, index, codes_even(words[2]), code);
  scale[0] = codes_table_d(block) * codes_and_half(words[2] >> 28) * 0.5f;
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq3_s* block, uint unit, const device codes_grid* grid,
    thread uint* code, thread float* scale) {
  const uint high = codes_table_byte(block, unit);
  uint index[8];
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 8; i++) {
    index[i] = ((words[i / 4] >> (8 * (i % 4))) & 0xFFu) | ((high >> i) & 1u) << 8;
  }
  codes_of_fours(grid, index, words[2], code);
  const uint number = (codes_table_byte(block, 8 + unit / 2) >> (4 * (unit % 2))) & 15u;
  scale[0] = codes_table_d(block) * codes_and_half(number) * 2.0f;
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq2_xxs* block, uint, const device codes_grid* grid, thread uint* code,
    thread float* scale) {
  scale[0] = codes_table_d(block) * codes_and_half(words[1] >> 28) * 0.25f;
  if (codes_iq2_xxs::PREPARED) {
    const device uint* signs = (const device uint*)(grid + 256);
    const uint index[4] = {words[0] & 0xFFu, (words[0] >> 8) & 0xFFu, (words[0] >> 16) & 0xFFu, words[0] >> 24};
    MLX_MTL_PRAGMA_UNROLL
    for (int k = 0; k < 4; k++) {
      const uint which = grid[index[k]].four | signs[(words[1] >> (7 * k)) & 127u];
      code[2 * k] = CODES_BYTES(0x002B1908u, 0x00D5E7F8u, which);
      code[2 * k + 1] = CODES_BYTES(0x002B1908u, 0x00D5E7F8u, which >> 16);
    }
    return;
  }
  uint index[4];
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < 4; k++) {
    index[k] = (words[0] >> (8 * k)) & 0xFFu;
  }
  codes_of_eights(grid, index, codes_even(words[1]), code);
}

// Two scales of 16 columns each, in the halves of a byte.
inline void codes_two_scales(float d, uint numbers, thread float* scale) {
  scale[0] = d * codes_and_half(numbers & 15u) * 0.25f;
  scale[1] = d * codes_and_half(numbers >> 4) * 0.25f;
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq2_xs* block, uint unit, const device codes_grid* grid,
    thread uint* code, thread float* scale) {
  const uint sevens = ((words[0] >> 9) & 0x7Fu) | ((words[0] >> 25) << 7);
  const uint others = ((words[1] >> 9) & 0x7Fu) | ((words[1] >> 25) << 7);
  const uint index[4] = {words[0] & 511u, (words[0] >> 16) & 511u, words[1] & 511u, (words[1] >> 16) & 511u};
  codes_of_eights(grid, index, codes_even(sevens | others << 14), code);
  codes_two_scales(codes_table_d(block), codes_table_byte(block, unit), scale);
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq2_s* block, uint unit, const device codes_grid* grid,
    thread uint* code, thread float* scale) {
  const uint pair = block->part[1 + unit];
  uint index[4];
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < 4; k++) {
    index[k] = ((words[0] >> (8 * k)) & 0xFFu) | ((pair >> (2 * k)) & 3u) << 8;
  }
  codes_of_eights(grid, index, words[1], code);
  codes_two_scales(codes_table_d(block), pair >> 8, scale);
}

// 32 bytes of four entries of eight values 128 + 8 g: `high` has an index's high bits and, in bit 3, whether its values
// are less by an eighth, for each k in 4 bits. The scale is that of eighths.
inline void codes_of_eighths(uint word, uint high, const device codes_grid* grid, thread uint* code) {
  MLX_MTL_PRAGMA_UNROLL
  for (int k = 0; k < 4; k++) {
    const uint index = ((word >> (8 * k)) & 0xFFu) | ((high >> (4 * k)) & 7u) << 8;
    const uint2 eight = ((const device uint2*)grid)[index];
    const uint shift = (high >> (4 * k)) & 8u ? 0xFEFEFEFFu : 0x01010101u;  // less or more than eighths by one
    code[2 * k] = (eight.x + shift) ^ (0x80808080u ^ CODES_ZERO);
    code[2 * k + 1] = (eight.y + shift) ^ (0x80808080u ^ CODES_ZERO);
  }
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq1_s* block, uint unit, const device codes_grid* grid,
    thread uint* code, thread float* scale) {
  const uint fields = block->part[1 + unit], minus = fields >> 15 ? 0x8888u : 0u;
  const uint high = (fields & 7u) | (fields & 0x38u) << 1 | (fields & 0x1C0u) << 2 | (fields & 0xE00u) << 3;
  codes_of_eighths(words[0], high | minus, grid, code);
  scale[0] = codes_table_d(block) * codes_and_half((fields >> 12) & 7u) * 0.25f;
}

inline void codes_from_table(
    const thread uint* words, const device codes_iq1_m* block, uint unit, const device codes_grid* grid,
    thread uint* code, thread float* scale) {
  codes_of_eighths(words[0], block->part[4 + unit], grid, code);
  const uint at = 6 * unit, from = 1 + at / 16;
  const uint numbers = (uint(block->part[from]) | uint(block->part[from + 1]) << 16) >> (at % 16);
  const float quarter = codes_table_d(block) * 0.25f;
  scale[0] = quarter * codes_and_half(numbers & 7u);
  scale[1] = quarter * codes_and_half((numbers >> 3) & 7u);
}

// Four bytes of q + 1.
inline uint codes_less_one(uint four) {
  return (four + 0x7F7F7F7Fu) ^ (0x80808080u ^ CODES_ZERO);
}

inline void codes_from_table(
    const thread uint* words, const device codes_tq2_0* block, uint, const device codes_grid*, thread uint* code,
    thread float* scale) {
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 8; i++) {
    code[i] = codes_less_one((words[i / 4] >> (2 * (i % 4))) & 0x03030303u);
  }
  scale[0] = codes_table_d(block);
}

// Bytes are fractions of 256: three times one has the next digit above its byte.
inline void codes_from_table(
    const thread uint* words, const device codes_tq1_0* block, uint unit, const device codes_grid*, thread uint* code,
    thread float* scale) {
  const uint pair = block->part[1 + unit], last = codes_table_byte(block, 16 + unit / 2);
  const uint shared = (last * (unit % 2 ? 9u : 1u)) & 0xFFu;  // without the digits of the 32 columns before
  uint even = words[0] & 0x00FF00FFu, odd = (words[0] >> 8) & 0x00FF00FFu, two = (pair & 0xFFu) | (pair >> 8) << 16;
  code[5] = code[6] = 0;
  code[7] = ((shared * 3u) & 0x300u) | ((((shared * 3u) & 0xFFu) * 3u) >> 8) << 24;
  MLX_MTL_PRAGMA_UNROLL
  for (int n = 0; n < 5; n++) {
    even *= 3u;
    odd *= 3u;
    two *= 3u;
    code[n] = codes_less_one(((even >> 8) & 0x00030003u) | (odd & 0x03000300u));
    code[5 + n / 2] |= ((two >> 8) & 0x00030003u) << (8 * (n % 2));
    even &= 0x00FF00FFu;
    odd &= 0x00FF00FFu;
    two &= 0x00FF00FFu;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 5; i < 8; i++) {
    code[i] = codes_less_one(code[i]);
  }
  scale[0] = codes_table_d(block);
}

// As codes_load of codes.h.metal, which the type of the grid tells apart.
template <int R, int BITS, int GROUP, int CHUNK, int COLS, typename S>
inline void codes_load(
    const device uint32_t* w,
    const device S* scales,
    const device codes_grid* grid,
    const thread uint* row,
    uint chunk,
    thread uint* code,
    thread float* scale,
    thread float* bias) {
  constexpr int GROUPS = CHUNK / GROUP, UNITS = CHUNK / 32, EACH = S::BLOCK / 32, WORDS = UNITS * S::WORDS;
  uint words[R * WORDS];
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    codes_words<WORDS>(w + (row[r] * (COLS / CHUNK) + chunk) * WORDS, words + r * WORDS);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < UNITS; i++) {
      const uint unit = chunk * UNITS + i;
      codes_from_table(
          words + r * WORDS + i * S::WORDS, scales + (row[r] * (COLS / S::BLOCK) + unit / EACH), unit % EACH, grid,
          code + r * (CHUNK / 4) + 8 * i, scale + r * GROUPS + i * (GROUPS / UNITS));
    }
    MLX_MTL_PRAGMA_UNROLL
    for (int g = 0; g < GROUPS; g++) {
      bias[r * GROUPS + g] = -128.0f * scale[r * GROUPS + g];
    }
  }
}
