/* What the CPU kernels of all instruction sets share: the matrices that they read, and the tables in which their
 * functions are found.
 *
 * Each instruction set, and the products with rounded activations, is a file of its own, so that compilers work on
 * them side by side. Between files a kernel is called by pointer only.
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

/* Weight bytes asked for ahead of use; 6 KiB is where two Zen 5 cores reach their read bandwidth. */
#define PREFETCH_BYTES 6144
#define CACHE_AHEAD 16 /* keys or values asked for before their turn */
#define KV_TINY 1e-30f /* magnitudes of a group below which its 8-bit codes are zeros */
#define PLANES_PEAK 8355700.0f /* 127 in each of three bytes is 8355711; rounding must stay below */
#define LEAST_PEAK 1e-31f      /* keeps quotients finite; smaller activations lose precision */

/* Small arrays of accumulators stay in registers only if the loops over them are unrolled. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL32 UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL32 _Pragma("GCC unroll 32")
#endif

/* Codes that fill whole words, and how many words. */
#define BLOCK_CODES(bits) ((bits) % 2 ? 32 : (bits) == 6 ? 16 : 32 / (bits))
#define BLOCK_WORDS(bits) ((bits) == 6 ? 3 : (bits) % 2 ? (bits) : 1)
#define E2M1_BYTES 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4

typedef enum { BF16, F16, F32, E8M0, E4M3_SCALE } Kind; /* of scales and biases */

/* What a code is: an integer, or a float of 4 or 8 bits (OCP Microscaling 1.0). */
typedef enum { INTEGER, E2M1, E4M3 } Codes;

/* What joins gate and up, as kinds.Activation says them. */
typedef enum { SILU, GELU, CLIP_THEN_SILU, SILU_THEN_CLIP, CLIP_THEN_SWISH, RELU } Activation;

static inline ptrdiff_t unit_of(Kind kind) { return kind == F32 ? 4 : kind >= E8M0 ? 1 : 2; }

typedef struct {
    const uint32_t *w;  /* [rows, words] codes, in * bits / 32 words to a row, or floats [rows, in] */
    const void *s, *b;  /* [rows, in / group]; NULL if there are none */
    ptrdiff_t in, rows, words, group, groups;
    int bits;           /* of a code; 32: dense */
    Kind kind;
    Codes codes;        /* all but integers have scales of 8 bits and no biases */
    float factor;       /* of all scales, beside themselves */
    int is_plain;       /* 4 bits, groups of 64, as rows() and step_rows() read them */
    /* What will be read after the last row asked for, or NULL: a prefetch hint. */
    const uint32_t *next;
    const char *next_s, *next_b;
} Matrix;

/* How a row of keys or values is kept, in `stride` bytes: as floats, or where `group` is not 0 as codes of 8 bits, and
 * behind them a float scale for each so many; a value is (code - 128) * scale (moeflux_mlx/ops/kv_rows.py). */
typedef struct {
    ptrdiff_t width, stride, group;
} RowForm;

/* Rows of keys and of values of one head. */
typedef struct {
    const char *k, *v;
    ptrdiff_t n;
} Seen;

/* Products with rounded activations, of one instruction set. */
typedef struct {
    void (*pack)(const Matrix *, const float *, int, uint32_t *);
    /* By form and planes, as form_of and planes_of number them; `rows` takes up to four. */
    void (*rows[7][2])(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const uint32_t *const *, float *const *);
    void (*tiles[7][2])(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const uint32_t *const *, void *, float *const *);
} Rounded;

