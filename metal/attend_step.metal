// needs: codes.h.metal lane.h.metal kv_rows.h.metal seen.h.metal kv_head.h.metal
// Attention of one token, up to the sum over pieces of the context (attend_combine.metal). H / KV query heads share a
// key head. The keys and values of position p < begun are at place p of keys[KV, capacity, D] and values[KV, capacity,
// V]; if WINDOW is set, they are at place p % capacity. Those of later positions are at place p - begun of recent:
// keys[KV, RECENT, D], then values[KV, RECENT, V]. The token has position offset; its own key and value are k[KV, D]
// and v[KV, V]. Rows have dtype K, which is X or bytes. With bytes (kv_rows.h.metal) every row, including the token's
// own, is read as it is stored. positions = offset, begun, capacity, and the token's rotary position. WINDOW and
// CHUNKED say which positions the token sees (seen.h.metal). V <= D. If TOP is set, the token sees the positions of
// chosen blocks (seen.h.metal), chosen[LISTS, TOP]: each key head has its own list, or all share one.
//
// If NORM is not 0, q[H, STRIDE] (the first D values of each head) and k are divided by their root mean square (+
// eps[0]), which a rotation leaves as it is, and multiplied by q_weight or k_weight[D] W: if NORM is 1 before they are
// rotated, if it is 2 behind it. Their first DIMS values (possibly 0) are rotated by angles positions[3]
// / periods[DIMS / 2] and multiplied by magnitude[0]. If INTERLEAVED is 1, neighbours form a pair, otherwise i and i +
// DIMS / 2. If VNORM is 1, v is divided by its root mean square too.
//
// For each piece of P visible positions and each head, parts[., PIECE, V + 2] float gets the sum of the values,
// weighted by exp(score - largest), where score = scale[0] q k; then the largest score, and the sum of the weights. If
// EXTENT is not 0, biases[H, EXTENT] float has what is added to q k by the positions between the token's and the key's.
// PIECE is H, or the number of heads of all tokens of the launch. The order of sums depends only on positions. next is
// `recent` with the token's key and value added; if APPENDED is 1, it has them already (attend_append.metal), and next
// is not written. All other arrays are X.
//
// grid: (SHARES * D * pieces, H / GH, 1), threadgroup (SHARES * D, 1, 1). A threadgroup has GH heads that share a key
// head, and P positions. A thread first computes pairs of a position and a head. Then it has a column of the values,
// for all positions if SHARES is 1, or for half of them if SHARES is 2.
// Few threadgroups run this code, each once, so fetching its instructions takes time: loops are not unrolled.
  constexpr uint G = H / KV, THREADS = SHARES * D, SG = THREADS / 32;
  constexpr uint EACH = 16 / sizeof(X), UNITS = D / EACH, ROW = UNITS + 1;  // one more: rows begin in different banks
  constexpr uint LOADS = (P * UNITS + THREADS - 1) / THREADS, KD = kv_elements<K>(D), VD = kv_elements<K>(V);
  typedef typename KvUnit<K>::type Unit;
  constexpr uint KEY_UNITS = KD * sizeof(K) / sizeof(Unit), VALUE_UNITS = VD * sizeof(K) / sizeof(Unit);
  constexpr uint COPIES = (RECENT * KEY_UNITS + THREADS - 1) / THREADS;
  constexpr float NONE = -3.4e38f;
  alignas(16) threadgroup float heads[(GH + 1) * D];  // queries, then the token's key; later half of the sums
  alignas(16) threadgroup float weights[P * GH];
  threadgroup uint4 tile[P * ROW];  // keys
  threadgroup float turns[DIMS + (DIMS == 0)];  // cosines, then sines
  threadgroup float norms[2 * D];   // q_weight, then k_weight
  threadgroup float own_value[sizeof(K) == 1 || VNORM ? V : 1];  // as the cache stores it
  const uint lane = thread_index_in_simdgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint tid = thread_index_in_threadgroup;
  const uint part = threadgroup_position_in_grid.x;
  const uint head = threadgroup_position_in_grid.y * GH;
  const uint kv = head / G;
  const uint offset = uint(positions[0]), begun = uint(positions[1]), capacity = uint(positions[2]);
  const size_t kept = size_t(kv) * capacity;
  const uint later = kv * RECENT * KD, values_later = KV * RECENT * KD + kv * RECENT * VD;
  const uint low = first_seen<WINDOW, CHUNKED>(offset);
  const uint top = low + part * P;
  const uint visible = seen_count<TOP, RATIO, OWN>(offset);
  if (top >= visible) {
    return;
  }
  const auto blocks = chosen + (LISTS > 1 ? kv * TOP : 0);
  // The rows of the piece that belong to earlier positions, perhaps followed by others; and the row of the token's own
  // position, if it is below P.
  const bool sees_own = seen_position<TOP, RATIO, OWN>(blocks, visible - 1, offset) == offset;
  const uint earlier = visible - top - (sees_own ? 1 : 0), own = sees_own ? earlier : P;

  // Starts all loads from memory together: keys in units of 16 bytes, and prefetches of the values.
  uint4 loaded[LOADS];
  Unit copied[2 * COPIES];
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < LOADS; t++) {
    const uint unit = tid + t * THREADS, p = seen_position<TOP, RATIO, OWN>(blocks, top + unit / UNITS, offset);
    loaded[t] = uint4{0, 0, 0, 0};
    if (unit / UNITS < P && p < offset) {
      const device K* row =
          p < begun ? keys + (kept + (WINDOW ? p % capacity : p)) * KD : recent + later + (p - begun) * KD;
      loaded[t] = kv_load<D>(row, unit % UNITS, X(0));
    }
  }
  constexpr uint LINE = 128 / sizeof(K), LINES = (VD + LINE - 1) / LINE;
  for (uint i = tid; i < P * LINES; i += THREADS) {
    const uint p = seen_position<TOP, RATIO, OWN>(blocks, top + i / LINES, offset);
    if (p < begun && p < offset) {
      CODES_AHEAD(values + (kept + (WINDOW ? p % capacity : p)) * VD + i % LINES * LINE);
    }
  }
  const bool copies = !APPENDED && part == 0 && head % G == 0;
  const uint filled = copies ? (offset - begun) * KEY_UNITS : 0, values_filled = copies ? (offset - begun) * VALUE_UNITS : 0;
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < COPIES; t++) {
    const uint unit = tid + t * THREADS;
    if (unit < filled) {
      copied[t] = ((const device Unit*)(recent + later))[unit];
    }
    if (unit < values_filled) {
      copied[COPIES + t] = ((const device Unit*)(recent + values_later))[unit];
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < 2 / SHARES; t++) {
    const uint i = tid + t * THREADS;
    norms[i] = NORM ? float(i < D ? q_weight[i] : k_weight[i - D]) : 1.0f;
  }
  head_turns<DIMS>(periods, float(positions[3]), float(magnitude[0]), tid, THREADS, turns);
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < LOADS; t++) {
    const uint unit = tid + t * THREADS;
    if (unit / UNITS < P) {
      tile[unit / UNITS * ROW + unit % UNITS] = kv_tile<K>(loaded[t], X(0));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  CODES_UNROLL(1)
  for (uint h = simdgroup; h <= GH; h += SG) {
    const bool is_key = h == GH;
    head_prepare<D, DIMS, INTERLEAVED, NORM>(
        is_key ? k + kv * D : q + (head + h) * STRIDE, norms + (is_key ? D : 0), eps[0], turns, lane, heads + h * D);
    if ((sizeof(K) == 1 || VNORM) && is_key) {
      head_value<V, VNORM>(v + kv * V, eps[0], lane, own_value);
    }
    if (sizeof(K) == 1 && is_key) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      kv_round<D, X>(heads + GH * D, (device uint8_t*)(next + later + (offset - begun) * KD), copies, lane);
      kv_round<V, float>(own_value, (device uint8_t*)(next + values_later + (offset - begun) * VD), copies, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  CODES_UNROLL(1)
  for (uint pair = tid; pair < P * GH; pair += THREADS) {
    const uint row = pair % P, h = pair / P;
    float even = 0, odd = 0;
    CODES_UNROLL(2)
    for (uint u = 0; u < UNITS; u++) {
      float key[EACH];
      codes_unpack(tile[row * ROW + u], X(0), key);
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < EACH; j += 2) {
        even = metal::fma(heads[h * D + u * EACH + j], key[j], even);
        odd = metal::fma(heads[h * D + u * EACH + j + 1], key[j + 1], odd);
      }
    }
    const uint age = offset - top - row;
    const float bias = EXTENT && age < EXTENT ? float(biases[(head + h) * EXTENT + age]) : 0.0f;
    weights[row * GH + h] = row < earlier ? (even + odd + bias) * scale[0] : NONE;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  CODES_UNROLL(1)
  for (uint turn = 0; turn < GH; turn += SG) {
    const uint h = metal::min(turn + simdgroup, uint(GH - 1));
    const bool is_mine = turn + simdgroup < GH;
    float last = 0;  // the score of the token's own position
    for (uint i = lane; i < D; i += 32) {
      last = metal::fma(heads[h * D + i], heads[GH * D + i], last);
    }
    last = (lane_sum<32>(last) + (EXTENT ? float(biases[(head + h) * EXTENT]) : 0.0f)) * scale[0];
    float largest = own < P ? last : NONE;
    for (uint row = lane; row < P; row += 32) {
      const float score = is_mine ? weights[row * GH + h] : NONE;
      largest = score > largest ? score : largest;
    }
    largest = simd_max(largest);
    float sum = 0;
    for (uint row = lane; is_mine && row < P; row += 32) {
      const float score = row == own ? last : weights[row * GH + h];
      const float weight = metal::fast::exp(score - largest);
      weights[row * GH + h] = weight;
      sum += weight;
    }
    sum = lane_sum<32>(sum);
    if (is_mine && lane == 0) {
      parts[(part * PIECE + head + h) * (V + 2) + V] = largest;
      parts[(part * PIECE + head + h) * (V + 2) + V + 1] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint column = tid % D, share = tid / D;
  float acc[GH];
  for (uint h = 0; h < GH; h++) {
    acc[h] = 0;
  }
  const bool has_column = V == D || column < V;
  const uint end = has_column ? metal::min(uint(P), earlier) : 0;
  constexpr uint AT_ONCE = 8;  // loads in flight: CUDA's compiler waits for each value that is used at once
  CODES_UNROLL(1)
  for (uint next_row = share; next_row < end; next_row += AT_ONCE * SHARES) {
    float value[AT_ONCE];
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < AT_ONCE; i++) {
      const uint row = metal::min(next_row + i * SHARES, end - 1);
      const uint p = seen_position<TOP, RATIO, OWN>(blocks, top + row, offset);
      const device K* from =
          p < begun ? values + (kept + (WINDOW ? p % capacity : p)) * VD : recent + values_later + (p - begun) * VD;
      value[i] = kv_value<V>(from, column);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < AT_ONCE; i++) {
      const uint row = next_row + i * SHARES;
      for (uint h = 0; h < GH && row < end; h++) {
        acc[h] = metal::fma(weights[row * GH + h], value[i], acc[h]);
      }
    }
  }
  if (share == 1) {
    for (uint h = 0; h < GH; h++) {
      heads[h * D + column] = acc[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (share == 0 && has_column) {
    const float value = own >= P ? 0.0f : sizeof(K) == 1 || VNORM ? own_value[column] : float(v[kv * V + column]);
    for (uint h = 0; h < GH; h++) {
      const float weight = own < P ? weights[own * GH + h] : 0.0f;
      const float sum = SHARES == 1 ? acc[h] : acc[h] + heads[h * D + column];
      parts[(part * PIECE + head + h) * (V + 2) + column] = metal::fma(weight, value, sum);
    }
  }
  if (copies) {
    MLX_MTL_PRAGMA_UNROLL
    for (uint t = 0; t < COPIES; t++) {
      const uint unit = tid + t * THREADS;
      if (unit < filled) {
        ((device Unit*)(next + later))[unit] = copied[t];
      }
      if (unit < values_filled) {
        ((device Unit*)(next + values_later))[unit] = copied[COPIES + t];
      }
    }
    if (sizeof(K) > 1 && share == 0) {
      next[later + (offset - begun) * D + column] = K(heads[GH * D + column]);
    }
    if (sizeof(K) > 1 && share == 0 && has_column) {
      next[values_later + (offset - begun) * V + column] = K(VNORM ? own_value[column] : float(v[kv * V + column]));
    }
  }
