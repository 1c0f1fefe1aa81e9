/* Products of the rows of a step and 4-bit matrices, computed in integers (AVX-512 VNNI) and as exact as float32.
 *
 * In each group of 64 columns the activations are 24-bit integers times one float, the factor. The integers are split
 * into three signed bytes, and vpdpbusd multiplies these by the codes without rounding. The error of an activation is
 * about 2^-24 of the largest activation of its group: half a unit in the last place of a float32 of that size. The
 * kernel needs half the instructions of the float32 kernel; with more instructions one core would not keep up with
 * memory.
 *
 * A packed row has, for each 128 columns, three planes, the low byte first. A plane is 64 bytes of even columns,
 * then 64 bytes of odd columns. Then follow the factor of each group, and the sum of each group's activations, which
 * is multiplied by the group's bias.
 */
#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define VNNI_INLINE static inline __attribute__((always_inline)) VNNI
#define VNNI_BLOCK 384 /* bytes of the planes of 128 columns */

/* Returns the number of groups, rounded up to whole vectors. */
static ptrdiff_t vnni_groups(ptrdiff_t in) { return ceil_div(in / 64, 16) * 16; }

static float *vnni_factors(const float *packed, ptrdiff_t in) {
    return (float *)((char *)packed + ceil_div(in, 128) * VNNI_BLOCK);
}

static VNNI void vnni_pack(const float *x, float *out, ptrdiff_t in) {
    float *factor = vnni_factors(out, in), *sum = factor + vnni_groups(in);
    memset(out, 0, (size_t)((char *)(sum + vnni_groups(in)) - (char *)out));
    for (ptrdiff_t g = 0; g < in / 64; g++, x += 64) {
        uint8_t *plane = (uint8_t *)out + g / 2 * VNNI_BLOCK + g % 2 * 32;
        __m512 v[4], top = _mm512_set1_ps(LEAST_PEAK), total = _mm512_setzero_ps();
        for (int i = 0; i < 4; i++) {
            v[i] = _mm512_loadu_ps(x + 16 * i);
            top = _mm512_max_ps(top, _mm512_abs_ps(v[i]));
            total = _mm512_add_ps(total, v[i]);
        }
        float peak = _mm512_reduce_max_ps(top);
        __m512 up = _mm512_set1_ps(PLANES_PEAK / peak);
        factor[g] = peak / PLANES_PEAK, sum[g] = _mm512_reduce_add_ps(total);
        for (int i = 0; i < 4; i++) {
            __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], up));
            for (int p = 0; p < 3; p++) {
                _mm_storel_epi64((__m128i *)(plane + 128 * p + 8 * i), _mm512_cvtepi64_epi8(n));
                __m512i odd = _mm512_srli_epi64(n, 32);
                _mm_storel_epi64((__m128i *)(plane + 128 * p + 64 + 8 * i), _mm512_cvtepi64_epi8(odd));
                n = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8); /* without the low byte */
            }
        }
    }
}

/* Returns up to 16 scales or biases from group g on. */
VNNI_INLINE __m512 vnni_table(const char *table, ptrdiff_t g, __mmask16 some, int is_f32) {
    if (is_f32) return _mm512_maskz_loadu_ps(some, table + 4 * g);
    __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, table + 2 * g));
    return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
}

/* Returns, for each of 16 words, the sum of its codes times the integers of their activations. */
VNNI_INLINE __m512 vnni_dot(__m512i words, const __m512i *x) {
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    __m512i even = _mm512_and_si512(words, low), odd = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
    __m512i s[3];
    for (int p = 0; p < 3; p++)
        s[p] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, even, x[2 * p]), odd, x[2 * p + 1]);
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(s[2], 8), s[1]);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), s[0]));
}

/* Returns in lane i the value of the group of word i of block `b`. */
VNNI_INLINE __m512 vnni_spread(__m512 values, ptrdiff_t b) {
    const __m512i half = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(_mm512_add_epi32(half, _mm512_set1_epi32(2 * (int)b)), values);
}

