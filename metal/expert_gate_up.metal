// act[P, I] = silu(gate x) * (up x) for P = T * K pairs of token and slot, read from packed expert records.
// x[T, H] X; blob[S, WORDS] u32: records; slots[P]. In a record, gate's codes [I, H * BITS / 32] u32 begin GATE_W words
// in, its scales and biases [I, H / GROUP] S GATE_S and GATE_B words; likewise up's.
//
// grid: (32 * SG * blocks, P, 1), threadgroup (32 * SG, 1, 1). L lanes share a row, so a simdgroup holds 32 / L
// rows at a time and R rows of each matrix in turn.
  constexpr uint ABREAST = 32 / L;
  const uint lane = thread_index_in_simdgroup % L;
  const uint pair = threadgroup_position_in_grid.y;
  const uint block = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint first = block * (R * ABREAST) + thread_index_in_simdgroup / L;

  const device uint32_t* record = blob + codes_record(uint(slots[pair]), WORDS);
  const device uint32_t* gate = record + GATE_W;
  const device uint32_t* up = record + UP_W;
  const device S* gate_scales = (const device S*)(record + GATE_S);
  const device S* gate_biases = (const device S*)(record + GATE_B);
  const device S* up_scales = (const device S*)(record + UP_S);
  const device S* up_biases = (const device S*)(record + UP_B);
  const device X* xt = x + (pair / K) * H;

  constexpr uint WORDS_EACH = R * CHUNK * BITS / 32, GROUPS_EACH = R * (CHUNK < GROUP ? 1 : CHUNK / GROUP);
  uint row[R];
  float acc[2 * R];
  for (int r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(I - 1));
    acc[r] = 0;
    acc[R + r] = 0;
  }
  CODES_UNROLL(AHEAD)
  for (uint chunk = lane; chunk < H / CHUNK; chunk += L) {
    uint code[2 * WORDS_EACH];
    float scale[2 * GROUPS_EACH], bias[2 * GROUPS_EACH];
    codes_load<R, BITS, GROUP, CHUNK, H>(gate, gate_scales, gate_biases, row, chunk, code, scale, bias);
    codes_load<R, BITS, GROUP, CHUNK, H>(
        up, up_scales, up_biases, row, chunk, code + WORDS_EACH, scale + GROUPS_EACH, bias + GROUPS_EACH);
    codes_dot<2 * R, BITS, GROUP, CHUNK>(code, scale, bias, xt + CHUNK * chunk, acc);
  }
  for (int r = 0; r < R; r++) {
    const float gx = lane_sum<L>(acc[r]);
    const float ux = lane_sum<L>(acc[R + r]);
    if (lane == 0 && first + r * ABREAST < I) {
      act[pair * I + row[r]] = X(gx / (1.0f + metal::exp(-gx)) * ux);
    }
  }
