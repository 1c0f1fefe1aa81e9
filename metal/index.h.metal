// needs: lane.h.metal rotate.h.metal
// The queries and keys by which an indexer scores positions.

// row[D] float = x[D], normed and rotated, rounded to X. One simdgroup calls this. NORM is 0: x stays unchanged; 1: x
// is divided by the root mean square (+ eps) and multiplied by weight[D]; 2: the mean is subtracted first, and bias[D]
// is added at the end. DIMS values from FROM on, the first or the last ones, are rotated by turns[DIMS]: cosines, then
// sines. If INTERLEAVED is 1, neighbours form a pair, otherwise i and i + DIMS / 2.
template <typename X, int D, int NORM, int DIMS, int FROM, int INTERLEAVED, typename S, typename W, typename B,
          typename P>
inline void index_row(
    S x, const device W* weight, const device B* bias, float eps, P turns, P row, uint lane) {
  float mean = 0, factor = 1;
  if (NORM == 2) {
    for (uint i = lane; i < D; i += 32) {
      mean += float(x[i]);
    }
    mean = lane_sum<32>(mean) / float(D);
  }
  if (NORM) {
    float squares = 0;
    for (uint i = lane; i < D; i += 32) {
      squares = metal::fma(float(x[i]) - mean, float(x[i]) - mean, squares);
    }
    factor = metal::precise::rsqrt(lane_sum<32>(squares) / float(D) + eps);
  }
  for (uint i = lane; i < D - DIMS / 2; i += 32) {
    const bool turned = i < DIMS / 2;
    const uint first = turned ? FROM + (INTERLEAVED ? 2 * i : i) : FROM ? i - DIMS / 2 : i + DIMS / 2;
    const uint second = INTERLEAVED ? first + 1 : first + DIMS / 2;
    float a = (float(x[first]) - mean) * factor;
    a = NORM ? metal::fma(a, float(weight[first]), NORM == 2 ? float(bias[first]) : 0.0f) : a;
    if (turned) {
      float b = (float(x[second]) - mean) * factor;
      b = NORM ? metal::fma(b, float(weight[second]), NORM == 2 ? float(bias[second]) : 0.0f) : b;
      const float cosine = turns[i], sine = turns[DIMS / 2 + i];
      row[first] = float(X(rotate_first(a, b, cosine, sine)));
      row[second] = float(X(rotate_second(a, b, cosine, sine)));
    } else {
      row[first] = float(X(a));
    }
  }
}
