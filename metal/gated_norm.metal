// needs: lane.h.metal
// out[N, D] = x / sqrt(mean(x^2) + eps[0]) * weight * silu(z), row by row. If SIGMOID is 1, sigmoid(z) replaces
// silu(z). x, z and out[N, D] are X; weight[D] W; length[0] = N. Each HEADS rows of z are a token's, and tokens'
// begin AT_Z values apart.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1); one simdgroup per row.
  const uint lane = thread_index_in_simdgroup;
  const uint row = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  if (row < uint(length[0])) {
    const device X* xr = x + size_t(row) * D;
    const device X* zr = z + size_t(row / HEADS) * AT_Z + row % HEADS * D;
    float squares = 0;
    for (uint i = lane; i < D; i += 32) {
      squares = metal::fma(float(xr[i]), float(xr[i]), squares);
    }
    const float scale = metal::precise::rsqrt(lane_sum<32>(squares) / float(D) + eps[0]);
    for (uint i = lane; i < D; i += 32) {
      const float gate = float(zr[i]);
      const float value = float(xr[i]) * scale * float(weight[i]);
      out[size_t(row) * D + i] = X(value * (SIGMOID ? 1.0f : gate) / (1.0f + metal::precise::exp(-gate)));
    }
  }
