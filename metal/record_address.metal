// out[N] = addresses, but the address of record at place[0].
//
// grid: (N, 1, 1) rounded up to whole threadgroups; one thread per address.
  const uint i = thread_position_in_grid.x;
  if (i < N) {
    out[i] = i == uint(place[0]) ? (uint64_t)record : addresses[i];
  }
