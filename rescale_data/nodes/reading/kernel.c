/* Tokens of documents that lie anywhere in memory, gathered into the rows of a batch.

   It knows addresses, lengths, dtypes, a destination, the tokens around a document, and a row of integers for the position. It
   knows nothing of files, shards or ranks. `gather.py` explains the terms; it has checked that every
   address lies in an array that is alive. The GIL is released while tokens are copied.

   Python's limited API: one build serves every Python from 3.11 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define VERSION 6 /* changes with the functions that Python calls: see extension.py */

PyObject* run(PyObject* module, PyObject* args); /* both in draws.c */
PyObject* interleave(PyObject* module, PyObject* args);
int refuse(const char* message); /* these for draws.c, too */
Py_buffer* open_buffers(PyObject* args, Py_ssize_t first, Py_ssize_t least, unsigned written);
PyObject* close_buffers(Py_buffer* views, int is_done);

#if defined(__GNUC__) || defined(__clang__)
/* Fetch, but not into the nearest cache, which writing fills. Without the second statement, GCC removes functions that only fetch. */
#define PREFETCH(address) \
  do { \
    __builtin_prefetch((const void*)(address), 0, 2); \
    __asm__ volatile(""); \
  } while (0)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* The same loops for wider vectors, chosen when the module is loaded. */
#if defined(__SANITIZE_ADDRESS__) /* the sanitizer is not ready when functions are chosen */
#define CLONES
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"))) /* avx512f does not widen 16 bits */
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 14)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum { MARK = -1, I1 = 0, U1, I2, U2, I4, U4, I8, U8 }; /* the dtype of a document; a mark has no token */
enum { FAILED = -1, DONE, TOO_LARGE };

typedef struct {
  int64_t address, length, moves; /* moves: of this document and all before it */
  int32_t part, index;            /* number of the appended part, and of the document in it */
  int32_t kind;
} Document;

typedef struct {
  int64_t slot, value;
} Move;

typedef struct {
  PyObject_HEAD
  PyObject* parts; /* the spans that keep the tokens alive, from the document of the next token on */
  Document* documents;
  Move* moves;
  Py_buffer position, reach;
  int64_t num_documents, document, offset, left, bos, eos;
  int32_t num_parts, first_part; /* number of parts appended, and the first that is still kept */
  const void* busy; /* the call of `fill` that draws from the queue, by the address of its rows; NULL if none does */
  int used;
} TokenQueue;

/* Copying. Documents lie anywhere, so no processor can predict the next one. The first pages of many documents are prefetched
   together, because finding many pages takes about as long as finding one. If many tokens are copied, wide vectors are written to
   whole lines. */

enum { LINE = 64, PAGE = 4096, LONG = 128, AHEAD = 1 << 15 /* bytes */ };

#define NONE(v) 0 /* NONE, ABOVE and OUTSIDE: true if a value does not fit */
#define ABOVE(v) ((uint64_t)(v) > (uint64_t)MAX)
#define OUTSIDE(v) ((v) > MAX || (v) < MIN)
#define PUT(BAD, FROM, TO) \
  for (int64_t k = FROM; k < (TO); k++) { \
    wrong |= BAD(p[k]); \
    q[k] = (OUT)p[k]; \
  }
#define CASE(CODE, T, BAD) \
  case CODE: { \
    const T* p = (const T*)address + first; \
    const int64_t step = LINE / sizeof(T); \
    int64_t i = n < head ? n : head; \
    PUT(BAD, 0, i) \
    for (; i + step <= n; i += step) { \
      PUT(BAD, i, i + step) \
    } \
    PUT(BAD, i, n) \
    break; \
  }
#define DEFINE_COPY(BITS) \
  CLONES static int copy_##BITS(int##BITS##_t* __restrict q, int64_t address, int64_t first, int64_t n, int kind) { \
    typedef int##BITS##_t OUT; \
    const int64_t MIN = INT##BITS##_MIN, MAX = INT##BITS##_MAX; \
    const int64_t head = n < LONG ? 0 : (int64_t)(-(uintptr_t)q % LINE / sizeof(OUT)); \
    int wrong = 0; \
    switch (kind) { \
      CASE(I1, int8_t, NONE) CASE(U1, uint8_t, NONE) CASE(I2, int16_t, NONE) CASE(U2, uint16_t, NONE) \
      CASE(I4, int32_t, NONE) CASE(U4, uint32_t, ABOVE) CASE(I8, int64_t, OUTSIDE) CASE(U8, uint64_t, ABOVE) \
    } \
    return wrong ? TOO_LARGE : DONE; \
  }

