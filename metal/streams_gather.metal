// The input of a layer's part from N streams h[N, D] X of one token, and the weights with which its output is added
// (hyper-connections, ops/streams.py). made[O + 1] float is the result of streams_products.metal, where O is 2 N + N N;
// base[O] and scale[3] are float. x[D] X = the sum of pre[i] * h[i]. mixing[N + N N] float has post, then comb[j, k] of
// stream j for stream k. If MIXED is 0, there is no comb: O is 2 N, and mixing has only post. If SHIFTED is 1,
// mixing[O] has pre behind them.
//     v = made / sqrt(mean(h^2) + NORM_EPS);  pre = sigmoid(v[0..N] * scale[0] + base) + EPS
//     post = MAGNITUDE sigmoid(v[N..2N] * scale[1] + base) + POST_EPS
//     comb = softmax of each row of (v[2N..] * scale[2] + base), + EPS
// The columns of comb are divided by their sums plus EPS; then, ROUNDS - 1 times, its rows and then its columns.
//
// grid: (D, 1, 1) rounded up to whole threadgroups of T. Every simdgroup computes all weights, with one value of comb
// per lane: N is 2 or 4, so N N lanes hold comb and the other lanes repeat it.
  constexpr uint CELLS = MIXED ? N * N : 1;
  const uint lane = thread_index_in_simdgroup;
  const uint column = threadgroup_position_in_grid.x * T + thread_index_in_threadgroup;
  const float factor = metal::precise::rsqrt(made[O] / float(N * D) + NORM_EPS);

  const uint cell = MIXED ? 2 * N + lane % CELLS : 0;
  float comb = metal::fma(made[cell] * factor, scale[MIXED ? 2 : 0], base[cell]);
  float most = comb;
  for (uint o = 1; o < N; o *= 2) {
    most = metal::fmax(most, simd_shuffle_xor(most, ushort(o)));
  }
  comb = metal::precise::exp(comb - most);
  float sum = comb;
  for (uint o = 1; o < N; o *= 2) {
    sum += simd_shuffle_xor(sum, ushort(o));
  }
  comb = comb / sum + EPS;
  for (uint round = 0; round < ROUNDS; round++) {
    if (round > 0) {
      sum = comb;
      for (uint o = 1; o < N; o *= 2) {
        sum += simd_shuffle_xor(sum, ushort(o));
      }
      comb = comb / (sum + EPS);
    }
    sum = comb;
    for (uint o = N; o < CELLS; o *= 2) {
      sum += simd_shuffle_xor(sum, ushort(o));
    }
    comb = comb / (sum + EPS);
  }
  if (MIXED && column < CELLS) {  // the first lanes of the first threadgroup; each has its own value
    mixing[N + column] = comb;
  }
  if (SHIFTED && column < N) {
    mixing[N + CELLS + column] =
        1.0f / (1.0f + metal::precise::exp(-metal::fma(made[column] * factor, scale[0], base[column]))) + EPS;
  }
  if (column < N) {
    const uint own = N + column;
    const float logit = metal::fma(made[own] * factor, scale[1], base[own]);
    mixing[column] = MAGNITUDE / (1.0f + metal::precise::exp(-logit)) + POST_EPS;
  }
  if (column < D) {
    float v = 0;
    for (uint i = 0; i < N; i++) {
      const float pre = 1.0f / (1.0f + metal::precise::exp(-metal::fma(made[i] * factor, scale[0], base[i]))) + EPS;
      v = metal::fma(pre, float(h[i * D + column]), v);
    }
    x[column] = X(v);
  }
