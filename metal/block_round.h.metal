// The nearest value to x with BITS bits behind the first one, and an exponent from LOWEST on; ties go to the even one.
template <int BITS, int LOWEST>
inline float block_nearest(float x) {
  const int exponent = metal::max(int(as_type<uint>(x) >> 23 & 0xFF), 127 + LOWEST) - BITS;
  const float step = as_type<float>(uint(exponent) << 23), inverse = as_type<float>(uint(254 - exponent) << 23);
  return metal::rint(x * inverse) * step;
}

// The least power of two that is not below a positive x.
inline float block_power(float x) {
  const uint bits = as_type<uint>(x);
  return as_type<float>(((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23);
}
