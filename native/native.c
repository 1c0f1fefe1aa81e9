/* The native CPU kernels of moeflux_mlx: products with quantised and dense matrices, and the small operations.
 *
 * Every function takes C-contiguous buffers (of numpy, MLX, or a memoryview). While it holds the GIL, it checks their
 * dtypes, shapes, alignment, bounds and overlap. Then it releases the GIL, computes, and writes to `out`. The bits of a
 * row of x depend on the instruction set and, if activations are not rounded, on `alone`. They do not depend on the
 * number of threads, on the slots, or on the number and the contents of the other rows.
 *
 * moeflux_mlx/ops/native.py has the documented interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* since Linux 6.1; earlier kernels refuse it */
#endif
#endif

#include "paths.h"
#include "team.h"

/* Bytes of weights in one chunk of work. A chunk is large, because each start waits for memory, but small enough to
 * balance the threads. If several passes read it, it is half as large, so that the later passes find the weights in
 * the L2 cache. */
#define CHUNK_BYTES 262144
#define MAX_CHUNK_ROWS 512
#define SMALL_CHUNK 16384 /* floats in a chunk of an elementwise operation */
#define DENSE_BATCH 64   /* rows of x that are multiplied by one row of a dense matrix at a time */
#define GQA_HEADS 8      /* query heads that share one pass over keys and values */
#define MIN_BLOCK_ROWS 6 /* from so many rounded rows of x on, blocks of eight are faster than four at a time */
#define UNPACK_ROWS 32   /* rounded rows of x for which the codes of a matrix are unpacked once */
#define MAX_ARGS 13
#define GLOBAL_UNIT (1.0f / 2688) /* MLX stores a global scale as 448 * 6 times the factor of the scales */
#define MOST_EXPERTS 4096 /* the scores of a token's experts are on the stack */

/* Declares that after the last row of `m` the work continues with row `row` of `then`, whose rows have the same
 * size. This is only a hint for prefetching. */
static void set_next(Matrix *m, const Matrix *then, ptrdiff_t row) {
    m->next = then->w + row * then->words;
    m->next_s = (const char *)then->s + row * then->s_bytes;
    m->next_b = (const char *)then->b + row * then->b_bytes;
}

static const Path *path; /* the instruction set that operations use */

/* ---- arguments ---------------------------------------------------------------------------- */

typedef enum { FLOATS, WORDS, INTEGERS, SCALES, ROWS } Wanted;

typedef struct {
    Py_buffer view[MAX_ARGS];
    int writable[MAX_ARGS], n;
} Args;

static int matches(Wanted wanted, const Py_buffer *view) {
    const char *f = view->format ? view->format : "B";
    if (*f == '@' || *f == '=' || *f == '<') f++;
    if (wanted == SCALES && view->itemsize == 2) return !strcmp(f, "H") || !strcmp(f, "bfloat16") || !strcmp(f, "e");
    if ((wanted == SCALES || wanted == ROWS) && view->itemsize == 1) return !strcmp(f, "B");
    if (view->itemsize != 4) return 0;
    if (wanted == WORDS) return !strcmp(f, "I") || !strcmp(f, "L");
    if (wanted == INTEGERS) return !strcmp(f, "i") || !strcmp(f, "l");
    return !strcmp(f, "f");
}

/* Borrows the buffer of `object` until args_done(). Returns NULL with an exception if the buffer does not have the
 * wanted dtype, number of dimensions or alignment. */
static Py_buffer *take(Args *args, PyObject *object, const char *name, Wanted kind, int ndim, int writable) {
    static const char *const wanted[] = {"float32", "uint32", "int32",
                                         "bfloat16, uint16 (bfloat16 bits), float16, float32 or uint8",
                                         "float32 or uint8"};
    Py_buffer *view = &args->view[args->n];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)))
        return NULL;
    args->writable[args->n++] = writable;
    if (!matches(kind, view)) {
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

/* Returns 1 if dimension `axis` is `size`, otherwise 0 with an exception. */
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

/* Returns 1 if no written buffer overlaps another argument, otherwise 0 with an exception: threads write while
 * others read. */
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

static Kind kind_of(const Py_buffer *view) {
    const char *f = view->format ? view->format : "B";
    if (view->itemsize == 4) return F32;
    if (view->itemsize == 1) return E8M0; /* or E4M3_SCALE: shape_of() decides by the group's size */
    return f[strlen(f) - 1] == 'e' ? F16 : BF16;
}

/* Returns whether kernels read these codes with scales of a type of GGUF. `kind` is the dtype of scales, or of what
 * multiplies their codes. */
static int is_of_gguf(Py_ssize_t in, Py_ssize_t bits, Py_ssize_t group, Py_ssize_t source, Kind kind, int has_third) {
    if (kind != F16) return 0;
    const Table table = table_of(source);
    if (table.bits)
        return bits == table.bits && group == table.group && has_third == (table.entries > 0) &&
               (source == IQ4_NL || in % SUPER == 0);
    if (source == SYMMETRIC) return !has_third && group == 32 && (bits == 4 || bits == 5 || bits == 8);
    return source == NESTED && bits >= 2 && bits <= 6 && group == nested_group((int)bits) && in % SUPER == 0 &&
           has_third == (nested_supers((int)bits) > 0);
}

/* Describes a matrix of codes with rows of `in` values. Returns 0 with an exception if no kernel reads the form. */
static int shape_of(Matrix *m, Py_ssize_t in, Py_ssize_t bits, Py_ssize_t group, Py_ssize_t source, Kind kind,
                    int has_third) {
    if (kind >= E8M0) kind = group == 16 ? E4M3_SCALE : E8M0;
    int is_float = source == MLX && kind >= E8M0 && !has_third &&
                   ((bits == 4 && group == 16) || (group == 32 && (bits == 4 || bits == 8)));
    int is_affine = source == MLX && kind < E8M0 && has_third && bits > 0 && bits < 9 && bits != 7 &&
                    (group == 32 || group == 64 || group == 128);
    if (!is_float && !is_affine && !is_of_gguf(in, bits, group, source, kind, has_third)) {
        PyErr_Format(PyExc_ValueError, "%zd bits in groups of %zd %s: no kernel reads that form", bits, group,
                     has_third ? "with biases" : "without biases");
        return 0;
    }
    if (!multiple("row length", in, 64) || !multiple("row length", in, group)) return 0;
    *m = (Matrix){.in = in, .words = in / 32 * bits, .group = group, .groups = in / group, .bits = (int)bits,
                  .kind = kind, .source = (Source)source, .factor = 1};
    m->codes = source >= IQ4_NL ? TABLE : !is_float ? INTEGER : bits == 4 ? E2M1 : E4M3;
    m->is_plain = is_affine && bits == 4 && group == 64 && kind != F16;
    m->s_bytes = source == NESTED  ? in / SUPER * nested_bytes(m->bits)
                 : source > IQ4_NL ? in / SUPER * table_of(source).scale_bytes
                                   : m->groups * unit_of(kind);
    m->b_bytes = source == NESTED ? in / SUPER * nested_supers(m->bits) * 2 : is_affine ? m->s_bytes : 0;
    return 1;
}

/* Reads w, scales, biases (or None), bits, group and source of a matrix with rows of `in` values. NESTED scales are
 * bytes, and what multiplies them, if it is not among these bytes, stands in place of biases. So does a grid. */
static int take_codes(Args *args, PyObject *const *object, Py_ssize_t in, Matrix *m, Py_ssize_t *rows) {
    Py_buffer *w = take(args, object[0], "w", WORDS, 2, 0);
    Py_buffer *s = w ? take(args, object[1], "scales", SCALES, 2, 0) : NULL;
    Py_buffer *b = s && object[2] != Py_None ? take(args, object[2], "biases", SCALES, 2, 0) : NULL;
    if (!s || (!b && object[2] != Py_None)) return 0;
    Py_ssize_t form[3];
    for (int i = 0; i < 3; i++)
        if ((form[i] = PyLong_AsSsize_t(object[3 + i])) == -1 && PyErr_Occurred()) return 0;
    const Table table = table_of(form[2]);
    const int is_nested = form[2] == NESTED || form[2] > IQ4_NL;
    const Kind kind = !is_nested ? kind_of(s) : b && !table.bits ? kind_of(b) : F16;
    if (is_nested && s->itemsize != 1) return PyErr_SetString(PyExc_TypeError, "scales: expected uint8"), 0;
    if (!shape_of(m, in, form[0], form[1], form[2], kind, b != NULL)) return 0;
    *rows = m->rows = w->shape[0];
    if (!dim(w, "w", 1, m->words) || !dims2(s, "scales", *rows, m->s_bytes / s->itemsize)) return 0;
    if (b && table.bits) {
        if (b->itemsize != 1) return PyErr_SetString(PyExc_TypeError, "grid: expected uint8"), 0;
        if (!dims2(b, "grid", table.entries, table.values)) return 0;
    } else if (b && !dims2(b, "biases", *rows, m->b_bytes / b->itemsize)) return 0;
    if (b && !table.bits && kind_of(b) != m->kind) {
        PyErr_SetString(PyExc_TypeError, "scales and biases have different dtypes");
        return 0;
    }
    m->w = w->buf, m->s = s->buf, m->b = b ? b->buf : NULL;
    return 1;
}

/* As take_codes. If scales is None, w is a dense float32 matrix. */
static int take_matrix(Args *args, PyObject *const *object, Py_ssize_t in, Matrix *m, Py_ssize_t *rows) {
    if (object[1] != Py_None) return take_codes(args, object, in, m, rows);
    Py_buffer *w = take(args, object[0], "w", FLOATS, 2, 0);
    if (!w || !multiple("row length", in, 16) || !dim(w, "w", 1, in)) return 0;
    *rows = w->shape[0];
    *m = (Matrix){.w = w->buf, .in = in, .rows = *rows, .words = in, .group = in, .groups = 1, .bits = 32, .kind = F32,
                  .factor = 1};
    return 1;
}

/* ---- shared pieces of work ---------------------------------------------------------------- */

static void *scratch(ptrdiff_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 64) ? NULL : memory;
}

