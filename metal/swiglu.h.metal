// needs: codes.h.metal {form}.h.metal lane.h.metal
// The matrices of an expert, and the first half of an expert: gate, up and the activation that combines them.

// tanh(x) to about 2 ulp: of a small x by a continued fraction, because the difference to 1 has few bits of it.
inline float swiglu_tanh(float x) {
  const float s = x * x;
  if (s < 0.3f) {
    return x * metal::fma(s + 105.0f, s, 945.0f) / metal::fma(metal::fma(15.0f, s, 420.0f), s, 945.0f);
  }
  const float far = 1.0f - 2.0f / (metal::precise::exp(2.0f * (x < 0.0f ? -x : x)) + 1.0f);
  return x < 0.0f ? -far : far;
}

// Combines gate g and up u. ACTIVATION is the number of an ActivationForm (moeflux_mlx/kinds/feed_forward.py). NaN
// stays NaN.
template <int ACTIVATION>
inline float swiglu_joined(float g, float u, float limit, float gate_limit) {
  if (ACTIVATION == 0) {
    return g / (1.0f + metal::precise::exp(-g)) * u;
  }
  if (ACTIVATION == 1) {  // (1 + tanh z) / 2 = sigmoid(2 z), and 2 sqrt(2 / pi) = 1.5957691
    return g / (1.0f + metal::precise::exp(-1.5957691216f * metal::fma(0.044715f * g * g, g, g))) * u;
  }
  if (ACTIVATION == 5) {
    return (g < 0.0f ? 0.0f : g) * u;
  }
  if (ACTIVATION == 6) {
    const float gate = gate_limit * swiglu_tanh(g / gate_limit) / (1.0f + metal::precise::exp(-g));
    return gate * (limit > 0.0f ? limit * swiglu_tanh(u / limit) : u);
  }
  u = u > limit ? limit : u < -limit ? -limit : u;
  if (ACTIVATION == 3) {
    const float silu = g / (1.0f + metal::precise::exp(-g));
    return (silu > limit ? limit : silu) * u;
  }
  g = g > limit ? limit : g;
  if (ACTIVATION == 2) {
    return g / (1.0f + metal::precise::exp(-g)) * u;
  }
  return g / (1.0f + metal::precise::exp(-1.702f * g)) * (u + 1.0f);
}

// What is done with the products of gate and up: biases of type B are added if BIASED is 1, and the activation has a
// limit, and perhaps one of its own for gate. If INTERLEAVED is 1, rows of gate and up alternate, beginning with gate;
// the first half of these rows is in gate's place, the second half in up's.
template <int ACTIVATION, int BIASED, int INTERLEAVED, typename B>
struct swiglu_ending {
  const device B* gate;
  const device B* up;
  float limit;
  float gate_limit;
};

// The addresses of a matrix of codes.
template <typename S, typename G>
struct swiglu_matrix {
  const device uint32_t* codes;
  const device S* scales;
  const device G* biases;
};

// In a record, at words `codes`, `scales` and `biases`.
template <typename S, typename G>
inline swiglu_matrix<S, G> swiglu_in_record(const device uint32_t* record, uint codes, uint scales, uint biases) {
  return {record + codes, (const device S*)(record + scales), (const device G*)(record + biases)};
}

// From row `row` on in a matrix with COLS columns whose codes, scales and biases are separate arrays.
template <typename S, typename G, int COLS, int BITS, int GROUP>
inline swiglu_matrix<S, G> swiglu_from_row(
    uint row, const device uint32_t* codes, const device S* scales, const device G* biases) {
  return {
      codes + row * (COLS / 32) * codes_words_each(scales, BITS), codes_from_row(scales, row, COLS, GROUP),
      codes_from_row(biases, row, COLS, GROUP)};
}

// Loads one chunk of R rows of gate and then of the same R rows of up, or, if COUNT is 1, of one matrix. A matrix has I
// rows of COLS columns.
template <int COUNT, int R, int COLS, int I, int BITS, int GROUP, int CHUNK, int INTERLEAVED, typename S, typename G>
inline void swiglu_load(
    const thread swiglu_matrix<S, G>* matrices, const thread uint* row, uint chunk, thread uint* code,
    thread float* scale, thread float* bias) {
  constexpr uint WORDS = CHUNK * BITS / 32, GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  MLX_MTL_PRAGMA_UNROLL
  for (uint i = 0; i < COUNT * R; i += INTERLEAVED ? 1 : R) {
    const uint turn = 2 * row[i % R] + i / R, other[1] = {turn % I};
    const swiglu_matrix<S, G> m = matrices[INTERLEAVED ? turn / I : i / R];
    codes_load<INTERLEAVED ? 1 : R, BITS, GROUP, CHUNK, COLS>(
        m.codes, m.scales, m.biases, INTERLEAVED ? other : row, chunk, code + i * WORDS, scale + i * GROUPS,
        bias + i * GROUPS);
  }
}

// act[I] = the activation of gate x and up x, for R sets of rows of each matrix from row `first` on. A simdgroup has 32
// / L rows of a set at the same time. codes_dot accepts the type of x.
template <
    int R, int L, int H, int I, int BITS, int GROUP, int CHUNK, int AHEAD, int ACTIVATION, int BIASED, int INTERLEAVED,
    typename P, typename X, typename S, typename G, typename B>
inline void swiglu_gate_up(
    P x, swiglu_matrix<S, G> gate, swiglu_matrix<S, G> up, swiglu_ending<ACTIVATION, BIASED, INTERLEAVED, B> ending,
    uint first, uint lane, device X* act) {
  constexpr uint ABREAST = 32 / L;
  constexpr uint WORDS_EACH = R * CHUNK * BITS / 32, GROUPS_EACH = R * (CHUNK < GROUP ? 1 : CHUNK / GROUP);
  const swiglu_matrix<S, G> both[2] = {gate, up};
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
    swiglu_load<2, R, H, I, BITS, GROUP, CHUNK, INTERLEAVED>(both, row, chunk, code, scale, bias);
    codes_dot<2 * R, BITS, GROUP, CHUNK>(code, scale, bias, x + CHUNK * chunk, acc);
  }
  for (uint r = 0; r < R; r++) {
    float gx = lane_sum<L>(acc[r]);
    float ux = lane_sum<L>(acc[R + r]);
    if (lane == 0 && first + r * ABREAST < I) {
      if (BIASED && INTERLEAVED) {
        const device B* added = (2 * row[r] < I ? ending.gate : ending.up) + 2 * row[r] % I;
        gx += float(added[0]);
        ux += float(added[1]);
      } else if (BIASED) {
        gx += float(ending.gate[row[r]]);
        ux += float(ending.up[row[r]]);
      }
      act[row[r]] = X(swiglu_joined<ACTIVATION>(gx, ux, ending.limit, ending.gate_limit));
    }
  }
}
