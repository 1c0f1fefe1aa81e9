/* Products of rows whose codes name entries of a grid, or are digits of 2 bits, in integers: AVX-512 VNNI and VBMI.
 * Included by planes.h.
 *
 * An entry becomes a word of 16 bits, with 2 bits for each of eight magnitudes or 3 for each of four. So permutations of
 * words look up 32 entries at once, and permutations of bytes make of their fields and a sign bytes q + 128.
 *
 * 256 columns are four vectors of codes. Byte i of lane n (32 bits) of vector p is column 16 n + 4 p + i, so the lane has
 * one scale, and one sum for all four. A packed row has, for 256 columns, three planes of four vectors, the start values,
 * minus 128 times the sums of activations, and the factors.
 */
#define LOOKUP_UNIT 896 /* bytes of 256 packed columns */
#define IS_EIGHTS(source) ((source) != IQ3_XXS && (source) != IQ3_S)
#define IS_IQ1(source) ((source) == IQ1_S || (source) == IQ1_M)

static int FN(has_lookups)(const Matrix *m) { return m->codes == TABLE && m->source > IQ4_XS && m->source != TQ1_0; }

/* The largest integer of activations: a lane sums 16 products with q, below 2^31. */
static float FN(lookup_peak)(Source source) {
    const float largest = source == IQ3_XXS ? 62 : source == IQ3_S ? 15 : IS_IQ1(source) || source == TQ2_0 ? 9 : 43;
    return fminf(PLANES_PEAK, 0x7FFF0000 / (16 * largest));
}

static TARGET void FN(pack_lookups)(const Matrix *m, const float *x, float *out) {
    const float peak = FN(lookup_peak)(m->source);
    int32_t whole[32];
    int8_t *to = (int8_t *)out;
    for (ptrdiff_t c = 0; c < m->in; c += SUPER, to += LOOKUP_UNIT) {
        int32_t *start = (int32_t *)(to + 3 * SUPER);
        float *factors = (float *)(start + 16), unused;
        memset(start, 0, 64);
        for (int at = 0; at < SUPER; at += 32) {
            factors[at / 16] = factors[at / 16 + 1] = FN(quantize_group)(x + c + at, 32, peak, whole, &unused);
            for (int i = at; i < at + 32; i++) {
                const int place = i % 16 / 4 * 64 + i / 16 * 4 + i % 4;
                int32_t v = whole[i - at];
                start[i / 16] -= 128 * v;
                for (int p = 0; p < 3; p++) to[SUPER * p + place] = (int8_t)v, v = (v + 128) >> 8;
            }
        }
    }
}

/* Writes the words of a grid: the bits in which its values differ. */
static TARGET void FN(compress_grid)(const Matrix *m, uint16_t *words) {
    const Table table = table_of(m->source);
    const uint8_t each = m->source == IQ3_XXS ? 0x38 : m->source == IQ3_S ? 0x0E : IS_IQ1(m->source) ? 0x88 : 0x30;
    for (int i = 0; i < table.entries; i++) {
        uint64_t entry = 0;
        memcpy(&entry, (const uint8_t *)m->b + i * table.values, (size_t)table.values);
        words[i] = (uint16_t)_pext_u64(entry, EACH_BYTE(each));
    }
}

/* Returns 32 words of a table of `count`, by index. */
INLINE __m512i FN(look_up)(const uint16_t *words, __m512i index, const int count) {
    __m512i some[32];
    UNROLL32 for (int i = 0; i < count / 64; i++)
        some[i] = _mm512_permutex2var_epi16(_mm512_load_si512(words + 64 * i), index, _mm512_load_si512(words + 64 * i + 32));
    UNROLL for (int n = count / 128, bit = 64; n; n /= 2, bit *= 2) {
        const __mmask32 high = _mm512_test_epi16_mask(index, _mm512_set1_epi16((short)bit));
        UNROLL32 for (int i = 0; i < n; i++) some[i] = _mm512_mask_blend_epi16(high, some[2 * i], some[2 * i + 1]);
    }
    return some[0];
}

/* Adds the eighth bit to seven, with which the number of bits is even: a product with a matrix of bits. */
INLINE __m256i FN(even)(__m256i seven) {
    return _mm256_gf2p8affine_epi64_epi8(seven, _mm256_set1_epi64x(0x010204081020407F), 0);
}

/* Returns four times seven bits of each word as bytes, with the eighth. */
INLINE __m256i FN(sevens)(__m256i words) {
    const __m256i from = _mm256_set1_epi64x(0x352E2720150E0700);
    return FN(even)(_mm256_multishift_epi64_epi8(from, words));
}

