/* The vector code of the native CPU kernels. It is compiled once for each instruction set.
 *
 * The file of an instruction set defines these macros before it includes this file:
 *   PATH    the suffix of every name that this file defines
 *   TARGET  the function attribute that enables the instruction set (may be empty)
 *   W       the number of floats in a vector: 16, 8 or 4
 * Most of the code uses only the vector extensions of GCC and Clang, so the same text serves AVX-512, AVX2, NEON and
 * plain C. Intrinsics stand only under an #if that asks for W.
 *
 * Layout of 4-bit codes: uint32 word i of a row holds columns 8i to 8i+7, and column 8i+j is in bits 4j to 4j+3 of
 * it. A value is code * scale + bias, with one scale and one bias per 64 columns.
 */
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

/* Returns the sum of the lanes. The upper half is added to the lower half until four lanes are left. */
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

/* Writes the sums in acc [R, T], of rows r to r+R-1, to y[t][row - r0]. Rows from r1 on are left out. */
INLINE void FN(store)(const vf *acc, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, float *const *y, const int R,
                      const int T) {
    UNROLL for (int i = 0; i < R; i++) {
        if (r + i >= r1) break;
        UNROLL for (int t = 0; t < T; t++) y[t][r - r0 + i] = FN(hsum)(acc[i * T + t]);
    }
}

/* ---- Operations on 32-bit words that differ by instruction set: lanes by index, every third or fifth word, E2M1
 * codes ---- */

#if W == 16
INLINE vu FN(permute)(vu v, vi from) { return (vu)_mm512_permutexvar_epi32((__m512i)from, (__m512i)v); }

INLINE vu FN(strided)(const uint32_t *p, const int step) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return (vu)_mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(step)), p, 4);
}

/* Replaces each byte, an E2M1 code, by twice its value plus 16. */
INLINE vu FN(e2m1)(vu codes) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_BYTES));
    return (vu)_mm512_shuffle_epi8(table, (__m512i)codes);
}
#elif W == 8
INLINE vu FN(permute)(vu v, vi from) { return (vu)_mm256_permutevar8x32_epi32((__m256i)v, (__m256i)from); }

INLINE vu FN(e2m1)(vu codes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_BYTES));
    return (vu)_mm256_shuffle_epi8(table, (__m256i)codes);
}

/* BLEND3 takes lanes 0, 3 and 6 from a, lanes 1, 4 and 7 from b, and lanes 2 and 5 from c. BLEND5 takes lane i from
 * its argument i % 5. */
#define BLEND3(a, b, c) _mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x92), c, 0x24)
#define BLEND5(a, b, c, d, e) \
    _mm256_blend_epi32(_mm256_blend_epi32(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x42), c, 0x84), d, 0x08), e, 0x10)

/* Sets out[k] to words k, k + 3, k + 6, ... of p. Word n is loaded into lane n % 8 of a vector. The words of one k
 * are then in different lanes, so one blend collects them and one permutation puts them in order. */
INLINE void FN(deinterleave3)(const uint32_t *p, vu *out) {
    const vi order = {0, 3, 6, 1, 4, 7, 2, 5};
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 8));
    __m256i c = _mm256_loadu_si256((const __m256i *)(p + 16));
    out[0] = FN(permute)((vu)BLEND3(a, b, c), order);
    out[1] = FN(permute)((vu)BLEND3(c, a, b), (order + 1) & 7);
    out[2] = FN(permute)((vu)BLEND3(b, c, a), (order + 2) & 7);
}

INLINE void FN(deinterleave5)(const uint32_t *p, vu *out) {
    const vi order = {0, 5, 2, 7, 4, 1, 6, 3};
    __m256i v[5];
    UNROLL for (int i = 0; i < 5; i++) v[i] = _mm256_loadu_si256((const __m256i *)(p + 8 * i));
    UNROLL for (int k = 0; k < 5; k++) {
        vu mixed = (vu)BLEND5(v[2 * k % 5], v[(2 * k + 3) % 5], v[(2 * k + 1) % 5], v[(2 * k + 4) % 5],
                              v[(2 * k + 2) % 5]);
        out[k] = FN(permute)(mixed, (order + k) & 7);
    }
}
#undef BLEND3
#undef BLEND5
#else
INLINE vu FN(strided)(const uint32_t *p, const int step) {
    vu v;
    for (int i = 0; i < W; i++) v[i] = p[step * i];
    return v;
}

/* Computes the same by arithmetic on bytes. Twice the value of an E2M1 code equals the code up to 4; for codes 5, 6
 * and 7 it is 1, 2 and 5 more. */
INLINE vu FN(e2m1)(vu codes) {
    const vu one = (vu){0} + 0x01010101u;
    vu high = codes >> 2 & one, a = high & codes, b = high & codes >> 1, sign = codes >> 3 & one;
    vu size = (codes & 0x07070707u) + a + 2 * b + 2 * (a & b);
    return 0x10101010u + size - 2 * (size & ((sign << 4) - sign));
}
#endif
#if W != 8
INLINE void FN(deinterleave3)(const uint32_t *p, vu *out) {
    UNROLL for (int k = 0; k < 3; k++) out[k] = FN(strided)(p + k, 3);
}

INLINE void FN(deinterleave5)(const uint32_t *p, vu *out) {
    UNROLL for (int k = 0; k < 5; k++) out[k] = FN(strided)(p + k, 5);
}
#endif

