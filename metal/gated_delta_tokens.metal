// needs: delta.h.metal
// The gated delta rule over T steps, for many steps. For each value head, with its state S[DV, DK]:
//     learnt = beta * (v - decay * S k);  S = decay * S + outer(learnt, k);  out = S q
// The last columns of qkv[T, C] X are v of all NV value heads. qk[T, 2, NK, DK] float has q and k of all key heads, and
// gates[T, 2, NV] float has decay and beta, as delta_inputs.metal writes them. Value head h reads key head h / (NV /
// NK). If EACH is 1, qk[T, 3, NK, DK] has the decays of the state's columns after k; S is multiplied by them first, and
// decay in gates is 1. state, next[NV, DV, DK] float; out[T, NV, DV] X; length[0] = T.
//
// grid: (32 * SG * blocks, NV, 1), threadgroup (32 * SG, 1, 1). L lanes share a row of a head's state, so a simdgroup
// holds 32 / L rows at a time, and R such sets of rows. A threadgroup computes B steps from threadgroup memory while it
// loads the inputs of the next B steps. If each step loaded its own inputs, even early, the threadgroup would wait for
// all loads together (results.tsv). A step past the last one does not change the state. B and L are powers of two.
  constexpr uint M = DK / 4 / L, ABREAST = 32 / L, ROWS = SG * R * ABREAST, THREADS = 32 * SG;
  constexpr uint VECTORS = EACH ? 3 : 2, PIECES = B * VECTORS * DK / 4, P = (PIECES + THREADS - 1) / THREADS;
  constexpr uint NOTES = B * ROWS, V = (NOTES + THREADS - 1) / THREADS;
  constexpr uint C = 2 * NK * DK + NV * DV, OUTS = B > L ? B / L : 1;
  threadgroup float4 pieces[2 * PIECES];  // of q, k and decays
  threadgroup float4 notes[2 * NOTES];    // beta * v, beta * decay and decay, for each step and row
  const uint lane = thread_index_in_simdgroup % L;
  const uint tid = thread_index_in_threadgroup;
  const uint head = threadgroup_position_in_grid.y;
  const uint top = threadgroup_position_in_grid.x * ROWS;
  const uint first = simdgroup_index_in_threadgroup * (R * ABREAST) + thread_index_in_simdgroup / L;
  const uint steps = uint(length[0]);

  float4 s[R * M];
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint row = metal::min(top + first + r * ABREAST, uint(DV - 1));
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < M; i++) {
      s[r * M + i] = *(const device float4*)(state + (head * DV + row) * DK + 4 * (lane + i * L));
    }
  }
  // The first round only loads.
  for (uint from = 0; from < steps + B; from += B) {
    const uint side = from / B % 2;
    float4 piece[P];
    X v[V];
    float decay[V], beta[V];
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < P; i++) {
      const uint at = metal::min(tid + i * THREADS, PIECES - 1), part = at / (DK / 4);
      const size_t t = metal::min(from + part / VECTORS, steps - 1);
      const size_t vector = (VECTORS * t + part % VECTORS) * NK + head / (NV / NK);
      piece[i] = *(const device float4*)(qk + vector * DK + 4 * (at % (DK / 4)));
      if (part % VECTORS == 2 && from + part / VECTORS >= steps) {
        piece[i].x = piece[i].y = piece[i].z = piece[i].w = 1.0f;
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < V; i++) {
      const uint at = metal::min(tid + i * THREADS, NOTES - 1);
      const size_t t = metal::min(from + at / ROWS, steps - 1);
      v[i] = qkv[t * C + 2 * NK * DK + head * DV + metal::min(top + at % ROWS, uint(DV - 1))];
      decay[i] = gates[2 * t * NV + head];
      beta[i] = gates[(2 * t + 1) * NV + head];
    }
    if (from > 0) {
      const uint piece_at = (1 - side) * PIECES + lane;
      const uint note_at = (1 - side) * NOTES + first;
      float o[R * B];
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < B; j++) {
        float4 q[M], k[M], note[R];
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < M; i++) {
          q[i] = pieces[piece_at + VECTORS * j * (DK / 4) + i * L];
          k[i] = pieces[piece_at + (VECTORS * j + 1) * (DK / 4) + i * L];
          if (EACH) {
            const float4 own = pieces[piece_at + (VECTORS * j + 2) * (DK / 4) + i * L];
            MLX_MTL_PRAGMA_UNROLL
            for (uint r = 0; r < R; r++) {
              s[r * M + i].x *= own.x;
              s[r * M + i].y *= own.y;
              s[r * M + i].z *= own.z;
              s[r * M + i].w *= own.w;
            }
          }
        }
        float sums[R];
        MLX_MTL_PRAGMA_UNROLL
        for (uint r = 0; r < R; r++) {
          note[r] = notes[note_at + j * ROWS + r * ABREAST];
          sums[r] = delta_dot<M>(s + r * M, k);
        }
        delta_sums<R, L>(sums);
        MLX_MTL_PRAGMA_UNROLL
        for (uint r = 0; r < R; r++) {
          const float learnt = metal::fma(-note[r].y, sums[r], note[r].x);
          MLX_MTL_PRAGMA_UNROLL
          for (uint i = 0; i < M; i++) {
            s[r * M + i] = delta_learn(s[r * M + i], note[r].z, learnt, k[i]);
          }
          o[r * B + j] = delta_dot<M>(s + r * M, q);
        }
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint r = 0; r < R; r++) {
        delta_shares<B, L>(o + r * B, lane);
        const uint row = top + first + r * ABREAST;
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < OUTS; i++) {
          const size_t t = from - B + i * L + lane;
          if (lane < B && t < steps && row < DV) {
            out[(t * NV + head) * DV + row] = X(o[r * B + i]);
          }
        }
      }
    }
    // The last reads of this side were before the last barrier.
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < P; i++) {
      if (tid + i * THREADS < PIECES) {
        pieces[side * PIECES + tid + i * THREADS] = piece[i];
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < V; i++) {
      const uint at = tid + i * THREADS;
      if (at < NOTES) {
        const bool taken = from + at / ROWS < steps;
        float4 note;
        note.x = taken ? beta[i] * float(v[i]) : 0.0f;
        note.y = taken ? beta[i] * decay[i] : 0.0f;
        note.z = taken ? decay[i] : 1.0f;
        note.w = 0;
        notes[side * NOTES + at] = note;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < R; r++) {
    const uint row = top + first + r * ABREAST;
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < M; i++) {
      if (row < DV) {
        *(device float4*)(next + (head * DV + row) * DK + 4 * (lane + i * L)) = s[r * M + i];
      }
    }
  }
