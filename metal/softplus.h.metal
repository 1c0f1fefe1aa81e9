// log(1 + exp(u)), computed so that it cannot overflow. The part of e that the sum 1 + e rounds away is added again, so
// that small results are exact too (W. Kahan's log1p).
inline float softplus(float u) {
  const float e = metal::precise::exp(u > 0.0f ? -u : u), sum = 1.0f + e;
  return (u > 0.0f ? u : 0.0f) + (sum == 1.0f ? e : metal::precise::log(sum) * (e / (sum - 1.0f)));
}
