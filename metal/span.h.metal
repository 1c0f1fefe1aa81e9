// needs: codes.h.metal {units}.h.metal
// Parts of attend_span.metal: rows of queries, keys and values in a threadgroup's memory, and their products.
//
// Rows lie there in parts of 64 columns, the part of all rows after one another. Of a part, a row's eight units of eight
// values lie in an order that differs from row to row, so that eight lanes meet eight different banks. The matrix units
// of NVIDIA's capability 9.0, which read this memory themselves, call the order 128 bytes swizzled (PTX ISA, wgmma).
//
// CUDA copies rows while it computes: what a copy brings is there for the thread that began it after `copies_wait`, and
// for others after the next barrier.
#ifndef COPIES_AHEAD
template <typename T, typename F>
inline void copy_begin(T to, F from, bool there) {
  *to = there ? *from : uint4{0, 0, 0, 0};
}
inline void copies_wait() {}
#endif

// Where eight values of a row lie, of ROWS rows.
template <uint ROWS>
inline uint span_place(uint row, uint unit) {
  return (unit / 8 * ROWS + row) * 64 + 8 * ((unit ^ row) % 8);
}

// Begins to copy rows [at, at + ROWS); those from `count` on become zeros.
template <uint ROWS, uint W, uint THREADS, typename T, typename X>
inline void span_copy(T to, const device X* rows, uint at, uint count, uint tid) {
  CODES_UNROLL(4)
  for (uint i = tid; i < ROWS * W / 8; i += THREADS) {
    const uint row = i / (W / 8), unit = i % (W / 8);
    const bool there = at + row < count;
    copy_begin(
        (threadgroup uint4*)(to + span_place<ROWS>(row, unit)),
        (const device uint4*)(rows + size_t(there ? at + row : 0) * W + 8 * unit), there);
  }
}

// score = 16 rows of queries from `row` on, times KEYS keys: d of matrix.h.metal, of eight keys after one another.
template <uint D, uint ROWS, uint KEYS, typename X, typename T>
inline void span_scores(T queries, T keys, uint row, uint lane, X kind, thread float* score) {
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < KEYS / 2; i++) {
    score[i] = 0;
  }
#ifdef SPAN_UNITS
  if (KEYS == 128) {
    span_units_scores<D, ROWS>(queries, keys, row, kind, score);
    return;
  }
#endif
  const uint quad = matrix_row(lane), third = matrix_place(lane);
  MLX_MTL_PRAGMA_UNROLL
  for (uint step = 0; step < D / 32; step++) {
    const uint unit = step / 2 * 8 + 2 * third + step % 2;  // neighbours would meet in the same banks
    const uint4 low = *(const threadgroup uint4*)(queries + span_place<ROWS>(row + quad, unit));
    const uint4 high = *(const threadgroup uint4*)(queries + span_place<ROWS>(row + quad + 8, unit));
    const uint query[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
    MLX_MTL_PRAGMA_UNROLL
    for (uint tile = 0; tile < KEYS / 8; tile++) {
      const uint4 key = *(const threadgroup uint4*)(keys + span_place<KEYS>(8 * tile + quad, unit));
      matrix_multiply<X>(lane, query, key, score + 4 * tile);
    }
  }
}

// Of 16 rows of values from `row` on and 16 columns from the eight `unit` on, b of matrix.h.metal for the first eight
// columns, then for the others. The lane's four places in the sum are those that it has of d in two products.
template <uint KEYS, typename X, typename T>
inline void span_turned(T values, uint row, uint unit, uint lane, X kind, thread uint* b) {
#ifdef COPIES_AHEAD
  matrix_turned(values + span_place<KEYS>(row + lane % 16, unit + lane / 16), b);
#else
  for (uint i = 0; i < 4; i++) {
    const uint from = row + 8 * (i % 2) + 2 * matrix_place(lane), column = matrix_row(lane);
    const float first = float(values[span_place<KEYS>(from, unit + i / 2) + column]);
    b[i] = matrix_pair<X>(first, float(values[span_place<KEYS>(from + 1, unit + i / 2) + column]));
  }
#endif
}

// acc += weights of 16 rows and KEYS keys, as `span_scores` has scores, times the values of these keys: d of
// matrix.h.metal, of eight columns after one another.
template <uint V, uint KEYS, typename X, typename T>
inline void span_sums(const thread float* weights, T values, uint lane, X kind, thread float* acc) {
  uint weight[KEYS / 4];
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < KEYS / 4; i++) {
    weight[i] = matrix_pair<X>(weights[2 * i], weights[2 * i + 1]);
  }
#ifdef SPAN_UNITS
  if (KEYS == 128) {
    span_units_sums<V>(weight, values, kind, acc);
    return;
  }
#endif
  MLX_MTL_PRAGMA_UNROLL
  for (uint some = 0; some < KEYS / 16; some++) {
    MLX_MTL_PRAGMA_UNROLL
    for (uint unit = 0; unit < V / 8; unit += 2) {
      uint value[4];
      span_turned<KEYS>(values, 16 * some, unit, lane, kind, value);
      matrix_product(lane, weight + 4 * some, value[0], value[1], kind, acc + 4 * unit);
      matrix_product(lane, weight + 4 * some, value[2], value[3], kind, acc + 4 * unit + 4);
    }
  }
}
