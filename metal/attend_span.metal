// needs: codes.h.metal lane.h.metal seen.h.metal span.h.metal {units}.h.metal
// Attention of L new positions: softmax(scale * q k) v over the positions before them and those up to each query's own.
//
// q[B, H, L, D] and keys[B, KV, capacity, D], values[B, KV, capacity, V], all X, of 16 bits; the new ones are among
// them. positions[0] is the last position, [1] = L, [2] the capacity. The rows of a key head are its G = H / KV queries
// of the first position, then those of the second, and so on. If MOST is 1, out[B, L, H, V] is X, which is also R.
// Otherwise it is out[B, L, H, MOST, V + 2], and R is float, as attend_combine.metal takes it: of a piece of the
// positions (seen.h.metal) the sums, the largest score and the sum of the exponentials.
//
// grid: (2 * rows rounded up to whole threadgroups, KV * B, pieces), threadgroup (THREADS, 1, 1). A simdgroup has 16
// rows, whose sums its lanes keep. All simdgroups read the same KEYS keys, and then values, from the threadgroup's
// memory: while they multiply keys, the values are copied there, and while they multiply values, the next keys are.
  constexpr uint G = H / KV, ROWS = THREADS / 2;
  constexpr float NONE = -3.4e38f;
#ifdef LARGE_MEMORY
  LARGE_MEMORY uchar memory[];
#else
  alignas(16) threadgroup uchar memory[sizeof(X) * ((ROWS + KEYS) * D + KEYS * V)];
#endif
  const auto near_queries = (threadgroup X*)memory;
  const auto near_keys = near_queries + ROWS * D;
  const auto near_values = near_keys + KEYS * D;
  const uint lane = thread_index_in_simdgroup, quad = matrix_row(lane), third = matrix_place(lane);
  const uint tid = thread_index_in_threadgroup;
  const uint count = uint(positions[0]) + 1, L = uint(positions[1]), capacity = uint(positions[2]), before = count - L;
  const uint text = threadgroup_position_in_grid.y / KV, kv = threadgroup_position_in_grid.y % KV, rows = L * G;
  const uint blocks = (rows - 1) / ROWS + 1;
  const uint block = (blocks - 1 - threadgroup_position_in_grid.x) * ROWS;  // the longest begin first
  const uint own = 16 * simdgroup_index_in_threadgroup, base = block + own;
  const uint length = piece_length<P, MOST>(count), first = threadgroup_position_in_grid.z * length;
  const uint stop = metal::min(first + length, before + (metal::min(block + ROWS, rows) - 1) / G + 1);
  const size_t head = size_t(text) * KV + kv;
  const device X* all_keys = keys + head * capacity * D;
  const device X* all_values = values + head * capacity * V;

  uint row[2], seen[2];
  float largest[2], total[2];
  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < 2; r++) {
    row[r] = metal::min(base + quad + 8 * r, rows - 1);
    seen[r] = before + row[r] / G + 1;
    largest[r] = NONE;
    total[r] = 0;
  }
  float acc[V / 2];  // of two neighbouring columns of each 8, for both rows
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < V / 2; i++) {
    acc[i] = 0;
  }
  const float factor = scale[0] * 1.44269504f;  // of powers of 2

  CODES_UNROLL(4)
  for (uint i = tid; first < stop && i < ROWS * D / 8; i += THREADS) {
    const uint r = i / (D / 8), unit = i % (D / 8), at = metal::min(block + r, rows - 1);
    const device X* from = q + ((head * G + at % G) * L + at / G) * D + 8 * unit;
    copy_begin((threadgroup uint4*)(near_queries + span_place<ROWS>(r, unit)), (const device uint4*)from, true);
  }
  if (first < stop) {
    span_copy<KEYS, D, THREADS>(near_keys, all_keys, first, count, tid);
  }
  CODES_UNROLL(1)
  for (uint at = first; at < stop; at += KEYS) {
    copies_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    span_copy<KEYS, V, THREADS>(near_values, all_values, at, count, tid);
    float score[KEYS / 2];
    span_scores<D, ROWS, KEYS>(near_queries, near_keys, own, lane, X(0), score);
    if (at + KEYS > before + base / G + 1) {
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < KEYS / 2; i++) {
        score[i] = at + i / 4 * 8 + 2 * third + i % 2 < seen[i / 2 % 2] ? score[i] : NONE;
      }
    }
    float share[2];
    MLX_MTL_PRAGMA_UNROLL
    for (uint r = 0; r < 2; r++) {
      float most = largest[r];
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < KEYS / 4; i++) {
        most = metal::fmax(most, score[i / 2 * 4 + 2 * r + i % 2]);
      }
      most = metal::fmax(most, simd_shuffle_xor(most, ushort(1)));
      most = metal::fmax(most, simd_shuffle_xor(most, ushort(2)));
      share[r] = metal::fast::exp2((largest[r] - most) * factor);
      largest[r] = most;
      total[r] *= share[r];
      const float offset = most > NONE ? -most * factor : 0.0f;  // a row may see nothing of these keys
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < KEYS / 4; i++) {
        const uint place = i / 2 * 4 + 2 * r + i % 2;
        score[place] = metal::fast::exp2(metal::fma(score[place], factor, offset));
        total[r] += score[place];
      }
    }
    MLX_MTL_PRAGMA_UNROLL
    for (uint i = 0; i < V / 2; i++) {
      acc[i] *= share[i / 2 % 2];
    }
    copies_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at + KEYS < stop) {
      span_copy<KEYS, D, THREADS>(near_keys, all_keys, at + KEYS, count, tid);
    }
    span_sums<V, KEYS>(score, near_values, lane, X(0), acc);
  }

  MLX_MTL_PRAGMA_UNROLL
  for (uint r = 0; r < 2; r++) {
    total[r] = lane_sum<4>(total[r]);
    if (base + quad + 8 * r < rows) {
      const size_t place = (size_t(text) * L + row[r] / G) * H + kv * G + row[r] % G;
      const auto to = out + (MOST == 1 ? place * V : (place * MOST + threadgroup_position_in_grid.z) * (V + 2));
      MLX_MTL_PRAGMA_UNROLL
      for (uint i = 0; i < V / 4; i++) {
        const float sum = acc[i / 2 * 4 + 2 * r + i % 2];
        to[i / 2 * 8 + 2 * third + i % 2] = R(MOST == 1 ? sum / total[r] : sum);
      }
      if (MOST > 1 && third == 0) {
        to[V] = R(largest[r] * scale[0]);
        to[V + 1] = R(total[r]);
      }
    }
  }
