// needs: codes.h.metal index.h.metal lane.h.metal rotate.h.metal seen.h.metal
// How well the blocks that one token sees match an indexer's queries. q[H, D] X and the token's own key[D] X are normed
// (QNORM and KNORM: index.h.metal, by q_weight, or k_weight and k_bias, W). They are rotated by angles turning[AT] /
// periods[DIMS / 2], times magnitude[0], where turning[AT] is the token's rotary position. positions = offset, begun.
// For block b with key k_b
//     scores[b] float = sum over heads h of scale[0] * max(q_h k_b, 0), times weights[h] float if WEIGHED is 1;
// or, if BY_HEAD is 1, for a block of RATIO positions p (P is a multiple of RATIO)
//     scores[b, H] float = for each head h the largest q_h k_p
//
// If KEYED is 1, each position has a key; without BY_HEAD a block is then a single position. The key of position p <
// begun is at place p of keys, that of a later position at place p - begun of recent[., D]; next is `recent` with the
// token's own key added. If H is 0, there are no scores. If KEYED is 0, keys has the keys of all blocks of RATIO
// positions (seen.h.metal), and nothing is appended. Rows of keys have STRIDE values X; the D values from FIRST on are
// the index key.
//
// grid: (T * pieces, 1, 1), threadgroup (T, 1, 1). A threadgroup has P keys in its registers: ACROSS lanes share EACH
// of them. Its memory has the queries of GH heads at a time, which every threadgroup computes again.
  constexpr uint ACROSS = 4, EACH = P * ACROSS / T, SLICES = (D / 8 + ACROSS - 1) / ACROSS;
  threadgroup float turns[DIMS + (DIMS == 0)];
  threadgroup float own[D];
  alignas(16) threadgroup float heads[GH * D];
  threadgroup float products[BY_HEAD ? GH * P : 1];
  const uint tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const uint offset = uint(positions[0]), begun = KEYED ? uint(positions[1]) : 0;
  const uint blocks = seen_blocks<RATIO, OWN>(offset), count = KEYED ? offset + 1 : blocks;
  const uint top = threadgroup_position_in_grid.x * P;
  const bool has_own = KEYED && (H == 0 || offset / P == threadgroup_position_in_grid.x);
  if (top >= count && !has_own) {
    return;
  }
  for (uint i = tid; i < DIMS / 2; i += T) {
    const float angle = rotate_angle(float(turning[AT]), float(periods[i]));
    turns[i] = magnitude[0] * metal::fast::cos(angle);
    turns[DIMS / 2 + i] = magnitude[0] * metal::fast::sin(angle);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (has_own) {
    if (simdgroup == 0) {
      index_row<X, D, KNORM, DIMS, FROM, INTERLEAVED>(key, k_weight, k_bias, eps[0], turns, own, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint used = (offset - begun) * D;
    for (uint i = tid; i < used; i += T) {
      next[i] = recent[i];
    }
    for (uint i = tid; i < D; i += T) {
      next[used + i] = X(own[i]);
    }
  }
  if (H == 0) {
    return;
  }

  float keys_of[EACH * SLICES * 8];
  MLX_MTL_PRAGMA_UNROLL
  for (uint e = 0; e < EACH; e++) {
    const uint at = metal::min(top + e * (P / EACH) + tid / ACROSS, count - 1);
    const bool is_own = KEYED && at == offset;
    const device X* row = !KEYED || at < begun ? keys + size_t(at) * STRIDE + FIRST : recent + (at - begun) * D;
    MLX_MTL_PRAGMA_UNROLL
    for (uint s = 0; s < SLICES; s++) {
      const uint column = (s * ACROSS + tid % ACROSS) * 8;
      thread float* slice = keys_of + (e * SLICES + s) * 8;
      if (column < D && !is_own) {
        codes_x8(row + column, slice);
      } else {
        for (uint j = 0; j < 8; j++) {
          slice[j] = column < D ? own[column + j] : 0.0f;
        }
      }
    }
  }
  float sums[EACH];
  MLX_MTL_PRAGMA_UNROLL
  for (uint e = 0; e < EACH; e++) {
    sums[e] = 0;
  }
  for (uint begin = 0; begin < H; begin += GH) {
    const uint end = metal::min(begin + GH, uint(H));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = begin + simdgroup; h < end; h += T / 32) {
      index_row<X, D, QNORM, DIMS, FROM, INTERLEAVED>(q + h * D, q_weight, q_weight, eps[0], turns, heads + (h - begin) * D, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = begin; h < end; h++) {
      float score[EACH];
      MLX_MTL_PRAGMA_UNROLL
      for (uint e = 0; e < EACH; e++) {
        score[e] = 0;
      }
      MLX_MTL_PRAGMA_UNROLL
      for (uint s = 0; s < SLICES; s++) {
        const uint column = metal::min((s * ACROSS + tid % ACROSS) * 8, uint(D - 8));
        MLX_MTL_PRAGMA_UNROLL
        for (uint j = 0; j < 8; j++) {
          const float value = heads[(h - begin) * D + column + j];
          MLX_MTL_PRAGMA_UNROLL
          for (uint e = 0; e < EACH; e++) {
            score[e] = metal::fma(value, keys_of[(e * SLICES + s) * 8 + j], score[e]);
          }
        }
      }
      const float weight = WEIGHED ? float(weights[h]) * scale[0] : scale[0];
      MLX_MTL_PRAGMA_UNROLL
      for (uint e = 0; e < EACH; e++) {
        const float product = lane_sum<ACROSS>(score[e]);
        sums[e] = metal::fma(weight, metal::fmax(product, 0.0f), sums[e]);
        if (BY_HEAD && tid % ACROSS == 0) {
          products[(h - begin) * P + e * (P / EACH) + tid / ACROSS] = product;
        }
      }
    }
    if (BY_HEAD) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      constexpr uint WHOLE = P / RATIO;  // blocks of the threadgroup
      for (uint pair = simdgroup; pair < (end - begin) * WHOLE; pair += T / 32) {
        float largest = -3.4e38f;
        for (uint i = lane; i < RATIO; i += 32) {
          const float product = products[pair / WHOLE * P + pair % WHOLE * RATIO + i];
          largest = product > largest ? product : largest;
        }
        largest = simd_max(largest);
        if (lane == 0 && top / RATIO + pair % WHOLE < blocks) {
          scores[(top / RATIO + pair % WHOLE) * H + begin + pair / WHOLE] = largest;
        }
      }
    }
  }
  if (BY_HEAD) {
    return;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint e = 0; e < EACH; e++) {
    const uint at = top + e * (P / EACH) + tid / ACROSS;
    if (tid % ACROSS == 0 && at < count) {
      scores[at] = sums[e];
    }
  }
