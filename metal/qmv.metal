// needs: codes.h.metal {form}.h.metal input.h.metal lane.h.metal
// y[1, O] = x[1, I] times dequantised w, transposed. x and y are X; w[O, I * BITS / 32] u32; scales and biases[O, I /
// GROUP] S. If NORM is 1, x is divided by sqrt(mean(x^2) + eps[0]) and multiplied by norm[I] W. The division is done at
// the end, because it is one factor for the whole row: the sum of squares is computed together with the product. If ADD
// is 1, residual[1, O] X is added. Inputs that are not needed are not read.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1). L lanes share a row, SPLIT simdgroups share its columns.
// A simdgroup holds 32 / L rows at a time, R times in turn.
  constexpr uint ABREAST = 32 / L, ROWS = R * ABREAST, TEAMS = SG / SPLIT;
  constexpr uint GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  threadgroup float part[SG * ROWS];
  threadgroup float part_squares[SG];
  const uint lane = thread_index_in_simdgroup % L;
  const uint team = simdgroup_index_in_threadgroup / SPLIT;
  const uint member = simdgroup_index_in_threadgroup % SPLIT;
  const uint top = (threadgroup_position_in_grid.x * TEAMS + team) * ROWS;
  const uint first = top + thread_index_in_simdgroup / L;

  const device S* group_scales = (const device S*)scales;
  const device G* group_biases = (const device G*)biases;
  uint row[R];
  float acc[R];
  float squares = 0;
  for (int r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(O - 1));
    acc[r] = 0;
  }
  const input_row<NORM, X, W> input = {x, norm, 0, &squares};
  CODES_UNROLL(AHEAD)
  for (uint chunk = member * L + lane; chunk < I / CHUNK; chunk += SPLIT * L) {
    uint code[R * (CHUNK * BITS / 32)];
    float scale[R * GROUPS], bias[R * GROUPS];
    codes_load<R, BITS, GROUP, CHUNK, I>(w, group_scales, group_biases, row, chunk, code, scale, bias);
    codes_dot<R, BITS, GROUP, CHUNK>(code, scale, bias, input + CHUNK * chunk, acc);
  }
  for (int r = 0; r < R; r++) {
    const float total = lane_sum<L>(acc[r]);
    if (lane == 0) {
      part[simdgroup_index_in_threadgroup * ROWS + first - top + r * ABREAST] = total;
    }
  }
  if (NORM) {
    squares = lane_sum<L>(squares);
    if (thread_index_in_simdgroup == 0) {
      part_squares[simdgroup_index_in_threadgroup] = squares;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = member * 32 + thread_index_in_simdgroup; i < ROWS && top + i < O; i += 32 * SPLIT) {
    float sum = 0, factor = 1;
    for (uint m = 0; m < SPLIT; m++) {
      sum += part[(team * SPLIT + m) * ROWS + i];
    }
    if (NORM) {
      float whole = 0;
      for (uint m = 0; m < SPLIT; m++) {
        whole += part_squares[team * SPLIT + m];
      }
      factor = metal::precise::rsqrt(whole / float(I) + eps[0]);
    }
    y[top + i] = X(ADD ? metal::fma(sum, factor, float(residual[top + i])) : sum * factor);
  }
