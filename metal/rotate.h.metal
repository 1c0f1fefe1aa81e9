// Rotates pair `i` of the R values at `from` by position / periods[i], times magnitude, and stores it at `to`. If
// INTERLEAVED is 1, neighbours form a pair, otherwise i and i + R / 2.
template <int R, int INTERLEAVED, typename F, typename A, typename X>
inline void rotate_pair(F from, A periods, float position, float magnitude, uint i, device X* to) {
  const uint first = INTERLEAVED ? 2 * i : i;
  const uint second = INTERLEAVED ? first + 1 : i + R / 2;
  const float angle = position * (1.0f / periods[i]);  // in this order as MLX's rotation of many tokens
  const float cosine = magnitude * metal::cos(angle), sine = magnitude * metal::sin(angle);
  const float a = from[first], b = from[second];
  to[first] = X(a * cosine - b * sine);
  to[second] = X(a * sine + b * cosine);
}