INLINE vf FN(select)(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Returns exp(x) to about 2 ulp for x in [-87.3, 88]; outside, x is clamped. x = n ln2 + r with |r| <= ln2/2, and
 * exp(r) is the Taylor polynomial of degree 7. */
INLINE vf FN(vexp)(vf x) {
    x = FN(select)((vi)(x > 88.0f), FN(splat)(88.0f), x);
    x = FN(select)((vi)(x < -87.3f), FN(splat)(-87.3f), x);
    /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits of the mantissa. */
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

/* Returns the smaller of x and limit; NaN stays NaN. */
INLINE vf FN(vmin)(vf x, vf limit) { return FN(select)((vi)(x > limit), limit, x); }

/* Returns limit * tanh(x / limit), tanh to about 2 ulp: of a small x by a continued fraction, because the difference to 1
 * has few bits of it. NaN stays NaN. */
INLINE vf FN(vcap)(vf x, vf limit) {
    x = x / limit;
    vf s = x * x, near = x * ((s + 105.0f) * s + 945.0f) / ((s * 15.0f + 420.0f) * s + 945.0f);
    vf far = 1.0f - 2.0f / (FN(vexp)(2.0f * FN(select)((vi)(x < 0.0f), -x, x)) + 1.0f);
    return limit * FN(select)((vi)(s < 0.3f), near, FN(select)((vi)(x < 0.0f), -far, far));
}

/* Combines gate g and up u. The factor 1.5957691 of GELU is 2 sqrt(2 / pi), because (1 + tanh z) / 2 = sigmoid(2 z). */
INLINE vf FN(activated)(vf g, vf u, vf limit, vf gate_limit, const Activation form) {
    if (form == SILU) return FN(vsilu)(g) * u;
    if (form == GELU) return g / (1.0f + FN(vexp)(-1.5957691216f * (g + 0.044715f * g * g * g))) * u;
    if (form == RELU) return FN(select)((vi)(g < 0.0f), FN(splat)(0), g) * u;
    if (form == SITU) {
        u = FN(select)((vi)(limit > 0.0f), FN(vcap)(u, limit), u);
        return FN(vcap)(g, gate_limit) / (1.0f + FN(vexp)(-g)) * u;
    }
    u = -FN(vmin)(-FN(vmin)(u, limit), limit);
    if (form == SILU_THEN_CLIP) return FN(vmin)(FN(vsilu)(g), limit) * u;
    g = FN(vmin)(g, limit);
    if (form == CLIP_THEN_SILU) return FN(vsilu)(g) * u;
    return g / (1.0f + FN(vexp)(-1.702f * g)) * (u + 1.0f);
}

/* Combines n values of gate and up. If the last vector is not full, it is computed in a padded copy. */
INLINE void FN(activate_by)(const Activation form, const Joining *by, const float *gate, const float *up, float *out,
                            ptrdiff_t n) {
    const vf most = FN(splat)(by->limit), of_gate = FN(splat)(by->gate_limit);
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W)
        *(vf *)(out + i) = FN(activated)(*(const vf *)(gate + i), *(const vf *)(up + i), most, of_gate, form);
    if (i == n) return;
    float g[W] = {0}, u[W] = {0};
    memcpy(g, gate + i, (size_t)(n - i) * 4);
    memcpy(u, up + i, (size_t)(n - i) * 4);
    *(vf *)g = FN(activated)(*(vf *)g, *(vf *)u, most, of_gate, form);
    memcpy(out + i, g, (size_t)(n - i) * 4);
}

static TARGET void FN(activate)(const Joining *by, const float *gate, const float *up, float *out, ptrdiff_t n) {
    switch (by->form) {
    case SILU: FN(activate_by)(SILU, by, gate, up, out, n); break;
    case GELU: FN(activate_by)(GELU, by, gate, up, out, n); break;
    case CLIP_THEN_SILU: FN(activate_by)(CLIP_THEN_SILU, by, gate, up, out, n); break;
    case SILU_THEN_CLIP: FN(activate_by)(SILU_THEN_CLIP, by, gate, up, out, n); break;
    case CLIP_THEN_SWISH: FN(activate_by)(CLIP_THEN_SWISH, by, gate, up, out, n); break;
    case RELU: FN(activate_by)(RELU, by, gate, up, out, n); break;
    case SITU: FN(activate_by)(SITU, by, gate, up, out, n); break;
    }
}

/* Reorders a row of activations for rows(). Each block of W words becomes nine vectors. Vector j < 8 holds columns
 * 8*lane+j times 2^-4j: the kernel does not shift code j down in its word, so the code counts 2^4j times. Vector 8
 * holds the sum of the activations of each lane, which is multiplied by the group's bias. */
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

/* Returns the scales (or biases) of W words, one per lane. The words begin with group g; a group has eight words. */
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
    if (j == 7) bits = words >> 28; /* without the shift it would be negative as an int32 */
    return __builtin_convertvector((vi)bits, vf);
}

/* Adds the products of a block of R rows and T packed rows of activations to acc. The order of operations for one
 * output does not depend on R or T, so a row of x has the same bits alone and among others. */
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

/* Multiplies rows r to r+R-1 (those below r1) by T packed rows of activations: sets y[t][row - r0]. */
INLINE void FN(row_block)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                          float *const *y, const int R, const int T, const int F32) {
    ptrdiff_t words = m->in / 8, groups = m->in / 64, unit = F32 ? 4 : 2, k = 0;
    /* Prefetches whole blocks of rows ahead, so that every cache line is requested before it is needed. */
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * words * 4));
    const uint32_t *soon = address_ahead(m, ahead, r1);
    const uint32_t *w[4];
    const char *s[4], *b[4];
    vf acc[8], scale[4], bias[4];
    vu word[4];
    UNROLL for (int i = 0; i < R; i++) {
        ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        w[i] = m->w + row * words;
        s[i] = (const char *)m->s + row * groups * unit;
        b[i] = (const char *)m->b + row * groups * unit;
        prefetch_tables(m, ahead + i, r1);
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
    if (W == 16 && k < words) { /* with an odd number of groups, half a vector is left */
        UNROLL for (int i = 0; i < R; i++) {
            word[i] = (vu){0};
            memcpy(&word[i], w[i] + k, 32);
            scale[i] = FN(spread)(s[i], k / 8, F32, 1);
            bias[i] = FN(spread)(b[i], k / 8, F32, 1);
        }
        FN(block)(word, scale, bias, x, 9 * k, acc, R, T);
    }
    FN(store)(acc, r0, r, r1, y, R, T);
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

/* Sets y[t][i] to row r0+i of m times x[t], for n <= 4 packed rows of activations. */
static TARGET void FN(rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                            float *const *y) {
    typedef void Rows(const Matrix *, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    static Rows *const kernels[2][4] = {{FN(rows_1_0), FN(rows_2_0), FN(rows_3_0), FN(rows_4_0)},
                                        {FN(rows_1_1), FN(rows_2_1), FN(rows_3_1), FN(rows_4_1)}};
    kernels[m->kind == F32][n - 1](m, r0, r1, x, y);
}

/* ---- scales and biases ---------------------------------------------------------------------------------- */

/* Converts the bits of float16 values to float. */
INLINE vf FN(half)(vu bits) {
    vu size = (bits & 0x7FFFu) << 13;
    vu value = (vu)((vf)size * 0x1p112f) | ((vu)((bits & 0x7C00u) == 0x7C00u) & 0x7F800000u);
    return (vf)(value | (bits & 0x8000u) << 16);
}

/* Converts the bits of scales or biases of this kind to float. */
INLINE vf FN(decoded)(vu bits, const Kind kind) {
    if (kind == BF16) return (vf)(bits << 16);
    if (kind == F16) return FN(half)(bits);
    if (kind == E8M0) return (vf)(bits << 23 | ((vu)(bits == 0) & 0x00400000u));
    if (kind == E4M3_SCALE) return FN(half)((bits & 0x80) << 8 | (bits & 0x7F) << 7) * 256.0f;
    return (vf)bits;
}

INLINE uint32_t FN(bits_of)(const void *table, ptrdiff_t i, const int kind) {
    if (kind == F32) return ((const uint32_t *)table)[i];
    return kind >= E8M0 ? ((const uint8_t *)table)[i] : ((const uint16_t *)table)[i];
}

/* Converts n scales or biases to floats and writes a vector of zeros behind them. Lanes beyond the row read these
 * zeros, and their activations are zero too. */
INLINE void FN(decode)(const void *table, ptrdiff_t first, ptrdiff_t n, const Kind kind, float *out) {
    typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));
    typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
    ptrdiff_t i = 0;
    if (kind == BF16 || kind == F16)
        for (; i + W <= n; i += W) {
            vu bits = __builtin_convertvector(*(const vh *)((const uint16_t *)table + first + i), vu);
            *(vf *)(out + i) = kind == BF16 ? FN(decoded)(bits, BF16) : FN(decoded)(bits, F16);
        }
    else if (kind >= E8M0)
        for (; i + W <= n; i += W) {
            vu bits = __builtin_convertvector(*(const vb *)((const uint8_t *)table + first + i), vu);
            *(vf *)(out + i) = kind == E8M0 ? FN(decoded)(bits, E8M0) : FN(decoded)(bits, E4M3_SCALE);
        }
    for (; i < n; i++) out[i] = FN(decoded)((vu){0} + FN(bits_of)(table, first + i, kind), kind)[0];
    *(vf *)(out + n) = (vf){0};
}

