// needs: codes.h.metal lane.h.metal
// Compressed attention of one token, up to the sum over pieces (compressed_combine.metal). Keys are also the values,
// and all H queries, query[H, D] X, share one key head. The newest positions are in ring[SLOTS, ROW] X, position p in
// slot p % SLOTS. The token has position offset[0] and sees WINDOW positions, including its own. It also sees
// entries[., ENTRY] X: the first (offset + 1) / RATIO of them, or, if TOP is set, the entries chosen[TOP]. If RATIO is
// 0, there are none. The first D values of a row are the key.
//
// First come the pieces of P slots, then RINGS pieces of P entries. For each piece and head, stats[., H, 2] float gets
// the largest score and the sum of exp(score - largest), and parts[., H, D] float the sum of the rows with these
// weights. A score is scale[0] q k. The order of sums depends only on positions.
//
// grid: (T * pieces, H / GH, 1), threadgroup (T, 1, 1). A threadgroup has GH heads. For the scores, ACROSS lanes share
// a row. Then a simdgroup has a head. Then a thread has eight columns of every SHARES-th row.
  constexpr uint ACROSS = 4, ABREAST = T / ACROSS, COLUMNS = D / 8, SHARES = T / COLUMNS > 0 ? T / COLUMNS : 1;
  constexpr float NONE = -3.4e38f;
  alignas(16) threadgroup float heads[SHARES * GH * D];  // queries; later the sums of each share
  threadgroup float weights[P * GH];
  threadgroup uint place[P];  // place of a row
  const uint lane = thread_index_in_simdgroup;
  const uint tid = thread_index_in_threadgroup;
  const uint piece = threadgroup_position_in_grid.x;
  const uint head = threadgroup_position_in_grid.y * GH;
  const uint own = uint(offset[0]);
  const bool is_ring = piece < RINGS;
  const uint top = (is_ring ? piece : piece - RINGS) * P;
  const uint whole = is_ring ? SLOTS : TOP ? TOP : RATIO ? (own + 1) / (RATIO ? RATIO : 1) : 0;
  if (top >= whole) {
    return;
  }
  const uint count = metal::min(uint(P), whole - top);
  const device X* rows = is_ring ? ring : entries;
  for (uint i = tid; i < count; i += T) {
    place[i] = (TOP && !is_ring ? uint(chosen[top + i]) : top + i) * (is_ring ? ROW : ENTRY);
  }
  for (uint i = tid; i < GH * D; i += T) {
    heads[i] = float(query[head * D + i]) * scale[0];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint i = tid / ACROSS; i < (count + ABREAST - 1) / ABREAST * ABREAST; i += ABREAST) {
    const device X* row = rows + place[metal::min(i, count - 1)];
    float score[GH];
    for (uint h = 0; h < GH; h++) {
      score[h] = 0;
    }
    CODES_UNROLL(4)
    for (uint c = tid % ACROSS * 8; c < D; c += ACROSS * 8) {
      float key[8];
      codes_x8(row + c, key);
      MLX_MTL_PRAGMA_UNROLL
      for (uint h = 0; h < GH; h++) {
        MLX_MTL_PRAGMA_UNROLL
        for (uint j = 0; j < 8; j++) {
          score[h] = metal::fma(heads[h * D + c + j], key[j], score[h]);
        }
      }
    }
    const uint age = (own + SLOTS - (top + i) % SLOTS) % SLOTS;
    const bool is_seen = !is_ring || (age < WINDOW && age <= own);
    MLX_MTL_PRAGMA_UNROLL
    for (uint h = 0; h < GH; h++) {
      const float sum = lane_sum<ACROSS>(score[h]);
      if (tid % ACROSS == 0 && i < count) {
        weights[i * GH + h] = is_seen ? sum : NONE;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint h = simdgroup_index_in_threadgroup; h < GH; h += T / 32) {
    float largest = NONE, sum = 0;
    for (uint i = lane; i < count; i += 32) {
      const float score = weights[i * GH + h];
      largest = score > largest ? score : largest;
    }
    largest = simd_max(largest);
    for (uint i = lane; i < count; i += 32) {
      const float weight = metal::fast::exp(weights[i * GH + h] - largest);
      weights[i * GH + h] = weight;
      sum += weight;
    }
    sum = lane_sum<32>(sum);
    if (lane == 0) {
      stats[(piece * H + head + h) * 2] = largest;
      stats[(piece * H + head + h) * 2 + 1] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint unit = tid; unit < SHARES * COLUMNS; unit += T) {
    const uint share = unit / COLUMNS, column = unit % COLUMNS * 8;
    float acc[GH * 8];
    MLX_MTL_PRAGMA_UNROLL
    for (uint k = 0; k < GH * 8; k++) {
      acc[k] = 0;
    }
    CODES_UNROLL(4)
    for (uint i = share; i < count; i += SHARES) {
      float value[8];
      codes_x8(rows + place[i] + column, value);
      MLX_MTL_PRAGMA_UNROLL
      for (uint k = 0; k < GH * 8; k++) {
        acc[k] = metal::fma(weights[i * GH + k / 8], value[k % 8], acc[k]);
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint k = 0; k < GH * 8; k++) {
      heads[(share * GH + k / 8) * D + column + k % 8] = acc[k];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < GH * D; i += T) {
    float sum = 0;
    for (uint share = 0; share < SHARES; share++) {
      sum += heads[share * GH * D + i];
    }
    parts[(piece * H + head) * D + i] = sum;
  }
