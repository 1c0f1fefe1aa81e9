// Attention of one token, up to the sum over pieces of the context (attend_combine.metal). Position p of H / KV query
// heads' keys and values lies at keys, values[KV, capacity, D] if p < begun; at recent[2, KV, RECENT, D], p - begun, if
// it came later; the token's own, at p = offset, come as k, v[KV, D]. positions = offset, begun, capacity.
//
// q[H, STRIDE], of whose heads the first D values are taken, and k are divided by their root mean square (+ eps[0]) and
// multiplied by q_weight or k_weight[D] W; their first DIMS values are turned by angles offset / periods[DIMS / 2] and
// multiplied by magnitude[0]. NEXT: neighbours make a pair; else i and i + DIMS / 2.
//
// For each D positions: stats[., H, 2] float, the largest of scores = scale[0] q k and the sum of exp(score - largest);
// parts[., H, D] float, the values weighted so. What is summed with what depends on positions alone. next: `recent`
// with the token's key and value. All else X.
//
// grid: (D * pieces, H / GH, 1), threadgroup (D, 1, 1). A threadgroup has GH heads that share a key head, and D
// positions: a thread first has a position, then a column of the values.
  constexpr uint G = H / KV, SG = D / 32;
  // Aligned for loads of four. A position's weights lie together.
  alignas(16) threadgroup float heads[(GH + 1) * D];  // queries, then the token's key
  alignas(16) threadgroup float weights[D * GH];
  threadgroup float tops[SG * GH];
  threadgroup float sums[SG * GH];
  const uint lane = thread_index_in_simdgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint mine = thread_index_in_threadgroup;
  const uint piece = threadgroup_position_in_grid.x;
  const uint head = threadgroup_position_in_grid.y * GH;
  const uint kv = head / G;
  const uint offset = uint(positions[0]), begun = uint(positions[1]);
  const size_t kept = size_t(kv) * uint(positions[2]) * D;
  const uint later = kv * RECENT * D, values_later = (KV + kv) * RECENT * D;
  const uint top = piece * D;
  if (top > offset) {
    return;
  }

  // What goes on to `next` is asked for first and written last, each thread's 16 bytes at a time.
  constexpr uint EACH = 16 / sizeof(X), TURNS = RECENT / EACH;
  const bool copies = piece == 0 && head % G == 0;
  const uint filled = copies ? (offset - begun) * (D / EACH) : 0;
  uint4 copied[2 * TURNS];
  MLX_MTL_PRAGMA_UNROLL
  for (uint t = 0; t < TURNS; t++) {
    const uint at = mine + t * D;
    if (at < filled) {
      copied[t] = ((const device uint4*)(recent + later))[at];
      copied[TURNS + t] = ((const device uint4*)(recent + values_later))[at];
    }
  }

  for (uint h = simdgroup; h <= GH; h += SG) {
    const bool is_key = h == GH;
    const device X* x = is_key ? k + kv * D : q + (head + h) * STRIDE;
    const device W* weight = is_key ? k_weight : q_weight;
    float squares = 0;
    for (uint i = lane; i < D; i += 32) {
      squares = metal::fma(float(x[i]), float(x[i]), squares);
    }
    const float norm = metal::rsqrt(lane_sum<32>(squares) / float(D) + eps[0]);
    const float factor = is_key ? 1.0f : scale[0];
    for (uint i = lane; i < DIMS / 2; i += 32) {
      const uint first = NEXT ? 2 * i : i;
      const uint second = NEXT ? first + 1 : i + DIMS / 2;
      const float angle = float(offset) * (1.0f / periods[i]);  // in this order as MLX's rotation of many tokens
      const float cosine = magnitude[0] * metal::cos(angle), sine = magnitude[0] * metal::sin(angle);
      const float a = float(x[first]) * norm * float(weight[first]);
      const float b = float(x[second]) * norm * float(weight[second]);
      heads[h * D + first] = float(X(a * cosine - b * sine)) * factor;
      heads[h * D + second] = float(X(a * sine + b * cosine)) * factor;
    }
    for (uint i = DIMS + lane; i < D; i += 32) {
      heads[h * D + i] = float(X(float(x[i]) * norm * float(weight[i]))) * factor;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint p = top + mine;
  float score[GH];
  for (uint h = 0; h < GH; h++) {
    score[h] = 0;
  }
  if (p < offset) {
    const device X* row = p < begun ? keys + kept + size_t(p) * D : recent + later + (p - begun) * D;
    CODES_UNROLL(8)
    for (uint i = 0; i < D; i += 8) {
      float key[8];
      codes_x8(row + i, key);
      MLX_MTL_PRAGMA_UNROLL
      for (uint h = 0; h < GH; h++) {
        MLX_MTL_PRAGMA_UNROLL
        for (uint j = 0; j < 8; j++) {
          score[h] = metal::fma(heads[h * D + i + j], key[j], score[h]);
        }
      }
    }
  }
  if (offset / 32 == p / 32) {  // a whole simdgroup computes its own position's
    MLX_MTL_PRAGMA_UNROLL
    for (uint h = 0; h < GH; h++) {
      float part = 0;
      for (uint i = lane; i < D; i += 32) {
        part = metal::fma(heads[h * D + i], heads[GH * D + i], part);
      }
      part = lane_sum<32>(part);
      score[h] = p == offset ? part : score[h];
    }
  }
  for (uint h = 0; h < GH; h++) {
    float largest = p > offset ? -3.4e38f : score[h];
    for (uint o = 1; o < 32; o *= 2) {
      const float other = simd_shuffle_xor(largest, ushort(o));
      largest = other > largest ? other : largest;
    }
    if (lane == 0) {
      tops[simdgroup * GH + h] = largest;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint h = 0; h < GH; h++) {
    float largest = tops[h];
    for (uint i = 1; i < SG; i++) {
      largest = tops[i * GH + h] > largest ? tops[i * GH + h] : largest;
    }
    const float weight = p > offset ? 0.0f : metal::exp(score[h] - largest);
    weights[mine * GH + h] = weight;
    const float sum = lane_sum<32>(weight);
    if (lane == 0) {
      sums[simdgroup * GH + h] = sum;
    }
    if (mine == 0) {
      stats[(piece * H + head + h) * 2] = largest;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (mine < GH) {
    float sum = 0;
    for (uint i = 0; i < SG; i++) {
      sum += sums[i * GH + mine];
    }
    stats[(piece * H + head + mine) * 2 + 1] = sum;
  }
  const uint end = metal::min(top + D, offset);
  const uint old = metal::min(end, metal::max(top, begun));
  float acc[GH];
  for (uint h = 0; h < GH; h++) {
    acc[h] = 0;
  }
  CODES_UNROLL(16)
  for (uint at = top; at < old; at++) {
    const float value = float(values[kept + size_t(at) * D + mine]);
    MLX_MTL_PRAGMA_UNROLL
    for (uint h = 0; h < GH; h++) {
      acc[h] = metal::fma(weights[(at - top) * GH + h], value, acc[h]);
    }
  }
  CODES_UNROLL(16)
  for (uint at = old; at < end; at++) {
    const float value = float(recent[values_later + (at - begun) * D + mine]);
    MLX_MTL_PRAGMA_UNROLL
    for (uint h = 0; h < GH; h++) {
      acc[h] = metal::fma(weights[(at - top) * GH + h], value, acc[h]);
    }
  }
  if (top + D > offset) {
    for (uint h = 0; h < GH; h++) {
      acc[h] = metal::fma(weights[(offset - top) * GH + h], float(v[kv * D + mine]), acc[h]);
    }
  }
  for (uint h = 0; h < GH; h++) {
    parts[(piece * H + head + h) * D + mine] = acc[h];
  }
  if (copies) {
    MLX_MTL_PRAGMA_UNROLL
    for (uint t = 0; t < TURNS; t++) {
      const uint at = mine + t * D;
      if (at < filled) {
        ((device uint4*)(next + later))[at] = copied[t];
        ((device uint4*)(next + values_later))[at] = copied[TURNS + t];
      }
    }
    const uint row = (offset - begun) * D + mine;
    next[later + row] = X(heads[GH * D + mine]);
    next[values_later + row] = v[kv * D + mine];
  }
