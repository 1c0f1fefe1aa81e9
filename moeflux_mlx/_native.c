/* Native CPU kernels of moeflux_mlx: 4-bit matrix-vector products and the small decode operations.
 *
 * Every function takes C-contiguous buffers (numpy, mlx, memoryview), checks dtype, shape, alignment,
 * bounds and overlap with the GIL held, then works without it and writes into `out`. A result depends
 * on the instruction set only: never on the number of threads, the slots, or the other rows of a batch.
 * The documented face is native.py.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "4-bit words and bfloat16 pairs are read as little-endian"
#endif

#include "_native_team.h"

/* Weight bytes asked for ahead of use; 6 KiB is where two Zen 5 cores reach their read bandwidth. */
#define PREFETCH_BYTES 6144
/* Weight bytes per unit of work: small enough to balance and to stay in L2 for a second pass. */
#define CHUNK_BYTES 131072
#define MAX_CHUNK_ROWS 256
#define SMALL_CHUNK 16384 /* floats per unit of an elementwise operation */
#define GQA_HEADS 8       /* query heads that share one pass over keys and values */
#define MAX_ARGS 8

/* Small arrays of accumulators stay in registers only if the loops over them are unrolled. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

typedef struct {
    const uint32_t *w;  /* [rows, in / 8] */
    const void *s, *b;  /* [rows, in / 64], float32 or bfloat16 bits */
    ptrdiff_t in;
    int is_f32;
    const uint32_t *next; /* what will be read after the last row asked for, or NULL: a prefetch hint */
} Matrix;

typedef struct {
    const char *name;
    ptrdiff_t width;
    void (*pack)(const float *, float *, ptrdiff_t);
    void (*rows)(const Matrix *, ptrdiff_t, ptrdiff_t, ptrdiff_t, const float *const *, float *const *);
    void (*dequantize)(const Matrix *, ptrdiff_t, ptrdiff_t, float *);
    void (*combine)(const float *const *, const float *, ptrdiff_t, const float *, const float *, float *, ptrdiff_t,
                    ptrdiff_t);
    void (*silu_mul)(const float *, const float *, float *, ptrdiff_t);
    void (*rms_norm)(const float *, const float *, float, float *, ptrdiff_t);
    void (*attend)(const float *, ptrdiff_t, const float *, const float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, float,
                   float *, ptrdiff_t, float *);
    void (*delta)(float *, const float *, const float *, const float *, float, float, float *, ptrdiff_t, ptrdiff_t);
    void (*conv)(float *, const float *, const float *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, float *);
    uint32_t (*fold)(const uint32_t *, ptrdiff_t);
} Path;

#if defined(__x86_64__)
#define PATH avx512
#define path_name_avx512 "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define W 16
#include "_native_kernels.h"
#define PATH avx2
#define path_name_avx2 "avx2"
#define TARGET __attribute__((target("avx2,fma")))
#define W 8
#include "_native_kernels.h"
#endif
#define PATH portable
#define path_name_portable "portable"
#define TARGET
#define W 4
#include "_native_kernels.h"

/* Fastest first; `usable_paths` of them run on this processor. */
static const Path *paths[3];
static int usable_paths;
static const Path *path;

static void find_paths(void) {
    usable_paths = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) paths[usable_paths++] = &path_avx512;
    if (avx2) paths[usable_paths++] = &path_avx2;
#endif
    paths[usable_paths++] = &path_portable;
    path = paths[0];
}

/* ---- arguments ---------------------------------------------------------------------------- */

typedef enum { F32, U32, I32, SCALE } Kind;

typedef struct {
    Py_buffer view[MAX_ARGS];
    int writable[MAX_ARGS], n;
} Args;

static int kind_matches(Kind kind, const Py_buffer *view) {
    const char *f = view->format ? view->format : "B";
    if (*f == '@' || *f == '=' || *f == '<') f++;
    if (kind == SCALE && view->itemsize == 2) return !strcmp(f, "H") || !strcmp(f, "bfloat16");
    if (view->itemsize != 4) return 0;
    if (kind == U32) return !strcmp(f, "I") || !strcmp(f, "L");
    if (kind == I32) return !strcmp(f, "i") || !strcmp(f, "l");
    return !strcmp(f, "f");
}

/* Borrow a buffer until args_done; NULL with an exception if it is not what the operation needs. */
static Py_buffer *take(Args *args, PyObject *object, const char *name, Kind kind, int ndim, int writable) {
    static const char *const wanted[] = {"float32", "uint32", "int32", "bfloat16, uint16 (bfloat16 bits) or float32"};
    Py_buffer *view = &args->view[args->n];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)))
        return NULL;
    args->writable[args->n++] = writable;
    if (!kind_matches(kind, view)) {
        PyErr_Format(PyExc_TypeError, "%s: buffer format '%s', expected %s", name, view->format ? view->format : "B",
                     wanted[kind]);
        return NULL;
    }
    if (view->ndim != ndim) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions, expected %d", name, view->ndim, ndim);
        return NULL;
    }
    if (view->len && (uintptr_t)view->buf % (size_t)view->itemsize) {
        PyErr_Format(PyExc_ValueError, "%s: address %p is not a multiple of its item size %zd", name, view->buf,
                     view->itemsize);
        return NULL;
    }
    return view;
}