/* Returns the number of rows of a matrix in a chunk of work, if `batch` rows of x are multiplied by them: about
 * CHUNK_BYTES, or less if threads would otherwise be idle. */
static ptrdiff_t chunk_rows(ptrdiff_t rows, ptrdiff_t row_bytes, ptrdiff_t batch) {
    ptrdiff_t fit = (batch <= 4 ? CHUNK_BYTES : CHUNK_BYTES / 2) / row_bytes;
    ptrdiff_t fair = rows / (4 * (ptrdiff_t)atomic_load(&team.size)), floor = CHUNK_BYTES / 16 / row_bytes;
    ptrdiff_t chunk = fair < fit ? fair : fit;
    if (chunk < floor) chunk = floor;
    chunk = (chunk + 7) / 8 * 8;
    return chunk < 8 ? 8 : chunk > MAX_CHUNK_ROWS ? MAX_CHUNK_ROWS : chunk;
}

/* How rows of x are multiplied by a matrix. FLOATING and STEP use float activations: STEP the kernel for the rows of
 * a step, FLOATING the other one. ROUNDED and BLOCKS use rounded activations: ROUNDED up to four rows at a time,
 * BLOCKS eight. */
typedef enum { FLOATING, STEP, ROUNDED, BLOCKS } Method;

/* Returns the number of byte planes if activations are rounded to `bits` bits for `m`; 0: they are not rounded. */
static int planes_of(const Path *p, const Matrix *m, int bits) {
    return bits < 24 && m->bits < 32 && p->rounded && form_of(m) >= 0 ? bits / 8 : 0;
}

/* Returns the number of 32-bit words of a row of activations that is packed for `m`. */
static ptrdiff_t packed_words(const Path *p, const Matrix *m, int planes) {
    if (planes) return m->in / 4 * planes + 2 * rounded_groups(m);
    if (!m->is_plain && p->plane_floats && p->plane_floats(m)) return p->plane_floats(m);
    if (m->codes == E4M3 || m->codes == TABLE) return m->in;
    ptrdiff_t codes = m->codes == E2M1 || m->is_plain ? 8 : BLOCK_CODES(m->bits);
    return ceil_div(m->in / codes, p->width) * (codes + block_parts(m)) * p->width;
}

typedef struct {
    const Path *path;
    const Matrix *m;
    const float *x;
    float *packed;
    int step; /* packs for the kernel of a step */
    int planes;
} Pack;

static void pack_job(void *ctx, ptrdiff_t row, int member) {
    Pack *c = ctx;
    const float *x = c->x + row * c->m->in;
    float *out = c->packed + row * packed_words(c->path, c->m, c->planes);
    (void)member;
    if (c->planes) c->path->rounded->pack(c->m, x, c->planes, (uint32_t *)out);
    else if (!c->m->is_plain) c->path->pack_blocks(c->m, x, out);
    else (c->step ? c->path->step_pack : c->path->pack)(x, out, c->m->in);
}

/* The job that joins packed rows to blocks of eight. */
typedef struct {
    const float **x;  /* the packed rows; the first one of each block is replaced by the block */
    ptrdiff_t words;  /* words of a packed row */
    ptrdiff_t *start; /* the first row of each block, and the number of its rows */
    uint32_t *out;
} Blocks;

static void block_job(void *ctx, ptrdiff_t block, int member) {
    static const uint32_t none;
    Blocks *c = ctx;
    const float **x = c->x + c->start[2 * block];
    uint32_t *out = c->out + block * c->words * 8;
    const uint32_t *row[8];
    int stride[8];
    (void)member;
    for (int i = 0; i < 8; i++) {
        stride[i] = i < c->start[2 * block + 1];
        row[i] = stride[i] ? (const uint32_t *)x[i] : &none;
    }
    for (ptrdiff_t w = 0; w < c->words; w++)
        for (int i = 0; i < 8; i++) out[8 * w + i] = row[i][w * stride[i]];
    x[0] = (const float *)out;
}

/* Joins packed rows to blocks. Rows first[s] to first[s + 1] - 1 are multiplied by the same matrix; if they are
 * fewer than MIN_BLOCK_ROWS, they stay single. *memory gets the memory of the blocks. Returns 0 if memory is short. */
static int make_blocks(ptrdiff_t sets, const ptrdiff_t *first, const float **x, ptrdiff_t words, uint32_t **memory) {
    Blocks c = {.x = x, .words = words};
    ptrdiff_t n = 0, most = first[sets] / 8 + min(sets, first[sets] / MIN_BLOCK_ROWS);
    *memory = NULL;
    if (!most) return 1;
    c.start = scratch(2 * most * (ptrdiff_t)sizeof *c.start);
    c.out = *memory = scratch(most * words * 32);
    if (c.start && c.out) {
        for (ptrdiff_t s = 0; s < sets; s++)
            for (ptrdiff_t at = first[s]; first[s + 1] - first[s] >= MIN_BLOCK_ROWS && at < first[s + 1]; at += 8, n++)
                c.start[2 * n] = at, c.start[2 * n + 1] = min(8, first[s + 1] - at);
        team_run(block_job, &c, n);
    }
    int ok = c.start && c.out;
    free(c.start);
    return ok;
}

static Method method_of(int planes, int step, ptrdiff_t rows) {
    return planes ? rows >= MIN_BLOCK_ROWS ? BLOCKS : ROUNDED : step ? STEP : FLOATING;
}

/* Returns the bytes that one thread needs to unpack rows of `m`, if `rows` rows of x are enough for blocks,
 * otherwise 0. */
static ptrdiff_t workspace_bytes(const Matrix *m, int planes, ptrdiff_t rows) {
    return planes && rows >= MIN_BLOCK_ROWS ? ceil_div(8 * (m->in + 64) + 16 * rounded_groups(m) * 4, 64) * 64 : 0;
}

/* ---- linear, dequantize ------------------------------------------------------------------- */

typedef struct {
    const Path *path;
    Matrix m;
    ptrdiff_t rows, chunk, batch;
    const float **x;
    float **y; /* the start of each output row */
    int step, planes;
    char *workspace; /* memory to unpack rows, for each thread */
    const float *norm, *residual; /* [in] and [batch, rows], or NULL */
    float eps, *out;
} Product;

/* Returns how many of the `left` remaining rows of x are multiplied at a time: up to UNPACK_ROWS in blocks, otherwise
 * up to 4. In floats, 5 rows are taken as 3 and 2, because a single row is slow. */
static ptrdiff_t rows_at_once(Method method, ptrdiff_t left) {
    if (method == BLOCKS) return min(UNPACK_ROWS, left);
    return left == 5 && method == FLOATING ? 3 : min(4, left);
}

/* Multiplies rows r0 to r1-1 of m by n packed rows of x. */
static void multiply(const Path *path, Method method, int planes, const Matrix *m, ptrdiff_t r0, ptrdiff_t r1,
                     ptrdiff_t n, const float *const *x, void *workspace, float *const *y) {
    if (method == ROUNDED) path->rounded->rows[form_of(m)][planes - 1](m, r0, r1, n, (const uint32_t *const *)x, y);
    else if (method == BLOCKS)
        path->rounded->tiles[form_of(m)][planes - 1](m, r0, r1, n, (const uint32_t *const *)x, workspace, y);
    else if (!m->is_plain) path->rows_of_blocks(m, r0, r1, n, x, y);
    else if (method == STEP) path->step_rows(m, r0, r1, n, x, y);
    else path->rows(m, r0, r1, n, x, y);
    for (ptrdiff_t t = 0; m->factor != 1 && t < n; t++)
        for (ptrdiff_t r = 0; r < r1 - r0; r++) y[t][r] *= m->factor;
}

/* Adds the residual to columns r0 to r1-1 of the result. */
static void add_residual(const Product *c, ptrdiff_t r0, ptrdiff_t r1) {
    for (ptrdiff_t t = 0; c->residual && t < c->batch; t++)
        for (ptrdiff_t r = r0; r < r1; r++) c->y[t][r] += c->residual[t * c->rows + r];
}

static void product_job(void *ctx, ptrdiff_t chunk, int member) {
    Product *c = ctx;
    ptrdiff_t r0 = chunk * c->chunk, r1 = min(r0 + c->chunk, c->rows);
    const Method method = method_of(c->planes, c->step, c->batch);
    void *workspace = c->workspace + member * workspace_bytes(&c->m, c->planes, c->batch);
    for (ptrdiff_t t = 0, n; t < c->batch; t += n) {
        float *y[UNPACK_ROWS];
        n = rows_at_once(method, c->batch - t);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[t + i] + r0;
        multiply(c->path, method, c->planes, &c->m, r0, r1, n, c->x + t, workspace, y);
    }
    add_residual(c, r0, r1);
}

