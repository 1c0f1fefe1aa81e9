// needs: codes.h.metal dense.h.metal
// Dequantises COUNT (1 or 2) matrices [ROWS, COLS] of packed records to X, one below the other. The values are computed
// in float and rounded once. blob[S, WORDS] u32 are records; slots[N]; out[N, COUNT * ROWS, COLS] X. In a record, the
// codes [ROWS, COLS * BITS / 32] u32 of the first matrix begin at word FIRST_W, its scales and biases [ROWS, COLS /
// GROUP] S at words FIRST_S and FIRST_B; those of the last matrix begin at LAST_W, LAST_S and LAST_B. KIND is as in
// dense.h.metal.
//
// grid: (32 * SG * blocks, N, 1), threadgroup (32 * SG, 1, 1). A lane takes R pieces of eight codes. The distance
// between its pieces is the number of lanes in the threadgroup, so that neighbouring lanes read and write neighbouring
// pieces.
  constexpr uint EACH = ROWS * COLS / 8;  // pieces of a matrix
  const size_t place = threadgroup_position_in_grid.y;
  const device uint32_t* record = codes_record(blob, uint(slots[place]), WORDS, ROW_BITS);
  device X* to = out + place * (8 * COUNT * size_t(EACH));
  const uint from = threadgroup_position_in_grid.x * (R * 32 * SG) + thread_index_in_threadgroup;

  uint64_t code[R];
  float scale[R], bias[R];
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint piece = metal::min(from + r * (32 * SG), uint(COUNT * EACH - 1));
    const bool last = piece >= EACH;
    const uint within = last ? piece - EACH : piece;
    code[r] = dense_codes<BITS>(record + (last ? LAST_W : FIRST_W), within, EACH);
    const device S* scales = (const device S*)(record + (last ? LAST_S : FIRST_S));
    const device G* biases = (const device G*)(record + (last ? LAST_B : FIRST_B));
    bias[r] = 0;
    codes_groups<GROUP, 8, COLS>(scales, biases, 0, within, scale + r, bias + r);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint piece = from + r * (32 * SG);
    if (piece < COUNT * EACH) {
      float v[8];
      dense_weights<BITS, KIND>(code[r], scale[r], bias[r], v);
      dense_store(v, to + 8 * piece);
    }
  }
