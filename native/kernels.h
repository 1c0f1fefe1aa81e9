/* Vector bodies of the native CPU kernels, compiled once per instruction set.
 *
 * native.c includes this file once per path after defining
 *   PATH    suffix of every name made here
 *   TARGET  function attribute that switches the instruction set on (may be empty)
 *   W       floats per vector: 16, 8 or 4
 * Only GCC/Clang vector extensions are used, so the same text is AVX-512, AVX2, NEON and plain C.
 *
 * 4-bit layout: uint32 word i of a row holds elements 8i..8i+7, element 8i+j in bits 4j..4j+3;
 * value = nibble * scale + bias, one scale and bias per 64 elements.
 */
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, PATH)
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float FN(vf) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t FN(vu) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t FN(vi) __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef float FN(f4) __attribute__((vector_size(16), aligned(4), may_alias));
typedef float FN(f8) __attribute__((vector_size(32), aligned(4), may_alias));
#define vf FN(vf)
#define vu FN(vu)
#define vi FN(vi)
#define f4 FN(f4)
#define f8 FN(f8)

INLINE vf FN(splat)(float x) { return (vf){0} + x; }

/* Sum of the lanes, upper half onto lower half. */
INLINE float FN(hsum)(vf v) {
    float lanes[W];
    *(vf *)lanes = v;
#if W == 16
    *(f8 *)lanes += *(f8 *)(lanes + 8);
#endif
#if W >= 8
    *(f4 *)lanes += *(f4 *)(lanes + 4);
#endif
    f4 s = *(f4 *)lanes;
    return (s[0] + s[1]) + (s[2] + s[3]);
}

INLINE vf FN(pick)(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* exp to about 2 ulp on [-87.3, 88], clamped outside: x = n ln2 + r, |r| <= ln2/2, Taylor to r^7. */
INLINE vf FN(vexp)(vf x) {
    x = FN(pick)((vi)(x > 88.0f), FN(splat)(88.0f), x);
    x = FN(pick)((vi)(x < -87.3f), FN(splat)(-87.3f), x);
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits. */
    vf shifted = x * 1.44269504088896341f + 12582912.0f;
    vf n = shifted - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = FN(splat)(1.0f / 5040) * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi exponent = (vi)shifted - 0x4B400000 + 127;
    return p * (vf)(exponent << 23);
}

INLINE vf FN(vsilu)(vf x) { return x / (1.0f + FN(vexp)(-x)); }

/* Apply silu(gate) * up to n floats; the last partial vector goes through a padded copy. */
static TARGET void FN(silu_mul)(const float *gate, const float *up, float *out, ptrdiff_t n) {
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) *(vf *)(out + i) = FN(vsilu)(*(const vf *)(gate + i)) * *(const vf *)(up + i);
    if (i == n) return;
    float g[W] = {0}, u[W] = {0};
    memcpy(g, gate + i, (size_t)(n - i) * 4);
    memcpy(u, up + i, (size_t)(n - i) * 4);
    *(vf *)g = FN(vsilu)(*(vf *)g) * *(vf *)u;
    memcpy(out + i, g, (size_t)(n - i) * 4);
}

/* Reorder one activation row for rows(): per block of W words, eight vectors (vector j holds
 * element 8*lane+j times 2^-4j, because the nibble is used where it stands in the word) and one
 * vector with each lane's plain sum, which multiplies the group bias. */
