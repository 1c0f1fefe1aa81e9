// The matrices of N packed records in X, weight = scale * code + bias: in float, rounded once.
// blob[S, WORDS] u32: records; slots[N]; gate_up[N, 2 * I, H] X, gate's rows first; down[N, H, I] X. In a record, gate's
// codes [I, H / 8] u32 begin GATE_W words in, its scales and biases [I, H / 64] bfloat16 GATE_S and GATE_B words;
// likewise up's, and down's with codes [H, I / 8] and groups [H, I / 64].
//
// grid: (32 * SG * blocks, N, 1), threadgroup (32 * SG, 1, 1). A lane takes R words of codes, eight weights each, as far
// apart as the threadgroup has lanes, so that lanes side by side read and write side by side.
  constexpr uint EACH = I * H / 8;  // words of codes of a matrix
  const size_t place = threadgroup_position_in_grid.y;
  const device uint32_t* record = blob + q4_record(uint(slots[place]), WORDS);
  device X* first = gate_up + place * (16 * size_t(EACH));
  device X* second = down + place * (8 * size_t(EACH));
  const uint from = threadgroup_position_in_grid.x * (R * 32 * SG) + thread_index_in_threadgroup;

  uint code[R];
  float scale[R], bias[R];
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint word = metal::min(from + r * (32 * SG), 3 * EACH - 1);
    const uint matrix = word / EACH, within = word % EACH;
    const uint w = matrix == 0 ? GATE_W : matrix == 1 ? UP_W : DOWN_W;
    const uint s = matrix == 0 ? GATE_S : matrix == 1 ? UP_S : DOWN_S;
    const uint b = matrix == 0 ? GATE_B : matrix == 1 ? UP_B : DOWN_B;
    code[r] = record[w + within];
    scale[r] = float(((const device bfloat16_t*)(record + s))[within / 8]);
    bias[r] = float(((const device bfloat16_t*)(record + b))[within / 8]);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint word = from + r * (32 * SG);
    if (word < 3 * EACH) {
      float v[8];
      q4_dense_word(code[r], scale[r], bias[r], v);
      q4_dense_store(v, word < 2 * EACH ? first + 8 * word : second + 8 * (word - 2 * EACH));
    }
  }
