// out[T, C] = silu(sum_j weight[c, j] * input[t - TAPS + 1 + j, c]): a causal depthwise convolution over time. The
// inputs before x[T, C], whose rows begin AT_X values apart, are state[TAPS - 1, C], the oldest first. next[TAPS - 1, C]
// is the state after the last row. x, state, next and out are X; weight[C, TAPS] W; length[0] = T.
//
// grid: (C, T, 1) rounded up to whole threadgroups; one thread per output.
  const uint column = thread_position_in_grid.x;
  const int t = int(thread_position_in_grid.y);
  const int last = int(length[0]) - 1;
  constexpr int KEPT = TAPS - 1;
  if (column < C) {
    float sum = 0;
    for (int j = 0; j < TAPS; j++) {
      const int at = t + j - KEPT;
      const float v = at < 0 ? float(state[uint(at + KEPT) * C + column]) : float(x[uint(at) * AT_X + column]);
      sum = metal::fma(float(weight[column * TAPS + uint(j)]), v, sum);
    }
    out[uint(t) * C + column] = X(sum / (1.0f + metal::precise::exp(-sum)));
    if (t == last) {
      for (int r = 0; r < KEPT; r++) {
        const int at = last + 1 - KEPT + r;
        next[uint(r) * C + column] = at < 0 ? state[uint(at + KEPT) * C + column] : x[uint(at) * AT_X + column];
      }
    }
  }
