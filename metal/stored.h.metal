// needs: codes.h.metal dense.h.metal
// Eight weights of a matrix in any stored form, for products that are too small to have a kernel for each form
// (codes.h.metal). Loading is separate from multiplying, so that a thread can load many before it waits for the first.

// Eight codes with the scale and bias of their group, or, if BITS is 0, eight values.
template <int BITS>
struct StoredEight {
  uint64_t codes;
  float scale;
  float bias;
};

template <>
struct StoredEight<0> {
  float v[8];
};

// Loads codes or values [8 piece, 8 piece + 8) of a matrix with `pieces` pieces. GROUP columns share a scale; KIND is
// as in dense.h.metal.
template <int BITS, int GROUP, int KIND, typename S, typename G>
inline StoredEight<BITS> stored_load(
    const device uint32_t* w, const device S* scales, const device G* biases, uint piece, uint pieces) {
  StoredEight<BITS> held;
  held.codes = dense_codes<BITS>(w, piece, pieces);
  held.bias = 0.0f;
  codes_groups<GROUP, 8, 8>(scales, biases, 0, piece, &held.scale, &held.bias);
  return held;
}

template <int BITS, int GROUP, int KIND, typename W>
inline StoredEight<0> stored_load(const device W* w, const device W*, const device W*, uint piece, uint) {
  StoredEight<0> held;
  codes_x8(w + 8 * size_t(piece), held.v);
  return held;
}

template <int KIND, int BITS>
inline void stored_weights(const thread StoredEight<BITS>& held, thread float* v) {
  dense_weights<BITS, KIND>(held.codes, held.scale, held.bias, v);
}

template <int KIND>
inline void stored_weights(const thread StoredEight<0>& held, thread float* v) {
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    v[j] = held.v[j];
  }
}

inline float stored_sum(const thread float* v, const thread float* x) {
  float sum = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    sum = metal::fma(v[j], x[j], sum);
  }
  return sum;
}

// The product of the weights and x; `sum` is the sum of x. The bits of a code become the mantissa of a float of 2^BITS,
// so no conversion is needed.
template <int KIND, int BITS>
inline float stored_dot(const thread StoredEight<BITS>& held, const thread float* x, float sum) {
  constexpr uint ONE = 1u << BITS;
  float v[8];
  if (KIND) {
    stored_weights<KIND>(held, v);
    return stored_sum(v, x);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    v[j] = as_type<float>((uint(held.codes >> (BITS * j)) & (ONE - 1)) << (23 - BITS) | (127 + BITS) << 23);
  }
  return metal::fma(held.scale, metal::fma(-float(ONE), sum, stored_sum(v, x)), held.bias * sum);
}

template <int KIND>
inline float stored_dot(const thread StoredEight<0>& held, const thread float* x, float) {
  return stored_sum(held.v, x);
}