DEFINE_COPY(64)
DEFINE_COPY(32)

/* Samples. Each is written whole or not at all: the position moves behind a sample after it has been written. */

static int64_t width_of(int64_t kind) { return kind < 0 ? 0 : 1 << (kind / 2); }

static int64_t total_of(const TokenQueue* s, const Document* d) {
  return d->kind == MARK ? 0 : d->length + (s->bos >= 0) + (s->eos >= 0);
}

static void move(int64_t* position, const Move* from, const Move* to) {
  for (; from < to; from++) position[from->slot] = from->value;
}

static int64_t moves_before(const TokenQueue* s, int64_t d) { return d ? s->documents[d - 1].moves : 0; }

/* Prefetch the documents that hold the next num_tokens, from a token of document d on, or the first of them; return the first
   document that was left out. */
static int64_t ask_for(const TokenQueue* s, int64_t d, int64_t offset, int64_t num_tokens) {
  for (int64_t asked = 0; d < s->num_documents && num_tokens > 0 && asked < AHEAD; d++, offset = 0) {
    const Document* found = s->documents + d;
    num_tokens -= total_of(s, found) - offset;
    PREFETCH(s->moves + moves_before(s, d));
    if (found->kind == MARK) continue;
    const char* from = (const char*)found->address + offset * width_of(found->kind);
    int64_t size = (found->length - offset) * width_of(found->kind);
    size = size < PAGE ? size : PAGE, asked += size;
    for (int64_t at = 0; at < size; at += LINE) PREFETCH(from + at);
    if (size > 0) PREFETCH(from + size - 1);
  }
  return d;
}

static void move_to(TokenQueue* s, int64_t d, int64_t o, int64_t size) {
  int64_t* position = s->position.buf;
  move(position + 1, s->moves + moves_before(s, s->document), s->moves + moves_before(s, d));
  position[0] = s->offset = o;
  s->document = d, s->left -= size, s->used = 1;
}

