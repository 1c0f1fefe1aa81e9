/* Declarations that the kernels of all instruction sets share: the matrices that they read, and the tables of their
 * functions.
 *
 * Each instruction set has its own file, and so have the products with rounded activations. So the files compile in
 * parallel. A kernel of another file is called only through these tables.
 */
#ifndef PATHS_H
#define PATHS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "4-bit words and bfloat16 pairs are read as little-endian"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* How many bytes of weights are prefetched before they are used. With 6 KiB two Zen 5 cores reach their read
 * bandwidth. */
#define PREFETCH_BYTES 6144
#define CACHE_AHEAD 16 /* rows of keys or values that are prefetched before they are used */
#define KV_TINY 1e-30f /* a group of values whose largest magnitude is below this is stored as zeros */
#define PLANES_PEAK 8355700.0f /* the integer of the largest activation; three bytes of 127 are 8355711 */
#define LEAST_PEAK 1e-31f      /* keeps quotients finite; smaller activations lose precision */

/* Small arrays of accumulators stay in registers only if the loops over them are unrolled. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL32 UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL32 _Pragma("GCC unroll 32")
#endif

/* The smallest number of codes that fills whole words, and the number of these words. */
#define BLOCK_CODES(bits) ((bits) % 2 ? 32 : (bits) == 6 ? 16 : 32 / (bits))
#define BLOCK_WORDS(bits) ((bits) == 6 ? 3 : (bits) % 2 ? (bits) : 1)
/* The blocks of a kernel: integers of one group, E2M1 codes, or integers of two groups. */
#define IN_INTEGERS 0
#define IN_E2M1 1
#define IN_PARTS 2
#define IQ4_BYTES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
#define IQ4_MORE 1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15 /* plus 128 */
#define E2M1_BYTES 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4

typedef enum { BF16, F16, F32, E8M0, E4M3_SCALE } Kind; /* the dtype of scales and biases */

/* What a code is: an integer, a float of 4 or 8 bits (OCP Microscaling 1.0), or a place in a table. */
typedef enum { INTEGER, E2M1, E4M3, TABLE } Codes;

/* Where the scales and biases of groups come from: MLX's forms store them. SYMMETRIC forms store no bias; it is
 * -2^(bits - 1) times the scale. NESTED: GGUF's K types (nested.h). The others are GGUF's types with tables, which have
 * no biases. The numbers are those of moeflux_mlx/ops/native.py. */
typedef enum { MLX, SYMMETRIC, NESTED, IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M, TQ1_0,
               TQ2_0 } Source;

/* How gate and up are combined. The numbers are those of ActivationForm in moeflux_mlx/kinds/feed_forward.py. */
typedef enum { SILU, GELU, CLIP_THEN_SILU, SILU_THEN_CLIP, CLIP_THEN_SWISH, RELU, SITU } Activation;

/* How gate and up are combined, with the limit; only SITU has another one for gate. */
typedef struct {
    Activation form;
    float limit, gate_limit;
} Joining;

static inline ptrdiff_t unit_of(Kind kind) { return kind == F32 ? 4 : kind >= E8M0 ? 1 : 2; }

typedef struct {
    const uint32_t *w;  /* codes [rows, words] with in * bits / 32 words per row, or floats [rows, in] */
    const void *s, *b;  /* scales and biases [rows, in / group], or scale codes and their factors; NULL: there are none */
    ptrdiff_t s_bytes, b_bytes; /* of a row */
    ptrdiff_t in, rows, words, group, groups;
    int bits;           /* bits of a code; 32: the matrix is dense */
    Kind kind;
    Source source;
    Codes codes;        /* all but integers have scales of 8 bits and no biases */
    float factor;       /* multiplies all scales */
    int is_plain;       /* 4-bit integers in groups of 64, which rows() and step_rows() read */
    /* The rows that will be read after the last requested row, or NULL. This is only a prefetch hint. */
    const uint32_t *next;
    const char *next_s, *next_b;
} Matrix;

/* How a cache stores a row of keys or values, in `stride` bytes. If `group` is 0, the row is `width` floats.
 * Otherwise it is `width` codes of 8 bits, followed by one float scale per `group` codes. A value is then (code -
 * 128) * scale (moeflux_mlx/ops/kv_rows.py). */
typedef struct {
    ptrdiff_t width, stride, group;
} RowForm;

/* n consecutive rows of keys and of values of one head. */
typedef struct {
    const char *k, *v;
    ptrdiff_t n;
} KvRows;

/* The products with rounded activations of one instruction set. */
typedef struct {
    void (*pack)(const Matrix *, const float *, int, uint32_t *);
    /* Indexed by form_of() and by the number of planes minus 1. `rows` takes up to four rows of x, `tiles` takes
     * blocks of eight. */
    void (*rows[7][2])(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const uint32_t *const *, float *const *);
    void (*tiles[7][2])(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const uint32_t *const *, void *, float *const *);
} Rounded;

