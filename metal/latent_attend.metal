// needs: codes.h.metal dense.h.metal lane.h.metal seen.h.metal
// Latent attention of one token (MLA), up to the sum over pieces of the context (latent_combine.metal). All H heads
// share the latent and the rotated key of a position. Those of position p < begun are at place p, or with a WINDOW at
// place p % capacity, of latents[capacity, N] and keys[capacity, R]; those of later positions are at place p - begun of
// recent[RECENT, N + R]. The token has position offset; its own are token[N + R]. positions = offset, begun, capacity,
// and the rotary position. query[H, N + R] float is already scaled. The token sees the newest WINDOW positions (0: all)
// up to its own, or those of TOP blocks in `chosen` (seen.h.metal).
//
// For each piece of P visible positions, stats[., PIECE, 2] float gets the largest score and the sum of exp(score -
// largest), and parts[., PIECE, N] float the sum of the latents with these weights. PIECE is H, or the number of heads
// of all tokens of the launch. The order of sums depends only on positions. next is `recent` with the token added. All
// other arrays are X.
//
// grid: (T * pieces, H / GH, 1), threadgroup (T, 1, 1). A threadgroup has GH heads. For the scores, ACROSS lanes share
// EACH positions. Then a simdgroup has a head. Then a thread has eight columns of every second latent. A value that is
// read from threadgroup memory is multiplied by EACH keys or eight columns, because the read takes as long as four
// sums.
  constexpr uint ACROSS = 4, EACH = P * ACROSS / T, ROW = N + R, HALF = T / 2;
  // Aligned for loads of four. The weights of one position are adjacent.
  alignas(16) threadgroup float heads[GH * ROW];
  alignas(16) threadgroup float weights[P * GH];
  const uint lane = thread_index_in_simdgroup;
  const uint tid = thread_index_in_threadgroup;
  const uint piece = threadgroup_position_in_grid.x;
  const uint head = threadgroup_position_in_grid.y * GH;
  const uint offset = uint(positions[0]), begun = uint(positions[1]), capacity = uint(positions[2]);
  const uint top = first_seen<WINDOW, 0>(offset) + piece * P;
  const uint visible = seen_count<TOP, RATIO, OWN>(offset);
  if (top >= visible) {
    return;
  }
  const uint count = metal::min(uint(P), visible - top);

  CODES_UNROLL(4)
  for (uint i = 8 * tid; i < GH * ROW; i += 8 * T) {
    float value[8];
    codes_x8(query + head * ROW + i, value);
    MLX_MTL_PRAGMA_UNROLL
    for (uint j = 0; j < 8; j++) {
      heads[i + j] = value[j];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float score[EACH * GH];
  const device X* row[EACH];
  const device X* tail[EACH];
  MLX_MTL_PRAGMA_UNROLL
  for (uint e = 0; e < EACH; e++) {
    const uint i = metal::min(top + e * (P / EACH) + tid / ACROSS, visible - 1);  // nobody reads the scores beyond
    const uint at = seen_position<TOP, RATIO, OWN>(chosen, i, offset);
    const device X* later = at < offset ? recent + (at - begun) * ROW : token;
    const size_t place = WINDOW ? at % capacity : at;
    row[e] = at < begun ? latents + place * N : later;
    tail[e] = at < begun ? keys + place * R : later + N;
    for (uint h = 0; h < GH; h++) {
      score[e * GH + h] = 0;
    }
  }
  CODES_UNROLL(2)
  for (uint i = tid % ACROSS * 8; i < ROW; i += ACROSS * 8) {
    float key[EACH * 8];
    MLX_MTL_PRAGMA_UNROLL
    for (uint e = 0; e < EACH; e++) {
      codes_x8(i < N ? row[e] + i : tail[e] + (i - N), key + e * 8);
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint h = 0; h < GH; h++) {
      MLX_MTL_PRAGMA_UNROLL
      for (uint j = 0; j < 8; j++) {
        const float value = heads[h * ROW + i + j];
        MLX_MTL_PRAGMA_UNROLL
        for (uint e = 0; e < EACH; e++) {
          score[e * GH + h] = metal::fma(value, key[e * 8 + j], score[e * GH + h]);
        }
      }
    }
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < EACH * GH; i++) {
    const float whole = lane_sum<ACROSS>(score[i]);
    if (tid % ACROSS == 0) {
      weights[(i / GH * (P / EACH) + tid / ACROSS) * GH + i % GH] = whole;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint h = simdgroup_index_in_threadgroup; h < GH; h += T / 32) {
    float largest = -3.4e38f, sum = 0;
    for (uint i = lane; i < count; i += 32) {
      const float found = weights[i * GH + h];
      largest = found > largest ? found : largest;
    }
    largest = simd_max(largest);
    for (uint i = lane; i < count; i += 32) {
      const float weight = metal::fast::exp(weights[i * GH + h] - largest);
      weights[i * GH + h] = weight;
      sum += weight;
    }
    sum = lane_sum<32>(sum);
    if (lane == 0) {
      stats[(piece * PIECE + head + h) * 2] = largest;
      stats[(piece * PIECE + head + h) * 2 + 1] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const uint second = tid / HALF;
  for (uint left = 0; left < N; left += 8 * HALF) {
    const uint column = left + 8 * (tid % HALF);
    float acc[GH * 8];
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < GH * 8; i++) {
      acc[i] = 0;
    }
    CODES_UNROLL(8)
    for (uint i = second; i < count && column < N; i += 2) {
      const uint at = seen_position<TOP, RATIO, OWN>(chosen, top + i, offset);
      const device X* later = at < offset ? recent + (at - begun) * ROW : token;
      float value[8];
      codes_x8((at < begun ? latents + size_t(WINDOW ? at % capacity : at) * N : later) + column, value);
      MLX_MTL_PRAGMA_UNROLL
      for (uint k = 0; k < GH * 8; k++) {
        acc[k] = metal::fma(weights[i * GH + k / 8], value[k % 8], acc[k]);
      }
    }
    // The queries are not needed any more: their memory is used to add the sums of both halves.
    if (second && column < N) {
      MLX_MTL_PRAGMA_UNROLL
      for (uint k = 0; k < GH * 8; k++) {
        heads[k / 8 * N + column + k % 8] = acc[k];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (!second && column < N) {
      MLX_MTL_PRAGMA_UNROLL
      for (uint k = 0; k < GH * 8; k++) {
        acc[k] += heads[k / 8 * N + column + k % 8];
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint h = 0; h < GH; h++) {
        dense_store(acc + 8 * h, parts + (piece * PIECE + head + h) * N + column);
      }
    }
  }
  if (piece == 0 && head == 0) {
    const uint used = (offset - begun) * ROW;
    for (uint i = tid; i < used; i += T) {
      next[i] = recent[i];
    }
    for (uint i = tid; i < ROW; i += T) {
      next[used + i] = token[i];
    }
  }
