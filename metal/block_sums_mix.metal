// needs: lane.h.metal
// x[Q, D] X = the sum over k of p[q, k] * v[k], and next[N, D] X = v, for one token's N sums v[N, D]
// (ops/block_sums.py): p is the softmax over k of weight[q] . v[k] / sqrt(mean(v[k]^2) + EPS). weight[Q, D] is float. If
// NORMED is 1, the sum is of v[k] / sqrt(mean(v[k]^2) + EPS). If ADDS is 0, v is h[N, D] X, and next is not written; if
// it is 1, out[D] X is added to the last of them, and the sum is rounded; if it is 2, h[N - 1, D] has all but the last,
// which is out.
//
// grid: (D / EACH, 1, 1) rounded up to whole threadgroups of T. Every threadgroup computes all weights, which costs
// less than a launch, and has T * EACH columns of the results.
  constexpr uint SG = T / 32;
  threadgroup float part[(Q + 1) * N * SG];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  float dot[Q * N], square[N];
  for (uint k = 0; k < N; k++) {
    square[k] = 0;
    for (uint q = 0; q < Q; q++) {
      dot[q * N + k] = 0;
    }
  }
  for (uint column = thread_index_in_threadgroup; column < D; column += T) {
    for (uint k = 0; k < N; k++) {
      float v = float(ADDS == 2 && k == N - 1 ? out[column] : h[k * D + column]);
      v = ADDS == 1 && k == N - 1 ? float(X(v + float(out[column]))) : v;
      square[k] = metal::fma(v, v, square[k]);
      for (uint q = 0; q < Q; q++) {
        dot[q * N + k] = metal::fma(weight[q * D + column], v, dot[q * N + k]);
      }
    }
  }
  for (uint k = 0; k < (Q + 1) * N; k++) {
    const float sum = lane_sum<32>(k < Q * N ? dot[k % (Q * N)] : square[k % N]);
    if (lane == 0) {
      part[k * SG + simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 0; k < N; k++) {
    float norm = 0;
    for (uint s = 0; s < SG; s++) {
      norm += part[(Q * N + k) * SG + s];
    }
    square[k] = metal::precise::rsqrt(norm / float(D) + EPS);
  }
  for (uint q = 0; q < Q; q++) {
    float most = -3.4e38f, total = 0;
    for (uint k = 0; k < N; k++) {
      float product = 0;
      for (uint s = 0; s < SG; s++) {
        product += part[(q * N + k) * SG + s];
      }
      dot[q * N + k] = product * square[k];
      most = metal::fmax(most, dot[q * N + k]);
    }
    for (uint k = 0; k < N; k++) {
      dot[q * N + k] = metal::precise::exp(dot[q * N + k] - most);
      total += dot[q * N + k];
    }
    for (uint k = 0; k < N; k++) {
      dot[q * N + k] = dot[q * N + k] / total * (NORMED ? square[k] : 1.0f);
    }
  }
  for (uint i = 0; i < EACH; i++) {
    const uint column = (threadgroup_position_in_grid.x * EACH + i) * T + thread_index_in_threadgroup;
    if (column < D) {
      float sum[Q] = {};
      for (uint k = 0; k < N; k++) {
        float v = float(ADDS == 2 && k == N - 1 ? out[column] : h[k * D + column]);
        v = ADDS == 1 && k == N - 1 ? float(X(v + float(out[column]))) : v;
        for (uint q = 0; q < Q; q++) {
          sum[q] = metal::fma(dot[q * N + k], v, sum[q]);
        }
        if (ADDS != 0) {
          next[k * D + column] = X(v);
        }
      }
      for (uint q = 0; q < Q; q++) {
        x[q * D + column] = X(sum[q]);
      }
    }
  }
