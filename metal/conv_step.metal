// A short causal convolution of each of C channels for one token: sum = sum_j tap[j] * input[j], of the TAPS - 1 inputs
// before and then the newest. If GATED is 1 (mixers/conv/op.py), projected X has B[C], then the gate of the sum, C[C],
// then x[C], and
//     newest = B * x;  out = C * sum
// otherwise (ops/convolution.py) newest is projected[C], and out = (newest + sum) * FACTOR, to which residual[C] X is
// added if ADD is 1. conv[TAPS - 1, C] X has the inputs before, the oldest first; next_conv gets those of the next
// token. taps[C, TAPS] W; if HEADS is not 0, the token's own more[HEADS, TAPS] X, the newest first, are added to those
// of each head's channels. out[C] X.
//
// grid: (C, 1, 1) rounded up to whole threadgroups; one thread per channel.
  const uint column = thread_position_in_grid.x;
  if (column < C) {
    const float newest =  // as it is kept
        GATED ? float(X(float(projected[column]) * float(projected[2 * C + column]))) : float(projected[column]);
    constexpr uint OWN = HEADS ? HEADS : 1;
    float sum = 0;
    for (uint j = 0; j < TAPS; j++) {
      const float v = j + 1 < TAPS ? float(conv[j * C + column]) : newest;
      const float own = HEADS ? float(more[column / (C / OWN) * TAPS + TAPS - 1 - j]) : 0.0f;
      sum = metal::fma(float(taps[column * TAPS + j]) + own, v, sum);
      if (j > 0) {
        next_conv[(j - 1) * C + column] = X(v);
      }
    }
    if (GATED) {
      out[column] = X(float(projected[C + column]) * sum);
    } else {
      const float value = (newest + sum) * FACTOR;
      out[column] = X(ADD ? float(residual[column]) + float(X(value)) : value);
    }
  }
