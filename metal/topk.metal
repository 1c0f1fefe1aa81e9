// needs: topk.h.metal
// The K experts of each token: ids[T, K] uint, the largest first, and weights[T, K] float. The first E of logits[T,
// STRIDE] float are the router's. bias[E] float is read if BIAS is 1; scale[0], or scale[E] if SCALED is 1.
//
// grid: (32, T, 1), threadgroup (32, 1, 1): one simdgroup per token.
  const uint lane = thread_index_in_simdgroup;
  const uint token = threadgroup_position_in_grid.y;
  float weight = 0;
  const uint found = topk_choice<E, K, SCORE, BIAS, GROUPS, KEPT, NORM, SCALED>(
      logits + token * STRIDE, bias, scale, EPS, lane, lane, weight);
  if (lane < K) {
    ids[token * K + lane] = found;
    weights[token * K + lane] = weight;
  }