#define DEFINE(BITS) \
  static void piece_##BITS(const TokenQueue* s, const Document* d, int64_t o, int64_t n, int##BITS##_t* q, int* status) { \
    int64_t begin = s->bos >= 0, body; \
    if (begin && o == 0 && n > 0) { \
      *q++ = (int##BITS##_t)s->bos; \
      o++, n--; \
    } \
    body = begin + d->length - o; \
    if (body > n) body = n; \
    if (body > 0) { \
      *status |= copy_##BITS(q, d->address, o - begin, body, d->kind); \
      q += body, n -= body; \
    } \
    if (n > 0) *q = (int##BITS##_t)s->eos; \
  } \
  static int sample_##BITS(TokenQueue* s, const TokenQueue* below, int##BITS##_t* tokens, int##BITS##_t* labels, int##BITS##_t* ids, \
                           int64_t size) { \
    int64_t d = s->document, o = s->offset, k = 0, id = 0, asked = d; \
    int status = DONE; \
    for (int line = 0; below && line < 4; line++) PREFETCH((const char*)(below->documents + below->document) + line * LINE); \
    while (k < size) { \
      if (d == asked) asked = ask_for(s, d, o, size - k); \
      int64_t total = total_of(s, s->documents + d), n = total - o; \
      if (n > size - k) n = size - k; \
      if (n > 0) { \
        piece_##BITS(s, s->documents + d, o, n, tokens + k, &status); \
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
      while (total_of(s, s->documents + next) == at) next++, at = 0; \
      piece_##BITS(s, s->documents + next, at, 1, labels + size - 1, &status); \
    } \
    if (status == DONE) move_to(s, d, o, size); \
    return status; \
  }

DEFINE(64)
DEFINE(32)

/* Arguments */

int refuse(const char* message) {
  PyErr_SetString(PyExc_ValueError, message);
  return -1;
}

/* Release the buffers of `open_buffers`; return None, or NULL after an error. */
PyObject* close_buffers(Py_buffer* views, int is_done) {
  for (Py_buffer* view = views; view->buf != views; view++) PyBuffer_Release(view);
  PyMem_Free(views);
  return is_done ? Py_NewRef(Py_None) : NULL;
}

/* Open the buffers of all arguments from `first` on, `least` or more, those with a bit in `written` to write; None has no bytes.
   One more view marks the end: its address is that of the views. */
Py_buffer* open_buffers(PyObject* args, Py_ssize_t first, Py_ssize_t least, unsigned written) {
  const Py_ssize_t num = PyTuple_Size(args) - first;
  Py_buffer* views = num < least ? NULL : PyMem_Calloc(num + 1, sizeof(*views));
  if (!views) PyErr_SetString(num < least ? PyExc_TypeError : PyExc_MemoryError, "too few arguments, or too little memory for them");
  else views[num].buf = views;
  for (Py_ssize_t i = 0; views && i < num; i++) {
    PyObject* each = PyTuple_GetItem(args, first + i);
    const int flags = i < 32 && written >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (each != Py_None && PyObject_GetBuffer(each, &views[i], flags)) views = (Py_buffer*)close_buffers(views, 0);
  }
  return views;
}

/* TokenQueue */

static PyObject* queue_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  Py_buffer position, reach;
  long long bos, eos;
  static char* names[] = {"", "", "", "", NULL}; /* no keywords */
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*w*LL", names, &position, &reach, &bos, &eos)) return NULL;
  const int64_t offset = position.len < 8 ? -1 : *(int64_t*)position.buf;
  const int is_fit = offset >= 0 && reach.len == position.len - 8;
  TokenQueue* s = is_fit ? (TokenQueue*)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0) : NULL;
  if (!is_fit) refuse("a token queue moves an offset, of 0 or more, and slots, and its reach is those slots");
  if (!s) {
    PyBuffer_Release(&position);
    PyBuffer_Release(&reach);
    return NULL;
  }
  s->position = position, s->reach = reach, s->bos = bos, s->eos = eos, s->offset = offset, s->left = -offset;
  if (!(s->parts = PyList_New(0))) Py_CLEAR(s);
  return (PyObject*)s;
}

