/* Integer products that are as exact as float32, for the forms whose codes are faster to unpack to bytes than to
 * floats.
 *
 * A file includes this header after kernels.h, with the same PATH and W. W = 16 needs AVX-512 VNNI and VBMI. W = 8
 * needs AVX2 and has only codes of 2 and 4 bits. As in vnni.h, the activations of a group are 24-bit integers times one
 * float, the factor, and the integers are three planes of signed bytes. The codes of a step become BYTES(bits) vectors
 * of unsigned bytes. Lane i (32 bits) of all these vectors together has the codes of consecutive columns, in an order
 * that is cheap to make; packing puts activations in the same order.
 *
 * The sum of a lane must fit 32 bits. Therefore codes of 5 and 6 bits are multiplied as if an offset (`offset`) had
 * been subtracted: the sum of each lane starts at minus the offset times its activations, and the offset times the
 * scale is added to the bias. E2M1 codes become bytes of twice their value plus an offset of 16.
 *
 * A packed row has, for each step of 4 W BYTES columns, three planes, the low byte first, and W start values. Then
 * follow the factor of each group, and the sum of each group's activations.
 */
#define BYTES(bits) ((bits) == 2 ? 4 : 2)

#define vf FN(vf)
#define vi FN(vi)
#define vu FN(vu)

#if W == 16
typedef __m512i FN(bytes);

/* Indices of bytes that move codes 16 q + 8 n to 16 q + 8 n + 7, of 3, 5 or 6 bits each, to the lowest bits of the
 * 64-bit lane q. */
#define FROM1(at, bits)                                                                                          \
    at, at + 1, at + 2, at + ((bits) > 3 ? 3 : 0), at + ((bits) > 3 ? 4 : 0), at + ((bits) > 5 ? 5 : 0), at, at
#define FROM(n, bits)                                                                                              \
    FROM1((n) * (bits), bits), FROM1((n + 2) * (bits), bits), FROM1((n + 4) * (bits), bits),                       \
        FROM1((n + 6) * (bits), bits), FROM1((n + 8) * (bits), bits), FROM1((n + 10) * (bits), bits),              \
        FROM1((n + 12) * (bits), bits), FROM1((n + 14) * (bits), bits)
#define SHIFTS(bits) 0, bits, 2 * (bits), 3 * (bits), 4 * (bits), 5 * (bits), 6 * (bits), 7 * (bits)
#define CHOICE(bits) {{FROM(0, bits)}, {FROM(1, bits)}}

/* Unpacks the codes of a step to bytes. */
INLINE void FN(unpack_codes)(const uint8_t *from, const int bits, const int is_e2m1, __m512i *out) {
    static const uint8_t choice[3][2][64] = {CHOICE(3), CHOICE(5), CHOICE(6)};
    static const uint8_t shift[3][8] = {{SHIFTS(3)}, {SHIFTS(5)}, {SHIFTS(6)}};
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
    if (bits == 2 || bits == 4) {
        const __m512i v = _mm512_loadu_si512(from);
        for (int n = 0; n < BYTES(bits); n++)
            out[n] = _mm512_and_si512(_mm512_srli_epi16(v, (unsigned)(n * bits)), mask);
        const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(E2M1_BYTES));
        if (is_e2m1) out[0] = _mm512_shuffle_epi8(table, out[0]), out[1] = _mm512_shuffle_epi8(table, out[1]);
        return;
    }
    const __m512i v = bits == 3 ? _mm512_maskz_loadu_epi8(0xFFFFFFFFFFFFull, from) : _mm512_loadu_si512(from);
    const __m512i more = bits == 3   ? v
                         : bits == 5 ? _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(from + 64)))
                                     : _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(from + 64)));
    const int form = bits == 3 ? 0 : bits - 4;
    int64_t by;
    memcpy(&by, shift[form], 8);
    UNROLL for (int n = 0; n < 2; n++) {
        const __m512i which = _mm512_loadu_si512(choice[form][n]);
        __m512i q = bits == 3 ? _mm512_permutexvar_epi8(which, v) : _mm512_permutex2var_epi8(v, which, more);
        out[n] = _mm512_and_si512(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(by), q), mask);
    }
}
#undef FROM1
#undef FROM
#undef SHIFTS
#undef CHOICE

