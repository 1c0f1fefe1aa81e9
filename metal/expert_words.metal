// needs: codes.h.metal
// out[N, UNITS] UNIT = words of packed records, from word FIRST on; UNIT is one word or four. blob[S, WORDS] u32, or
// several: records; slots[N]. count[0] is N.
//
// grid: (UNITS * N, 1, 1) rounded up to whole threadgroups; one thread per unit.
  const uint row = thread_position_in_grid.x / UNITS, unit = thread_position_in_grid.x % UNITS;
  if (row < uint(count[0])) {
    const device uint32_t* record = codes_record(blob, uint(slots[row]), WORDS, ROW_BITS);
    ((device UNIT*)out)[size_t(row) * UNITS + unit] = ((const device UNIT*)(record + FIRST))[unit];
  }
