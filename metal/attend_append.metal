// needs: kv_rows.h.metal kv_head.h.metal
// Adds the keys and values of COUNT consecutive tokens of a sequence to `recent`, as attend_step.metal adds one: next
// is `recent` with all of them. Names and sizes are those of that text; positions are the first token's. AT_K and AT_V
// are the numbers of values from a token's k or v to that of the next token.
//
// grid: (THREADS * KV, COUNT, 1), threadgroup (THREADS, 1, 1). A threadgroup has a key head of a token. Its first
// simdgroup prepares the key and the value. All copy a share of the head's earlier entries.
  constexpr uint KD = kv_elements<K>(D), VD = kv_elements<K>(V);
  typedef typename KvUnit<K>::type Unit;
  constexpr uint KEY_UNITS = KD * sizeof(K) / sizeof(Unit), VALUE_UNITS = VD * sizeof(K) / sizeof(Unit);
  threadgroup float key[D];
  threadgroup float value[V];
  threadgroup float turns[DIMS + (DIMS == 0)];  // cosines, then sines
  const uint lane = thread_index_in_simdgroup;
  const uint kv = threadgroup_position_in_grid.x, token = threadgroup_position_in_grid.y;
  const uint filled = uint(positions[0]) - uint(positions[1]), place = filled + token;
  const uint keys_at = kv * RECENT * KD, values_at = KV * RECENT * KD + kv * RECENT * VD;
  for (uint unit = token * THREADS + thread_index_in_threadgroup; unit < filled * KEY_UNITS; unit += COUNT * THREADS) {
    ((device Unit*)(next + keys_at))[unit] = ((const device Unit*)(recent + keys_at))[unit];
  }
  for (uint unit = token * THREADS + thread_index_in_threadgroup; unit < filled * VALUE_UNITS; unit += COUNT * THREADS) {
    ((device Unit*)(next + values_at))[unit] = ((const device Unit*)(recent + values_at))[unit];
  }
  if (simdgroup_index_in_threadgroup == 0) {
    const device X* own_key = k + token * AT_K + kv * D;
    const device X* own_value = v + token * AT_V + kv * V;
    head_turns<DIMS>(periods, float(positions[3] + int(token)), float(magnitude[0]), lane, 32, turns);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    head_prepare<D, DIMS, INTERLEAVED, NORM>(own_key, k_weight, eps[0], turns, lane, key);
    head_value<V, VNORM>(own_value, eps[0], lane, value);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (sizeof(K) == 1) {
      kv_round<D, X>(key, (device uint8_t*)(next + keys_at + place * KD), true, lane);
      kv_round<V, float>(value, (device uint8_t*)(next + values_at + place * VD), true, lane);
    } else {
      for (uint i = lane; i < D; i += 32) {
        next[keys_at + place * KD + i] = K(key[i]);
      }
      for (uint i = lane; i < V; i += 32) {
        next[values_at + place * VD + i] = K(value[i]);
      }
    }
  }