/* Returns `sum` plus the products of n vectors of codes and one plane, lane by lane. */
INLINE __m512i FN(add_plane)(__m512i sum, const __m512i *codes, const int8_t *x, const int n) {
    UNROLL for (int i = 0; i < n; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(x + 64 * i));
    return sum;
}

/* Returns `start` plus the products of n vectors of codes and the integers in three planes, lane by lane. */
INLINE vu FN(products_from)(__m512i start, const __m512i *codes, const int8_t *x, const int n) {
    __m512i high = _mm512_slli_epi32(FN(add_plane)(_mm512_setzero_si512(), codes, x + 128 * n, n), 8);
    high = _mm512_slli_epi32(FN(add_plane)(high, codes, x + 64 * n, n), 8);
    return (vu)_mm512_add_epi32(high, FN(add_plane)(start, codes, x, n));
}

INLINE vu FN(products)(const __m512i *codes, const int8_t *x, const int n) {
    return FN(products_from)(_mm512_setzero_si512(), codes, x, n);
}

INLINE vf FN(permute_floats)(vf values, vi from) { return (vf)_mm512_permutexvar_ps((__m512i)from, (__m512)values); }
#else
typedef __m256i FN(bytes);

INLINE void FN(unpack_codes)(const uint8_t *from, const int bits, const int is_e2m1, __m256i *out) {
    const __m256i mask = _mm256_set1_epi8((char)((1 << bits) - 1)), v = _mm256_loadu_si256((const __m256i *)from);
    for (int n = 0; n < BYTES(bits); n++) out[n] = _mm256_and_si256(_mm256_srli_epi16(v, n * bits), mask);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_BYTES));
    if (is_e2m1) out[0] = _mm256_shuffle_epi8(table, out[0]), out[1] = _mm256_shuffle_epi8(table, out[1]);
}

/* Returns the sums of the products of n vectors of codes and one plane, times `weight`, lane by lane. Sums of 16
 * bits do not overflow: each has at most 8 products of 2-bit codes, or 4 products of bytes up to 28. */
INLINE __m256i FN(product)(const __m256i *codes, const int8_t *x, const int n, const short weight) {
    __m256i sum = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < n; i++) {
        __m256i two = _mm256_maddubs_epi16(codes[i], _mm256_loadu_si256((const __m256i *)(x + 32 * i)));
        sum = i ? _mm256_add_epi16(sum, two) : two;
    }
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(weight));
}

/* Returns the sums of the products of n vectors of codes and the integers in three planes, lane by lane. */
INLINE vu FN(products)(const __m256i *codes, const int8_t *x, const int n) {
    __m256i high = _mm256_add_epi32(FN(product)(codes, x + 64 * n, n, 256), FN(product)(codes, x + 32 * n, n, 1));
    return (vu)_mm256_add_epi32(_mm256_slli_epi32(high, 8), FN(product)(codes, x, n, 1));
}

INLINE vf FN(permute_floats)(vf values, vi from) { return (vf)_mm256_permutevar8x32_ps((__m256)values, (__m256i)from); }
#endif

/* The offset that is subtracted from a code. */
#define CODE_OFFSET(bits, is_e2m1) ((is_e2m1) ? 16 : (bits) > 4 ? 1 << ((bits) - 1) : 0)

/* Converts the activations of a group to integers of at most `most`, and writes their sum. Returns the factor of the
 * integers. If an activation is NaN or infinite, the factor is NaN, and so is every product with it. */
INLINE float FN(quantize_group)(const float *x, ptrdiff_t n, const float most, int32_t *out, float *sum) {
    float lanes[W];
    vf top = FN(splat)(LEAST_PEAK), total = {0}, not_finite = {0};
    for (ptrdiff_t i = 0; i < n; i += W) {
        const vf v = *(const vf *)(x + i), size = (vf)((vi)v & 0x7FFFFFFF);
        top = FN(select)((vi)(size > top), size, top);
        total += v, not_finite += v * 0.0f;
    }
    *(vf *)lanes = top, *sum = FN(hsum)(total);
    float peak = lanes[0], bad = FN(hsum)(not_finite);
    if (bad != 0) { /* such values have no integer */
        memset(out, 0, (size_t)n * sizeof *out);
        return bad;
    }
    for (int i = 1; i < W; i++) peak = lanes[i] > peak ? lanes[i] : peak;
    for (ptrdiff_t i = 0; i < n; i++) out[i] = (int32_t)rintf(x[i] * (most / peak));
    return peak / most;
}

