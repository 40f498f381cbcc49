/* Tokens of documents that lie anywhere in memory, gathered into the rows of a batch.

   It knows addresses, lengths, dtypes, a destination, the tokens around a document, and a row of integers that says how far
   it has come: nothing of files, shards or ranks. `gather.py` says what each thing means, and does the same in NumPy; it has checked
   that every address lies in an array that is alive. The GIL is released while tokens are copied.

   Python's limited API: one build serves every Python from 3.11 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch((const void*)(address))
#else
#define PREFETCH(address) ((void)(address))
#endif

/* The same loops for wider vectors, chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 14)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum { MARK = -1, I1 = 0, U1, I2, U2, I4, U4, I8, U8 }; /* the dtype of a document; a mark has no token */
enum { ADDRESS, KIND, LENGTH, ENDS, SLOT, VALUE, POSITION, NUM_BUFFERS };
enum { DONE, TOO_LARGE };

typedef struct {
  PyObject_HEAD
  PyObject* owner;
  Py_buffer buffers[NUM_BUFFERS];
  int num_buffers;
  const int64_t *address, *length, *ends, *slot, *value;
  const int8_t* kind;
  int64_t* position; /* the offset in the document, then what documents move */
  int64_t num_documents, document, offset, left, bos, eos;
} Stretch;

/* Copying. Documents lie anywhere, so that no processor foresees the next one: for each line of memory that is copied, one of
   the next document is asked for, and the rest of it, up to a page, at the end. */

enum { LINE = 64, PAGE = 4096 };

typedef struct {
  int64_t address, size;
} Bytes;

#define NONE(v) 0 /* which values do not fit */
#define ABOVE(v) ((uint64_t)(v) > (uint64_t)MAX)
#define OUTSIDE(v) ((v) > MAX || (v) < MIN)
#define CASE(CODE, T, BAD) \
  case CODE: { \
    const T* p = (const T*)address + first; \
    const int64_t step = LINE / sizeof(T); \
    int64_t i = 0; \
    for (; i + step <= n; i += step, next.address += LINE, next.size -= LINE) { \
      if (next.size > 0) PREFETCH(next.address); \
      for (int64_t k = i; k < i + step; k++) { \
        wrong |= BAD(p[k]); \
        q[k] = (OUT)p[k]; \
      } \
    } \
    for (; i < n; i++) { \
      wrong |= BAD(p[i]); \
      q[i] = (OUT)p[i]; \
    } \
    break; \
  }

CLONES static int copy_64(int64_t* q, int64_t address, int64_t first, int64_t n, int kind, Bytes next) {
  typedef int64_t OUT;
  const int64_t MAX = INT64_MAX;
  int wrong = 0;
  switch (kind) {
    CASE(I1, int8_t, NONE) CASE(U1, uint8_t, NONE) CASE(I2, int16_t, NONE) CASE(U2, uint16_t, NONE)
    CASE(I4, int32_t, NONE) CASE(U4, uint32_t, NONE) CASE(I8, int64_t, NONE) CASE(U8, uint64_t, ABOVE)
  }
  for (int64_t size = next.size < PAGE ? next.size : PAGE; size > 0; size -= LINE, next.address += LINE) PREFETCH(next.address);
  return wrong ? TOO_LARGE : DONE;
}

CLONES static int copy_32(int32_t* q, int64_t address, int64_t first, int64_t n, int kind, Bytes next) {
  typedef int32_t OUT;
  const int64_t MIN = INT32_MIN, MAX = INT32_MAX;
  int wrong = 0;
  switch (kind) {
    CASE(I1, int8_t, NONE) CASE(U1, uint8_t, NONE) CASE(I2, int16_t, NONE) CASE(U2, uint16_t, NONE)
    CASE(I4, int32_t, NONE) CASE(U4, uint32_t, ABOVE) CASE(I8, int64_t, OUTSIDE) CASE(U8, uint64_t, ABOVE)
  }
  for (int64_t size = next.size < PAGE ? next.size : PAGE; size > 0; size -= LINE, next.address += LINE) PREFETCH(next.address);
  return wrong ? TOO_LARGE : DONE;
}

/* Samples. Each is written whole or not at all: the position moves behind it when it is there. */

static int64_t total_of(const Stretch* s, int64_t d) {
  return s->kind[d] == MARK ? 0 : s->length[d] + (s->bos >= 0) + (s->eos >= 0);
}

