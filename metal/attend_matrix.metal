// needs: codes.h.metal lane.h.metal kv_rows.h.metal seen.h.metal kv_head.h.metal kv_matrix.h.metal {units}.h.metal
// What attend_step.metal computes, with the same inputs and outputs, by products of small matrices (matrix.h.metal). X
// has 16 bits. A weight of a position is two numbers of 16 bits, the second of which is what the first lacks.
//
// grid: (THREADS * (1 + pieces), H / GH, 1), threadgroup (THREADS, 1, 1). The first threadgroup of a key head only writes
// `next`. Each of the others has a piece (seen.h.metal), of which a simdgroup takes 16 positions in turn; it keeps the
// sums of all columns of all heads. For the scores a lane has two of 16 keys; for the sums it has eight columns of each
// 64, of four of 16 values. Values are loaded while keys are multiplied, and keys while values are.
  constexpr uint G = H / KV, SG = THREADS / 32, ROW = 8 * (D / 8 | 4);  // rows begin in different banks
  constexpr uint KD = kv_elements<K>(D), VD = kv_elements<K>(V), KEY_STEPS = D / 32, STEPS = (V + 63) / 64;
  typedef typename KvUnit<K>::type Unit;
  typedef typename KvPart<K>::type Part;
  typedef typename KvNumber<K>::type Y;
  constexpr uint KEY_UNITS = KD * sizeof(K) / sizeof(Unit), VALUE_UNITS = VD * sizeof(K) / sizeof(Unit);
  constexpr float NONE = -3.4e38f;
  alignas(16) threadgroup X queries[9 * ROW];  // the last one is the token's key
  alignas(16) threadgroup float sums[SG * 8 * 64];  // of 64 columns of all simdgroups
  threadgroup float own_key[D];
  threadgroup float own_value[V];  // as the cache stores it
  threadgroup float turns[DIMS + (DIMS == 0)];  // cosines, then sines
  threadgroup float norms[2 * D];   // q_weight, then k_weight
  threadgroup float largest_of[SG * 8];
  threadgroup float total_of[SG * 8];
  threadgroup float shares[(SG + 1) * 8];  // of the simdgroups, and of the token's own position
  const uint lane = thread_index_in_simdgroup, quad = matrix_row(lane), third = matrix_place(lane);
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint tid = thread_index_in_threadgroup;
  const bool copies = threadgroup_position_in_grid.x == 0;
  const uint part = copies ? 0 : threadgroup_position_in_grid.x - 1;
  const uint head = threadgroup_position_in_grid.y * GH;
  const uint kv = head / G;
  const uint offset = uint(positions[0]), begun = uint(positions[1]), capacity = uint(positions[2]);
  const uint later = kv * RECENT * KD, values_later = KV * RECENT * KD + kv * RECENT * VD;
  const uint low = first_seen<WINDOW, CHUNKED>(offset);
  const uint visible = seen_count<TOP, RATIO, OWN>(offset) - low;
  const uint length = piece_length<P, MOST>(visible), top = part * length;
  if (copies ? APPENDED || head % G != 0 : top >= visible) {
    return;
  }
  const auto blocks = chosen + (LISTS > 1 ? kv * TOP : 0);
  const bool sees_own = seen_position<TOP, RATIO, OWN>(blocks, low + visible - 1, offset) == offset;
  const bool has_own = copies || (sees_own && top + length >= visible);
  const uint stop = copies ? 0 : metal::min(top + length, visible - (sees_own ? 1 : 0));

  const KvPlace<K> key_place = {keys + size_t(kv) * capacity * KD, recent + later, begun, capacity};
  const KvPlace<K> value_place = {values + size_t(kv) * capacity * VD, recent + values_later, begun, capacity};
  Part key[2 * KEY_STEPS], value[4 * STEPS];
  float key_scale[2 * KEY_STEPS], value_scale[4 * STEPS];
  uint base = top + simdgroup * 16;
  if (base < stop) {
    kv_load_parts<D, 2, KEY_STEPS, WINDOW, TOP, RATIO, OWN>(
        key_place, blocks, offset, low, base, stop, quad, third, key, key_scale);
    kv_load_parts<V, 4, STEPS, WINDOW, TOP, RATIO, OWN>(
        value_place, blocks, offset, low, base, stop, 2 * third, quad, value, value_scale);
  }
  CODES_UNROLL(1)
  for (uint which = 0; copies && which < 2; which++) {
    const uint at = which ? values_later : later, filled = (offset - begun) * (which ? VALUE_UNITS : KEY_UNITS);
    CODES_UNROLL(4)
    for (uint unit = tid; unit < filled; unit += THREADS) {
      ((device Unit*)(next + at))[unit] = ((const device Unit*)(recent + at))[unit];
    }
  }
  for (uint i = tid; i < 2 * D; i += THREADS) {
    norms[i] = NORM ? float(i < D ? q_weight[i] : k_weight[i - D]) : 1.0f;
  }
  head_turns<DIMS>(periods, float(positions[3]), float(magnitude[0]), tid, THREADS, turns);
  for (uint i = GH * ROW + tid; i < 8 * ROW; i += THREADS) {
    queries[i] = X(0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  CODES_UNROLL(1)
  for (uint h = copies ? GH + simdgroup : simdgroup; h < GH + (has_own ? 1 : 0); h += SG) {
    const bool is_key = h == GH;
    const auto to = queries + (is_key ? 8 : h) * ROW;
    head_prepare<D, DIMS, INTERLEAVED, NORM>(
        is_key ? k + kv * D : q + (head + h) * STRIDE, norms + (is_key ? D : 0), eps[0], turns, lane, to);
    if (is_key) {
      head_value<V, VNORM>(v + kv * V, eps[0], lane, own_value);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint i = lane; i < D; i += 32) {
        own_key[i] = float(to[i]);
      }
    }
    if (sizeof(K) == 1 && is_key) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
      kv_round<D, float>(own_key, (device uint8_t*)(next + later + (offset - begun) * KD), copies, lane);
      kv_round<V, float>(own_value, (device uint8_t*)(next + values_later + (offset - begun) * VD), copies, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (copies) {
    for (uint i = tid; sizeof(K) > 1 && i < D; i += THREADS) {
      next[later + (offset - begun) * D + i] = K(own_key[i]);
    }
    for (uint i = tid; sizeof(K) > 1 && i < V; i += THREADS) {
      next[values_later + (offset - begun) * V + i] = K(own_value[i]);
    }
    return;
  }

  float largest = NONE, total = 0;  // of head `quad`, of the lane's positions
  float acc[STEPS * 16];  // of eight columns of each 64, and of two heads
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < STEPS * 16; i++) {
    acc[i] = 0;
  }
  CODES_UNROLL(1)
  while (base < stop) {
    const uint following = base + SG * 16;
    float score[4] = {0, 0, 0, 0};
    float bias[4];  // of head `quad`, whose rows beyond GH nobody reads
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < 4; i++) {
      const uint age = offset - low - (base + 2 * third + i / 2 * 8 + i % 2);
      const uint at = (head + metal::min(quad, uint(GH - 1))) * EXTENT;
      bias[i] = EXTENT && age < EXTENT ? float(biases[at + age]) : 0.0f;
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint step = 0; step < KEY_STEPS; step++) {
      const uint4 query = *(const threadgroup uint4*)(queries + quad * ROW + 32 * step + 8 * third);
      uint a[8];
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < 8; i++) {
        a[i] = kv_neighbours(key[i % 2 * KEY_STEPS + step], i / 2, X(0));
      }
      if (sizeof(K) > 1) {
        matrix_multiply<X>(lane, a, query, score);
      } else {
        float dots[4] = {0, 0, 0, 0};
        matrix_multiply<X>(lane, a, query, dots);
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < 4; i++) {
          score[i] = metal::fma(key_scale[i / 2 * KEY_STEPS + step], dots[i], score[i]);
        }
      }
    }
    if (following < stop) {
      kv_load_parts<D, 2, KEY_STEPS, WINDOW, TOP, RATIO, OWN>(
          key_place, blocks, offset, low, following, stop, quad, third, key, key_scale);
    }

    // Scores of rows of positions and columns of heads become weights of rows of heads and columns of positions.
    float weight[4];
    float most = largest;
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < 4; i++) {
      const ushort from = ushort(8 * third + 4 * (i % 2) + quad / 2);
      const float even = simd_shuffle(score[i / 2 * 2], from), odd = simd_shuffle(score[i / 2 * 2 + 1], from);
      const uint position = base + 2 * third + i / 2 * 8 + i % 2;
      weight[i] = position < stop ? ((quad % 2 ? odd : even) + bias[i]) * scale[0] : NONE;
      most = metal::fmax(most, weight[i]);
    }
    most = metal::fmax(most, simd_shuffle_xor(most, ushort(1)));
    most = metal::fmax(most, simd_shuffle_xor(most, ushort(2)));
    const float factor = metal::fast::exp(largest - most);
    largest = most;
    total *= factor;
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < 4; i++) {
      weight[i] = metal::fast::exp(weight[i] - most);
      total += weight[i];
    }
    const float factors[2] = {simd_shuffle(factor, ushort(8 * third)), simd_shuffle(factor, ushort(8 * third + 4))};
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < STEPS * 16; i++) {
      acc[i] *= factors[i % 2];
    }

    MLX_MTL_PRAGMA_UNROLL
    for (uint step = 0; step < STEPS; step++) {
      uint high[2], rest[2];
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < 2; i++) {
        const uint own = 2 * i * STEPS + step;
        const float first = sizeof(K) > 1 ? weight[2 * i] : weight[2 * i] * value_scale[own];
        const float second = sizeof(K) > 1 ? weight[2 * i + 1] : weight[2 * i + 1] * value_scale[own + STEPS];
        high[i] = kv_pair<Y>(first, second);
        rest[i] = kv_pair<Y>(first - float(Y(first)), second - float(Y(second)));
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < 4; j++) {
        uint a[4];
        MLX_MTL_PRAGMA_UNROLL
        for (uint i = 0; i < 4; i++) {
          const uint own = i / 2 * 2 * STEPS + step;
          a[i] = kv_across(value[own], value[own + STEPS], 2 * j + i % 2, Y(0));
        }
        matrix_product(lane, a, high[0], high[1], Y(0), acc + step * 16 + j * 4);
        matrix_product(lane, a, rest[0], rest[1], Y(0), acc + step * 16 + j * 4);
      }
    }
    if (following < stop) {
      kv_load_parts<V, 4, STEPS, WINDOW, TOP, RATIO, OWN>(
          value_place, blocks, offset, low, following, stop, 2 * third, quad, value, value_scale);
    }
    base = following;
  }

  total = lane_sum<4>(total);
  if (third == 0) {
    largest_of[simdgroup * 8 + quad] = largest;
    total_of[simdgroup * 8 + quad] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  CODES_UNROLL(1)
  for (uint h = simdgroup; h < GH; h += SG) {
    float score = 0;
    for (uint i = lane; has_own && i < D; i += 32) {
      score = metal::fma(float(queries[h * ROW + i]), own_key[i], score);
    }
    score = has_own ? (lane_sum<32>(score) + (EXTENT ? float(biases[(head + h) * EXTENT]) : 0.0f)) * scale[0] : NONE;
    const float highest = lane < SG ? largest_of[lane * 8 + h] : lane == SG ? score : NONE;
    const float most = simd_max(highest), share = metal::fast::exp(highest - most);
    const float whole = lane_sum<32>(lane < SG ? share * total_of[lane * 8 + h] : lane == SG ? share : 0.0f);
    if (lane <= SG) {
      shares[lane * 8 + h] = share;
    }
    if (lane == 0) {
      parts[(part * PIECE + head + h) * (V + 2) + V] = most;
      parts[(part * PIECE + head + h) * (V + 2) + V + 1] = whole;
    }
  }
  CODES_UNROLL(1)
  for (uint step = 0; step < STEPS; step++) {
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < STEPS * 16; i++) {
      if (i / 16 == step) {
        const uint h = 2 * third + i % 2, column = 8 * quad + i % 16 / 4 * 2 + i / 2 % 2;
        sums[(simdgroup * 8 + h) * 64 + column] = acc[i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    CODES_UNROLL(1)
    for (uint i = tid; i < GH * 64; i += THREADS) {
      const uint h = i / 64, column = 64 * step + i % 64;
      float sum = has_own && column < V ? shares[SG * 8 + h] * own_value[column] : 0.0f;
      for (uint s = 0; s < SG; s++) {
        sum = metal::fma(shares[s * 8 + h], sums[(s * 8 + h) * 64 + i % 64], sum);
      }
      if (column < V) {
        parts[(part * PIECE + head + h) * (V + 2) + column] = sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
