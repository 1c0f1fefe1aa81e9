// needs: codes.h.metal {form}.h.metal swiglu.h.metal matrix.h.metal
// Rows of x times the matrix of their expert, or the activation of two products, for experts with many rows.
// x[., COLS] X; blob[S, WORDS] u32 are records; slots[N] are the records of N experts; starts[N + 1] are the places of
// their first rows. The row of x in a place is source[place] if GATHERED is 1, else the place itself. out[P, ROWS] X:
// if JOINED is 1, the activation of the products with the matrices at FIRST_W and LAST_W, else the product with the
// first, with its bias. A place's result does not depend on other places.
//
// grid: (32 * SG * blocks, N, SPLIT), threadgroup (32 * SG, 1, 1). A simdgroup multiplies 16 rows of a matrix with 8
// TILES rows of x at a time, every SPLIT-th such block. It unpacks STEP pieces of 8 columns, then uses them for all
// these rows. Lane 4 q + t unpacks chunks t, t + 4, ... of rows q and q + 8 of the matrix, and multiplies them with the
// same chunks of row q of x (matrix.h.metal).
  constexpr uint COUNT = JOINED ? 2 : 1, CHUNKS = COLS / CHUNK, PIECES = CHUNK / 8;
  constexpr uint WORDS_EACH = 2 * CHUNK * BITS / 32, GROUPS_EACH = 2 * (CHUNK < GROUP ? 1 : CHUNK / GROUP);
  const uint lane = thread_index_in_simdgroup, quad = lane / 4, member = lane % 4;
  const uint top = 16 * (threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup);
  const uint expert = threadgroup_position_in_grid.y;
  const uint stop = uint(starts[expert + 1]);
  const device uint32_t* record = codes_record(blob, uint(slots[expert]), WORDS);
  const swiglu_matrix<S, G> matrices[2] = {
      swiglu_in_record<S, G>(record, FIRST_W, FIRST_S, FIRST_B),
      swiglu_in_record<S, G>(record, LAST_W, LAST_S, LAST_B)};
  const uint row[2] = {metal::min(top + quad, uint(ROWS - 1)), metal::min(top + quad + 8, uint(ROWS - 1))};

  const uint from = uint(starts[expert]) + threadgroup_position_in_grid.z * (8 * TILES);
  for (uint begin = from; begin < stop && top < ROWS; begin += SPLIT * 8 * TILES) {
    uint at[TILES];
    float acc[COUNT][TILES][4];
    for (uint j = 0; j < TILES; j++) {
      const uint place = metal::min(begin + 8 * j + quad, stop - 1);
      at[j] = (GATHERED ? uint(source[place]) : place) * COLS;
      for (uint m = 0; m < COUNT; m++) {
        for (uint i = 0; i < 4; i++) {
          acc[m][j][i] = 0;
        }
      }
    }
    for (uint base = 0; base < CHUNKS; base += 4) {
      const uint chunk = metal::min(base + member, CHUNKS - 1);
      uint code[COUNT * WORDS_EACH];
      float scale[COUNT * GROUPS_EACH], bias[COUNT * GROUPS_EACH];
      for (uint m = 0; m < COUNT; m++) {
        if (INTERLEAVED) {
          for (uint r = 0; r < 2; r++) {
            const uint turn = 2 * row[r] + m, other[1] = {turn % ROWS};
            const swiglu_matrix<S, G> its = matrices[turn < ROWS ? 0 : 1];
            codes_load<1, BITS, GROUP, CHUNK, COLS>(
                its.codes, its.scales, its.biases, other, chunk, code + (2 * m + r) * (WORDS_EACH / 2),
                scale + (2 * m + r) * (GROUPS_EACH / 2), bias + (2 * m + r) * (GROUPS_EACH / 2));
          }
        } else {
          codes_load<2, BITS, GROUP, CHUNK, COLS>(
              matrices[m].codes, matrices[m].scales, matrices[m].biases, row, chunk, code + m * WORDS_EACH,
              scale + m * GROUPS_EACH, bias + m * GROUPS_EACH);
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint first = 0; first < PIECES; first += STEP) {
        uint a[COUNT][STEP][8];
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < COUNT * STEP * 2; i++) {
          const uint r = i % 2, piece = i / 2 % STEP, m = i / (2 * STEP), each = 2 * m + r;
          float w[8];
          codes_weights<BITS, GROUP, CHUNK>(
              code + each * (WORDS_EACH / 2), first + piece, scale + each * (GROUPS_EACH / 2),
              bias + each * (GROUPS_EACH / 2), w);
          for (uint two = 0; two < 4; two++) {
            const uint pair = matrix_pair<X>(w[2 * two], w[2 * two + 1]);
            a[m][piece][2 * two + r] = base + member < CHUNKS ? pair : 0;
          }
        }
        MLX_MTL_PRAGMA_UNROLL
        for (uint j = 0; j < TILES; j++) {
          if (begin + 8 * j < stop) {
            uint4 b[STEP];
            MLX_MTL_PRAGMA_UNROLL
            for (uint piece = 0; piece < STEP; piece++) {
              b[piece] = *(const device uint4*)(x + at[j] + CHUNK * chunk + 8 * (first + piece));
            }
            MLX_MTL_PRAGMA_UNROLL
            for (uint piece = 0; piece < STEP; piece++) {
              MLX_MTL_PRAGMA_UNROLL
              for (uint m = 0; m < COUNT; m++) {
                matrix_product(lane, a[m][piece], b[piece].x, b[piece].y, X(0), acc[m][j]);
                matrix_product(lane, a[m][piece] + 4, b[piece].z, b[piece].w, X(0), acc[m][j]);
              }
            }
          }
        }
      }
    }
    const device B* added[2] = {(const device B*)(record + FIRST_BIAS), (const device B*)(record + LAST_BIAS)};
    for (uint j = 0; j < TILES; j++) {
      for (uint i = 0; i < 4; i++) {
        const uint place = begin + 8 * j + 2 * member + i % 2, r = i / 2, own = top + quad + 8 * r;
        if (place < stop && own < ROWS) {
          float value = acc[0][j][i];
          if (BIASED) {
            value += float(INTERLEAVED ? added[2 * own < ROWS ? 0 : 1][2 * own % ROWS] : added[0][own]);
          }
          if (JOINED) {
            float other = acc[COUNT - 1][j][i];
            if (BIASED) {
              other += float(INTERLEAVED ? added[2 * own + 1 < ROWS ? 0 : 1][(2 * own + 1) % ROWS] : added[1][own]);
            }
            value = swiglu_joined<ACTIVATION>(value, other, LIMIT);
          }
          out[size_t(place) * ROWS + own] = X(value);
        }
      }
    }
  }