static TARGET void FN(pack)(const float *x, float *out, ptrdiff_t n) {
    static const float shrink[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
    ptrdiff_t words = n / 8;
    for (ptrdiff_t w0 = 0; w0 < words; w0 += W, out += 9 * W) {
        if (words - w0 < W) memset(out, 0, 9 * W * sizeof *out);
        for (ptrdiff_t lane = 0; lane < W && w0 + lane < words; lane++) {
            const float *e = x + 8 * (w0 + lane);
            for (int j = 0; j < 8; j++) out[j * W + lane] = e[j] * shrink[j];
            out[8 * W + lane] = ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
        }
    }
}

/* Scales (or biases) of the W words that start at group g, spread over the lanes. */
INLINE vf FN(spread)(const void *table, ptrdiff_t g, const int is_f32, const int groups) {
    if (is_f32) {
        const float *f = (const float *)table + g;
        vf v = FN(splat)(f[0]);
        for (int i = 8; i < W; i++) v[i] = f[groups > 1];
        return v;
    }
    const uint16_t *h = (const uint16_t *)table + g;
#if W == 16
    if (groups > 1) {
        static const vu left = {16, 16, 16, 16, 16, 16, 16, 16};
        uint32_t pair;
        memcpy(&pair, h, 4);
        return (vf)((((vu){0} + pair) << left) & 0xFFFF0000u);
    }
#endif
    return (vf)((vu){0} + ((uint32_t)h[0] << 16));
}

INLINE vf FN(nibble)(vu words, const int j) {
    vu bits = words & (15u << (4 * j));
    if (j == 7) bits = words >> 28; /* in place it would be negative as an int32 */
    return __builtin_convertvector((vi)bits, vf);
}

/* One block of R rows against T packed activations; the order of operations of an output does not
 * depend on R or T, so a row gives the same bits alone and in a batch. */
INLINE void FN(block)(const vu *words, const vf *scale, const vf *bias, const float *const *x, ptrdiff_t at,
                      vf *acc, const int R, const int T) {
    vf sum[8];
    UNROLL for (int j = 0; j < 8; j++) {
        vf xv[4];
        UNROLL for (int t = 0; t < T; t++) xv[t] = *(const vf *)(x[t] + at + j * W);
        UNROLL for (int r = 0; r < R; r++) {
            vf q = FN(nibble)(words[r], j);
            UNROLL for (int t = 0; t < T; t++) sum[r * T + t] = j ? sum[r * T + t] + q * xv[t] : q * xv[t];
        }
    }
    UNROLL for (int t = 0; t < T; t++) {
        vf total = *(const vf *)(x[t] + at + 8 * W);
        UNROLL for (int r = 0; r < R; r++) {
            acc[r * T + t] = acc[r * T + t] + sum[r * T + t] * scale[r];
            acc[r * T + t] = acc[r * T + t] + total * bias[r];
        }
    }
}

/* Where `row` starts; past the end, where the work goes on. */
INLINE const uint32_t *FN(soon)(const Matrix *m, ptrdiff_t row, ptrdiff_t r1) {
    return row < r1 || !m->next ? m->w + row * (m->in / 8) : m->next + (row - r1) * (m->in / 8);
}

/* Rows r..r+R-1 (those below r1) against T activations: y[t][row - r0]. */
INLINE void FN(row_block)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                          float *const *y, const int R, const int T, const int F32) {
    ptrdiff_t words = m->in / 8, groups = m->in / 64, unit = F32 ? 4 : 2, k = 0;
    /* Whole row blocks ahead, so that every line is asked for before it is needed. */
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * words * 4));
    const uint32_t *soon = FN(soon)(m, ahead, r1);
    const uint32_t *w[4];
    const char *s[4], *b[4];
    vf acc[8], scale[4], bias[4];
    vu word[4];
    UNROLL for (int i = 0; i < R; i++) {
        ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        w[i] = m->w + row * words;
        s[i] = (const char *)m->s + row * groups * unit;
        b[i] = (const char *)m->b + row * groups * unit;
        fetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = (vf){0};
    for (; k + W <= words; k += W) {
        UNROLL for (int i = 0; i < R; i++) {
            word[i] = *(const vu *)(w[i] + k);
            scale[i] = FN(spread)(s[i], k / 8, F32, W / 8);
            bias[i] = FN(spread)(b[i], k / 8, F32, W / 8);
            __builtin_prefetch(soon + i * words + k);
        }
        FN(block)(word, scale, bias, x, 9 * k, acc, R, T);
    }
    if (W == 16 && k < words) { /* half a vector left: an odd number of groups */
        UNROLL for (int i = 0; i < R; i++) {
            word[i] = (vu){0};
            memcpy(&word[i], w[i] + k, 32);
            scale[i] = FN(spread)(s[i], k / 8, F32, 1);
            bias[i] = FN(spread)(b[i], k / 8, F32, 1);
        }
        FN(block)(word, scale, bias, x, 9 * k, acc, R, T);
    }
    UNROLL for (int i = 0; i < R; i++) {
        if (r + i >= r1) break;
        UNROLL for (int t = 0; t < T; t++) y[t][r - r0 + i] = FN(hsum)(acc[i * T + t]);
    }
}

