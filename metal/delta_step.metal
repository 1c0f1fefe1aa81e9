// needs: lane.h.metal conv.h.metal decay.h.metal steps.h.metal
// A gated delta layer for STEPS tokens of a sequence, between its projections; each has the bits that it has alone. For
// each value head it computes the convolution of its channels (conv_silu.metal), a step of the delta rule
// (gated_delta.metal) and the gated norm (gated_norm.metal), each with the same rounding as in its own kernel. With C =
// 2 NK DK + NV DV: qkv[C], conv[TAPS - 1, C], next_conv X; z, out[NV, DV] X; a, b[NV] X; A_log, dt_bias[NV] float;
// taps[C, TAPS] W; weight[DV] V; state, next[NV, DV, DK] float. If EACH is 1, every column of the state has its own
// decay: a[NV, DK] X, dt_bias[NV, DK] float, and FLOOR is the least logarithm (decay.h.metal). AT_QKV is the number of
// values from a token's qkv to that of the next token, likewise AT_Z, AT_B, AT_A and AT_OUT. Of several tokens each has
// its own next_conv and next, which are arrays of arrays.
//
// grid: (32 * SG * NV, 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup has a head. A simdgroup has R rows of the
// head's state at a time in registers, DK / 32 columns to a lane. Value heads that share a key head each compute the
// convolution of its channels.
  constexpr uint N = DK / 32, C = 2 * NK * DK + NV * DV, SHARED = NV / NK;
  constexpr uint TURNS = (DV + R * SG - 1) / (R * SG);
  threadgroup float mixed[2 * DK + DV];  // q, k, v
  threadgroup float outs[DV];
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x;

  _Pragma("unroll 1")
  for (uint step = 0; step < STEPS; step++) {
    const device float* before = step == 0 ? state : (const device float*)of_step(next, step - 1);
    device float* after = of_step(next, step);
    device X* next_inputs = of_step(next_conv, step);
    float beta = 0;
    float q[N], k[N], decay[N];

    _Pragma("unroll 1")
    for (uint turn = 0; turn < TURNS; turn++) {
      const uint first = (turn * SG + simdgroup_index_in_threadgroup) * R;
      uint row[R];
      float s[R * N];
      for (uint r = 0; r < R; r++) {
        row[r] = metal::min(first + r, uint(DV - 1));
        for (uint i = 0; i < N; i++) {
          s[r * N + i] = before[(head * DV + row[r]) * DK + lane * N + i];
        }
      }
      if (turn == 0) {  // while the first rows are being loaded
        for (uint i = thread_index_in_threadgroup; i < 2 * DK + DV; i += 32 * SG) {
          const bool is_value = i >= 2 * DK;
          const uint key = (i / DK * NK + head / SHARED) * DK + i % DK;
          const uint column = is_value ? 2 * NK * DK + head * DV + i - 2 * DK : key;
          const bool keeps = is_value || head % SHARED == 0;
          mixed[i] = float(X(convolved<TAPS>(conv, qkv, taps, C, column, 0.0f, keeps, next_inputs, step, AT_QKV)));
        }
        for (uint i = 0; i < N; i++) {
          const uint own = EACH ? head * DK + lane * N + i : head;
          const float rate = metal::precise::exp(A_log[head]);
          decay[i] = delta_decay(float(a[step * AT_A + own]) + dt_bias[own], rate, FLOOR);
        }
        beta = 1.0f / (1.0f + metal::precise::exp(-float(b[step * AT_B + head])));
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float qq = 0, kk = 0;
        for (uint i = 0; i < N; i++) {
          q[i] = mixed[lane * N + i];
          k[i] = mixed[DK + lane * N + i];
          qq = metal::fma(q[i], q[i], qq);
          kk = metal::fma(k[i], k[i], kk);
        }
        const float q_scale = metal::precise::rsqrt(lane_sum<32>(qq) + 1e-6f) * metal::precise::rsqrt(float(DK));
        const float k_scale = metal::precise::rsqrt(lane_sum<32>(kk) + 1e-6f);
        for (uint i = 0; i < N; i++) {
          q[i] *= q_scale;
          k[i] *= k_scale;
        }
      }
      for (uint r = 0; r < R; r++) {
        float memory = 0;
        for (uint i = 0; i < N; i++) {
          s[r * N + i] *= decay[i];
          memory = metal::fma(s[r * N + i], k[i], memory);
        }
        const float learnt = (mixed[2 * DK + row[r]] - lane_sum<32>(memory)) * beta;
        float sum = 0;
        for (uint i = 0; i < N; i++) {
          s[r * N + i] = metal::fma(learnt, k[i], s[r * N + i]);
          sum = metal::fma(s[r * N + i], q[i], sum);
        }
        sum = lane_sum<32>(sum);
        if (lane == 0 && first + r < DV) {
          outs[first + r] = float(X(sum));
        }
      }
      for (uint r = 0; r < R; r++) {
        if (first + r < DV) {
          for (uint i = 0; i < N; i++) {
            after[(head * DV + row[r]) * DK + lane * N + i] = s[r * N + i];
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float squares = 0;
    for (uint i = lane; i < DV; i += 32) {
      squares = metal::fma(outs[i], outs[i], squares);
    }
    const float scale = metal::precise::rsqrt(lane_sum<32>(squares) / float(DV) + eps[0]);
    for (uint i = thread_index_in_threadgroup; i < DV; i += 32 * SG) {
      const float gate = float(z[step * AT_Z + head * DV + i]);
      const float value = outs[i] * scale * float(weight[i]);
      out[step * AT_OUT + head * DV + i] = X(value * (SIGMOID ? 1.0f : gate) / (1.0f + metal::precise::exp(-gate)));
    }
    if (step + 1 < STEPS) {  // in which rows beyond the last read another thread's; their results are dropped
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    }
  }
