// needs: codes.h.metal lane.h.metal rotate.h.metal
// A head of a query or key before attention, with the same bits in each kernel.

// The factor that norms x[WIDTH]. One simdgroup calls this.
template <uint WIDTH, typename P>
inline float head_norm(P x, float eps, uint lane) {
  float squares = 0;
  for (uint i = lane; i < WIDTH; i += 32) {
    squares = metal::fma(float(x[i]), float(x[i]), squares);
  }
  return metal::precise::rsqrt(lane_sum<32>(squares) / float(WIDTH) + eps);
}

// Fills turns[DIMS]: cosines, then sines, of the angles by which a position rotates, times `magnitude`.
template <int DIMS, typename A, typename T>
inline void head_turns(A periods, float position, float magnitude, uint first, uint step, T turns) {
  CODES_UNROLL(1)
  for (uint i = first; i < DIMS / 2; i += step) {
    const float angle = rotate_angle(position, periods[i]);
    turns[i] = magnitude * metal::fast::cos(angle);
    turns[DIMS / 2 + i] = magnitude * metal::fast::sin(angle);
  }
}

// Norms and rotates x[WIDTH] by weights[WIDTH] and turns[DIMS], as attend_step.metal says; `to` gets it rounded to X.
// One simdgroup calls this.
template <int WIDTH, int DIMS, int INTERLEAVED, int NORM, typename X, typename W, typename T, typename P>
inline void head_prepare(const device X* x, W weights, float eps, T turns, uint lane, P to) {
  const float norm = NORM ? head_norm<WIDTH>(x, eps, lane) : 1.0f;
  CODES_UNROLL(1)
  for (uint i = lane; i < DIMS / 2; i += 32) {
    const uint first = INTERLEAVED ? 2 * i : i;
    const uint second = INTERLEAVED ? first + 1 : i + DIMS / 2;
    const float cosine = turns[i], sine = turns[DIMS / 2 + i];
    const float first_weight = NORM ? float(weights[first]) : 1.0f, second_weight = NORM ? float(weights[second]) : 1.0f;
    const float a = float(x[first]) * norm * (NORM == 2 ? 1.0f : first_weight);
    const float b = float(x[second]) * norm * (NORM == 2 ? 1.0f : second_weight);
    to[first] = X(rotate_first(a, b, cosine, sine) * (NORM == 2 ? first_weight : 1.0f));
    to[second] = X(rotate_second(a, b, cosine, sine) * (NORM == 2 ? second_weight : 1.0f));
  }
  CODES_UNROLL(1)
  for (uint i = DIMS + lane; i < WIDTH; i += 32) {
    to[i] = X(float(x[i]) * norm * (NORM ? float(weights[i]) : 1.0f));
  }
}

// The same for a value x[WIDTH], which is normed if NORM is 1.
template <int WIDTH, int NORM, typename X, typename P>
inline void head_value(const device X* x, float eps, uint lane, P to) {
  const float norm = NORM ? head_norm<WIDTH>(x, eps, lane) : 1.0f;
  for (uint i = lane; i < WIDTH; i += 32) {
    to[i] = NORM ? X(float(x[i]) * norm) : x[i];
  }
}