static void dense_job(void *ctx, ptrdiff_t chunk, int member) {
    Product *c = ctx;
    ptrdiff_t r0 = chunk * c->chunk, r1 = min(r0 + c->chunk, c->rows);
    float *y[DENSE_BATCH];
    for (ptrdiff_t t = 0; t < c->batch; t += DENSE_BATCH) {
        ptrdiff_t n = min(DENSE_BATCH, c->batch - t);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[t + i] + r0;
        c->path->dense_rows(&c->m, r0, r1, n, c->x + t, y);
    }
    add_residual(c, r0, r1);
    (void)member;
}

typedef struct {
    const Path *path;
    const float *x, *weight, *state;
    float *out, *next;
    float eps;
    ptrdiff_t rows, width, chunk, taps;
} Rowwise;

static void rms_norm_job(void *ctx, ptrdiff_t chunk, int member) {
    Rowwise *c = ctx;
    (void)member;
    for (ptrdiff_t r = chunk * c->chunk; r < min((chunk + 1) * c->chunk, c->rows); r++)
        c->path->rms_norm(c->x + r * c->width, c->weight, c->eps, c->out + r * c->width, c->width);
}

static void run_rms_norm(Rowwise *c) {
    c->chunk = 1 + SMALL_CHUNK / c->width;
    team_run(rms_norm_job, c, ceil_div(c->rows, c->chunk));
}

static int multiply_rows(Product *c, const float *x) {
    int is_packed = c->m.bits < 32;
    ptrdiff_t size = is_packed ? packed_words(c->path, &c->m, c->planes) : c->m.in, ends[2] = {0, c->batch};
    float *memory = is_packed ? scratch(c->batch * size * 4) : NULL;
    uint32_t *blocks = NULL;
    c->x = scratch(c->batch * (ptrdiff_t)sizeof *c->x);
    c->y = scratch(c->batch * (ptrdiff_t)sizeof *c->y);
    c->workspace = scratch(MAX_TEAM * workspace_bytes(&c->m, c->planes, c->batch));
    int ok = (memory || !is_packed) && c->x && c->y && c->workspace;
    if (ok) {
        for (ptrdiff_t t = 0; t < c->batch; t++)
            c->x[t] = (is_packed ? memory : x) + t * size, c->y[t] = c->out + t * c->rows;
        if (is_packed) team_run(pack_job, &(Pack){c->path, &c->m, x, memory, c->step, c->planes}, c->batch);
        ok = !c->planes || make_blocks(1, ends, c->x, size, &blocks);
    }
    if (ok) team_run(is_packed ? product_job : dense_job, c, ceil_div(c->rows, c->chunk));
    free(memory), free(blocks), free(c->x), free(c->y), free(c->workspace);
    return ok;
}

static int run_product(Product *c, const float *x) {
    if (!c->norm) return multiply_rows(c, x);
    float *normed = scratch(c->batch * c->m.in * 4);
    if (normed) run_rms_norm(&(Rowwise){.path = c->path, .x = x, .weight = c->norm, .out = normed, .eps = c->eps,
                                        .rows = c->batch, .width = c->m.in});
    int ok = normed && multiply_rows(c, normed);
    free(normed);
    return ok;
}

/* Reads the number of bits of activations: 8, 16, or 24 if they are not rounded. Returns 0 with an exception for any
 * other number. */
static int take_bits(PyObject *object) {
    Py_ssize_t bits = PyNumber_AsSsize_t(object, PyExc_ValueError);
    if (PyErr_Occurred()) return 0;
    if (bits == 8 || bits == 16 || bits == 24) return (int)bits;
    PyErr_Format(PyExc_ValueError, "activations of %zd bits, expected 8, 16 or 24", bits);
    return 0;
}

/* Reads `alone`: whether each row must have the bits that it has in a call by itself. *step is then set if this
 * instruction set has a kernel for the rows of a step. Returns 0 with an exception. */
static int take_alone(PyObject *object, const Path *p, int *step) {
    const int alone = PyObject_IsTrue(object);
    *step = alone > 0 && p->step_rows;
    return alone >= 0;
}

/* linear(x[T, I], w[O, I*bits/32], scales[O, I/group], biases or None, bits, group, source, activations, norm[I] or
 * None, eps, residual[T, O] or None, alone, out[T, O]). If w[O, I] is dense, scales and biases are None, and bits and
 * group are 0. */
static PyObject *op_linear(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Product c = {.path = path};
    int bits = arity(n, 13) ? take_bits(a[7]) : 0;
    if (!bits || !take_alone(a[11], path, &c.step)) return NULL;
    c.eps = (float)PyFloat_AsDouble(a[9]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *x = take(&args, a[0], "x", FLOATS, 2, 0), *norm = NULL, *residual = NULL;
    int ok = x && take_matrix(&args, a + 1, x->shape[1], &c.m, &c.rows);
    if (ok && a[8] != Py_None) ok = (norm = take(&args, a[8], "norm", FLOATS, 1, 0)) && dim(norm, "norm", 0, c.m.in);
    if (ok && a[10] != Py_None)
        ok = (residual = take(&args, a[10], "residual", FLOATS, 2, 0)) &&
             dims2(residual, "residual", x->shape[0], c.rows);
    Py_buffer *out = ok ? take(&args, a[12], "out", FLOATS, 2, 1) : NULL;
    if (!out || !dims2(out, "out", x->shape[0], c.rows) || !disjoint(&args)) return args_done(&args, 0);
    c.norm = norm ? norm->buf : NULL, c.residual = residual ? residual->buf : NULL;
    c.planes = planes_of(path, &c.m, bits);
    c.batch = x->shape[0], c.out = out->buf, c.chunk = chunk_rows(c.rows, c.m.words * 4, c.batch);
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
    c->path->dequantize(&c->m, r0, min(r0 + c->chunk, c->rows), c->out + r0 * c->m.in);
}

/* dequantize(w[O, I*bits/32], scales[O, I/group], biases or None, bits, group, source, out[O, I]) */
static PyObject *op_dequantize(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Product c = {.path = path};
    if (!arity(n, 7)) return NULL;
    Py_buffer *out = take(&args, a[6], "out", FLOATS, 2, 1);
    if (!out || !take_codes(&args, a, out->shape[1], &c.m, &c.rows) || !dim(out, "out", 0, c.rows) || !disjoint(&args))
        return args_done(&args, 0);
    c.out = out->buf, c.chunk = chunk_rows(c.rows, c.m.words * 4, 1);
    Py_BEGIN_ALLOW_THREADS;
    team_run(dequantize_job, &c, ceil_div(c.rows, c.chunk));
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
    ptrdiff_t stride;             /* words of a record */
    ptrdiff_t place[2][3];        /* the first words of codes, scales and biases: of gate and up, or of down */
    ptrdiff_t bias[2];            /* the first word of the bias that each product adds; -1: none */
    Kind bias_kind;
    Joining activation;           /* how gate and up are combined */
    int interleaved;              /* rows of gate and up alternate; the first half of them is in gate's place */
    Matrix form;                  /* one of these matrices, without its pointers */
    ptrdiff_t hidden, inner;      /* H, I */
    ptrdiff_t tokens, top_k, pairs, groups, chunk, per_group;
    ptrdiff_t most;               /* the most pairs that share an expert */
    Pair *pair;                   /* sorted by slot, so pairs that share an expert are neighbours */
    ptrdiff_t *group;             /* the first pair of each expert, and the end */
    const float **x;              /* the packed input of each sorted pair */
    float **y;                    /* the output row of each sorted pair */
    const float **by_token;       /* the output rows in the order t * K + k */
    const float *weight, *mid, *shared;
    float *out;
    int step;                     /* the kernel for the rows of a step is used */
    int bits, planes;             /* bits and byte planes of activations */
    char *workspace;                   /* memory to unpack rows, for each thread */
} Experts;

/* Returns matrix `which` of the record in `slot`. */
static Matrix projection(const Experts *c, ptrdiff_t slot, int which) {
    const uint32_t *record = c->blob + slot * c->stride;
    const ptrdiff_t *at = c->place[which];
    Matrix m = c->form;
    m.w = record + at[0], m.s = record + at[1], m.b = m.b_bytes || m.codes == TABLE ? record + at[2] : NULL;
    if ((m.codes == E2M1 || m.codes == E4M3) && at[2] >= 0) m.factor = *(const float *)(record + at[2]) * GLOBAL_UNIT;
    return m;
}

static int by_slot(const void *a, const void *b) {
    const Pair *p = a, *q = b;
    if (p->slot != q->slot) return p->slot < q->slot ? -1 : 1;
    return p->index < q->index ? -1 : p->index > q->index;
}

/* Checks the slots and copies them, so that nobody can change them later. Then groups equal slots. */
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
    for (ptrdiff_t g = 0; g < c->groups; g++)
        if (c->group[g + 1] - c->group[g] > c->most) c->most = c->group[g + 1] - c->group[g];
    return 1;
}

static void plan_free(Experts *c) { free(c->pair), free(c->group), free(c->x), free(c->y), free(c->by_token); }

/* Reads where `count` matrices are in a record. `places` is a tuple. For each matrix it has the first words of
 * codes, of scales, and of biases or a global scale; if a matrix has neither, the third number repeats the second.
 * Then follow bits, group, the Source and the Kind of scales. Then follow the first word of the bias that each product adds
 * (-1: none), and the Kind of these biases. Everything must be inside a record. */
