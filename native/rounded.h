/* Products with activations that are rounded to 8 or 16 bits, computed in integers. The code is compiled once for each
 * instruction set.
 *
 * rounded.c defines these macros before it includes this file:
 *   PATH    the suffix of every name that this file defines
 *   TARGET  the function attribute that enables the instruction set
 *   DOT     DPBUSD, MADDUBS, SDOT or USDOT: the instruction that multiplies bytes
 *
 * In each group of the matrix the activations are integers times one float, the factor. The integers are one plane of
 * signed bytes, or two planes, the low byte first. The sum of the products of a group's codes and integers is exact.
 * Sums of floats have the same order for every instruction set and for any number of rows of x: lane g % 8 adds the
 * product of group g times scale and factor, then the bias of the group times the sum of its activations. At the end
 * the upper four lanes are added to the lower four, and these are added in pairs. So a row of x has the same bits alone
 * and among others, on every path.
 *
 * A packed row of x has words of 32 bits: for each group its planes, in the order in which codes are unpacked; then
 * the factors; then the sums of the groups. A block is eight packed rows, interleaved word by word.
 */
typedef float FN(f8) __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t FN(i8) __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t FN(u8) __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t FN(h8) __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint16_t FN(h16) __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t FN(c8) __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint8_t FN(c16) __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t FN(b32) __attribute__((vector_size(32), aligned(1), may_alias)); /* 32 bytes */
#define f8 FN(f8)
#define i8 FN(i8)
#define u8 FN(u8)
#define h8 FN(h8)
#define b32 FN(b32)
#define NIBBLES 0x0F0F0F0F0F0F0F0Full

/* ---- operations that differ by instruction set ---- */

#if DOT == SDOT || DOT == USDOT
INLINE f8 FN(fma8)(f8 a, f8 b, f8 c) {
    float32x4_t low = vfmaq_f32(vld1q_f32((float *)&c), vld1q_f32((float *)&a), vld1q_f32((float *)&b));
    float32x4_t high = vfmaq_f32(vld1q_f32((float *)&c + 4), vld1q_f32((float *)&a + 4), vld1q_f32((float *)&b + 4));
    vst1q_f32((float *)&c, low), vst1q_f32((float *)&c + 4, high);
    return c;
}

/* Adds the products of four adjacent bytes to each lane of acc. FN(dot_of) splits codes of 8 bits where that is
 * needed. */
INLINE i8 FN(dot)(i8 acc, b32 codes, b32 x) {
    const int8_t *c = (const int8_t *)&codes, *v = (const int8_t *)&x;
    int32_t *a = (int32_t *)&acc;
#if DOT == SDOT
    int32x4_t low = vdotq_s32(vld1q_s32(a), vld1q_s8(c), vld1q_s8(v));
    int32x4_t high = vdotq_s32(vld1q_s32(a + 4), vld1q_s8(c + 16), vld1q_s8(v + 16));
#else
    int32x4_t low = vusdotq_s32(vld1q_s32(a), vld1q_u8((const uint8_t *)c), vld1q_s8(v));
    int32x4_t high = vusdotq_s32(vld1q_s32(a + 4), vld1q_u8((const uint8_t *)c + 16), vld1q_s8(v + 16));
#endif
    vst1q_s32(a, low), vst1q_s32(a + 4, high);
    return acc;
}

/* Returns the sum of the lanes of v[n] in lane n. */
INLINE i8 FN(lane_sums)(const i8 *v) {
    int32x4_t half[8];
    i8 out;
    UNROLL for (int n = 0; n < 8; n++)
        half[n] = vaddq_s32(vld1q_s32((const int32_t *)(v + n)), vld1q_s32((const int32_t *)(v + n) + 4));
    UNROLL for (int n = 0; n < 8; n += 4)
        vst1q_s32((int32_t *)&out + n,
                  vpaddq_s32(vpaddq_s32(half[n], half[n + 1]), vpaddq_s32(half[n + 2], half[n + 3])));
    return out;
}

