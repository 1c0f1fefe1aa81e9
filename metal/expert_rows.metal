// needs: codes.h.metal {form}.h.metal swiglu.h.metal {units}.h.metal matrix_rows.h.metal
// Rows of x times the matrix of their expert, or the activation of two products, for experts with many rows.
// x[., COLS] X; blob[S, WORDS] u32 are records; slots[N] are the records of N experts; starts[N + 1] are the places of
// their first rows. The row of x in a place is source[place] if GATHERED is 1, else the place itself. out[P, ROWS] X:
// if JOINED is 1, the activation of the products with the matrices at FIRST_W and LAST_W, else the product with the
// first, with its bias. A place's result does not depend on other places.
//
// grid: (32 * SG * blocks, N, SPLIT), threadgroup (32 * SG, 1, 1). A simdgroup multiplies 16 rows of a matrix with 8
// TILES rows of x at a time (matrix_rows.h.metal), every SPLIT-th such block of an expert. ROWS is a multiple of 16.
  constexpr uint COUNT = JOINED ? 2 : 1;
  const uint lane = thread_index_in_simdgroup, quad = matrix_row(lane);
  const uint top = 16 * (threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup);
  const uint expert = threadgroup_position_in_grid.y;
  const uint stop = uint(starts[expert + 1]);
  const device uint32_t* record = codes_record(blob, uint(slots[expert]), WORDS, ROW_BITS);
  swiglu_matrix<S, G> matrices[2] = {
      swiglu_in_record<S, G>(record, FIRST_W, FIRST_S, FIRST_B),
      swiglu_in_record<S, G>(record, LAST_W, LAST_S, LAST_B)};
#ifdef CODES_NEAR
  threadgroup uint4 near[CODES_NEAR];
  const device G* grid = codes_near<S, 32 * SG>(matrices[0].biases, near, thread_index_in_threadgroup);
  matrices[0].biases = matrices[1].biases = grid;
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  const uint row[2] = {top + quad, top + quad + 8};

  const uint from = uint(starts[expert]) + threadgroup_position_in_grid.z * (8 * TILES);
  for (uint begin = from; begin < stop && top < ROWS; begin += SPLIT * 8 * TILES) {
    uint at[TILES * MATRIX_X];
    float acc[COUNT * TILES * 4];
    MLX_MTL_PRAGMA_UNROLL
    for (uint j = 0; j < TILES * MATRIX_X; j++) {
      const uint place = metal::min(begin + 8 * (j / MATRIX_X) + matrix_x_row(lane) + j % MATRIX_X, stop - 1);
      at[j] = (GATHERED ? uint(source[place]) : place) * COLS;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < COUNT * TILES * 4; i++) {
      acc[i] = 0;
    }
    matrix_rows<COUNT, TILES, STEP, ROWS, COLS, BITS, GROUP, CHUNK, INTERLEAVED>(
        matrices, row, x, at, (stop - begin + 7) / 8, lane, acc);
    const device B* added[2] = {(const device B*)(record + FIRST_BIAS), (const device B*)(record + LAST_BIAS)};
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < TILES * 4; i++) {
      const uint place = begin + 8 * (i / 4) + 2 * matrix_place(lane) + i % 2, own = top + quad + 8 * (i / 2 % 2);
      if (place < stop) {
        float value = acc[i];
        if (BIASED) {
          value += float(INTERLEAVED ? added[2 * own < ROWS ? 0 : 1][2 * own % ROWS] : added[0][own]);
        }
        if (JOINED) {
          float other = acc[(COUNT - 1) * TILES * 4 + i];
          if (BIASED) {
            other += float(INTERLEAVED ? added[2 * own + 1 < ROWS ? 0 : 1][(2 * own + 1) % ROWS] : added[1][own]);
          }
          value = swiglu_joined<ACTIVATION>(value, other, LIMIT, GATE_LIMIT);
        }
        out[size_t(place) * ROWS + own] = X(value);
      }
    }
  }