static int take_places(PyObject *places, int count, ptrdiff_t rows, ptrdiff_t in, Experts *c) {
    Py_ssize_t number[13];
    const int numbers = 4 * count + 5;
    if (!PyTuple_Check(places) || PyTuple_GET_SIZE(places) != numbers) {
        PyErr_Format(PyExc_TypeError, "places: expected a tuple of %d integers", numbers);
        return 0;
    }
    for (int i = 0; i < numbers; i++) {
        number[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i));
        if (number[i] == -1 && PyErr_Occurred()) return 0;
    }
    const Py_ssize_t *form = number + 3 * count, *bias = form + 4;
    if (form[3] < BF16 || form[3] > E4M3_SCALE) return PyErr_Format(PyExc_ValueError, "scales of kind %zd", form[3]), 0;
    if (bias[count] < BF16 || bias[count] > F32)
        return PyErr_Format(PyExc_ValueError, "biases of kind %zd", bias[count]), 0;
    c->bias_kind = (Kind)bias[count];
    const int has_third = form[2] == MLX ? form[3] < E8M0 : number[2] != number[1];
    if (!shape_of(&c->form, in, form[0], form[1], form[2], (Kind)form[3], has_third)) return 0;
    c->form.rows = rows, c->planes = planes_of(c->path, &c->form, c->bits);
    /* The division comes first, because rows * in of a hostile call may overflow. */
    int fits = rows <= c->stride / c->form.words;
    for (int i = 0; i < 3 * count; i++) {
        ptrdiff_t words = 0, at = number[i];
        if (fits) words = i % 3 ? ceil_div(rows * (i % 3 == 1 ? c->form.s_bytes : c->form.b_bytes), 4) : rows * c->form.words;
        if (i % 3 == 2 && c->form.codes == TABLE) {
            const Table table = table_of(c->form.source);
            words = ceil_div(table.entries * table.values, 4), fits = fits && at >= 0;
        } else if (i % 3 == 2 && c->form.codes) {
            words = 1, at = number[i] == number[i - 1] || c->form.kind == E8M0 ? -1 : at;
            fits = fits && at >= -1;
        } else fits = fits && at >= 0;
        fits = fits && at <= c->stride - words;
        c->place[i / 3][i % 3] = at;
    }
    for (int i = 0; i < count; i++) {
        fits = fits && bias[i] >= -1 && bias[i] <= c->stride - ceil_div(rows * unit_of(c->bias_kind), 4);
        c->bias[i] = bias[i];
    }
    if (!fits)
        PyErr_Format(PyExc_ValueError, "blob: records of %zd words cannot hold H=%zd, I=%zd", (Py_ssize_t)c->stride,
                     (Py_ssize_t)c->hidden, (Py_ssize_t)c->inner);
    return fits;
}

/* Reads blob, slots and places. `count` is 2 for gate and up, and 1 for down. */
static int take_experts(Args *args, PyObject *blob, PyObject *slots, PyObject *places, int count, Experts *c) {
    if (!multiple("H", c->hidden, 64) || !multiple("I", c->inner, 64)) return 0;
    Py_buffer *b = take(args, blob, "blob", WORDS, 2, 0);
    Py_buffer *s = b ? take(args, slots, "slots", INTEGERS, 2, 0) : NULL;
    if (!s) return 0;
    c->blob = b->buf, c->stride = b->shape[1];
    ptrdiff_t rows = count == 2 ? c->inner : c->hidden, in = count == 2 ? c->hidden : c->inner;
    return take_places(places, count, rows, in, c) && plan(c, s, b->shape[0]);
}

/* Adds the bias of matrix `which`, if it has one, to rows r0 to r1-1 of n products. */
static void add_bias(const Experts *c, ptrdiff_t slot, int which, ptrdiff_t r0, ptrdiff_t r1, ptrdiff_t n,
                     float *const *y) {
    if (c->bias[which] < 0) return;
    const uint32_t *bias = c->blob + slot * c->stride + c->bias[which];
    for (ptrdiff_t i = 0; i < n; i++) c->path->add(bias, r0, r1 - r0, c->bias_kind, y[i]);
}

/* Computes columns r0 to r1-1 of act for the n pairs from p on, if rows of gate and up alternate. */
static void gate_up_interleaved(const Experts *c, Method method, ptrdiff_t slot, ptrdiff_t r0, ptrdiff_t r1,
                                ptrdiff_t p, ptrdiff_t n, void *workspace) {
    float both[UNPACK_ROWS][MAX_CHUNK_ROWS], gate[MAX_CHUNK_ROWS / 2], up[MAX_CHUNK_ROWS / 2], *y[UNPACK_ROWS];
    for (int half = 0; half < 2; half++) {
        const ptrdiff_t begin = half ? c->inner : 0, from = 2 * r0 > begin ? 2 * r0 : begin;
        const ptrdiff_t to = min(2 * r1, begin + c->inner);
        if (from >= to) continue;
        Matrix m = projection(c, slot, half);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = both[i] + from - 2 * r0;
        multiply(c->path, method, c->planes, &m, from - begin, to - begin, n, c->x + p, workspace, y);
        add_bias(c, slot, half, from - begin, to - begin, n, y);
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t r = 0; r < r1 - r0; r++) gate[r] = both[i][2 * r], up[r] = both[i][2 * r + 1];
        c->path->activate(&c->activation, gate, up, c->y[p + i] + r0, r1 - r0);
    }
}

static void gate_up_job(void *ctx, ptrdiff_t chunk, int member) {
    Experts *c = ctx;
    ptrdiff_t g = chunk / c->per_group, r0 = chunk % c->per_group * c->chunk, r1 = min(r0 + c->chunk, c->inner);
    ptrdiff_t slot = c->pair[c->group[g]].slot;
    Matrix gate = projection(c, slot, 0), up = projection(c, slot, 1);
    float other[UNPACK_ROWS][MAX_CHUNK_ROWS];
    const int is_single = c->place[0][0] == c->place[1][0]; /* there is no gate: up is read from gate's place */
    Matrix *last = is_single ? &gate : &up;
    const Method method = method_of(c->planes, c->step, c->group[g + 1] - c->group[g]);
    void *workspace = c->workspace + member * workspace_bytes(&c->form, c->planes, c->most);
    if (!is_single) set_next(&gate, &up, r0);
    if (r1 < c->inner) set_next(last, &gate, r1);
    else if (g + 1 < c->groups) {
        Matrix then = projection(c, c->pair[c->group[g + 1]].slot, 0);
        set_next(last, &then, 0);
    }
    for (ptrdiff_t p = c->group[g], n; p < c->group[g + 1]; p += n) {
        float *y[UNPACK_ROWS], *u[UNPACK_ROWS];
        n = rows_at_once(method, c->group[g + 1] - p);
        if (c->interleaved) {
            gate_up_interleaved(c, method, slot, r0, r1, p, n, workspace);
            continue;
        }
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[p + i] + r0, u[i] = is_single ? y[i] : other[i];
        multiply(c->path, method, c->planes, &gate, r0, r1, n, c->x + p, workspace, y);
        if (!is_single) multiply(c->path, method, c->planes, &up, r0, r1, n, c->x + p, workspace, u);
        add_bias(c, slot, 0, r0, r1, n, y);
        if (!is_single) add_bias(c, slot, 1, r0, r1, n, u);
        for (ptrdiff_t i = 0; i < n; i++) c->path->activate(&c->activation, y[i], u[i], y[i], r1 - r0);
    }
}

/* Packs `rows` rows of x and calls `job` for each chunk. c->x has the packed row of each pair. */
static int run_experts(Experts *c, const float *x, float *packed, ptrdiff_t rows, Job *job, ptrdiff_t chunks) {
    uint32_t *blocks = NULL;
    team_run(pack_job, &(Pack){c->path, &c->form, x, packed, c->step, c->planes}, rows);
    c->workspace = scratch(MAX_TEAM * workspace_bytes(&c->form, c->planes, c->most));
    int ok = c->workspace != NULL;
    if (c->planes)
        ok = ok && make_blocks(c->groups, c->group, c->x, packed_words(c->path, &c->form, c->planes), &blocks);
    if (ok) team_run(job, c, chunks);
    free(blocks), free(c->workspace);
    return ok;
}

static int run_gate_up(Experts *c, const float *x) {
    ptrdiff_t size = packed_words(c->path, &c->form, c->planes);
    float *packed = scratch(c->tokens * size * 4);
    if (!packed) return 0;
    for (ptrdiff_t p = 0; p < c->pairs; p++) {
        c->x[p] = packed + c->pair[p].index / c->top_k * size;
        c->y[p] = c->out + c->pair[p].index * c->inner;
    }
    c->chunk = chunk_rows(c->inner * c->groups, c->form.words * 4, c->tokens);
    if (c->interleaved) c->chunk = min(c->chunk, MAX_CHUNK_ROWS / 2);
    c->per_group = ceil_div(c->inner, c->chunk);
    int ok = run_experts(c, x, packed, c->tokens, gate_up_job, c->groups * c->per_group);
    free(packed);
    return ok;
}

