// needs: codes.h.metal {form}.h.metal dense.h.metal swiglu.h.metal
// As expert_dequantize, for codes that are unpacked a chunk at a time. In a record, the parts of the first matrix begin
// at words FIRST_W, FIRST_S and FIRST_B, those of the last at LAST_W, LAST_S and LAST_B.
//
// grid: (32 * SG * blocks, N, 1), threadgroup (32 * SG, 1, 1). A lane takes R chunks in turn; neighbouring lanes take
// neighbouring chunks.
  constexpr uint ALONG = COLS / CHUNK, EACH = ROWS * ALONG;  // chunks of a row and of a matrix
  constexpr uint HELD = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  const size_t place = threadgroup_position_in_grid.y;
  const device uint32_t* record = codes_record(blob, uint(slots[place]), WORDS, ROW_BITS);
  const swiglu_matrix<S, G> matrices[2] = {
      swiglu_in_record<S, G>(record, FIRST_W, FIRST_S, FIRST_B),
      swiglu_in_record<S, G>(record, LAST_W, LAST_S, LAST_B)};
  device X* to = out + place * (COUNT * size_t(ROWS) * COLS);
  const uint from = threadgroup_position_in_grid.x * (R * 32 * SG) + thread_index_in_threadgroup;
  for (uint r = 0; r < R; r++) {
    const uint chunk = from + r * (32 * SG), within = chunk % EACH;
    if (chunk < COUNT * EACH) {
      const swiglu_matrix<S, G> m = matrices[chunk / EACH];
      const uint row[1] = {within / ALONG};
      uint code[HELD];
      float scale[GROUPS], bias[GROUPS];
      codes_load<1, BITS, GROUP, CHUNK, COLS>(
          m.codes, m.scales, m.biases, row, within % ALONG, code, scale, bias);
      MLX_MTL_PRAGMA_UNROLL
      for (int i = 0; i < CHUNK / 8; i++) {
        float v[8];
        codes_weights<BITS, GROUP, CHUNK>(code, i, scale, bias, v);
        dense_store(v, to + CHUNK * size_t(chunk) + 8 * i);
      }
    }
  }
