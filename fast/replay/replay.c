/* Replay the launches of one pass over attention in a single call from Python.
 *
 *   make(operations)                     pack the operations once; return a capsule
 *   run(capsule, stream, *addresses)     enqueue all of them on a stream, over buffers at these addresses
 *
 * An operation is one of
 *
 *   (0, slot, offset, bytes)                               set so many bytes of buffer `slot` to zero
 *   (function, blocks, threads, shared, parameters)        launch a kernel on a one-dimensional grid
 *
 * and a parameter one of
 *
 *   ("b", bytes)                                           a number, as the kernel expects it
 *   ("s", bytes)                                           a structure, aligned to 8 bytes
 *   ("i", position, slot, offset)                          an address inside the last structure, no parameter of its own
 *   ("p", slot, offset)                                    an address inside a buffer; slot -1: an absolute address
 *   ("m", slot, offset, type, swizzle, box, shape, strides)    a TMA tensor map; outermost axis first, strides in
 *                                                          bytes and without the innermost
 *
 * A capsule is never written after `make`, so threads may run one capsule at the same time. `run` releases the GIL: ranks
 * may be threads. The CUDA driver is loaded when the module is; without it `run` raises RuntimeError.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

enum { VALUE, ADDRESS, MAP };
enum { MOST_PARAMETERS = 96, MOST_MAPS = 8, MOST_BYTES = 2048, MOST_BUFFERS = 32, MOST_AXES = 5 };

typedef struct {
  int rank, type, swizzle;
  cuuint64_t shape[MOST_AXES], strides[MOST_AXES];
  cuuint32_t box[MOST_AXES];
} Map;

typedef struct {
  int kind, slot, map, inside; /* inside: of a structure */
  size_t at; /* in the image */
  unsigned long long offset;
} Parameter;

typedef struct {
  CUfunction function; /* NULL: a memset */
  int slot;
  unsigned long long offset, bytes;
  unsigned blocks, threads, shared;
  int parameters;
  size_t used, structure; /* bytes of the image; where its last structure begins */
  Parameter parameter[MOST_PARAMETERS];
  Map map[MOST_MAPS];
  unsigned char image[MOST_BYTES]; /* the parameters' values; addresses and maps are filled in by `run` */
} Operation;

typedef struct {
  Py_ssize_t number;
  Operation operation[];
} Pass;

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*set_memory)(CUdeviceptr, unsigned char, size_t, CUstream);
static CUresult (*encode_map)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static void destroy(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NULL)); }

static long long number(PyObject *tuple, Py_ssize_t i) {
  PyObject *item = PySequence_GetItem(tuple, i);
  long long value = item ? PyLong_AsLongLong(item) : -1;
  Py_XDECREF(item);
  return value;
}

static int refuse(const char *why) {
  PyErr_SetString(PyExc_ValueError, why);
  return -1;
}

/* Reserve `size` bytes of the image, aligned to `unit`; return where, or -1. */
static long long reserve(Operation *op, size_t size, size_t unit) {
  size_t at = (op->used + unit - 1) / unit * unit;
  if (at + size > MOST_BYTES) return refuse("a kernel has more bytes of parameters than replay.c holds");
  op->used = at + size;
  return (long long)at;
}

static int pack_map(Operation *op, int index, PyObject *given) {
  Map *map = &op->map[index];
  PyObject *box = PyTuple_GET_ITEM(given, 5), *shape = PyTuple_GET_ITEM(given, 6), *strides = PyTuple_GET_ITEM(given, 7);
  Py_ssize_t rank = PySequence_Size(box);
  if (rank < 1 || rank > MOST_AXES || PySequence_Size(shape) != rank || PySequence_Size(strides) != rank - 1)
    return refuse("a tensor map has 1 to 5 axes, and one stride less");
  map->rank = (int)rank;
  map->type = (int)number(given, 3);
  map->swizzle = (int)number(given, 4);
  for (Py_ssize_t axis = 0; axis < rank; axis++) {
    map->box[rank - 1 - axis] = (cuuint32_t)number(box, axis);
    map->shape[rank - 1 - axis] = (cuuint64_t)number(shape, axis);
    if (axis < rank - 1) map->strides[rank - 2 - axis] = (cuuint64_t)number(strides, axis);
  }
  return 0;
}

static int pack_parameter(Operation *op, Parameter *p, PyObject *given, int *maps) {
  const char *kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(given, 0));
  long long at;
  if (!kind) return -1;
  if (*kind == 'b' || *kind == 's') {
    PyObject *bytes = PyTuple_GET_ITEM(given, 1);
    Py_ssize_t size = PyBytes_Size(bytes);
    if (size < 1) return refuse("a number has at least one byte");
    if ((at = reserve(op, size, *kind == 's' ? 8 : size)) < 0) return -1;
    memcpy(op->image + at, PyBytes_AS_STRING(bytes), size);
    p->kind = VALUE;
    if (*kind == 's') op->structure = (size_t)at;
  } else if (*kind == 'i') {
    at = (long long)op->structure + number(given, 1);
    p->slot = (int)number(given, 2);
    p->offset = (unsigned long long)number(given, 3);
    p->kind = ADDRESS;
    p->inside = 1;
    if (p->slot >= MOST_BUFFERS) return refuse("no such buffer");
    if (at < 0 || (size_t)at + 8 > op->used) return refuse("an address lies outside of its structure");
  } else {
    p->slot = (int)number(given, 1);
    p->offset = (unsigned long long)number(given, 2);
    p->kind = *kind == 'm' ? MAP : ADDRESS;
    if (p->slot >= MOST_BUFFERS || (p->kind == MAP && p->slot < 0)) return refuse("no such buffer");
    if ((at = reserve(op, p->kind == MAP ? sizeof(CUtensorMap) : 8, p->kind == MAP ? 64 : 8)) < 0) return -1;
    if (p->kind == MAP) {
      if (*maps == MOST_MAPS) return refuse("a kernel has more tensor maps than replay.c holds");
      if (pack_map(op, p->map = (*maps)++, given)) return -1;
    }
  }
  p->at = (size_t)at;
  return PyErr_Occurred() ? -1 : 0;
}