/* The low and the high halves of bytes, in turn. */
INLINE __m128i FN(each_half)(__m128i bytes) {
    const __m128i low = _mm_set1_epi8(15);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
}

INLINE vf FN(floats_of_bytes)(__m128i bytes) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
INLINE vf FN(floats_of_words)(__m256i words) { return (vf)_mm512_cvtepi32_ps(_mm512_castsi256_si512(words)); }
INLINE vf FN(half_everywhere)(const uint8_t *from) {
    int16_t bits;
    memcpy(&bits, from, 2);
    return (vf)_mm512_cvtph_ps(_mm256_set1_epi16(bits));
}

INLINE __m512i FN(lanes_of)(const uint8_t *all) { return _mm512_loadu_si512(all); }

/* Repeats each of 8 words four times, and takes bits n i and on of the i-th to bits 8 and on. */
INLINE __m512i FN(fields)(__m128i words, const int n) {
    const __m512i lane = _mm512_set_epi16(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1,
                                          0, 0, 0, 0);
    const __m512i four = _mm512_permutexvar_epi16(lane, _mm512_castsi128_si512(words));
    if (n == 2) return _mm512_sllv_epi16(four, _mm512_set1_epi64(0x0002000400060008));
    return _mm512_srlv_epi16(_mm512_sllv_epi16(four, _mm512_set1_epi64(0x0000000200050008)), _mm512_set1_epi64(1ull << 48));
}

/* Reads what 256 columns have: indices, for iq3 twice 32, of which each four follow the order of the sums; a bit for each
 * column; scales of 8 or 16 groups. */
