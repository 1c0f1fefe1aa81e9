// needs: nested.h.metal
// Matrices of codes in any form. A row is one stream of codes of BITS bits and fills whole words; the first code is in
// the lowest bits. GROUP columns share a scale and, if codes are integers, a bias. A lane reads a row in chunks of
// CHUNK columns, which are WORDS words. Chunk c of a row has columns [CHUNK c, CHUNK (c + 1)).
//
// Each form has a header that defines codes_dot, which multiplies chunks by x, and codes_weights, which unpacks them. x
// is a pointer, another type that codes_x8 accepts (input.h.metal), or blocks (planes.h.metal).

#define CODES_PAIR(word, mask) CODES_OVER(word, mask, 0x43004300u)
#ifndef CODES_AHEAD  // prefetches the 128 bytes around an address
#define CODES_AHEAD(place)
#endif
#ifndef CODES_UNROLL  // how many chunks a loop handles at once; the compiler decides where this was not measured
#define CODES_UNROLL(count)
#endif

typedef const device uint32_t* codes_pointer;

// The record of a slot. The distance between two records, in words, can exceed 32 bits.
inline codes_pointer codes_record(codes_pointer blob, uint slot, uint words, uint = 0) {
  return blob + size_t(slot) * words;
}

// The same in several arrays: the lowest row_bits bits of a slot are the row in an array, the others are the number of
// the array. If each record is an array of its own, row_bits is 0.
template <int N>
inline codes_pointer codes_record(const thread codes_pointer (&blob)[N], uint slot, uint words, uint row_bits = 0) {
  codes_pointer first = blob[0];
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 1; i < N; i++) {
    first = int(slot >> row_bits) == i ? blob[i] : first;
  }
  return first + size_t(slot & ((1u << row_bits) - 1)) * words;
}

// In a table: the record is not in memory.
#define CODES_MISSING 0xFFFFFFFFu

// The slot of a record by a table, or, if there is none, by its number.
inline uint codes_slot(codes_pointer slots, uint id) {
  return slots[id];
}

inline uint codes_slot(int, uint id) {
  return id;
}

#ifdef CODES_ADDRESSES
// The same where a table has the address of each record.
inline codes_pointer codes_record(const device uint64_t* addresses, uint slot, uint, uint = 0) {
  return (codes_pointer)addresses[slot];
}
#endif

