// needs: lane.h.metal decay.h.metal
// The inputs of the gated delta rule's steps, for all T tokens at once (used by gated_delta_tokens.metal). qkv[T, C] X
// has q of all NK key heads, then k, then values that this kernel does not read; a, b[T, NV] X; A_log, dt_bias[NV]
// float; length[0] = T. qk[T, 2, NK, DK] float: q / sqrt(DK), then k, each divided by its length over the head.
// gates[T, 2, NV] float: decay = exp(-exp(A_log) * softplus(a + dt_bias)), then beta = sigmoid(b). If EACH is 1, every
// channel of NV = NK keys has its own decay: a[T, NV, DK] X, dt_bias[NV, DK] float; then qk[T, 3, NK, DK] has the
// decays after k, and the decays in gates are 1. Rows of a and b begin AT_A and AT_B values apart.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1); one simdgroup per token and key head.
  constexpr uint N = DK / 32, SHARED = NV / NK, VECTORS = EACH ? 3 : 2;
  const uint lane = thread_index_in_simdgroup;
  const uint unit = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint head = unit % NK;
  const size_t t = unit / NK;
  if (unit / NK < uint(length[0])) {
    const device X* qt = qkv + t * C + head * DK;
    float q[N], k[N];
    float qq = 0, kk = 0;
    for (uint i = 0; i < N; i++) {
      q[i] = float(qt[lane + 32 * i]);
      k[i] = float(qt[NK * DK + lane + 32 * i]);
      qq = metal::fma(q[i], q[i], qq);
      kk = metal::fma(k[i], k[i], kk);
    }
    const float q_scale = metal::precise::rsqrt(lane_sum<32>(qq) + 1e-6f) * metal::precise::rsqrt(float(DK));
    const float k_scale = metal::precise::rsqrt(lane_sum<32>(kk) + 1e-6f);
    for (uint i = 0; i < N; i++) {
      qk[(VECTORS * t * NK + head) * DK + lane + 32 * i] = q[i] * q_scale;
      qk[((VECTORS * t + 1) * NK + head) * DK + lane + 32 * i] = k[i] * k_scale;
      if (EACH) {
        const uint own = head * DK + lane + 32 * i;
        const float u = float(a[t * AT_A + own]) + dt_bias[own];
        qk[(VECTORS * t + 2) * NK * DK + own] = delta_decay(u, metal::precise::exp(A_log[head]), FLOOR);
      }
    }
    for (uint i = lane; i < SHARED; i += 32) {
      const uint h = head * SHARED + i;
      const float u = float(a[t * AT_A + h]) + dt_bias[h];
      gates[2 * t * NV + h] = EACH ? 1.0f : delta_decay(u, metal::precise::exp(A_log[h]), FLOOR);
      gates[(2 * t + 1) * NV + h] = 1.0f / (1.0f + metal::precise::exp(-float(b[t * AT_B + h])));
    }
  }
