/* The search for scales and biases, for one instruction set. A file defines these macros before it includes this one:
 *   LANES   the number of floats in a vector; each lane holds another group, so the number changes no bits
 *   TARGET  the function attribute that enables the instruction set (may be empty)
 *
 * moeflux_mlx/rounding/affine.py describes the search and has its twin in MLX operations. Both do the same operations
 * in the same order: a sum over a group is one over sums of BLOCK columns. setup.py forbids the compiler to fuse a
 * product and a sum, so every processor computes the same bits.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 8 /* columns that are summed before sums are */
#define MOST_GROUP 128
#define MOST_STARTS 16
#define ROUND 12582912.0f /* 1.5 * 2^23: a smaller number loses its fraction when this is added */
#define EXACT 4194304.0f /* 2^22; larger quotients are taken as whole */
#define LEAST_RANGE 1e-7f /* as mx.quantize has it */
#define LEAST_SCALE 1e-30f /* the inverse of a smaller one may be infinite */
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float V __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef enum { F32, BF16, F16 } Kind;

typedef struct {
    const void *values;      /* [rows, columns], float32 or bfloat16 */
    const float *importance; /* [columns] */
    ptrdiff_t rows, columns;
    int bits, group, is_half; /* is_half: the values are bfloat16 */
    Kind kind;                /* what scales and biases are rounded to */
    float shrinks[MOST_STARTS];
    int starts, turns, last;
    uint8_t *codes;         /* [rows, columns * bits / 8] */
    float *scales, *biases; /* [rows, columns / group] */
} Work;

/* LANES groups, one in each lane, of `columns` columns. */
typedef struct {
    V x[MOST_GROUP], w[MOST_GROUP];
    int columns;
    float top; /* the largest code */
} Groups;

/* What a code stands for, in each lane. */
typedef struct {
    V scale, bias;
} Lines;

INLINE V splat(float x) { return (V){0} + x; }

INLINE V where(I condition, V yes, V no) { return (V)(((I)yes & condition) | ((I)no & ~condition)); }

INLINE V magnitude(V x) { return (V)((I)x & 0x7fffffff); }

INLINE V inverse(V scale) { return where(magnitude(scale) > splat(LEAST_SCALE), splat(1.0f) / scale, splat(0.0f)); }

INLINE V whole(V x) { return (x + splat(ROUND)) - splat(ROUND); }

INLINE V codes_of(V x, V bias, V by, float top) {
    V q = (x - bias) * by;
    q = where(q > splat(0.0f), q, splat(0.0f));
    return whole(where(q < splat(top), q, splat(top)));
}

/* Rounds to the nearest number of the stored dtype. */
INLINE V stored(V x, Kind kind) {
    if (kind == F32) return x;
    int dropped = kind == BF16 ? 16 : 13;
    I bits = (I)x + ((1 << (dropped - 1)) - 1) + ((I)x >> dropped & 1);
    V rounded = (V)(bits & ~((1 << dropped) - 1));
    if (kind == BF16) return rounded;
    rounded = where(magnitude(x) < splat(6.103515625e-5f), (x + splat(0.75f)) - splat(0.75f), rounded); /* 2^-24 */
    return where(magnitude(x) < splat(65520.0f), rounded, splat(INFINITY));
}

INLINE V error_of(const Groups *g, Lines line) {
    V total = splat(0.0f), by = inverse(line.scale);
    for (int block = 0; block < g->columns; block += BLOCK) {
        V part = splat(0.0f);
        for (int i = block; i < block + BLOCK; i++) {
            V off = g->x[i] - (line.scale * codes_of(g->x[i], line.bias, by, g->top) + line.bias);
            part += off * off * g->w[i];
        }
        total += part;
    }
    return total;
}

/* mx.quantize's scale and bias: the end of the range farther from zero is a bias, and zero is a code. */
INLINE Lines min_to_max(V low, V high, float top, Kind kind) {
    V scale = (high - low) / splat(top);
    scale = where(scale > splat(LEAST_RANGE), scale, splat(LEAST_RANGE));
    I is_low = magnitude(low) > magnitude(high);
    V edge = where(is_low, low, high);
    scale = where(is_low, scale, -scale);
    V zero = edge / scale;
    zero = where(magnitude(zero) < splat(EXACT), whole(zero), zero);
    I is_zero = zero == splat(0.0f);
    scale = where(is_zero, scale, edge / where(is_zero, splat(1.0f), zero));
    return (Lines){stored(scale, kind), where(is_zero, splat(0.0f), stored(edge, kind))};
}

/* Sums over a group. */
typedef struct {
    V weight, mean;
} Sums;

/* The line of weighted least squares through the values over the codes that `line` gives them; `gain` gets the part of
 * the values' variance that it explains. */
INLINE Lines improved(const Groups *g, Sums of, Lines line, V *gain) {
    V q1 = splat(0.0f), q2 = splat(0.0f), qx = splat(0.0f), by = inverse(line.scale);
    for (int block = 0; block < g->columns; block += BLOCK) {
        V part1 = splat(0.0f), part2 = splat(0.0f), partx = splat(0.0f);
        for (int i = block; i < block + BLOCK; i++) {
            V q = codes_of(g->x[i], line.bias, by, g->top), wq = q * g->w[i];
            part1 += wq, part2 += wq * q, partx += wq * g->x[i];
        }
        q1 += part1, q2 += part2, qx += partx;
    }
    V mean = q1 / of.weight, spread = q2 - mean * q1, shared = qx - of.mean * q1;
    I is_line = spread > splat(0.0f);
    V scale = where(is_line, shared / where(is_line, spread, splat(1.0f)), line.scale);
    *gain = where(is_line, shared * scale, splat(0.0f));
    return (Lines){scale, where(is_line, of.mean - scale * mean, line.bias)};
}

