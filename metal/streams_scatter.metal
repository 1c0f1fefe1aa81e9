// needs: streams.h.metal
// next[N, D] X: the N streams h[N, D] X of one token after a part of a layer whose output is out[D] X
// (streams.h.metal). The output is added with the weights mixing[N + N N], or mixing[N] if MIXED is 0.
//
// grid: (D, 1, 1) rounded up to whole threadgroups of T; a thread has one value of all streams.
  const uint column = threadgroup_position_in_grid.x * T + thread_index_in_threadgroup;
  if (column < D) {
    float v[N];
    streams_behind<N, MIXED, D>(h, out, mixing, column, v);
    for (uint k = 0; k < N; k++) {
      next[k * D + column] = X(v[k]);
    }
  }