/* ---- nested scales (nested.h) -------------------------------------------------------------------------
 *
 * nested_scales computes scales and biases of W groups, from group `at` of the first 256 weights on. `s` is where the
 * bytes of scales of these weights are, and `d` where their supers are. With 8 groups in 256 weights and W = 16 there
 * are those of the next 256 weights too; if the row ends before these (`is_last`), their scales are zero. If `apart`,
 * the groups' order is 0, 2, 4, ..., 14, 1, 3, 5, ..., 15.
 */
#if W == 4
INLINE void FN(nested_scales)(const uint8_t *s, const uint8_t *d, ptrdiff_t at, int is_last, const int bits,
                              const int apart, vf *scale, vf *bias) {
    const ScaleCodes codes = scale_codes(s, bits);
    uint16_t supers[2] = {0};
    vi scales, minima;
    memcpy(supers, d, (size_t)(bits == 3 || bits == 6 ? 2 : 4));
    if (apart) {
        const uint64_t eight = codes.scales[at % 8 / 4] >> 8 * (at / 8); /* every second byte of it */
        UNROLL for (int i = 0; i < W; i++) scales[i] = (int32_t)(eight >> 16 * i & 255) - scale_offset(bits);
        minima = (vi){0};
    } else {
        const uint32_t four = (uint32_t)(codes.scales[at / 8] >> 8 * (at % 8));
        const uint32_t least = (uint32_t)(codes.minima[at / 8] >> 8 * (at % 8));
        const vu places = {0, 8, 16, 24};
        scales = (vi)(((vu){0} + four) >> places & 255) - scale_offset(bits), minima = (vi)(((vu){0} + least) >> places & 255);
    }
    (void)is_last;
    *scale = __builtin_convertvector(scales, vf) * FN(half)((vu){0} + supers[0]);
    *bias = nested_has_minima(bits) ? __builtin_convertvector(minima, vf) * -FN(half)((vu){0} + supers[1])
                                    : *scale * -(float)(1 << (bits - 1));
}
#else
#if W == 16
#define TO_FLOATS(v) ((vf)_mm512_cvtepi32_ps(v))
#define UNSIGNED(v) _mm512_cvtepu8_epi32(v)
#define SIGNED(v) _mm512_cvtepi8_epi32(v)
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define FLOAT16(v) _mm512_castps512_ps128(_mm512_cvtph_ps(_mm256_castsi128_si256(v)))
#define BROADCAST(v) ((vf)_mm512_broadcastss_ps(v))
#else
#define TO_FLOATS(v) ((vf)_mm256_cvtepi32_ps(v))
#define UNSIGNED(v) _mm256_cvtepu8_epi32(v)
#define SIGNED(v) _mm256_cvtepi8_epi32(v)
#define LOAD(from) _mm_loadl_epi64((const __m128i *)(from))
#define FLOAT16(v) _mm_cvtph_ps(v)
#define BROADCAST(v) ((vf)_mm256_broadcastss_ps(v))
#endif

/* Returns 8 bytes of S and 8 bytes of M of a block of 4 or 5 bits. Its words are d and m; S of groups 0 to 3, and above
 * them high bits of groups 4 to 7; M likewise; low bits of S and of M of groups 4 to 7. */
INLINE __m128i FN(six_bits)(__m128i v) {
    const __m128i first = _mm_shuffle_epi32(v, _MM_SHUFFLE(3, 2, 3, 1)), high = _mm_shuffle_epi32(v, _MM_SHUFFLE(2, 0, 1, 0));
    const __m128i kept = _mm_setr_epi32(0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F);
    const __m128i low = _mm_and_si128(_mm_srlv_epi32(first, _mm_setr_epi32(0, 0, 0, 4)), kept);
    return _mm_or_si128(low, _mm_and_si128(_mm_srli_epi16(high, 2), _mm_setr_epi32(0, 0x30303030, 0, 0x30303030)));
}

/* Returns 16 signed bytes of S of a block of 3 bits. */
INLINE __m128i FN(six_bits_of_three)(const uint8_t *s, const int apart) {
    int32_t last;
    memcpy(&last, s + 8, 4);
    const __m128i v = _mm_loadl_epi64((const __m128i *)s), more = _mm_set1_epi32(last);
    const __m128i low = _mm_and_si128(_mm_unpacklo_epi64(v, _mm_srli_epi16(v, 4)), _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srlv_epi32(more, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    const __m128i all = _mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(high, 4)), _mm_set1_epi8(32));
    return apart ? _mm_shuffle_epi8(all, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)) : all;
}

INLINE void FN(nested_scales)(const uint8_t *s, const uint8_t *d, ptrdiff_t at, int is_last, const int bits,
                              const int apart, vf *scale, vf *bias) {
    vf scales, minima = {0}, first, second = {0};
    int32_t supers = 0;
    memcpy(&supers, d, bits == 3 || bits == 6 ? 2 : 4);
    const __m128 few = FLOAT16(_mm_cvtsi32_si128(supers));
    first = BROADCAST(few);
    if (nested_has_minima(bits)) second = BROADCAST(_mm_shuffle_ps(few, few, 1));
    if (bits == 2) {
        const vu both = (vu)UNSIGNED(LOAD(s + at));
        scales = __builtin_convertvector((vi)(both & 15), vf), minima = __builtin_convertvector((vi)(both >> 4), vf);
    } else if (bits == 3) {
        const __m128i all = FN(six_bits_of_three)(s, apart);
        scales = TO_FLOATS(SIGNED(at ? _mm_unpackhi_epi64(all, all) : all));
    } else if (bits == 6) {
        scales = TO_FLOATS(SIGNED(LOAD(s + at)));
    } else {
        const __m128i v = _mm_loadu_si128((const __m128i *)s), codes = FN(six_bits)(v);
#if W == 16
        const __m128i next = is_last ? _mm_setzero_si128() : _mm_loadu_si128((const __m128i *)(s + 16));
        const __m128i others = FN(six_bits)(next);
        const __m512 all = _mm512_castps128_ps512(FLOAT16(_mm_unpacklo_epi32(v, next)));
        first = (vf)_mm512_permutexvar_ps(_mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0), all);
        second = (vf)_mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1), all);
        scales = TO_FLOATS(UNSIGNED(_mm_unpacklo_epi64(codes, others)));
        minima = TO_FLOATS(UNSIGNED(_mm_unpackhi_epi64(codes, others)));
#else
        scales = TO_FLOATS(UNSIGNED(codes)), minima = TO_FLOATS(UNSIGNED(_mm_unpackhi_epi64(codes, codes)));
#endif
    }
    (void)is_last;
    *scale = scales * first;
    *bias = nested_has_minima(bits) ? minima * -second : *scale * -(float)(1 << (bits - 1));
}
#undef TO_FLOATS
#undef UNSIGNED
#undef SIGNED
#undef LOAD
#undef FLOAT16
#undef BROADCAST
#endif

enum { FN(TABLE) = 128, FN(SECOND) = FN(TABLE) / 2 + W }; /* groups whose scales are decoded at once */

