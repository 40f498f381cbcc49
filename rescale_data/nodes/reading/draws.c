/* The draws of a mixture by tokens: what `rescale_data.nodes.mixture.lengths.TokenArcs` does, whose numbers these are, in wider integers.
 * A test compares the two. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef __int128 wide;

enum { PRIOR = 20, PATIENCE = 6, LONG = 256, MOST = 3, SHARE = 32, FINE = 8 };
#define SMALL ((int64_t)(0.02 * ((int64_t)1 << SHARE)))
#define LARGEST ((int64_t)1 << 22) /* tokens of a mean document: beyond, products need more than 127 bits */

typedef struct {
  Py_ssize_t num;                            /* sources */
  int64_t *shares, *documents, *tokens, *since; /* of each */
  int64_t *arcs, *tree;                      /* lengths, and their sums as a Fenwick tree, from 1 */
  int64_t grid, all_documents, all_tokens, counted, mean, due, total;
} Arcs;

static wide clip(wide value, wide most) { return value < 0 ? 0 : value > most ? most : value; }

static int64_t arc_of(const Arcs* a, Py_ssize_t i) {
  wide share = a->shares[i], tokens = a->tokens[i];
  if (!share) return 0;
  wide mean = ((tokens + (wide)PRIOR * a->mean) << FINE) / (a->documents[i] + PRIOR);
  wide behind = share * a->due - ((tokens - a->since[i]) << SHARE);
  wide unit = (wide)(PATIENCE + a->mean / LONG) * a->mean * (share > SMALL ? share : SMALL);
  wide longer = clip(behind, MOST * unit), shorter = clip(-behind, MOST * unit);
  wide arc = ((share * (unit + longer)) << 16) / ((mean < 1 ? 1 : mean) * (unit + shorter));
  return arc < 1 ? 1 : (int64_t)arc;
}

/* Mean and due, of all sources; whether they are others than before. */
static int look(Arcs* a) {
  int64_t mean = a->all_tokens / (a->all_documents < 1 ? 1 : a->all_documents), low = 1;
  mean = mean < 1 ? 1 : mean;
  while (mean / low >= 16) low *= 2;
  mean -= mean % low;
  int64_t due = a->counted - a->counted % (mean * a->grid);
  int changed = mean != a->mean || due != a->due;
  a->mean = mean, a->due = due;
  return changed;
}

static void set(Arcs* a, Py_ssize_t source, int64_t arc) {
  int64_t change = arc - a->arcs[source];
  a->arcs[source] = arc, a->total += change;
  for (Py_ssize_t i = source + 1; i <= a->num; i += i & -i) a->tree[i] += change;
}

static void rebuild(Arcs* a) {
  a->total = 0;
  for (Py_ssize_t i = 0; i < a->num; i++) a->total += a->arcs[i] = a->tree[i + 1] = arc_of(a, i);
  for (Py_ssize_t i = 1; i <= a->num; i++)
    if (i + (i & -i) <= a->num) a->tree[i + (i & -i)] += a->tree[i];
}

static Py_ssize_t choose(const Arcs* a, uint64_t point) {
  int64_t left = (int64_t)(((unsigned __int128)point * (uint64_t)a->total) >> 64);
  Py_ssize_t at = 0, bit = 1;
  while (bit * 2 <= a->num) bit *= 2;
  for (; bit; bit >>= 1)
    if (at + bit <= a->num && a->tree[at + bit] <= left) at += bit, left -= a->tree[at];
  return at;
}

static void drew(Arcs* a, Py_ssize_t source, int64_t length) {
  a->documents[source]++, a->tokens[source] += length;
  a->all_documents++, a->all_tokens += length, a->counted += length;
  if (look(a)) rebuild(a);
  else set(a, source, arc_of(a, source));
}

