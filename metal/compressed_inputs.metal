// needs: lane.h.metal rotate.h.metal
// The queries of one token for compressed attention, and the row that its cache stores (mixers/compressed/op.py).
// query[H, D] X: each head of q[H, D] X is divided by its root mean square (+ eps[0]) if NORMED is 1, and its last R
// values are rotated by the token's rotary position[0] (rotate.h.metal). row[ROW] X: raw[ROW] X begins with the token's
// key of D values, which is normed in the same way, multiplied by weight[D] and then rotated; the rest is copied.
// periods[R / 2] float.
//
// grid: (32 * SG * (H + 1), 1, 1), threadgroup (32 * SG, 1, 1): one threadgroup per head, and one for the row.
  constexpr uint THREADS = 32 * SG;
  threadgroup float partial[SG];
  threadgroup float tail[R];
  const uint index = thread_index_in_threadgroup;
  const uint lane = thread_index_in_simdgroup;
  const uint head = threadgroup_position_in_grid.x;
  const bool is_key = head == H;
  const device X* from = is_key ? raw : q + head * D;
  device X* to = is_key ? row : query + head * D;
  float squares = 0;
  for (uint i = index; i < D; i += THREADS) {
    squares = metal::fma(float(from[i]), float(from[i]), squares);
  }
  squares = lane_sum<32>(squares);
  if (lane == 0) {
    partial[simdgroup_index_in_threadgroup] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float mean = lane_sum<32>(lane < SG ? partial[lane] : 0.0f) / float(D);
  const float scale = NORMED || is_key ? metal::precise::rsqrt(mean + eps[0]) : 1.0f;
  for (uint i = index; i < D; i += THREADS) {
    const X normed = X(float(from[i]) * scale * (is_key ? float(weight[i]) : 1.0f));
    if (i < D - R) {
      to[i] = normed;
    } else {
      tail[i - (D - R)] = float(normed);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = index; i < R / 2; i += THREADS) {
    rotate_pair<R, INTERLEAVED>(tail, periods, float(position[0]), magnitude[0], i, to + (D - R));
  }
  for (uint i = D + index; is_key && i < ROW; i += THREADS) {
    row[i] = raw[i];
  }