/* As tables, for a NESTED matrix. */
INLINE void FN(nested_tables)(const Matrix *m, ptrdiff_t row, ptrdiff_t first, ptrdiff_t n, const int bits, float *scales,
                              float *biases) {
    const ptrdiff_t each = SUPER / nested_group(bits), size = nested_bytes(bits), count = nested_supers(bits);
    const uint8_t *s = (const uint8_t *)m->s + row * m->s_bytes, *b = (const uint8_t *)m->b + row * m->b_bytes;
    const int apart = bits == 3;
    for (ptrdiff_t i = 0; i < n; i += W) {
        const ptrdiff_t at = (first + i) / each, to = apart ? i / 16 * 8 + i % 8 + i % 16 / 8 * FN(SECOND) : i;
        const uint8_t *from = s + at * size;
        vf scale, bias;
        FN(nested_scales)(from, count ? b + at * count * 2 : from, (first + i) % each, (at + 1) * SUPER >= m->in, bits,
                          apart, &scale, &bias);
#if W == 16
        if (apart) {
            memcpy(scales + to, &scale, 32), memcpy(scales + to + FN(SECOND), (float *)&scale + 8, 32);
            memcpy(biases + to, &bias, 32), memcpy(biases + to + FN(SECOND), (float *)&bias + 8, 32);
            continue;
        }
#endif
        *(vf *)(scales + to) = scale, *(vf *)(biases + to) = bias;
    }
    *(vf *)(scales + n / (1 + apart)) = *(vf *)(biases + n / (1 + apart)) = (vf){0};
    if (apart) *(vf *)(scales + n / 2 + FN(SECOND)) = *(vf *)(biases + n / 2 + FN(SECOND)) = (vf){0};
}

/* Converts the scales and biases of n groups of a row, from group `first` on, to floats, and writes a vector of zeros
 * behind them. If a block has two groups, the blocks' second groups are apart, from SECOND on. */
static __attribute__((noinline)) TARGET void FN(tables)(const Matrix *m, ptrdiff_t row, ptrdiff_t first, ptrdiff_t n,
                                                        float *scales, float *biases) {
    if (m->source == NESTED) {
        switch (m->bits) {
        case 2: FN(nested_tables)(m, row, first, n, 2, scales, biases); break;
        case 3: FN(nested_tables)(m, row, first, n, 3, scales, biases); break;
        case 6: FN(nested_tables)(m, row, first, n, 6, scales, biases); break;
        default: FN(nested_tables)(m, row, first, n, 4, scales, biases);
        }
        return;
    }
    FN(decode)(m->s, row * m->groups + first, n, m->kind, scales);
    if (m->source == MLX) FN(decode)(m->b, row * m->groups + first, n, m->kind, biases);
    else for (ptrdiff_t i = 0; i < n + W; i++) biases[i] = scales[i] * -(float)(1 << (m->bits - 1));
}

/* Adds bias[first + i] to y[i] for each i < n. */
static TARGET void FN(add)(const void *bias, ptrdiff_t first, ptrdiff_t n, Kind kind, float *y) {
    enum { TABLE = 128 };
    float values[TABLE + W];
    for (ptrdiff_t i = 0; i < n; i += TABLE) {
        const ptrdiff_t count = min(TABLE, n - i);
        FN(decode)(bias, first + i, count, kind, values);
        for (ptrdiff_t j = 0; j < count; j++) y[i + j] += values[j];
    }
}

/* ---- E4M3 codes ----------------------------------------------------------------------------------------
 *
 * 4 W codes unpack to four vectors. If W is 8 or 16, two vectors get the codes of the even bytes and two those of
 * the odd bytes, because codes are moved to halves of 16 bits and converted as float16. The bits of a code at that
 * place mean 2^-8 times its value, also for subnormal numbers, so activations are multiplied by 2^8 when they are
 * packed.
 */
#if W == 4
INLINE void FN(e4m3)(const uint8_t *from, vf *out) {
    const vi words = *(const vi *)from;
    UNROLL for (int j = 0; j < 4; j++) /* sign bit to sign bit, the others to 2^-120 times their value */
        out[j] = (vf)((words << (24 - 8 * j) >> 4) & (int32_t)0x87F00000) * 0x1p112f;
}

static inline ptrdiff_t FN(e4m3_column)(int n, ptrdiff_t lane) { return 4 * lane + n; }
#else
INLINE void FN(e4m3)(const uint8_t *from, vf *out) {
#if W == 16
    const __m512i v = _mm512_loadu_si512(from), kept = _mm512_set1_epi16((short)0xBF80);
    UNROLL for (int odd = 0; odd < 2; odd++) {
        const __m512i h = _mm512_and_si512(_mm512_srai_epi16(odd ? v : _mm512_slli_epi16(v, 8), 1), kept);
        out[2 * odd] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(h));
        out[2 * odd + 1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
    }
#else
    const __m256i v = _mm256_loadu_si256((const __m256i *)from), kept = _mm256_set1_epi16((short)0xBF80);
    UNROLL for (int odd = 0; odd < 2; odd++) {
        const __m256i h = _mm256_and_si256(_mm256_srai_epi16(odd ? v : _mm256_slli_epi16(v, 8), 1), kept);
        out[2 * odd] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(h));
        out[2 * odd + 1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
    }
#endif
}

/* Returns the column, among 4 W, of the code in lane `lane` of vector n. */
static inline ptrdiff_t FN(e4m3_column)(int n, ptrdiff_t lane) { return 2 * (n % 2 * W + lane) + n / 2; }
#endif

static TARGET void FN(pack_e4m3)(const Matrix *m, const float *x, float *out) {
    for (ptrdiff_t c = 0; c < m->in; c += 4 * W)
        for (int n = 0; n < 4; n++)
            for (ptrdiff_t lane = 0; lane < W; lane++) *out++ = x[c + FN(e4m3_column)(n, lane)] * 256.0f;
}

/* As row_block, for E4M3 codes. If W is 16, vectors 0 and 2 belong to one group, and vectors 1 and 3 to the next. */
INLINE void FN(e4m3_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                          float *const *y, const int R, const int T) {
    enum { TABLE = 128, EACH = 4 * W };
    float scales[4][TABLE + W];
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * m->in)), first[4];
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    const uint8_t *w[4];
    vf acc[8];
    UNROLL for (int i = 0; i < R; i++) {
        ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        w[i] = (const uint8_t *)(m->w + row * m->words), first[i] = row * m->groups;
        prefetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = (vf){0};
    for (ptrdiff_t c = 0; c < m->in; c += EACH) {
        const ptrdiff_t group = c / 32, local = group % TABLE;
        if (local == 0 && c % 32 == 0)
            UNROLL for (int i = 0; i < R; i++)
                FN(decode)(m->s, first[i] + group, min(TABLE, m->groups - group), m->kind, scales[i]);
        UNROLL for (int i = 0; i < R; i++) {
            vf q[4];
            for (int n = 0; n < EACH; n += 64) __builtin_prefetch(soon + i * m->in + c + n);
            FN(e4m3)(w[i] + c, q);
            const vf low = FN(splat)(scales[i][local]), high = FN(splat)(scales[i][local + W / 16]);
            UNROLL for (int t = 0; t < T; t++) {
                const vf *v = (const vf *)(x[t] + c);
                acc[i * T + t] = acc[i * T + t] + (q[0] * v[0] + q[2] * v[2]) * low;
                acc[i * T + t] = acc[i * T + t] + (q[1] * v[1] + q[3] * v[3]) * high;
            }
        }
    }
    FN(store)(acc, r0, r, r1, y, R, T);
}

