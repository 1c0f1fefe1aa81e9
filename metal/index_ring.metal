// needs: index.h.metal
// next[SLOTS, ROW] X = ring[SLOTS, ROW] with the row of one token at place offset[0] % SLOTS. The row is the token's
// key[D] X, normed (index.h.metal, by weight and bias, W), and then gates[D] float.
//
// grid: (T, 1, 1), threadgroup (T, 1, 1).
  threadgroup float own[D];
  threadgroup float turns[1];  // there is no rotation
  const uint tid = thread_index_in_threadgroup, at = uint(offset[0]) % SLOTS * ROW;
  if (simdgroup_index_in_threadgroup == 0) {
    index_row<X, D, 2, 0, 0, 0>(key, weight, bias, eps[0], turns, own, thread_index_in_simdgroup);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < SLOTS * ROW; i += T) {
    next[i] = i < at || i >= at + ROW ? ring[i] : i < at + D ? X(own[i - at]) : X(gates[i - at - D]);
  }
