// needs: codes.h.metal lane.h.metal router.h.metal
// x[T, H] = h / sqrt(mean(h^2) + eps[0]) * x_norm. logits[T, O] = the row normed with norm instead of x_norm, times w,
// transposed, in float32. If BIASED is 1, bias[O] float is added. If NORM is 0, x is h. h[T, H] X; norm[H] and
// x_norm[H] are floats; w[O, H] W.
//
// grid: (32 * SG * BLOCKS, T, 1), threadgroup (32 * SG, 1, 1). Every threadgroup computes the norm of the row. It has R
// rows of w, whose columns its threads share.
  constexpr uint THREADS = 32 * SG;
  threadgroup float squares[SG];
  threadgroup float part[SG * R];
  const uint index = thread_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup, team = simdgroup_index_in_threadgroup;
  const uint block = threadgroup_position_in_grid.x, token = threadgroup_position_in_grid.y;
  const device X* row_of_h = h + token * H;

  const float own = lane_sum<32>(router_squares<H, THREADS>(row_of_h, index));
  if (lane == 0) {
    squares[team] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0;
  for (uint s = 0; s < SG; s++) {
    total += squares[s];
  }
  const float scale_of_h = metal::precise::rsqrt(total / float(H) + eps[0]);
  router_store<NORM, H, THREADS, BLOCKS>(row_of_h, x_norm, scale_of_h, block, index, x + token * H);

  uint row[R];
  float acc[R];
  for (uint r = 0; r < R; r++) {
    row[r] = metal::min(block * R + r, uint(O - 1));
    acc[r] = 0;
  }
  for (uint i = index; i < H / 8; i += THREADS) {
    float v[8];
    router_x8<NORM>(row_of_h + 8 * i, norm + 8 * i, scale_of_h, v);
    MLX_MTL_PRAGMA_UNROLL
    for (int r = 0; r < R; r++) {
      float weight[8];
      codes_x8(w + row[r] * H + 8 * i, weight);
      MLX_MTL_PRAGMA_UNROLL
      for (int j = 0; j < 8; j++) {
        acc[r] = metal::fma(weight[j], v[j], acc[r]);
      }
    }
  }
  for (uint r = 0; r < R; r++) {
    const float sum = lane_sum<32>(acc[r]);
    if (lane == 0) {
      part[team * R + r] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index < R && block * R + index < O) {
    float sum = 0;
    for (uint s = 0; s < SG; s++) {
      sum += part[s * R + index];
    }
    logits[token * O + block * R + index] = BIASED ? sum + float(bias[block * R + index]) : sum;
  }
