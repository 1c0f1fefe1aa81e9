// needs: codes.h.metal stored.h.metal lane.h.metal
// made[O] = M (v / rms(v) * weight), where v are the N streams of a token, h[N, D] X, side by side. After these
// products follow the N factors 1 / rms(v) = 1 / sqrt(mean(v^2) + eps[0]). M[O, N * D] has any form (stored.h.metal);
// weight[N, D] W; made[O + N] float. If ADDS is 1, the output out[D] X of the part before is first added to the
// streams, times mixing[N], as in streams_scatter.metal, and next[N, D] X gets the result. h[GATES, N, D] may have the
// streams of several gates, each for as many rows of M in turn; of more than one no factors follow.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup has R rows of M, whose columns its threads
// share. The factor of a stream is applied last, so it is computed together with the products.
  constexpr uint THREADS = 32 * SG, PIECES = D / 8, SUMS = N * (R + 1);
  threadgroup float part[SG * SUMS];
  const uint index = thread_index_in_threadgroup;
  const uint top = threadgroup_position_in_grid.x * R;
  const device X* streams = h + (GATES > 1 ? top / (O / GATES) * N * D : 0);
  for (uint stream = 0; stream < N; stream++) {
    float acc[R + 1];  // the last one is the sum of squares
    for (uint r = 0; r <= R; r++) {
      acc[r] = 0;
    }
    for (uint piece = index; piece < PIECES; piece += THREADS) {
      const uint at = stream * PIECES + piece;
      StoredEight<BITS> held[R];
      MLX_MTL_PRAGMA_UNROLL
      for (uint r = 0; r < R; r++) {
        const uint row = metal::min(top + r, uint(O - 1));
        held[r] = stored_load<BITS, GROUP, KIND>(
            w, (const device S*)scales, (const device G*)biases, row * N * PIECES + at, O * N * PIECES);
      }
      float v[8], by[8], total = 0;
      codes_x8(streams + 8 * at, v);
      if (ADDS) {
        float added[8];
        codes_x8(out + 8 * piece, added);
        MLX_MTL_PRAGMA_UNROLL
        for (uint j = 0; j < 8; j++) {
          v[j] = float(X(metal::fma(float(mixing[stream]), added[j], v[j])));
          if (top == 0) {
            next[8 * at + j] = X(v[j]);
          }
        }
      }
      codes_x8(weight + 8 * at, by);
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < 8; j++) {
        acc[R] = metal::fma(v[j], v[j], acc[R]);
        v[j] *= by[j];
        total += v[j];
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint r = 0; r < R; r++) {
        acc[r] += stored_dot<KIND>(held[r], v, total);
      }
    }
    for (uint r = 0; r <= R; r++) {
      const float sum = lane_sum<32>(acc[r]);
      if (thread_index_in_simdgroup == 0) {
        part[simdgroup_index_in_threadgroup * SUMS + stream * (R + 1) + r] = sum;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (index < R && top + index < O) {
    float whole = 0;
    for (uint stream = 0; stream < N; stream++) {
      float sum = 0, squares = 0;
      for (uint s = 0; s < SG; s++) {
        sum += part[s * SUMS + stream * (R + 1) + index];
        squares += part[s * SUMS + stream * (R + 1) + R];
      }
      const float factor = metal::precise::rsqrt(squares / float(D) + eps[0]);
      whole = metal::fma(sum, factor, whole);
      if (GATES == 1 && top + index == 0) {
        made[O + stream] = factor;
      }
    }
    made[top + index] = whole;
  }