// Loads eight consecutive x as floats. A row of x starts at a multiple of 16 bytes.
inline void codes_x8(const device float* x, thread float* v) {
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

inline void codes_bf16_pair(uint pair, thread float* v) {
  v[0] = as_type<float>(pair << 16);
  v[1] = as_type<float>(pair & 0xFFFF0000u);
}

// Converts 16 bytes, which hold values of the type of `kind`, to floats.
inline void codes_unpack(uint4 q, bfloat16_t kind, thread float* v) {
  codes_bf16_pair(q.x, v);
  codes_bf16_pair(q.y, v + 2);
  codes_bf16_pair(q.z, v + 4);
  codes_bf16_pair(q.w, v + 6);
}

inline void codes_x8(const device bfloat16_t* x, thread float* v) {
  codes_unpack(*(const device uint4*)x, bfloat16_t(0), v);
}

inline void codes_f16_pair(uint pair, thread float* v) {
  const half2 h = as_type<half2>(pair);
  v[0] = float(h.x);
  v[1] = float(h.y);
}

inline void codes_unpack(uint4 q, float16_t kind, thread float* v) {
  codes_f16_pair(q.x, v);
  codes_f16_pair(q.y, v + 2);
  codes_f16_pair(q.z, v + 4);
  codes_f16_pair(q.w, v + 6);
}

inline void codes_x8(const device float16_t* x, thread float* v) {
  codes_unpack(*(const device uint4*)x, float16_t(0), v);
}

inline void codes_unpack(uint4 q, float kind, thread float* v) {
  v[0] = as_type<float>(q.x);
  v[1] = as_type<float>(q.y);
  v[2] = as_type<float>(q.z);
  v[3] = as_type<float>(q.w);
}

// The same for four consecutive x, which start at a multiple of their bytes.
inline void codes_x4(const device float* x, thread float* v) {
  const float4 a = *(const device float4*)x;
  v[0] = a.x;
  v[1] = a.y;
  v[2] = a.z;
  v[3] = a.w;
}

inline void codes_x4(const device bfloat16_t* x, thread float* v) {
  const uint2 q = *(const device uint2*)x;
  codes_bf16_pair(q.x, v);
  codes_bf16_pair(q.y, v + 2);
}

inline void codes_x4(const device float16_t* x, thread float* v) {
  const uint2 q = *(const device uint2*)x;
  codes_f16_pair(q.x, v);
  codes_f16_pair(q.y, v + 2);
}

// The types of 8-bit scales. With 8-bit scales a matrix has no biases; in their place it may have one factor for all
// scales, codes_whole.
struct codes_e8m0 {
  uint8_t bits;
};
struct codes_e4m3 {
  uint8_t bits;
};
struct codes_whole {
  float value;
};

// The scale or bias of a group as a float.
template <typename S>
inline float codes_scale(S scale) {
  return float(scale);
}

// 2^(bits - 127), written as the bits of a float.
inline float codes_scale(codes_e8m0 scale) {
  return as_type<float>(scale.bits == 0 ? 0x00400000u : uint(scale.bits) << 23);
}

inline float codes_scale(codes_whole scale) {
  return scale.value;
}

// The bits of an E4M3 number, moved to the places of a float16's bits, mean 2^-8 times its value, also for subnormal
// numbers.
inline float codes_scale(codes_e4m3 scale) {
  const uint bits = scale.bits;
  return float(as_type<float16_t>(ushort((bits & 0x80) << 8 | (bits & 0x7F) << 7))) * 256.0f;
}

// The factor of the 8-bit scales of a row: one for the matrix, or one for each row. A global scale is 448 * 6 times
// this factor.
template <typename G>
inline float codes_factor(const device G*, uint) {
  return 1.0f;
}

inline float codes_factor(const device codes_whole* factor, uint) {
  return factor[0].value * (1.0f / 2688.0f);
}

inline float codes_factor(const device float* factors, uint row) {
  return factors[row] * (1.0f / 2688.0f);
}

// Loads the words of a chunk in loads that are as wide as their number allows: the address is a multiple of a chunk.
template <int WORDS>
inline void codes_words(const device uint32_t* from, thread uint* code) {
  if (WORDS % 4 == 0) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 four = *(const device uint4*)(from + i);
      code[i] = four.x;
      code[i + 1] = four.y;
      code[i + 2] = four.z;
      code[i + 3] = four.w;
    }
  } else if (WORDS % 2 == 0) {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < WORDS; i += 2) {
      const uint2 two = *(const device uint2*)(from + i);
      code[i] = two.x;
      code[i + 1] = two.y;
    }
  } else {
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < WORDS; i++) {
      code[i] = from[i];
    }
  }
}

// The scales and biases of the groups of one chunk of a row: a chunk is a part of one group, or holds several. Without
// biases there is a factor.
template <int GROUP, int CHUNK, int COLS, typename S, typename G>
inline void codes_groups(
    const device S* scales, const device G* biases, uint row, uint chunk, thread float* scale, thread float* bias) {
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP, EACH = CHUNK < GROUP ? GROUP / CHUNK : 1;
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    const uint group = row * (COLS / GROUP) + chunk / EACH * GROUPS + g;
    scale[g] = codes_scale(scales[group]);
    if (sizeof(S) > 1) {
      bias[g] = codes_scale(biases[group]);
    } else {
      scale[g] *= codes_factor(biases, row);
    }
  }
}

// Loads one chunk of each of R rows, with its scales and biases. `row` has the numbers of the rows; a row has COLS
// columns.
template <int R, int BITS, int GROUP, int CHUNK, int COLS, typename S, typename G>
inline void codes_load(
    const device uint32_t* w,
    const device S* scales,
    const device G* biases,
    const thread uint* row,
    uint chunk,
    thread uint* code,
    thread float* scale,
    thread float* bias) {
  constexpr int WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    codes_words<WORDS>(w + (row[r] * (COLS / CHUNK) + chunk) * WORDS, code + r * WORDS);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int r = 0; r < R; r++) {
    codes_groups<GROUP, CHUNK, COLS>(scales, biases, row[r], chunk, scale + r * GROUPS, bias + r * GROUPS);
  }
}
