// needs: lane.h.metal seen.h.metal stored.h.metal
// out[H, V] X = each head's matrix of values [V, N] times the sum of the pieces of latent_attend.metal, each weighted
// by its share of the sum of all exponentials. The matrix has codes w, scales and biases S (stored.h.metal).
// positions[0] is the token's own position; WINDOW, TOP, RATIO and OWN give the number of positions that it sees
// (seen.h.metal). If SINKS is 1, exp(sinks[H]) is part of the sum.
//
// grid: (T * H, 1, 1), threadgroup (T, 1, 1). A thread first has a column of the latents. Then a simdgroup has EACH
// rows of the matrix at a time.
  constexpr uint SIMDGROUPS = T / 32, ROWS = (V + SIMDGROUPS - 1) / SIMDGROUPS, EACH = ROWS < 8 ? ROWS : 8, AHEAD = 8;
  constexpr uint TURNS = (N / 8 + 31) / 32;
  alignas(16) threadgroup float mixed[N];
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x;
  const uint offset = uint(positions[0]);
  const uint pieces = (seen_count<TOP, RATIO, OWN>(offset) - first_seen<WINDOW, 0>(offset) - 1) / P + 1;
  const float sink = SINKS ? float(sinks[head]) : 0.0f;
  float largest = SINKS ? sink : -3.4e38f;
  for (uint i = lane; i < pieces; i += 32) {
    const float top = stats[(i * PIECE + head) * 2];
    largest = top > largest ? top : largest;
  }
  largest = simd_max(largest);
  for (uint column = thread_index_in_threadgroup; column < N; column += T) {
    float sum = 0, total = 0;
    for (uint i = 0; i < pieces; i += AHEAD) {
      float tops[AHEAD], sums[AHEAD], found[AHEAD];
      MLX_MTL_PRAGMA_UNROLL
      for (uint a = 0; a < AHEAD; a++) {
        const uint at = metal::min(i + a, pieces - 1) * PIECE + head;
        tops[a] = stats[2 * at];
        sums[a] = stats[2 * at + 1];
        found[a] = parts[at * N + column];
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint a = 0; a < AHEAD; a++) {
        const float share = i + a < pieces ? metal::fast::exp(tops[a] - largest) : 0.0f;
        total = metal::fma(share, sums[a], total);
        sum = metal::fma(share, found[a], sum);
      }
    }
    if (SINKS) {
      total += metal::fast::exp(sink - largest);
    }
    mixed[column] = sum / total;
  }
  _Pragma("unroll 1")
  for (uint done = 0; done < ROWS; done += EACH) {
    const uint top = done * SIMDGROUPS + simdgroup_index_in_threadgroup;
    // Loaded before the barrier, so that all loads are in flight together.
    StoredEight<BITS> held[EACH * TURNS];
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH * TURNS; e++) {
      const uint row = metal::min(top + e / TURNS * SIMDGROUPS, uint(V - 1));
      const uint piece = (head * V + row) * (N / 8) + metal::min(e % TURNS * 32 + lane, uint(N / 8 - 1));
      held[e] = stored_load<BITS, GROUP, KIND>(w, (const device S*)scales, (const device G*)biases, piece, uint(H * V * N / 8));
    }
    if (done == 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    float acc[EACH];
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH; e++) {
      acc[e] = 0;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint t = 0; t < TURNS; t++) {
      const uint i = t * 32 + lane;
      float values[8], total = 0;
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < 8; j++) {
        values[j] = i < N / 8 ? mixed[8 * i + j] : 0.0f;
        total += values[j];
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint e = 0; e < EACH; e++) {
        acc[e] += stored_dot<KIND>(held[e * TURNS + t], values, total);
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH; e++) {
      const uint row = top + e * SIMDGROUPS;
      const float sum = lane_sum<32>(acc[e]);
      if (lane == 0 && row < V) {
        out[head * V + row] = X(sum);
      }
    }
  }
