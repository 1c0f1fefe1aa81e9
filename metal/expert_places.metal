// The pairs of a token and one of its experts, sorted by expert; an expert's pairs are in the order of the tokens.
// ids[P] are the experts of the pairs, K of each token; count[1] is P. starts[E + 1] are the places of the experts'
// first pairs, and P; source[P] is the token of the pair in each place; places[P] is the place of each pair.
//
// grid: (32 * SG * groups, 1, 1), threadgroup (32 * SG, 1, 1). A simdgroup finds the pairs of one expert.
  const uint expert = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup, pairs = uint(count[0]);
  if (expert < E) {
    uint before = 0;
    for (uint p = lane; p < pairs; p += 32) {
      before += uint(ids[p]) < expert;
    }
    const uint smaller = simd_prefix_exclusive_sum(before) + before;
    uint place = simd_broadcast(smaller, ushort(31));
    if (lane == 0) {
      starts[expert] = place;
      if (expert == E - 1) {
        starts[E] = pairs;
      }
    }
    for (uint base = 0; base < pairs; base += 32) {
      const uint p = base + lane;
      const uint own = p < pairs && uint(ids[p]) == expert;
      const uint earlier = simd_prefix_exclusive_sum(own);
      if (own) {
        source[place + earlier] = p / K;
        places[p] = place + earlier;
      }
      place += simd_broadcast(earlier + own, ushort(31));
    }
  }
