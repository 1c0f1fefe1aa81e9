// act[P, I] = silu(gate x) * (up x) for P = T * K pairs of token and slot, read from packed expert records.
// x[T, H] X; blob[S, WORDS] u32: records; slots[P]. In a record, gate's codes [I, H / 8] u32 begin GATE_W words in, its
// scales and biases [I, H / 64] bfloat16 GATE_S and GATE_B words; likewise up's.
//
// grid: (32 * SG * blocks, P, 1), threadgroup (32 * SG, 1, 1). L lanes share a row, so a simdgroup holds 32 / L
// rows at a time and R rows of each matrix in turn.
  constexpr uint ABREAST = 32 / L;
  const uint lane = thread_index_in_simdgroup % L;
  const uint pair = threadgroup_position_in_grid.y;
  const uint block = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint first = block * (R * ABREAST) + thread_index_in_simdgroup / L;

  const device uint32_t* record = blob + q4_record(uint(slots[pair]), WORDS);
  const device uint32_t* gate = record + GATE_W;
  const device uint32_t* up = record + UP_W;
  const device bfloat16_t* gate_scales = (const device bfloat16_t*)(record + GATE_S);
  const device bfloat16_t* gate_biases = (const device bfloat16_t*)(record + GATE_B);
  const device bfloat16_t* up_scales = (const device bfloat16_t*)(record + UP_S);
  const device bfloat16_t* up_biases = (const device bfloat16_t*)(record + UP_B);
  const device X* xt = x + (pair / K) * H;

  uint row[R];
  float acc[2 * R];
  for (int r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(I - 1));
    acc[r] = 0;
    acc[R + r] = 0;
  }
  Q4_UNROLL(AHEAD)
  for (uint chunk = lane; chunk < H / 32; chunk += L) {
    uint4 code[2 * R];
    float scale[2 * R], bias[2 * R];
    q4_load<R, H>(gate, gate_scales, gate_biases, row, chunk, code, scale, bias);
    q4_load<R, H>(up, up_scales, up_biases, row, chunk, code + R, scale + R, bias + R);
    q4_dot<2 * R>(code, scale, bias, xt + 32 * chunk, acc);
  }
  for (int r = 0; r < R; r++) {
    const float gx = lane_sum<L>(acc[r]);
    const float ux = lane_sum<L>(acc[R + r]);
    if (lane == 0 && first + r * ABREAST < I) {
      act[pair * I + row[r]] = X(gx / (1.0f + metal::exp(-gx)) * ux);
    }
  }
