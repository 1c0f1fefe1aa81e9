// needs: kv_rows.h.metal kv_head.h.metal rotate.h.metal
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
    const float norm = NORM ? head_norm<D>(own_key, eps[0], lane) : 1.0f;
    for (uint i = lane; i < DIMS / 2; i += 32) {
      const uint first = INTERLEAVED ? 2 * i : i;
      const uint second = INTERLEAVED ? first + 1 : i + DIMS / 2;
      const float angle = rotate_angle(float(positions[3] + int(token)), periods[i]);
      const float cosine = float(magnitude[0]) * metal::fast::cos(angle);
      const float sine = float(magnitude[0]) * metal::fast::sin(angle);
      const float first_weight = NORM ? float(k_weight[first]) : 1.0f;
      const float second_weight = NORM ? float(k_weight[second]) : 1.0f;
      const float a = float(own_key[first]) * norm * (NORM == 2 ? 1.0f : first_weight);
      const float b = float(own_key[second]) * norm * (NORM == 2 ? 1.0f : second_weight);
      key[first] = float(X(rotate_first(a, b, cosine, sine) * (NORM == 2 ? first_weight : 1.0f)));
      key[second] = float(X(rotate_second(a, b, cosine, sine) * (NORM == 2 ? second_weight : 1.0f)));
    }
    for (uint i = DIMS + lane; i < D; i += 32) {
      key[i] = float(X(float(own_key[i]) * norm * (NORM ? float(k_weight[i]) : 1.0f)));
    }
    const float value_norm = VNORM ? head_norm<V>(own_value, eps[0], lane) : 1.0f;
    for (uint i = lane; i < V; i += 32) {
      value[i] = VNORM ? float(X(float(own_value[i]) * value_norm)) : float(own_value[i]);
    }
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