#if W == 16
/* ---- IQ4 -----------------------------------------------------------------------------------------------
 *
 * Codes are bytes q + 128 when they have been looked up. A lane has the codes of 4 columns, and activations are integers
 * of IQ4_PEAK at most, so that the sum of a lane fits 32 bits. The low halves of 64 bytes are one vector, the high halves
 * the next one. A packed row has, for each vector of 64 columns, three planes and the start values, minus 128 times the
 * sums of activations; then the factor of each group.
 */
#define IQ4_PEAK 4177800.0f /* half of PLANES_PEAK; 4 * 127 times it is below 2^31 */
#define IQ4_UNIT 256        /* bytes of a packed vector */

static int FN(is_iq4)(const Matrix *m) { return m->codes == TABLE && m->source <= IQ4_XS && m->in % 128 == 0; }

static inline float *FN(iq4_factors)(const Matrix *m, const float *packed) {
    return (float *)((char *)packed + m->in / 64 * IQ4_UNIT);
}

/* Returns the size of a packed row in floats. */
static inline ptrdiff_t FN(iq4_floats)(const Matrix *m) {
    return FN(iq4_factors)(m, NULL) - (float *)NULL + m->groups + W;
}

static TARGET void FN(pack_iq4)(const Matrix *m, const float *x, float *out) {
    int32_t whole[128], start[W];
    int8_t *to = (int8_t *)out;
    float *factor = FN(iq4_factors)(m, out), unused;
    memset(factor, 0, (size_t)(m->groups + W) * sizeof *factor);
    for (ptrdiff_t c = 0; c < m->in; c += 128) {
        for (ptrdiff_t i = 0; i < 128; i += 32, factor++)
            *factor = FN(quantize_group)(x + c + i, 32, IQ4_PEAK, whole + i, &unused);
        for (ptrdiff_t half = 0; half < 2; half++, to += IQ4_UNIT) {
            memset(start, 0, sizeof start);
            for (ptrdiff_t i = 0; i < 64; i++) {
                int32_t v = whole[i / 16 * 32 + 16 * half + i % 16];
                start[i / 4] -= 128 * v;
                for (int p = 0; p < 3; p++) to[64 * p + i] = (int8_t)v, v = (v + 128) >> 8;
            }
            memcpy(to + 192, start, sizeof start);
        }
    }
}

/* Computes the scales of 8 groups of IQ4_XS from its 8 bytes, as iq4_scales in kernels.h. */
INLINE vf FN(iq4_xs_scales)(const uint8_t *from) {
    const __m128i all = _mm_loadl_epi64((const __m128i *)from);
    const __m128i low = _mm_multishift_epi64_epi8(_mm_set1_epi64x(0x3C3834302C282420), all); /* from bits 32, 36, ... on */
    const __m128i high = _mm_multishift_epi64_epi8(_mm_set1_epi64x(0x1E1C1A1816141210), all); /* from bits 16, 18, ... */
    const __m128i codes = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)),
                                       _mm_slli_epi16(_mm_and_si128(high, _mm_set1_epi8(3)), 4));
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_sub_epi8(codes, _mm_set1_epi8(32)));
    const __m512 d = _mm512_cvtph_ps(_mm256_castsi128_si256(all));
    return (vf)_mm512_mul_ps(_mm512_cvtepi32_ps(wide), _mm512_broadcastss_ps(_mm512_castps512_ps128(d)));
}

