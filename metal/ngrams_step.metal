// needs: streams.h.metal
// What n-grams add to N streams h[N, D] X of one token (ops/ngrams.py). For each stream v with its key k[D], of key[N,
// D] X, and n(x) = x / sqrt(mean(x^2) + eps[0]):
//     g = n(k) key_norm . n(v) query_norm / sqrt(D);  gated = sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value
//     input = n(gated) conv_norm;  next = v + gated + silu(the convolution of the inputs)
// value[D] X serves all streams. The convolution of each channel has TAPS taps[N * D, TAPS] W, which are FAR inputs
// apart. The earlier inputs are conv[KEPT, N * D] X, the oldest first, with KEPT = (TAPS - 1) FAR; next_conv gets those
// for the next token. The norms' weights[N, D] are V.
//
// grid: (T * blocks, N, 1), threadgroup (T, 1, 1). A threadgroup sums over a whole stream, and has T of its columns.
  constexpr uint SG = T / 32, WIDTH = N * D, KEPT = (TAPS - 1) * FAR;
  threadgroup float part[4 * SG];
  const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const uint first = threadgroup_position_in_grid.y * D;
  float keys = 0, queries = 0, products = 0, values = 0;
  for (uint i = thread_index_in_threadgroup; i < D; i += T) {
    const float k = float(key[first + i]), q = float(h[first + i]), v = float(value[i]);
    keys = metal::fma(k, k, keys);
    queries = metal::fma(q, q, queries);
    products = metal::fma(k * float(key_norm[first + i]), q * float(query_norm[first + i]), products);
    values = metal::fma(v, v, values);
  }
  keys = streams_sum<SG>(keys, part, lane, simdgroup);
  queries = streams_sum<SG>(queries, part + SG, lane, simdgroup);
  products = streams_sum<SG>(products, part + 2 * SG, lane, simdgroup);
  values = streams_sum<SG>(values, part + 3 * SG, lane, simdgroup);

  const float both =
      metal::precise::rsqrt(keys / float(D) + eps[0]) * metal::precise::rsqrt(queries / float(D) + eps[0]);
  const float g = products * both * metal::precise::rsqrt(float(D)), size = metal::fabs(g);
  const float root = metal::precise::sqrt(size > 1e-6f ? size : 1e-6f);
  const float gate = 1.0f / (1.0f + metal::precise::exp(g > 0.0f ? -root : g < 0.0f ? root : 0.0f));
  const float factor = metal::precise::rsqrt(gate * gate * values / float(D) + eps[0]);

  const uint column = threadgroup_position_in_grid.x * T + thread_index_in_threadgroup;
  if (column < D) {
    const uint at = first + column;
    const float gated = gate * float(value[column]);
    const X newest = X(gated * factor * float(conv_norm[at]));
    float sum = 0;
    for (uint i = 0; i < TAPS - 1; i++) {
      sum = metal::fma(float(taps[at * TAPS + i]), float(conv[i * FAR * WIDTH + at]), sum);
    }
    sum = metal::fma(float(taps[at * TAPS + TAPS - 1]), float(newest), sum);
    next[at] = X(float(h[at]) + gated + sum / (1.0f + metal::precise::exp(-sum)));
    for (uint r = 0; r < KEPT - 1; r++) {
      next_conv[r * WIDTH + at] = conv[(r + 1) * WIDTH + at];
    }
    next_conv[(KEPT - 1) * WIDTH + at] = newest;
  }
