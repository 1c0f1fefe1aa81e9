// needs: lane.h.metal
// out[T, D] = (h + n(s) * weight) * factor[0], row by row. n divides a row by its root mean square (+ eps[0]). s is
// made, or, if PAIR is 1, n(made) * made_weight + n(beside) * beside_weight. If FACTOR is 0, there is no factor. If
// WEIGHED is not 0, out = h * beside_weight + n(s) * weight, where s is made, or made * made_weight if it is 2. out is
// X; h, made, beside[T, D] and the weights[D] are floats of any dtype. The results of the norms and the sums are
// rounded to X.
//
// grid: (32 * SG, T, 1), threadgroup (32 * SG, 1, 1): one threadgroup per row.
  constexpr uint THREADS = 32 * SG, EACH = (D + THREADS - 1) / THREADS;
  threadgroup float partial[2 * SG];
  const uint lane = thread_index_in_simdgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint tid = thread_index_in_threadgroup;
  const size_t row = size_t(threadgroup_position_in_grid.y) * D;
  float sum[EACH], other[PAIR ? EACH : 1];
  float squares = 0, others = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < EACH; t++) {
    const uint i = tid + t * THREADS;
    sum[t] = i < D ? float(made[row + i]) : 0.0f;
    if (WEIGHED == 2) {
      sum[t] = float(X(sum[t] * float(made_weight[metal::min(i, uint(D - 1))])));
    }
    squares = metal::fma(sum[t], sum[t], squares);
    if (PAIR) {
      other[PAIR ? t : 0] = i < D ? float(beside[row + i]) : 0.0f;
      others = metal::fma(other[PAIR ? t : 0], other[PAIR ? t : 0], others);
    }
  }
  for (uint round = 0; round <= PAIR; round++) {
    squares = lane_sum<32>(squares);
    others = lane_sum<32>(others);
    if (lane == 0) {
      partial[simdgroup] = squares;
      partial[SG + simdgroup] = others;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = lane_sum<32>(lane < SG ? partial[lane] : 0.0f);
    others = lane_sum<32>(lane < SG ? partial[SG + lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (round < PAIR) {
      const float first = metal::precise::rsqrt(squares / float(D) + eps[0]);
      const float second = metal::precise::rsqrt(others / float(D) + eps[0]);
      squares = 0;
      MLX_MTL_PRAGMA_UNROLL
      for (uint t = 0; t < EACH; t++) {
        const uint i = metal::min(tid + t * THREADS, uint(D - 1));
        const float a = float(X(sum[t] * first * float(made_weight[i])));
        const float b = float(X(other[PAIR ? t : 0] * second * float(beside_weight[i])));
        sum[t] = float(X(a + b));
        squares = metal::fma(sum[t], sum[t], squares);
      }
    }
  }
  const float scale = metal::precise::rsqrt(squares / float(D) + eps[0]);
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < EACH; t++) {
    const uint i = tid + t * THREADS;
    if (i < D) {
      if (WEIGHED) {
        const float kept = float(h[row + i]) * float(beside_weight[i]);
        out[row + i] = X(kept + float(X(sum[t] * scale)) * float(weight[i]));
      } else {
        const float joined = float(X(float(h[row + i]) + float(X(sum[t] * scale * float(weight[i])))));
        out[row + i] = X(FACTOR ? joined * float(factor[0]) : joined);
      }
    }
  }
