// needs: {form}.h.metal swiglu.h.metal {units}.h.metal
// Rows of x times stored matrices, by products of small matrices.
//
// acc[COUNT][TILES][4] += 16 rows of COUNT matrices [ROWS, COLS] times `tiles` blocks of 8 rows of x; the other blocks
// are left alone. row[2] are the lane's rows of the matrices, at[TILES][MATRIX_X] the first values of its rows of x. Of
// four chunks, a lane unpacks the one of its place, STEP pieces of 8 columns at a time, and has the same columns, or
// those of another lane's place, of its rows of x (matrix.h.metal, simdgroup.h.metal). The order of the sums does not
// depend on TILES and STEP.
template <
    int COUNT, int TILES, int STEP, int ROWS, int COLS, int BITS, int GROUP, int CHUNK, int INTERLEAVED, typename X,
    typename S, typename G>
inline void matrix_rows(
    const thread swiglu_matrix<S, G>* matrices, const thread uint* row, const device X* x, const thread uint* at,
    uint tiles, uint lane, thread float* acc) {
  constexpr uint CHUNKS = COLS / CHUNK, WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  for (uint base = 0; base < CHUNKS; base += 4) {
    const bool there = base + matrix_place(lane) < CHUNKS;
    const uint chunk = there ? base + matrix_place(lane) : CHUNKS - 1;
    const uint x_chunk = metal::min(base + matrix_x_chunk(lane), CHUNKS - 1);
    uint code[2 * COUNT * WORDS];
    float scale[2 * COUNT * GROUPS], bias[2 * COUNT * GROUPS];
    swiglu_load<COUNT, 2, COLS, ROWS, BITS, GROUP, CHUNK, INTERLEAVED>(matrices, row, chunk, code, scale, bias);
    MLX_MTL_PRAGMA_UNROLL
    for (uint first = 0; first < CHUNK / 8; first += STEP) {
      matrix_two a[COUNT * STEP * 8];
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < 2 * COUNT * STEP; i++) {
        const uint r = i % 2, each = i / (2 * STEP) * 2 + r;
        float w[8];
        codes_weights<BITS, GROUP, CHUNK>(
            code + each * WORDS, first + i / 2 % STEP, scale + each * GROUPS, bias + each * GROUPS, w);
        MLX_MTL_PRAGMA_UNROLL
        for (uint two = 0; two < 4; two++) {
          a[i / 2 * 8 + 2 * two + r] = there ? matrix_weights<X>(w, two) : matrix_two(0);
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < TILES; j++) {
        if (j < tiles) {
          matrix_eight b[STEP];
          MLX_MTL_PRAGMA_UNROLL
          for (uint piece = 0; piece < STEP; piece++) {
            b[piece] = matrix_load(x, at + MATRIX_X * j, CHUNK * x_chunk + 8 * (first + piece), lane);
          }
          MLX_MTL_PRAGMA_UNROLL
          for (uint i = 0; i < COUNT * STEP; i++) {
            matrix_multiply<X>(lane, a + 8 * i, b[i % STEP], acc + (i / STEP * TILES + j) * 4);
          }
        }
      }
    }
  }
}
