// The N streams of one token behind a part of a layer: next[k] = sum over j of comb[j, k] * h[j] + post[k] * out, of h[N, D]
// X, out[D] X and mixing[N + N N], which is post and then comb (streams_gather.metal). Without MIXED, mixing[N] is post
// alone, and next[k] = h[k] + post[k] * out. next[N, D] X.
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
      float v = float(mixing[k]) * added;
      for (uint j = 0; j < (MIXED ? N : 0); j++) {
        v = metal::fma(float(mixing[N + j * N + k]), own[j], v);
      }
      v += MIXED ? 0.0f : own[k];
      next[k * D + column] = X(v);
    }
  }
