// Rows of keys and values as a cache stores them: WIDTH values X, or bytes. As bytes, a row has WIDTH codes, followed
// by one float scale for each group of values (moeflux_mlx/ops/kv_rows.py), and a value is (code - 128) * scale.

// The type in which rows are copied: every row is a whole number of these.
template <typename K>
struct KvUnit {
  typedef uint4 type;
};
template <>
struct KvUnit<uint8_t> {
  typedef uint type;
};

constexpr uint kv_group(uint width) {
  return width % 64 == 0 ? 64 : 32;
}

// The number of elements K of a row.
template <typename K>
constexpr uint kv_elements(uint width) {
  return sizeof(K) == 1 ? width + 4 * (width / kv_group(width)) : width;
}

// Loads the part of a row that holds the values of unit `unit`. A unit is 16 bytes as X; kv_tile converts the loaded
// part to them.
template <uint WIDTH, typename X>
inline uint4 kv_load(const device X* row, uint unit, X kind) {
  return ((const device uint4*)row)[unit];
}

template <uint WIDTH, typename X>
inline uint4 kv_load(const device uint8_t* row, uint unit, X kind) {
  constexpr uint WORDS = 4 / sizeof(X);
  const device uint* codes = (const device uint*)row + unit * WORDS;
  const uint scale = ((const device uint*)(row + WIDTH))[unit * WORDS * 4 / kv_group(WIDTH)];
  return uint4{codes[0], codes[WORDS - 1], scale, 0};
}

inline float kv_decode(uint code, float scale) {
  return (float(code) - 128.0f) * scale;
}

inline uint4 kv_pack(const thread float* v, float kind) {
  return uint4{as_type<uint>(v[0]), as_type<uint>(v[1]), as_type<uint>(v[2]), as_type<uint>(v[3])};
}

template <typename X>
inline uint kv_pair(float first, float second) {
  return uint(as_type<ushort>(X(first))) | uint(as_type<ushort>(X(second))) << 16;
}

template <typename X>
inline uint4 kv_pack(const thread float* v, X kind) {
  return uint4{kv_pair<X>(v[0], v[1]), kv_pair<X>(v[2], v[3]), kv_pair<X>(v[4], v[5]), kv_pair<X>(v[6], v[7])};
}

template <typename K, typename X>
inline uint4 kv_tile(uint4 loaded, X kind) {
  if (sizeof(K) > 1) {
    return loaded;
  }
  float v[8];
  MLX_MTL_PRAGMA_UNROLL
  for (uint j = 0; j < 4; j++) {
    v[j] = kv_decode((loaded.x >> (8 * j)) & 0xFF, as_type<float>(loaded.z));
    v[4 + j] = kv_decode((loaded.y >> (8 * j)) & 0xFF, as_type<float>(loaded.z));
  }
  return kv_pack(v, kind);
}

// One value of a row.
template <uint WIDTH, typename X>
inline float kv_value(const device X* row, uint at) {
  return float(row[at]);
}

template <uint WIDTH>
inline float kv_value(const device uint8_t* row, uint at) {
  return kv_decode(row[at], ((const device float*)(row + WIDTH))[at / kv_group(WIDTH)]);
}

// Rounds x[WIDTH] to the values, as X, that a row of bytes would give. If `keeps` is true, the codes and scales are
// also stored in `row`. One simdgroup calls this, after a barrier if another lane has written x.
template <uint WIDTH, typename X, typename P>
inline void kv_round(P x, device uint8_t* row, bool keeps, uint lane) {
  constexpr uint GROUP = kv_group(WIDTH);
  for (uint at = 0; at < WIDTH; at += GROUP) {
    float largest = 0;
    for (uint i = at + lane; i < at + GROUP; i += 32) {
      largest = metal::fmax(largest, metal::fabs(x[i]));
    }
    largest = simd_max(largest);
    const float inverse = largest > 1e-30f ? metal::precise::divide(127.0f, largest) : 0.0f;
    const float scale = largest * (1.0f / 127.0f);
    for (uint i = at + lane; i < at + GROUP; i += 32) {
      const uint code = uint(metal::rint(x[i] * inverse) + 128.0f);
      x[i] = float(X(kv_decode(code, scale)));
      if (keeps) {
        row[i] = uint8_t(code);
      }
    }
    if (keeps && lane == 0) {
      ((device float*)(row + WIDTH))[at / GROUP] = scale;
    }
  }
}
