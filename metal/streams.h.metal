// needs: lane.h.metal
// A column of N streams h[N, D] after a part of a layer whose output is out[D]: v[k] = sum over j of comb[j, k] * h[j]
// + post[k] * out, rounded like a stored stream. mixing has post[N] and then comb[N, N]. If MIXED is 0, it has only
// post, and v[k] = h[k] + post[k] * out.
template <int N, int MIXED, int D, typename X, typename M>
inline void streams_behind(const device X* h, const device X* out, M mixing, uint column, thread float* v) {
  float own[N];
  for (uint j = 0; j < N; j++) {
    own[j] = float(h[j * D + column]);
  }
  const float added = float(out[column]);
  for (uint k = 0; k < N; k++) {
    float sum = MIXED ? float(mixing[k]) * added : metal::fma(float(mixing[k]), added, own[k]);
    for (uint j = 0; j < (MIXED ? N : 0); j++) {
      sum = metal::fma(float(mixing[N + j * N + k]), own[j], sum);
    }
    v[k] = float(X(sum));
  }
}

// The sum over all threads of a threadgroup of SG simdgroups; every thread gets it. `part` has room for SG values.
template <int SG, typename P>
inline float streams_sum(float v, P part, uint lane, uint simdgroup) {
  const float own = lane_sum<32>(v);
  if (lane == 0) {
    part[simdgroup] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint s = 0; s < SG; s++) {
    sum += part[s];
  }
  return sum;
}
