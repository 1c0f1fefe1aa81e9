// needs: stored.h.metal lane.h.metal
// The input of a layer's part from N streams h[N, D] X of one token, and the weights with which its output is added
// (gated connections, ops/gated_streams.py). x[D] X is the mean of the normed streams, each value times the sigmoid of
// its row of up silu(low / N). made[O + N] float is the result of streams_low.metal: low[LOW], then, if O > LOW, the
// logits of the N weights, then the factors of the streams. up[N * D, LOW] has any form (stored.h.metal); weight[N, D]
// W; mixing[N] float. If GATES is not 0, x[GATES, D] has messages let in: of the input v and the message w in
// h[GATES, 2, D] it is (1 - tanh(f low)) v + tanh(g low) w, with made[GATES, LOW], f and g of up[GATES, 2, D, LOW].
//
// grid: (T * blocks, 1, 1), threadgroup (T, 1, 1). L lanes share a column of the N streams.
  constexpr uint PIECES = LOW / 8, BLOCKS = (D * L + T - 1) / T;
  threadgroup float low[LOW];
  const uint index = thread_index_in_threadgroup;
  const uint block = threadgroup_position_in_grid.x % BLOCKS, gate = threadgroup_position_in_grid.x / BLOCKS;
  for (uint i = index; i < LOW; i += T) {
    const float v = GATES ? made[gate * LOW + i] : made[i] / float(N);
    low[i] = GATES ? float(X(v)) : v / (1.0f + metal::precise::exp(-v));
  }
  if (threadgroup_position_in_grid.x == 0 && index < N) {
    mixing[index] = O > LOW ? 2.0f / (1.0f + metal::precise::exp(-made[LOW + index] / float(N))) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint column = block * (T / L) + index / L;
  const uint at = metal::min(column, uint(D - 1));
  float acc[N];
  for (uint i = 0; i < N; i++) {
    acc[i] = 0;
  }
  for (uint piece = index % L; piece < PIECES; piece += L) {
    StoredEight<BITS> held[N];
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < N; i++) {
      held[i] = stored_load<BITS, GROUP, KIND>(
          w, (const device S*)scales, (const device G*)biases, ((gate * N + i) * D + at) * PIECES + piece,
          (GATES ? GATES : 1) * N * D * PIECES);
    }
    float v[8], total = 0;
    MLX_MTL_PRAGMA_UNROLL
    for (uint j = 0; j < 8; j++) {
      v[j] = low[8 * piece + j];
      total += v[j];
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < N; i++) {
      acc[i] += stored_dot<KIND>(held[i], v, total);
    }
  }
  float sum = 0;
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < N; i++) {
    const float logit = lane_sum<L>(acc[i]);
    const float v = float(h[(gate * N + i) * D + at]);
    if (GATES) {
      const float tanh = 1.0f - 2.0f / (1.0f + metal::precise::exp(2.0f * logit));
      sum = i == 0 ? (1.0f - tanh) * v : metal::fma(tanh, v, sum);
    } else {
      const float normed = v * made[O + i] * float(weight[i * D + at]);
      sum += normed / (1.0f + metal::precise::exp(-logit));
    }
  }
  if (index % L == 0 && column < D) {
    x[gate * D + column] = X(GATES ? sum : sum / float(N));
  }
