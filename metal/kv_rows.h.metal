// needs: lane.h.metal
// Rows of keys and values as a cache keeps them: WIDTH values X, or bytes: WIDTH codes, and behind them a float scale
// for each group of values (moeflux_mlx/ops/kv_rows.py). A value is then (code - 128) * scale.

// The largest piece of which every row is a whole number.
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

// Elements K of a row.
template <typename K>
constexpr uint kv_elements(uint width) {
  return sizeof(K) == 1 ? width + 4 * (width / kv_group(width)) : width;
}

// What a row has for the values that fill the 16 bytes `unit` as X: kv_tile makes these bytes of it.
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

// x[WIDTH] becomes what is read of a row of bytes that keeps it, as X; with `keeps` it is kept in `row`. A simdgroup
// does it, whose lanes must have met after x was written.
template <uint WIDTH, typename X, typename P>
inline void kv_round(P x, device uint8_t* row, bool keeps, uint lane) {
  constexpr uint GROUP = kv_group(WIDTH);
  for (uint at = 0; at < WIDTH; at += GROUP) {
    float largest = 0;
    for (uint i = at + lane; i < at + GROUP; i += 32) {
      largest = metal::fmax(largest, metal::fabs(x[i]));
    }
    largest = lane_max(largest);
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = largest * (1.0f / 127.0f);
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
