// needs: index.h.metal rotate.h.metal
// entry[W] X: an entry, or the key of a block, of the COUNT newest positions up to offset[0], which fill whole blocks
// of RATIO positions. Position p is in slot p % SLOTS of ring[SLOTS, ROW] X. Each column of the entry is a mean over
// the positions. The entry is then normed (NORM: index.h.metal, by weight[W]) and rotated by angles offset[0] / RATIO /
// periods[DIMS / 2], times magnitude[0].
//
// A row has SERIES * W values from VALUES on. The last W of them count for the positions of the entry's own block, the
// W before for those of the block before. If GATED is 1, the mean is weighted by a softmax over the positions of their
// gates plus bias[RATIO, SERIES * W]; the gates are in the row from GATES on, in the same order as values.
//
// grid: (T, 1, 1), threadgroup (T, 1, 1).
  threadgroup float whole[W];
  threadgroup float made[W];
  threadgroup float turns[DIMS + (DIMS == 0)];
  const uint tid = thread_index_in_threadgroup, own = uint(offset[0]);
  for (uint i = tid; i < DIMS / 2; i += T) {
    const float angle = rotate_angle(float(own / RATIO), float(periods[i]));
    turns[i] = magnitude[0] * metal::fast::cos(angle);
    turns[DIMS / 2 + i] = magnitude[0] * metal::fast::sin(angle);
  }
  for (uint column = tid; column < W; column += T) {
    float largest = -3.4e38f, sum = 0, total = 0;
    for (uint i = 0; GATED && i < COUNT; i++) {
      const uint at = (SERIES - 1 - (COUNT - 1 - i) / RATIO) * W + column;
      const uint row = (own + 1 - COUNT + i) % SLOTS * ROW;
      const float gate = float(ring[row + GATES + at]) + float(bias[i % RATIO * SERIES * W + at]);
      largest = gate > largest ? gate : largest;
    }
    for (uint i = 0; i < COUNT; i++) {
      const uint at = (SERIES - 1 - (COUNT - 1 - i) / RATIO) * W + column;
      const uint row = (own + 1 - COUNT + i) % SLOTS * ROW;
      float share = 1.0f;
      if (GATED) {
        share = metal::precise::exp(float(ring[row + GATES + at]) + float(bias[i % RATIO * SERIES * W + at]) - largest);
      }
      total += share;
      sum = metal::fma(share, float(ring[row + VALUES + at]), sum);
    }
    whole[column] = float(X(sum / total));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup_index_in_threadgroup == 0) {
    index_row<X, W, NORM, DIMS, FROM, INTERLEAVED>(whole, weight, weight, eps[0], turns, made, thread_index_in_simdgroup);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint column = tid; column < W; column += T) {
    entry[column] = X(made[column]);
  }
