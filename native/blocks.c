/* Brings GGUF's blocks to planes, in place: a matrix's codes as one stream of bits, then what its blocks have beside
 * codes, each kind of it together.
 *
 * Codes are written to where the blocks begin. A block's codes are shorter than the block, so they never reach a block
 * that has not been read, except for the first few blocks, which are copied before. The other fields wait in memory of
 * their own, until the last block has been read.
 *
 * moeflux_mlx/packing/gguf_forms.py has the documented interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the first code of a stream is in the lowest bits of a little-endian word"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint8_t v32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint64_t q4 __attribute__((vector_size(32), aligned(1), may_alias));

#define EVERY_TYPE(_)                                                                                    \
    _(Q4_0) _(Q4_1) _(Q5_0) _(Q5_1) _(Q8_0) _(MXFP4) _(NVFP4) _(Q2_K) _(Q3_K) _(Q4_K) _(Q5_K) _(Q6_K)              \
    _(IQ4_NL) _(IQ4_XS) _(IQ3_XXS) _(IQ3_S) _(IQ2_XXS) _(IQ2_XS) _(IQ2_S) _(IQ1_S) \
    _(IQ1_M) _(TQ1_0) _(TQ2_0)
#define ITEM(NAME) NAME,
typedef enum { EVERY_TYPE(ITEM) TYPES } Type;
#undef ITEM

typedef struct {
    uint8_t at, bytes;
} Field;

typedef struct {
    const char *name;
    int weights, bytes, bits; /* of a block; of a code */
    Field scales[3];          /* what groups have, joined */
    Field supers;             /* biases of groups, or what scale codes are multiplied by */
    Field raw[2];             /* for each 32 weights: bytes that stay as they are, instead of codes in a new order */
} Form;

static const Form forms[TYPES] = {
    [Q4_0] = {"Q4_0", 32, 18, 4, .supers = {0, 2}},
    [Q4_1] = {"Q4_1", 32, 20, 4, {{0, 2}}, {2, 2}},
    [Q5_0] = {"Q5_0", 32, 22, 5, .supers = {0, 2}},
    [Q5_1] = {"Q5_1", 32, 24, 5, {{0, 2}}, {2, 2}},
    [Q8_0] = {"Q8_0", 32, 34, 8, .supers = {0, 2}},
    [MXFP4] = {"MXFP4", 32, 17, 4, {{0, 1}}},
    [NVFP4] = {"NVFP4", 64, 36, 4, {{0, 4}}},
    [Q2_K] = {"Q2_K", 256, 84, 2, {{0, 16}}, {80, 4}},
    [Q3_K] = {"Q3_K", 256, 110, 3, {{96, 12}}, {108, 2}},
    [Q4_K] = {"Q4_K", 256, 144, 4, {{0, 16}}},
    [Q5_K] = {"Q5_K", 256, 176, 5, {{0, 16}}},
    [Q6_K] = {"Q6_K", 256, 210, 6, {{192, 16}}, {208, 2}},
    [IQ4_NL] = {"IQ4_NL", 32, 18, 4, {{0, 2}}, .raw = {{2, 16}}},
    [IQ4_XS] = {"IQ4_XS", 256, 136, 4, {{0, 8}}, .raw = {{8, 16}}},
    [IQ3_XXS] = {"IQ3_XXS", 256, 98, 3, {{0, 2}}, .raw = {{2, 8}, {66, 4}}},
    [IQ3_S] = {"IQ3_S", 256, 110, 3, {{0, 2}, {66, 8}, {106, 4}}, .raw = {{2, 8}, {74, 4}}},
    [IQ2_XXS] = {"IQ2_XXS", 256, 66, 2, {{0, 2}}, .raw = {{2, 8}}},
    [IQ2_XS] = {"IQ2_XS", 256, 74, 2, {{0, 2}, {66, 8}}, .raw = {{2, 8}}},
    [IQ2_S] = {"IQ2_S", 256, 82, 2, {{0, 2}, {66, 16}}, .raw = {{2, 4}, {34, 4}}},
    [IQ1_S] = {"IQ1_S", 256, 50, 1, {{0, 2}, {34, 16}}, .raw = {{2, 4}}},
    [IQ1_M] = {"IQ1_M", 256, 56, 1, {{48, 8}, {32, 16}}, .raw = {{0, 4}}},
    [TQ1_0] = {"TQ1_0", 256, 54, 1, {{52, 2}, {0, 16}, {48, 4}}},
    [TQ2_0] = {"TQ2_0", 256, 66, 2, {{64, 2}}},
};

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, PATH)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define PATH portable
#define TARGET
#include "blocks.h"
#undef PATH
#undef TARGET
#if defined(__x86_64__)
#define AVX2
#define PATH avx2
#define TARGET __attribute__((target("avx2")))
#include "blocks.h"
#endif