static void queue_dealloc(PyObject* self) {
  TokenQueue* s = (TokenQueue*)self;
  PyTypeObject* type = Py_TYPE(self);
  PyBuffer_Release(&s->position);
  PyBuffer_Release(&s->reach);
  PyMem_Free(s->documents);
  PyMem_Free(s->moves);
  Py_CLEAR(s->parts);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* Drop the documents that were passed, and make room for new ones behind the rest. */
static int make_room(TokenQueue* s, int64_t num_documents, int64_t num_moves) {
  const int64_t passed = s->document, left = s->num_documents - passed;
  const int64_t moved = moves_before(s, passed), moves = moves_before(s, s->num_documents) - moved;
  if (left) memmove(s->documents, s->documents + passed, left * sizeof(Document));
  if (moves) memmove(s->moves, s->moves + moved, moves * sizeof(Move));
  for (int64_t d = 0; d < left; d++) s->documents[d].moves -= moved;
  s->num_documents = left, s->document = 0;
  Document* documents = PyMem_Realloc(s->documents, (left + num_documents + 1) * sizeof(Document));
  Move* all_moves = PyMem_Realloc(s->moves, (moves + num_moves + 1) * sizeof(Move));
  if (documents) s->documents = documents;
  if (all_moves) s->moves = all_moves;
  if (!documents || !all_moves) PyErr_NoMemory();
  return documents && all_moves ? 0 : -1;
}

/* Write the address, number of values and dtype of each array into `found`. */
static int look_at(PyObject* arrays, int64_t (*found)[3], Py_ssize_t num) {
  static const char* letters = "bBhHiIlLqQ";
  static const int kinds[] = {I1, U1, I2, U2, I4, U4, I8, U8, I8, U8};
  for (Py_ssize_t i = 0; i < num; i++) {
    Py_buffer view;
    PyObject* array = PyTuple_GetItem(arrays, i);
    if (!array || PyObject_GetBuffer(array, &view, PyBUF_ND | PyBUF_FORMAT)) return -1;
    const char* letter = view.format && view.format[0] ? strchr(letters, view.format[0]) : NULL;
    int kind = letter && !view.format[1] ? kinds[letter - letters] : MARK;
    if (kind == I8 || kind == U8) kind = view.itemsize == 8 ? kind : kind - 2; /* the size of a long depends on the platform */
    const int64_t size = kind == MARK ? 0 : view.len / view.itemsize;
    found[i][0] = (int64_t)view.buf, found[i][1] = size, found[i][2] = kind;
    PyBuffer_Release(&view); /* the appended spans keep the array alive */
    if (kind == MARK) return refuse("tokens are integers in the order of the machine");
  }
  return 0;
}

enum { ARRAY, START, LENGTH, ENDS, SLOT, VALUE, NUM_BUFFERS };

static int read_documents(TokenQueue* s, int64_t (*arrays)[3], int64_t num_arrays, Py_buffer* buffers) {
  const int64_t num = buffers[LENGTH].len / 8, num_moves = buffers[SLOT].len / 8, slots = s->reach.len / 8;
  const int64_t *array = buffers[ARRAY].buf, *start = buffers[START].buf, *length = buffers[LENGTH].buf, *ends = buffers[ENDS].buf;
  const int64_t *slot = buffers[SLOT].buf, *value = buffers[VALUE].buf, before = moves_before(s, s->num_documents);
  Document* d = s->documents + s->num_documents;
  int64_t left = s->left;
  if (buffers[ARRAY].len != 8 * num || buffers[START].len != 8 * num || buffers[ENDS].len != 8 * (num + 1) ||
      buffers[VALUE].len != 8 * num_moves)
    return refuse("arrays of documents differ in length");
  if (ends[0] != 0 || ends[num] > num_moves) return refuse("moves of documents are out of range");
  for (int64_t i = 0; i < num; i++, d++) {
    const int64_t which = array[i], *found = which < 0 || which >= num_arrays ? NULL : arrays[which];
    if (ends[i + 1] < ends[i]) return refuse("moves of documents are not in order");
    if (which < MARK || which >= num_arrays || start[i] < 0 || length[i] < 0 ||
        (found ? start[i] > found[1] || length[i] > found[1] - start[i] : start[i] | length[i]))
      return PyErr_SetString(PyExc_IndexError, "a document reaches beyond its array, or lies in none"), -1;
    d->kind = found ? (int32_t)found[2] : MARK, d->length = length[i];
    d->address = found ? found[0] + start[i] * width_of(found[2]) : 0;
    d->moves = before + ends[i + 1], d->part = s->num_parts, d->index = (int32_t)i;
    left += total_of(s, d);
  }
  for (int64_t k = 0; k < num_moves; k++) {
    if (slot[k] < 0 || slot[k] >= slots) return refuse("a document moves what is no part of the position");
    s->moves[before + k].slot = slot[k], s->moves[before + k].value = value[k];
  }
  if (num && s->num_documents == 0 && s->offset > total_of(s, s->documents))
    return refuse("the position is behind the end of its document: the data is not what it was when the position was saved");
  s->left = left, s->num_documents += num;
  move(s->reach.buf, s->moves + before, s->moves + before + ends[num]);
  return 0;
}

/* Release the parts that have been passed. */
static int drop_passed(TokenQueue* s) {
  const int64_t last = s->document < s->num_documents ? s->document : s->num_documents - 1;
  const int32_t passed = (last < 0 ? s->num_parts : s->documents[last].part) - s->first_part;
  if (passed <= 0) return 0;
  s->first_part += passed;
  return PyList_SetSlice(s->parts, 0, passed, NULL);
}

/* append(arrays, owner, array, start, length, ends, slot, value) */
static PyObject* append(PyObject* self, PyObject* args) {
  TokenQueue* s = (TokenQueue*)self;
  Py_buffer* buffers = open_buffers(args, 2, NUM_BUFFERS, 0);
  if (!buffers) return NULL;
  PyObject* arrays = PyTuple_GetItem(args, 0);
  const Py_ssize_t num_arrays = PyTuple_Check(arrays) ? PyTuple_Size(arrays) : -1;
  int64_t(*found)[3] = PyMem_Malloc((num_arrays + 2) * sizeof(*found));
  int is_done = 0;
  if (!found) PyErr_NoMemory();
  else if (num_arrays < 0) PyErr_SetString(PyExc_TypeError, "the arrays of documents are a tuple");
  else if (s->busy) refuse("a token queue grows while it is drawn from in another thread");
  else if (!look_at(arrays, found, num_arrays) && !make_room(s, buffers[LENGTH].len / 8, buffers[SLOT].len / 8) &&
           !PyList_Append(s->parts, PyTuple_GetItem(args, 1))) {
    is_done = !read_documents(s, found, num_arrays, buffers);
    s->num_parts += is_done;
    if (!is_done) PyList_SetSlice(s->parts, PyList_Size(s->parts) - 1, PyList_Size(s->parts), NULL);
    else is_done = !drop_passed(s); /* the last drawn token may have been the last of the older parts */
  }
  PyMem_Free(found);
  return close_buffers(buffers, is_done);
}

/* Return the index of the next token's document in the first of the parts. */
static PyObject* get_document(PyObject* self, void* unused) {
  const TokenQueue* s = (TokenQueue*)self;
  if (s->document < s->num_documents) return PyLong_FromLong(s->documents[s->document].index);
  return PyLong_FromLong(s->num_documents ? s->documents[s->num_documents - 1].index + 1 : 0);
}
static PyObject* was_used(PyObject* self, PyObject* unused) {
  int used = ((TokenQueue*)self)->used;
  ((TokenQueue*)self)->used = 0;
  return PyBool_FromLong(used);
}

/* Samples of a batch */

static int open_rows(PyObject* object, Py_buffer* view, const Py_buffer* like) {
  view->obj = NULL;
  if (object == Py_None) return 0;
  if (PyObject_GetBuffer(object, view, PyBUF_RECORDS)) return -1;
  if (view->ndim != 2 || strlen(view->format) != 1 || !strchr("ilq", *view->format) || view->strides[1] != view->itemsize)
    return PyErr_SetString(PyExc_TypeError, "a batch is written into rows of int64 or int32"), -1;
  if (like && (view->shape[0] != like->shape[0] || view->shape[1] != like->shape[1] || view->itemsize != like->itemsize))
    return refuse("the columns of a batch differ in shape or dtype");
  return 0;
}

static char* row_of(const Py_buffer* view, Py_ssize_t row) {
  return view->obj ? (char*)view->buf + row * view->strides[0] : NULL;
}

/* TokenQueue.fill(queues, first, tokens, labels, doc_ids) -> the first row that was not written */
static PyObject* fill(PyObject* type, PyObject* args) {
  PyObject *list, *objects[3], *result = NULL;
  Py_ssize_t first, num = 0;
  Py_buffer rows[3] = {{0}, {0}, {0}};
  TokenQueue** queues = NULL;
  if (!PyArg_ParseTuple(args, "O!nOOO", &PyList_Type, &list, &first, &objects[0], &objects[1], &objects[2])) return NULL;
  int status = FAILED;
  if (open_rows(objects[0], &rows[0], NULL) || open_rows(objects[1], &rows[1], &rows[0]) || open_rows(objects[2], &rows[2], &rows[0]))
    goto done;
  const Py_ssize_t stop = PyList_Size(list); /* after calls of Python, which may change it */
  if (first < 0 || !rows[0].obj || stop > rows[0].shape[0]) refuse("a batch has fewer rows than there are token queues");
  else if (!(queues = PyMem_Malloc((stop + 1) * sizeof(*queues)))) PyErr_NoMemory();
  else status = DONE;
  for (; status == DONE && first + num < stop; num++) {
    TokenQueue* queue = (TokenQueue*)PyList_GetItem(list, first + num);
    if (!PyObject_TypeCheck((PyObject*)queue, (PyTypeObject*)type)) break;
    if (queue->busy && queue->busy != rows) {
      status = refuse("a token queue is drawn from in two threads");
      break;
    }
    Py_INCREF((PyObject*)queue);
    queue->busy = rows, queues[num] = queue;
  }
  const int64_t size = rows[0].obj ? rows[0].shape[1] : 0, needed = size + (rows[1].obj != NULL);
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < num && status == DONE && size > 0 && queues[i]->left >= needed; i++) {
    char *t = row_of(&rows[0], first), *l = row_of(&rows[1], first), *d = row_of(&rows[2], first);
    const TokenQueue* below = i + 1 < num ? queues[i + 1] : NULL;
    status = rows[0].itemsize == 8 ? sample_64(queues[i], below, (int64_t*)t, (int64_t*)l, (int64_t*)d, size)
                                   : sample_32(queues[i], below, (int32_t*)t, (int32_t*)l, (int32_t*)d, size);
    first += status == DONE;
  }
  Py_END_ALLOW_THREADS
  while (num > 0) {
    TokenQueue* queue = queues[--num];
    queue->busy = NULL;
    if (drop_passed(queue)) status = FAILED;
    Py_DECREF((PyObject*)queue);
  }
  result = status == FAILED ? NULL : PyLong_FromSsize_t(first);
  if (status == TOO_LARGE && result) {
    PyErr_SetObject(PyExc_OverflowError, result);
    Py_CLEAR(result);
  }
done:
  PyMem_Free(queues);
  for (int i = 0; i < 3; i++) PyBuffer_Release(&rows[i]);
  return result;
}

