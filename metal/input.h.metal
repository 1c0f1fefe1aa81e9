// needs: codes.h.metal
// A row of x that is normalised while it is read. If NORM is 1, the values are multiplied by the weight of the norm,
// and their squares are summed; the caller computes the factor of the whole row from this sum.
template <int NORM, typename X, typename W>
struct input_row {
  const device X* x;
  const device W* norm;
  uint at;
  thread float* squares;
};

template <int NORM, typename X, typename W>
inline input_row<NORM, X, W> operator+(input_row<NORM, X, W> row, uint columns) {
  row.at += columns;
  return row;
}

template <int NORM, typename X, typename W>
inline void codes_x8(input_row<NORM, X, W> row, thread float* v) {
  codes_x8(row.x + row.at, v);
  if (NORM) {
    float weight[8], even = 0, odd = 0;
    codes_x8(row.norm + row.at, weight);
    MLX_MTL_PRAGMA_UNROLL
    for (int j = 0; j < 8; j += 2) {
      even = metal::fma(v[j], v[j], even);
      odd = metal::fma(v[j + 1], v[j + 1], odd);
      v[j] *= weight[j];
      v[j + 1] *= weight[j + 1];
    }
    *row.squares += even + odd;
  }
}