/* Multiplies row r of m by T packed rows of activations. */
INLINE void FN(iq4_row)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x, float *const *y,
                        const int T) {
    static const int32_t lane[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(IQ4_MORE)), low = _mm512_set1_epi8(15);
    const uint8_t *w = (const uint8_t *)(m->w + r * m->words), *s = (const uint8_t *)m->s + r * m->s_bytes;
    const ptrdiff_t ahead = r + 1 + PREFETCH_BYTES / (m->words * 4);
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    vf acc[8], scale[4];
    prefetch_tables(m, ahead, r1);
    UNROLL for (int i = 0; i < 2 * T; i++) acc[i] = (vf){0};
    for (ptrdiff_t c = 0; c < m->in; c += SUPER) {
        const vf scales = m->source == IQ4_XS ? FN(iq4_xs_scales)(s + c / 32) : FN(iq4_scales)(m, r, c);
        UNROLL for (int t = 0; t < T; t++) scale[t] = scales * *(const vf *)(FN(iq4_factors)(m, x[t]) + c / 32);
        UNROLL for (int i = 0; i < 2; i++) {
            if (c + 128 * i >= m->in) break;
            const __m512i both = _mm512_loadu_si512(w + c / 2 + 64 * i);
            const vi from = *(const vi *)lane + 4 * i;
            __builtin_prefetch(soon + c / 2 + 64 * i);
            UNROLL for (int half = 0; half < 2; half++) {
                const __m512i each = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low);
                const __m512i codes = _mm512_shuffle_epi8(table, each);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *plane = (const int8_t *)x[t] + (c / 64 + 2 * i + half) * IQ4_UNIT;
                    const vu sum = FN(products_from)(_mm512_loadu_si512(plane + 192), &codes, plane, 1);
                    acc[2 * t + half] += __builtin_convertvector((vi)sum, vf) * FN(permute_floats)(scale[t], from);
                }
            }
        }
    }
    UNROLL for (int t = 0; t < T; t++) acc[t] = acc[2 * t] + acc[2 * t + 1];
    FN(store)(acc, r0, r, r1, y, 1, T);
}

#define IQ4_ROWS(T)                                                                                           \
    static __attribute__((noinline)) TARGET void FN(iq4_rows_##T)(                                            \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r++) FN(iq4_row)(m, r0, r, r1, x, y, T);                               \
    }
IQ4_ROWS(1)
IQ4_ROWS(2)
IQ4_ROWS(4)
#undef IQ4_ROWS
#include "lookups.h"
#endif

static inline ptrdiff_t FN(plane_step)(const Matrix *m) { return 4 * W * BYTES(m->bits); }

/* Returns whether this instruction set multiplies a matrix of this form in integers. */
static int FN(in_planes)(const Matrix *m) {
#if W == 16
    if (FN(is_iq4)(m) || FN(has_lookups)(m)) return 1;
#endif
    if (m->codes == TABLE) return 0;
    return (m->bits == 2 || m->bits == 4 || (W == 16 && m->bits > 2 && m->bits < 7)) && m->in % FN(plane_step)(m) == 0;
}

/* Bytes of a step: three planes and the start values. */
#define STEP_BYTES(bits) (3 * 4 * W * BYTES(bits) + 4 * W)

static inline float *FN(plane_factors)(const Matrix *m, const float *packed) {
    return (float *)((char *)packed + ceil_div(m->in, FN(plane_step)(m)) * STEP_BYTES(m->bits));
}

static inline ptrdiff_t FN(plane_groups)(const Matrix *m) { return ceil_div(m->in / m->group, W) * W; }

/* Returns the size of a packed row in floats; 0: it is packed in blocks. */
static ptrdiff_t FN(plane_floats)(const Matrix *m) {
    if (!FN(in_planes)(m)) return 0;
#if W == 16
    if (FN(is_iq4)(m)) return FN(iq4_floats)(m);
    if (FN(has_lookups)(m)) return m->in / SUPER * (LOOKUP_UNIT / 4);
#endif
    return FN(plane_factors)(m, NULL) - (float *)NULL + 2 * FN(plane_groups)(m);
}

/* Returns which column of a step byte `at` of a plane has. */
INLINE ptrdiff_t FN(column)(ptrdiff_t at, const int bits) {
    const ptrdiff_t n = at / (4 * W), byte = at % (4 * W);
    if (bits == 2 || bits == 4) return byte * BYTES(bits) + n;
    return byte / 8 * 16 + 8 * n + byte % 8;
}

/* Splits the integers of a step into three planes, and writes its start values. */
INLINE void FN(split_planes)(const int32_t *x, int8_t *out, const int offset, const int bits) {
    enum { MOST = 4 * 4 * W };
    const int size = 4 * W * BYTES(bits);
    int32_t mixed[MOST], start[W] = {0};
    for (int at = 0; at < size; at++) mixed[at] = x[FN(column)(at, bits)];
    for (int at = 0; at < size; at++) start[at / 4 % W] -= offset * mixed[at];
    for (int p = 0; p < 3; p++)
        for (int at = 0; at < size; at++) {
            out[p * size + at] = (int8_t)mixed[at];
            mixed[at] = (mixed[at] + 128) >> 8;
        }
    memcpy(out + 3 * size, start, sizeof start);
}