/* Reads how gate and up are combined: the form's number, the limit, and that of gate. Returns 0 with an exception. */
static int take_activation(PyObject *const *a, Joining *activation) {
    Py_ssize_t number = PyNumber_AsSsize_t(a[0], PyExc_ValueError);
    activation->limit = PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(a[1]);
    activation->gate_limit = PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(a[2]);
    if (PyErr_Occurred()) return 0;
    if (number < SILU || number > SITU) return PyErr_Format(PyExc_ValueError, "activation %zd", number), 0;
    activation->form = (Activation)number;
    return 1;
}

/* expert_gate_up(x[T, H], blob[S, words], slots[T, K], places, bits of activations, alone, activation, limit,
 * gate_limit, interleaved, out[T, K, I]). places are those of gate and up, which may be the same matrix. */
static PyObject *op_expert_gate_up(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Experts c = {.path = path};
    int ok = 0;
    if (!arity(n, 11) || !(c.bits = take_bits(a[4])) || !take_alone(a[5], path, &c.step)) return NULL;
    if (!take_activation(a + 6, &c.activation)) return NULL;
    if ((c.interleaved = PyObject_IsTrue(a[9])) < 0) return NULL;
    Py_buffer *x = take(&args, a[0], "x", FLOATS, 2, 0);
    Py_buffer *out = x ? take(&args, a[10], "out", FLOATS, 3, 1) : NULL;
    if (!out) return args_done(&args, 0);
    c.hidden = x->shape[1], c.inner = out->shape[2], c.out = out->buf;
    if (take_experts(&args, a[1], a[2], a[3], 2, &c) && dim(x, "x", 0, c.tokens) &&
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
    ptrdiff_t g = chunk / c->per_group, r0 = chunk % c->per_group * c->chunk, r1 = min(r0 + c->chunk, c->hidden);
    void *workspace = c->workspace + member * workspace_bytes(&c->form, c->planes, c->most);
    const Method method = method_of(c->planes, c->step, c->group[g + 1] - c->group[g]);
    const ptrdiff_t slot = c->pair[c->group[g]].slot;
    Matrix down = projection(c, slot, 0);
    if (r1 == c->hidden && g + 1 < c->groups) {
        Matrix then = projection(c, c->pair[c->group[g + 1]].slot, 0);
        set_next(&down, &then, 0);
    }
    for (ptrdiff_t p = c->group[g], n; p < c->group[g + 1]; p += n) {
        float *y[UNPACK_ROWS];
        n = rows_at_once(method, c->group[g + 1] - p);
        for (ptrdiff_t i = 0; i < n; i++) y[i] = c->y[p + i] + r0;
        multiply(c->path, method, c->planes, &down, r0, r1, n, c->x + p, workspace, y);
        add_bias(c, slot, 0, r0, r1, n, y);
    }
}

typedef struct {
    const Path *path;
    const float **rows; /* in the order t * K + k */
    const float *weight, *mid, *shared;
    float *out;
    ptrdiff_t tokens, top_k, hidden;
} Combine;

static void combine_job(void *ctx, ptrdiff_t t, int member) {
    Combine *c = ctx;
    ptrdiff_t at = t * c->hidden;
    (void)member;
    c->path->combine(c->rows + t * c->top_k, c->weight + t * c->top_k, c->top_k, c->mid + at,
                     c->shared ? c->shared + at : NULL, c->out + at, 0, c->hidden);
}

static int run_down(Experts *c, const float *act) {
    ptrdiff_t size = packed_words(c->path, &c->form, c->planes);
    float *packed = scratch(c->pairs * size * 4), *rows = scratch(c->pairs * c->hidden * 4);
    int ok = packed && rows;
    if (ok) {
        for (ptrdiff_t p = 0; p < c->pairs; p++) {
            c->x[p] = packed + c->pair[p].index * size;
            c->y[p] = rows + c->pair[p].index * c->hidden;
            c->by_token[p] = rows + p * c->hidden;
        }
        c->chunk = chunk_rows(c->hidden * c->groups, c->form.words * 4, c->tokens);
        c->per_group = ceil_div(c->hidden, c->chunk);
        ok = run_experts(c, act, packed, c->pairs, down_job, c->groups * c->per_group);
        if (ok) team_run(combine_job, &(Combine){c->path, c->by_token, c->weight, c->mid, c->shared, c->out, c->tokens,
                                                 c->top_k, c->hidden}, c->tokens);
    }
    free(packed), free(rows);
    return ok;
}

/* expert_down_combine(act[T, K, I], blob[S, words], slots[T, K], places of down, bits of activations, alone,
 * weights[T, K], mid[T, H], shared[T, H] or None, out[T, H]) */
static PyObject *op_expert_down_combine(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Experts c = {.path = path};
    int ok = 0;
    if (!arity(n, 10) || !(c.bits = take_bits(a[4])) || !take_alone(a[5], path, &c.step)) return NULL;
    Py_buffer *act = take(&args, a[0], "act", FLOATS, 3, 0);
    Py_buffer *weights = act ? take(&args, a[6], "weights", FLOATS, 2, 0) : NULL;
    Py_buffer *mid = weights ? take(&args, a[7], "mid", FLOATS, 2, 0) : NULL;
    Py_buffer *shared = mid && a[8] != Py_None ? take(&args, a[8], "shared", FLOATS, 2, 0) : NULL;
    Py_buffer *out = mid && (shared || a[8] == Py_None) ? take(&args, a[9], "out", FLOATS, 2, 1) : NULL;
    if (!out) return args_done(&args, 0);
    c.hidden = mid->shape[1], c.inner = act->shape[2], c.out = out->buf;
    c.weight = weights->buf, c.mid = mid->buf, c.shared = shared ? shared->buf : NULL;
    if (take_experts(&args, a[1], a[2], a[3], 1, &c) && dims3(act, "act", c.tokens, c.top_k, c.inner) &&
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

/* Returns the row of y that each (t, k) of `where` names, or NULL with an exception if an index is out of range. */
static const float **rows_of(const Py_buffer *y, const Py_buffer *where) {
    Py_ssize_t n = where->shape[0] * where->shape[1];
    const float **rows = scratch(n * (ptrdiff_t)sizeof *rows);
    if (!rows) return (const float **)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        int32_t row = ((const int32_t *)where->buf)[i];
        rows[i] = (const float *)y->buf + row * y->shape[1];
        if (row >= 0 && row < y->shape[0]) continue;
        PyErr_Format(PyExc_ValueError, "where: value %d at position %zd, expected 0 to %zd", (int)row, i,
                     y->shape[0] - 1);
        return free(rows), NULL;
    }
    return rows;
}

/* combine(y[N, H], where[T, K], weights[T, K], mid[T, H], shared[T, H] or None, out[T, H]) */
static PyObject *op_combine(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    if (!arity(n, 6)) return NULL;
    Py_buffer *y = take(&args, a[0], "y", FLOATS, 2, 0);
    Py_buffer *where = y ? take(&args, a[1], "where", INTEGERS, 2, 0) : NULL;
    Py_buffer *weights = where ? take(&args, a[2], "weights", FLOATS, 2, 0) : NULL;
    Py_buffer *mid = weights ? take(&args, a[3], "mid", FLOATS, 2, 0) : NULL;
    Py_buffer *shared = mid && a[4] != Py_None ? take(&args, a[4], "shared", FLOATS, 2, 0) : NULL;
    Py_buffer *out = mid && (shared || a[4] == Py_None) ? take(&args, a[5], "out", FLOATS, 2, 1) : NULL;
    if (!out) return args_done(&args, 0);
    Combine c = {path,      NULL, weights->buf, mid->buf, shared ? shared->buf : NULL, out->buf, mid->shape[0],
                 where->shape[1], mid->shape[1]};
    if (!dim(where, "where", 0, c.tokens) || !dims2(weights, "weights", c.tokens, c.top_k) ||
        !dim(y, "y", 1, c.hidden) || (shared && !dims2(shared, "shared", c.tokens, c.hidden)) ||
        !dims2(out, "out", c.tokens, c.hidden) || !disjoint(&args) || !(c.rows = rows_of(y, where)))
        return args_done(&args, 0);
    Py_BEGIN_ALLOW_THREADS;
    team_run(combine_job, &c, c.tokens);
    Py_END_ALLOW_THREADS;
    free(c.rows);
    return args_done(&args, 1);
}

/* ---- small decode operations -------------------------------------------------------------- */

/* rms_norm(x[N, D], weight[D] or None, eps, out[N, D]) */
static PyObject *op_rms_norm(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Rowwise c = {.path = path};
    if (!arity(n, 4)) return NULL;
    c.eps = (float)PyFloat_AsDouble(a[2]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *x = take(&args, a[0], "x", FLOATS, 2, 0);
    Py_buffer *weight = x && a[1] != Py_None ? take(&args, a[1], "weight", FLOATS, 1, 0) : NULL;
    Py_buffer *out = x && (weight || a[1] == Py_None) ? take(&args, a[3], "out", FLOATS, 2, 1) : NULL;
    if (!out || !multiple("D", x->shape[1], 16) || (weight && !dim(weight, "weight", 0, x->shape[1])) ||
        !dims2(out, "out", x->shape[0], x->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.x = x->buf, c.weight = weight ? weight->buf : NULL, c.out = out->buf;
    c.rows = x->shape[0], c.width = x->shape[1];
    Py_BEGIN_ALLOW_THREADS;
    run_rms_norm(&c);
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

typedef struct {
    const Path *path;
    Joining activation;
    float *out;
    const float *gate, *up;
    ptrdiff_t n;
} Activate;

static void activate_job(void *ctx, ptrdiff_t chunk, int member) {
    Activate *c = ctx;
    ptrdiff_t at = chunk * SMALL_CHUNK;
    (void)member;
    c->path->activate(&c->activation, c->gate + at, c->up + at, c->out + at, min(SMALL_CHUNK, c->n - at));
}

/* activate(gate[N, D], up[N, D], activation, limit, gate_limit, out[N, D]) */
static PyObject *op_activate(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Activate c = {.path = path};
    if (!arity(n, 6) || !take_activation(a + 2, &c.activation)) return NULL;
    Py_buffer *gate = take(&args, a[0], "gate", FLOATS, 2, 0);
    Py_buffer *up = gate ? take(&args, a[1], "up", FLOATS, 2, 0) : NULL;
    Py_buffer *out = up ? take(&args, a[5], "out", FLOATS, 2, 1) : NULL;
    if (!out || !dims2(up, "up", gate->shape[0], gate->shape[1]) ||
        !dims2(out, "out", gate->shape[0], gate->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.gate = gate->buf, c.up = up->buf, c.out = out->buf, c.n = gate->len / 4;
    Py_BEGIN_ALLOW_THREADS;
    team_run(activate_job, &c, ceil_div(c.n, SMALL_CHUNK));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

static void conv_job(void *ctx, ptrdiff_t chunk, int member) {
    Rowwise *c = ctx;
    ptrdiff_t c0 = chunk * c->chunk, c1 = min(c0 + c->chunk, c->width);
    (void)member;
    for (ptrdiff_t j = 0; j < c->taps - 1; j++)
        memcpy(c->next + j * c->width + c0, c->state + j * c->width + c0, (size_t)(c1 - c0) * 4);
    for (ptrdiff_t t = 0; t < c->rows; t++)
        c->path->conv(c->next, c->x + t * c->width, c->weight, c->taps, c->width, c0, c1, c->out + t * c->width);
}

/* conv_silu(state[taps-1, C], x[T, C], weight[taps, C], next[taps-1, C], out[T, C]) */
static PyObject *op_conv_silu(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Rowwise c = {.path = path, .chunk = 2048};
    if (!arity(n, 5)) return NULL;
    Py_buffer *state = take(&args, a[0], "state", FLOATS, 2, 0);
    Py_buffer *x = state ? take(&args, a[1], "x", FLOATS, 2, 0) : NULL;
    Py_buffer *weight = x ? take(&args, a[2], "weight", FLOATS, 2, 0) : NULL;
    Py_buffer *next = weight ? take(&args, a[3], "next", FLOATS, 2, 1) : NULL;
    Py_buffer *out = next ? take(&args, a[4], "out", FLOATS, 2, 1) : NULL;
    if (!out || !multiple("C", x->shape[1], 16) || !dims2(weight, "weight", state->shape[0] + 1, x->shape[1]) ||
        !dim(state, "state", 1, x->shape[1]) || !dims2(next, "next", state->shape[0], x->shape[1]) ||
        !dims2(out, "out", x->shape[0], x->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.x = x->buf, c.weight = weight->buf, c.state = state->buf, c.next = next->buf, c.out = out->buf;
    c.rows = x->shape[0], c.width = x->shape[1], c.taps = weight->shape[0];
    Py_BEGIN_ALLOW_THREADS;
    team_run(conv_job, &c, ceil_div(c.width, c.chunk));
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

typedef struct {
    const Path *path;
    const float *q;
    const char *k, *v;
    const char *recent; /* keys [kv_heads, recent_rows, Dk], then values, of the positions from `begun` on; or NULL */
    RowForm keys, values;
    const float *sinks;  /* [q_heads] or NULL */
    const float *biases; /* [q_heads, extent], of one token */
    float *out, *scores;
    float scale;
    ptrdiff_t tokens, q_heads, kv_heads, capacity, begun, recent_rows, n, window, pad, unit, parts, extent;
} Attention;

static KvRows kv_rows_at(const Attention *c, const char *k, const char *v, ptrdiff_t rows, ptrdiff_t kv,
                         ptrdiff_t first, ptrdiff_t n) {
    return (KvRows){k + (kv * rows + first) * c->keys.stride, v + (kv * rows + first) * c->values.stride, n};
}

static void attend_job(void *ctx, ptrdiff_t unit, int member) {
    Attention *c = ctx;
    ptrdiff_t part = unit % c->parts, kv = unit / c->parts % c->kv_heads, t = unit / c->parts / c->kv_heads;
    ptrdiff_t group = c->q_heads / c->kv_heads, first = part * GQA_HEADS;
    ptrdiff_t row = t * c->q_heads + kv * group + first, n = c->n - c->tokens + t + 1;
    ptrdiff_t begun = c->recent ? c->begun : n, from = n > c->window ? n - c->window : 0, old = min(from, begun);
    /* Position p is in row p % capacity, so the rows from `old` on may continue in row 0. */
    ptrdiff_t slot = old % c->capacity, kept = begun - old, turn = min(kept, c->capacity - slot);
    KvRows seen[3] = {kv_rows_at(c, c->k, c->v, c->capacity, kv, slot, turn),
                    kv_rows_at(c, c->k, c->v, c->capacity, kv, 0, kept - turn), {NULL, NULL, 0}};
    if (c->recent) {
        const char *v = c->recent + c->kv_heads * c->recent_rows * c->keys.stride;
        seen[2] = kv_rows_at(c, c->recent, v, c->recent_rows, kv, from - old, n - begun - (from - old));
    }
    float *scores = c->scores + member * c->unit;
    c->path->attend(c->q + row * c->keys.width, min(GQA_HEADS, group - first), seen, &c->keys, &c->values, c->scale,
                    c->sinks ? c->sinks + row % c->q_heads : NULL,
                    c->biases ? c->biases + row % c->q_heads * c->extent : NULL, c->extent, scores, c->pad,
                    scores + GQA_HEADS * c->pad, c->out + row * c->values.width);
}

static int run_attend(Attention *c) {
    c->pad = ceil_div(min(c->n, c->window), 16) * 16;
    c->parts = ceil_div(c->q_heads / c->kv_heads, GQA_HEADS);
    const ptrdiff_t widest = c->keys.width > c->values.width ? c->keys.width : c->values.width;
    c->unit = GQA_HEADS * c->pad + (c->keys.group ? CACHE_AHEAD * widest : 0);
    /* Memory for the largest team, because another thread may resize the team meanwhile. Pages that nobody touches
     * cost nothing. */
    c->scores = scratch(MAX_TEAM * c->unit * 4);
    if (!c->scores) return 0;
    team_run(attend_job, c, c->tokens * c->kv_heads * c->parts);
    free(c->scores);
    return 1;
}

/* Checks that window is positive and that sinks has one logit for each query head, or none. Returns 0 with an
 * exception. */
static int check_limits(Attention *c, const Py_buffer *sinks) {
    if (c->window < 1) PyErr_Format(PyExc_ValueError, "window is %zd, expected at least 1", (Py_ssize_t)c->window);
    c->sinks = sinks->shape[0] ? sinks->buf : NULL;
    return c->window > 0 && (!c->sinks || dim(sinks, "sinks", 0, c->q_heads));
}

/* attend(q[T, Hq, Dk], k[Hkv, C, Dk], v[Hkv, C, Dv], n, scale, window, sinks[Hq] or [0], out[T, Hq, Dv]) */
static PyObject *op_attend(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Attention c = {.path = path};
    if (!arity(n, 8)) return NULL;
    c.n = PyNumber_AsSsize_t(a[3], PyExc_ValueError);
    c.scale = PyErr_Occurred() ? 0 : (float)PyFloat_AsDouble(a[4]);
    c.window = PyErr_Occurred() ? 0 : PyNumber_AsSsize_t(a[5], PyExc_ValueError);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *q = take(&args, a[0], "q", FLOATS, 3, 0);
    Py_buffer *k = q ? take(&args, a[1], "k", FLOATS, 3, 0) : NULL;
    Py_buffer *v = k ? take(&args, a[2], "v", FLOATS, 3, 0) : NULL;
    Py_buffer *sinks = v ? take(&args, a[6], "sinks", FLOATS, 1, 0) : NULL;
    Py_buffer *out = sinks ? take(&args, a[7], "out", FLOATS, 3, 1) : NULL;
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
    c.kv_heads = k->shape[0], c.capacity = k->shape[1];
    c.keys = (RowForm){q->shape[2], 4 * q->shape[2], 0}, c.values = (RowForm){v->shape[2], 4 * v->shape[2], 0};
    if (!check_limits(&c, sinks)) return args_done(&args, 0);
    int ok;
    Py_BEGIN_ALLOW_THREADS;
    ok = run_attend(&c);
    Py_END_ALLOW_THREADS;
    if (!ok) PyErr_NoMemory();
    return args_done(&args, ok);
}

/* The queries, keys and values of a token before norm and rotation, the weights of the norms (NULL: no norm), and
 * the cosines and sines of the rotation. If `rotates_first`, the norms lie behind the rotation. */
typedef struct {
    const float *q, *k, *v, *q_norm, *k_norm, *cosine, *sine;
    float eps;
    ptrdiff_t half;
    int neighbours, rotates_first;
} Token;

static void norm_and_rotate(const Path *path, const Token *token, const float *weight, const float *x, float *normed,
                          float *out, ptrdiff_t width) {
    const int is_last = weight && token->rotates_first;
    if (weight && !is_last) path->rms_norm(x, weight, token->eps, normed, width);
    path->rope(weight && !is_last ? normed : x, token->cosine, token->sine, token->half, token->neighbours,
               is_last ? normed : out, width);
    if (is_last) path->rms_norm(normed, weight, token->eps, out, width);
}

/* Stores values as a row of a cache. moeflux_mlx/ops/kv_rows.py has the formula. */
static void keep_row(const float *x, const RowForm *form, char *row) {
    if (!form->group) {
        memcpy(row, x, (size_t)form->stride);
        return;
    }
    uint8_t *codes = (uint8_t *)row;
    float *scales = (float *)(row + form->width);
    for (ptrdiff_t at = 0; at < form->width; at += form->group) {
        float largest = 0, not_finite = 0; /* NaN if a value is NaN or infinite; then the scale is NaN too */
        for (ptrdiff_t j = at; j < at + form->group; j++)
            largest = fmaxf(largest, fabsf(x[j])), not_finite += 0.0f * x[j];
        const float inverse = largest > KV_TINY ? 127.0f / largest : 0.0f;
        for (ptrdiff_t j = at; j < at + form->group; j++)
            codes[j] = (uint8_t)fmaxf(rintf(x[j] * inverse) + 128.0f, 0.0f);
        scales[at / form->group] = largest * (1.0f / 127.0f) + not_finite;
    }
}

/* Describes how the rows of `view`, with `width` values each, are stored. All caches of a call are floats, or all
 * are codes. Returns 0 with an exception if the rows have another size. */
static int row_form(const Py_buffer *view, const char *name, ptrdiff_t width, int coded, RowForm *form) {
    ptrdiff_t group = 64;
    while (width % group) group /= 2;
    *form = coded ? (RowForm){width, width + 4 * (width / group), group} : (RowForm){width, 4 * width, 0};
    if (view->itemsize == (coded ? 1 : 4)) return dim(view, name, 2, form->stride / view->itemsize);
    PyErr_Format(PyExc_TypeError, "%s: items of %zd bytes, expected %d", name, view->itemsize, coded ? 1 : 4);
    return 0;
}

/* Stores the token's key and value in row `at` of `recent`. Then its queries attend to all positions. */
static int run_attend_step(Attention *c, const Token *token, char *recent, ptrdiff_t at) {
    const ptrdiff_t width = c->keys.width;
    char *values = recent + c->kv_heads * c->recent_rows * c->keys.stride;
    float *q = scratch((c->q_heads + 2) * width * 4), *normed = q + c->q_heads * width, *rotated = normed + width;
    if (!q) return 0;
    for (ptrdiff_t h = 0; h < c->q_heads; h++)
        norm_and_rotate(c->path, token, token->q_norm, token->q + h * width, normed, q + h * width, width);
    for (ptrdiff_t h = 0; h < c->kv_heads; h++) {
        const ptrdiff_t row = h * c->recent_rows + at;
        norm_and_rotate(c->path, token, token->k_norm, token->k + h * width, normed, rotated, width);
        keep_row(rotated, &c->keys, recent + row * c->keys.stride);
        keep_row(token->v + h * c->values.width, &c->values, values + row * c->values.stride);
    }
    c->q = q, c->recent = recent;
    int ok = run_attend(c);
    free(q);
    return ok;
}

/* attend_step(q[Hq, Dk], k[Hkv, Dk], v[Hkv, Dv], q_norm[Dk], k_norm[Dk], eps, cosine[1, R/2], sine[1, R/2],
 * neighbours, keys[Hkv, C, Dk], values[Hkv, C, Dv], begun, recent[Hkv * M * (Dk + Dv)], n, scale, window, sinks[Hq]
 * or [0], out[Hq, Dv], rotates_first, biases[Hq * E] or [0]). q_norm and k_norm may both be [0]: then there is no
 * norm. Position p < begun is in row p % C of keys and values. keys, values and recent may all be bytes; then a row has
 * the bytes of its RowForm instead of Dk or Dv floats. */
static PyObject *op_attend_step(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    static const char *const name[] = {"q", "k", "v", "q_norm", "k_norm", "cosine", "sine", "keys", "values", "recent",
                                       "sinks", "out", "biases"};
    static const int ndim[] = {2, 2, 2, 1, 1, 2, 2, 3, 3, 1, 1, 2, 1};
    static const int place[] = {0, 1, 2, 3, 4, 6, 7, 9, 10, 12, 16, 17, 19};
    Args args = {.n = 0};
    Py_buffer *b[13];
    if (!arity(n, 20)) return NULL;
    Attention c = {.path = path, .tokens = 1};
    Token token = {.eps = (float)PyFloat_AsDouble(a[5]), .neighbours = PyObject_IsTrue(a[8])};
    token.rotates_first = PyObject_IsTrue(a[18]);
    c.begun = PyNumber_AsSsize_t(a[11], PyExc_ValueError), c.n = PyNumber_AsSsize_t(a[13], PyExc_ValueError);
    c.scale = (float)PyFloat_AsDouble(a[14]), c.window = PyNumber_AsSsize_t(a[15], PyExc_ValueError);
    if (PyErr_Occurred()) return NULL;
    for (int i = 0; i < 13; i++)
        if (!(b[i] = take(&args, a[place[i]], name[i], i >= 7 && i <= 9 ? ROWS : FLOATS, ndim[i], i == 9 || i == 11)))
            return args_done(&args, 0);
    const Py_ssize_t heads = b[1]->shape[0], width = b[1]->shape[1], wide = b[2]->shape[1], *keys = b[7]->shape;
    const Py_ssize_t normed = b[3]->shape[0] ? width : 0;
    const int coded = b[9]->itemsize == 1;
    if (!multiple("Dk", width, 16) || !multiple("Dv", wide, 16) || !multiple("k: heads", heads, 1) ||
        !multiple("q: heads", b[0]->shape[0], heads) || !dim(b[0], "q", 1, width) || !dim(b[2], "v", 0, heads) ||
        !dim(b[3], "q_norm", 0, normed) || !dim(b[4], "k_norm", 0, normed) ||
        !dims2(b[5], "cosine", 1, min(b[5]->shape[1], width / 2)) || !dims2(b[6], "sine", 1, b[5]->shape[1]) ||
        !row_form(b[7], "keys", width, coded, &c.keys) || !row_form(b[8], "values", wide, coded, &c.values) ||
        !dim(b[7], "keys", 0, heads) || !dim(b[8], "values", 0, heads) || !dim(b[8], "values", 1, keys[1]) ||
        !multiple("recent", b[9]->len, heads * (c.keys.stride + c.values.stride)) ||
        !dims2(b[11], "out", b[0]->shape[0], wide) ||
        (b[12]->shape[0] && !multiple("biases", b[12]->shape[0], b[0]->shape[0])) || !disjoint(&args))
        return args_done(&args, 0);
    c.biases = b[12]->buf, c.extent = b[12]->shape[0] / b[0]->shape[0];
    c.recent_rows = b[9]->len / (heads * (c.keys.stride + c.values.stride)), c.q_heads = b[0]->shape[0];
    if (c.begun < 0 || min(c.begun, c.window) > keys[1] || keys[1] < 1 || c.n <= c.begun ||
        c.n - c.begun > c.recent_rows) {
        PyErr_Format(PyExc_ValueError, "begun is %zd and n %zd, expected 0 to %zd, and 1 to %zd more",
                     (Py_ssize_t)c.begun, (Py_ssize_t)c.n, keys[1], (Py_ssize_t)c.recent_rows);
        return args_done(&args, 0);
    }
    if (!check_limits(&c, b[10])) return args_done(&args, 0);
    token.q = b[0]->buf, token.k = b[1]->buf, token.v = b[2]->buf;
    token.q_norm = normed ? b[3]->buf : NULL, token.k_norm = normed ? b[4]->buf : NULL;
    token.cosine = b[5]->buf, token.sine = b[6]->buf, token.half = b[5]->shape[1];
    c.k = b[7]->buf, c.v = b[8]->buf, c.out = b[11]->buf, c.kv_heads = heads;
    c.capacity = keys[1];
    int ok;
    Py_BEGIN_ALLOW_THREADS;
    ok = run_attend_step(&c, &token, b[9]->buf, c.n - c.begun - 1);
    Py_END_ALLOW_THREADS;
    if (!ok) PyErr_NoMemory();
    return args_done(&args, ok);
}

typedef struct {
    const Path *path;
    const float *logits;
    int32_t *ids;
    float *weights, scale;
    ptrdiff_t stride, experts, top_k;
    int normalise;
} Choice;

/* Chooses the experts of one token. Among equal scores the lowest index comes first. */
static void choose_job(void *ctx, ptrdiff_t t, int member) {
    Choice *c = ctx;
    float score[c->experts + 16], total = 0, *weight = c->weights + t * c->top_k;
    int32_t *id = c->ids + t * c->top_k;
    (void)member;
    memcpy(score, c->logits + t * c->stride, (size_t)c->experts * 4);
    c->path->softmax(score, c->experts, NULL);
    for (ptrdiff_t k = 0; k < c->top_k; k++) {
        ptrdiff_t best = -1;
        for (ptrdiff_t e = 0; e < c->experts; e++)
            if (score[e] > (best < 0 ? -1 : score[best])) best = e;
        if (best < 0) best = k; /* all remaining scores are NaN */
        id[k] = (int32_t)best, weight[k] = score[best], total += score[best];
        score[best] = -1;
    }
    for (ptrdiff_t k = 0; k < c->top_k; k++) weight[k] = (c->normalise ? weight[k] / total : weight[k]) * c->scale;
}

/* choose(logits[T, O], experts, normalise, scale, ids[T, K], weights[T, K]) */
static PyObject *op_choose(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    Choice c = {.path = path};
    if (!arity(n, 6)) return NULL;
    c.experts = PyNumber_AsSsize_t(a[1], PyExc_ValueError), c.normalise = PyObject_IsTrue(a[2]);
    c.scale = (float)PyFloat_AsDouble(a[3]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer *logits = take(&args, a[0], "logits", FLOATS, 2, 0);
    Py_buffer *ids = logits ? take(&args, a[4], "ids", INTEGERS, 2, 1) : NULL;
    Py_buffer *weights = ids ? take(&args, a[5], "weights", FLOATS, 2, 1) : NULL;
    if (!weights || !dim(ids, "ids", 0, logits->shape[0]) ||
        !dims2(weights, "weights", logits->shape[0], ids->shape[1]) || !disjoint(&args))
        return args_done(&args, 0);
    c.logits = logits->buf, c.stride = logits->shape[1], c.ids = ids->buf, c.weights = weights->buf;
    c.top_k = ids->shape[1];
    if (c.experts < 1 || c.experts > min(c.stride, MOST_EXPERTS) || c.top_k > c.experts) {
        PyErr_Format(PyExc_ValueError, "%zd of %zd experts by %zd logits", (Py_ssize_t)c.top_k, (Py_ssize_t)c.experts,
                     (Py_ssize_t)c.stride);
        return args_done(&args, 0);
    }
    Py_BEGIN_ALLOW_THREADS;
    team_run(choose_job, &c, logits->shape[0]);
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

typedef struct {
    const Path *path;
    const float *state;
    float *next, *out;
    const float *q, *k, *v, *decay, *beta;
    ptrdiff_t tokens, k_heads, v_heads, dk, dv;
    int each; /* each column of the state has its own decay */
} Delta;

static void delta_job(void *ctx, ptrdiff_t head, int member) {
    Delta *c = ctx;
    ptrdiff_t size = c->dv * c->dk;
    const float *state = c->state + head * size;
    float *next = c->next + head * size;
    (void)member;
    if (!c->tokens) memcpy(next, state, (size_t)size * 4);
    for (ptrdiff_t t = 0; t < c->tokens; t++) {
        ptrdiff_t at = t * c->v_heads + head, key = t * c->k_heads + head / (c->v_heads / c->k_heads);
        const float *decay = c->decay + at * (c->each ? c->dk : 1);
        c->path->delta(t ? next : state, next, c->q + key * c->dk, c->k + key * c->dk, c->v + at * c->dv, decay,
                       c->each, c->beta[at], c->out + at * c->dv, c->dv, c->dk);
    }
}

static PyObject *run_delta(PyObject *const *a, Py_ssize_t n, int each) {
    static const char *const name[] = {"state", "q", "k", "v", "decay", "beta", "next", "out"};
    const int ndim[] = {3, 3, 3, 3, 2 + each, 2, 3, 3};
    Args args = {.n = 0};
    Py_buffer *b[8];
    if (!arity(n, 8)) return NULL;
    for (int i = 0; i < 8; i++)
        if (!(b[i] = take(&args, a[i], name[i], FLOATS, ndim[i], i >= 6))) return args_done(&args, 0);
    const Py_ssize_t *state = b[0]->shape, *q = b[1]->shape;
    if (!multiple("Dk", state[2], 16) || !multiple("q: heads", q[1], 1) || !multiple("state: heads", state[0], q[1]) ||
        !dim(b[1], "q", 2, state[2]) || !dims3(b[2], "k", q[0], q[1], q[2]) ||
        !dims3(b[3], "v", q[0], state[0], state[1]) || !dims2(b[4], "decay", q[0], state[0]) ||
        (each && !dim(b[4], "decay", 2, state[2])) ||
        !dims2(b[5], "beta", q[0], state[0]) || !dims3(b[6], "next", state[0], state[1], state[2]) ||
        !dims3(b[7], "out", q[0], state[0], state[1]) || !disjoint(&args))
        return args_done(&args, 0);
    Delta c = {path,      b[0]->buf, b[6]->buf, b[7]->buf, b[1]->buf, b[2]->buf, b[3]->buf,
               b[4]->buf, b[5]->buf, q[0],      q[1],      state[0],  state[2],  state[1],  each};
    Py_BEGIN_ALLOW_THREADS;
    team_run(delta_job, &c, c.v_heads);
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

/* gated_delta(state[Hv, Dv, Dk], q[T, Hk, Dk], k[T, Hk, Dk], v[T, Hv, Dv], decay[T, Hv], beta[T, Hv],
 * next[Hv, Dv, Dk], out[T, Hv, Dv]) */
static PyObject *op_gated_delta(PyObject *self, PyObject *const *a, Py_ssize_t n) { return run_delta(a, n, 0); }

/* channel_delta: the same with decay[T, Hv, Dk] */
static PyObject *op_channel_delta(PyObject *self, PyObject *const *a, Py_ssize_t n) { return run_delta(a, n, 1); }

typedef struct {
    const Path *path;
    const float *x, *cosine, *sine;
    float *out;
    ptrdiff_t heads, width, half;
    int neighbours;
} Rotation;

static void rope_job(void *ctx, ptrdiff_t t, int member) {
    Rotation *c = ctx;
    (void)member;
    for (ptrdiff_t h = 0; h < c->heads; h++) {
        ptrdiff_t at = (t * c->heads + h) * c->width;
        c->path->rope(c->x + at, c->cosine + t * c->half, c->sine + t * c->half, c->half, c->neighbours, c->out + at,
                      c->width);
    }
}

/* rope(x[T, H, D], cosine[T, R/2], sine[T, R/2], neighbours, out[T, H, D]) */
static PyObject *op_rope(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    Args args = {.n = 0};
    if (!arity(n, 5)) return NULL;
    int neighbours = PyObject_IsTrue(a[3]);
    if (neighbours < 0) return NULL;
    Py_buffer *x = take(&args, a[0], "x", FLOATS, 3, 0);
    Py_buffer *cosine = x ? take(&args, a[1], "cosine", FLOATS, 2, 0) : NULL;
    Py_buffer *sine = cosine ? take(&args, a[2], "sine", FLOATS, 2, 0) : NULL;
    Py_buffer *out = sine ? take(&args, a[4], "out", FLOATS, 3, 1) : NULL;
    if (!out || !dims2(cosine, "cosine", x->shape[0], min(cosine->shape[1], x->shape[2] / 2)) ||
        !dims2(sine, "sine", x->shape[0], cosine->shape[1]) ||
        !dims3(out, "out", x->shape[0], x->shape[1], x->shape[2]) || !disjoint(&args))
        return args_done(&args, 0);
    Rotation c = {path,        x->buf,      cosine->buf,      sine->buf, out->buf,
                  x->shape[1], x->shape[2], cosine->shape[1], neighbours};
    Py_BEGIN_ALLOW_THREADS;
    team_run(rope_job, &c, x->shape[0]);
    Py_END_ALLOW_THREADS;
    return args_done(&args, 1);
}

/* ---- control ------------------------------------------------------------------------------ */

enum { HUGE_PAGE = 1 << 21 };

/* huge_pages(array) -> how many of its bytes are now in huge pages; 0 if the system has no such call */
static PyObject *op_huge_pages(PyObject *self, PyObject *object) {
    Py_buffer view;
    Py_ssize_t bytes = 0;
    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS)) return NULL;
#if defined(__linux__)
    char *start = (char *)(((uintptr_t)view.buf + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    char *end = (char *)(((uintptr_t)view.buf + (uintptr_t)view.len) / HUGE_PAGE * HUGE_PAGE);
    Py_BEGIN_ALLOW_THREADS;
    if (start < end && !madvise(start, (size_t)(end - start), MADV_COLLAPSE)) bytes = end - start;
    Py_END_ALLOW_THREADS;
#endif
    PyBuffer_Release(&view);
    return PyLong_FromSsize_t(bytes);
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

/* _force(name) selects an instruction set, for tests. At import the fastest one is selected. */
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
    atomic_store(&team.size, (int)min(size, MAX_TEAM));
    pthread_mutex_unlock(&team.turn);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *op_threads(PyObject *self, PyObject *none) { return PyLong_FromLong(atomic_load(&team.size)); }

#define FAST(name) {#name, (PyCFunction)(void (*)(void))op_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    FAST(linear),
    FAST(dequantize),
    FAST(expert_gate_up),
    FAST(expert_down_combine),
    FAST(combine),
    FAST(rms_norm),
    FAST(activate),
    FAST(conv_silu),
    FAST(attend),
    FAST(attend_step),
    FAST(choose),
    FAST(gated_delta),
    FAST(channel_delta),
    FAST(rope),
    {"huge_pages", op_huge_pages, METH_O, NULL},
    {"paths", op_paths, METH_NOARGS, NULL},
    {"_force", op_force, METH_O, NULL},
    {"set_threads", op_set_threads, METH_O, NULL},
    {"threads", op_threads, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    find_paths();
    path = paths[0];
    pthread_atfork(NULL, NULL, team_after_fork);
    return PyModule_Create(&module);
}
