// needs: rotate.h.metal
// out[H, D] X = the sum of the pieces of compressed_attend.metal, each weighted by its share of the sum of all
// exponentials, which includes exp(sinks[H]). The last R values of a head are rotated (rotate.h.metal) by the token's
// rotary position[0]. offset[0] is the token's place; periods[R / 2] float.
//
// grid: (T * H, 1, 1), threadgroup (T, 1, 1): one threadgroup per head.
  threadgroup float tail[R];
  const uint head = threadgroup_position_in_grid.x;
  const uint index = thread_index_in_threadgroup;
  const uint entries = TOP ? TOP : RATIO ? (uint(offset[0]) + 1) / (RATIO ? RATIO : 1) : 0;
  const uint pieces = RINGS + (entries + P - 1) / P;
  const float sink = float(sinks[head]);
  float largest = sink;
  for (uint i = thread_index_in_simdgroup; i < pieces; i += 32) {
    const float top = stats[(i * H + head) * 2];
    largest = top > largest ? top : largest;
  }
  largest = simd_max(largest);
  for (uint column = index; column < D; column += T) {
    float sum = 0, total = metal::fast::exp(sink - largest);
    for (uint i = 0; i < pieces; i++) {
      const float share = metal::fast::exp(stats[(i * H + head) * 2] - largest);
      total = metal::fma(share, stats[(i * H + head) * 2 + 1], total);
      sum = metal::fma(share, parts[(i * H + head) * D + column], sum);
    }
    if (column < D - R) {
      out[head * D + column] = X(sum / total);
    } else {
      tail[column - (D - R)] = float(X(sum / total));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = index; i < R / 2; i += T) {
    rotate_pair<R, INTERLEAVED>(tail, periods, float(position[0]), magnitude[0], i, out + head * D + (D - R));
  }
