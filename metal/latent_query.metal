// needs: codes.h.metal {form}.h.metal input.h.metal lane.h.metal rotate.h.metal stored.h.metal
// The queries and the key of one token's latent attention (MLA). q[H, NOPE + R] = w_q times n(x[COLS]) * q_norm[COLS]
// W, where n divides by the root mean square (+ eps[0]). If PRECOMPUTED is 1, q = x. query[H, N + R] float has for each
// head the first NOPE values of q times the head's matrix of keys, and then the rotated rest of q, both times scale[0].
// token[N + R] has n of the first N values of kv[N + R] times kv_norm[N] W, and then the rotated rest. The rotation is
// by angles positions[3] / periods[R / 2], times magnitude[0]. If INTERLEAVED is 1, neighbours form a pair, otherwise i
// and i + R / 2. x, kv and token are X.
//
// w_q[H, NOPE + R, COLS] is stored as in codes.h.metal. A head's matrix of keys is [NOPE, N], or [N, NOPE] if
// TRANSPOSED is 1, with codes, scales and biases (stored.h.metal).
//
// grid: (T * (H + 1), 1, 1), threadgroup (T, 1, 1): one threadgroup per head, and the last one for kv. L lanes share
// rows of q, EACH in turn. Then a thread has eight columns of its team's rows of the keys, or whole columns.
  constexpr uint HEIGHT = NOPE + R, ROW = N + R, ABREAST = T / L, EACH = (HEIGHT + ABREAST - 1) / ABREAST;
  constexpr uint GROUPS = Q_CHUNK < Q_GROUP ? 1 : Q_CHUNK / Q_GROUP;
  constexpr uint ACROSS = N / 8, TEAMS = T / ACROSS, AHEAD = 8;
  threadgroup float whole[HEIGHT];  // of q
  threadgroup float part[TEAMS * N];
  const uint tid = thread_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x;
  const bool is_key = head == H;
  float squares = 0;
  if (is_key) {
    for (uint i = lane; i < N; i += 32) {
      squares = metal::fma(float(kv[i]), float(kv[i]), squares);
    }
    const float factor = metal::precise::rsqrt(lane_sum<32>(squares) / float(N) + eps[0]);
    for (uint i = tid; i < N; i += T) {
      token[i] = X(float(kv[i]) * factor * float(kv_norm[i]));
    }
  } else if (PRECOMPUTED) {
    for (uint i = tid; i < HEIGHT; i += T) {
      whole[i] = float(x[head * HEIGHT + i]);
    }
  } else {
    uint row[EACH];
    float acc[EACH];
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH; e++) {
      row[e] = head * HEIGHT + metal::min(tid / L + e * ABREAST, HEIGHT - 1);
      acc[e] = 0;
    }
    const input_row<1, X, W> input = {x, q_norm, 0, &squares};
    for (uint chunk = tid % L; chunk < COLS / Q_CHUNK; chunk += L) {
      uint code[EACH * (Q_CHUNK * Q_BITS / 32)];
      float scales_of[EACH * GROUPS], biases_of[EACH * GROUPS];
      codes_load<EACH, Q_BITS, Q_GROUP, Q_CHUNK, COLS>(
          w_q, (const device Q_S*)q_scales, (const device Q_G*)q_biases, row, chunk, code, scales_of, biases_of);
      codes_dot<EACH, Q_BITS, Q_GROUP, Q_CHUNK>(code, scales_of, biases_of, input + Q_CHUNK * chunk, acc);
    }
    const float factor = metal::precise::rsqrt(lane_sum<L>(squares) / float(COLS) + eps[0]);
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH; e++) {
      const float total = lane_sum<L>(acc[e]);
      if (tid % L == 0 && tid / L + e * ABREAST < HEIGHT) {
        whole[tid / L + e * ABREAST] = total * factor;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = tid; i < R / 2; i += T) {
    const uint first = INTERLEAVED ? 2 * i : i;
    const uint second = INTERLEAVED ? first + 1 : i + R / 2;
    const float angle = rotate_angle(float(positions[3]), float(periods[i]));
    const float cosine = magnitude[0] * metal::fast::cos(angle), sine = magnitude[0] * metal::fast::sin(angle);
    if (is_key) {
      const float a = float(kv[N + first]), b = float(kv[N + second]);
      token[N + first] = X(rotate_first(a, b, cosine, sine));
      token[N + second] = X(rotate_second(a, b, cosine, sine));
    } else {
      const float a = whole[NOPE + first], b = whole[NOPE + second];
      query[head * ROW + N + first] = rotate_first(a, b, cosine, sine) * scale[0];
      query[head * ROW + N + second] = rotate_second(a, b, cosine, sine) * scale[0];
    }
  }
  if (is_key) {
    return;
  }
  constexpr uint PIECES = H * NOPE * N / 8;
  if (TRANSPOSED) {
    for (uint left = 0; left < N; left += T) {
      const uint column = metal::min(left + tid, uint(N - 1));
      float sum = 0;
      for (uint top = 0; top < NOPE / 8; top += AHEAD) {
        StoredEight<BITS> held[AHEAD];
        MLX_MTL_PRAGMA_UNROLL
        for (uint a = 0; a < AHEAD; a++) {
          const uint piece = (head * N + column) * (NOPE / 8) + metal::min(top + a, uint(NOPE / 8 - 1));
          held[a] = stored_load<BITS, GROUP, KIND>(w, (const device S*)scales, (const device G*)biases, piece, PIECES);
        }
        MLX_MTL_PRAGMA_UNROLL
        for (uint a = 0; a < AHEAD; a++) {
          float values[8], total = 0;
          MLX_MTL_PRAGMA_UNROLL
          for (uint j = 0; j < 8; j++) {
            values[j] = top + a < NOPE / 8 ? whole[8 * (top + a) + j] : 0.0f;
            total += values[j];
          }
          sum += stored_dot<KIND>(held[a], values, total);
        }
      }
      if (left + tid < N) {
        query[head * ROW + column] = sum * scale[0];
      }
    }
    return;
  }
  const uint team = tid / ACROSS, across = tid % ACROSS;
  float acc[8];
  for (uint j = 0; j < 8; j++) {
    acc[j] = 0;
  }
  for (uint top = 0; top < NOPE; top += AHEAD * TEAMS) {
    StoredEight<BITS> held[AHEAD];
    MLX_MTL_PRAGMA_UNROLL
    for (uint a = 0; a < AHEAD; a++) {
      const uint row = metal::min(top + a * TEAMS + team, uint(NOPE - 1));
      held[a] = stored_load<BITS, GROUP, KIND>(w, (const device S*)scales, (const device G*)biases, (head * NOPE + row) * ACROSS + across, PIECES);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint a = 0; a < AHEAD; a++) {
      float v[8];
      const uint row = top + a * TEAMS + team;
      const float value = row < NOPE ? whole[row] : 0.0f;
      stored_weights<KIND>(held[a], v);
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < 8; j++) {
        acc[j] = metal::fma(value, v[j], acc[j]);
      }
    }
  }
  for (uint j = 0; j < 8 && team < TEAMS; j++) {
    part[team * N + across * 8 + j] = acc[j];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint column = tid; column < N; column += T) {
    float sum = 0;
    for (uint i = 0; i < TEAMS; i++) {
      sum += part[i * N + column];
    }
    query[head * ROW + column] = sum * scale[0];
  }