#define E4M3_ROWS(R, T)                                                                                       \
    static __attribute__((noinline)) TARGET void FN(e4m3_##T)(                                                \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r += R) FN(e4m3_rows)(m, r0, r, r1, x, y, R, T);                       \
    }
E4M3_ROWS(4, 1)
E4M3_ROWS(2, 2)
E4M3_ROWS(2, 4)
#undef E4M3_ROWS

/* ---- integers of any number of bits, and E2M1 codes ----------------------------------------------------
 *
 * A block is the smallest number of codes that fills whole words: BLOCK_CODES(bits) codes in BLOCK_WORDS(bits)
 * words. A vector holds the same word of W blocks, one block per lane. As in pack(), a code is used at its place in
 * the word, and its activation is divided by the power of two that this place means. A code that crosses into the
 * next word, or ends at the highest bit, is shifted down instead. E2M1 codes first become bytes of twice their value
 * plus 16; the sum of the activations, times 16, is subtracted at the end. A block has the codes of one group, or of two
 * if it is larger than a group (3 bits in groups of 16); then it has two parts, each with its own sum.
 */

/* The number of bits below code j in its word; 0 for a code that is shifted down. */
#define CODE_AT(bits, j) ((j) * (bits) % 32 + (bits) < 32 ? (j) * (bits) % 32 : 0)
/* The first bit of E2M1 code j of a block, in the word of the codes with even j or in the word of those with odd j. */
#define MX_AT(j) (8 * ((j) / 2))

static TARGET void FN(pack_blocks)(const Matrix *m, const float *x, float *out) {
    if (m->codes == E4M3) {
        FN(pack_e4m3)(m, x, out);
        return;
    }
    if (m->codes == TABLE) {
        memcpy(out, x, (size_t)m->in * sizeof *out);
        return;
    }
    const ptrdiff_t codes = m->codes == E2M1 ? 8 : BLOCK_CODES(m->bits), blocks = m->in / codes;
    const ptrdiff_t parts = block_parts(m), some = codes / parts;
    for (ptrdiff_t b0 = 0; b0 < blocks; b0 += W, out += (codes + parts) * W) {
        memset(out, 0, (size_t)((codes + parts) * W) * sizeof *out);
        for (ptrdiff_t lane = 0; lane < W && b0 + lane < blocks; lane++) {
            const float *e = x + codes * (b0 + lane);
            for (ptrdiff_t j = 0; j < codes; j++) {
                out[j * W + lane] = ldexpf(e[j], -(int)(m->codes == E2M1 ? MX_AT(j) : CODE_AT(m->bits, j)));
                out[(codes + j / some) * W + lane] += e[j];
            }
        }
    }
}

/* Returns values[from[i]] in lane i: the scales or biases of W blocks, which FN(decode) has written to `values`. */
INLINE vf FN(block_values)(const float *values, vi from) {
#if W > 4
    return (vf)FN(permute)(*(const vu *)values, from);
#else
    return (vf){values[from[0]], values[from[1]], values[from[2]], values[from[3]]};
#endif
}

/* Returns code j of each block, times 2 to the power of its first bit (CODE_AT or MX_AT). */
INLINE vf FN(code)(const vu *words, const int j, const int bits, const int is_e2m1) {
    if (is_e2m1) return __builtin_convertvector((vi)(words[j % 2] & (31u << MX_AT(j))), vf);
    const int k = j * bits / 32, at = j * bits % 32;
    const uint32_t mask = (1u << bits) - 1;
    vu found;
    if (at + bits < 32) found = words[k] & (mask << at);
    else if (at + bits == 32) found = words[k] >> at;
    else found = (words[k] >> at | words[k + 1] << (32 - at)) & mask;
    return __builtin_convertvector((vi)found, vf);
}

/* As row_block, for activations that pack_blocks has packed. */
INLINE void FN(block_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                           float *const *y, const int R, const int T, const int BITS, const int FORM) {
    enum { MOST = 5, TABLE = FN(TABLE) }; /* the most words of a block */
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int MX = FORM == IN_E2M1, parts = FORM == IN_PARTS ? 2 : 1, codes = MX ? 8 : BLOCK_CODES(BITS);
    const int each = MX ? 1 : BLOCK_WORDS(BITS), some = codes / parts, fit = TABLE / parts;
    const int shift = __builtin_ctzl((unsigned long)(m->group / some));
    const ptrdiff_t blocks = m->in / codes;
    const vi from_lane = *(const vi *)lane >> shift;
    float scales[4][TABLE + 2 * W], biases[4][TABLE + 2 * W]; /* of each block's first part, then of the second */
    uint32_t tail[MOST * W] = {0};
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * m->words * 4)), at = 0;
    const uint32_t *soon = address_ahead(m, ahead, r1), *w[4];
    ptrdiff_t rows[4];
    vf acc[8];
    UNROLL for (int i = 0; i < R; i++) {
        rows[i] = r + i < r1 ? r + i : r1 - 1;
        w[i] = m->w + rows[i] * m->words;
        prefetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = (vf){0};
    for (ptrdiff_t b = 0; b < blocks; b += W, at += (codes + parts) * W) {
        const ptrdiff_t group = b >> shift, local = group % fit;
        if (local == 0 && (b == 0 || (b - 1) >> shift != group))
            UNROLL for (int i = 0; i < R; i++) {
                const ptrdiff_t first = group * parts, n = min(TABLE, m->groups - first);
                if (MX) FN(decode)(m->s, rows[i] * m->groups + first, n, m->kind, scales[i]);
                else FN(tables)(m, rows[i], first, n, scales[i], biases[i]);
            }
        vu word[4][MOST];
        vf sum[8];
        UNROLL for (int i = 0; i < R; i++) {
            const uint32_t *from = w[i] + b * each;
            for (int n = 0; n < each * W; n += 16) __builtin_prefetch(soon + i * m->words + b * each + n);
            if (blocks - b < W) from = (const uint32_t *)memcpy(tail, from, (size_t)((blocks - b) * each) * 4);
            if (MX) {
                vu both = *(const vu *)from;
                word[i][0] = FN(e2m1)(both & 0x0F0F0F0Fu), word[i][1] = FN(e2m1)(both >> 4 & 0x0F0F0F0Fu);
            } else if (each == 3) FN(deinterleave3)(from, word[i]);
            else if (each == 5) FN(deinterleave5)(from, word[i]);
            else word[i][0] = *(const vu *)from;
        }
        UNROLL for (int part = 0; part < parts; part++) {
            UNROLL32 for (int j = part * some; j < (part + 1) * some; j++) {
                vf xv[4];
                UNROLL for (int t = 0; t < T; t++) xv[t] = *(const vf *)(x[t] + at + j * W);
                UNROLL for (int i = 0; i < R; i++) {
                    vf q = FN(code)(word[i], j, BITS, MX);
                    UNROLL for (int t = 0; t < T; t++)
                        sum[i * T + t] = j % some ? sum[i * T + t] + q * xv[t] : q * xv[t];
                }
            }
            UNROLL for (int i = 0; i < R; i++) {
                const ptrdiff_t from = local + part * FN(SECOND);
                const vf scale = FN(block_values)(scales[i] + from, from_lane);
                const vf bias = MX ? (vf){0} : FN(block_values)(biases[i] + from, from_lane);
                UNROLL for (int t = 0; t < T; t++) {
                    const vf total = *(const vf *)(x[t] + at + (codes + part) * W);
                    vf dot = sum[i * T + t];
                    if (MX) dot = (dot - 16.0f * total) * 0.5f;
                    acc[i * T + t] = acc[i * T + t] + dot * scale;
                    if (!MX) acc[i * T + t] = acc[i * T + t] + total * bias;
                }
            }
        }
    }
    FN(store)(acc, r0, r, r1, y, R, T);
}

