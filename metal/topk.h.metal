// needs: lane.h.metal softplus.h.metal
// The K best of E experts of a token by their logits, found by one simdgroup: lane l holds experts l, l + 32, ... The
// largest come first, among equal ones the lowest index.

#define TOPK_NONE -3.4e38f  // the value of an expert that is taken or left out

// An expert's score, computed from its logit alone. SCORE is 1 for sigmoid, 2 for the square root of softplus.
template <int SCORE>
inline float topk_score(float v) {
  return SCORE == 2 ? metal::precise::sqrt(softplus(v)) : 1.0f / (1.0f + metal::precise::exp(-v));
}

// An integer that orders as its float does; 0 for an expert that is taken or left out, and for NaN.
inline uint topk_key(float v) {
  const uint bits = as_type<uint>(v == 0.0f ? 0.0f : v);
  return v > TOPK_NONE ? bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u) : 0;
}

// Leaves out all but the KEPT best of GROUPS groups of adjacent experts. The value of a group is the sum of its two
// best.
template <int E, int GROUPS, int KEPT>
inline void topk_groups(thread float* value, uint lane) {
  constexpr uint N = (E + 31) / 32, SIZE = E / GROUPS;
  float score[GROUPS];
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    float first = TOPK_NONE, second = TOPK_NONE;
    for (uint i = 0; i < N; i++) {
      const uint e = lane + 32 * i;
      const float v = e < E && e / SIZE == g ? value[i] : TOPK_NONE;
      second = v > first ? first : v > second ? v : second;
      first = v > first ? v : first;
    }
    for (uint o = 1; o < 32; o *= 2) {
      const float there = simd_shuffle_xor(first, ushort(o));
      second = metal::fmax(second, simd_shuffle_xor(second, ushort(o)));
      second = metal::fmax(second, metal::fmin(first, there));
      first = metal::fmax(first, there);
    }
    score[g] = SIZE > 1 ? first + second : first;
  }
  MLX_MTL_PRAGMA_UNROLL
  for (uint g = 0; g < GROUPS; g++) {
    uint better = 0;
    MLX_MTL_PRAGMA_UNROLL
    for (uint other = 0; other < GROUPS; other++) {
      better += score[other] > score[g] || (score[other] == score[g] && other < g) ? 1 : 0;
    }
    for (uint i = 0; i < N; i++) {
      value[i] = better >= KEPT && (lane + 32 * i) / SIZE == g ? TOPK_NONE : value[i];
    }
  }
}

// Choice number `wanted`, which may differ from lane to lane. Returns the expert, and sets `weight` to its weight.
//
// A score is topk_score, or, if SCORE is 0, the softmax over all experts. Experts are chosen by their scores, to which
// bias[E] is added if BIAS is 1, or by their logits, to which it is added if BIAS is 2 and not if it is 3; their
// weights are the scores without the bias. If NORM is 1, the weights of the K experts are divided by their sum, to
// which eps is added unless SCORE is 0. All weights are multiplied by scale[0], or, if SCALED is 1, each by its
// expert's value of scale[E].
template <int E, int K, int SCORE, int BIAS, int GROUPS, int KEPT, int NORM, int SCALED, typename P, typename Q,
          typename R>
inline uint topk_choice(P logits, Q bias, R scale, float eps, uint lane, uint wanted, thread float& weight) {
  constexpr uint N = (E + 31) / 32;
  constexpr bool BY_LOGIT = !SCORE && !BIAS && KEPT == GROUPS;  // a softmax has the order of its logits
  float value[N];
  float top = TOPK_NONE, total = 0;
  for (uint i = 0; i < N; i++) {
    const uint e = lane + 32 * i;
    value[i] = e < E ? float(logits[e]) : TOPK_NONE;
    top = value[i] > top ? value[i] : top;
  }
  if (!SCORE) {
    top = simd_max(top);
    for (uint i = 0; i < N; i++) {
      total += lane + 32 * i < E ? metal::precise::exp(value[i] - top) : 0.0f;
    }
    total = lane_sum<32>(total);
  }
  for (uint i = 0; i < N && !BY_LOGIT; i++) {
    const uint e = lane + 32 * i;
    const float v = value[i];
    const float own = BIAS >= 2 ? v : SCORE ? topk_score<SCORE>(v) : metal::precise::exp(v - top) / total;
    value[i] = e < E ? own + (BIAS == 1 || BIAS == 2 ? float(bias[e]) : 0.0f) : TOPK_NONE;
  }
  if (KEPT < GROUPS) {
    topk_groups<E, GROUPS, KEPT>(value, lane);
  }

  uint key[N];
  for (uint i = 0; i < N; i++) {
    key[i] = topk_key(value[i]);
  }
  float kept = 0;
  uint found = 0;
  _Pragma("unroll 1")
  for (uint k = 0; k < K; k++) {
    uint best = 0;
    for (uint i = 0; i < N; i++) {
      best = metal::max(best, key[i]);
    }
    best = simd_max(best);
    uint where = E - 1;
    for (uint i = 0; i < N; i++) {
      where = key[i] == best ? metal::min(where, lane + 32 * i) : where;
    }
    where = simd_min(where);
    for (uint i = 0; i < N; i++) {
      key[i] = lane + 32 * i == where ? 0 : key[i];
    }
    const float logit = float(logits[where]);
    const float own = SCORE ? topk_score<SCORE>(logit) : metal::precise::exp(logit - top) / total;
    kept += own;
    weight = wanted == k ? own : weight;
    found = wanted == k ? where : found;
  }
  weight = (NORM ? weight / (SCORE ? kept + eps : kept) : weight) * scale[SCALED ? found : 0];
  return found;
}

// Writes an id to place k of arrays of 8 bytes.
template <typename P, int N>
inline void topk_copy(const thread P (&copies)[N], uint k, uint id) {
  constexpr uint EACH = 8 / sizeof(copies[0][0]);
  copies[k / EACH][k % EACH] = id;
}

// The same where there are none.
inline void topk_copy(int, uint, uint) {}
