// Weights of one word of 4-bit codes, and eight values to memory.

// v[j] = scale * code[j] + bias. q4.h.metal says how codes become floats; without their 128 they are exact, and so is
// the product, which leaves the sum's one rounding.
inline void q4_dense_word(uint word, float scale, float bias, thread float* v) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 4; j++) {
    const uint pair = Q4_PAIR(word >> (4 * j));
    v[j] = metal::fma(scale, as_type<float>(pair << 16) - 128.0f, bias);
    v[4 + j] = metal::fma(scale, as_type<float>(pair & 0xFFFF0000u) - 128.0f, bias);
  }
}

template <typename X>
inline uint q4_dense_pair(float low, float high) {
  return uint(as_type<ushort>(X(low))) | uint(as_type<ushort>(X(high))) << 16;
}

// `to` is a multiple of 16 bytes.
template <typename X>
inline void q4_dense_store(const thread float* v, device X* to) {
  uint4 piece;
  piece.x = q4_dense_pair<X>(v[0], v[1]);
  piece.y = q4_dense_pair<X>(v[2], v[3]);
  piece.z = q4_dense_pair<X>(v[4], v[5]);
  piece.w = q4_dense_pair<X>(v[6], v[7]);
  *(device uint4*)to = piece;
}

inline void q4_dense_store(const thread float* v, device float* to) {
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