typedef struct {
    const char *name;
    ptrdiff_t width;
    void (*pack)(const float *, float *, ptrdiff_t);
    void (*rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    ptrdiff_t (*plane_floats)(const Matrix *); /* the size of a packed row in byte planes; 0: it is packed in blocks */
    void (*pack_blocks)(const Matrix *, const float *, float *);
    void (*rows_of_blocks)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    void (*dense_rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    void (*dequantize)(const Matrix *, ptrdiff_t, ptrdiff_t, float *);
    void (*combine)(const float *const *, const float *, ptrdiff_t, const float *, const float *, float *, ptrdiff_t,
                    ptrdiff_t);
    void (*activate)(const Joining *, const float *, const float *, float *, ptrdiff_t);
    void (*add)(const void *, ptrdiff_t, ptrdiff_t, Kind, float *);
    void (*rms_norm)(const float *, const float *, float, float *, ptrdiff_t);
    void (*rope)(const float *, const float *, const float *, ptrdiff_t, int, float *, ptrdiff_t);
    void (*softmax)(float *, ptrdiff_t, const float *);
    void (*attend)(const float *, ptrdiff_t, const KvRows *, const RowForm *, const RowForm *, float, const float *,
                   const float *, ptrdiff_t, float *, ptrdiff_t, float *, float *);
    void (*delta)(const float *, float *, const float *, const float *, const float *, const float *, int, float, float *,
                  ptrdiff_t, ptrdiff_t);
    void (*conv)(float *, const float *, const float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, float *);
    /* A faster kernel for the rows of a step, which gives other bits, or NULL. */
    void (*step_pack)(const float *, float *, ptrdiff_t);
    void (*step_rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    const Rounded *rounded; /* NULL: activations are never rounded */
} Path;

/* Prefetches the scales and biases of a row; for a row past r1, those of the rows that come next. Without this the
 * kernel waits for memory every few rows. */
static inline void prefetch_tables(const Matrix *m, ptrdiff_t row, ptrdiff_t r1) {
    const int over = row >= r1 && m->next;
    const ptrdiff_t ahead = over ? row - r1 : row;
    const char *s = (over ? m->next_s : (const char *)m->s) + ahead * m->s_bytes;
    const char *b = (over ? m->next_b : (const char *)m->b) + ahead * m->b_bytes;
    for (ptrdiff_t at = 0; at < m->s_bytes; at += 64) __builtin_prefetch(s + at);
    for (ptrdiff_t at = 0; at < m->b_bytes; at += 64) __builtin_prefetch(b + at);
}

/* Returns the address of `row`; for a row past r1, the address where the work continues. It is used for prefetching. */
static inline const uint32_t *address_ahead(const Matrix *m, ptrdiff_t row, ptrdiff_t r1) {
    return row < r1 || !m->next ? m->w + row * m->words : m->next + (row - r1) * m->words;
}

static inline ptrdiff_t ceil_div(ptrdiff_t n, ptrdiff_t chunk) { return (n + chunk - 1) / chunk; }

/* Returns the number of groups in a block of codes, if there are several. */
static inline ptrdiff_t block_parts(const Matrix *m) {
    return m->codes == INTEGER && BLOCK_CODES(m->bits) > m->group ? BLOCK_CODES(m->bits) / m->group : 1;
}

/* Returns the number of groups of a row, rounded up to whole vectors of eight. */
static inline ptrdiff_t rounded_groups(const Matrix *m) { return ceil_div(m->groups, 8) * 8; }

/* Returns the index of a matrix's form in the tables of Rounded, or -1 if these have no kernel for it. */
static inline int form_of(const Matrix *m) {
    int group = m->group == 32 ? 0 : m->group == 64 ? 1 : 2;
    if (m->source != MLX) return -1;
    if (m->codes != INTEGER) return m->codes == E2M1 && m->kind == E8M0 ? 6 : -1;
    return m->bits == 4 ? group : m->bits == 8 ? 3 + group : -1;
}

static inline ptrdiff_t min(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

#define DPBUSD 1 /* the instruction that multiplies bytes in rounded.h */
#define MADDUBS 2
#define SDOT 3
#define USDOT 4
/* Older compilers define the intrinsics of an instruction set only if they compile the whole file for it. */
#if defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10
#define ANY_TARGET 1
#endif
#if defined(__aarch64__) && (defined(ANY_TARGET) || defined(__ARM_FEATURE_DOTPROD))
#define DOTPROD 1
#endif
#if defined(DOTPROD) && (defined(ANY_TARGET) || defined(__ARM_FEATURE_MATMUL_INT8))
#define I8MM 1
#endif

#include "nested.h"
#include "grids.h"

/* Of a type with a table: bits of a code, columns of a group, bytes of scales of 256 columns, and the grid's size. IQ4_NL
 * has a float16 for each group. */
typedef struct {
    int bits, group, scale_bytes, entries, values;
} Table;

static inline Table table_of(ptrdiff_t source) {
    static const Table tables[] = {{4, 32, 16, 0, 0},  {4, 32, 8, 0, 0},    {3, 32, 2, 256, 4},
                                   {3, 32, 14, 512, 4}, {2, 32, 2, 256, 8}, {2, 16, 10, 512, 8},
                                   {2, 16, 18, 1024, 8}, {1, 32, 18, 2048, 8}, {1, 16, 24, 2048, 8}, {1, 32, 22, 0, 0},
                                   {2, 32, 2, 0, 0}};
    return source >= IQ4_NL && source <= TQ2_0 ? tables[source - IQ4_NL] : (Table){0};
}

/* These symbols are visible to the other files of this extension, but not to Python or to other libraries. */
#pragma GCC visibility push(hidden)
#if defined(__x86_64__)
extern const Path path_avx512, path_avx2;
extern const Rounded rounded_dpbusd, rounded_maddubs;
/* Replace functions of a path by faster ones (planes.h and vnni.h). */
void use_planes_avx512(Path *), use_planes_avx2(Path *), use_vnni(Path *);
#endif
#if defined(DOTPROD)
extern const Rounded rounded_sdot;
#endif
#if defined(I8MM)
extern const Rounded rounded_usdot;
#endif
extern const Path path_portable;

/* The paths that this processor can run, fastest first. find_paths() sets both variables. */
extern const Path *paths[4]; /* the largest number, on x86-64 */
extern int usable_paths;
void find_paths(void);
#pragma GCC visibility pop

/* Macros for the headers of kernels. They use the PATH and TARGET that are defined before a header is included. */
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, PATH)
#define INLINE static inline __attribute__((always_inline)) TARGET

#endif
