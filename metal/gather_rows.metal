// out[N, UNITS] = x[places[N], UNITS]: rows of 16-byte units, which may hold values of any type.
//
// grid: (UNITS, N, 1) rounded up to whole threadgroups; one thread per unit.
  const uint unit = thread_position_in_grid.x;
  const size_t row = thread_position_in_grid.y;
  if (unit < UNITS) {
    ((device uint4*)out)[row * UNITS + unit] = ((const device uint4*)x)[size_t(places[row]) * UNITS + unit];
  }
