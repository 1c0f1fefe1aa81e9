// needs: codes.h.metal {form}.h.metal lane.h.metal
// An expert's matrices, and the first half of an expert: gate, up and what joins them.

// Where a matrix of codes lies.
template <typename S>
struct swiglu_matrix {
  const device uint32_t* codes;
  const device S* scales;
  const device S* biases;
};

// In a record, so many words from its start.
template <typename S>
inline swiglu_matrix<S> swiglu_in_record(const device uint32_t* record, uint codes, uint scales, uint biases) {
  return {record + codes, (const device S*)(record + scales), (const device S*)(record + biases)};
}

// From row `row` on of a matrix of COLS columns, in arrays of its own.
template <typename S, int COLS, int BITS, int GROUP>
inline swiglu_matrix<S> swiglu_from_row(
    uint row, const device uint32_t* codes, const device S* scales, const device S* biases) {
  const uint group = row * (COLS / GROUP);
  return {codes + row * (COLS / 32 * BITS), scales + group, biases + group};
}

// act[I] = silu(gate x) * (up x), for R rows of each matrix from `first` on, of which 32 / L lie abreast. x is what
// codes_dot takes.
template <int R, int L, int H, int I, int BITS, int GROUP, int CHUNK, int AHEAD, typename P, typename X, typename S>
inline void swiglu_gate_up(
    P x, swiglu_matrix<S> gate, swiglu_matrix<S> up, uint first, uint lane, device X* act) {
  constexpr uint ABREAST = 32 / L;
  constexpr uint WORDS_EACH = R * CHUNK * BITS / 32, GROUPS_EACH = R * (CHUNK < GROUP ? 1 : CHUNK / GROUP);
  uint row[R];
  float acc[2 * R];
  for (uint r = 0; r < R; r++) {
    row[r] = metal::min(first + r * ABREAST, uint(I - 1));
    acc[r] = 0;
    acc[R + r] = 0;
  }
  CODES_UNROLL(AHEAD)
  for (uint chunk = lane; chunk < H / CHUNK; chunk += L) {
    uint code[2 * WORDS_EACH];
    float scale[2 * GROUPS_EACH], bias[2 * GROUPS_EACH];
    codes_load<R, BITS, GROUP, CHUNK, H>(gate.codes, gate.scales, gate.biases, row, chunk, code, scale, bias);
    codes_load<R, BITS, GROUP, CHUNK, H>(
        up.codes, up.scales, up.biases, row, chunk, code + WORDS_EACH, scale + GROUPS_EACH, bias + GROUPS_EACH);
    codes_dot<2 * R, BITS, GROUP, CHUNK>(code, scale, bias, x + CHUNK * chunk, acc);
  }
  for (uint r = 0; r < R; r++) {
    const float gx = lane_sum<L>(acc[r]);
    const float ux = lane_sum<L>(acc[R + r]);
    if (lane == 0 && first + r * ABREAST < I) {
      act[row[r]] = X(gx / (1.0f + metal::exp(-gx)) * ux);
    }
  }
}