/* Not fewer than code bytes over the other bytes: codes of later blocks reach no block behind them. */
enum { FIRST = 64 };

static int scale_bytes(const Form *form) {
    return form->scales[0].bytes + form->scales[1].bytes + form->scales[2].bytes;
}

static void take_apart(int is_portable, Type type, const uint8_t *block, ptrdiff_t count, uint8_t *to, uint8_t *scales,
                       uint8_t *supers) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!is_portable && __builtin_cpu_supports("avx2")) {
        take_apart_avx2(type, block, count, to, scales, supers);
        return;
    }
#endif
    (void)is_portable;
    take_apart_portable(type, block, count, to, scales, supers);
}

/* Rearranges `count` blocks at `memory`. Returns 0 if memory is short. */
static int rearrange(int is_portable, Type type, uint8_t *memory, ptrdiff_t count, uint8_t *scales, uint8_t *supers) {
    const Form *form = &forms[type];
    const ptrdiff_t begin = count < FIRST ? count : FIRST, each = scale_bytes(form);
    uint8_t first[FIRST * 256], *waiting = malloc((size_t)(count * (each + form->supers.bytes) + 1));
    if (!waiting) return 0;
    uint8_t *last = waiting + count * each;
    memcpy(first, memory, (size_t)(begin * form->bytes));
    take_apart(is_portable, type, first, begin, memory, waiting, last);
    take_apart(is_portable, type, memory + begin * form->bytes, count - begin,
               memory + begin * (form->weights / 8 * form->bits), waiting + begin * each,
               last + begin * form->supers.bytes);
    memcpy(scales, waiting, (size_t)(count * each));
    memcpy(supers, last, (size_t)(count * form->supers.bytes));
    free(waiting);
    return 1;
}

static const Form *find(const char *name) {
    for (int type = 0; type < TYPES; type++)
        if (!strcmp(forms[type].name, name)) return &forms[type];
    return NULL;
}

/* rearrange(type, memory, is_portable, start, blocks, second[, third]): `memory` is writable. The blocks begin at byte
 * `start` of it, where codes will be, and their scales and then the other fields will begin at bytes `second` and
 * `third`. A type may have only one of both. */
static PyObject *op_rearrange(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer memory;
    Py_ssize_t start, count, scales, third = 0;
    int is_portable, ok;
    if (!PyArg_ParseTuple(args, "sw*pnnn|n", &name, &memory, &is_portable, &start, &count, &scales, &third)) return NULL;
    const Form *form = find(name);
    const Py_ssize_t supers = form && scale_bytes(form) ? third : scales;
    uint8_t *base = memory.buf;
    ok = form && start >= 0 && count >= 0 && start <= memory.len && count <= (memory.len - start) / form->bytes &&
         scales >= 0 && scales <= memory.len - count * scale_bytes(form) && supers >= 0 &&
         supers <= memory.len - count * form->supers.bytes;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS;
        ok = rearrange(is_portable, (Type)(form - forms), base + start, count, base + scales, base + supers);
        Py_END_ALLOW_THREADS;
        if (!ok) PyErr_NoMemory();
    } else {
        PyErr_Format(PyExc_ValueError, "%zd blocks of type %s at byte %zd do not fit in %zd bytes", count, name, start,
                     memory.len);
    }
    PyBuffer_Release(&memory);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"rearrange", op_rearrange, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_blocks", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocks(void) { return PyModule_Create(&module); }
