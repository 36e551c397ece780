/* The Python module telemetry.summary._kernel: addresses, sizes and codes in, packed rows out.
 *
 * It knows neither torch nor numpy; backend.py hands it addresses and answers for them. Built against the limited API of
 * Python 3.10, so that one build serves every later Python.
 */
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#include "fpenv.h"
#include "kernel.h"

/* About ten microseconds of work: below this, giving up the lock and taking it back is a part of the cost that shows. */
#define RELEASE_LOCK_ELEMENTS 32768

typedef struct { const char *name; const sweeps *sweeps; } build;
static build builds[3];
static int num_builds;

static void find_builds(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma"))
        builds[num_builds++] = (build){"avx512", &sweeps_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        builds[num_builds++] = (build){"avx2", &sweeps_avx2};
#endif
    builds[num_builds++] = (build){"baseline", &sweeps_baseline};
}

static int read_long(PyObject *number, long long *out) {
    *out = PyLong_AsLongLong(number);
    return *out == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Addresses may have the top bit set, so they are read as unsigned. */
static int read_address(PyObject *number, void **out) {
    *out = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int read_code(PyObject *number, int limit, const char *what, int *out) {
    long long value;
    if (read_long(number, &value)) return -1;
    if (value < 0 || value >= limit) {
        PyErr_Format(PyExc_ValueError, "%s code %lld is not below %d", what, value, limit);
        return -1;
    }
    *out = (int)value;
    return 0;
}

/* Reads bins_per_octave, lo_exp and hi_exp, if there are counts to add to. */
static int read_grid(PyObject *const *args, const int64_t *counts, grid *g) {
    long long value[3];
    if (counts == NULL) return 0;
    for (int i = 0; i < 3; i++)
        if (read_long(args[i], &value[i])) return -1;
    if (grid_init(g, (int)value[0], (int)value[1], (int)value[2]) == 0) return 0;
    PyErr_SetString(PyExc_ValueError, "the histogram descriptor describes no usable grid");
    return -1;
}

static int check_args(Py_ssize_t num_args, Py_ssize_t wanted) {
    if (num_args == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given, %zd are taken", num_args, wanted);
    return -1;
}

static void run(const sweeps *s, const job *jobs, Py_ssize_t num_jobs) {
    fp_environment saved = fp_enter();
    for (Py_ssize_t i = 0; i < num_jobs; i++) reduce(s, jobs + i);
    fp_leave(saved);
}

static void run_unlocked(const sweeps *s, const job *jobs, Py_ssize_t num_jobs, size_t numel) {
    if (numel < RELEASE_LOCK_ELEMENTS) {
        run(s, jobs, num_jobs);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    run(s, jobs, num_jobs);
    Py_END_ALLOW_THREADS
}

/* reduce(build, dtype, data, numel, mask, row, accumulate, counts, bins_per_octave, lo_exp, hi_exp, quantization,
 *        mantissa_bits, min_exponent, max_finite): an address of 0 leaves its part out. */
static PyObject *py_reduce(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    int which, accumulate;
    long long numel, mantissa_bits, min_exponent;
    job j = {0};
    grid g;
    target t = {0};
    if (check_args(num_args, 15) || read_code(args[0], num_builds, "build", &which) ||
        read_code(args[1], DT_COUNT, "dtype", &j.dtype) || read_address(args[2], (void **)&j.data) ||
        read_long(args[3], &numel) || read_address(args[4], (void **)&j.mask) ||
        read_address(args[5], (void **)&j.row) || read_code(args[6], 2, "accumulate", &accumulate) ||
        read_address(args[7], (void **)&j.counts) || read_grid(args + 8, j.counts, &g) ||
        read_address(args[11], (void **)&j.quantization) || read_long(args[12], &mantissa_bits) ||
        read_long(args[13], &min_exponent))
        return NULL;
    t.max_finite = PyFloat_AsDouble(args[14]);
    if (t.max_finite == -1 && PyErr_Occurred()) return NULL;
    t.min_normal = ldexp(1.0, (int)min_exponent);
    t.shift = (52 - mantissa_bits) * (INT64_C(1) << 52);
    j.numel = (size_t)numel;
    j.accumulate = accumulate;
    j.grid = &g;
    j.target = &t;
    run_unlocked(builds[which].sweeps, &j, 1, j.numel);
    Py_RETURN_NONE;
}

/* Element i of each list belongs to tensor i and to row i. */
static int fill_jobs(job *jobs, Py_ssize_t num, PyObject *const *lists, word *rows, int64_t *counts, const grid *g,
                     size_t *total) {
    for (Py_ssize_t i = 0; i < num; i++) {
        long long numel, index;
        job *j = jobs + i;
        *j = (job){.row = rows + i * ROW_WORDS, .grid = g};
        if (read_code(PyList_GetItem(lists[0], i), DT_COUNT, "dtype", &j->dtype) ||
            read_address(PyList_GetItem(lists[1], i), (void **)&j->data) ||
            read_long(PyList_GetItem(lists[2], i), &numel) || read_long(PyList_GetItem(lists[3], i), &index))
            return -1;
        j->numel = (size_t)numel;
        if (counts && index >= 0) j->counts = counts + index * (2 * g->side + 8);
        *total += j->numel;
    }
    return 0;
}

/* reduce_many(build, rows, accumulate, counts, bins_per_octave, lo_exp, hi_exp, dtypes, data, numels, counts_index):
 * the last four are lists of one length; a negative index counts no histogram. */
static PyObject *py_reduce_many(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    int which, accumulate;
    word *rows;
    int64_t *counts;
    grid g;
    if (check_args(num_args, 11) || read_code(args[0], num_builds, "build", &which) ||
        read_address(args[1], (void **)&rows) || read_code(args[2], 2, "accumulate", &accumulate) ||
        read_address(args[3], (void **)&counts) || read_grid(args + 4, counts, &g))
        return NULL;
    Py_ssize_t num = PyList_Size(args[7]);
    for (int i = 8; i < 11; i++)
        if (num < 0 || PyList_Size(args[i]) != num) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the lists differ in length");
            return NULL;
        }
    size_t total = 0;
    job *jobs = PyMem_Malloc((size_t)(num ? num : 1) * sizeof *jobs);
    if (jobs == NULL) return PyErr_NoMemory();
    int failed = fill_jobs(jobs, num, args + 7, rows, counts, &g, &total);
    if (!failed) {
        for (Py_ssize_t i = 0; i < num; i++) jobs[i].accumulate = accumulate;
        run_unlocked(builds[which].sweeps, jobs, num, total);
    }
    PyMem_Free(jobs);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* fingerprint(item_size, data, numel) -> int */
static PyObject *py_fingerprint(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    int item_size;
    void *data;
    long long numel;
    int64_t hash;
    if (check_args(num_args, 3) || read_code(args[0], 9, "item size", &item_size) || read_address(args[1], &data) ||
        read_long(args[2], &numel))
        return NULL;
    if (numel < RELEASE_LOCK_ELEMENTS) {
        hash = fingerprint(data, (size_t)numel, item_size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        hash = fingerprint(data, (size_t)numel, item_size);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(hash);
}

static PyMethodDef methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))py_reduce, METH_FASTCALL, "Reduce one tensor."},
    {"reduce_many", (PyCFunction)(void (*)(void))py_reduce_many, METH_FASTCALL, "Reduce a list of tensors."},
    {"fingerprint", (PyCFunction)(void (*)(void))py_fingerprint, METH_FASTCALL, "Hash the bits of one tensor."},
    {NULL, NULL, 0, NULL},
};

static int add_builds(PyObject *module) {
    PyObject *names = PyTuple_New(num_builds);
    if (names == NULL) return -1;
    for (int i = 0; i < num_builds; i++) {
        PyObject *name = PyUnicode_FromString(builds[i].name);
        if (name == NULL || PyTuple_SetItem(names, i, name)) {
            Py_DECREF(names);
            return -1;
        }
    }
    int failed = PyModule_AddObjectRef(module, "BUILDS", names);
    Py_DECREF(names);
    return failed;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) {
    if (num_builds == 0) {
        find_builds();
        load_init();
    }
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && add_builds(module)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