/* Multiplies rows r to r+R-1 (those below r1) by T rows of x: sets y[t][row - r0]. The order of a sum does not
 * depend on R or T, so a row of x has the same bits alone and among others. */
VNNI_INLINE void vnni_row_block(const Matrix *m, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1, const float *const *x,
                                float *const *y, const int R, const int T, const int is_f32) {
    ptrdiff_t words = m->in / 8, groups = m->in / 64, unit = is_f32 ? 4 : 2;
    ptrdiff_t ahead = r + R * (1 + PREFETCH_BYTES / (R * words * 4));
    const uint32_t *soon = address_ahead(m, ahead, r1), *w[4];
    const char *s[4], *b[4];
    __m512 acc[8], scale[8];
    UNROLL for (int i = 0; i < R; i++) {
        ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        w[i] = m->w + row * words;
        s[i] = (const char *)m->s + row * groups * unit;
        b[i] = (const char *)m->b + row * groups * unit;
        prefetch_tables(m, ahead + i, r1);
    }
    UNROLL for (int i = 0; i < R * T; i++) acc[i] = _mm512_setzero_ps();
    for (ptrdiff_t g = 0; g < groups; g += 16) {
        ptrdiff_t left = min(16, groups - g);
        __mmask16 some = (__mmask16)((1u << left) - 1);
        UNROLL for (int i = 0; i < R; i++) {
            const __m512 scales = vnni_table(s[i], g, some, is_f32), biases = vnni_table(b[i], g, some, is_f32);
            UNROLL for (int t = 0; t < T; t++) {
                const float *factor = vnni_factors(x[t], m->in) + g, *sum = factor + vnni_groups(m->in);
                scale[i * T + t] = _mm512_mul_ps(scales, _mm512_load_ps(factor));
                acc[i * T + t] = _mm512_fmadd_ps(biases, _mm512_load_ps(sum), acc[i * T + t]);
            }
        }
        for (ptrdiff_t n = 0; n < left; n += 2) {
            const ptrdiff_t planes = (g + n) / 2 * VNNI_BLOCK, k = 8 * (g + n);
            __mmask16 whole = n + 1 < left ? 0xFFFF : 0x00FF;
            UNROLL for (int i = 0; i < R; i++) {
                __builtin_prefetch(soon + i * words + k);
                const __m512i codes = _mm512_maskz_loadu_epi32(whole, w[i] + k);
                UNROLL for (int t = 0; t < T; t++) {
                    const __m512 value = vnni_dot(codes, (const __m512i *)((const char *)x[t] + planes));
                    acc[i * T + t] = _mm512_fmadd_ps(value, vnni_spread(scale[i * T + t], n / 2), acc[i * T + t]);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < R; i++)
        UNROLL for (int t = 0; t < T; t++)
            if (r + i < r1) y[t][r - r0 + i] = hsum_avx512((vf_avx512)acc[i * T + t]);
}

#define VNNI_ROWS(R, T)                                                                                              \
    static VNNI void vnni_rows_##T(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x,               \
                                   float *const *y) {                                                                \
        for (ptrdiff_t r = r0; r < r1; r += R)                                                                       \
            m->kind == F32 ? vnni_row_block(m, r0, r, r1, x, y, R, T, 1) : vnni_row_block(m, r0, r, r1, x, y, R, T, 0); \
    }
VNNI_ROWS(4, 1)
VNNI_ROWS(4, 2)
VNNI_ROWS(2, 4)
#undef VNNI_ROWS

/* Multiplies by n <= 4 rows of x. Three are computed as two and one. */
static void vnni_rows(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const float *const *x, float *const *y) {
    if (n == 4) {
        vnni_rows_4(m, r0, r1, x, y);
        return;
    }
    if (n > 1) vnni_rows_2(m, r0, r1, x, y);
    if (n != 2) vnni_rows_1(m, r0, r1, x + n - 1, y + n - 1);
}

void use_vnni(Path *path) {
    path->name = "avx512vnni", path->step_pack = vnni_pack, path->step_rows = vnni_rows;
}
