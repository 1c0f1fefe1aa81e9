// needs: streams.h.metal
// Computes what streams_scatter.metal and then streams_products.metal compute: next[N, D] X, the streams of one token
// after a part of a layer, and made[O + 1] float of these. Every threadgroup computes all streams, which costs less
// than a launch.
//
// grid: (32 * SG * (O + 1), 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup computes one product; the last one also
// stores the streams.
  threadgroup float part[SG];
  const uint row = threadgroup_position_in_grid.x;
  const device float* weights = fn + size_t(metal::min(row, uint(O - 1))) * N * D;
  float sum = 0;
  for (uint column = thread_index_in_threadgroup; column < D; column += 32 * SG) {
    float v[N];
    streams_behind<N, MIXED, D>(h, out, mixing, column, v);
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
