/* Reads several places of files that are opened with direct I/O (past the page cache). Several reads are in flight at
 * once.
 *
 * Linux's asynchronous reads cost a third of the processor time of the same reads with `preadv`, and the thread is free
 * meanwhile. When a read has ended, this module copies its pieces to their places, without the GIL, while the drive
 * works on the other reads; then it submits the next read. Arguments are checked before anything is read. If a read
 * fails or is short, it is reported and its pieces are not copied; the caller reads it again.
 *
 * moeflux_mlx/experts/batch.py has the documented interface.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { QUEUE_DEPTH = 32, RUN_NUMBERS = 6, PIECE_NUMBERS = 3 };

typedef struct {
    int64_t file, offset, bytes; /* which file, and which bytes to request from it: whole blocks */
    int64_t needed;              /* how many of these must arrive; the others may be past the end of the file */
    int64_t place;               /* offset in the target; -1: read to scratch memory, then copy the pieces */
    int64_t pieces;              /* the number of pieces, which follow the run */
} Run;

typedef struct {
    int64_t from, to, bytes; /* offset in the run, and in the target */
} FilePiece;

typedef struct {
    char *target, *scratch;
    const int32_t *files; /* file descriptors */
    int64_t target_bytes, scratch_bytes, file_count;
} Memory;

static const char QUEUE[] = "moeflux_mlx.experts._reads.queue";

static void close_queue(PyObject *capsule) {
    aio_context_t queue = (aio_context_t)(uintptr_t)PyCapsule_GetPointer(capsule, QUEUE);
    Py_BEGIN_ALLOW_THREADS;
    syscall(SYS_io_destroy, queue);
    Py_END_ALLOW_THREADS;
}

/* queue() -> the context of one thread's reads; raises OSError if the system does not have such reads */
static PyObject *op_queue(PyObject *self, PyObject *none) {
    aio_context_t queue = 0;
    if (syscall(SYS_io_setup, QUEUE_DEPTH, &queue)) return PyErr_SetFromErrno(PyExc_OSError);
    return PyCapsule_New((void *)(uintptr_t)queue, QUEUE, close_queue);
}

static int inside(int64_t start, int64_t bytes, int64_t size) {
    return start >= 0 && bytes >= 0 && bytes <= size && start <= size - bytes;
}

/* Finds the runs in `numbers`. Returns their number, or -1 if one of them is not inside its memory. */
static Py_ssize_t find_runs(const int64_t *numbers, int64_t count, const Memory *memory, const Run **runs) {
    int64_t at = 0;
    Py_ssize_t found = 0;
    while (at < count) {
        const Run *run = (const Run *)(numbers + at);
        at += RUN_NUMBERS;
        if (at > count || run->offset < 0 || !inside(0, run->needed, run->bytes)) return -1;
        if (!inside(run->file, 1, memory->file_count)) return -1;
        if (run->pieces < 0 || run->pieces > (count - at) / PIECE_NUMBERS) return -1;
        if (run->place >= 0 && !inside(run->place, run->bytes, memory->target_bytes)) return -1;
        if (run->place < 0 && !inside(0, run->bytes, memory->scratch_bytes)) return -1;
        const FilePiece *piece = (const FilePiece *)(numbers + at);
        for (int64_t i = 0; i < run->pieces; i++, piece++)
            if (!inside(piece->from, piece->bytes, run->needed) ||
                !inside(piece->to, piece->bytes, memory->target_bytes))
                return -1;
        at += run->pieces * PIECE_NUMBERS;
        runs[found++] = run;
    }
    return found;
}

/* As memcpy, but past the caches if the processor can do that: a cache line that is written whole need not be read
 * first, and the caches keep what they have. Bytes that a drive has just delivered take half of memcpy's time
 * (results.tsv, "in place"). */
