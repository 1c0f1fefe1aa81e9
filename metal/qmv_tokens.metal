// needs: codes.h.metal {form}.h.metal lane.h.metal
// y[T, O] = x[T, I] times dequantised w, transposed, for 2 to 8 tokens; every weight is unpacked once for all tokens.
// x X; w[O, I * BITS / 32] u32; scales and biases[O, I / GROUP] S.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1). L lanes share a row, SPLIT simdgroups share its
// columns; a simdgroup holds 32 / L rows at a time and R in turn.
  constexpr uint ABREAST = 32 / L, ROWS = R * ABREAST, TEAMS = SG / SPLIT;
  constexpr uint WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  threadgroup float part[SG * ROWS * T];
  const uint lane = thread_index_in_simdgroup % L;
  const uint team = simdgroup_index_in_threadgroup / SPLIT;
  const uint member = simdgroup_index_in_threadgroup % SPLIT;
  const uint top = (threadgroup_position_in_grid.x * TEAMS + team) * ROWS;
  const uint first = top + thread_index_in_simdgroup / L;

  uint row[R];
  float acc[R * T];
  for (int r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(O - 1));
  }
  for (int i = 0; i < R * T; i++) {
    acc[i] = 0;
  }
  for (uint chunk = member * L + lane; chunk < I / CHUNK; chunk += SPLIT * L) {
    uint code[R * WORDS];
    float scale[R * GROUPS], bias[R * GROUPS];
    codes_load<R, BITS, GROUP, CHUNK, I>(w, scales, biases, row, chunk, code, scale, bias);
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < CHUNK / 8; i++) {
      float weight[R * 8];
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < R; r++) {
        codes_weights<BITS, GROUP, CHUNK>(
            code + r * WORDS, i, scale + r * GROUPS, bias + r * GROUPS, weight + 8 * r);
      }
      MLX_MTL_PRAGMA_UNROLL
      for (int t = 0; t < T; t++) {
        float v[8];
        codes_x8(x + t * I + CHUNK * chunk + 8 * i, v);
        MLX_MTL_PRAGMA_UNROLL
        for (int r = 0; r < R; r++) {
          MLX_MTL_PRAGMA_UNROLL
          for (int j = 0; j < 8; j++) {
            acc[r * T + t] = metal::fma(weight[8 * r + j], v[j], acc[r * T + t]);
          }
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int t = 0; t < T; t++) {
      const float total = lane_sum<L>(acc[r * T + t]);
      if (lane == 0) {
        part[(simdgroup_index_in_threadgroup * ROWS + first - top + r * ABREAST) * T + t] = total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = member * 32 + thread_index_in_simdgroup; i < ROWS * T && top + i / T < O; i += 32 * SPLIT) {
    float sum = 0;
    for (uint m = 0; m < SPLIT; m++) {
      sum += part[(team * SPLIT + m) * ROWS * T + i];
    }
    y[(i % T) * O + top + i / T] = X(sum);
  }