/* The best bias for a scale that is already rounded. */
INLINE V bias_for(const Groups *g, Sums of, Lines line) {
    V q1 = splat(0.0f), by = inverse(line.scale);
    for (int block = 0; block < g->columns; block += BLOCK) {
        V part = splat(0.0f);
        for (int i = block; i < block + BLOCK; i++) part += codes_of(g->x[i], line.bias, by, g->top) * g->w[i];
        q1 += part;
    }
    return of.mean - line.scale * (q1 / of.weight);
}

/* Subtracts the middle of the range, so that sums of products keep their precision; returns the sums then. */
INLINE Sums centred(Groups *g, V middle) {
    V weight = splat(0.0f), total = splat(0.0f);
    for (int block = 0; block < g->columns; block += BLOCK) {
        V part = splat(0.0f), partx = splat(0.0f);
        for (int i = block; i < block + BLOCK; i++) {
            g->x[i] -= middle;
            part += g->w[i], partx += g->w[i] * g->x[i];
        }
        weight += part, total += partx;
    }
    return (Sums){weight, total / weight};
}

INLINE Lines fitted(const Work *work, Groups *g, Groups *moved) {
    V low = g->x[0], high = g->x[0], most = splat(-1.0f), gain = splat(0.0f);
    for (int i = 1; i < g->columns; i++) {
        low = where(g->x[i] < low, g->x[i], low);
        high = where(g->x[i] > high, g->x[i], high);
    }
    V middle = (low + high) * splat(0.5f), half = (high - low) * splat(0.5f);
    Lines plain = min_to_max(low, high, g->top, work->kind), best = {splat(0.0f), splat(0.0f)};
    *moved = *g;
    Sums of = centred(moved, middle);
    for (int start = 0; start < work->starts; start++) {
        V reach = half * splat(work->shrinks[start]);
        Lines line = {reach * splat(2.0f / g->top), -reach};
        for (int turn = 0; turn < work->turns; turn++) line = improved(moved, of, line, &gain);
        I is_more = gain > most;
        most = where(is_more, gain, most);
        best = (Lines){where(is_more, line.scale, best.scale), where(is_more, line.bias, best.bias)};
    }
    for (int turn = 0; turn < work->last; turn++) best = improved(moved, of, best, &gain);
    best.scale = stored(best.scale, work->kind);
    best.bias = stored(bias_for(moved, of, best) + middle, work->kind);
    I is_better = error_of(g, best) < error_of(g, plain);
    return (Lines){where(is_better, best.scale, plain.scale), where(is_better, best.bias, plain.bias)};
}

/* Reads `count` groups from number `index` on; the other lanes repeat the last one. */
INLINE void load(const Work *work, ptrdiff_t index, int count, Groups *g) {
    ptrdiff_t groups = work->columns / work->group;
    for (int lane = 0; lane < LANES; lane++) {
        ptrdiff_t from = index + (lane < count ? lane : count - 1), place = from * work->group;
        const float *importance = work->importance + from % groups * work->group;
        for (int i = 0; i < g->columns; i++) {
            float x;
            if (work->is_half) {
                uint32_t wide = (uint32_t)((const uint16_t *)work->values)[place + i] << 16;
                memcpy(&x, &wide, 4);
            } else
                x = ((const float *)work->values)[place + i];
            ((float *)&g->x[i])[lane] = x;
            ((float *)&g->w[i])[lane] = importance[i];
        }
    }
}

/* Writes the codes of `count` groups, each one stream of bits, the first code in the lowest bits. */
INLINE void write_codes(const Groups *g, Lines line, int bits, int count, uint8_t *to) {
    uint8_t codes[MOST_GROUP][LANES];
    V by = inverse(line.scale);
    for (int i = 0; i < g->columns; i++) {
        V q = codes_of(g->x[i], line.bias, by, g->top);
        for (int lane = 0; lane < LANES; lane++) codes[i][lane] = (uint8_t)(int32_t)q[lane];
    }
    for (int lane = 0; lane < count; lane++)
        for (int i = 0; i < g->columns; i += 8, to += bits) {
            uint64_t word = 0;
            for (int k = 0; k < 8; k++) word |= (uint64_t)codes[i + k][lane] << (k * bits);
            memcpy(to, &word, (size_t)bits);
        }
}

INLINE void fit_all(const Work *work, const int columns) {
    Groups g, moved;
    g.columns = columns, g.top = (float)((1 << work->bits) - 1);
    ptrdiff_t all = work->rows * (work->columns / work->group);
    for (ptrdiff_t index = 0; index < all; index += LANES) {
        int count = all - index < LANES ? (int)(all - index) : LANES;
        load(work, index, count, &g);
        Lines line = fitted(work, &g, &moved);
        memcpy(work->scales + index, &line.scale, 4 * (size_t)count);
        memcpy(work->biases + index, &line.bias, 4 * (size_t)count);
        write_codes(&g, line, work->bits, count, work->codes + index * columns * work->bits / 8);
    }
}

/* Fits all groups of the matrix. */
INLINE void fit_matrix(const Work *work) {
    if (work->group == 32) fit_all(work, 32);
    if (work->group == 64) fit_all(work, 64);
    if (work->group == 128) fit_all(work, 128);
}

#pragma GCC visibility push(hidden)
void fit_avx512(const Work *), fit_avx2(const Work *);
#pragma GCC visibility pop