/* True if dimension `axis` is `size`; otherwise sets the exception. */
static int dim(const Py_buffer *view, const char *name, int axis, Py_ssize_t size) {
    if (view->shape[axis] == size) return 1;
    PyErr_Format(PyExc_ValueError, "%s: dimension %d is %zd, expected %zd", name, axis, view->shape[axis], size);
    return 0;
}

static int dims2(const Py_buffer *view, const char *name, Py_ssize_t a, Py_ssize_t b) {
    return dim(view, name, 0, a) && dim(view, name, 1, b);
}

static int dims3(const Py_buffer *view, const char *name, Py_ssize_t a, Py_ssize_t b, Py_ssize_t c) {
    return dims2(view, name, a, b) && dim(view, name, 2, c);
}

static int multiple(const char *name, Py_ssize_t size, Py_ssize_t of) {
    if (size > 0 && size % of == 0) return 1;
    PyErr_Format(PyExc_ValueError, "%s is %zd, expected a positive multiple of %zd", name, size, of);
    return 0;
}

/* Threads write while others read, so no written buffer may touch another argument. */
static int disjoint(const Args *args) {
    for (int i = 0; i < args->n; i++) {
        if (!args->writable[i]) continue;
        const char *lo = args->view[i].buf, *hi = lo + args->view[i].len;
        for (int j = 0; j < args->n; j++) {
            const char *other = args->view[j].buf;
            if (j == i || hi <= other || other + args->view[j].len <= lo) continue;
            PyErr_SetString(PyExc_ValueError, "a written buffer overlaps another argument");
            return 0;
        }
    }
    return 1;
}

static PyObject *args_done(Args *args, int ok) {
    while (args->n) PyBuffer_Release(&args->view[--args->n]);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static int arity(Py_ssize_t got, Py_ssize_t want) {
    if (got == want) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", got, want);
    return 0;
}

static int take_matrix(Args *args, PyObject *const *object, Matrix *m, Py_ssize_t *rows) {
    Py_buffer *w = take(args, object[0], "w", U32, 2, 0);
    Py_buffer *s = w ? take(args, object[1], "scales", SCALE, 2, 0) : NULL;
    Py_buffer *b = s ? take(args, object[2], "biases", SCALE, 2, 0) : NULL;
    if (!b || !multiple("w: row length in words", w->shape[1], 8)) return 0;
    *rows = w->shape[0];
    if (!dims2(s, "scales", *rows, w->shape[1] / 8) || !dims2(b, "biases", *rows, w->shape[1] / 8)) return 0;
    if (s->itemsize != b->itemsize) {
        PyErr_SetString(PyExc_TypeError, "scales and biases have different dtypes");
        return 0;
    }
    *m = (Matrix){w->buf, s->buf, b->buf, w->shape[1] * 8, s->itemsize == 4, NULL};
    return 1;
}

/* ---- shared pieces of work ---------------------------------------------------------------- */

static void *scratch(ptrdiff_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 64) ? NULL : memory;
}

/* Rows per unit of work: about CHUNK_BYTES of weights, less when that leaves threads idle. */
static ptrdiff_t chunk_rows(ptrdiff_t rows, ptrdiff_t in) {
    ptrdiff_t fit = CHUNK_BYTES / (in / 2), fair = rows / (4 * (ptrdiff_t)atomic_load(&team.size));
    ptrdiff_t floor = CHUNK_BYTES / 8 / (in / 2);
    ptrdiff_t chunk = fair < fit ? fair : fit;
    if (chunk < floor) chunk = floor;
    chunk = (chunk + 7) / 8 * 8;
    return chunk < 8 ? 8 : chunk > MAX_CHUNK_ROWS ? MAX_CHUNK_ROWS : chunk;
}

static ptrdiff_t chunks_of(ptrdiff_t n, ptrdiff_t chunk) { return (n + chunk - 1) / chunk; }

static ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static ptrdiff_t packed_floats(const Path *p, ptrdiff_t in) { return chunks_of(in / 8, p->width) * 9 * p->width; }

typedef struct {
    const Path *path;
    const float *x;
    float *packed;
    ptrdiff_t in;
} Pack;

static void pack_job(void *ctx, ptrdiff_t row, int member) {
    Pack *c = ctx;
    (void)member;
    c->path->pack(c->x + row * c->in, c->packed + row * packed_floats(c->path, c->in), c->in);
}