/* What is read after document d, up to a page of it: the one behind it, or where the next row goes on. */
static Bytes bytes_of(const Stretch* s, int64_t d, int64_t o) {
  static const int64_t widths[] = {1, 1, 2, 2, 4, 4, 8, 8};
  Bytes found = {0, 0};
  if (s && d < s->num_documents && s->kind[d] != MARK) {
    int64_t width = widths[s->kind[d]], size = (s->length[d] - o) * width;
    found.address = s->address[d] + o * width, found.size = size < PAGE ? size : PAGE;
  }
  return found;
}

static void move_to(Stretch* s, int64_t d, int64_t o, int64_t size) {
  for (int64_t k = s->ends[s->document]; k < s->ends[d]; k++) s->position[1 + s->slot[k]] = s->value[k];
  s->position[0] = s->offset = o;
  s->document = d;
  s->left -= size;
}

#define DEFINE(BITS) \
  static void piece_##BITS(const Stretch* s, int64_t d, int64_t o, int64_t n, int##BITS##_t* q, Bytes next, int* status) { \
    int64_t begin = s->bos >= 0, body; \
    if (begin && o == 0 && n > 0) { \
      *q++ = (int##BITS##_t)s->bos; \
      o++, n--; \
    } \
    body = begin + s->length[d] - o; \
    if (body > n) body = n; \
    if (body > 0) { \
      *status |= copy_##BITS(q, s->address[d], o - begin, body, s->kind[d], next); \
      q += body, n -= body; \
    } \
    if (n > 0) *q = (int##BITS##_t)s->eos; \
  } \
  static int sample_##BITS(Stretch* s, const Stretch* below, int##BITS##_t* tokens, int##BITS##_t* labels, int##BITS##_t* ids, \
                           int64_t size) { \
    const Bytes nothing = {0, 0}; \
    int64_t d = s->document, o = s->offset, k = 0, id = 0; \
    int status = DONE; \
    while (k < size) { \
      int64_t total = total_of(s, d), n = total - o; \
      if (n > size - k) n = size - k; \
      if (n > 0) { \
        Bytes next = k + n < size ? bytes_of(s, d + 1, 0) : below ? bytes_of(below, below->document, below->offset) : nothing; \
        piece_##BITS(s, d, o, n, tokens + k, next, &status); \
        if (ids) { \
          for (int64_t i = 0; i < n; i++) ids[k + i] = (int##BITS##_t)id; \
          id++; \
        } \
      } \
      k += n, o += n; \
      if (o == total) d++, o = 0; \
    } \
    if (labels) { \
      int64_t next = d, at = o; \
      memcpy(labels, tokens + 1, (size - 1) * sizeof(*tokens)); \
      while (total_of(s, next) == at) next++, at = 0; \
      piece_##BITS(s, next, at, 1, labels + size - 1, nothing, &status); \
    } \
    if (status == DONE) move_to(s, d, o, size); \
    return status; \
  }

DEFINE(64)
DEFINE(32)

/* Stretch */

static int error(const char* message) {
  PyErr_SetString(PyExc_ValueError, message);
  return -1;
}

static int take_buffers(Stretch* s, PyObject** objects) {
  for (; s->num_buffers < NUM_BUFFERS; s->num_buffers++) {
    int flags = s->num_buffers == POSITION ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(objects[s->num_buffers], &s->buffers[s->num_buffers], flags)) return -1;
  }
  return 0;
}

static int check(Stretch* s) {
  const int64_t num = s->num_documents, num_moves = s->buffers[SLOT].len / 8, slots = s->buffers[POSITION].len / 8 - 1;
  if (s->buffers[ADDRESS].len != 8 * num || s->buffers[KIND].len != num || s->buffers[ENDS].len != 8 * (num + 1) ||
      s->buffers[VALUE].len != 8 * num_moves || slots < 0)
    return error("arrays of a stretch differ in length");
  if (s->ends[0] != 0 || s->ends[num] > num_moves) return error("moves of a stretch are out of range");
  for (int64_t d = 0; d < num; d++) {
    if (s->ends[d + 1] < s->ends[d]) return error("moves of a stretch are not in order");
    if (s->kind[d] < MARK || s->kind[d] > U8 || s->length[d] < 0) return error("a document of a stretch has no such dtype or length");
    s->left += total_of(s, d);
  }
  for (int64_t k = 0; k < num_moves; k++)
    if (s->slot[k] < 0 || s->slot[k] >= slots) return error("a stretch moves what is no part of the position");
  if (s->offset < 0 || (s->offset > 0 && (num == 0 || s->offset > total_of(s, 0))))
    return error("the position is behind the end of its document: the data is not what it was when the position was saved");
  s->left -= s->offset;
  return 0;
}

