// needs: streams.h.metal
// made[O + 1] float: fn times h, and then the sum of h^2. h[N, D] X are a token's N streams; fn[O, N * D] is float.
//
// grid: (32 * SG * (O + 1), 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup computes one value of made.
  threadgroup float part[SG];
  const uint row = threadgroup_position_in_grid.x;
  const device float* weights = fn + size_t(metal::min(row, uint(O - 1))) * N * D;
  float sum = 0;
  for (uint column = thread_index_in_threadgroup; column < D; column += 32 * SG) {
    for (uint k = 0; k < N; k++) {
      const float v = float(h[k * D + column]);
      sum = metal::fma(row < O ? weights[k * D + column] : v, v, sum);
    }
  }
  sum = streams_sum<SG>(sum, part, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
  if (thread_index_in_threadgroup == 0) {
    made[row] = sum;
  }
