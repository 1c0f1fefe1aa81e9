// needs: lane.h.metal
// out[T, G, D] X = x / sqrt(mean(x^2) + eps[0]) * weight. The mean is that of the D values of a group. x[T, G, D] and
// weight[G, D] are floats of any dtype.
//
// grid: (32 * SG * G, T, 1), threadgroup (32 * SG, 1, 1): one threadgroup per group of a token.
  threadgroup float partial[SG];
  const uint lane = thread_index_in_simdgroup;
  const uint group = threadgroup_position_in_grid.x;
  const size_t first = (size_t(threadgroup_position_in_grid.y) * G + group) * D;
  float squares = 0;
  for (uint i = thread_index_in_threadgroup; i < D; i += 32 * SG) {
    squares = metal::fma(float(x[first + i]), float(x[first + i]), squares);
  }
  squares = lane_sum<32>(squares);
  if (lane == 0) {
    partial[simdgroup_index_in_threadgroup] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  squares = lane_sum<32>(lane < SG ? partial[lane] : 0.0f);
  const float scale = metal::precise::rsqrt(squares / float(D) + eps[0]);
  for (uint i = thread_index_in_threadgroup; i < D; i += 32 * SG) {
    out[first + i] = X(float(x[first + i]) * scale * float(weight[group * D + i]));
  }
