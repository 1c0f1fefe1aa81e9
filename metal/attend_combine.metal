// out[H, D] X = the pieces of attend_step.metal, weighted by what each has of the whole sum of exponentials. GATE: times
// sigmoid(gate[H, 1]), where gate is [H, 2, D] X. positions[0] is the token's own.
//
// grid: (D * H, 1, 1), threadgroup (D, 1, 1); one thread per output.
  const uint head = threadgroup_position_in_grid.x;
  const uint column = thread_index_in_threadgroup;
  const uint pieces = uint(positions[0]) / D + 1;
  float largest = stats[head * 2];
  for (uint i = 1; i < pieces; i++) {
    const float top = stats[(i * H + head) * 2];
    largest = top > largest ? top : largest;
  }
  float sum = 0, total = 0;
  for (uint i = 0; i < pieces; i++) {
    const float share = metal::exp(stats[(i * H + head) * 2] - largest);
    total = metal::fma(share, stats[(i * H + head) * 2 + 1], total);
    sum = metal::fma(share, parts[(i * H + head) * D + column], sum);
  }
  const float value = sum / total;
  if (GATE) {
    const float by = float(gate[(2 * head + 1) * D + column]);
    out[head * D + column] = X(value / (1.0f + metal::exp(-by)));
  } else {
    out[head * D + column] = X(value);
  }
