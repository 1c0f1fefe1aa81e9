// needs: seen.h.metal topk.h.metal
// Chooses the TOP best of the blocks that one token sees: chosen[ROWS, TOP] int, ascending, by scores[., ROWS] float.
// Among equal scores the first blocks are chosen. positions[0] is the token's own position; the other constants are as
// in seen.h.metal.
//
// This is a radix select. The key of the last chosen block is in [low, high]. In each round the keys in this interval
// are counted in BINS bins of equal width, and the bin with that key becomes the interval. Then every thread writes the
// chosen blocks of its range after those of the threads before it.
//
// grid: (T, ROWS, 1), threadgroup (T, 1, 1).
  constexpr uint BINS = 256;
  threadgroup atomic_uint bins[BINS];
  threadgroup uint lowest[T / 32];
  threadgroup uint highest[T / 32];
  threadgroup uint found[2];    // the bin, and the number of keys in higher bins
  threadgroup uint sums[2 * T];  // for each thread's range: the keys above the interval, and those in it
  const uint tid = thread_index_in_threadgroup, row = threadgroup_position_in_grid.y;
  const uint count = seen_blocks<RATIO, OWN>(uint(positions[0]));

  uint low = 0xFFFFFFFFu, high = 0, left = TOP;  // `left`: how many keys of the interval are chosen
  for (uint i = tid; i < count; i += T) {
    const uint key = topk_key(scores[i * ROWS + row]);
    low = metal::min(low, key);
    high = metal::max(high, key);
  }
  low = simd_min(low);
  high = simd_max(high);
  if (thread_index_in_simdgroup == 0) {
    lowest[simdgroup_index_in_threadgroup] = low;
    highest[simdgroup_index_in_threadgroup] = high;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint s = 0; s < T / 32; s++) {
    low = metal::min(low, lowest[s]);
    high = metal::max(high, highest[s]);
  }

  while (low < high) {
    uint shift = 0;
    while ((high - low) >> shift >= BINS) {
      shift++;
    }
    for (uint b = tid; b < BINS; b += T) {
      atomic_store_explicit(&bins[b], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < count; i += T) {
      const uint key = topk_key(scores[i * ROWS + row]);
      if (key >= low && key <= high) {
        atomic_fetch_add_explicit(&bins[(key - low) >> shift], 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = tid; b < BINS; b += T) {
      uint above = 0;
      for (uint other = b + 1; other < BINS; other++) {
        above += atomic_load_explicit(&bins[other], memory_order_relaxed);
      }
      if (above < left && left <= above + atomic_load_explicit(&bins[b], memory_order_relaxed)) {
        found[0] = b;
        found[1] = above;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    low += found[0] << shift;
    high = low + metal::min(high - low, (1u << shift) - 1);
    left -= found[1];
  }

  const uint span = (count + T - 1) / T, begin = metal::min(tid * span, count), end = metal::min(begin + span, count);
  uint above = 0, equal = 0;
  for (uint i = begin; i < end; i++) {
    const uint key = topk_key(scores[i * ROWS + row]);
    above += key > high ? 1 : 0;
    equal += key == high ? 1 : 0;
  }
  sums[tid] = above;
  sums[T + tid] = equal;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  above = equal = 0;
  for (uint i = 0; i < tid; i++) {
    above += sums[i];
    equal += sums[T + i];
  }
  for (uint i = begin; i < end; i++) {
    const uint key = topk_key(scores[i * ROWS + row]);
    if (key > high || (key == high && equal < left)) {
      chosen[row * TOP + above + metal::min(equal, left)] = int(i);
    }
    above += key > high ? 1 : 0;
    equal += key == high ? 1 : 0;
  }
