// The positions to which a token attends, in ascending order. If TOP is 0, these are all positions up to its own,
// offset. Otherwise they are the positions of TOP chosen blocks of RATIO positions, and then those after the last whole
// block. If OWN is 1, the block of the token's own position is never chosen, but it is always seen up to that position.

// The number of whole blocks among which the blocks are chosen.
template <int RATIO, int OWN>
inline uint seen_blocks(uint offset) {
  return (offset + 1 - OWN) / RATIO;
}

template <int TOP, int RATIO, int OWN>
inline uint seen_count(uint offset) {
  return TOP ? TOP * RATIO + offset + 1 - seen_blocks<RATIO, OWN>(offset) * RATIO : offset + 1;
}

// Position number `i` of these. chosen[TOP] has the numbers of the blocks.
template <int TOP, int RATIO, int OWN, typename C>
inline uint seen_position(C chosen, uint i, uint offset) {
  constexpr uint WHOLE = TOP * RATIO;
  if (!TOP) {
    return i;
  }
  return i < WHOLE ? uint(chosen[i / RATIO]) * RATIO + i % RATIO : seen_blocks<RATIO, OWN>(offset) * RATIO + i - WHOLE;
}
