/* Rounds matrices to codes with the least squared error: a scale and a bias for each group of columns (fit.h). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define LANES 4
#define TARGET
#include "fit.h"

/* Computes with the fastest instruction set whose number is at least `least`: 0 AVX-512, 1 AVX2, 2 any. */
static void fit(const Work *work, int least) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (least < 1 && has_avx512)
        fit_avx512(work);
    else if (least < 2 && __builtin_cpu_supports("avx2"))
        fit_avx2(work);
    else
        fit_matrix(work);
#else
    (void)least;
    fit_matrix(work);
#endif
}

static int has(const Py_buffer *view, Py_ssize_t bytes) {
    if (view->len == bytes) return 1;
    PyErr_Format(PyExc_ValueError, "a buffer has %zd bytes, expected %zd", view->len, bytes);
    return 0;
}

/* fit(values, importance, shrinks, rows, columns, bits, group, is_half, kind, turns, last, least, codes, scales, biases) */
static PyObject *op_fit(PyObject *self, PyObject *args) {
    Py_buffer values, importance, shrinks, codes, scales, biases;
    Work work;
    int kind, least, ok;
    if (!PyArg_ParseTuple(args, "y*y*y*nniipiiiiw*w*w*", &values, &importance, &shrinks, &work.rows, &work.columns,
                          &work.bits, &work.group, &work.is_half, &kind, &work.turns, &work.last, &least, &codes, &scales,
                          &biases))
        return NULL;
    int is_known = (work.group == 32 || work.group == 64 || work.group == 128) && work.bits > 0 && work.bits <= 8;
    ptrdiff_t all = work.rows * work.columns, groups = is_known ? all / work.group : 0;
    work.starts = (int)(shrinks.len / 4), work.kind = (Kind)kind;
    ok = has(&values, all * (work.is_half ? 2 : 4)) && has(&importance, work.columns * 4) &&
         has(&codes, all * work.bits / 8) && has(&scales, groups * 4) && has(&biases, groups * 4);
    if (ok && (!is_known || work.starts > MOST_STARTS || work.columns % work.group)) {
        PyErr_SetString(PyExc_ValueError, "this form or number of starts is not known");
        ok = 0;
    }
    if (ok) {
        memcpy(work.shrinks, shrinks.buf, (size_t)shrinks.len);
        work.values = values.buf, work.importance = importance.buf;
        work.codes = codes.buf, work.scales = scales.buf, work.biases = biases.buf;
        Py_BEGIN_ALLOW_THREADS;
        fit(&work, least);
        Py_END_ALLOW_THREADS;
    }
    Py_buffer *all_of_them[] = {&values, &importance, &shrinks, &codes, &scales, &biases};
    for (int i = 0; i < 6; i++) PyBuffer_Release(all_of_them[i]);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"fit", op_fit, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fit", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fit(void) { return PyModule_Create(&module); }