/* ---- qmv4, dequantize --------------------------------------------------------------------- */

typedef struct {
    const Path *path;
    Matrix m;
    ptrdiff_t rows, chunk, batch;
    const float **x;
    float **y; /* start of each output row */
    float *out;
} Product;

static void product_job(void *ctx, ptrdiff_t chunk, int member) {
    Product *c = ctx;
    ptrdiff_t r0 = chunk * c->chunk, r1 = least(r0 + c->chunk, c->rows);
    (void)member;
    for (ptrdiff_t t = 0; t < c->batch; t += 4) {
        float *y[4];
        ptrdiff_t n = least(4, c->batch - t);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[t + i] + r0;
        c->path->rows(&c->m, r0, r1, n, c->x + t, y);
    }
}

static int run_product(Product *c, const float *x) {
    ptrdiff_t size = packed_floats(c->path, c->m.in);
    float *packed = scratch(c->batch * size * 4);
    c->x = scratch(c->batch * (ptrdiff_t)sizeof *c->x);
    c->y = scratch(c->batch * (ptrdiff_t)sizeof *c->y);
    int ok = packed && c->x && c->y;
    if (ok) {
        for (ptrdiff_t t = 0; t < c->batch; t++) c->x[t] = packed + t * size, c->y[t] = c->out + t * c->rows;
        team_run(pack_job, &(Pack){c->path, x, packed, c->m.in}, c->batch);
        team_run(product_job, c, chunks_of(c->rows, c->chunk));
    }
    free(packed), free(c->x), free(c->y);
    return ok;
}

/* qmv4(x[T, I], w[O, I/8], scales[O, I/64], biases[O, I/64], out[T, O]) */
static PyObject *op_qmv4(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Product c = {.path = path};
    if (!arity(n, 5)) return NULL;
    Py_buffer *x = take(&args, a[0], "x", F32, 2, 0);
    int ok = x && take_matrix(&args, a + 1, &c.m, &c.rows);
    Py_buffer *out = ok ? take(&args, a[4], "out", F32, 2, 1) : NULL;
    if (!out || !dim(x, "x", 1, c.m.in) || !dims2(out, "out", x->shape[0], c.rows) || !disjoint(&args))
        return args_done(&args, 0);
    c.batch = x->shape[0], c.out = out->buf, c.chunk = chunk_rows(c.rows, c.m.in);
    Py_BEGIN_ALLOW_THREADS;
    ok = run_product(&c, x->buf);
    Py_END_ALLOW_THREADS;
    if (!ok) PyErr_NoMemory();
    return args_done(&args, ok);
}

static void dequantize_job(void *ctx, ptrdiff_t chunk, int member) {
    Product *c = ctx;
    ptrdiff_t r0 = chunk * c->chunk;
    (void)member;
    c->path->dequantize(&c->m, r0, least(r0 + c->chunk, c->rows), c->out);
}

