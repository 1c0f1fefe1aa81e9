// needs: lane.h.metal
// A head of a query or key before attention, in attend_step.metal and attend_append.metal with the same bits.

// The factor that norms x[WIDTH]. One simdgroup calls this.
template <uint WIDTH, typename P>
inline float head_norm(P x, float eps, uint lane) {
  float squares = 0;
  for (uint i = lane; i < WIDTH; i += 32) {
    squares = metal::fma(float(x[i]), float(x[i]), squares);
  }
  return metal::rsqrt(lane_sum<32>(squares) / float(WIDTH) + eps);
}

// The angle by which a pair is rotated, rounded as in MLX's rotation of many tokens.
inline float head_angle(int position, float period) {
  return float(position) * (1.0f / period);
}

// The rotated pair (a, b), rounded to X.
template <typename X>
inline float turned_first(float a, float b, float cosine, float sine) {
  return float(X(a * cosine - b * sine));
}

template <typename X>
inline float turned_second(float a, float b, float cosine, float sine) {
  return float(X(a * sine + b * cosine));
}
