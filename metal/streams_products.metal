// needs: lane.h.metal
// made[O + 1] = fn x h, and behind them the sum of h^2: of a token's streams h[W] X side by side and fn[O, W], in float.
//
// grid: (32 * SG * (O + 1), 1, 1), threadgroup (32 * SG, 1, 1). A threadgroup makes one of them.
  constexpr uint THREADS = 32 * SG;
  threadgroup float part[SG];
  const uint index = thread_index_in_threadgroup;
  const uint row = threadgroup_position_in_grid.x;
  const device float* weights = fn + size_t(metal::min(row, uint(O - 1))) * W;
  float sum = 0;
  for (uint i = index; i < W; i += THREADS) {
    const float v = float(h[i]);
    sum = metal::fma(row < O ? weights[i] : v, v, sum);
  }
  sum = lane_sum<32>(sum);
  if (thread_index_in_simdgroup == 0) {
    part[simdgroup_index_in_threadgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) {
    float total = 0;
    for (uint s = 0; s < SG; s++) {
      total += part[s];
    }
    made[row] = total;
  }
