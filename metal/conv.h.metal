// silu of the newest output of a causal depthwise convolution over time, for one of C channels. The output is sum plus
// taps[column, TAPS] times the channel's inputs: conv[TAPS - 1, C], the oldest first, and then now[C]. If `keeps` is
// set, the inputs that the next token needs are written to next[TAPS - 1, C]. Of several tokens that follow conv, `now`
// is the first one's, `step` the number of the token, and the inputs of each are `stride` values after those before.
template <int TAPS, typename X, typename W>
inline float convolved(
    const device X* conv, const device X* now, const device W* taps, uint C, uint column, float sum, bool keeps,
    device X* next, uint step = 0, uint stride = 0) {
  for (uint j = 0; j < TAPS; j++) {
    const uint at = step + j;  // 0 is the oldest input in conv
    const X v = at + 1 < TAPS ? conv[at * C + column] : now[(at + 1 - TAPS) * stride + column];
    sum = metal::fma(float(taps[column * TAPS + j]), float(v), sum);
    if (keeps && j > 0) {
      next[(j - 1) * C + column] = v;
    }
  }
  return sum / (1.0f + metal::precise::exp(-sum));
}
