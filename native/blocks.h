/* Takes the codes out of GGUF's blocks. It is compiled once for each instruction set: the file that includes it defines
 * TARGET, PATH, and AVX2 or not.
 *
 * Codes become bytes first, 32 at a time, and then a stream of bits. The bits of fields are shifted in lanes of 64 bits,
 * because what comes from the next byte is masked away. Where a block's codes are is from llama.cpp's ggml-common.h and
 * `dequantize_row_*` in ggml-quants.c; moeflux_mlx/packing/gguf_forms.py has it in words.
 */
INLINE v32 FN(load)(const uint8_t *from) { return *(const v32 *)from; }

/* Returns the bits of each byte from bit n on that `mask` keeps. */
INLINE v32 FN(field)(v32 bytes, const int n, const uint8_t mask) { return (v32)((q4)bytes >> n) & mask; }

/* Returns the low halves of 16 bytes, then the high halves of the same. */
INLINE v32 FN(halves)(const uint8_t *from) {
    uint64_t two[2];
    memcpy(two, from, 16);
    return (v32)(q4){two[0], two[1], two[0] >> 4, two[1] >> 4} & 15;
}

/* Returns the low halves of 8 bytes, then their high halves, and the same of the next 8 bytes. */
INLINE v32 FN(halves_of_eight)(const uint8_t *from) {
    uint64_t two[2];
    memcpy(two, from, 16);
    return (v32)(q4){two[0], two[0] >> 4, two[1], two[1] >> 4} & 15;
}

/* Returns 16 in each byte whose bit of the word is set. */
INLINE v32 FN(fifth)(const uint8_t *from) {
    const uint64_t ones = 0x0101010101010101u;
    const q4 each = {from[0] * ones, from[1] * ones, from[2] * ones, from[3] * ones};
    const v32 bit = (v32)((q4){0} + 0x8040201008040201u);
    return (v32)(((v32)each & bit) == bit) & 16;
}

/* Returns codes 32 part to 32 part + 31 of a block. */
INLINE v32 FN(codes)(const Type type, const uint8_t *block, const int part) {
    const int half = part / 4, quarter = part % 4;
    v32 v;
    switch (type) {
    case Q4_0: return FN(halves)(block + 2);
    case Q4_1: return FN(halves)(block + 4);
    case MXFP4: return FN(halves)(block + 1);
    case NVFP4: return FN(halves_of_eight)(block + 4 + 16 * part);
    case Q5_0: return FN(halves)(block + 6) | FN(fifth)(block + 2);
    case Q5_1: return FN(halves)(block + 8) | FN(fifth)(block + 4);
    case Q8_0: return FN(load)(block + 2) ^ 0x80;
    case Q2_K: return FN(field)(FN(load)(block + 16 + 32 * half), 2 * quarter, 3);
    case TQ2_0: return FN(field)(FN(load)(block + 32 * half), 2 * quarter, 3);
    case Q3_K:
        v = FN(field)(FN(load)(block + 32 + 32 * half), 2 * quarter, 3);
        return v | FN(field)(FN(load)(block), part, 1) << 2;
    case Q4_K: return FN(field)(FN(load)(block + 16 + 32 * (part / 2)), 4 * (part % 2), 15);
    case Q5_K:
        v = FN(field)(FN(load)(block + 48 + 32 * (part / 2)), 4 * (part % 2), 15);
        return v | FN(field)(FN(load)(block + 16), part, 1) << 4;
    default: /* Q6_K */
        v = FN(field)(FN(load)(block + 64 * half + 32 * (quarter % 2)), 4 * (quarter / 2), 15);
        return v | FN(field)(FN(load)(block + 128 + 32 * half), 2 * quarter, 3) << 4;
    }
}