#define BLOCKS(R, T, BITS, FORM)                                                                               \
    static __attribute__((noinline)) TARGET void FN(blocks_##T##_##BITS##_##FORM)(                            \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r += R) FN(block_rows)(m, r0, r, r1, x, y, R, T, BITS, FORM);          \
    }
#define EVERY(BITS, MX) BLOCKS(4, 1, BITS, MX) BLOCKS(2, 2, BITS, MX) BLOCKS(2, 4, BITS, MX)
EVERY(1, 0)
EVERY(2, 0)
EVERY(3, 0)
EVERY(4, 0)
EVERY(5, 0)
EVERY(6, 0)
EVERY(8, 0)
EVERY(4, 1)
EVERY(3, 2)
#undef EVERY
#undef BLOCKS

/* ---- codes of tables --------------------------------------------------------------------------------------
 *
 * The codes of up to 256 columns become signed bytes q, and their scales floats. A weight is scale * q.
 */
INLINE vf FN(half_splat)(const void *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return FN(half)((vu){0} + bits);
}

#include "tables.h"

/* Looks up 32 codes of 4 bits: the low halves of 16 bytes, then the high halves. */
INLINE void FN(iq4)(const uint8_t *from, int8_t *codes) {
#if W >= 8
    const __m128i v = _mm_loadu_si128((const __m128i *)from);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(v), _mm_srli_epi16(v, 4), 1);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(IQ4_BYTES));
    _mm256_storeu_si256((__m256i *)codes, _mm256_shuffle_epi8(table, _mm256_and_si256(both, _mm256_set1_epi8(15))));
#else
    static const int8_t table[16] = {IQ4_BYTES};
#if defined(__aarch64__)
    const int8x16_t values = vld1q_s8(table);
    const uint8x16_t v = vld1q_u8(from);
    vst1q_s8(codes, vqtbl1q_s8(values, vandq_u8(v, vdupq_n_u8(15))));
    vst1q_s8(codes + 16, vqtbl1q_s8(values, vshrq_n_u8(v, 4)));
#else
    for (int i = 0; i < 16; i++) codes[i] = table[from[i] & 15], codes[16 + i] = table[from[i] >> 4];
#endif
#endif
}

/* Computes the scales of min(W, 8) groups of a row of IQ4 from column c on, and something finite for groups that the row
 * does not have. */
INLINE vf FN(iq4_scales)(const Matrix *m, ptrdiff_t row, ptrdiff_t c) {
    static const uint32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7};
    if (m->source == IQ4_NL) {
        enum { EACH = W < 8 ? W : 8 };
        typedef uint16_t vh __attribute__((vector_size(2 * EACH), aligned(2), may_alias));
        uint16_t few[EACH] = {0};
        const uint16_t *from = (const uint16_t *)((const char *)m->s + row * m->s_bytes) + c / 32;
        if (m->in - c < 32 * EACH) from = memcpy(few, from, (size_t)(m->in - c) / 16);
        const vh halves = *(const vh *)from;
#if W == 16
        return (vf)_mm512_cvtph_ps(_mm256_castsi128_si256((__m128i)halves));
#else
        return FN(half)(__builtin_convertvector(halves, vu));
#endif
    }
    /* d, 2 bytes with the high bits of the scales, 4 bytes with the low ones */
    const uint8_t *s = (const uint8_t *)m->s + row * m->s_bytes + c / SUPER * 8;
    const vu j = *(const vu *)lane + (uint32_t)(c % SUPER / 32);
    uint16_t high;
    uint32_t low;
    memcpy(&high, s + 2, 2), memcpy(&low, s + 4, 4);
    const vu codes = (((vu){0} + low) >> 4 * j & 15) | (((vu){0} + high) >> 2 * j & 3) << 4;
    return (__builtin_convertvector((vi)codes, vf) - 32.0f) * FN(half_splat)(s);
}

/* Unpacks the columns of a row from c on: up to 256, if the row has so many. */
static __attribute__((noinline)) TARGET void FN(table_block)(const Matrix *m, ptrdiff_t row, ptrdiff_t c, int8_t *codes,
                                                             float *scales) {
    const uint8_t *w = (const uint8_t *)(m->w + row * m->words) + c / 8 * m->bits;
    const uint8_t *s = (const uint8_t *)m->s + row * m->s_bytes, *grid = m->b;
#define EXPAND(type)                                                                                         \
    case type: FN(expand)(GRID_##type, w, s + c / SUPER * table_of(type).scale_bytes, grid, codes, scales); return;
    switch (m->source) {
        EXPAND(IQ3_XXS) EXPAND(IQ3_S) EXPAND(IQ2_XXS) EXPAND(IQ2_XS) EXPAND(IQ2_S) EXPAND(IQ1_S) EXPAND(IQ1_M)
        EXPAND(TQ1_0) EXPAND(TQ2_0)
    default: break;
    }
#undef EXPAND
    const ptrdiff_t n = min(SUPER, m->in - c);
    for (ptrdiff_t i = 0; i < n / 32; i += W) *(vf *)(scales + i) = FN(iq4_scales)(m, row, c + 32 * i);
    for (ptrdiff_t i = 0; i < n / 32; i++) FN(iq4)(w + 16 * i, codes + 32 * i);
}

/* Converts W signed bytes to floats. */
INLINE vf FN(signed_bytes)(const int8_t *from) {
#if W == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif W == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    typedef int8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
    return __builtin_convertvector(__builtin_convertvector(*(const vb *)from, vi), vf);
#endif
}

/* As row_block, for one row of codes of a table. */
INLINE void FN(table_row)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x, float *const *y,
                          const int T, const int GROUP) {
    int8_t codes[SUPER];
    float scales[SUPER / 16 + W];
    const ptrdiff_t ahead = r + 1 + PREFETCH_BYTES / (m->words * 4);
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    vf acc[4];
    prefetch_tables(m, ahead, r1);
    UNROLL for (int t = 0; t < T; t++) acc[t] = (vf){0};
    for (ptrdiff_t c = 0; c < m->in; c += SUPER) {
        const ptrdiff_t n = min(SUPER, m->in - c), begin = c / 8 * m->bits;
        for (ptrdiff_t b = 0; b < n / 8 * m->bits; b += 64) __builtin_prefetch(soon + begin + b);
        FN(table_block)(m, r, c, codes, scales);
        for (ptrdiff_t g = 0, at = 0; at < n; g++, at += GROUP) {
            vf sum[4];
            UNROLL for (int t = 0; t < T; t++) sum[t] = (vf){0};
            UNROLL for (ptrdiff_t i = at; i < at + GROUP; i += W) {
                const vf q = FN(signed_bytes)(codes + i);
                UNROLL for (int t = 0; t < T; t++) sum[t] += q * *(const vf *)(x[t] + c + i);
            }
            UNROLL for (int t = 0; t < T; t++) acc[t] += sum[t] * scales[g];
        }
    }
    FN(store)(acc, r0, r, r1, y, 1, T);
}