static PyObject* stretch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *objects[NUM_BUFFERS], *owner;
  long long bos, eos;
  if (kwargs && PyDict_Size(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "a stretch takes no keyword");
    return NULL;
  }
  if (!PyArg_ParseTuple(args, "OOOOOOOLLO", &objects[ADDRESS], &objects[KIND], &objects[LENGTH], &objects[ENDS], &objects[SLOT],
                        &objects[VALUE], &objects[POSITION], &bos, &eos, &owner))
    return NULL;
  allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Stretch* s = (Stretch*)alloc(type, 0);
  if (!s) return NULL;
  Py_INCREF(owner);
  s->owner = owner;
  if (take_buffers(s, objects)) goto fail;
  s->address = s->buffers[ADDRESS].buf, s->kind = s->buffers[KIND].buf, s->length = s->buffers[LENGTH].buf;
  s->ends = s->buffers[ENDS].buf, s->slot = s->buffers[SLOT].buf, s->value = s->buffers[VALUE].buf;
  s->position = s->buffers[POSITION].buf;
  s->num_documents = s->buffers[LENGTH].len / 8, s->bos = bos, s->eos = eos;
  s->offset = s->buffers[POSITION].len >= 8 ? s->position[0] : -1;
  if (check(s)) goto fail;
  return (PyObject*)s;
fail:
  Py_DECREF(s);
  return NULL;
}

