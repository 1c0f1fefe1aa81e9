// needs: codes.h.metal {form}.h.metal lane.h.metal router.h.metal
// x[T, H] = h / sqrt(mean(h^2) + eps[0]) * x_norm. logits[T, O] = the row normed with norm instead of x_norm, times
// dequantised w, transposed, in float32. If BIASED is 1, bias[O] float is added. If NORM is 0, x is h. h[T, H] X;
// norm[H] and x_norm[H] are floats; w[O, H * BITS / 32] u32; scales and biases[O, H / GROUP] S.
//
// grid: (32 * SG * BLOCKS, T, 1), threadgroup (32 * SG, 1, 1). Every threadgroup computes the norm of the row. It has R
// rows of w, whose columns its threads share.
  constexpr uint THREADS = 32 * SG, WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
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

  const device S* group_scales = (const device S*)scales;
  const device G* group_biases = (const device G*)biases;
  uint row[R];
  float acc[R];
  for (uint r = 0; r < R; r++) {
    row[r] = metal::min(block * R + r, uint(O - 1));
    acc[r] = 0;
  }
  for (uint chunk = index; chunk < H / CHUNK; chunk += THREADS) {
    uint code[R * WORDS];
    float scale[R * GROUPS], offset[R * GROUPS];
    codes_load<R, BITS, GROUP, CHUNK, H>(w, group_scales, group_biases, row, chunk, code, scale, offset);
    MLX_MTL_PRAGMA_UNROLL
    for (int i = 0; i < CHUNK / 8; i++) {
      float v[8];
      router_x8<NORM>(row_of_h + CHUNK * chunk + 8 * i, norm + CHUNK * chunk + 8 * i, scale_of_h, v);
      MLX_MTL_PRAGMA_UNROLL
      for (int r = 0; r < R; r++) {
        float weight[8];
        codes_weights<BITS, GROUP, CHUNK>(code + r * WORDS, i, scale + r * GROUPS, offset + r * GROUPS, weight);
        MLX_MTL_PRAGMA_UNROLL
        for (int j = 0; j < 8; j++) {
          acc[r] = metal::fma(weight[j], v[j], acc[r]);
        }
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
