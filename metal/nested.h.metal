// The scales of GGUF's forms: those of ops/nested.py, for the groups of one chunk of a row.
//
// Integers become floats without a conversion: their bits become the mantissa of a float of 2^23, which is subtracted.

#ifndef CODES_OVER
#define CODES_OVER(word, mask, base) (((word) & (mask)) | (base))
#endif
#ifndef CODES_READ  // a word that is never written
#define CODES_READ(place) (*(place))
#endif

// A group's own scale d; ZERO is subtracted from each code.
template <int ZERO>
struct codes_symmetric {
  float16_t d;
};
typedef codes_symmetric<8> codes_q4_0;
typedef codes_symmetric<16> codes_q5_0;
typedef codes_symmetric<128> codes_q8_0;

// BYTES that 256 columns of a row share; KIND is only a name.
template <int KIND, int BYTES>
struct codes_shared {
  uint8_t bytes[BYTES];
};
typedef codes_shared<2, 16> codes_q2_k;
typedef codes_shared<3, 12> codes_q3_k;
typedef codes_shared<4, 16> codes_q4_k;
typedef codes_shared<6, 16> codes_q6_k;
typedef codes_shared<0, 2> codes_super1;
typedef codes_shared<0, 4> codes_super2;

// Where scales, or what is behind them, of a row begin.
template <typename S>
inline const device S* codes_from_row(const device S* part, uint row, uint columns, uint group) {
  return part + row * (columns / group);
}

template <int KIND, int BYTES>
inline const device codes_shared<KIND, BYTES>* codes_from_row(
    const device codes_shared<KIND, BYTES>* part, uint row, uint columns, uint) {
  return part + row * (columns / 256);
}

// Words of the codes of 32 columns; `bits` is the number of bits of a code that has been loaded.
template <typename S>
inline uint codes_words_each(const device S*, uint bits) {
  return bits;
}

// Byte `at` of a word, less `zero`.
inline float codes_byte_less(uint word, uint at, float zero) {
  return as_type<float>(CODES_OVER(word >> (8 * at), 0xFFu, 0x4B000000u)) - (8388608.0f + zero);
}

template <int GROUP, int CHUNK, int COLS, int ZERO>
inline void codes_groups(
    const device codes_symmetric<ZERO>* scales, const device codes_symmetric<ZERO>*, uint row, uint chunk,
    thread float* scale, thread float* bias) {
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP, EACH = CHUNK < GROUP ? GROUP / CHUNK : 1;
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    scale[g] = float(scales[row * (COLS / GROUP) + chunk / EACH * GROUPS + g].d);
    bias[g] = -float(ZERO) * scale[g];
  }
}

// The 256 columns that a chunk is a part of, counted over all rows, and the first of the chunk's groups in these.
struct codes_within {
  uint block;
  uint group;
};

template <int GROUP, int CHUNK, int COLS>
inline codes_within codes_find(uint row, uint chunk) {
  constexpr uint EACH = 256 / CHUNK;
  return {row * (COLS / 256) + chunk / EACH, chunk % EACH * CHUNK / GROUP};
}

// The scales of four groups of Q2_K, from group 4 `four` on, and in the high halves of bytes their minima.
inline uint codes_q2_bytes(const device uint* words, uint four) {
  return CODES_READ(words + four);
}

// The scales of four groups of Q3_K, plus 32.
inline uint codes_q3_bytes(const device uint* words, uint four) {
  const uint low = (CODES_READ(words + four % 2) >> (4 * (four / 2))) & 0x0F0F0F0Fu;
  return low | ((CODES_READ(words + 2) >> (2 * four)) & 0x03030303u) << 4;
}

template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q2_k* scales, const device codes_super2* supers, uint row, uint chunk, thread float* scale,
    thread float* bias) {
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  const uint word = codes_q2_bytes((const device uint*)(scales + place.block), place.group / 4);
  const half2 d = as_type<half2>(CODES_READ((const device uint*)(supers + place.block)));
  const uint low = word & 0x0F0F0F0Fu, high = (word >> 4) & 0x0F0F0F0Fu;
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    const uint at = GROUPS == 4 ? g : (place.group + g) % 4;
    scale[g] = float(d.x) * codes_byte_less(low, at, 0.0f);
    bias[g] = -float(d.y) * codes_byte_less(high, at, 0.0f);
  }
}

template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q3_k* scales, const device codes_super1* supers, uint row, uint chunk, thread float* scale,
    thread float* bias) {
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  const uint word = codes_q3_bytes((const device uint*)(scales + place.block), place.group / 4);
  const float d = float(*(const device float16_t*)(supers + place.block));
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    scale[g] = d * codes_byte_less(word, GROUPS == 4 ? g : (place.group + g) % 4, 32.0f);
    bias[g] = -4.0f * scale[g];
  }
}

// Also of Q5_K.
template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q4_k* scales, const device codes_q4_k*, uint row, uint chunk, thread float* scale,
    thread float* bias) {
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  const uint4 header = *(const device uint4*)(scales + place.block);
  const half2 d = as_type<half2>(header.x);
  const uint at = 8 * (place.group % 4);
  const uint first = header.y >> at, second = header.z >> at, third = header.w >> at;
  const bool is_low = place.group < 4;
  const uint factor = is_low ? first & 63 : (third & 15) | ((first >> 2) & 48);
  const uint minimum = is_low ? second & 63 : ((third >> 4) & 15) | ((second >> 2) & 48);
  scale[0] = float(d.x) * codes_byte_less(factor, 0, 0.0f);
  bias[0] = -float(d.y) * codes_byte_less(minimum, 0, 0.0f);
}

template <int GROUP, int CHUNK, int COLS>
inline void codes_groups(
    const device codes_q6_k* scales, const device codes_super1* supers, uint row, uint chunk, thread float* scale,
    thread float* bias) {
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  const codes_within place = codes_find<GROUP, CHUNK, COLS>(row, chunk);
  const uint word = CODES_READ((const device uint*)(scales + place.block) + place.group / 4) ^ 0x80808080u;
  const float d = float(*(const device float16_t*)(supers + place.block));
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    scale[g] = d * codes_byte_less(word, (place.group + g) % 4, 128.0f);
    bias[g] = -32.0f * scale[g];
  }
}
