// needs: bytes.h.metal kv_rows.h.metal seen.h.metal
// Rows of keys and values as lanes hold them for products of small matrices (matrix.h.metal).

// Eight values of a row as they are stored: 16 bits each, or codes.
template <typename K>
struct KvPart {
  typedef uint4 type;
};
template <>
struct KvPart<uint8_t> {
  typedef uint2 type;
};

// The type of codes as numbers, and of weights of values. With it a scale times a weight cannot be too small for X.
template <typename K>
struct KvNumber {
  typedef K type;
};
template <>
struct KvNumber<uint8_t> {
  typedef bfloat16_t type;
};

template <uint WIDTH, typename K>
inline uint4 kv_part(const device K* row, uint unit) {
  return ((const device uint4*)row)[unit];
}

template <uint WIDTH>
inline uint2 kv_part(const device uint8_t* row, uint unit) {
  if (kv_elements<uint8_t>(WIDTH) % 8 == 0) {
    return ((const device uint2*)row)[unit];
  }
  return uint2{((const device uint*)row)[2 * unit], ((const device uint*)row)[2 * unit + 1]};
}

// The scale of the values from `column` on; 1 if rows are no codes.
template <uint WIDTH, typename K>
inline float kv_scale(const device K* row, uint column) {
  return 1.0f;
}

template <uint WIDTH>
inline float kv_scale(const device uint8_t* row, uint column) {
  return ((const device float*)(row + WIDTH))[column / kv_group(WIDTH)];
}

// Code `i` of four as a number: the code in the low bits of the float 2^23.
inline float kv_number(uint codes, uint i) {
  return as_type<float>(CODES_BYTES(codes, 0x4B000000u, 0x7540u | i)) - 8388736.0f;
}

// Two numbers in a word, the first in the low bits. They are codes, which both types hold exactly.
inline uint kv_both(float first, float second, bfloat16_t) {
  return CODES_BYTES(as_type<uint>(first), as_type<uint>(second), 0x7632u);
}

inline uint kv_both(float first, float second, float16_t) {
  return kv_pair<float16_t>(first, second);
}

inline uint kv_word(uint4 part, uint i) {
  return i < 2 ? (i == 0 ? part.x : part.y) : i == 2 ? part.z : part.w;
}

inline uint kv_word(uint2 part, uint i) {
  return i == 0 ? part.x : part.y;
}

// Values 2 i and 2 i + 1 of a part.
template <typename X>
inline uint kv_neighbours(uint4 part, uint i, X) {
  return kv_word(part, i);
}

template <typename X>
inline uint kv_neighbours(uint2 part, uint i, X kind) {
  const uint codes = kv_word(part, i / 2), at = i % 2 * 2;
  return kv_both(kv_number(codes, at), kv_number(codes, at + 1), kind);
}

// Value `i` of each of two parts.
template <typename X>
inline uint kv_across(uint4 first, uint4 second, uint i, X) {
  return CODES_BYTES(kv_word(first, i / 2), kv_word(second, i / 2), i % 2 ? 0x7632u : 0x5410u);
}

template <typename X>
inline uint kv_across(uint2 first, uint2 second, uint i, X kind) {
  return kv_both(kv_number(kv_word(first, i / 4), i % 4), kv_number(kv_word(second, i / 4), i % 4), kind);
}

// Where the rows of a key head are: those of positions before `begun` in `rows`, the others in `recent`.
template <typename K>
struct KvPlace {
  const device K* rows;
  const device K* recent;
  uint begun;
  uint capacity;
};

// Loads the parts of a lane. It has ROWS of 16 rows: if ROWS is 2, `first` and first + 8; if it is 4, `first`,
// first + 1, and these + 8. Of these rows it has part `unit` and each (2 ROWS)th further one. The first row of the
// simdgroup is number `base` of the positions that the token sees, from position `low` on. Instead of rows from `stop`
// on it loads the last one before.
template <
    uint WIDTH, uint ROWS, uint STEPS, int WINDOW, int TOP, int RATIO, int OWN, typename K, typename C, typename P>
inline void kv_load_parts(
    KvPlace<K> place, C blocks, uint offset, uint low, uint base, uint stop, uint first, uint unit, thread P* parts,
    thread float* scales) {
  constexpr uint ELEMENTS = kv_elements<K>(WIDTH);
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < ROWS; r++) {
    const uint i = base + first + (ROWS == 2 ? r * 8 : r / 2 * 8 + r % 2);
    const uint p = seen_position<TOP, RATIO, OWN>(blocks, low + metal::min(i, stop - 1), offset);
    const device K* row = p < place.begun ? place.rows + size_t(WINDOW ? p % place.capacity : p) * ELEMENTS
                                          : place.recent + (p - place.begun) * ELEMENTS;
    MLX_MTL_PRAGMA_UNROLL
    for (uint step = 0; step < STEPS; step++) {
      const uint wanted = unit + 2 * ROWS * step, at = WIDTH % (16 * ROWS) ? metal::min(wanted, WIDTH / 8 - 1) : wanted;
      parts[r * STEPS + step] = kv_part<WIDTH>(row, at);
      scales[r * STEPS + step] = kv_scale<WIDTH>(row, 16 * ROWS * step);
    }
  }
}