INLINE b32 FN(e2m1)(b32 codes) {
    const uint8_t values[16] = {E2M1_BYTES};
    uint8_t *c = (uint8_t *)&codes;
    const uint8x16_t table = vld1q_u8(values);
    vst1q_u8(c, vqtbl1q_u8(table, vld1q_u8(c))), vst1q_u8(c + 16, vqtbl1q_u8(table, vld1q_u8(c + 16)));
    return codes;
}
#else
INLINE f8 FN(fma8)(f8 a, f8 b, f8 c) { return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

INLINE i8 FN(dot)(i8 acc, b32 codes, b32 x) {
#if DOT == DPBUSD
    return (i8)_mm256_dpbusd_epi32((__m256i)acc, (__m256i)codes, (__m256i)x);
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    return (i8)_mm256_add_epi32((__m256i)acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

INLINE i8 FN(lane_sums)(const i8 *v) {
    __m256i four[2];
    UNROLL for (int n = 0; n < 2; n++) {
        const __m256i *of = (const __m256i *)(v + 4 * n);
        four[n] = _mm256_hadd_epi32(_mm256_hadd_epi32(of[0], of[1]), _mm256_hadd_epi32(of[2], of[3]));
    }
    __m256i low = _mm256_permute2x128_si256(four[0], four[1], 0x20);
    return (i8)_mm256_add_epi32(low, _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

/* Replaces each byte, an E2M1 code, by twice its value plus 16. */
INLINE b32 FN(e2m1)(b32 codes) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(E2M1_BYTES));
    return (b32)_mm256_shuffle_epi8(table, (__m256i)codes);
}
#endif

/* As FN(dot), for codes of BITS bits. MADDUBS and SDOT take codes of 8 bits in two halves, so that nothing
 * overflows. */
INLINE i8 FN(dot_of)(i8 acc, b32 codes, b32 x, const int BITS) {
    if (BITS <= 4 || DOT == DPBUSD || DOT == USDOT) return FN(dot)(acc, codes, x);
    return FN(dot)(acc, codes & NIBBLES, x) + (FN(dot)((i8){0}, codes >> 4 & NIBBLES, x) << 4);
}

/* Returns the sum of the products of a group's codes and the integers in all planes, divided over the lanes. */
INLINE i8 FN(group_dot)(const b32 *codes, const int8_t *x, const int BITS, const int GROUP, const int PLANES) {
    i8 sum[2] = {{0}, {0}};
#if DOT == MADDUBS
    /* A 16-bit lane sums at most eight products of a nibble and a byte, so the pairs of a plane are added before
     * they are widened. */
    const int halves = BITS == 8 ? 2 : 1;
    UNROLL for (int p = 0; p < PLANES; p++)
        UNROLL for (int h = 0; h < halves; h++) {
            __m256i pairs = _mm256_setzero_si256();
            UNROLL for (int i = 0; i < GROUP / 32; i++) {
                const b32 part = halves == 1 ? codes[i] : (b32)(codes[i] >> (4 * h) & NIBBLES);
                const __m256i *v = (const __m256i *)(x + p * GROUP + 32 * i);
                const __m256i two = _mm256_maddubs_epi16((__m256i)part, _mm256_loadu_si256(v));
                pairs = i ? _mm256_add_epi16(pairs, two) : two;
            }
            sum[0] += (i8)_mm256_madd_epi16(pairs, _mm256_set1_epi16((short)(1 << (8 * p + 4 * h))));
        }
    return sum[0];
#else
    UNROLL for (int p = 0; p < PLANES; p++)
        UNROLL for (int i = 0; i < GROUP / 32; i++)
            sum[p] = FN(dot_of)(sum[p], codes[i], *(const b32 *)(x + p * GROUP + 32 * i), BITS);
    if (PLANES == 2) sum[0] += sum[1] << 8;
    return sum[0];
#endif
}

/* ---- activations ---- */

/* Puts the bytes of a group in the order in which FN(codes) unpacks codes: 4-bit codes of even columns, then of odd
 * ones. */
INLINE void FN(reorder)(const int8_t *plain, int8_t *out, const int GROUP, const int BITS) {
    const int unit = GROUP < 64 ? GROUP : 64;
    if (BITS == 8) memcpy(out, plain, GROUP);
    else
        UNROLL for (int i = 0; i < GROUP; i += 32) {
            FN(h16) pairs = *(const FN(h16) *)(plain + i);
            int8_t *to = out + i / unit * unit + i % unit / 2;
            *(FN(c16) *)to = __builtin_convertvector(pairs & 255, FN(c16));
            *(FN(c16) *)(to + unit / 2) = __builtin_convertvector(pairs >> 8, FN(c16));
        }
}

INLINE void FN(round_groups)(const float *x, int planes, ptrdiff_t groups, int8_t *out, float *factor, float *sum,
                             const int GROUP, const int BITS) {
    const float most = planes == 1 ? 127 : 32639; /* 127 in both bytes */
    const f8 zero = {0}, magic = zero + 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    for (ptrdiff_t g = 0; g < groups; g++, x += GROUP, out += GROUP * planes) {
        int8_t plain[2][128];
        f8 top = zero + LEAST_PEAK, not_finite = zero;
        i8 total = {0};
        UNROLL for (int i = 0; i < GROUP; i += 8) {
            f8 v = *(const f8 *)(x + i), size = (f8)((u8)v & 0x7FFFFFFFu);
            i8 more = size > top;
            top = (f8)(((i8)size & more) | ((i8)top & ~more));
            not_finite += v * 0.0f; /* NaN if a value is NaN or infinite */
        }
        float peak = top[0], bad = not_finite[0];
        for (int i = 1; i < 8; i++) peak = top[i] > peak ? top[i] : peak, bad += not_finite[i];
        const f8 up = zero + most / peak;
        UNROLL for (int i = 0; i < GROUP; i += 8) {
            i8 n = (i8)FN(fma8)(*(const f8 *)(x + i), up, magic) - 0x4B400000;
            total += n;
            *(FN(c8) *)(plain[0] + i) = __builtin_convertvector(n, FN(c8));
            *(FN(c8) *)(plain[1] + i) = __builtin_convertvector((n + 128) >> 8, FN(c8)); /* without the low byte */
        }
        int all = 0;
        for (int i = 0; i < 8; i++) all += total[i];
        factor[g] = peak / most + bad, sum[g] = factor[g] * (float)all;
        for (int p = 0; p < planes; p++) FN(reorder)(plain[p], out + p * GROUP, GROUP, BITS);
    }
}

static TARGET void FN(round_row)(const Matrix *m, const float *x, int planes, uint32_t *out) {
    const ptrdiff_t groups = m->groups;
    float *factor = (float *)out + m->in / 4 * planes, *sum = factor + rounded_groups(m);
    int8_t *bytes = (int8_t *)out;
    memset(factor, 0, (size_t)rounded_groups(m) * 2 * sizeof *factor);
    if (m->group == 32 && m->bits == 4) FN(round_groups)(x, planes, groups, bytes, factor, sum, 32, 4);
    else if (m->group == 32) FN(round_groups)(x, planes, groups, bytes, factor, sum, 32, 8);
    else if (m->group == 64 && m->bits == 4) FN(round_groups)(x, planes, groups, bytes, factor, sum, 64, 4);
    else if (m->group == 64) FN(round_groups)(x, planes, groups, bytes, factor, sum, 64, 8);
    else if (m->bits == 4) FN(round_groups)(x, planes, groups, bytes, factor, sum, 128, 4);
    else FN(round_groups)(x, planes, groups, bytes, factor, sum, 128, 8);
}

/* ---- weights ---- */

/* Unpacks the codes of a group to bytes. */
INLINE void FN(codes)(const uint8_t *w, b32 *out, const int BITS, const int GROUP, const int MX) {
    if (BITS == 8) {
        UNROLL for (int i = 0; i < GROUP / 32; i++) out[i] = ((const b32 *)w)[i];
    } else if (GROUP == 32) {
        uint64_t half[2];
        memcpy(half, w, 16);
        out[0] = ((b32){half[0], half[1], half[0] >> 4, half[1] >> 4}) & NIBBLES;
    } else {
        UNROLL for (int i = 0; i < GROUP / 64; i++) {
            b32 both = ((const b32 *)w)[i];
            out[2 * i] = both & NIBBLES, out[2 * i + 1] = both >> 4 & NIBBLES;
        }
    }
    if (MX) out[0] = FN(e2m1)(out[0]);
}

/* Returns the scales or biases of eight groups. Only `left` groups are in the row; the lanes of the others are zero.
 * `whole`: eight values can be read. */
INLINE f8 FN(table)(const void *table, ptrdiff_t first, ptrdiff_t left, int whole, const Kind kind) {
    static const int32_t kept[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    float some[8] = {0};
    const char *from = (const char *)table + first * unit_of(kind);
    if (!whole && left < 8) from = memcpy(some, from, (size_t)(left * unit_of(kind)));
    u8 bits;
    if (kind == F32) bits = *(const u8 *)from;
    else if (kind == E8M0) bits = __builtin_convertvector(*(const FN(c8) *)from, u8);
    else bits = __builtin_convertvector(*(const h8 *)from, u8);
    if (kind == BF16) bits = bits << 16;
    if (kind == E8M0) bits = bits << 23 | ((u8)(bits == 0) & 0x00400000u);
    if (kind == F16) {
        u8 value = (u8)((f8)((bits & 0x7FFFu) << 13) * 0x1p112f);
        bits = value | ((u8)((bits & 0x7C00u) == 0x7C00u) & 0x7F800000u) | (bits & 0x8000u) << 16;
    }
    return left < 8 ? (f8)(bits & *(const u8 *)(kept + 8 - left)) : (f8)bits;
}

typedef struct {
    const void *s, *b; /* of one row */
    int whole;         /* whether so many values follow the row that eight can be read from any group */
} FN(Tables);

INLINE FN(Tables) FN(tables_of)(const Matrix *m, ptrdiff_t row) {
    return (FN(Tables)){(const char *)m->s + row * m->s_bytes, m->codes ? NULL : (const char *)m->b + row * m->b_bytes,
                        m->groups * (m->rows - row - 1) >= 7};
}

/* Computes the scales and biases of eight groups from g on. E2M1 codes are unpacked to twice their value plus 16,
 * which halves their scale and gives them a bias. */
INLINE void FN(scales)(FN(Tables) t, ptrdiff_t g, ptrdiff_t left, const Kind kind, const int MX, f8 *scale, f8 *bias) {
    *scale = FN(table)(t.s, g, left, t.whole, MX ? E8M0 : kind);
    if (MX) *bias = *scale * -8.0f, *scale *= 0.5f;
    else *bias = FN(table)(t.b, g, left, t.whole, kind);
}

/* ---- up to four rows of x ---- */

/* A row of the matrix, and the packed rows of x. */
typedef struct {
    const uint8_t *w;
    const int8_t *planes[4];
    const float *factor[4], *sum[4];
    FN(Tables) tables;
} FN(Row);

/* Sets dots[t][n] to the partial sums of group g + n and row t of x (see FN(group_dot)). w begins with group g. */
INLINE void FN(group_dots)(i8 (*dots)[8], const uint8_t *w, const int8_t *const *planes, ptrdiff_t g, const int n,
                           const int T, const int BITS, const int GROUP, const int PLANES, const int MX) {
    b32 codes[4];
    FN(codes)(w + n * (GROUP * BITS / 8), codes, BITS, GROUP, MX);
    UNROLL for (int t = 0; t < T; t++)
        dots[t][n] = FN(group_dot)(codes, planes[t] + (g + n) * GROUP * PLANES, BITS, GROUP, PLANES);
}

/* Adds the products of groups g to g+7 to acc, for each of T rows of x. Only `left` of these groups are in the row.
 * count is 8 or 4 if that many groups are in the row; 0: their number is `left`, which the compiler does not know. */
INLINE void FN(eight_groups)(f8 *acc, const FN(Row) *row, ptrdiff_t g, ptrdiff_t left, const int count, const int T,
                             const Kind kind, const int BITS, const int GROUP, const int PLANES, const int MX) {
    const int bytes = GROUP * BITS / 8;
    const uint8_t *w = row->w + g * bytes;
    i8 dots[4][8];
    f8 scale, bias;
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int n = count; n < 8; n++) dots[t][n] = (i8){0};
    if (count)
        UNROLL for (int n = 0; n < count; n++) FN(group_dots)(dots, w, row->planes, g, n, T, BITS, GROUP, PLANES, MX);
    else
        for (int n = 0; n < left; n++) FN(group_dots)(dots, w, row->planes, g, n, T, BITS, GROUP, PLANES, MX);
    FN(scales)(row->tables, g, left, kind, MX, &scale, &bias);
    UNROLL for (int t = 0; t < T; t++) {
        const f8 sums = __builtin_convertvector(FN(lane_sums)(dots[t]), f8);
        acc[t] = FN(fma8)(sums, scale * *(const f8 *)(row->factor[t] + g), acc[t]);
        acc[t] = FN(fma8)(bias, *(const f8 *)(row->sum[t] + g), acc[t]);
    }
}

/* Sets y[t][at] to row r of the matrix times row t of x, for T rows. */
INLINE void FN(row_dot)(const Matrix *m, ptrdiff_t r, const uint32_t *soon, const uint32_t *const *x, float *const *y,
                        ptrdiff_t at, const int T, const Kind kind, const int BITS, const int GROUP, const int PLANES,
                        const int MX) {
    enum { LINE = 64 };
    const int bytes = GROUP * BITS / 8;
    const ptrdiff_t groups = m->groups;
    const uint8_t *ahead = (const uint8_t *)soon;
    FN(Row) row = {.w = (const uint8_t *)(m->w + r * m->words), .tables = FN(tables_of)(m, r)};
    f8 acc[4] = {{0}, {0}, {0}, {0}};
    ptrdiff_t g = 0;
    UNROLL for (int t = 0; t < T; t++) {
        row.planes[t] = (const int8_t *)x[t];
        row.factor[t] = (const float *)x[t] + m->in / 4 * PLANES;
        row.sum[t] = row.factor[t] + rounded_groups(m);
    }
    for (; g + 8 <= groups; g += 8) {
        UNROLL for (int n = 0; n < 8 * bytes; n += LINE) __builtin_prefetch(ahead + g * bytes + n);
        FN(eight_groups)(acc, &row, g, 8, 8, T, kind, BITS, GROUP, PLANES, MX);
    }
    const ptrdiff_t left = groups - g;
    for (ptrdiff_t n = 0; n < left * bytes; n += LINE) __builtin_prefetch(ahead + g * bytes + n);
    if (left == 4) FN(eight_groups)(acc, &row, g, 4, 4, T, kind, BITS, GROUP, PLANES, MX);
    else if (left) FN(eight_groups)(acc, &row, g, left, 0, T, kind, BITS, GROUP, PLANES, MX);
    UNROLL for (int t = 0; t < T; t++) {
        const f8 v = acc[t];
        const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
        y[t][at] = (a + b) + (c + d);
    }
}

INLINE void FN(row_dots)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const uint32_t *const *x, float *const *y,
                         const int T, const Kind kind, const int BITS, const int GROUP, const int PLANES,
                         const int MX) {
    const ptrdiff_t ahead = 1 + PREFETCH_BYTES / (m->words * 4);
    for (ptrdiff_t r = r0; r < r1; r++) {
        prefetch_tables(m, r + ahead, r1);
        FN(row_dot)(m, r, address_ahead(m, r + ahead, r1), x, y, r - r0, T, kind, BITS, GROUP, PLANES, MX);
    }
}

/* ---- eight rows of x at a time ---- */

/* Unpacks rows r to r+7 (those below r1): their codes, `stride` bytes for each row, and their scales and biases
 * [groups, 8]. */
INLINE void FN(unpack_tile)(const Matrix *m, ptrdiff_t r, ptrdiff_t r1, uint8_t *codes, ptrdiff_t stride, float *scale,
                            float *bias, const int BITS, const int GROUP, const int MX) {
    const int bytes = GROUP * BITS / 8;
    const ptrdiff_t groups = m->groups;
    for (int i = 0; i < 8; i++, codes += stride) {
        const ptrdiff_t row = r + i < r1 ? r + i : r1 - 1;
        const uint8_t *w = (const uint8_t *)(m->w + row * m->words);
        const uint8_t *ahead = (const uint8_t *)address_ahead(m, r + i + 8, r1);
        const FN(Tables) tables = FN(tables_of)(m, row);
        prefetch_tables(m, r + i + 8, r1);
        for (ptrdiff_t g = 0; g < groups; g++) {
            if (bytes >= 64 || g % 2 == 0) __builtin_prefetch(ahead + g * bytes);
            if (bytes == 128) __builtin_prefetch(ahead + g * bytes + 64);
            FN(codes)(w + g * bytes, (b32 *)(codes + g * GROUP), BITS, GROUP, MX);
        }
        for (ptrdiff_t g = 0; g < groups; g += 8) {
            f8 s, b;
            FN(scales)(tables, g, groups - g, m->kind, MX, &s, &b);
            for (int j = 0; j < 8; j++) scale[8 * (g + j) + i] = s[j], bias[8 * (g + j) + i] = b[j];
        }
    }
}

INLINE f8 FN(splat8)(float v) { return (f8){v, v, v, v, v, v, v, v}; }

/* Multiplies the tile by a block of eight rows of x. y[i] gets the results of row i of the tile. */
INLINE void FN(tile_times_block)(const Matrix *m, const uint8_t *codes, ptrdiff_t stride, const float *scale,
                                 const float *bias, const uint32_t *x, f8 *y, const int BITS, const int GROUP,
                                 const int PLANES) {
    const ptrdiff_t groups = m->groups, padded = rounded_groups(m);
    const f8 *factor = (const f8 *)x + m->in / 4 * PLANES, *sum = factor + padded;
    const b32 *v = (const b32 *)x;
    f8 acc[8][8]; /* by lane and row of the tile */
    memset(acc, 0, sizeof acc);
    for (ptrdiff_t g = 0; g < groups; g++, codes += GROUP) {
        i8 dots[2][8];
        UNROLL for (int p = 0; p < PLANES; p++, v += GROUP / 4) {
            i8 s[8] = {{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}};
            for (int k = 0; k < GROUP / 4; k++)
                UNROLL for (int i = 0; i < 8; i++) {
                    uint32_t four;
                    memcpy(&four, codes + i * stride + 4 * k, 4);
                    s[i] = FN(dot_of)(s[i], (b32)((u8){0} + four), v[k], BITS);
                }
            UNROLL for (int i = 0; i < 8; i++) dots[p][i] = s[i];
        }
        UNROLL for (int i = 0; i < 8; i++) {
            i8 dot = dots[0][i];
            if (PLANES == 2) dot += dots[1][i] << 8;
            f8 *to = &acc[g % 8][i];
            *to = FN(fma8)(__builtin_convertvector(dot, f8), factor[g] * FN(splat8)(scale[8 * g + i]), *to);
            *to = FN(fma8)(FN(splat8)(bias[8 * g + i]), sum[g], *to);
        }
    }
    UNROLL for (int i = 0; i < 8; i++) {
        f8 a = acc[0][i] + acc[4][i], b = acc[1][i] + acc[5][i], c = acc[2][i] + acc[6][i], d = acc[3][i] + acc[7][i];
        y[i] = (a + b) + (c + d);
    }
}

/* Multiplies rows r0 to r1-1 of m by n rows of x, which are in blocks of eight. */
INLINE void FN(tiles)(const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const uint32_t *const *x,
                      void *workspace, float *const *y, const int BITS, const int GROUP, const int PLANES,
                      const int MX) {
    const ptrdiff_t stride = m->in + 64, padded = rounded_groups(m);
    uint8_t *codes = workspace;
    float *scale = (float *)(codes + 8 * stride), *bias = scale + 8 * padded;
    f8 out[8];
    for (ptrdiff_t r = r0; r < r1; r += 8) {
        FN(unpack_tile)(m, r, r1, codes, stride, scale, bias, BITS, GROUP, MX);
        for (ptrdiff_t t = 0; t < n; t += 8) {
            FN(tile_times_block)(m, codes, stride, scale, bias, x[t], out, BITS, GROUP, PLANES);
            for (ptrdiff_t j = 0; j < min(8, n - t); j++)
                for (ptrdiff_t i = 0; i < min(8, r1 - r); i++) y[t + j][r - r0 + i] = out[i][j];
        }
    }
}

/* ---- every form ---- */

#define ROWS(T, BITS, GROUP, PLANES, MX)                                                            \
    static __attribute__((noinline)) TARGET void FN(row_##T##_##BITS##_##GROUP##_##PLANES##_##MX)(  \
    const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const uint32_t *const *x, float *const *y) {       \
        if (!(MX) && T == 1 && m->kind == BF16)                                                     \
            FN(row_dots)(m, r0, r1, x, y, T, BF16, BITS, GROUP, PLANES, MX);                        \
        else FN(row_dots)(m, r0, r1, x, y, T, m->kind, BITS, GROUP, PLANES, MX);                    \
    }
/* Three rows of x are computed as two and one, and rows with two planes one by one, so that there is less code to
 * compile. */
#define FORM(BITS, GROUP, PLANES, MX)                                                               \
    ROWS(1, BITS, GROUP, PLANES, MX)                                                                \
    static TARGET void FN(rows_##BITS##_##GROUP##_##PLANES##_##MX)(                                 \
    const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const uint32_t *const *x,             \
    float *const *y) {                                                                              \
        ptrdiff_t t = 0;                                                                            \
        if (PLANES == 1 && n == 4) FN(row_4_##BITS##_##GROUP##_1_##MX)(m, r0, r1, x, y), t = 4;     \
        if (PLANES == 1 && n / 2 == 1) FN(row_2_##BITS##_##GROUP##_1_##MX)(m, r0, r1, x, y), t = 2; \
        for (; t < n; t++) FN(row_1_##BITS##_##GROUP##_##PLANES##_##MX)(m, r0, r1, x + t, y + t);   \
    }                                                                                               \
    static __attribute__((noinline)) TARGET void FN(tiles_##BITS##_##GROUP##_##PLANES##_##MX)(      \
    const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n, const uint32_t *const *x, void *workspace, \
    float *const *y) {                                                                              \
        FN(tiles)(m, r0, r1, n, x, workspace, y, BITS, GROUP, PLANES, MX);                               \
    }
#define EVERY(BITS, GROUP, MX) \
    ROWS(2, BITS, GROUP, 1, MX) ROWS(4, BITS, GROUP, 1, MX) FORM(BITS, GROUP, 1, MX) FORM(BITS, GROUP, 2, MX)
EVERY(4, 32, 0)
EVERY(4, 64, 0)
EVERY(4, 128, 0)
EVERY(8, 32, 0)
EVERY(8, 64, 0)
EVERY(8, 128, 0)
EVERY(4, 32, 1)

#define BOTH(name, BITS, GROUP, MX) {FN(name##_##BITS##_##GROUP##_1_##MX), FN(name##_##BITS##_##GROUP##_2_##MX)}
#define TABLE_OF(name)                                                                                              \
    {BOTH(name, 4, 32, 0), BOTH(name, 4, 64, 0), BOTH(name, 4, 128, 0), BOTH(name, 8, 32, 0), BOTH(name, 8, 64, 0), \
        BOTH(name, 8, 128, 0), BOTH(name, 4, 32, 1)}
const Rounded FN(rounded) = {FN(round_row), TABLE_OF(rows), TABLE_OF(tiles)};

#undef TABLE_OF
#undef BOTH
#undef EVERY
#undef FORM
#undef ROWS
#undef f8
#undef i8
#undef u8
#undef h8
#undef b32
#undef NIBBLES
#undef PATH
#undef TARGET
#undef DOT