#define ROWS(R, T, F32)                                                                            \
    static __attribute__((noinline)) TARGET void FN(rows_##T##_##F32)(                             \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {     \
        for (ptrdiff_t r = r0; r < r1; r += R) FN(row_block)(m, r0, r, r1, x, y, R, T, F32);           \
    }
ROWS(4, 1, 0)
ROWS(4, 2, 0)
ROWS(2, 3, 0)
ROWS(2, 4, 0)
ROWS(4, 1, 1)
ROWS(4, 2, 1)
ROWS(2, 3, 1)
ROWS(2, 4, 1)
#undef ROWS

/* y[t][i] = row r0+i of m times x[t], for n <= 4 packed activations. */
static TARGET void FN(rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                            float *const *y) {
    typedef void Rows(const Matrix *, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    static Rows *const kernels[2][4] = {{FN(rows_1_0), FN(rows_2_0), FN(rows_3_0), FN(rows_4_0)},
                                        {FN(rows_1_1), FN(rows_2_1), FN(rows_3_1), FN(rows_4_1)}};
    kernels[m->is_f32][n - 1](m, r0, r1, x, y);
}

INLINE float FN(coefficient)(const void *table, ptrdiff_t g, int is_f32) {
    if (is_f32) return ((const float *)table)[g];
    uint32_t bits = (uint32_t)((const uint16_t *)table)[g] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rows r0..r1 of a 4-bit matrix as float32 in element order; `out` is where row r0 goes. */
static TARGET void FN(dequantize4)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out) {
    static const uint32_t shifts[8] = {0, 4, 8, 12, 16, 20, 24, 28};
    ptrdiff_t words = m->in / 8;
    enum { L = W < 8 ? W : 8 };
    typedef uint32_t lu __attribute__((vector_size(4 * L), aligned(4), may_alias));
    typedef int32_t li __attribute__((vector_size(4 * L), aligned(4), may_alias));
    typedef float lf __attribute__((vector_size(4 * L), aligned(4), may_alias));
    for (ptrdiff_t k = r0 * words; k < r1 * words; k++) {
        float s = FN(coefficient)(m->s, k / 8, m->is_f32), b = FN(coefficient)(m->b, k / 8, m->is_f32);
        for (int j = 0; j < 8; j += L) {
            lu bits = (((lu){0} + m->w[k]) >> *(const lu *)(shifts + j)) & 15u;
            *(lf *)(out + 8 * (k - r0 * words) + j) = __builtin_convertvector((li)bits, lf) * s + b;
        }
    }
}

/* The same for 8-bit codes. */
static TARGET void FN(dequantize8)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out) {
    typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
    const uint8_t *codes = (const uint8_t *)m->w + r0 * m->in;
    for (ptrdiff_t g = 0; g < (r1 - r0) * (m->in / 64); g++, codes += 64, out += 64) {
        ptrdiff_t at = r0 * (m->in / 64) + g;
        float s = FN(coefficient)(m->s, at, m->is_f32), b = FN(coefficient)(m->b, at, m->is_f32);
        for (int i = 0; i < 64; i += W)
            *(vf *)(out + i) = __builtin_convertvector(*(const vb *)(codes + i), vf) * s + b;
    }
}

static void FN(dequantize)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out) {
    (m->bits == 8 ? FN(dequantize8) : FN(dequantize4))(m, r0, r1, out);
}

/* out = sum_k weight[k] * y[k] + mid + shared for columns h0..h1 of one token, k ascending. */
static TARGET void FN(combine)(const float *const *y, const float *weight, ptrdiff_t K, const float *mid,
                               const float *shared, float *out, ptrdiff_t h0, ptrdiff_t h1) {
    for (ptrdiff_t h = h0; h < h1; h++) out[h] = 0;
    for (ptrdiff_t k = 0; k < K; k++)
        for (ptrdiff_t h = h0; h < h1; h++) out[h] += weight[k] * y[k][h];
    for (ptrdiff_t h = h0; h < h1; h++) out[h] += mid[h];
    for (ptrdiff_t h = h0; shared && h < h1; h++) out[h] += shared[h];
}

/* n a multiple of W; four sums, so that additions do not wait for each other. */
INLINE float FN(dot)(const float *a, const float *b, ptrdiff_t n) {
    vf s[4] = {{0}, {0}, {0}, {0}};
    ptrdiff_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        UNROLL for (int j = 0; j < 4; j++) s[j] += *(const vf *)(a + i + j * W) * *(const vf *)(b + i + j * W);
    for (; i < n; i += W) s[0] += *(const vf *)(a + i) * *(const vf *)(b + i);
    return FN(hsum)((s[0] + s[1]) + (s[2] + s[3]));
}