/* dequantize(w[O, I/8], scales[O, I/64], biases[O, I/64], out[O, I]) */
static PyObject *op_dequantize(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Product c = {.path = path};
    if (!arity(n, 4)) return NULL;
    int ok = take_matrix(&args, a, &c.m, &c.rows);
    Py_buffer *out = ok ? take(&args, a[3], "out", F32, 2, 1) : NULL;
    if (!out || !dims2(out, "out", c.rows, c.m.in) || !disjoint(&args)) return args_done(&args, 0);
    c.out = out->buf, c.chunk = chunk_rows(c.rows, c.m.in);
    Py_BEGIN_ALLOW_THREADS;
    team_run(dequantize_job, &c, chunks_of(c.rows, c.chunk));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

/* ---- routed experts ----------------------------------------------------------------------- */

typedef struct {
    int32_t slot;
    ptrdiff_t index; /* t * K + k */
} Pair;

typedef struct {
    const Path *path;
    const uint32_t *blob;
    ptrdiff_t stride;             /* words per record */
    ptrdiff_t hidden, inner;      /* H, I */
    ptrdiff_t tokens, top_k, pairs, groups, chunk, per_group;
    Pair *pair;                   /* sorted by slot, so pairs that share an expert are neighbours */
    ptrdiff_t *group;             /* first pair of each expert, and the end */
    const float **x;              /* packed input of each sorted pair */
    float **y;                    /* output row of each sorted pair */
    const float **by_token;       /* the same rows in t * K + k order */
    const float *weight, *mid, *shared;
    float *out;
} Experts;

/* Words of one projection with its scales and biases (bfloat16, 64 to a group). */
static ptrdiff_t projection_words(ptrdiff_t hidden, ptrdiff_t inner) { return hidden * inner / 8 + hidden * inner / 64; }

/* Projection 0 gate, 1 up, 2 down of the record in `slot`. */
static Matrix projection(const Experts *c, ptrdiff_t slot, int which) {
    ptrdiff_t size = c->hidden * c->inner;
    const uint32_t *w = c->blob + slot * c->stride + which * projection_words(c->hidden, c->inner);
    return (Matrix){w, w + size / 8, w + size / 8 + size / 128, which == 2 ? c->inner : c->hidden, 0, NULL};
}

static int by_slot(const void *a, const void *b) {
    const Pair *p = a, *q = b;
    if (p->slot != q->slot) return p->slot < q->slot ? -1 : 1;
    return p->index < q->index ? -1 : p->index > q->index;
}

/* Check and copy the slots (nothing read later can change them), then group equal ones. */
static int plan(Experts *c, const Py_buffer *slots, Py_ssize_t records) {
    const int32_t *slot = slots->buf;
    c->tokens = slots->shape[0], c->top_k = slots->shape[1], c->pairs = c->tokens * c->top_k;
    c->pair = scratch(c->pairs * (ptrdiff_t)sizeof *c->pair);
    c->group = scratch((c->pairs + 1) * (ptrdiff_t)sizeof *c->group);
    c->x = scratch(c->pairs * (ptrdiff_t)sizeof *c->x);
    c->y = scratch(c->pairs * (ptrdiff_t)sizeof *c->y);
    c->by_token = scratch(c->pairs * (ptrdiff_t)sizeof *c->by_token);
    if (!c->pair || !c->group || !c->x || !c->y || !c->by_token) return PyErr_NoMemory(), 0;
    for (ptrdiff_t i = 0; i < c->pairs; i++) {
        c->pair[i] = (Pair){slot[i], i};
        if (c->pair[i].slot >= 0 && c->pair[i].slot < records) continue;
        PyErr_Format(PyExc_ValueError, "slots: value %d at position %zd, expected 0 to %zd", (int)c->pair[i].slot,
                     (Py_ssize_t)i, records - 1);
        return 0;
    }
    qsort(c->pair, (size_t)c->pairs, sizeof *c->pair, by_slot);
    for (ptrdiff_t i = 0; i < c->pairs; i++)
        if (!i || c->pair[i].slot != c->pair[i - 1].slot) c->group[c->groups++] = i;
    c->group[c->groups] = c->pairs;
    return 1;
}

static void plan_free(Experts *c) { free(c->pair), free(c->group), free(c->x), free(c->y), free(c->by_token); }

static int take_experts(Args *args, PyObject *blob, PyObject *slots, Experts *c) {
    if (!multiple("H", c->hidden, 64) || !multiple("I", c->inner, 64)) return 0;
    Py_buffer *b = take(args, blob, "blob", U32, 2, 0);
    Py_buffer *s = b ? take(args, slots, "slots", I32, 2, 0) : NULL;
    if (!s) return 0;
    c->blob = b->buf, c->stride = b->shape[1];
    /* Divide first: hidden * inner of a hostile call may not fit. */
    if (c->inner > c->stride * 8 / c->hidden || 3 * projection_words(c->hidden, c->inner) > c->stride) {
        PyErr_Format(PyExc_ValueError, "blob: records of %zd words cannot hold H=%zd, I=%zd", b->shape[1],
                     (Py_ssize_t)c->hidden, (Py_ssize_t)c->inner);
        return 0;
    }
    return plan(c, s, b->shape[0]);
}

static void gate_up_job(void *ctx, ptrdiff_t chunk, int member) {
    Experts *c = ctx;
    ptrdiff_t g = chunk / c->per_group, r0 = chunk % c->per_group * c->chunk, r1 = least(r0 + c->chunk, c->inner);
    Matrix gate = projection(c, c->pair[c->group[g]].slot, 0), up = projection(c, c->pair[c->group[g]].slot, 1);
    float other[4][MAX_CHUNK_ROWS];
    (void)member;
    gate.next = up.w + r0 * (c->hidden / 8);
    for (ptrdiff_t p = c->group[g]; p < c->group[g + 1]; p += 4) {
        float *y[4], *u[4] = {other[0], other[1], other[2], other[3]};
        ptrdiff_t n = least(4, c->group[g + 1] - p);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[p + i] + r0;
        c->path->rows(&gate, r0, r1, n, c->x + p, y);
        c->path->rows(&up, r0, r1, n, c->x + p, u);
        for (ptrdiff_t i = 0; i < n; i++) c->path->silu_mul(y[i], u[i], y[i], r1 - r0);
    }
}

static int run_gate_up(Experts *c, const float *x) {
    ptrdiff_t size = packed_floats(c->path, c->hidden);
    float *packed = scratch(c->tokens * size * 4);
    if (!packed) return 0;
    for (ptrdiff_t p = 0; p < c->pairs; p++) {
        c->x[p] = packed + c->pair[p].index / c->top_k * size;
        c->y[p] = c->out + c->pair[p].index * c->inner;
    }
    c->chunk = chunk_rows(c->inner * c->groups, c->hidden);
    c->per_group = chunks_of(c->inner, c->chunk);
    team_run(pack_job, &(Pack){c->path, x, packed, c->hidden}, c->tokens);
    team_run(gate_up_job, c, c->groups * c->per_group);
    free(packed);
    return 1;
}

/* expert_gate_up(x[T, H], blob[S, words], slots[T, K], out[T, K, I]) */
static PyObject *op_expert_gate_up(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Experts c = {.path = path};
    int ok = 0;
    if (!arity(n, 4)) return NULL;
    Py_buffer *x = take(&args, a[0], "x", F32, 2, 0);
    Py_buffer *out = x ? take(&args, a[3], "out", F32, 3, 1) : NULL;
    if (!out) return args_done(&args, 0);
    c.hidden = x->shape[1], c.inner = out->shape[2], c.out = out->buf;
    if (take_experts(&args, a[1], a[2], &c) && dim(x, "x", 0, c.tokens) &&
        dims3(out, "out", c.tokens, c.top_k, c.inner) && disjoint(&args)) {
        Py_BEGIN_ALLOW_THREADS;
        ok = run_gate_up(&c, x->buf);
        Py_END_ALLOW_THREADS;
        if (!ok) PyErr_NoMemory();
    }
    plan_free(&c);
    return args_done(&args, ok);
}

static void down_job(void *ctx, ptrdiff_t chunk, int member) {
    Experts *c = ctx;
    ptrdiff_t r0 = chunk * c->chunk, r1 = least(r0 + c->chunk, c->hidden);
    (void)member;
    for (ptrdiff_t g = 0; g < c->groups; g++) {
        Matrix down = projection(c, c->pair[c->group[g]].slot, 2);
        if (g + 1 < c->groups)
            down.next = projection(c, c->pair[c->group[g + 1]].slot, 2).w + r0 * (c->inner / 8);
        for (ptrdiff_t p = c->group[g]; p < c->group[g + 1]; p += 4) {
            float *y[4];
            ptrdiff_t n = least(4, c->group[g + 1] - p);
            for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[p + i] + r0;
            c->path->rows(&down, r0, r1, n, c->x + p, y);
        }
    }
    for (ptrdiff_t t = 0; t < c->tokens; t++)
        c->path->combine(c->by_token + t * c->top_k, c->weight + t * c->top_k, c->top_k, c->mid + t * c->hidden,
                         c->shared ? c->shared + t * c->hidden : NULL, c->out + t * c->hidden, r0, r1);
}

static int run_down(Experts *c, const float *act) {
    ptrdiff_t size = packed_floats(c->path, c->inner);
    float *packed = scratch(c->pairs * size * 4), *rows = scratch(c->pairs * c->hidden * 4);
    int ok = packed && rows;
    if (ok) {
        for (ptrdiff_t p = 0; p < c->pairs; p++) {
            c->x[p] = packed + c->pair[p].index * size;
            c->y[p] = rows + c->pair[p].index * c->hidden;
            c->by_token[p] = rows + p * c->hidden;
        }
        c->chunk = chunk_rows(c->hidden, c->inner);
        team_run(pack_job, &(Pack){c->path, act, packed, c->inner}, c->pairs);
        team_run(down_job, c, chunks_of(c->hidden, c->chunk));
    }
    free(packed), free(rows);
    return ok;
}

/* expert_down_combine(act[T, K, I], blob[S, words], slots[T, K], weights[T, K], mid[T, H], shared[T, H] or None,
 * out[T, H]) */
static PyObject *op_expert_down_combine(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Experts c = {.path = path};
    int ok = 0;
    if (!arity(n, 7)) return NULL;
    Py_buffer *act = take(&args, a[0], "act", F32, 3, 0);
    Py_buffer *weights = act ? take(&args, a[3], "weights", F32, 2, 0) : NULL;
    Py_buffer *mid = weights ? take(&args, a[4], "mid", F32, 2, 0) : NULL;
    Py_buffer *shared = mid && a[5] != Py_None ? take(&args, a[5], "shared", F32, 2, 0) : NULL;
    Py_buffer *out = mid && (shared || a[5] == Py_None) ? take(&args, a[6], "out", F32, 2, 1) : NULL;
    if (!out) return args_done(&args, 0);
    c.hidden = mid->shape[1], c.inner = act->shape[2], c.out = out->buf;
    c.weight = weights->buf, c.mid = mid->buf, c.shared = shared ? shared->buf : NULL;
    if (take_experts(&args, a[1], a[2], &c) && dims3(act, "act", c.tokens, c.top_k, c.inner) &&
        dims2(weights, "weights", c.tokens, c.top_k) && dims2(mid, "mid", c.tokens, c.hidden) &&
        (!shared || dims2(shared, "shared", c.tokens, c.hidden)) && dims2(out, "out", c.tokens, c.hidden) &&
        disjoint(&args)) {
        Py_BEGIN_ALLOW_THREADS;
        ok = run_down(&c, act->buf);
        Py_END_ALLOW_THREADS;
        if (!ok) PyErr_NoMemory();
    }
    plan_free(&c);
    return args_done(&args, ok);
}

/* ---- small decode operations -------------------------------------------------------------- */

typedef struct {
    const Path *path;
    const float *x, *weight;
    float *out, *state;
    float eps;
    ptrdiff_t rows, width, chunk, taps;
} Rowwise;

static void rms_norm_job(void *ctx, ptrdiff_t chunk, int member) {
    Rowwise *c = ctx;
    (void)member;
    for (ptrdiff_t r = chunk * c->chunk; r < least((chunk + 1) * c->chunk, c->rows); r++)
        c->path->rms_norm(c->x + r * c->width, c->weight, c->eps, c->out + r * c->width, c->width);
}

/* rms_norm(x[N, D], weight[D] or None, eps, out[N, D]) */
static PyObject *op_rms_norm(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Rowwise c = {.path = path};
    if (!arity(n, 4)) return NULL;
    c.eps = (float)PyFloat_AsDouble(a[2]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *x = take(&args, a[0], "x", F32, 2, 0);
    Py_buffer *weight = x && a[1] != Py_None ? take(&args, a[1], "weight", F32, 1, 0) : NULL;
    Py_buffer *out = x && (weight || a[1] == Py_None) ? take(&args, a[3], "out", F32, 2, 1) : NULL;
    if (!out || !multiple("D", x->shape[1], 16) || (weight && !dim(weight, "weight", 0, x->shape[1])) ||
        !dims2(out, "out", x->shape[0], x->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.x = x->buf, c.weight = weight ? weight->buf : NULL, c.out = out->buf;
    c.rows = x->shape[0], c.width = x->shape[1], c.chunk = 1 + SMALL_CHUNK / c.width;
    Py_BEGIN_ALLOW_THREADS;
    team_run(rms_norm_job, &c, chunks_of(c.rows, c.chunk));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

static void silu_mul_job(void *ctx, ptrdiff_t chunk, int member) {
    Rowwise *c = ctx;
    ptrdiff_t at = chunk * SMALL_CHUNK;
    (void)member;
    c->path->silu_mul(c->x + at, c->weight + at, c->out + at, least(SMALL_CHUNK, c->width - at));
}

/* silu_mul(gate[N, D], up[N, D], out[N, D]) */
static PyObject *op_silu_mul(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Rowwise c = {.path = path};
    if (!arity(n, 3)) return NULL;
    Py_buffer *gate = take(&args, a[0], "gate", F32, 2, 0);
    Py_buffer *up = gate ? take(&args, a[1], "up", F32, 2, 0) : NULL;
    Py_buffer *out = up ? take(&args, a[2], "out", F32, 2, 1) : NULL;
    if (!out || !dims2(up, "up", gate->shape[0], gate->shape[1]) ||
        !dims2(out, "out", gate->shape[0], gate->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.x = gate->buf, c.weight = up->buf, c.out = out->buf, c.width = gate->len / 4;
    Py_BEGIN_ALLOW_THREADS;
    team_run(silu_mul_job, &c, chunks_of(c.width, SMALL_CHUNK));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

static void conv_job(void *ctx, ptrdiff_t chunk, int member) {
    Rowwise *c = ctx;
    ptrdiff_t c0 = chunk * c->chunk, c1 = least(c0 + c->chunk, c->width);
    (void)member;
    for (ptrdiff_t t = 0; t < c->rows; t++)
        c->path->conv(c->state, c->x + t * c->width, c->weight, c->taps, c->width, c0, c1, c->out + t * c->width);
}

/* conv_silu(state[taps-1, C] updated, x[T, C], weight[taps, C], out[T, C]) */
static PyObject *op_conv_silu(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Rowwise c = {.path = path, .chunk = 2048};
    if (!arity(n, 4)) return NULL;
    Py_buffer *state = take(&args, a[0], "state", F32, 2, 1);
    Py_buffer *x = state ? take(&args, a[1], "x", F32, 2, 0) : NULL;
    Py_buffer *weight = x ? take(&args, a[2], "weight", F32, 2, 0) : NULL;
    Py_buffer *out = weight ? take(&args, a[3], "out", F32, 2, 1) : NULL;
    if (!out || !multiple("C", x->shape[1], 16) || !dims2(weight, "weight", state->shape[0] + 1, x->shape[1]) ||
        !dim(state, "state", 1, x->shape[1]) || !dims2(out, "out", x->shape[0], x->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.x = x->buf, c.weight = weight->buf, c.state = state->buf, c.out = out->buf;
    c.rows = x->shape[0], c.width = x->shape[1], c.taps = weight->shape[0];
    Py_BEGIN_ALLOW_THREADS;
    team_run(conv_job, &c, chunks_of(c.width, c.chunk));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

typedef struct {
    const Path *path;
    const float *q, *k, *v;
    float *out, *scores;
    float scale;
    ptrdiff_t tokens, q_heads, kv_heads, capacity, n, dk, dv, pad, parts;
} Attention;

static void attend_job(void *ctx, ptrdiff_t unit, int member) {
    Attention *c = ctx;
    ptrdiff_t part = unit % c->parts, kv = unit / c->parts % c->kv_heads, t = unit / c->parts / c->kv_heads;
    ptrdiff_t group = c->q_heads / c->kv_heads, first = part * GQA_HEADS;
    ptrdiff_t row = t * c->q_heads + kv * group + first;
    c->path->attend(c->q + row * c->dk, least(GQA_HEADS, group - first), c->k + kv * c->capacity * c->dk,
                    c->v + kv * c->capacity * c->dv, c->n - c->tokens + t + 1, c->dk, c->dv, c->scale,
                    c->scores + member * GQA_HEADS * c->pad, c->pad, c->out + row * c->dv);
}

static int run_attend(Attention *c) {
    c->pad = chunks_of(c->n, 16) * 16;
    c->parts = chunks_of(c->q_heads / c->kv_heads, GQA_HEADS);
    /* For the largest team, as another thread may resize it meanwhile; untouched pages cost nothing. */
    c->scores = scratch(MAX_TEAM * GQA_HEADS * c->pad * 4);
    if (!c->scores) return 0;
    team_run(attend_job, c, c->tokens * c->kv_heads * c->parts);
    free(c->scores);
    return 1;
}

/* attend(q[T, Hq, Dk], k[Hkv, C, Dk], v[Hkv, C, Dv], n, scale, out[T, Hq, Dv]) */
static PyObject *op_attend(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Attention c = {.path = path};
    if (!arity(n, 6)) return NULL;
    c.n = PyNumber_AsSsize_t(a[3], PyExc_ValueError);
    c.scale = PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(a[4]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *q = take(&args, a[0], "q", F32, 3, 0);
    Py_buffer *k = q ? take(&args, a[1], "k", F32, 3, 0) : NULL;
    Py_buffer *v = k ? take(&args, a[2], "v", F32, 3, 0) : NULL;
    Py_buffer *out = v ? take(&args, a[5], "out", F32, 3, 1) : NULL;
    if (!out || !multiple("Dk", q->shape[2], 16) || !multiple("Dv", v->shape[2], 16) ||
        !multiple("k: heads", k->shape[0], 1) || !multiple("q: heads", q->shape[1], k->shape[0]) ||
        !dim(k, "k", 2, q->shape[2]) || !dim(v, "v", 0, k->shape[0]) || !dim(v, "v", 1, k->shape[1]) ||
        !dims3(out, "out", q->shape[0], q->shape[1], v->shape[2]) || !disjoint(&args))
        return args_done(&args, 0);
    if (c.n < q->shape[0] || c.n > k->shape[1]) {
        PyErr_Format(PyExc_ValueError, "n is %zd, expected %zd (queries) to %zd (cache rows)", (Py_ssize_t)c.n,
                     q->shape[0], k->shape[1]);
        return args_done(&args, 0);
    }
    c.q = q->buf, c.k = k->buf, c.v = v->buf, c.out = out->buf, c.tokens = q->shape[0], c.q_heads = q->shape[1];
    c.kv_heads = k->shape[0], c.capacity = k->shape[1], c.dk = q->shape[2], c.dv = v->shape[2];
    int ok;
    Py_BEGIN_ALLOW_THREADS;
    ok = run_attend(&c);
    Py_END_ALLOW_THREADS;
    if (!ok) PyErr_NoMemory();
    return args_done(&args, ok);
}

typedef struct {
    const Path *path;
    float *state, *out;
    const float *q, *k, *v, *decay, *beta;
    ptrdiff_t tokens, k_heads, v_heads, dk, dv;
} Delta;

static void delta_job(void *ctx, ptrdiff_t head, int member) {
    Delta *c = ctx;
    (void)member;
    for (ptrdiff_t t = 0; t < c->tokens; t++) {
        ptrdiff_t at = t * c->v_heads + head, key = t * c->k_heads + head / (c->v_heads / c->k_heads);
        c->path->delta(c->state + head * c->dv * c->dk, c->q + key * c->dk, c->k + key * c->dk, c->v + at * c->dv,
                       c->decay[at], c->beta[at], c->out + at * c->dv, c->dv, c->dk);
    }
}

/* gated_delta(state[Hv, Dv, Dk] updated, q[T, Hk, Dk], k[T, Hk, Dk], v[T, Hv, Dv], decay[T, Hv], beta[T, Hv],
 * out[T, Hv, Dv]) */
static PyObject *op_gated_delta(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    static const char *const name[] = {"state", "q", "k", "v", "decay", "beta", "out"};
    static const int ndim[] = {3, 3, 3, 3, 2, 2, 3};
    Args args = {.n = 0};
    Py_buffer *b[7];
    if (!arity(n, 7)) return NULL;
    for (int i = 0; i < 7; i++)
        if (!(b[i] = take(&args, a[i], name[i], F32, ndim[i], i == 0 || i == 6))) return args_done(&args, 0);
    const Py_ssize_t *state = b[0]->shape, *q = b[1]->shape;
    if (!multiple("Dk", state[2], 16) || !multiple("q: heads", q[1], 1) || !multiple("state: heads", state[0], q[1]) ||
        !dim(b[1], "q", 2, state[2]) || !dims3(b[2], "k", q[0], q[1], q[2]) ||
        !dims3(b[3], "v", q[0], state[0], state[1]) || !dims2(b[4], "decay", q[0], state[0]) ||
        !dims2(b[5], "beta", q[0], state[0]) || !dims3(b[6], "out", q[0], state[0], state[1]) || !disjoint(&args))
        return args_done(&args, 0);
    Delta c = {path,      b[0]->buf, b[6]->buf, b[1]->buf, b[2]->buf, b[3]->buf, b[4]->buf,
               b[5]->buf, q[0],      q[1],      state[0],  state[2],  state[1]};
    Py_BEGIN_ALLOW_THREADS;
    team_run(delta_job, &c, c.v_heads);
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

/* ---- control ------------------------------------------------------------------------------ */

typedef struct {
    const Path *path;
    const uint32_t *words;
    ptrdiff_t n;
    atomic_uint folded;
} Fold;

enum { FOLD_WORDS = 1 << 18 };

static void fold_job(void *ctx, ptrdiff_t chunk, int member) {
    Fold *c = ctx;
    ptrdiff_t at = chunk * FOLD_WORDS;
    (void)member;
    atomic_fetch_xor(&c->folded, c->path->fold(c->words + at, least(FOLD_WORDS, c->n - at)));
}

/* fold(words[N]) -> XOR of all words */
static PyObject *op_fold(PyObject *self, PyObject *object) {
    Args args = {.n = 0};
    Py_buffer *words = take(&args, object, "words", U32, 1, 0);
    if (!words) return args_done(&args, 0);
    Fold c = {.path = path, .words = words->buf, .n = words->shape[0]};
    Py_BEGIN_ALLOW_THREADS;
    team_run(fold_job, &c, chunks_of(c.n, FOLD_WORDS));
    Py_END_ALLOW_THREADS;
    args_done(&args, 0);
    return PyLong_FromUnsignedLong(atomic_load(&c.folded));
}

static PyObject *op_paths(PyObject *self, PyObject *none) {
    PyObject *list = PyList_New(usable_paths);
    for (int i = 0; list && i < usable_paths; i++) {
        PyObject *name = PyUnicode_FromString(paths[i]->name);
        if (!name) return Py_DECREF(list), NULL;
        PyList_SET_ITEM(list, i, name);
    }
    return list;
}

/* _force(name): for tests; the fastest path is chosen at import. */
static PyObject *op_force(PyObject *self, PyObject *object) {
    const char *name = PyUnicode_AsUTF8(object);
    if (!name) return NULL;
    for (int i = 0; i < usable_paths; i++) {
        if (strcmp(paths[i]->name, name)) continue;
        path = paths[i];
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "path '%s' does not run on this processor", name);
}

static PyObject *op_set_threads(PyObject *self, PyObject *object) {
    Py_ssize_t size = PyNumber_AsSsize_t(object, PyExc_ValueError);
    if (size == -1 && PyErr_Occurred()) return NULL;
    if (size < 1) return PyErr_Format(PyExc_ValueError, "threads: %zd, expected at least 1", size);
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&team.turn);
    atomic_store(&team.size, (int)least(size, MAX_TEAM));
    pthread_mutex_unlock(&team.turn);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *op_threads(PyObject *self, PyObject *none) { return PyLong_FromLong(atomic_load(&team.size)); }

#define FAST(name) {#name, (PyCFunction)(void (*)(void))op_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    FAST(qmv4),
    FAST(dequantize),
    FAST(expert_gate_up),
    FAST(expert_down_combine),
    FAST(rms_norm),
    FAST(silu_mul),
    FAST(conv_silu),
    FAST(attend),
    FAST(gated_delta),
    {"fold", op_fold, METH_O, NULL},
    {"paths", op_paths, METH_NOARGS, NULL},
    {"_force", op_force, METH_O, NULL},
    {"set_threads", op_set_threads, METH_O, NULL},
    {"threads", op_threads, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    find_paths();
    pthread_atfork(NULL, NULL, team_after_fork);
    return PyModule_Create(&module);
}