/* Writes 32 codes as a stream of 4 * bits bytes, the first code in the lowest bits. Nothing is written behind them. */
#if defined(AVX2)
INLINE void FN(write)(v32 codes, const int bits, uint8_t *to) {
    const char no = -1;
    const __m256i two = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi16((short)(1 << bits << 8 | 1)));
    if (bits == 4) {
        const __m128i low = _mm256_castsi256_si128(two), high = _mm256_extracti128_si256(two, 1);
        _mm_storeu_si128((__m128i *)to, _mm_packus_epi16(low, high));
        return;
    }
    if (bits == 8) {
        memcpy(to, &codes, 32);
        return;
    }
    const __m256i four = _mm256_madd_epi16(two, _mm256_set1_epi32(1 << 2 * bits << 16 | 1));
    if (bits == 2) {
        const __m128i low = _mm256_castsi256_si128(four), high = _mm256_extracti128_si256(four, 1);
        const __m128i eight = _mm_packs_epi32(low, high);
        _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(eight, eight));
        return;
    }
    const int rest = 32 - 4 * bits; /* the lower 4 codes move up to the others, and all of them down */
    const __m256i up = _mm256_sllv_epi32(four, _mm256_set1_epi64x(rest)), eight = _mm256_srli_epi64(up, rest);
    const __m128i order = bits == 3   ? _mm_setr_epi8(0, 1, 2, 8, 9, 10, no, no, no, no, no, no, no, no, no, no)
                          : bits == 5 ? _mm_setr_epi8(0, 1, 2, 3, 4, 8, 9, 10, 11, 12, no, no, no, no, no, no)
                                      : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, no, no, no, no);
    const __m256i dense = _mm256_shuffle_epi8(eight, _mm256_broadcastsi128_si256(order));
    const __m128i low = _mm256_castsi256_si128(dense), high = _mm256_extracti128_si256(dense, 1);
    if (bits == 3) {
        const __m128i all = _mm_or_si128(low, _mm_slli_si128(high, 6));
        _mm_storel_epi64((__m128i *)to, all);
        const int last = _mm_extract_epi32(all, 2);
        memcpy(to + 8, &last, 4);
        return;
    }
    const __m128i begun = bits == 5 ? _mm_slli_si128(high, 10) : _mm_slli_si128(high, 12); /* by constants only */
    const __m128i left = bits == 5 ? _mm_srli_si128(high, 6) : _mm_srli_si128(high, 4);
    _mm_storeu_si128((__m128i *)to, _mm_or_si128(low, begun));
    const uint64_t last = (uint64_t)_mm_cvtsi128_si64(left);
    memcpy(to + 16, &last, (size_t)(4 * bits - 16));
}
#else
INLINE void FN(write)(v32 codes, const int bits, uint8_t *to) {
    const int rest = 8 - bits;
    q4 v = (q4)codes;
    v = (v & 0x00FF00FF00FF00FFu) | (v & 0xFF00FF00FF00FF00u) >> rest;
    v = (v & 0x0000FFFF0000FFFFu) | (v & 0xFFFF0000FFFF0000u) >> 2 * rest;
    v = (v & 0x00000000FFFFFFFFu) | (v & 0xFFFFFFFF00000000u) >> 4 * rest;
    for (int i = 0; i < 4; i++) {
        const uint64_t eight = v[i];
        memcpy(to + i * bits, &eight, (size_t)bits);
    }
}
#endif

/* Writes 32 codes of 2 bits: byte i of word w has in bits 2 m the code 16 w + 4 m + i. */
INLINE void FN(write_apart)(v32 codes, uint8_t *to) {
    uint32_t u[8];
    memcpy(u, &codes, 32);
    for (int w = 0; w < 8; w += 4, to += 4) {
        const uint32_t word = u[w] | u[w + 1] << 2 | u[w + 2] << 4 | u[w + 3] << 6;
        memcpy(to, &word, 4);
    }
}

/* Returns digit n to the base 3 of a fraction of 256. */
INLINE uint8_t FN(digit)(uint8_t fraction, const int n) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    return (uint8_t)((uint8_t)(fraction * powers[n]) * 3 >> 8);
}

INLINE uint8_t FN(fraction)(int a, int b, int c, int d, int e) {
    return (uint8_t)((((((a * 3 + b) * 3 + c) * 3 + d) * 3 + e) * 256 + 242) / 243);
}

