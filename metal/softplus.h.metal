// log(1 + exp(u)), which cannot overflow. What 1 + e rounds away is put back, so that small values are exact too (W. Kahan's
// log1p).
inline float softplus(float u) {
  const float e = metal::exp(u > 0.0f ? -u : u), sum = 1.0f + e;
  return (u > 0.0f ? u : 0.0f) + (sum == 1.0f ? e : metal::log(sum) * (e / (sum - 1.0f)));
}
