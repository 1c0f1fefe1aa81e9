// needs: codes.h.metal
// The RMS norm before a router, computed by all threads of a threadgroup in pieces of eight columns. If NORM is 0, a
// row stays unchanged.

// A thread's part of the sum of squares of x[H].
template <int H, int THREADS, typename X>
inline float router_squares(const device X* x, uint index) {
  float squares = 0;
  for (uint i = index; i < H / 8; i += THREADS) {
    float v[8];
    codes_x8(x + 8 * i, v);
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 0; j < 8; j++) {
      squares = metal::fma(v[j], v[j], squares);
    }
  }
  return squares;
}

// Eight normed columns, rounded like a stored row.
template <int NORM, typename X, typename N>
inline void router_x8(const device X* x, const device N* weight, float scale, thread float* v) {
  float w[8];
  codes_x8(x, v);
  if (!NORM) {
    return;
  }
  codes_x8(weight, w);
  MLX_MTL_PRAGMA_UNROLL
  for (int j = 0; j < 8; j++) {
    v[j] = float(X(v[j] * scale * w[j]));
  }
}

// x[H] = the normed row h[H]. BLOCKS threadgroups share this work.
template <int NORM, int H, int THREADS, int BLOCKS, typename X, typename N>
inline void router_store(
    const device X* h, const device N* weight, float scale, uint block, uint index, device X* x) {
  for (uint i = block * THREADS + index; i < H / 8; i += BLOCKS * THREADS) {
    float v[8];
    router_x8<NORM>(h + 8 * i, weight + 8 * i, scale, v);
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 0; j < 8; j++) {
      x[8 * i + j] = X(v[j]);
    }
  }
}
