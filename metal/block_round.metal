// needs: block_round.h.metal
// y[ALL] X = x[ALL] X, of which the first N values are rounded in blocks of BLOCK, which lie in one simdgroup
// (ops/block_rounding.py): to codes with BITS bits behind the first one, exponents from LOWEST on, and LARGEST at most,
// times a scale. This is the least power of two with which no value of a block exceeds LARGEST; or, if NESTED is 1, the
// block's largest value divided by LARGEST, rounded to E4M3. The largest value counts as LEAST if it is less.
//
// grid: (ALL, 1, 1) rounded up to whole threadgroups of T; a thread has one value.
  const uint i = threadgroup_position_in_grid.x * T + thread_index_in_threadgroup;
  const float v = i < ALL ? float(x[i]) : 0.0f;
  float most = metal::fabs(v);
  for (uint o = 1; o < BLOCK; o *= 2) {
    most = metal::fmax(most, simd_shuffle_xor(most, ushort(o)));
  }
  most = metal::fmax(most, LEAST);
  const float scale = NESTED ? block_nearest<3, -6>(metal::fmin(metal::precise::divide(most, LARGEST), 448.0f))
                             : block_power(most * INVERSE);
  if (i < N) {
    const float code = metal::fmax(metal::fmin(metal::precise::divide(v, scale), LARGEST), -LARGEST);
    y[i] = X(block_nearest<BITS, LOWEST>(code) * scale);
  } else if (i < ALL) {
    y[i] = x[i];
  }