/* Writes the codes of a block of TQ1_0 in the order of moeflux_mlx/ops/table_values.py; `scales` is behind d. */
INLINE void FN(write_digits)(const uint8_t *block, uint8_t *to, uint8_t *scales) {
    uint8_t codes[256], *u = codes;
    for (int n = 0; n < 5; n++) {
        for (int i = 0; i < 32; i++) codes[32 * n + i] = FN(digit)(block[i], n);
        for (int i = 0; i < 16; i++) codes[160 + 16 * n + i] = FN(digit)(block[32 + i], n);
    }
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 4; i++) codes[240 + 4 * n + i] = FN(digit)(block[48 + i], n);
    for (int unit = 0; unit < 8; unit++, u += 32, to += 4) {
        for (int i = 0; i < 4; i++) to[i] = FN(fraction)(u[i], u[4 + i], u[8 + i], u[12 + i], u[16 + i]);
        scales[2 * unit] = FN(fraction)(u[20], u[21], u[24], u[25], u[28]);
        scales[2 * unit + 1] = FN(fraction)(u[22], u[23], u[26], u[27], u[30]);
        if (unit % 2) scales[16 + unit / 2] = FN(fraction)(u[-3], u[-1], u[29], u[31], 0);
    }
}

/* Writes the 8 bytes that the scales of IQ1_M begin with: d, which four halfwords have in their highest bits, and then
 * their other bits. */
INLINE void FN(write_iq1_m)(const uint8_t *four, uint8_t *to) {
    uint64_t all, made = 0;
    memcpy(&all, four, 8);
    for (int i = 0; i < 4; i++) made |= (all >> (16 * i + 12) & 15) << 4 * i | (all >> 16 * i & 0xFFF) << (16 + 12 * i);
    memcpy(to, &made, 8);
}

/* Writes the codes of `count` blocks, or the bytes in place of codes, to `to`, and their other fields to `scales` and
 * `supers`. */
INLINE void FN(take_type_apart)(const Type type, const uint8_t *block, ptrdiff_t count, uint8_t *to, uint8_t *scales,
                                uint8_t *supers) {
    const Form *form = &forms[type];
    const Field *some = form->scales, *raw = form->raw;
    for (ptrdiff_t i = 0; i < count; i++, block += form->bytes) {
        memcpy(scales, block + some[0].at, some[0].bytes);
        if (type == IQ1_M) FN(write_iq1_m)(block + 48, scales);
        scales += some[0].bytes;
        if (type == IQ2_S) /* the high bits of indices, and the scales, of the same 32 weights go together */
            for (int j = 0; j < 8; j++) scales[2 * j] = block[66 + j], scales[2 * j + 1] = block[74 + j];
        else
            memcpy(scales, block + some[1].at, some[1].bytes);
        memcpy(scales + some[1].bytes, block + some[2].at, some[2].bytes), scales += some[1].bytes + some[2].bytes;
        memcpy(supers, block + form->supers.at, form->supers.bytes), supers += form->supers.bytes;
        if (type == TQ1_0) {
            FN(write_digits)(block, to, scales - 20), to += 32;
            continue;
        }
#pragma GCC unroll 8
        for (int part = 0; part < form->weights / 32; part++, to += 4 * form->bits) {
            if (type == TQ2_0) {
                FN(write_apart)(FN(codes)(type, block, part), to);
                continue;
            }
            if (!raw[0].bytes) {
                FN(write)(FN(codes)(type, block, part), form->bits, to);
                continue;
            }
            memcpy(to, block + raw[0].at + part * raw[0].bytes, raw[0].bytes);
            memcpy(to + raw[0].bytes, block + raw[1].at + part * raw[1].bytes, raw[1].bytes);
        }
    }
}

static TARGET void FN(take_apart)(Type type, const uint8_t *block, ptrdiff_t count, uint8_t *to, uint8_t *scales,
                                  uint8_t *supers) {
#define CASE(NAME) case NAME: FN(take_type_apart)(NAME, block, count, to, scales, supers); break;
    switch (type) {
        EVERY_TYPE(CASE)
    case TYPES: break;
    }
#undef CASE
}
