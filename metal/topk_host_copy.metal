// needs: topk.h.metal
// As topk, for one token whose choice the host waits for. host_copy are arrays of two words each. A word has an id in
// its lower half and the upper half of the weight's bits above it.
//
// grid: (32, 1, 1), threadgroup (32, 1, 1).
  const uint lane = thread_index_in_simdgroup;
  float weight = 0;
  const uint found = topk_choice<E, K, SCORE, BIAS, GROUPS, KEPT, NORM, SCALED>(logits, bias, scale, EPS, lane, lane, weight);
  if (lane < K) {
    ids[lane] = found;
    weights[lane] = weight;
    host_copy[lane / 2][lane % 2] = (as_type<uint>(weight) & 0xFFFF0000u) | found;
  }