/* y[t][i] = row r0+i of a dense or 8-bit matrix times x[t], element order as stored; `row` holds m->in floats. */
static TARGET void FN(plain_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                                  float *const *y, float *row) {
    for (ptrdiff_t r = r0; r < r1; r++) {
        const float *values = row;
        if (m->bits == 32) values = (const float *)m->w + r * m->in;
        else FN(dequantize8)(m, r, r + 1, row);
        for (ptrdiff_t t = 0; t < n; t++) y[t][r - r0] = FN(dot)(values, x[t], m->in);
    }
}

/* x / sqrt(mean(x^2) + eps) * weight, n a multiple of 16. */
static TARGET void FN(rms_norm)(const float *x, const float *weight, float eps, float *out, ptrdiff_t n) {
    float inv = 1.0f / sqrtf(FN(dot)(x, x, n) / (float)n + eps);
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf v = *(const vf *)(x + i) * inv;
        if (weight) v *= *(const vf *)(weight + i);
        *(vf *)(out + i) = v;
    }
}

/* scores[g][i] -> softmax over i < n; the row is padded to whole vectors. */
INLINE void FN(softmax)(float *row, ptrdiff_t n) {
    vf top = FN(splat)(-INFINITY), sum = {0};
    for (ptrdiff_t i = n; i % W; i++) row[i] = -INFINITY;
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf v = *(vf *)(row + i);
        top = FN(pick)((vi)(v > top), v, top);
    }
    float peak = top[0];
    for (int i = 1; i < W; i++) peak = top[i] > peak ? top[i] : peak;
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf e = FN(vexp)(*(vf *)(row + i) - peak);
        *(vf *)(row + i) = e;
        sum += e;
    }
    float inv = 1.0f / FN(hsum)(sum);
    for (ptrdiff_t i = 0; i < n; i += W) *(vf *)(row + i) *= inv;
}

/* out[g] = sum_i p[g][i] v[i] for G heads that share the values; a few rows at a time, which stay in L1. */
INLINE void FN(mix)(const float *p, ptrdiff_t pad, const float *v, ptrdiff_t n, ptrdiff_t dv, float *out, const int G) {
    memset(out, 0, (size_t)(G * dv) * sizeof *out);
    for (ptrdiff_t i0 = 0; i0 < n; i0 += CACHE_AHEAD) {
        ptrdiff_t i1 = least(i0 + CACHE_AHEAD, n);
        for (ptrdiff_t d = 0; d < dv; d += W) {
            vf acc[8];
            UNROLL for (int g = 0; g < G; g++) acc[g] = *(vf *)(out + g * dv + d);
            for (ptrdiff_t i = i0; i < i1; i++) {
                vf row = *(const vf *)(v + i * dv + d);
                __builtin_prefetch(v + (i + CACHE_AHEAD) * dv + d);
                UNROLL for (int g = 0; g < G; g++) acc[g] += row * p[g * pad + i];
            }
            UNROLL for (int g = 0; g < G; g++) *(vf *)(out + g * dv + d) = acc[g];
        }
    }
}

/* Up to GQA_HEADS query heads that share one key/value head; scores holds GQA_HEADS rows of `pad`. */
static TARGET void FN(attend)(const float *q, ptrdiff_t heads, const float *k, const float *v, ptrdiff_t n,
                              ptrdiff_t dk, ptrdiff_t dv, float scale, float *scores, ptrdiff_t pad, float *out) {
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t c = 0; c < dk; c += 16) __builtin_prefetch(k + (i + CACHE_AHEAD) * dk + c);
        for (ptrdiff_t g = 0; g < heads; g++) scores[g * pad + i] = FN(dot)(q + g * dk, k + i * dk, dk) * scale;
    }
    for (ptrdiff_t g = 0; g < heads; g++) FN(softmax)(scores + g * pad, n);
    for (ptrdiff_t g = 0; g < heads;) {
        const float *p = scores + g * pad;
        ptrdiff_t left = heads - g;
        if (left >= 8) FN(mix)(p, pad, v, n, dv, out + g * dv, 8), g += 8;
        else if (left >= 4) FN(mix)(p, pad, v, n, dv, out + g * dv, 4), g += 4;
        else FN(mix)(p, pad, v, n, dv, out + g * dv, 1), g += 1;
    }
}

