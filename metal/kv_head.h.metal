// needs: lane.h.metal
// A head of a query or key before attention, in attend_step.metal and attend_append.metal with the same bits.

// The factor that norms x[WIDTH]. One simdgroup calls this.
template <uint WIDTH, typename P>
inline float head_norm(P x, float eps, uint lane) {
  float squares = 0;
  for (uint i = lane; i < WIDTH; i += 32) {
    squares = metal::fma(float(x[i]), float(x[i]), squares);
  }
  return metal::precise::rsqrt(lane_sum<32>(squares) / float(WIDTH) + eps);
}