static PyMemberDef queue_members[] = {
    {"parts", T_OBJECT, offsetof(TokenQueue, parts), READONLY, NULL},
    {"left", T_LONGLONG, offsetof(TokenQueue, left), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef queue_getset[] = {{"document", get_document, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef queue_methods[] = {
    {"append", append, METH_VARARGS, NULL}, {"fill", fill, METH_VARARGS | METH_CLASS, NULL},
    {"was_used", was_used, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},       {Py_tp_dealloc, queue_dealloc}, {Py_tp_members, queue_members},
    {Py_tp_getset, queue_getset}, {Py_tp_methods, queue_methods}, {0, NULL}};
static PyType_Spec queue_spec = {"rescale_data.nodes.reading.kernel.TokenQueue", sizeof(TokenQueue), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, queue_slots};

/* Functions */

/* join(width, array, start, length, destination): parts of an array of numbers of `width` bytes, one behind the other */
static PyObject* join(PyObject* module, PyObject* args) {
  Py_buffer* views = open_buffers(args, 1, 4, 1 << 3);
  if (!views) return NULL;
  const int64_t width = PyLong_AsLongLong(PyTuple_GetItem(args, 0)), size = width > 0 ? views[0].len / width : 0;
  const int64_t num = views[1].len / 8, *start = views[1].buf, *length = views[2].buf;
  int64_t left = width > 0 && views[2].len == views[1].len ? views[3].len : -1;
  for (int64_t i = 0; i < num && left >= 0; i++) {
    const int is_within = start[i] >= 0 && length[i] >= 0 && start[i] <= size && length[i] <= size - start[i];
    left = is_within ? left - length[i] * width : -1;
  }
  char *q = views[3].buf, *from = views[0].buf;
  Py_BEGIN_ALLOW_THREADS
  for (int64_t i = 0; i < num && !left; q += length[i++] * width) {
    if (i + 1 < num) PREFETCH(from + start[i + 1] * width);
    if (length[i]) memcpy(q, from + start[i] * width, length[i] * width);
  }
  Py_END_ALLOW_THREADS
  if (left) refuse("the parts do not lie within their array, or do not fill their destination");
  return close_buffers(views, !left);
}

static int64_t last_at_most(const int64_t* sorted, int64_t num, int64_t value) {
  int64_t low = 0;
  while (num > 1) {
    int64_t half = num / 2;
    if (sorted[low + half] <= value) low += half;
    num -= half;
  }
  return low;
}

/* find(rows, starts, which) -> the fragments in which the rows lie, in order; the index of each row's fragment goes into `which` */
static PyObject* find(PyObject* module, PyObject* args) {
  Py_buffer* views = open_buffers(args, 0, 3, 1 << 2);
  if (!views) return NULL;
  const int64_t *rows = views[0].buf, *starts = views[1].buf, num = views[0].len / 8, fragments = views[1].len / 8 - 1;
  int64_t *which = views[2].buf, *used = NULL, num_used = 0, at = 0;
  PyObject* result = NULL;
  if (views[2].len != views[0].len || fragments < 1) refuse("find takes rows, the first rows of fragments, and room for a number a row");
  else if (!(used = PyMem_Malloc((num + 1) * sizeof(*used)))) PyErr_NoMemory();
  for (int64_t i = 0; used && i < num; i++) {
    if (!i || rows[i] < starts[at] || rows[i] >= starts[at + 1]) {
      at = last_at_most(starts, fragments, rows[i]);
      int64_t place = num_used ? last_at_most(used, num_used, at) : 0;
      if (!num_used || used[place] != at) {
        place += num_used && used[place] < at;
        memmove(used + place + 1, used + place, (num_used - place) * sizeof(*used));
        used[place] = at, num_used++;
      }
    }
    which[i] = at;
  }
  for (int64_t i = 0; used && i < num; i++) which[i] = last_at_most(used, num_used, which[i]);
  if (used) result = PyList_New(num_used);
  for (int64_t i = 0; result && i < num_used; i++) {
    PyObject* number = PyLong_FromLongLong(used[i]);
    if (!number || PyList_SetItem(result, i, number)) Py_CLEAR(result);
  }
  PyMem_Free(used);
  close_buffers(views, 0);
  return result;
}

/* cut(rows, which, first, start, length, *offsets): writes the place and length of each row in the values of its fragment */
static PyObject* cut(PyObject* module, PyObject* args) {
  Py_buffer *views = open_buffers(args, 0, 5, 3 << 3), *offsets = views ? views + 5 : NULL;
  if (!views) return NULL;
  const int64_t *rows = views[0].buf, *which = views[1].buf, *first = views[2].buf, num = views[0].len / 8;
  const int64_t num_fragments = PyTuple_Size(args) - 5, size = 8 * num;
  int64_t *start = views[3].buf, *length = views[4].buf, i = 0;
  const int is_fit = views[1].len == size && views[3].len == size && views[4].len == size && views[2].len == 8 * num_fragments;
  for (; is_fit && i < num; i++) {
    const int is_known = which[i] >= 0 && which[i] < num_fragments;
    const int64_t at = is_known && rows[i] >= first[which[i]] ? (int64_t)((uint64_t)rows[i] - (uint64_t)first[which[i]]) : -1;
    if (at < 0 || at >= offsets[which[i]].len / 8 - 1) break;
    const int64_t* found = (const int64_t*)offsets[which[i]].buf + at;
    start[i] = found[0], length[i] = (int64_t)((uint64_t)found[1] - (uint64_t)found[0]);
  }
  if (!is_fit) refuse("cut takes a number of fragment, and room for two numbers, of each row, and the first row of each fragment");
  else if (i < num) PyErr_SetString(PyExc_IndexError, "a row is not in its fragment");
  return close_buffers(views, is_fit && i == num);
}

/* The random words of order.py: Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). */

static void random_words(const uint64_t* key, uint64_t* words, int64_t num) {
  for (int64_t block = 0; 4 * block < num; block++) {
    uint64_t c[4] = {(uint64_t)block + 1, 0, 0, 0}, k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; round++, k[0] += 0x9E3779B97F4A7C15, k[1] += 0xBB67AE8584CAA73B) {
      const unsigned __int128 p0 = (unsigned __int128)0xD2E7470EE14C6C93 * c[0], p1 = (unsigned __int128)0xCA5A826395121157 * c[2];
      c[0] = (uint64_t)(p1 >> 64) ^ c[1] ^ k[0], c[1] = (uint64_t)p1, c[2] = (uint64_t)(p0 >> 64) ^ c[3] ^ k[1], c[3] = (uint64_t)p0;
    }
    memcpy(words + 4 * block, c, sizeof(c[0]) * (num - 4 * block < 4 ? num - 4 * block : 4));
  }
}

/* Stable sort of uniform words: the place by the first bits is nearly the place by all bits. */
static void argsort(const uint64_t* words, int64_t* order, int64_t* begins, int64_t num, int bits) {
  memset(begins, 0, (((size_t)1 << bits) + 1) * sizeof(*begins));
  for (int64_t i = 0; i < num; i++) begins[(words[i] >> (64 - bits)) + 1]++;
  for (int64_t i = 0; i < (int64_t)1 << bits; i++) begins[i + 1] += begins[i];
  for (int64_t i = 0; i < num; i++) order[begins[words[i] >> (64 - bits)]++] = i;
  for (int64_t i = 1; i < num; i++) {
    int64_t one = order[i], at = i;
    for (; at > 0 && words[order[at - 1]] > words[one]; at--) order[at] = order[at - 1];
    order[at] = one;
  }
}

/* permute(first, key, virtual, first_rows, rows): writes ShardOrder.rows of a window whose first virtual row is `first` */
static PyObject* permute(PyObject* module, PyObject* args) {
  enum { KEY, VIRTUAL, FIRST_ROWS, ROWS, NUM, MOST_BITS = 20 };
  Py_buffer* views = open_buffers(args, 1, NUM, 1 << ROWS);
  if (!views) return NULL;
  const int64_t first = PyLong_AsLongLong(PyTuple_GetItem(args, 0)); /* -1 if it is none */
  const int64_t num = views[ROWS].len / 8, fragments = views[FIRST_ROWS].len / 8;
  const int64_t *virtual = views[VIRTUAL].buf, *first_rows = views[FIRST_ROWS].buf;
  int64_t* rows = views[ROWS].buf;
  uint64_t *words = NULL, halves[2] = {0, 0};
  int bits = 1;
  while (bits < MOST_BITS && (int64_t)1 << bits < num) bits++;
  if (views[KEY].len != 16 || first < 0 || first > INT64_MAX - num || views[VIRTUAL].len != (virtual ? views[FIRST_ROWS].len + 8 : 0) ||
      (num && virtual && (!fragments || first < virtual[0] || num > virtual[fragments] || first > virtual[fragments] - num)))
    refuse("a window lies within the rows of its source, and its key has 16 bytes");
  else if (!(words = PyMem_Malloc((num + 1 + ((int64_t)1 << bits) + 1) * sizeof(*words)))) PyErr_NoMemory();
  if (!words) return close_buffers(views, 0);
  for (int i = 0; i < 16; i++) halves[i / 8] |= (uint64_t)((unsigned char*)views[KEY].buf)[i] << 8 * (i % 8);
  Py_BEGIN_ALLOW_THREADS
  random_words(halves, words, num);
  argsort(words, rows, (int64_t*)words + num + 1, num, bits);
  const int64_t low = virtual && num ? last_at_most(virtual, fragments, first) : 0;
  const int64_t high = virtual && num ? last_at_most(virtual, fragments, first + num - 1) : 0;
  for (int64_t i = 0; i < num; i++) {
    rows[i] += first;
    if (virtual) {
      int64_t at = low + last_at_most(virtual + low, high - low + 1, rows[i]);
      rows[i] = (int64_t)((uint64_t)rows[i] + (uint64_t)first_rows[at] - (uint64_t)virtual[at]);
    }
  }
  Py_END_ALLOW_THREADS
  PyMem_Free(words);
  return close_buffers(views, 1);
}

static int start(PyObject* module) {
  PyObject* queue_type = PyType_FromModuleAndSpec(module, &queue_spec, NULL);
  if (!queue_type) return -1;
  const int failed = PyModule_AddType(module, (PyTypeObject*)queue_type) || PyModule_AddIntConstant(module, "VERSION", VERSION);
  Py_DECREF(queue_type);
  return -failed;
}

static PyMethodDef methods[] = {
    {"join", join, METH_VARARGS, NULL},       {"find", find, METH_VARARGS, NULL}, {"cut", cut, METH_VARARGS, NULL},
    {"run", run, METH_VARARGS, NULL}, {"interleave", interleave, METH_VARARGS, NULL}, {"permute", permute, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&definition); }
