// needs: lane.h.metal
// What attention with a bias by distance takes of one token (mixers/grouped/biased_op.py). biases[H, EXTENT] float =
// states[H, WIDTH] times profiles[WIDTH, EXTENT], times INVERSE. If CLIPS is 1, the heads of states, q[H, D] and k[KV,
// D] are shortened before: x * min(limit / (|x| + 1e-6), 1) of x times r_weight[H, WIDTH], q_weight[H, D] or 1, where
// the limit is R_LIMIT for states and LIMIT for q and k, which next_q and next_k get. states, q, k and their results
// are X, the weights W, profiles P.
//
// grid: (T * (H + CLIPS * (H + KV)), 1, 1), threadgroup (T, 1, 1). A threadgroup has a head: of states, q or k. Each of
// its simdgroups computes the head's length.
  constexpr uint WIDEST = WIDTH > D ? WIDTH : D;
  threadgroup float head[WIDEST];
  const uint group = threadgroup_position_in_grid.x, tid = thread_index_in_threadgroup;
  const bool is_state = group < H, is_key = group >= 2 * H;
  const uint at = is_state ? group : is_key ? group - 2 * H : group - H, width = is_state ? WIDTH : D;
  const device X* x = is_state ? states + at * WIDTH : is_key ? k + at * D : q + at * D;
  const device W* weight = is_state ? r_weight + at * WIDTH : q_weight + (is_key ? 0 : at * D);
  float factor = 1.0f;
  if (CLIPS) {
    float squares = 0;
    for (uint i = thread_index_in_simdgroup; i < width; i += 32) {
      const float v = float(x[i]) * (is_key ? 1.0f : float(weight[i]));
      squares = metal::fma(v, v, squares);
    }
    const float limit = is_state ? R_LIMIT : LIMIT;
    factor = metal::fmin(limit / (metal::precise::sqrt(lane_sum<32>(squares)) + 1e-6f), 1.0f);
  }
  for (uint i = tid; i < width; i += T) {
    const X v = X(float(x[i]) * (CLIPS && !is_key ? float(weight[i]) : 1.0f) * factor);
    if (is_state) {
      head[i] = float(v);
    } else {
      (is_key ? next_k : next_q)[at * D + i] = v;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint age = tid; is_state && age < EXTENT; age += T) {
    float sum = 0;
    for (uint i = 0; i < WIDTH; i++) {
      sum = metal::fma(head[i], float(profiles[i * EXTENT + age]), sum);
    }
    biases[at * EXTENT + age] = sum * INVERSE;
  }