/* One token of the gated delta rule for one value head: state [dv, dk] becomes `next`, which may be the same. */
static TARGET void FN(delta)(const float *state, float *next, const float *q, const float *k, const float *v, float decay, float beta,
                             float *out, ptrdiff_t dv, ptrdiff_t dk) {
    for (ptrdiff_t i = 0; i < dv; i++) {
        float *row = next + i * dk;
        vf memory = {0}, read = {0};
        for (ptrdiff_t c = 0; c < dk; c += W) {
            vf s = *(const vf *)(state + i * dk + c) * decay;
            *(vf *)(row + c) = s;
            memory += s * *(const vf *)(k + c);
        }
        float write = (v[i] - FN(hsum)(memory)) * beta;
        for (ptrdiff_t c = 0; c < dk; c += W) {
            vf s = *(vf *)(row + c) + *(const vf *)(k + c) * write;
            *(vf *)(row + c) = s;
            read += s * *(const vf *)(q + c);
        }
        out[i] = FN(hsum)(read);
    }
}

/* Depthwise causal convolution of one token then silu; state [taps-1, C] holds the oldest row first. */
static TARGET void FN(conv)(float *state, const float *x, const float *weight, ptrdiff_t taps, ptrdiff_t C,
                            ptrdiff_t c0, ptrdiff_t c1, float *out) {
    for (ptrdiff_t c = c0; c < c1; c += W) {
        vf newest = *(const vf *)(x + c), sum = newest * *(const vf *)(weight + (taps - 1) * C + c);
        for (ptrdiff_t j = 0; j < taps - 1; j++) {
            vf old = *(vf *)(state + j * C + c);
            sum += old * *(const vf *)(weight + j * C + c);
            if (j) *(vf *)(state + (j - 1) * C + c) = old;
        }
        if (taps > 1) *(vf *)(state + (taps - 2) * C + c) = newest;
        *(vf *)(out + c) = FN(vsilu)(sum);
    }
}

/* Rotate the first 2 * half values of one head: value i with i + half, or neighbours; the rest is copied. */
static TARGET void FN(rope)(const float *x, const float *cosine, const float *sine, ptrdiff_t half, int neighbours,
                            float *out, ptrdiff_t n) {
    ptrdiff_t i = 0;
    memcpy(out + 2 * half, x + 2 * half, (size_t)(n - 2 * half) * 4);
    if (neighbours) {
        for (; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            out[2 * i] = a * cosine[i] - b * sine[i];
            out[2 * i + 1] = a * sine[i] + b * cosine[i];
        }
        return;
    }
    for (; i + W <= half; i += W) {
        vf a = *(const vf *)(x + i), b = *(const vf *)(x + half + i);
        vf c = *(const vf *)(cosine + i), s = *(const vf *)(sine + i);
        *(vf *)(out + i) = a * c - b * s;
        *(vf *)(out + half + i) = a * s + b * c;
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        out[i] = a * cosine[i] - b * sine[i];
        out[half + i] = a * sine[i] + b * cosine[i];
    }
}

/* XOR of n words: reads memory as fast as the path can, for the benchmark. */
static TARGET uint32_t FN(fold)(const uint32_t *p, ptrdiff_t n) {
    vu a = {0}, b = {0}, c = {0}, d = {0};
    uint32_t out = 0;
    ptrdiff_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        a ^= *(const vu *)(p + i);
        b ^= *(const vu *)(p + i + W);
        c ^= *(const vu *)(p + i + 2 * W);
        d ^= *(const vu *)(p + i + 3 * W);
    }
    for (; i < n; i++) out ^= p[i];
    a ^= b ^ c ^ d;
    for (int j = 0; j < W; j++) out ^= a[j];
    return out;
}

static const Path FN(path) = {
    FN(path_name), W, FN(pack), FN(rows), FN(plain_rows), FN(dequantize), FN(combine), FN(silu_mul),
    FN(rms_norm), FN(rope), FN(attend), FN(delta), FN(conv), FN(fold),
    NULL, NULL,
};

#undef vf
#undef vu
#undef vi
#undef f4
#undef f8
#undef FN
#undef CAT
#undef CAT_
#undef INLINE
#undef PATH
#undef TARGET
#undef W
