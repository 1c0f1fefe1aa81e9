// needs: lane.h.metal topk.h.metal
// The K experts that a table gives each token: ids[T, K] uint = table[tokens[T], K], and weights[T, K] float, which are
// their scores by logits[T, STRIDE] float. If NORM is 1, the weights of a token are divided by their sum plus EPS.
// All are multiplied by scale[0].
//
// grid: (32, T, 1), threadgroup (32, 1, 1): one simdgroup per token, one lane per expert.
  const uint lane = thread_index_in_simdgroup;
  const uint token = threadgroup_position_in_grid.y;
  const uint id = table[size_t(tokens[token]) * K + metal::min(lane, uint(K - 1))];
  const float own = lane < K ? topk_score<SCORE>(logits[token * STRIDE + id]) : 0.0f;
  const float sum = lane_sum<32>(own);
  if (lane < K) {
    ids[token * K + lane] = id;
    weights[token * K + lane] = (NORM ? own / (sum + EPS) : own) * scale[0];
  }
