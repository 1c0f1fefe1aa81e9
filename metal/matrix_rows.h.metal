// needs: {form}.h.metal swiglu.h.metal matrix.h.metal
// Rows of x times stored matrices, by products of small matrices.
//
// acc[COUNT][TILES][4] += 16 rows of COUNT matrices [ROWS, COLS] times `tiles` blocks of 8 rows of x; the other blocks
// are left alone. row[2] are the lane's rows of the matrices, at[TILES] the first values of its rows of x. Lane 4 q + t
// unpacks chunks t, t + 4, ... of rows q and q + 8 of the 16, STEP pieces of 8 columns at a time, and multiplies them
// with the same columns of row q of each block (matrix.h.metal). The order of the sums does not depend on TILES and
// STEP.
template <
    int COUNT, int TILES, int STEP, int ROWS, int COLS, int BITS, int GROUP, int CHUNK, int INTERLEAVED, typename X,
    typename S, typename G>
inline void matrix_rows(
    const thread swiglu_matrix<S, G>* matrices, const thread uint* row, const device X* x, const thread uint* at,
    uint tiles, uint lane, thread float* acc) {
  constexpr uint CHUNKS = COLS / CHUNK, WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  for (uint base = 0; base < CHUNKS; base += 4) {
    const bool there = base + lane % 4 < CHUNKS;
    const uint chunk = there ? base + lane % 4 : CHUNKS - 1;
    uint code[2 * COUNT * WORDS];
    float scale[2 * COUNT * GROUPS], bias[2 * COUNT * GROUPS];
    swiglu_load<COUNT, 2, COLS, ROWS, BITS, GROUP, CHUNK, INTERLEAVED>(matrices, row, chunk, code, scale, bias);
    MLX_MTL_PRAGMA_UNROLL
    for (uint first = 0; first < CHUNK / 8; first += STEP) {
      uint a[COUNT * STEP * 8];
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < 2 * COUNT * STEP; i++) {
        const uint r = i % 2, each = i / (2 * STEP) * 2 + r;
        float w[8];
        codes_weights<BITS, GROUP, CHUNK>(
            code + each * WORDS, first + i / 2 % STEP, scale + each * GROUPS, bias + each * GROUPS, w);
        for (uint two = 0; two < 4; two++) {
          a[i / 2 * 8 + 2 * two + r] = there ? matrix_pair<X>(w[2 * two], w[2 * two + 1]) : 0;
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < TILES; j++) {
        if (j < tiles) {
          uint4 b[STEP];
          MLX_MTL_PRAGMA_UNROLL
          for (uint piece = 0; piece < STEP; piece++) {
            b[piece] = *(const device uint4*)(x + at[j] + CHUNK * chunk + 8 * (first + piece));
          }
          MLX_MTL_PRAGMA_UNROLL
          for (uint i = 0; i < COUNT * STEP; i++) {
            const uint piece = i % STEP;
            thread float* d = acc + (i / STEP * TILES + j) * 4;
            matrix_product(lane, a + 8 * i, b[piece].x, b[piece].y, X(0), d);
            matrix_product(lane, a + 8 * i + 4, b[piece].z, b[piece].w, X(0), d);
          }
        }
      }
    }
  }
}