static int pack(Operation *op, PyObject *given) {
  op->function = (CUfunction)(uintptr_t)number(given, 0);
  if (!op->function) {
    op->slot = (int)number(given, 1);
    op->offset = (unsigned long long)number(given, 2);
    op->bytes = (unsigned long long)number(given, 3);
    return op->slot < 0 || op->slot >= MOST_BUFFERS ? refuse("no such buffer") : PyErr_Occurred() ? -1 : 0;
  }
  op->blocks = (unsigned)number(given, 1);
  op->threads = (unsigned)number(given, 2);
  op->shared = (unsigned)number(given, 3);
  PyObject *parameters = PyTuple_GET_ITEM(given, 4);
  Py_ssize_t count = PyTuple_Size(parameters);
  if (count < 0 || count > MOST_PARAMETERS) return refuse("a kernel has more parameters than replay.c holds");
  int maps = 0;
  for (op->parameters = 0; op->parameters < count; op->parameters++)
    if (pack_parameter(op, &op->parameter[op->parameters], PyTuple_GET_ITEM(parameters, op->parameters), &maps)) return -1;
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *make(PyObject *self, PyObject *operations) {
  Py_ssize_t count = PyTuple_Size(operations);
  if (count < 0) return NULL;
  Pass *pass = PyMem_Calloc(1, sizeof(Pass) + count * sizeof(Operation));
  if (!pass) return PyErr_NoMemory();
  for (pass->number = 0; pass->number < count; pass->number++)
    if (pack(&pass->operation[pass->number], PyTuple_GET_ITEM(operations, pass->number))) {
      PyMem_Free(pass);
      return NULL;
    }
  return PyCapsule_New(pass, NULL, destroy);
}

static CUresult enqueue(const Operation *op, const unsigned long long *address, CUstream stream) {
  static const cuuint32_t ones[MOST_AXES] = {1, 1, 1, 1, 1};
  if (!op->function) return set_memory(address[op->slot] + op->offset, 0, op->bytes, stream);
  _Alignas(64) unsigned char image[MOST_BYTES];
  void *where[MOST_PARAMETERS];
  memcpy(image, op->image, op->used);
  for (int i = 0, parameter = 0; i < op->parameters; i++) {
    const Parameter *p = &op->parameter[i];
    void *value = image + p->at;
    if (!p->inside) where[parameter++] = value;
    if (p->kind == ADDRESS) *(unsigned long long *)value = p->slot < 0 ? p->offset : address[p->slot] + p->offset;
    if (p->kind != MAP) continue;
    const Map *map = &op->map[p->map];
    CUresult failed = encode_map(value, map->type, map->rank, (void *)(address[p->slot] + p->offset), map->shape, map->strides,
                                 map->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (failed) return failed;
  }
  CUlaunchConfig config = {.gridDimX = op->blocks, .gridDimY = 1, .gridDimZ = 1, .blockDimX = op->threads, .blockDimY = 1,
                           .blockDimZ = 1, .sharedMemBytes = op->shared, .hStream = stream};
  return launch_kernel(&config, op->function, where, NULL);
}

static PyObject *run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  unsigned long long address[MOST_BUFFERS];
  if (count < 2 || count - 2 > MOST_BUFFERS) return PyErr_Format(PyExc_ValueError, "expected a capsule, a stream and buffers");
  const Pass *pass = PyCapsule_GetPointer(arguments[0], NULL);
  if (!pass) return NULL;
  if (!launch_kernel || !set_memory || !encode_map) return PyErr_Format(PyExc_RuntimeError, "there is no CUDA driver");
  CUstream stream = (CUstream)PyLong_AsUnsignedLongLong(arguments[1]);
  for (Py_ssize_t i = 2; i < count; i++) address[i - 2] = PyLong_AsUnsignedLongLong(arguments[i]);
  if (PyErr_Occurred()) return NULL;
  CUresult failed = CUDA_SUCCESS;
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < pass->number && !failed; i++) failed = enqueue(&pass->operation[i], address, stream);
  Py_END_ALLOW_THREADS
  if (failed) return PyErr_Format(PyExc_RuntimeError, "CUDA driver error %d in a replayed launch", (int)failed);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"make", make, METH_O, "Pack operations; return a capsule."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, "Enqueue the operations of a capsule."},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "canon_replay", NULL, -1, methods};

PyMODINIT_FUNC PyInit_canon_replay(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver) {
    *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernelEx");
    *(void **)&set_memory = dlsym(driver, "cuMemsetD8Async");
    *(void **)&encode_map = dlsym(driver, "cuTensorMapEncodeTiled");
  }
  return PyModule_Create(&module);
}