typedef struct {
    const char *name;
    ptrdiff_t width;
    void (*pack)(const float *, float *, ptrdiff_t);
    void (*rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    ptrdiff_t (*plane_floats)(const Matrix *); /* what an activation row takes in planes of bytes, 0: it is in blocks */
    void (*pack_blocks)(const Matrix *, const float *, float *);
    void (*rows_of_blocks)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    void (*dense_rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    void (*dequantize)(const Matrix *, ptrdiff_t, ptrdiff_t, float *);
    void (*combine)(const float *const *, const float *, ptrdiff_t, const float *, const float *, float *, ptrdiff_t,
                    ptrdiff_t);
    void (*activate)(Activation, float, const float *, const float *, float *, ptrdiff_t);
    void (*add)(const void *, ptrdiff_t, ptrdiff_t, Kind, float *);
    void (*rms_norm)(const float *, const float *, float, float *, ptrdiff_t);
    void (*rope)(const float *, const float *, const float *, ptrdiff_t, int, float *, ptrdiff_t);
    void (*softmax)(float *, ptrdiff_t, const float *);
    void (*attend)(const float *, ptrdiff_t, const Seen *, const RowForm *, const RowForm *, float, const float *, float *,
                   ptrdiff_t, float *, float *);
    void (*delta)(const float *, float *, const float *, const float *, const float *, const float *, int, float, float *,
                  ptrdiff_t, ptrdiff_t);
    void (*conv)(float *, const float *, const float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, float *);
    uint32_t (*fold)(const uint32_t *, ptrdiff_t);
    /* The rows of a step have their own kernel, of other bits, if that is faster, else NULL. */
    void (*step_pack)(const float *, float *, ptrdiff_t);
    void (*step_rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    const Rounded *rounded; /* NULL: activations are never rounded */
} Path;

static inline ptrdiff_t table_bytes(const Matrix *m) { return m->groups * unit_of(m->kind); }

/* Ask for a row's scales and biases (past r1, of what comes next); else every few rows wait for memory. */
static inline void fetch_tables(const Matrix *m, ptrdiff_t row, ptrdiff_t r1) {
    ptrdiff_t bytes = table_bytes(m);
    int over = row >= r1 && m->next;
    const char *s = over ? m->next_s + (row - r1) * bytes : (const char *)m->s + row * bytes;
    const char *b = over ? m->next_b + (row - r1) * bytes : (const char *)m->b + row * bytes;
    for (ptrdiff_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(s + at);
        if (m->b) __builtin_prefetch(b + at);
    }
}

/* Where `row` starts; past r1, where the work goes on. */
static inline const uint32_t *soon_of(const Matrix *m, ptrdiff_t row, ptrdiff_t r1) {
    return row < r1 || !m->next ? m->w + row * m->words : m->next + (row - r1) * m->words;
}

static inline ptrdiff_t chunks_of(ptrdiff_t n, ptrdiff_t chunk) { return (n + chunk - 1) / chunk; }

/* Groups of a row of rounded activations, padded to whole vectors. */
static inline ptrdiff_t rounded_groups(const Matrix *m) { return chunks_of(m->groups, 8) * 8; }

/* Which of Rounded's forms a matrix has, or -1. */
static inline int form_of(const Matrix *m) {
    int group = m->group == 32 ? 0 : m->group == 64 ? 1 : 2;
    if (m->codes != INTEGER) return m->codes == E2M1 && m->kind == E8M0 ? 6 : -1;
    return m->bits == 4 ? group : m->bits == 8 ? 3 + group : -1;
}

static inline ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

#define DPBUSD 1 /* who multiplies bytes in rounded.h */
#define MADDUBS 2
#define SDOT 3
#define USDOT 4
/* Some compilers know an instruction set's intrinsics only where the whole file may use it. */
#if defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10
#define ANY_TARGET 1
#endif
#if defined(__aarch64__) && (defined(ANY_TARGET) || defined(__ARM_FEATURE_DOTPROD))
#define DOTPROD 1
#endif
#if defined(DOTPROD) && (defined(ANY_TARGET) || defined(__ARM_FEATURE_MATMUL_INT8))
#define I8MM 1
#endif

/* Seen by each other's files, not by Python or another library. */
#pragma GCC visibility push(hidden)
#if defined(__x86_64__)
extern const Path path_avx512, path_avx2;
extern const Rounded rounded_dpbusd, rounded_maddubs;
/* Replace what a path computes with by something faster: planes.h and vnni.h. */
void use_planes_avx512(Path *), use_planes_avx2(Path *), use_vnni(Path *);
#endif
#if defined(DOTPROD)
extern const Rounded rounded_sdot;
#endif
#if defined(I8MM)
extern const Rounded rounded_usdot;
#endif
extern const Path path_portable;

/* Fastest first; `usable_paths` of them run on this processor, once find_paths has run. */
extern const Path *paths[4]; /* x86-64 has the most */
extern int usable_paths;
void find_paths(void);
#pragma GCC visibility pop

/* What a header of kernels makes for the PATH and TARGET that stand before it. */
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, PATH)
#define INLINE static inline __attribute__((always_inline)) TARGET

#endif
