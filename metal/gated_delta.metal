// needs: lane.h.metal decay.h.metal
// The gated delta rule over T steps. For each value head, with its state S[DV, DK]:
//     S *= decay;  S += outer((v - S k) * beta, k);  out = S q
// decay = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b). q and k are divided by their length over the
// head, q also by sqrt(DK). qkv[T, C] X has q of all NK key heads, then k, then v of all NV value heads; value head h
// reads key head h / (NV / NK). a, b[T, NV] X; A_log, dt_bias[NV] float; state, next[NV, DV, DK] float; out[T, NV, DV]
// X; length[0] = T. If EACH is 1, every column of the state has its own decay: a[T, NV, DK] X, dt_bias[NV, DK] float,
// and FLOOR is the least logarithm (decay.h.metal).
//
// grid: (32 * SG * blocks, NV, 1), threadgroup (32 * SG, 1, 1). A simdgroup keeps R rows of one head's state in
// registers, DK / 32 columns to a lane.
  constexpr uint N = DK / 32, C = 2 * NK * DK + NV * DV;
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.y;
  const uint first = (threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup) * R;
  const uint steps = uint(length[0]);

  uint row[R];
  float s[R * N];
  for (uint r = 0; r < R; r++) {
    row[r] = metal::min(first + r, uint(DV - 1));
    for (uint i = 0; i < N; i++) {
      s[r * N + i] = state[(head * DV + row[r]) * DK + lane * N + i];
    }
  }
  const float rate = metal::precise::exp(A_log[head]);
  float shift[N];
  for (uint i = 0; i < N; i++) {
    shift[i] = dt_bias[EACH ? head * DK + lane * N + i : head];
  }
  for (uint t = 0; t < steps; t++) {
    const device X* qt = qkv + size_t(t) * C + head / (NV / NK) * DK + lane * N;
    const device X* kt = qt + NK * DK;
    const device X* vt = qkv + size_t(t) * C + 2 * NK * DK + head * DV;
    float q[N], k[N], decay[N];
    float qq = 0, kk = 0;
    for (uint i = 0; i < N; i++) {
      q[i] = float(qt[i]);
      k[i] = float(kt[i]);
      qq = metal::fma(q[i], q[i], qq);
      kk = metal::fma(k[i], k[i], kk);
    }
    const float q_scale = metal::precise::rsqrt(lane_sum<32>(qq) + 1e-6f) * metal::precise::rsqrt(float(DK));
    const float k_scale = metal::precise::rsqrt(lane_sum<32>(kk) + 1e-6f);
    const float beta = 1.0f / (1.0f + metal::precise::exp(-float(b[t * NV + head])));
    for (uint i = 0; i < N; i++) {
      q[i] *= q_scale;
      k[i] *= k_scale;
      const float u = float(a[EACH ? (size_t(t) * NV + head) * DK + lane * N + i : size_t(t) * NV + head]) + shift[i];
      decay[i] = delta_decay(u, rate, FLOOR);
    }
    for (uint r = 0; r < R; r++) {
      float memory = 0;
      for (uint i = 0; i < N; i++) {
        s[r * N + i] *= decay[i];
        memory = metal::fma(s[r * N + i], k[i], memory);
      }
      const float learnt = (float(vt[row[r]]) - lane_sum<32>(memory)) * beta;
      float sum = 0;
      for (uint i = 0; i < N; i++) {
        s[r * N + i] = metal::fma(learnt, k[i], s[r * N + i]);
        sum = metal::fma(s[r * N + i], q[i], sum);
      }
      sum = lane_sum<32>(sum);
      if (lane == 0 && first + r < DV) {
        out[(size_t(t) * NV + head) * DV + row[r]] = X(sum);
      }
    }
  }
  for (uint r = 0; r < R; r++) {
    if (first + r < DV) {
      for (uint i = 0; i < N; i++) {
        next[(head * DV + row[r]) * DK + lane * N + i] = s[r * N + i];
      }
    }
  }