static void copy(char *to, const char *from, size_t bytes) {
#if defined(__SSE2__)
    enum { LINE = 64 };
    if (bytes >= 2 * LINE) {
        size_t first = -(uintptr_t)to % LINE;
        memcpy(to, from, first);
        to += first, from += first, bytes -= first;
        for (; bytes >= LINE; to += LINE, from += LINE, bytes -= LINE)
            for (int i = 0; i < LINE; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        _mm_sfence(); /* the thread that waits for the read sees these bytes */
    }
#endif
    memcpy(to, from, bytes);
}

/* Copies the pieces of a run to their places, if all bytes that it needs have arrived. */
static void move(const Run *run, const char *source, const Memory *memory, int64_t received) {
    const FilePiece *piece = (const FilePiece *)(run + 1);
    if (run->place >= 0 || received < run->needed) return;
    for (int64_t i = 0; i < run->pieces; i++)
        copy(memory->target + piece[i].to, source + piece[i].from, (size_t)piece[i].bytes);
}

/* Returns the most bytes that a run needs in scratch memory, which is divided into parts of this size. */
static int64_t part_bytes(const Run **runs, Py_ssize_t count) {
    int64_t most = 1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (runs[i]->place < 0 && runs[i]->bytes > most) most = runs[i]->bytes;
    return most;
}

/* Submits the read of one run. Returns 0 or a negative error number. The event of its end has `name`. */
static int64_t submit(aio_context_t queue, const Run *run, const Memory *memory, char *destination, uint64_t name) {
    struct iocb read = {
        .aio_data = name,
        .aio_lio_opcode = IOCB_CMD_PREAD,
        .aio_fildes = (uint32_t)memory->files[run->file],
        .aio_buf = (uint64_t)(uintptr_t)destination,
        .aio_nbytes = (uint64_t)run->bytes,
        .aio_offset = run->offset,
    };
    struct iocb *list[] = {&read};
    long sent = syscall(SYS_io_submit, queue, 1L, list);
    return sent == 1 ? 0 : sent < 0 ? -errno : -EAGAIN;
}

/* Reads all runs, each through a part of scratch memory. While the pieces of one run are copied, the drive reads
 * others. As soon as a part is free, it is used for the next run. */
static void fill(aio_context_t queue, const Run **runs, Py_ssize_t count, const Memory *memory, int64_t *received) {
    int64_t part = part_bytes(runs, count), parts = memory->scratch_bytes / part;
    int free[QUEUE_DEPTH], all = parts < QUEUE_DEPTH ? (int)parts : QUEUE_DEPTH, left = all;
    for (int i = 0; i < all; i++) free[i] = i;
    for (Py_ssize_t next = 0; next < count || left < all;) { /* no read may be in flight when this returns */
        if (next < count && left) {
            int own = free[left - 1];
            const Run *run = runs[next];
            char *destination = run->place < 0 ? memory->scratch + own * part : memory->target + run->place;
            received[next] = submit(queue, run, memory, destination, (uint64_t)next * QUEUE_DEPTH + (uint64_t)own);
            left -= received[next] == 0;
            next++;
            continue;
        }
        struct io_event event;
        if (syscall(SYS_io_getevents, queue, 1L, 1L, &event, NULL) != 1) continue; /* a signal may interrupt the wait */
        size_t at = event.data / QUEUE_DEPTH, own = event.data % QUEUE_DEPTH;
        received[at] = event.res;
        move(runs[at], memory->scratch + (int64_t)own * part, memory, received[at]);
        free[left++] = (int)own;
    }
}

/* Returns the bytes of the complete runs and the indices of the others. */
static PyObject *results_of(const Run **runs, Py_ssize_t count, const int64_t *received) {
    int64_t total = 0;
    PyObject *missed = PyList_New(0);
    for (Py_ssize_t i = 0; missed && i < count; i++) {
        if (received[i] >= runs[i]->needed) {
            total += received[i];
            continue;
        }
        PyObject *index = PyLong_FromSsize_t(i);
        if (!index || PyList_Append(missed, index)) Py_CLEAR(missed);
        Py_XDECREF(index);
    }
    return missed ? Py_BuildValue("LN", (long long)total, missed) : NULL;
}

static PyObject *read_all(aio_context_t queue, const Py_buffer *numbers, const Memory *memory) {
    PyObject *result = NULL;
    size_t most = (size_t)numbers->len / sizeof(Run) + 1;
    const Run **runs = PyMem_Calloc(most, sizeof *runs);
    int64_t *received = PyMem_Calloc(most, sizeof *received);
    Py_ssize_t count = -1;
    if (!runs || !received) {
        PyErr_NoMemory();
    } else if ((count = find_runs(numbers->buf, numbers->len / (Py_ssize_t)sizeof(int64_t), memory, runs)) < 0) {
        PyErr_SetString(PyExc_ValueError, "a run leaves its memory");
    } else {
        Py_BEGIN_ALLOW_THREADS;
        fill(queue, runs, count, memory, received);
        Py_END_ALLOW_THREADS;
        result = results_of(runs, count, received);
    }
    PyMem_Free(runs);
    PyMem_Free(received);
    return result;
}

/* read(queue, files, target, scratch, numbers) -> (bytes of the complete runs, indices of the others) */
static PyObject *op_read(PyObject *self, PyObject *args) {
    PyObject *capsule, *result = NULL;
    Py_buffer files, target, scratch, numbers;
    if (!PyArg_ParseTuple(args, "Oy*w*w*y*", &capsule, &files, &target, &scratch, &numbers)) return NULL;
    void *queue = PyCapsule_GetPointer(capsule, QUEUE);
    int64_t file_count = files.len / (Py_ssize_t)sizeof(int32_t);
    Memory memory = {target.buf, scratch.buf, files.buf, target.len, scratch.len, file_count};
    if (queue) result = read_all((aio_context_t)(uintptr_t)queue, &numbers, &memory);
    PyBuffer_Release(&files);
    PyBuffer_Release(&target);
    PyBuffer_Release(&scratch);
    PyBuffer_Release(&numbers);
    return result;
}

static PyMethodDef methods[] = {
    {"queue", op_queue, METH_NOARGS, NULL},
    {"read", op_read, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reads", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__reads(void) { return PyModule_Create(&module); }