static TARGET void FN(pack_planes)(const Matrix *m, const float *x, float *out) {
    enum { MOST = 4 * 4 * W };
    const ptrdiff_t step = FN(plane_step)(m), unit = step > m->group ? step : m->group, padded = FN(plane_groups)(m);
    float *factor = FN(plane_factors)(m, out);
    int8_t *to = (int8_t *)out;
    const int offset = CODE_OFFSET(m->bits, m->codes == E2M1);
    int32_t whole[MOST];
    memset(factor, 0, (size_t)(2 * padded) * sizeof *factor);
    for (ptrdiff_t c = 0; c < m->in; c += unit) {
        for (ptrdiff_t i = 0; i < unit; i += m->group, factor++)
            *factor = FN(quantize_group)(x + c + i, m->group, PLANES_PEAK, whole + i, factor + padded);
        for (ptrdiff_t i = 0; i < unit; i += step, to += STEP_BYTES(m->bits)) {
            if (m->bits == 2) FN(split_planes)(whole + i, to, offset, 2);
            else if (m->bits == 4) FN(split_planes)(whole + i, to, offset, 4);
            else FN(split_planes)(whole + i, to, offset, 3);
        }
    }
}

/* Returns n (at most W) scales or biases from index `first` on, then zeros. Activations beyond the row are zero too. */
INLINE vf FN(table)(const void *all, ptrdiff_t first, ptrdiff_t n, const Kind kind) {
    const char *from = (const char *)all + first * unit_of(kind);
#if W == 16
    const __mmask16 some = (__mmask16)(n < 16 ? (1 << n) - 1 : 0xFFFF);
    if (kind == F32) return (vf)_mm512_maskz_loadu_ps(some, from);
    if (kind >= E8M0) {
        const __m128i bytes = _mm_maskz_loadu_epi8(some, from);
        if (kind == E8M0) return FN(decoded)((vu)_mm512_cvtepu8_epi32(bytes), E8M0);
        const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
        return (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xBF80))) * 256.0f;
    }
    const vu bits = (vu)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from));
#else
    char few[32] = {0};
    if (n < 8) from = memcpy(few, from, (size_t)(n * unit_of(kind)));
    if (kind == F32) return *(const vf *)from;
    if (kind >= E8M0) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
        if (kind == E8M0) return FN(decoded)((vu)_mm256_cvtepu8_epi32(bytes), E8M0);
        const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8);
        return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xBF80))) * 256.0f;
    }
    const vu bits = (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#endif
    return kind == BF16 ? FN(decoded)(bits, BF16) : FN(decoded)(bits, F16);
}

/* Multiplies rows r to r+R-1 (those below r1) by T packed rows of activations: sets y[t][row - r0]. */
INLINE void FN(plane_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                           float *const *y, const int R, const int T, const int BITS, const int MX) {
    enum { MOST = 4 };
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int n = BYTES(BITS), shift = __builtin_ctzl((unsigned long)(m->group / (4 * n))), each = n * W * BITS / 2;
    const ptrdiff_t groups = m->in / m->group, row_bytes = m->words * 4, padded = FN(plane_groups)(m);
    const int offset = CODE_OFFSET(BITS, MX);
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * row_bytes)), rows[MOST], at = 0;
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    const uint8_t *w[MOST];
    vf acc[8];
    UNROLL for (int i = 0; i < R; i++) {
        rows[i] = r + i < r1 ? r + i : r1 - 1;
        w[i] = (const uint8_t *)(m->w + rows[i] * m->words);
        prefetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = (vf){0};
    for (ptrdiff_t g = 0; g < groups; g += W) {
        vf scale[8];
        UNROLL for (int i = 0; i < R; i++) {
            const vf scales = FN(table)(m->s, rows[i] * groups + g, groups - g, m->kind);
            vf biases = {0};
            if (!MX && m->source == MLX) biases = FN(table)(m->b, rows[i] * groups + g, groups - g, m->kind);
            if (!MX && m->source == SYMMETRIC) biases = scales * -(float)(1 << (BITS - 1));
            if (!MX) biases += (float)offset * scales;
            UNROLL for (int t = 0; t < T; t++) {
                const float *factor = FN(plane_factors)(m, x[t]) + g;
                scale[i * T + t] = scales * *(const vf *)factor * (MX ? 0.5f : 1.0f);
                if (!MX) acc[i * T + t] += biases * *(const vf *)(factor + padded);
            }
        }
        for (ptrdiff_t s = 0; s < 1 << shift && at < row_bytes; s++, at += each) {
            const vi from = (*(const vi *)lane + (int32_t)s * W) >> shift;
            UNROLL for (int i = 0; i < R; i++) {
                FN(bytes) codes[4];
                for (int b = 0; b < each; b += 64) __builtin_prefetch(soon + i * row_bytes + at + b);
                FN(unpack_codes)(w[i] + at, BITS, MX, codes);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *plane = (const int8_t *)x[t] + at / each * STEP_BYTES(BITS);
                    vu sum = FN(products)(codes, plane, n);
                    if (offset) sum += *(const vu *)(plane + 3 * 4 * W * n);
                    const vf value = __builtin_convertvector((vi)sum, vf);
                    acc[i * T + t] += value * FN(permute_floats)(scale[i * T + t], from);
                }
            }
        }
    }
    FN(store)(acc, r0, r, r1, y, R, T);
}

