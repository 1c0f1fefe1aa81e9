// needs: streams.h.metal
// Both streams_scatter.metal and streams_products.metal: next[N, D] X, the streams of one token behind a part of a layer,
// and of these made[O + 1] float. Every threadgroup computes all streams, which costs less than a launch.
//
// grid: (32 * SG * (O + 1), 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup makes one product; the last also stores the
// streams.
  threadgroup float part[SG];
  const uint row = threadgroup_position_in_grid.x;
  const device float* weights = fn + size_t(metal::min(row, uint(O - 1))) * N * D;
  float sum = 0;
  for (uint column = thread_index_in_threadgroup; column < D; column += 32 * SG) {
    float v[N];
    streams_behind<N, 1, D>(h, out, mixing, column, v);
    for (uint k = 0; k < N; k++) {
      sum = metal::fma(row < O ? weights[k * D + column] : v[k], v[k], sum);
      if (row == O) {
        next[k * D + column] = X(v[k]);
      }
    }
  }
  sum = streams_sum<SG>(sum, part, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
  if (thread_index_in_threadgroup == 0) {
    made[row] = sum;
  }
