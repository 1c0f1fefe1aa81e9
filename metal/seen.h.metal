// The positions to which a token attends, in ascending order: all up to its own, offset; or with TOP those of TOP chosen
// blocks of RATIO positions, and then those behind the last whole block. OWN: the block of the token's own position is
// never chosen, but always seen up to that position.

// The number of whole blocks, from which the chosen ones come.
template <int RATIO, int OWN>
inline uint seen_blocks(uint offset) {
  return (offset + 1 - OWN) / RATIO;
}

template <int TOP, int RATIO, int OWN>
inline uint seen_count(uint offset) {
  return TOP ? TOP * RATIO + offset + 1 - seen_blocks<RATIO, OWN>(offset) * RATIO : offset + 1;
}

// Position number `i` of these; chosen[TOP] are the numbers of blocks.
template <int TOP, int RATIO, int OWN, typename C>
inline uint seen_position(C chosen, uint i, uint offset) {
  constexpr uint WHOLE = TOP * RATIO;
  if (!TOP) {
    return i;
  }
  return i < WHOLE ? uint(chosen[i / RATIO]) * RATIO + i % RATIO : seen_blocks<RATIO, OWN>(offset) * RATIO + i - WHOLE;
}
