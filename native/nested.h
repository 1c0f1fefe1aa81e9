/* The nested scales of GGUF's K types: how bytes have the scale codes of a group. Included by paths.h.
 *
 * 256 weights have a float16 d and, if the type has minima, m. Their groups have codes S and M. A weight of code q is
 * (d * (S - scale_zero)) * (q - zero) - m * M, where zero is 2^(bits - 1) or, if there are minima, 0. All products are
 * exact in float32. So scale = d * (S - scale_zero) and bias = -m * M, or -zero * scale, give the same values as an
 * affine form has. Formulas: `dequantize_row_*` in llama.cpp's ggml-quants.c; in words in moeflux_mlx/ops/nested.py.
 *
 * | bits of q | group | bytes of scales | supers | scale_zero |
 * | 2 | 16 | 16 | d, m | 0 |
 * | 3 | 16 | 12 | d | 32 |
 * | 4, 5 | 32 | 16, of which the first 4 are d, m | none | 0 |
 * | 6 | 16 | 16 | d | 0; S is signed |
 */
enum { SUPER = 256 };

static inline int nested_group(int bits) { return bits == 4 || bits == 5 ? 32 : 16; }

static inline int nested_bytes(int bits) { return bits == 3 ? 12 : 16; }

/* The number of float16 values beside the bytes of scales. */
static inline int nested_supers(int bits) { return bits == 2 ? 2 : bits == 3 || bits == 6; }

static inline int nested_has_minima(int bits) { return bits == 2 || bits == 4 || bits == 5; }

typedef struct {
    uint64_t scales[2], minima[2]; /* a byte for each group, the first one lowest: S + offset, and M */
} ScaleCodes;

#define EACH_BYTE(x) ((x) * 0x0101010101010101u)

/* What is subtracted from the bytes of scales. */
static inline int scale_offset(int bits) { return bits == 3 ? 32 : bits == 6 ? 128 : 0; }

static inline __attribute__((always_inline)) ScaleCodes scale_codes(const uint8_t *from, const int bits) {
    uint64_t low, high;
    uint32_t last;
    if (bits == 3) {
        memcpy(&low, from, 8), memcpy(&last, from + 8, 4);
        high = last | (uint64_t)(last >> 2) << 32;
        return (ScaleCodes){{(low & EACH_BYTE(15)) | (high & EACH_BYTE(3)) << 4,
                             (low >> 4 & EACH_BYTE(15)) | (high >> 4 & EACH_BYTE(3)) << 4}, {0}};
    }
    memcpy(&low, from, 8), memcpy(&high, from + 8, 8);
    if (bits == 2)
        return (ScaleCodes){{low & EACH_BYTE(15), high & EACH_BYTE(15)}, {low >> 4 & EACH_BYTE(15), high >> 4 & EACH_BYTE(15)}};
    if (bits == 6) return (ScaleCodes){{low ^ EACH_BYTE(0x80), high ^ EACH_BYTE(0x80)}, {0}};
    /* S and M of groups 0 to 3 are in the low 6 bits of bytes 4 to 11, whose high bits belong to groups 4 to 7. */
    memcpy(&low, from + 4, 8), memcpy(&last, from + 12, 4);
    high = (last & 0x0F0F0F0Fu) | (uint64_t)(last >> 4 & 0x0F0F0F0Fu) << 32;
    high |= low >> 2 & EACH_BYTE(0x30), low &= EACH_BYTE(63);
    return (ScaleCodes){{(uint32_t)low | high << 32}, {low >> 32 | (high >> 32 << 32)}};
}