/* run(points, chosen, first, numbers, lengths, turn_at): draws from number `first` on, until a source has no length at hand, or
 * after one behind which other weights may count. numbers: int64[7, S], of each source its share, documents, tokens, those that
 * do not count, draws in this run, and with how many documents or tokens it has enough; lengths: of each a buffer of int64, or
 * None. Returns the next draw, and the source that has no length; else -1, and -2 where the numbers are too large for this. */
static PyObject* run(PyObject* module, PyObject* args) {
  PyObject *points_of, *chosen_of, *numbers_of, *lengths, *result = NULL;
  long long first, turn_at;
  Py_buffer points, chosen, numbers, *given = NULL;
  if (!PyArg_ParseTuple(args, "OOLOO!L", &points_of, &chosen_of, &first, &numbers_of, &PyList_Type, &lengths, &turn_at)) return NULL;
  points.obj = chosen.obj = numbers.obj = NULL;
  Arcs a = {0};
  a.num = PyList_Size(lengths);
  if (PyObject_GetBuffer(points_of, &points, PyBUF_SIMPLE) || PyObject_GetBuffer(chosen_of, &chosen, PyBUF_WRITABLE) ||
      PyObject_GetBuffer(numbers_of, &numbers, PyBUF_WRITABLE))
    goto done;
  Py_ssize_t num_points = points.len / 8, num = a.num;
  if (chosen.len != points.len || numbers.len != 7 * 8 * num || first < 0 || num < 1) {
    PyErr_SetString(PyExc_ValueError, "sizes of what is drawn by tokens that do not fit");
    goto done;
  }
  int64_t* base = numbers.buf;
  a.shares = base, a.documents = base + num, a.tokens = base + 2 * num, a.since = base + 3 * num;
  int64_t *counts = base + 4 * num, *most_documents = base + 5 * num, *most_tokens = base + 6 * num;
  given = calloc(num, sizeof(Py_buffer));
  a.arcs = malloc(num * sizeof(int64_t)), a.tree = malloc((num + 1) * sizeof(int64_t));
  if (!given || !a.arcs || !a.tree) {
    PyErr_NoMemory();
    goto done;
  }
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject* each = PyList_GetItem(lengths, i);
    if (each != Py_None && PyObject_GetBuffer(each, &given[i], PyBUF_SIMPLE)) goto done;
    a.grid += a.shares[i] > 0;
    a.all_documents += a.documents[i], a.all_tokens += a.tokens[i], a.counted += a.tokens[i] - a.since[i];
  }
  a.grid = a.grid < 1 ? 1 : a.grid;
  look(&a), rebuild(&a);
  Py_ssize_t next = first, missing = -1;
  for (int stops = 0; next < num_points && !stops; next++) {
    if (a.mean > LARGEST) {
      missing = -2;
      break;
    }
    Py_ssize_t source = choose(&a, ((uint64_t*)points.buf)[next]);
    if (source >= num || (counts[source] + 1) * 8 > given[source].len) {
      missing = source < num ? source : -2;
      break;
    }
    drew(&a, source, ((int64_t*)given[source].buf)[counts[source]++]);
    ((int64_t*)chosen.buf)[next] = source;
    stops = (turn_at >= 0 && a.all_tokens >= turn_at) || a.documents[source] >= most_documents[source] ||
            a.tokens[source] >= most_tokens[source];
  }
  result = Py_BuildValue("nn", next, missing);
done:
  for (Py_ssize_t i = 0; given && i < a.num; i++)
    if (given[i].obj) PyBuffer_Release(&given[i]);
  free(given), free(a.arcs), free(a.tree);
  Py_buffer* all[] = {&points, &chosen, &numbers};
  for (int i = 0; i < 3; i++)
    if (all[i]->obj) PyBuffer_Release(all[i]);
  return result;
}

static PyMethodDef methods[] = {{"run", run, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "draws", NULL, 0, methods, NULL, NULL, NULL, NULL};
static PyModuleDef_Slot slots[] = {{0, NULL}};

PyMODINIT_FUNC PyInit_draws(void) {
  definition.m_slots = slots;
  return PyModuleDef_Init(&definition);
}
