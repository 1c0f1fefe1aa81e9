// Converts eight codes at a time to weights, and stores eight weights.

// Codes [8 piece, 8 piece + 8) of a matrix with `pieces` pieces. They begin at a whole byte and are in at most two
// words.
template <int BITS>
inline uint64_t dense_codes(const device uint32_t* words, uint piece, uint pieces) {
  const uint first = piece * BITS / 4, at = piece * BITS % 4 * 8;
  const uint64_t low = words[first];
  if (8 * BITS <= 32 && 32 % (8 * BITS) == 0) {
    return low >> at;
  }
  const uint64_t high = words[metal::min(first + 1, pieces * BITS / 4 - 1)];
  return (high << 32 | low) >> at;
}

// v[j] = scale * code[j] + bias. An integer code becomes a float exactly, so only the result is rounded. If KIND is 1
// or 2, v[j] is scale times an E2M1 or E4M3 code, which is converted as in e2m1.h.metal and e4m3.h.metal.
template <int BITS, int KIND>
inline void dense_weights(uint64_t codes, float scale, float bias, thread float* v) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    const uint code = uint(codes >> (BITS * j)) & ((1u << BITS) - 1);
    if (KIND == 2) {
      v[j] = float(as_type<float16_t>(ushort((code & 0x80) << 8 | (code & 0x7F) << 7))) * 256.0f * scale;
    } else if (KIND == 1) {
      v[j] = float(as_type<float16_t>(ushort((code & 8) << 12 | (code & 7) << 9))) * 16384.0f * scale;
    } else {
      v[j] = metal::fma(scale, as_type<float>(code | 0x4B000000u) - 8388608.0f, bias);
    }
  }
}

template <typename X>
inline uint dense_pair(float low, float high) {
  return uint(as_type<ushort>(X(low))) | uint(as_type<ushort>(X(high))) << 16;
}

// Stores eight weights. `to` is a multiple of 16 bytes.
template <typename X>
inline void dense_store(const thread float* v, device X* to) {
  uint4 piece;
  piece.x = dense_pair<X>(v[0], v[1]);
  piece.y = dense_pair<X>(v[2], v[3]);
  piece.z = dense_pair<X>(v[4], v[5]);
  piece.w = dense_pair<X>(v[6], v[7]);
  *(device uint4*)to = piece;
}

inline void dense_store(const thread float* v, device float* to) {
  float4 piece;
  MLX_MTL_PRAGMA_UNROLL
  for (int i = 0; i < 8; i += 4) {
    piece.x = v[i];
    piece.y = v[i + 1];
    piece.z = v[i + 2];
    piece.w = v[i + 3];
    *(device float4*)(to + i) = piece;
  }
}