INLINE void FN(grid_fields)(const Source source, const uint8_t *w, const uint8_t *s, __m512i *index, __m256i *bits,
                            vf *scales) {
    enum { NO = 0 };
#define FOUR(at) at, NO, at + 1, NO, at + 2, NO, at + 3, NO
    static const uint8_t fours[64] = {FOUR(0),  FOUR(8),  FOUR(16), FOUR(24), FOUR(32), FOUR(40), FOUR(48), FOUR(56)};
#undef FOUR
#define EIGHTS(FROM) FROM(0), FROM(12), FROM(24), FROM(36), FROM(64), FROM(76), FROM(88), FROM(100)
#define FIRST(at) at, NO, at + 4, NO, at + 1, NO, at + 5, NO
#define LAST(at) at + 2, NO, at + 6, NO, at + 3, NO, at + 7, NO
    static const uint8_t of_iq3[2][64] = {{EIGHTS(FIRST)}, {EIGHTS(LAST)}};
#define SAME(at) at, NO, at, NO, at, NO, at, NO
    static const uint8_t same[64] = {SAME(2), SAME(3), SAME(4), SAME(5), SAME(6), SAME(7), SAME(8), SAME(9)};
#undef SAME
#undef LAST
#undef FIRST
#undef EIGHTS
    const __mmask64 low = 0x5555555555555555;
    const vf d = FN(half_everywhere)(s);
    if (source == IQ2_XXS || source == IQ2_S) {
        const __m512i v = _mm512_loadu_si512(w);
        const __m256i words = _mm512_cvtepi64_epi32(_mm512_srli_epi64(v, 32));
        index[0] = _mm512_maskz_permutexvar_epi8(low, FN(lanes_of)(fours), v);
        if (source == IQ2_XXS) {
            *bits = FN(sevens)(words);
            *scales = d * 0.25f * (FN(floats_of_words)(_mm256_srli_epi32(words, 28)) + 0.5f);
            return;
        }
        const __m128i pairs = _mm_loadu_si128((const __m128i *)(s + 2)), numbers = _mm_srli_epi16(pairs, 8);
        const __m512i high = _mm512_and_si512(FN(fields)(pairs, 2), _mm512_set1_epi16(0x300));
        index[0] = _mm512_or_si512(index[0], high);
        *bits = words;
        *scales = d * (FN(floats_of_bytes)(FN(each_half)(_mm_packus_epi16(numbers, numbers))) + 0.5f) * 0.25f;
    } else if (source == IQ2_XS) {
        const __m512i v = _mm512_loadu_si512(w);
        index[0] = _mm512_and_si512(v, _mm512_set1_epi16(511));
        *bits = FN(even)(_mm512_cvtepi16_epi8(_mm512_srli_epi16(v, 9)));
        const __m128i numbers = _mm_loadl_epi64((const __m128i *)(s + 2));
        *scales = d * (FN(floats_of_bytes)(FN(each_half)(numbers)) + 0.5f) * 0.25f;
    } else if (source == IQ3_XXS || source == IQ3_S) {
        const __m512i lanes = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11, 8, 5, 2);
        __m128i words[2];
        __m512i v[2];
        UNROLL for (int h = 0; h < 2; h++) {
            v[h] = _mm512_maskz_loadu_epi8(0xFFFFFFFFFFFF, w + 48 * h);
            words[h] = _mm512_castsi512_si128(_mm512_permutexvar_epi32(lanes, v[h]));
        }
        UNROLL for (int h = 0; h < 2; h++)
            index[h] = _mm512_maskz_permutex2var_epi8(low, v[0], FN(lanes_of)(of_iq3[h]), v[1]);
        const __m256i all = _mm256_set_m128i(words[1], words[0]);
        if (source == IQ3_XXS) {
            *bits = FN(sevens)(all);
            *scales = d * (FN(floats_of_words)(_mm256_srli_epi32(all, 28)) + 0.5f) * 0.5f;
            return;
        }
        const __m512i own = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(0x3FFF, s));
        const __m512i each = _mm512_permutexvar_epi8(FN(lanes_of)(same), own), one = _mm512_set1_epi16(0x100);
        UNROLL for (int h = 0; h < 2; h++) {
            const __m512i by = _mm512_set1_epi64(h ? 0x0001000500020006 : 0x0003000700040008);
            index[h] = _mm512_or_si512(index[h], _mm512_and_si512(_mm512_sllv_epi16(each, by), one));
        }
        *bits = all;
        int32_t numbers;
        memcpy(&numbers, s + 10, 4);
        *scales = d * (FN(floats_of_bytes)(FN(each_half)(_mm_cvtsi32_si128(numbers))) * 2.0f + 1.0f);
    } else {
        const __m512i first = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)w)), seven = _mm512_set1_epi16(0x700);
        __m512i high;
        __m128i numbers;
        if (source == IQ1_S) {
            const __m128i fields = _mm_loadu_si128((const __m128i *)(s + 2));
            high = FN(fields)(fields, 3);
            *bits = _mm256_cvtepi16_epi32(_mm_srai_epi16(fields, 15));
            numbers = _mm_and_si128(_mm_srli_epi16(fields, 12), _mm_set1_epi16(7));
            numbers = _mm_packus_epi16(numbers, numbers);
        } else {
            const __m128i v = _mm_loadu_si128((const __m128i *)(s + 8)), after = _mm_unpackhi_epi64(v, v);
            const __m256i halves = _mm256_set_m128i(FN(each_half)(after), FN(each_half)(v));
            high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(halves), 8);
            *bits = _mm256_movm_epi8(_mm256_test_epi8_mask(halves, _mm256_set1_epi8(8)));
            const __m128i from = _mm_set_epi64x(0x2D2A2724211E1B18, 0x15120F0C09060300);
            uint64_t stream = 0;
            memcpy(&stream, s + 2, 6);
            numbers = _mm_and_si128(_mm_multishift_epi64_epi8(from, _mm_set1_epi64x((int64_t)stream)), _mm_set1_epi8(7));
        }
        index[0] = _mm512_or_si512(first, _mm512_and_si512(high, seven));
        *scales = d * (FN(floats_of_bytes)(numbers) * 2.0f + 1.0f) * 0.125f;
    }
}

/* Returns vector p of bytes q + 128. `signs` has the bits of 16 columns in each lane. */
INLINE __m512i FN(lookup_codes)(const Source source, const __m512i *entries, __m512i signs, const int p) {
    const uint64_t each = 0x0101010101010101;
    if (source == TQ2_0) {
        const __m512i digits = _mm512_and_si512(_mm512_srli_epi32(entries[0], (unsigned)(2 * p)), _mm512_set1_epi8(3));
        return _mm512_add_epi8(digits, _mm512_set1_epi8(127));
    }
    const uint64_t bit = IS_EIGHTS(source) ? 2 : 3; /* where the sign comes to lie */
    const uint64_t at_sign = (0x2322212003020100 + each * (uint64_t)(4 * p + 64) - each * bit) & each * 63;
    const uint64_t at = IS_EIGHTS(source) ? 0x2624222006040200 + each * (uint64_t)(8 * p)
                                          : 0x1916131009060300 + each * (uint64_t)(32 * (p % 2));
    const __m512i from = entries[IS_EIGHTS(source) ? 0 : p / 2];
    const __m512i fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((int64_t)at), from);
    const __m512i sign = _mm512_multishift_epi64_epi8(_mm512_set1_epi64((int64_t)at_sign), signs);
    const __m512i which = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)(1 << bit)), sign, fields, 0xCA);
    const __m512i values = IS_IQ1(source)       ? _mm512_set1_epi64((int64_t)0x877F770089817900)
                           : IS_EIGHTS(source)  ? _mm512_set1_epi64(0x0055677800AB9988)
                           : source == IQ3_S    ? _mm512_broadcast_i32x4(_mm_set_epi64x(0x71737577797B7D7F, (int64_t)0x8F8D8B8987858381))
                                                : _mm512_broadcast_i32x4(_mm_set_epi64x(0x424C545C646C747C, (int64_t)0xBEB4ACA49C948C84));
    return _mm512_permutexvar_epi8(which, values);
}