#define TABLES(T, GROUP)                                                                                      \
    static __attribute__((noinline)) TARGET void FN(tables_##T##_##GROUP)(                                    \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r++) FN(table_row)(m, r0, r, r1, x, y, T, GROUP);                      \
    }
TABLES(1, 16)
TABLES(2, 16)
TABLES(4, 16)
TABLES(1, 32)
TABLES(2, 32)
TABLES(4, 32)
#undef TABLES

/* As rows, for n <= 4 rows of activations that pack_blocks has packed. Three rows are computed as two and one: the
 * bits are the same, and there is less code to compile. */
static TARGET void FN(rows_of_blocks)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                                      float *const *y) {
    typedef void Rows(const Matrix *, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
#define THREE(BITS, MX) {FN(blocks_1_##BITS##_##MX), FN(blocks_2_##BITS##_##MX), FN(blocks_4_##BITS##_##MX)}
    static Rows *const mx[3] = THREE(4, 1), *const in_parts[3] = THREE(3, 2);
    static Rows *const affine[9][3] = {[1] = THREE(1, 0), [2] = THREE(2, 0), [3] = THREE(3, 0), [4] = THREE(4, 0),
                                       [5] = THREE(5, 0), [6] = THREE(6, 0), [8] = THREE(8, 0)};
#undef THREE
    static Rows *const e4m3[3] = {FN(e4m3_1), FN(e4m3_2), FN(e4m3_4)};
    static Rows *const tables[2][3] = {{FN(tables_1_16), FN(tables_2_16), FN(tables_4_16)},
                                       {FN(tables_1_32), FN(tables_2_32), FN(tables_4_32)}};
    Rows *const *kernels = affine[m->bits];
    if (m->codes == E4M3) kernels = e4m3;
    else if (m->codes == TABLE) kernels = tables[m->group == 32];
    else if (m->codes == E2M1) kernels = mx;
    else if (block_parts(m) == 2) kernels = in_parts;
    if (n == 4) {
        kernels[2](m, r0, r1, x, y);
        return;
    }
    if (n > 1) kernels[1](m, r0, r1, x, y);
    if (n != 2) kernels[0](m, r0, r1, x + n - 1, y + n - 1);
}

/* Dequantises rows r0 to r1-1 of a matrix of codes of a table. */
static TARGET void FN(unpack_tables)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out) {
    int8_t codes[SUPER];
    float scales[SUPER / 16 + W];
    for (ptrdiff_t r = r0; r < r1; r++)
        for (ptrdiff_t c = 0; c < m->in; c += SUPER) {
            FN(table_block)(m, r, c, codes, scales);
            for (ptrdiff_t i = 0; i < min(SUPER, m->in - c); i++)
                *out++ = (float)codes[i] * scales[i / m->group];
        }
}

/* Dequantises rows r0 to r1-1 of a matrix to float32 in the order of its columns. Row r0 is written to `out`. */
INLINE void FN(unpack)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out, const int BITS) {
    enum { TABLE = FN(TABLE) };
    static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const uint8_t *from = (const uint8_t *)(m->w + r0 * m->words);
    const ptrdiff_t each = TABLE * m->group, per = m->in;
    float scales[TABLE + 2 * W], biases[TABLE + 2 * W] = {0};
    const int parts = (int)block_parts(m);
    for (ptrdiff_t at = 0; at < (r1 - r0) * per; at += 8, from += BITS, out += 8) {
        const ptrdiff_t c = at % per, g = c % each / m->group;
        if (c % each == 0) {
            const ptrdiff_t first = c / m->group, n = min(TABLE, m->groups - first);
            if (m->codes == INTEGER) FN(tables)(m, r0 + at / per, first, n, scales, biases);
            else FN(decode)(m->s, (r0 + at / per) * m->groups + first, n, m->kind, scales);
        }
        uint64_t bits = 0;
        memcpy(&bits, from, BITS);
        const ptrdiff_t place = g / parts + g % parts * FN(SECOND);
        const float s = scales[place] * m->factor, b = biases[place];
        if (m->codes == E2M1) {
            for (int j = 0; j < 8; j++) out[j] = e2m1[bits >> (4 * j) & 15] * s;
        } else if (m->codes == E4M3) {
            for (int j = 0; j < 8; j++) {
                const uint32_t code = bits >> (8 * j) & 255;
                out[j] = FN(half)((vu){0} + ((code & 0x80) << 8 | (code & 0x7F) << 7))[0] * 256.0f * s;
            }
        } else {
            for (int j = 0; j < 8; j++) out[j] = (float)(int32_t)(bits >> (BITS * j) & ((1u << BITS) - 1)) * s + b;
        }
    }
}

static TARGET void FN(dequantize)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, float *out) {
    if (m->codes == TABLE) {
        FN(unpack_tables)(m, r0, r1, out);
        return;
    }
    switch (m->bits) {
        case 1: FN(unpack)(m, r0, r1, out, 1); break;
        case 2: FN(unpack)(m, r0, r1, out, 2); break;
        case 3: FN(unpack)(m, r0, r1, out, 3); break;
        case 4: FN(unpack)(m, r0, r1, out, 4); break;
        case 5: FN(unpack)(m, r0, r1, out, 5); break;
        case 6: FN(unpack)(m, r0, r1, out, 6); break;
        default: FN(unpack)(m, r0, r1, out, 8);
    }
}

/* Sets out = (sum over k of weight[k] * y[k]) + mid + shared for columns h0 to h1-1 of one token. k ascends. shared
 * may be NULL. */
static TARGET void FN(combine)(const float *const *y, const float *weight, ptrdiff_t K, const float *mid,
                               const float *shared, float *out, ptrdiff_t h0, ptrdiff_t h1) {
    for (ptrdiff_t h = h0; h < h1; h++) out[h] = 0;
    for (ptrdiff_t k = 0; k < K; k++)
        for (ptrdiff_t h = h0; h < h1; h++) out[h] += weight[k] * y[k][h];
    for (ptrdiff_t h = h0; h < h1; h++) out[h] += mid[h];
    for (ptrdiff_t h = h0; shared && h < h1; h++) out[h] += shared[h];
}

/* Returns the dot product of a and b. n is a multiple of W. Additions to four separate sums do not wait for each
 * other. */
INLINE float FN(dot)(const float *a, const float *b, ptrdiff_t n) {
    vf s[4] = {{0}, {0}, {0}, {0}};
    ptrdiff_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        UNROLL for (int j = 0; j < 4; j++) s[j] += *(const vf *)(a + i + j * W) * *(const vf *)(b + i + j * W);
    for (; i < n; i += W) s[0] += *(const vf *)(a + i) * *(const vf *)(b + i);
    return FN(hsum)((s[0] + s[1]) + (s[2] + s[3]));
}

/* Sets y[t][i] to row r0+i of a dense matrix times x[t]. */
static TARGET void FN(dense_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                                  float *const *y) {
    for (ptrdiff_t r = r0; r < r1; r++) {
        const float *values = (const float *)m->w + r * m->in;
        for (ptrdiff_t t = 0; t < n; t++) y[t][r - r0] = FN(dot)(values, x[t], m->in);
    }
}

