// The N streams of one token behind a part of a layer: next[k] = sum over j of comb[j, k] * h[j] + post[k] * out, of h[N, D] X,
// out[D] X and mixing[N + N N] float, which is post and then comb (streams_gather.metal). next[N, D] X.
//
// grid: (D, 1, 1) rounded up to whole threadgroups of T; a thread has one value of all streams.
  const uint column = threadgroup_position_in_grid.x * T + thread_index_in_threadgroup;
  if (column < D) {
    float own[N];
    for (uint j = 0; j < N; j++) {
      own[j] = float(h[j * D + column]);
    }
    const float added = float(out[column]);
    for (uint k = 0; k < N; k++) {
      float v = mixing[k] * added;
      for (uint j = 0; j < N; j++) {
        v = metal::fma(mixing[N + j * N + k], own[j], v);
      }
      next[k * D + column] = X(v);
    }
  }