/* As row_block, for one row. */
INLINE void FN(lookup_row)(const Matrix *m, const uint16_t *table, ptrdiff_t r0, ptrdiff_t r, ptrdiff_t r1,
                           const float *const *x, float *const *y, const int T, const Source source) {
    const Table form = table_of(source);
    const int words = 32 * form.bits;
    const vi twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    const uint8_t *w = (const uint8_t *)(m->w + r * m->words), *s = (const uint8_t *)m->s + r * m->s_bytes;
    const ptrdiff_t ahead = r + 1 + PREFETCH_BYTES / (m->words * 4);
    const char *soon = (const char *)address_ahead(m, ahead, r1);
    vf acc[4];
    prefetch_tables(m, ahead, r1);
    UNROLL for (int t = 0; t < T; t++) acc[t] = (vf){0};
    for (ptrdiff_t c = 0; c < m->in; c += SUPER, w += words, s += form.scale_bytes, soon += words) {
        __m512i entries[2] = {{0}}, codes[4];
        __m256i bits = {0};
        vf scales;
        UNROLL for (int b = 0; b < words; b += 64) __builtin_prefetch(soon + b);
        if (source == TQ2_0) {
            entries[0] = _mm512_loadu_si512(w), scales = FN(half_everywhere)(s);
        } else {
            __m512i index[2];
            FN(grid_fields)(source, w, s, index, &bits, &scales);
            entries[0] = FN(look_up)(table, index[0], form.entries);
            if (!IS_EIGHTS(source)) entries[1] = FN(look_up)(table, index[1], form.entries);
            if (form.group == 32) scales = FN(permute_floats)(scales, twice);
        }
        const __m512i signs = _mm512_cvtepu16_epi32(bits);
        UNROLL for (int p = 0; p < 4; p++) codes[p] = FN(lookup_codes)(source, entries, signs, p);
        UNROLL for (int t = 0; t < T; t++) {
            const int8_t *unit = (const int8_t *)x[t] + c / SUPER * LOOKUP_UNIT;
            const vu sum = FN(products_from)(_mm512_loadu_si512(unit + 3 * SUPER), codes, unit, 4);
            acc[t] += __builtin_convertvector((vi)sum, vf) * (scales * *(const vf *)(unit + 3 * SUPER + 64));
        }
    }
    FN(store)(acc, r0, r, r1, y, 1, T);
}

#define LOOKUP_ROWS(T)                                                                                          \
    static __attribute__((noinline)) TARGET void FN(lookup_rows_##T)(                                           \
        const Matrix *m, ptrdiff_t r0, ptrdiff_t r1, const float *const *x, float *const *y) {                  \
        _Alignas(64) uint16_t table[2048];                                                                      \
        FN(compress_grid)(m, table);                                                                            \
        switch (m->source) {                                                                                    \
            ROWS_OF(T, IQ3_XXS) ROWS_OF(T, IQ3_S) ROWS_OF(T, IQ2_XXS) ROWS_OF(T, IQ2_XS) ROWS_OF(T, IQ2_S)      \
            ROWS_OF(T, IQ1_S) ROWS_OF(T, IQ1_M) ROWS_OF(T, TQ2_0)                                               \
        default: break;                                                                                         \
        }                                                                                                       \
    }
#define ROWS_OF(T, source)                                                                                      \
    case source:                                                                                                \
        for (ptrdiff_t r = r0; r < r1; r++) FN(lookup_row)(m, table, r0, r, r1, x, y, T, source);               \
        break;
LOOKUP_ROWS(1)
LOOKUP_ROWS(2)
LOOKUP_ROWS(4)
#undef ROWS_OF
#undef LOOKUP_ROWS
#undef IS_EIGHTS
#undef IS_IQ1