/* Sets out = x / sqrt(mean(x^2) + eps) * weight. n is a multiple of 16. weight may be NULL. */
static TARGET void FN(rms_norm)(const float *x, const float *weight, float eps, float *out, ptrdiff_t n) {
    float inv = 1.0f / sqrtf(FN(dot)(x, x, n) / (float)n + eps);
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf v = *(const vf *)(x + i) * inv;
        if (weight) v *= *(const vf *)(weight + i);
        *(vf *)(out + i) = v;
    }
}

/* Replaces row[0] to row[n-1] by their softmax. If sink is not NULL, exp(*sink) is part of the sum. The row has room
 * for whole vectors. */
static TARGET void FN(softmax)(float *row, ptrdiff_t n, const float *sink) {
    vf top = FN(splat)(-INFINITY), sum = {0};
    for (ptrdiff_t i = n; i % W; i++) row[i] = -INFINITY;
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf v = *(vf *)(row + i);
        top = FN(select)((vi)(v > top), v, top);
    }
    float peak = top[0];
    for (int i = 1; i < W; i++) peak = top[i] > peak ? top[i] : peak;
    if (sink && *sink > peak) peak = *sink;
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf e = FN(vexp)(*(vf *)(row + i) - peak);
        *(vf *)(row + i) = e;
        sum += e;
    }
    float total = FN(hsum)(sum);
    if (sink) total += FN(vexp)(FN(splat)(*sink - peak))[0];
    float inv = 1.0f / total;
    for (ptrdiff_t i = 0; i < n; i += W) *(vf *)(row + i) *= inv;
}

/* Adds the sum over i of p[g][i] * v[i] to out[g], for G heads that share the values. It takes a few rows at a time,
 * so that they stay in the L1 cache. */
INLINE void FN(mix)(const float *p, ptrdiff_t pad, const float *v, ptrdiff_t n, ptrdiff_t dv, float *out, const int G) {
    for (ptrdiff_t i0 = 0; i0 < n; i0 += CACHE_AHEAD) {
        ptrdiff_t i1 = min(i0 + CACHE_AHEAD, n);
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

/* Returns n <= CACHE_AHEAD rows of a cache as floats. Rows of floats are not copied; rows of codes are decoded to
 * `room`. */
INLINE const float *FN(row_values)(const char *rows, ptrdiff_t n, const RowForm *form, float *room) {
    if (!form->group) return (const float *)rows;
    for (ptrdiff_t i = 0; i < n; i++) {
        const uint8_t *codes = (const uint8_t *)rows + i * form->stride;
        const float *scales = (const float *)(codes + form->width);
        for (ptrdiff_t c = 0; c < form->stride; c += 64) __builtin_prefetch(codes + CACHE_AHEAD * form->stride + c);
        for (ptrdiff_t c = 0; c < form->width; c += form->group)
            for (ptrdiff_t j = c; j < c + form->group; j++)
                room[i * form->width + j] = ((float)codes[j] - 128.0f) * scales[c / form->group];
    }
    return room;
}

/* Attention of one token for up to GQA_HEADS query heads that share a key head. `seen` has up to three runs of cache
 * rows, in order; the bits do not depend on where a run ends. scores: GQA_HEADS rows of `pad` floats. sinks: a logit
 * for each head, or NULL. biases: `extent` floats for each head, which are added to products by the distance from the
 * last row. room: memory to decode CACHE_AHEAD rows of keys or of values, if rows are codes. */
static TARGET void FN(attend)(const float *q, ptrdiff_t heads, const KvRows *seen, const RowForm *keys,
                              const RowForm *values, float scale, const float *sinks, const float *biases,
                              ptrdiff_t extent, float *scores, ptrdiff_t pad, float *room, float *out) {
    const ptrdiff_t dk = keys->width, dv = values->width;
    const ptrdiff_t at[3] = {0, seen[0].n, seen[0].n + seen[1].n}, n = at[2] + seen[2].n;
    for (int s = 0; s < 3; s++) {
        float *to = scores + at[s];
        for (ptrdiff_t i = 0; i < seen[s].n; i++) {
            const float *k = FN(row_values)(seen[s].k + i * keys->stride, 1, keys, room);
            for (ptrdiff_t c = 0; c < dk; c += 16) __builtin_prefetch(k + CACHE_AHEAD * dk + c);
            for (ptrdiff_t g = 0; g < heads; g++) to[g * pad + i] = FN(dot)(q + g * dk, k, dk) * scale;
        }
    }
    for (ptrdiff_t g = 0; g < heads; g++)
        for (ptrdiff_t age = 0; age < min(n, extent); age++)
            scores[g * pad + n - 1 - age] += biases[g * extent + age] * scale;
    for (ptrdiff_t g = 0; g < heads; g++) FN(softmax)(scores + g * pad, n, sinks ? sinks + g : NULL);
    memset(out, 0, (size_t)(heads * dv) * sizeof *out);
    for (int s = 0; s < 3; s++) {
        /* Codes are decoded a few rows at a time, as many as FN(mix) takes at a time. */
        const ptrdiff_t step = values->group ? CACHE_AHEAD : seen[s].n;
        for (ptrdiff_t i = 0; i < seen[s].n; i += step) {
            const ptrdiff_t n = min(step, seen[s].n - i);
            const float *v = FN(row_values)(seen[s].v + i * values->stride, n, values, room);
            for (ptrdiff_t g = 0; g < heads;) {
                const float *p = scores + g * pad + at[s] + i;
                ptrdiff_t left = heads - g;
                if (left >= 8) FN(mix)(p, pad, v, n, dv, out + g * dv, 8), g += 8;
                else if (left >= 4) FN(mix)(p, pad, v, n, dv, out + g * dv, 4), g += 4;
                else FN(mix)(p, pad, v, n, dv, out + g * dv, 1), g += 1;
            }
        }
    }
}

/* One token of the gated delta rule for one value head. `next` gets the new state [dv, dk]; it may be `state`
 * itself. All columns of the state decay by decay[0], or, if `each` is set, column c by decay[c]. */
static TARGET void FN(delta)(const float *state, float *next, const float *q, const float *k, const float *v,
                             const float *decay, int each, float beta, float *out, ptrdiff_t dv, ptrdiff_t dk) {
    vf alike = (vf){0} + decay[0];
    for (ptrdiff_t i = 0; i < dv; i++) {
        float *row = next + i * dk;
        vf memory = {0}, read = {0};
        for (ptrdiff_t c = 0; c < dk; c += W) {
            vf s = *(const vf *)(state + i * dk + c) * (each ? *(const vf *)(decay + c) : alike);
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

/* Depthwise causal convolution of one token, then silu, for columns c0 to c1-1. state [taps-1, C] holds the last
 * inputs, the oldest first; this input is added to it. */
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

/* Rotates the first 2 * half values of one head and copies the others. Values i and i + half form a pair, or, if
 * `neighbours` is set, values 2i and 2i + 1. */
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

const Path FN(path) = {
    FN(path_name), W, FN(pack), FN(rows), NULL, FN(pack_blocks), FN(rows_of_blocks), FN(dense_rows), FN(dequantize), FN(combine), FN(activate), FN(add),
    FN(rms_norm), FN(rope), FN(softmax), FN(attend), FN(delta), FN(conv),
    NULL, NULL, NULL,
};

#undef vf
#undef vu
#undef vi
#undef f4
#undef f8
#undef PATH
#undef TARGET
#undef W
