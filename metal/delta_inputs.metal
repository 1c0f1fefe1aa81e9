// needs: lane.h.metal
// What the steps of the gated delta rule read, for all T tokens at once (gated_delta_tokens.metal says how they use it).
// qkv[T, C] X holds q of all NK key heads, k, then what is not read here; a, b[T, NV] X; A_log, dt_bias[NV] float;
// length[0] = T. qk[T, 2, NK, DK] float: q / sqrt(DK), then k, each divided by its length over the head.
// gates[T, 2, NV] float: decay = exp(-exp(A_log) * softplus(a + dt_bias)), then beta = sigmoid(b).
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1); one simdgroup per token and key head.
  constexpr uint N = DK / 32, SHARED = NV / NK;
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
    const float q_scale = metal::rsqrt(lane_sum<32>(qq) + 1e-6f) * metal::rsqrt(float(DK));
    const float k_scale = metal::rsqrt(lane_sum<32>(kk) + 1e-6f);
    for (uint i = 0; i < N; i++) {
      qk[(2 * t * NK + head) * DK + lane + 32 * i] = q[i] * q_scale;
      qk[((2 * t + 1) * NK + head) * DK + lane + 32 * i] = k[i] * k_scale;
    }
    for (uint i = lane; i < SHARED; i += 32) {
      const uint h = head * SHARED + i;
      const float u = float(a[t * NV + h]) + dt_bias[h];
      const float softplus = (u > 0.0f ? u : 0.0f) + metal::log(1.0f + metal::exp(u > 0.0f ? -u : u));
      gates[2 * t * NV + h] = metal::exp(-metal::exp(A_log[h]) * softplus);
      gates[(2 * t + 1) * NV + h] = 1.0f / (1.0f + metal::exp(-float(b[t * NV + h])));
    }
  }
