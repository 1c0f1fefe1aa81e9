// The K largest of softmax(logits[T, E]): ids[T, K] uint, largest first, ties by lowest index, and weights[T, K] float,
// divided by their sum when NORM is 1.
//
// grid: (32, T, 1), threadgroup (32, 1, 1): one simdgroup per token; lane l holds experts l, l + 32, ...
  constexpr uint N = (E + 31) / 32;
  const uint lane = thread_index_in_simdgroup;
  const uint token = threadgroup_position_in_grid.y;
  float value[N];
  float top = -3.4e38f;
  for (uint i = 0; i < N; i++) {
    const uint e = lane + 32 * i;
    value[i] = e < E ? logits[token * E + e] : -3.4e38f;
    top = value[i] > top ? value[i] : top;
  }
  for (uint o = 1; o < 32; o *= 2) {
    const float other = simd_shuffle_xor(top, ushort(o));
    top = other > top ? other : top;
  }
  float total = 0;
  for (uint i = 0; i < N; i++) {
    total += lane + 32 * i < E ? metal::exp(value[i] - top) : 0.0f;
  }
  total = lane_sum<32>(total);

  float kept = 0;
  float mine = 0;  // lane k keeps the weight of choice k
  for (uint k = 0; k < K; k++) {
    float best = -3.4e38f;
    uint where = E;
    for (uint i = 0; i < N; i++) {
      if (value[i] > best) {
        best = value[i];
        where = lane + 32 * i;
      }
    }
    for (uint o = 1; o < 32; o *= 2) {
      const float other = simd_shuffle_xor(best, ushort(o));
      const uint there = simd_shuffle_xor(where, ushort(o));
      const bool better = other > best || (other == best && there < where);
      best = better ? other : best;
      where = better ? there : where;
    }
    where = metal::min(where, uint(E - 1));  // logits that are not numbers choose nothing
    for (uint i = 0; i < N; i++) {
      value[i] = lane + 32 * i == where ? -3.4e38f : value[i];
    }
    const float weight = metal::exp(best - top) / total;
    kept += weight;
    mine = lane == k ? weight : mine;
    if (lane == 0) {
      ids[token * K + k] = where;
    }
  }
  if (lane < K) {
    weights[token * K + lane] = NORM ? mine / kept : mine;
  }