/* As plane_rows, for a NESTED matrix. The loops over the steps of W groups have constant bounds here. */
INLINE void FN(nested_rows)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                            float *const *y, const int R, const int T, const int BITS) {
    enum { MOST = 4 };
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int n = BYTES(BITS), steps = nested_group(BITS) / (4 * n), each = n * W * BITS / 2, offset = CODE_OFFSET(BITS, 0);
    const int per = SUPER / nested_group(BITS), size = nested_bytes(BITS), supers = 2 * nested_supers(BITS);
    const int has_bias = nested_has_minima(BITS) || offset != 1 << (BITS - 1);
    const ptrdiff_t groups = m->groups, row_bytes = m->words * 4, padded = FN(plane_groups)(m);
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * row_bytes)), at = 0;
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    const uint8_t *w[MOST], *s[MOST], *d[MOST];
    const float *factor[MOST];
    vf acc[8];
    UNROLL for (int i = 0; i < R; i++) {
        const ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        w[i] = (const uint8_t *)(m->w + row * m->words), s[i] = (const uint8_t *)m->s + row * m->s_bytes;
        d[i] = supers ? (const uint8_t *)m->b + row * m->b_bytes : s[i];
        prefetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int t = 0; t < T; t++) factor[t] = FN(plane_factors)(m, x[t]);
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = (vf){0};
    for (ptrdiff_t g = 0; g < groups; g += W) {
        const ptrdiff_t super = g / per;
        vf scale[8];
        UNROLL for (int i = 0; i < R; i++) {
            const uint8_t *from = s[i] + super * size;
            vf scales, biases;
            FN(nested_scales)(from, supers ? d[i] + super * supers : from, g % per, g + 8 >= groups, BITS, 0, &scales, &biases);
            if (offset) biases += (float)offset * scales;
            UNROLL for (int t = 0; t < T; t++) {
                scale[i * T + t] = scales * *(const vf *)(factor[t] + g);
                if (has_bias) acc[i * T + t] += biases * *(const vf *)(factor[t] + padded + g);
            }
        }
        UNROLL for (int step = 0; step < steps; step++, at += each) {
            if (W * nested_group(BITS) > SUPER && at >= row_bytes) break;
            UNROLL for (int i = 0; i < R; i++) {
                FN(bytes) codes[4];
                UNROLL for (int b = 0; b < each; b += 64) __builtin_prefetch(soon + i * row_bytes + at + b);
                FN(unpack_codes)(w[i] + at, BITS, 0, codes);
                UNROLL for (int t = 0; t < T; t++) {
                    const int8_t *plane = (const int8_t *)x[t] + at / each * STEP_BYTES(BITS);
                    vu sum = FN(products)(codes, plane, n);
                    if (offset) sum += *(const vu *)(plane + 3 * 4 * W * n);
                    const vi from = (*(const vi *)lane + step * W) / steps;
                    const vf by = steps > 1 ? FN(permute_floats)(scale[i * T + t], from) : scale[i * T + t];
                    acc[i * T + t] += __builtin_convertvector((vi)sum, vf) * by;
                }
            }
        }
    }
    FN(store)(acc, r0, r, r1, y, R, T);
}

#define NESTED_PLANES(R, T, BITS)                                                                             \
    static __attribute__((noinline)) TARGET void FN(nested_##T##_##BITS)(                                     \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r += R) FN(nested_rows)(m, r0, r, r1, x, y, R, T, BITS);               \
    }
