/* Codes that name entries of a grid become signed bytes q, in the order of their columns; a weight is scale * q.
 * Included by kernels.h. */

/* Writes 32 codes, whose magnitudes are the bytes of `eight`. Bit i of `signs` is the sign of column i. */
INLINE void FN(put_signed)(const uint64_t *eight, uint32_t signs, int8_t *codes) {
#if W >= 8
    const __m256i q = _mm256_set_epi64x((int64_t)eight[3], (int64_t)eight[2], (int64_t)eight[1], (int64_t)eight[0]);
#if W == 16
    const __m256i both = _mm256_mask_sub_epi8(q, signs, _mm256_setzero_si256(), q);
#else
    /* Each byte of `signs`, eight times; then one bit of each. */
    const __m256i from = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)signs), from);
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    const __m256i minus = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    const __m256i both = _mm256_sub_epi8(_mm256_xor_si256(q, minus), minus);
#endif
    _mm256_storeu_si256((__m256i *)codes, both);
#else
    for (int k = 0; k < 4; k++) {
        const uint64_t bits = (signs >> 8 * k & 0xFF) * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t ones = (((bits & 0x7F7F7F7F7F7F7F7Fu) + 0x7F7F7F7F7F7F7F7Fu) | bits) >> 7 & 0x0101010101010101u;
        const uint64_t both = (eight[k] ^ ones * 255) + ones;
        memcpy(codes + 8 * k, &both, 8);
    }
#endif
}

/* Unpacks 32 columns, number `unit` of a block: w has the words of their codes, s the bytes of the block's scales. */
INLINE void FN(expand_unit)(const Grid type, const uint8_t *w, const uint8_t *s, const int unit, const uint8_t *grid,
                            const float d, int8_t *codes, float *scales) {
    uint64_t eight[4];
    uint32_t words[3] = {0}, signs = 0;
    const int is_iq3 = type == GRID_IQ3_XXS || type == GRID_IQ3_S, is_iq1 = type == GRID_IQ1_S || type == GRID_IQ1_M;
    memcpy(words, w, is_iq3 ? 12 : is_iq1 ? 4 : 8);
    if (is_iq3) {
        const uint32_t high = type == GRID_IQ3_S ? s[2 + unit] : 0;
        UNROLL for (int k = 0; k < 4; k++) {
            const uint32_t first = w[2 * k] | (high >> 2 * k & 1) << 8;
            eight[k] = fours_at(grid, first, w[2 * k + 1] | (high >> (2 * k + 1) & 1) << 8);
        }
        signs = type == GRID_IQ3_S ? words[2] : even_signs(words[2]);
        scales[0] = type == GRID_IQ3_S ? d * (float)(1 + 2 * (s[10 + unit / 2] >> 4 * (unit % 2) & 15))
                                       : d * (0.5f + (float)(words[2] >> 28)) * 0.5f;
    } else if (type == GRID_IQ2_XXS) {
        UNROLL for (int k = 0; k < 4; k++) eight[k] = eight_at(grid, w[k]);
        signs = even_signs(words[1]);
        scales[0] = d * (0.5f + (float)(words[1] >> 28)) * 0.25f;
    } else if (type == GRID_IQ2_XS || type == GRID_IQ2_S) {
        const uint32_t high = type == GRID_IQ2_S ? s[2 + 2 * unit] : 0;
        const uint32_t numbers = s[type == GRID_IQ2_S ? 3 + 2 * unit : 2 + unit];
        UNROLL for (int k = 0; k < 4; k++) {
            const uint32_t own = words[k / 2] >> 16 * (k % 2);
            eight[k] = eight_at(grid, type == GRID_IQ2_S ? w[k] | (high >> 2 * k & 3) << 8 : own & 511);
            signs |= (own >> 9 & 127) << 7 * k;
        }
        signs = type == GRID_IQ2_S ? words[1] : even_signs(signs);
        scales[0] = d * (0.5f + (float)(numbers & 15)) * 0.25f, scales[1] = d * (0.5f + (float)(numbers >> 4)) * 0.25f;
    } else { /* entries are 128 + 8 g; an eighth more or less is one more or less */
        uint32_t fields, high;
        if (type == GRID_IQ1_S) {
            fields = s[2 + 2 * unit] | (uint32_t)s[3 + 2 * unit] << 8;
            high = (fields & 7) | (fields & 0x38) << 1 | (fields & 0x1C0) << 2 | (fields & 0xE00) << 3;
            high |= fields >> 15 ? 0x8888 : 0;
            scales[0] = d * (float)(2 * (fields >> 12 & 7) + 1) * 0.125f;
        } else {
            uint64_t stream = 0;
            memcpy(&stream, s + 2, 6);
            fields = (uint32_t)(stream >> 6 * unit), high = s[8 + 2 * unit] | (uint32_t)s[9 + 2 * unit] << 8;
            scales[0] = d * (float)(2 * (fields & 7) + 1) * 0.125f;
            scales[1] = d * (float)(2 * (fields >> 3 & 7) + 1) * 0.125f;
        }
        UNROLL for (int k = 0; k < 4; k++) {
            const uint64_t values = eight_at(grid, w[k] | (high >> 4 * k & 7) << 8), is_less = high >> (4 * k + 3) & 1;
            eight[k] = (values + 0x0101010101010101u * (1 - 2 * is_less)) ^ 0x8080808080808080u;
        }
        memcpy(codes, eight, 32);
        return;
    }
    FN(put_signed)(eight, signs, codes);
}

/* Unpacks 256 columns of a row.
 *
 * w: the words of their codes. s: their bytes of scales. codes: 256 bytes q in the order of columns. scales: float32
 * of their groups, 8 of 32 columns or 16 of 16. */
INLINE void FN(expand)(const Grid type, const uint8_t *w, const uint8_t *s, const uint8_t *grid, int8_t *codes,
                       float *scales) {
    const int words = type == GRID_IQ3_XXS || type == GRID_IQ3_S ? 3 : type == GRID_IQ1_S || type == GRID_IQ1_M ? 1 : 2;
    const int halves = type == GRID_IQ2_XS || type == GRID_IQ2_S || type == GRID_IQ1_M;
    const float d = FN(half_splat)(s)[0];
    for (int unit = 0; unit < 8; unit++, w += 4 * words, codes += 32, scales += 1 + halves)
        FN(expand_unit)(type, w, s, unit, grid, d, codes, scales);
}
