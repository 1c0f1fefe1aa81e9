// needs: codes.h.metal
// out[N, M] UNIT = words of packed records, from word first[0] on; UNIT is one word or four. blob[S, WORDS] u32, or
// several: records; slots[N]. count[0] is N, units[0] is M.
//
// grid: (M * N, 1, 1) rounded up to whole threadgroups; one thread per unit.
  const uint each = uint(units[0]);
  const uint row = thread_position_in_grid.x / each, unit = thread_position_in_grid.x % each;
  if (row < uint(count[0])) {
    const device uint32_t* record = codes_record(blob, uint(slots[row]), WORDS, ROW_BITS);
    ((device UNIT*)out)[size_t(row) * each + unit] = ((const device UNIT*)(record + first[0]))[unit];
  }