#define EVERY(BITS) NESTED_PLANES(4, 1, BITS) NESTED_PLANES(2, 2, BITS) NESTED_PLANES(2, 4, BITS)
#define NESTED_THREE(BITS) {FN(nested_1_##BITS), FN(nested_2_##BITS), FN(nested_4_##BITS)}
EVERY(2)
EVERY(4)
#if W == 16
EVERY(3)
EVERY(5)
EVERY(6)
#endif
#undef EVERY

#define PLANES(R, T, BITS, MX)                                                                                \
    static __attribute__((noinline)) TARGET void FN(planes_##T##_##BITS##_##MX)(                              \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                \
        for (ptrdiff_t r = r0; r < r1; r += R) FN(plane_rows)(m, r0, r, r1, x, y, R, T, BITS, MX);            \
    }
#define EVERY(BITS, MX) PLANES(4, 1, BITS, MX) PLANES(2, 2, BITS, MX) PLANES(2, 4, BITS, MX)
#define THREE(BITS, MX) {FN(planes_1_##BITS##_##MX), FN(planes_2_##BITS##_##MX), FN(planes_4_##BITS##_##MX)}
EVERY(2, 0)
EVERY(4, 0)
EVERY(4, 1)
#if W == 16
EVERY(3, 0)
EVERY(5, 0)
EVERY(6, 0)
#endif

/* These two functions replace pack_blocks and rows_of_blocks, and call them for the other forms. */
static TARGET void FN(pack_any)(const Matrix *m, const float *x, float *out) {
#if W == 16
    if (FN(is_iq4)(m) || FN(has_lookups)(m)) {
        FN(is_iq4)(m) ? FN(pack_iq4)(m, x, out) : FN(pack_lookups)(m, x, out);
        return;
    }
#endif
    FN(in_planes)(m) ? FN(pack_planes)(m, x, out) : FN(pack_blocks)(m, x, out);
}

static TARGET void FN(rows_of_any)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x,
                                   float *const *y) {
    typedef void Rows(const Matrix *, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    static Rows *const mx[3] = THREE(4, 1);
#if W == 16
    static Rows *const affine[7][3] = {
        [2] = THREE(2, 0), [3] = THREE(3, 0), [4] = THREE(4, 0), [5] = THREE(5, 0), [6] = THREE(6, 0)};
    static Rows *const iq4[3] = {FN(iq4_rows_1), FN(iq4_rows_2), FN(iq4_rows_4)};
    static Rows *const lookups[3] = {FN(lookup_rows_1), FN(lookup_rows_2), FN(lookup_rows_4)};
    static Rows *const nested[7][3] = {[2] = NESTED_THREE(2), [3] = NESTED_THREE(3), [4] = NESTED_THREE(4),
                                       [5] = NESTED_THREE(5), [6] = NESTED_THREE(6)};
#else
    static Rows *const affine[5][3] = {[2] = THREE(2, 0), [4] = THREE(4, 0)};
    static Rows *const nested[5][3] = {[2] = NESTED_THREE(2), [4] = NESTED_THREE(4)};
#endif
    if (!FN(in_planes)(m)) {
        FN(rows_of_blocks)(m, r0, r1, n, x, y);
        return;
    }
    Rows *const *kernels = m->codes == E2M1 ? mx : m->source == NESTED ? nested[m->bits] : affine[m->bits];
#if W == 16
    if (m->codes == TABLE) kernels = FN(is_iq4)(m) ? iq4 : lookups;
#endif
    if (n == 4) {
        kernels[2](m, r0, r1, x, y);
        return;
    }
    if (n > 1) kernels[1](m, r0, r1, x, y);
    if (n != 2) kernels[0](m, r0, r1, x + n - 1, y + n - 1);
}
void FN(use_planes)(Path *path) {
    path->plane_floats = FN(plane_floats), path->pack_blocks = FN(pack_any), path->rows_of_blocks = FN(rows_of_any);
}

#undef PLANES
#undef EVERY
#undef THREE
#undef NESTED_PLANES
#undef NESTED_THREE
#undef STEP_BYTES
#undef CODE_OFFSET
#undef BYTES
#undef vf
#undef vi
#undef vu
#undef PATH
#undef TARGET
#undef W
