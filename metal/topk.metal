// needs: topk.h.metal
// The K experts of each token: ids[T, K] uint, largest first, and weights[T, K] float. logits[T, STRIDE] float, of which
// the first E are the router's; bias[E] float, read when BIAS is 1; scale[0], or with
// SCALED scale[E].
//
// grid: (32, T, 1), threadgroup (32, 1, 1): one simdgroup per token.
  const uint lane = thread_index_in_simdgroup;
  const uint token = threadgroup_position_in_grid.y;
  float weight = 0;
  const uint found = topk_choice<E, K, SCORE, BIAS, GROUPS, KEPT, NORM, SCALED>(
      logits + token * STRIDE, bias, scale, lane, lane, weight);
  if (lane < K) {
    ids[token * K + lane] = found;
    weights[token * K + lane] = weight;
  }
