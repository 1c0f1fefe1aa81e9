// out[N, UNITS] = x[places[N], UNITS]: rows of 16-byte units, which may hold values of any type. count[1] is N.
//
// grid: (UNITS * N, 1, 1) rounded up to whole threadgroups; one thread per unit. Along one axis, because CUDA's others
// are limited to 65,535 threadgroups.
  const uint row = thread_position_in_grid.x / UNITS, unit = thread_position_in_grid.x % UNITS;
  if (row < uint(count[0])) {
    ((device uint4*)out)[size_t(row) * UNITS + unit] = ((const device uint4*)x)[size_t(places[row]) * UNITS + unit];
  }
