// A gated short convolution for one token, between its projections (mixers/conv/op.py). For each of C channels:
//     newest = B * x;  out = C * sum_j taps[j] * input[j], of the TAPS - 1 inputs before and then the newest
// projected X has B[C], then the gate of the sum, C[C], then x[C]. conv[TAPS - 1, C] X has the inputs before, the
// oldest first; next_conv gets those of the next token. taps[C, TAPS] W; out[C] X.
//
// grid: (C, 1, 1) rounded up to whole threadgroups; one thread per channel.
  const uint column = thread_position_in_grid.x;
  if (column < C) {
    const float newest = float(X(float(projected[column]) * float(projected[2 * C + column])));  // as it is kept
    float sum = 0;
    for (uint j = 0; j < TAPS; j++) {
      const float v = j + 1 < TAPS ? float(conv[j * C + column]) : newest;
      sum = metal::fma(float(taps[column * TAPS + j]), v, sum);
      if (j > 0) {
        next_conv[(j - 1) * C + column] = X(v);
      }
    }
    out[column] = X(float(projected[C + column]) * sum);
  }
