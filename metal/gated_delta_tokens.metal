// The gated delta rule over T steps, for many of them. For each value head, with its state S[DV, DK]:
//     learnt = beta * (v - decay * S k);  out = decay * S q + learnt * (q k);  S = decay * S + outer(learnt, k)
// Both products read the state before the step, so a step waits for one lane sum. qkv[T, C] X holds v of all NV value
// heads in its last columns; qk[T, 2, NK, DK] float is q and k of all key heads, and gates[T, 3, NV] float decay, beta
// and the product of q and k, as delta_inputs.metal writes them; value head h reads key head h / (NV / NK).
// state, next[NV, DV, DK] float; out[T, NV, DV] X; length[0] = T.
//
// grid: (32 * SG * blocks, NV, 1), threadgroup (32 * SG, 1, 1). L lanes share a row of a head's state, so a simdgroup
// holds 32 / L rows abreast and R such sets of rows. What DEPTH steps read is in registers: step t ends by loading what
// step t + DEPTH reads in place of its own.
  constexpr uint N = DK / L, ABREAST = 32 / L, C = 2 * NK * DK + NV * DV;
  const uint lane = thread_index_in_simdgroup % L;
  const uint head = threadgroup_position_in_grid.y;
  const uint block = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint first = block * (R * ABREAST) + thread_index_in_simdgroup / L;
  const uint steps = uint(length[0]);

  const device float* queries = qk + head / (NV / NK) * DK + 4 * lane;
  const device X* values = qkv + 2 * NK * DK + head * DV;

  uint row[R];
  float s[R * N];
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(DV - 1));
    delta_load<N, L>(state + (head * DV + row[r]) * DK + 4 * lane, s + r * N);
  }
  float q[DEPTH * N], k[DEPTH * N];
  X v[DEPTH * R];  // made floats where they are used: here that would wait for the load
  float decay[DEPTH], beta[DEPTH], both[DEPTH];
  // The first round only loads.
  for (uint round = 0; round < steps + DEPTH; round += DEPTH) {
    MLX_MTL_PRAGMA_UNROLL
    for (uint d = 0; d < DEPTH; d++) {
      if (round >= DEPTH && round - DEPTH + d < steps) {
        const size_t t = round - DEPTH + d;
        float sums[2 * R];
        MLX_MTL_PRAGMA_UNROLL
        for (uint r = 0; r < R; r++) {
          sums[r] = delta_dot<N>(s + r * N, k + d * N);
          sums[R + r] = delta_dot<N>(s + r * N, q + d * N);
        }
        delta_sums<2 * R, L>(sums);
        MLX_MTL_PRAGMA_UNROLL
        for (uint r = 0; r < R; r++) {
          const float learnt = beta[d] * metal::fma(-decay[d], sums[r], float(v[d * R + r]));
          MLX_MTL_PRAGMA_UNROLL
          for (uint i = 0; i < N; i++) {
            s[r * N + i] = metal::fma(learnt, k[d * N + i], decay[d] * s[r * N + i]);
          }
          if (lane == 0 && first + r * ABREAST < DV) {
            out[(t * NV + head) * DV + row[r]] = X(metal::fma(learnt, both[d], decay[d] * sums[R + r]));
          }
        }
      }
      const size_t later = metal::min(round + d, steps - 1);
      delta_load<N, L>(queries + later * (2 * NK * DK), q + d * N);
      delta_load<N, L>(queries + later * (2 * NK * DK) + NK * DK, k + d * N);
      decay[d] = gates[3 * later * NV + head];
      beta[d] = gates[(3 * later + 1) * NV + head];
      both[d] = gates[(3 * later + 2) * NV + head];
      MLX_MTL_PRAGMA_UNROLL
      for (uint r = 0; r < R; r++) {
        v[d * R + r] = values[later * C + row[r]];
      }
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    if (first + r * ABREAST < DV) {
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < N; i++) {
        next[(head * DV + row[r]) * DK + 4 * lane + i / 4 * (4 * L) + i % 4] = s[r * N + i];
      }
    }
  }
