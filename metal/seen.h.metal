// The positions to which a token attends, in ascending order. If TOP is 0, these are all positions up to its own,
// offset. Otherwise they are the positions of TOP chosen blocks of RATIO positions, and then those after the last whole
// block. If OWN is 1, the block of the token's own position is never chosen, but it is always seen up to that position.

// The first position that a token sees. If CHUNKED is 1, it sees, of its own chunk of WINDOW positions, those up to its
// own; otherwise the newest WINDOW, or all if WINDOW is 0.
template <int WINDOW, int CHUNKED>
inline uint first_seen(uint offset) {
  if (!WINDOW) {
    return 0;
  }
  return CHUNKED ? offset - offset % WINDOW : offset >= WINDOW ? offset + 1 - WINDOW : 0;
}

// The number of whole blocks among which the blocks are chosen.
template <int RATIO, int OWN>
inline uint seen_blocks(uint offset) {
  return (offset + 1 - OWN) / RATIO;
}

template <int TOP, int RATIO, int OWN>
inline uint seen_count(uint offset) {
  return TOP ? TOP * RATIO + offset + 1 - seen_blocks<RATIO, OWN>(offset) * RATIO : offset + 1;
}

// The positions of a piece, of `count` that a token sees: a multiple of P, so that there are at most MOST pieces.
template <int P, int MOST>
inline uint piece_length(uint count) {
  return ((count - 1) / (P * MOST) + 1) * P;
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
