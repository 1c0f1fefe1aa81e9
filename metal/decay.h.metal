// The factor by which a token decays the delta rule's state, from u = a + dt_bias and rate = exp(A_log): exp(-rate *
// softplus(u)), or if there is a least logarithm, which is below 0, exp(least / (1 + exp(-rate * u))).
inline float delta_decay(float u, float rate, float least) {
  if (least < 0.0f) {
    return metal::precise::exp(least / (1.0f + metal::precise::exp(-rate * u)));
  }
  const float soft = (u > 0.0f ? u : 0.0f) + metal::precise::log(1.0f + metal::precise::exp(u > 0.0f ? -u : u));
  return metal::precise::exp(-rate * soft);
}
