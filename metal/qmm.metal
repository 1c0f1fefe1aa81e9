// needs: matrix_rows.h.metal swiglu.h.metal
// y[., O] = x[., I] times dequantised w, transposed, plus residual[., O] if ADD is 1, for count[0] rows of x. x, y and
// residual are X; w[O, I * BITS / 32] u32; scales and biases[O, I / GROUP] S. A row's result does not depend on other
// rows.
//
// grid: (32 * SG * blocks, count[0] / (8 TILES) rounded up, 1), threadgroup (32 * SG, 1, 1). A simdgroup multiplies 16
// rows of w with 8 TILES rows of x (matrix_rows.h.metal).
  const uint lane = thread_index_in_simdgroup, quad = lane / 4, rows = uint(count[0]);
  const uint top = 16 * (threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup);
  const uint begin = 8 * TILES * threadgroup_position_in_grid.y;
  const swiglu_matrix<S, G> matrices[1] = {{w, (const device S*)scales, (const device G*)biases}};
  const uint row[2] = {metal::min(top + quad, uint(O - 1)), metal::min(top + quad + 8, uint(O - 1))};
  uint at[TILES];
  float acc[TILES * 4];
  for (uint j = 0; j < TILES; j++) {
    at[j] = metal::min(begin + 8 * j + quad, rows - 1) * I;
  }
  for (uint i = 0; i < TILES * 4; i++) {
    acc[i] = 0;
  }
  if (top < O) {
    matrix_rows<1, TILES, STEP, O, I, BITS, GROUP, CHUNK, 0>(
        matrices, row, x, at, (rows - begin + 7) / 8, lane, acc);
    for (uint i = 0; i < TILES * 4; i++) {
      const uint place = begin + 8 * (i / 4) + 2 * (lane % 4) + i % 2, own = top + quad + 8 * (i / 2 % 2);
      if (place < rows && own < O) {
        const size_t cell = size_t(place) * O + own;
        y[cell] = X(ADD ? acc[i] + float(residual[cell]) : acc[i]);
      }
    }
  }
