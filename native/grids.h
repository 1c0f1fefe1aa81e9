/* GGUF's forms whose codes name entries of a grid, or are digits: which there are, and the signs of weights. Included by
 * paths.h; moeflux_mlx/ops/table_values.py has the fields of each form. */
typedef enum { NO_GRID, GRID_IQ3_XXS, GRID_IQ3_S, GRID_IQ2_XXS, GRID_IQ2_XS, GRID_IQ2_S, GRID_IQ1_S, GRID_IQ1_M,
               GRID_TQ1_0, GRID_TQ2_0 } Grid;

/* Whether 32 weights have one word of codes. */
static inline int is_of_one_word(Grid type) { return type == GRID_IQ1_S || type == GRID_IQ1_M || type == GRID_TQ1_0; }

/* Returns four times seven signs, from the lowest bits on, as four bytes, of which each has an even number of bits. */
static inline uint32_t even_signs(uint32_t sevens) {
    const uint32_t low = (sevens & 0x7F) | (sevens << 1 & 0x7F00);
    const uint32_t bytes = low | (sevens << 2 & 0x7F0000) | (sevens << 3 & 0x7F000000);
    uint32_t folded = bytes ^ bytes >> 4;
    folded ^= folded >> 2;
    folded ^= folded >> 1;
    return bytes | (folded & 0x01010101) << 7;
}

/* Returns eight bytes of a grid: an entry of eight values. */
static inline uint64_t eight_at(const uint8_t *grid, uint32_t index) {
    uint64_t eight;
    memcpy(&eight, grid + 8 * index, 8);
    return eight;
}

/* The same of two entries of four values. */
static inline uint64_t fours_at(const uint8_t *grid, uint32_t first, uint32_t second) {
    uint32_t low, high;
    memcpy(&low, grid + 4 * first, 4), memcpy(&high, grid + 4 * second, 4);
    return low | (uint64_t)high << 32;
}
