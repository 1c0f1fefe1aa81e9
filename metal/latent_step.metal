// What one token's latent attention reads (MLA): of each head of q[H, NOPE + R] the first NOPE values as q_nope[H, NOPE],
// the rest turned as q_pe[H, R]; of kv[N + R] the first N, divided by their root mean square (+ eps[0]) and multiplied by
// weight[N] W, as latent[N], the rest turned as k_pe[R]. Turned: by angles offset[0] / periods[R / 2], times
// magnitude[0]. NEXT: neighbours make a pair; else i and i + R / 2. All else X.
//
// grid: (32 * SG * blocks, 1, 1), threadgroup (32 * SG, 1, 1); one simdgroup per head, and one for kv.
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  if (head <= H) {
    const bool is_key = head == H;
    const uint width = is_key ? N : NOPE;
    const device X* x = is_key ? kv : q + head * (NOPE + R);
    device X* turned = is_key ? k_pe : q_pe + head * R;
    if (is_key) {
      float squares = 0;
      for (uint i = lane; i < N; i += 32) {
        squares = metal::fma(float(x[i]), float(x[i]), squares);
      }
      const float scale = metal::rsqrt(lane_sum<32>(squares) / float(N) + eps[0]);
      for (uint i = lane; i < N; i += 32) {
        latent[i] = X(float(x[i]) * scale * float(weight[i]));
      }
    } else {
      for (uint i = lane; i < NOPE; i += 32) {
        q_nope[head * NOPE + i] = x[i];
      }
    }
    for (uint i = lane; i < R / 2; i += 32) {
      const uint first = NEXT ? 2 * i : i;
      const uint second = NEXT ? first + 1 : i + R / 2;
      const float angle = float(offset[0]) * (1.0f / periods[i]);  // in this order as MLX's rotation of many tokens
      const float cosine = magnitude[0] * metal::cos(angle), sine = magnitude[0] * metal::sin(angle);
      const float a = float(x[width + first]), b = float(x[width + second]);
      turned[first] = X(a * cosine - b * sine);
      turned[second] = X(a * sine + b * cosine);
    }
  }
