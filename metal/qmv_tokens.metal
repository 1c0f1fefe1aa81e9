// needs: codes.h.metal {form}.h.metal input.h.metal lane.h.metal
// y[., O] = x[., I] times dequantised w, transposed, for count[0] rows of x, 2 to 16, with NORM and ADD as in
// qmv.metal. Each row has the same bits as in qmv.metal, because the same functions sum its products in the same lanes
// and in the same order. A lane reads its part of the matrix once for T rows; missing rows repeat the last one. The
// number of rows is not a constant, so one compiled kernel serves several numbers. x, y and residual are X; norm[I] W;
// w[O, I * BITS / 32] u32; scales and biases[O, I / GROUP] S.
//
// grid: (32 * SG * blocks, count[0] / T rounded up, 1), threadgroup (32 * SG, 1, 1). L lanes share a row of w, SPLIT
// simdgroups share its columns. A simdgroup holds 32 / L rows of w at a time, R times in turn.
  constexpr uint ABREAST = 32 / L, ROWS = R * ABREAST, TEAMS = SG / SPLIT;
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  threadgroup float part[SG * ROWS * T];
  threadgroup float part_squares[SG * T];
  const uint lane = thread_index_in_simdgroup % L;
  const uint team = simdgroup_index_in_threadgroup / SPLIT;
  const uint member = simdgroup_index_in_threadgroup % SPLIT;
  const uint top = (threadgroup_position_in_grid.x * TEAMS + team) * ROWS;
  const uint first = top + thread_index_in_simdgroup / L;
  const uint begin = threadgroup_position_in_grid.y * T, rows = uint(count[0]);

  const device S* group_scales = (const device S*)scales;
  const device G* group_biases = (const device G*)biases;
  uint row[R];
  float acc[T * R], squares[T];
  for (int r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(O - 1));
  }
  for (int i = 0; i < T * R; i++) {
    acc[i] = 0;
  }
  for (int t = 0; t < T; t++) {
    squares[t] = 0;
  }
  CODES_UNROLL(AHEAD)
  for (uint chunk = member * L + lane; chunk < I / CHUNK; chunk += SPLIT * L) {
    uint code[R * (CHUNK * BITS / 32)];
    float scale[R * GROUPS], bias[R * GROUPS];
    codes_load<R, BITS, GROUP, CHUNK, I>(w, group_scales, group_biases, row, chunk, code, scale, bias);
    MLX_MTL_PRAGMA_UNROLL
    for (int t = 0; t < T; t++) {
      const input_row<NORM, X, W> input = {x + metal::min(begin + t, rows - 1) * I, norm, 0, squares + t};
      codes_dot<R, BITS, GROUP, CHUNK>(code, scale, bias, input + CHUNK * chunk, acc + t * R);
    }
  }
  for (int t = 0; t < T; t++) {
    for (int r = 0; r < R; r++) {
      const float total = lane_sum<L>(acc[t * R + r]);
      if (lane == 0) {
        part[(simdgroup_index_in_threadgroup * ROWS + first - top + r * ABREAST) * T + t] = total;
      }
    }
    if (NORM) {
      const float whole = lane_sum<L>(squares[t]);
      if (thread_index_in_simdgroup == 0) {
        part_squares[simdgroup_index_in_threadgroup * T + t] = whole;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = member * 32 + thread_index_in_simdgroup; i < ROWS * T && top + i / T < O; i += 32 * SPLIT) {
    if (begin + i % T >= rows) {
      continue;
    }
    float sum = 0, factor = 1;
    for (uint m = 0; m < SPLIT; m++) {
      sum += part[(team * SPLIT + m) * ROWS * T + i];
    }
    if (NORM) {
      float whole = 0;
      for (uint m = 0; m < SPLIT; m++) {
        whole += part_squares[(team * SPLIT + m) * T + i % T];
      }
      factor = metal::precise::rsqrt(whole / float(I) + eps[0]);
    }
    const uint at = (begin + i % T) * O + top + i / T;
    y[at] = X(ADD ? metal::fma(sum, factor, float(residual[at])) : sum * factor);
  }
