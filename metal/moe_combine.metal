// out[T, H] = h_mid + sum_k weights[t, k] * expert_out[places[t, k]] (+ shared). The sums are in float32, k ascends.
// expert_out[., H] X; places[T, K] int; weights[T, K] float; h_mid[T, H] Y; shared[T, H] Z, which is read if SHARED is
// 1.
//
// grid: (H, T, 1) rounded up to whole threadgroups; one thread per element.
  const uint column = thread_position_in_grid.x;
  const uint token = thread_position_in_grid.y;
  if (column < H) {
    const uint at = token * H + column;
    float sum = float(h_mid[at]);
    for (uint k = 0; k < K; k++) {
      sum = metal::fma(weights[token * K + k], float(expert_out[size_t(places[token * K + k]) * H + column]), sum);
    }
    if (SHARED) {
      sum += float(shared[at]);
    }
    out[at] = Y(sum);
  }
