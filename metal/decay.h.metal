// The factor by which a token decays the delta rule's state, from u = a + dt_bias and rate = exp(A_log): exp(-rate *
// softplus(u)). If each channel has its own decay, it is exp(least / (1 + exp(-rate * u))).
template <bool EACH>
inline float delta_decay(float u, float rate, float least) {
  if (EACH) {
    return metal::precise::exp(least / (1.0f + metal::precise::exp(-rate * u)));
  }
  const float soft = (u > 0.0f ? u : 0.0f) + metal::precise::log(1.0f + metal::precise::exp(u > 0.0f ? -u : u));
  return metal::precise::exp(-rate * soft);
}
