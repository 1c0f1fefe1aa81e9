// needs: lane.h.metal
// x[D] X = the sum over k of p[k] * v[k], and next[N, D] X = v, for one token's N sums v[N, D] (ops/block_sums.py): p
// is the softmax over k of weight . v[k] / sqrt(mean(v[k]^2) + EPS). weight[D] is float. If ADDS is 0, v is h[N, D] X,
// and next is not written; if it is 1, out[D] X is added to the last of them, and the sum is rounded; if it is 2,
// h[N - 1, D] has all but the last, which is out.
//
// grid: (D / EACH, 1, 1) rounded up to whole threadgroups of T. Every threadgroup computes all weights, which costs
// less than a launch, and has T * EACH columns of the results.
  constexpr uint SG = T / 32;
  threadgroup float part[2 * N * SG];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  float dot[N], square[N];
  for (uint k = 0; k < N; k++) {
    dot[k] = 0;
    square[k] = 0;
  }
  for (uint column = thread_index_in_threadgroup; column < D; column += T) {
    const float w = weight[column];
    for (uint k = 0; k < N; k++) {
      float v = float(ADDS == 2 && k == N - 1 ? out[column] : h[k * D + column]);
      v = ADDS == 1 && k == N - 1 ? float(X(v + float(out[column]))) : v;
      dot[k] = metal::fma(w, v, dot[k]);
      square[k] = metal::fma(v, v, square[k]);
    }
  }
  for (uint k = 0; k < N; k++) {
    const float both[2] = {lane_sum<32>(dot[k]), lane_sum<32>(square[k])};
    if (lane == 0) {
      part[k * SG + simdgroup] = both[0];
      part[(N + k) * SG + simdgroup] = both[1];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float most = -3.4e38f, total = 0;
  for (uint k = 0; k < N; k++) {
    float product = 0, norm = 0;
    for (uint s = 0; s < SG; s++) {
      product += part[k * SG + s];
      norm += part[(N + k) * SG + s];
    }
    dot[k] = product * metal::precise::rsqrt(norm / float(D) + EPS);
    most = metal::fmax(most, dot[k]);
  }
  for (uint k = 0; k < N; k++) {
    dot[k] = metal::precise::exp(dot[k] - most);
    total += dot[k];
  }
  for (uint i = 0; i < EACH; i++) {
    const uint column = (threadgroup_position_in_grid.x * EACH + i) * T + thread_index_in_threadgroup;
    if (column < D) {
      float sum = 0;
      for (uint k = 0; k < N; k++) {
        float v = float(ADDS == 2 && k == N - 1 ? out[column] : h[k * D + column]);
        v = ADDS == 1 && k == N - 1 ? float(X(v + float(out[column]))) : v;
        sum = metal::fma(dot[k] / total, v, sum);
        if (ADDS != 0) {
          next[k * D + column] = X(v);
        }
      }
      x[column] = X(sum);
    }
  }
