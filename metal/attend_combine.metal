// needs: seen.h.metal
// out[H, V] X = the sum of the pieces of attend_step.metal or attend_span.metal, each weighted by its share of the sum of
// all exponentials. If SINKS is 1, exp(sinks[H]) is part of that sum. If GATE is 1, the result is multiplied by sigmoid(gate[H, 1]),
// where gate is [H, 2, D] X and D = V. The parts of the next piece lie PIECE parts further, those of the next head EACH.
// positions[0] is the token's own position. WINDOW, CHUNKED, TOP, RATIO and OWN say how many positions it sees, P and
// MOST how many of them a piece has (seen.h.metal).
//
// grid: (4 * C * H, V / C, 1), threadgroup (4 * C, 1, 1). A threadgroup computes C columns of a head. Four threads
// share an output; each takes every fourth piece.
  constexpr uint SHARES = 4;
  threadgroup float sums[(SHARES - 1) * C];
  threadgroup float totals[(SHARES - 1) * C];
  const uint head = threadgroup_position_in_grid.x;
  const uint at = thread_index_in_threadgroup % C, tid = thread_index_in_threadgroup / C;
  const uint column = threadgroup_position_in_grid.y * C + at;
  const uint offset = uint(positions[0]);
  const uint visible = seen_count<TOP, RATIO, OWN>(offset) - first_seen<WINDOW, CHUNKED>(offset);
  const uint pieces = (visible - 1) / piece_length<P, MOST>(visible) + 1;
  const float sink = SINKS ? float(sinks[head]) : 0.0f;
  float largest = SINKS ? sink : -3.4e38f;
  _Pragma("unroll 1")
  for (uint i = thread_index_in_simdgroup; i < pieces; i += 32) {
    const float top = parts[(i * PIECE + head * EACH) * (V + 2) + V];
    largest = top > largest ? top : largest;
  }
  largest = simd_max(largest);
  float sum = 0, total = 0;
  for (uint i = tid; i < pieces; i += SHARES) {
    const float share = metal::fast::exp(parts[(i * PIECE + head * EACH) * (V + 2) + V] - largest);
    total = metal::fma(share, parts[(i * PIECE + head * EACH) * (V + 2) + V + 1], total);
    sum = metal::fma(share, parts[(i * PIECE + head * EACH) * (V + 2) + column], sum);
  }
  if (tid > 0) {
    sums[(tid - 1) * C + at] = sum;
    totals[(tid - 1) * C + at] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) {
    for (uint s = 0; s < SHARES - 1; s++) {
      sum += sums[s * C + at];
      total += totals[s * C + at];
    }
    if (SINKS) {
      total += metal::fast::exp(sink - largest);
    }
    const float value = sum / total;
    if (GATE) {
      const float by = float(gate[(2 * head + 1) * D + column]);
      out[head * V + column] = X(value / (1.0f + metal::precise::exp(-by)));
    } else {
      out[head * V + column] = X(value);
    }
  }