static void stretch_dealloc(PyObject* self) {
  Stretch* s = (Stretch*)self;
  PyTypeObject* type = Py_TYPE(self);
  while (s->num_buffers > 0) PyBuffer_Release(&s->buffers[--s->num_buffers]);
  Py_CLEAR(s->owner);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyObject* get_owner(PyObject* self, void* unused) {
  PyObject* owner = ((Stretch*)self)->owner;
  Py_INCREF(owner);
  return owner;
}
static PyObject* get_document(PyObject* self, void* unused) { return PyLong_FromLongLong(((Stretch*)self)->document); }
static PyObject* get_left(PyObject* self, void* unused) { return PyLong_FromLongLong(((Stretch*)self)->left); }

static PyGetSetDef stretch_getset[] = {
    {"owner", get_owner, NULL, NULL, NULL},
    {"document", get_document, NULL, NULL, NULL},
    {"left", get_left, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot stretch_slots[] = {
    {Py_tp_new, stretch_new}, {Py_tp_dealloc, stretch_dealloc}, {Py_tp_getset, stretch_getset}, {0, NULL}};
static PyType_Spec stretch_spec = {"rescale_data.nodes.reading.kernel.Stretch", sizeof(Stretch), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, stretch_slots};

/* Functions */

typedef struct {
  PyObject* stretch_type;
} State;

static int open_rows(PyObject* object, Py_buffer* view, const Py_buffer* like) {
  view->obj = NULL;
  if (object == Py_None) return 0;
  if (PyObject_GetBuffer(object, view, PyBUF_STRIDED)) return -1;
  if (view->ndim != 2 || (view->itemsize != 8 && view->itemsize != 4) || view->strides[1] != view->itemsize)
    return error("a batch is written into rows of int64 or int32");
  if (like && (view->shape[0] != like->shape[0] || view->shape[1] != like->shape[1] || view->itemsize != like->itemsize))
    return error("the columns of a batch differ in shape or dtype");
  return 0;
}

static char* row_of(const Py_buffer* view, Py_ssize_t row) {
  return view->obj ? (char*)view->buf + row * view->strides[0] : NULL;
}

/* fill(stretches, first, tokens, labels, doc_ids) -> the first row that was not written */
static PyObject* fill(PyObject* module, PyObject* args) {
  enum { MOST = 64 };
  State* state = PyModule_GetState(module);
  PyObject *list, *objects[3], *result = NULL;
  Py_ssize_t first, num;
  Py_buffer rows[3] = {{0}, {0}, {0}};
  if (!PyArg_ParseTuple(args, "OnOOO", &list, &first, &objects[0], &objects[1], &objects[2])) return NULL;
  if (!PyList_Check(list) || first < 0) {
    PyErr_SetString(PyExc_TypeError, "fill takes a list of stretches, and the first of them");
    return NULL;
  }
  num = PyList_Size(list);
  if (open_rows(objects[0], &rows[0], NULL) || open_rows(objects[1], &rows[1], &rows[0]) || open_rows(objects[2], &rows[2], &rows[0]))
    goto done;
  if (!rows[0].obj || num > rows[0].shape[0]) {
    error("a batch has fewer rows than there are stretches");
    goto done;
  }
  const int64_t size = rows[0].shape[1], needed = size + (rows[1].obj != NULL);
  int status = DONE, is_over = 0;
  while (first < num && !is_over && status == DONE) {
    Stretch* some[MOST];
    Py_ssize_t count = 0, at = first;
    while (count < MOST && at < num) {
      PyObject* item = PyList_GetItem(list, at);
      if (!item || !PyObject_TypeCheck(item, (PyTypeObject*)state->stretch_type)) break;
      Py_INCREF(item);
      some[count++] = (Stretch*)item, at++;
    }
    is_over = at < num && count < MOST;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
      if (some[i]->left < needed || size < 1) {
        is_over = 1;
        break;
      }
      char *t = row_of(&rows[0], first), *l = row_of(&rows[1], first), *d = row_of(&rows[2], first);
      const Stretch* below = i + 1 < count ? some[i + 1] : NULL;
      status = rows[0].itemsize == 8 ? sample_64(some[i], below, (int64_t*)t, (int64_t*)l, (int64_t*)d, size)
                                     : sample_32(some[i], below, (int32_t*)t, (int32_t*)l, (int32_t*)d, size);
      if (status != DONE) break;
      first++;
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(some[i]);
  }
  result = PyLong_FromSsize_t(first);
  if (status == TOO_LARGE && result) {
    PyErr_SetObject(PyExc_OverflowError, result);
    Py_CLEAR(result);
  }
done:
  for (int i = 0; i < 3; i++)
    if (rows[i].obj) PyBuffer_Release(&rows[i]);
  return result;
}

/* join(addresses, numbers of bytes, destination): pieces of memory, one behind the other */
static PyObject* join(PyObject* module, PyObject* args) {
  PyObject *objects[3], *result = NULL;
  Py_buffer views[3];
  int num_views = 0;
  if (!PyArg_ParseTuple(args, "OOO", &objects[0], &objects[1], &objects[2])) return NULL;
  for (; num_views < 3; num_views++)
    if (PyObject_GetBuffer(objects[num_views], &views[num_views], num_views == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) goto done;
  const int64_t *address = views[0].buf, *length = views[1].buf, num = views[0].len / 8;
  int64_t total = 0;
  for (int64_t i = 0; i < num && views[1].len == views[0].len; i++) {
    if (length[i] < 0 || length[i] > views[2].len - total) break;
    total += length[i];
  }
  if (total != views[2].len || views[1].len != views[0].len) {
    error("the pieces do not fill their destination");
    goto done;
  }
  char* q = views[2].buf;
  Py_BEGIN_ALLOW_THREADS
  for (int64_t i = 0; i < num; i++) {
    if (i + 1 < num) PREFETCH(address[i + 1]);
    memcpy(q, (const char*)address[i], length[i]);
    q += length[i];
  }
  Py_END_ALLOW_THREADS
  result = Py_None;
  Py_INCREF(result);
done:
  while (num_views > 0) PyBuffer_Release(&views[--num_views]);
  return result;
}

static int start(PyObject* module) {
  State* state = PyModule_GetState(module);
  state->stretch_type = PyType_FromModuleAndSpec(module, &stretch_spec, NULL);
  return state->stretch_type ? PyModule_AddObjectRef(module, "Stretch", state->stretch_type) : -1;
}

static int traverse(PyObject* module, visitproc visit, void* arg) {
  Py_VISIT(((State*)PyModule_GetState(module))->stretch_type);
  return 0;
}

static int clear(PyObject* module) {
  Py_CLEAR(((State*)PyModule_GetState(module))->stretch_type);
  return 0;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS, NULL}, {"join", join, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", NULL, sizeof(State), methods, slots, traverse, clear, NULL};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&definition); }
