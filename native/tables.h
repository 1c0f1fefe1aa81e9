/* Codes that name entries of a grid, or are digits, become signed bytes q, in the order of their columns; a weight is scale * q.
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

/* Writes 32 codes less 1: four bytes each word, in the order of columns. */
INLINE void FN(put_less_one)(const uint32_t *bytes, int8_t *codes) {
    for (int i = 0; i < 8; i++) {
        const uint32_t less = (bytes[i] + 0x7F7F7F7Fu) ^ 0x80808080u;
        memcpy(codes + 4 * i, &less, 4);
    }
}

/* Writes 32 codes of TQ1_0, of which `word` has the first 20, `pair` the next ones and `shared` the last two. */
INLINE void FN(put_digits)(uint32_t word, uint32_t pair, uint32_t shared, int8_t *codes) {
    uint32_t even = word & 0x00FF00FFu, odd = word >> 8 & 0x00FF00FFu, two = (pair & 0xFF) | (pair & 0xFF00) << 8;
    uint32_t bytes[8] = {0};
    for (int n = 0; n < 5; n++) {
        even *= 3, odd *= 3, two *= 3;
        bytes[n] = (even >> 8 & 0x00030003u) | (odd & 0x03000300u);
        bytes[5 + n / 2] |= (two >> 8 & 0x00030003u) << 8 * (n % 2);
        even &= 0x00FF00FFu, odd &= 0x00FF00FFu, two &= 0x00FF00FFu;
    }
    bytes[7] |= (shared * 3 & 0x300) | ((shared * 3 & 0xFF) * 3 >> 8) << 24;
    FN(put_less_one)(bytes, codes);
}

/* Unpacks 32 columns, number `unit` of a block: w has the words of their codes, s the bytes of the block's scales. */
INLINE void FN(expand_unit)(const Grid type, const uint8_t *w, const uint8_t *s, const int unit, const uint8_t *grid,
                            const float d, int8_t *codes, float *scales) {
    uint64_t eight[4];
    uint32_t words[3] = {0}, signs = 0;
    const int is_iq3 = type == GRID_IQ3_XXS || type == GRID_IQ3_S, is_one = is_of_one_word(type);
    memcpy(words, w, is_iq3 ? 12 : is_one ? 4 : 8);
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
    } else if (type == GRID_TQ1_0) {
        scales[0] = d;
        const uint32_t shared = s[18 + unit / 2] * (unit % 2 ? 9u : 1u) & 0xFF; /* without the digits that are used */
        FN(put_digits)(words[0], s[2 + 2 * unit] | (uint32_t)s[3 + 2 * unit] << 8, shared, codes);
        return;
    } else if (type == GRID_TQ2_0) {
        uint32_t bytes[8];
        UNROLL for (int i = 0; i < 8; i++) bytes[i] = words[i / 4] >> 2 * (i % 4) & 0x03030303u;
        scales[0] = d;
        FN(put_less_one)(bytes, codes);
        return;
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
    const int words = type == GRID_IQ3_XXS || type == GRID_IQ3_S ? 3 : is_of_one_word(type) ? 1 : 2;
    const int halves = type == GRID_IQ2_XS || type == GRID_IQ2_S || type == GRID_IQ1_M;
    const float d = FN(half_splat)(s)[0];
    for (int unit = 0; unit < 8; unit++, w += 4 * words, codes += 32, scales += 1 + halves)
        FN(expand_unit)(type, w, s, unit, grid, d, codes, scales);
}
