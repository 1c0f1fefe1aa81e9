// The rotation of a pair of values by a token's position. Prompts are rotated by MLX's own kernel, and both write the
// same cache: the functions and the order of roundings here are those of that kernel, of which Metal's compiler should
// contract the first product of a line.

inline float rotate_angle(float position, float period) {
  return position * metal::precise::divide(1.0f, period);
}

inline float rotate_first(float a, float b, float cosine, float sine) {
  return metal::fma(a, cosine, -(b * sine));
}

inline float rotate_second(float a, float b, float cosine, float sine) {
  return metal::fma(a, sine, b * cosine);
}

// Rotates pair `i` of the R values at `from` by position / periods[i], times magnitude, and stores it at `to`. If
// INTERLEAVED is 1, neighbours form a pair, otherwise i and i + R / 2.
template <int R, int INTERLEAVED, typename F, typename A, typename X>
inline void rotate_pair(F from, A periods, float position, float magnitude, uint i, device X* to) {
  const uint first = INTERLEAVED ? 2 * i : i;
  const uint second = INTERLEAVED ? first + 1 : i + R / 2;
  const float angle = rotate_angle(position, periods[i]);
  const float cosine = magnitude * metal::fast::cos(angle), sine = magnitude * metal::fast::sin(angle);
  to[first] = X(rotate_first(from[first], from[second], cosine, sine));
  to[second] = X(rotate_second(from[first], from[second], cosine, sine));
}
