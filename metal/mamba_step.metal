// needs: lane.h.metal conv.h.metal softplus.h.metal
// Mamba-2 for one token, between its input projection and the norm of its result (mixers/mamba/op.py). For each of NV
// heads, with its state S[DV, DK] and x, B and C from silu(convolution + bias):
//     dt = softplus(dt + dt_bias), from LEAST to MOST;  S = exp(-exp(A_log) * dt) * S + outer(dt * x, B)
//     y = S C + skip * x;  out = y * silu(z)
// projected X has z[NV, DV], then the C = NV DV + 2 NK DK inputs of the convolution (x[NV, DV], B[NK, DK], C[NK, DK]),
// then dt[NV]. Head h reads B and C of group h / (NV / NK). conv[TAPS - 1, C], next_conv X; taps[C, TAPS], bias[C],
// A_log, dt_bias and skip[NV] float; state, next[NV, DV, DK], out[NV, DV] float.
//
// grid: (32 * SG * NV, 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup has a head. A simdgroup has R rows of the
// head's state at a time in registers, every 32nd column to a lane. Heads of a group each compute the convolution of
// its channels.
  constexpr uint N = (DK + 31) / 32, WIDTH = NV * DV, C = WIDTH + 2 * NK * DK, SHARED = NV / NK;
  constexpr uint TURNS = (DV + R * SG - 1) / (R * SG);
  threadgroup float mixed[DV + 2 * DK];  // x, B, C
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x;
  float dt = 0, decay = 0;
  float b[N], c[N];

  _Pragma("unroll 1")
  for (uint turn = 0; turn < TURNS; turn++) {
    const uint first = (turn * SG + simdgroup_index_in_threadgroup) * R;
    uint row[R];
    float gate[R], s[R * N];
    for (uint r = 0; r < R; r++) {
      row[r] = head * DV + metal::min(first + r, uint(DV - 1));
      gate[r] = float(projected[row[r]]);
      for (uint i = 0; i < N; i++) {
        const uint column = lane + 32 * i;
        s[r * N + i] = column < DK ? state[row[r] * DK + column] : 0.0f;
      }
    }
    if (turn == 0) {  // while the first rows are being loaded
      for (uint i = thread_index_in_threadgroup; i < DV + 2 * DK; i += 32 * SG) {
        const bool is_own = i < DV;
        const uint other = is_own ? 0 : i - DV;
        const uint shared = WIDTH + (other / DK * NK + head / SHARED) * DK + other % DK;
        const uint column = is_own ? head * DV + i : shared;
        const bool keeps = is_own || head % SHARED == 0;
        mixed[i] = convolved<TAPS>(conv, projected + WIDTH, taps, C, column, bias[column], keeps, next_conv);
      }
      dt = softplus(float(projected[WIDTH + C + head]) + dt_bias[head]);
      dt = dt < LEAST ? LEAST : dt > MOST ? MOST : dt;
      decay = metal::precise::exp(-metal::precise::exp(A_log[head]) * dt);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = 0; i < N; i++) {
        const uint column = lane + 32 * i;
        b[i] = column < DK ? mixed[DV + column] : 0.0f;
        c[i] = column < DK ? mixed[DV + DK + column] : 0.0f;
      }
    }
    for (uint r = 0; r < R; r++) {
      const float x = mixed[row[r] - head * DV];
      float sum = 0;
      for (uint i = 0; i < N; i++) {
        s[r * N + i] = metal::fma(dt * x, b[i], decay * s[r * N + i]);
        sum = metal::fma(s[r * N + i], c[i], sum);
      }
      sum = metal::fma(skip[head], x, lane_sum<32>(sum));
      if (lane == 0 && first + r < DV) {
        out[row[r]] = sum * gate[r] / (1.0f + metal::precise::exp(-gate[r]));
      }
    }
    for (uint r = 0; r < R; r++) {
      for (uint i = 0; i < N; i++) {
        const uint column = lane + 32 * i;
        if (first + r < DV && column < DK) {
          next[row[r] * DK + column] = s[r * N + i];
        }
      }
    }
  }
