/* The draws of a mixture. By tokens: the same as `rescale_data.nodes.mixture.lengths.TokenArcs`, with the same numbers, in wider
 * integers; tests compare both. And the order of the drawn documents, for `rescale_data.nodes.mixture.interleaved`. A part of `kernel.c`. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

typedef __int128 wide;

enum { PRIOR = 20, SLACK = 2, PATIENCE = 6, LONG = 256, MOST = 3, SHARE = 32, FINE = 8 };
#define SMALL ((int64_t)(0.02 * ((int64_t)1 << SHARE)))
#define LARGEST ((int64_t)1 << 22) /* tokens of a mean document: beyond, products need more than 127 bits */
#define MANY ((int64_t)1 << 53)    /* documents or tokens of all sources, for the same reason */

typedef struct {
  Py_ssize_t num;                            /* sources */
  int64_t *shares, *documents, *tokens, *since; /* one number for each source */
  int64_t *arcs, *tree;                      /* lengths of arcs, and their sums as a Fenwick tree, from 1 */
  int64_t grid, all_documents, all_tokens, counted, mean, low, due, total; /* low: the mean changes in multiples of it */
} Arcs;

static wide clip(wide value, wide most) { return value < 0 ? 0 : value > most ? most : value; }

static int64_t arc_of(const Arcs* a, Py_ssize_t i) {
  wide share = a->shares[i], tokens = a->tokens[i];
  if (!share) return 0;
  wide of_all = (tokens + (wide)PRIOR * a->mean) << FINE, documents = a->documents[i] + PRIOR;
  wide mean = of_all >> 62 ? of_all / documents : (int64_t)of_all / (int64_t)documents; /* 64 bits take less time */
  wide counted = (tokens - a->since[i]) << SHARE, slack = SLACK * mean << (SHARE - FINE);
  wide behind = share * a->due - counted - slack, ahead = counted - share * (a->due + (wide)a->mean * a->grid) - slack;
  wide unit = (wide)(PATIENCE + a->mean / LONG) * a->mean * (share > SMALL ? share : SMALL);
  wide longer = clip(behind, MOST * unit), shorter = clip(ahead, MOST * unit);
  wide arc = ((share * (unit + longer)) << 16) / ((mean < 1 ? 1 : mean) * (unit + shorter));
  return arc < 1 ? 1 : (int64_t)arc;
}

/* Compute mean and due, which all sources share; true if they have changed. Mostly they have not: then no division is needed. */
static int look(Arcs* a) {
  const wide tokens = a->all_tokens, documents = a->all_documents;
  const int is_as_long = a->mean * documents <= tokens && tokens < (a->mean + a->low) * documents;
  if (is_as_long && a->due <= a->counted && a->counted < a->due + (wide)a->mean * a->grid) return 0;
  int64_t mean = a->all_tokens / (a->all_documents < 1 ? 1 : a->all_documents), low = 1;
  mean = mean < 1 ? 1 : mean;
  while (mean / low >= 16) low *= 2;
  mean -= mean % low;
  int64_t due = a->counted - (int64_t)(a->counted % ((wide)mean * a->grid));
  int changed = mean != a->mean || due != a->due;
  a->mean = mean, a->due = due, a->low = low;
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
  for (; bit; bit >>= 1) {
    if (at + bit > a->num) continue;
    const int64_t passed = a->tree[at + bit], all = -(int64_t)(passed <= left); /* no branch: it could not be predicted */
    at += bit & all, left -= passed & all;
  }
  return at;
}

/* True if the counts of all sources fit the integers here. */
static int fits(const Arcs* a) { return a->all_documents <= MANY && a->all_tokens <= MANY && a->mean <= LARGEST; }

static void drew(Arcs* a, Py_ssize_t source, int64_t length) {
  a->documents[source]++, a->tokens[source] += length;
  a->all_documents++, a->all_tokens += length, a->counted += length;
  const int changed = look(a);
  if (!fits(a)) return; /* then no other draw is made */
  if (changed) rebuild(a);
  else set(a, source, arc_of(a, source));
}

/* Add up the counts of all sources; true if all shares and counts are valid and fit. */
static int sum(Arcs* a, const int64_t* counts) {
  int64_t shares = 0;
  for (Py_ssize_t i = 0; i < a->num; i++) {
    const int64_t share = a->shares[i], documents = a->documents[i], tokens = a->tokens[i], since = a->since[i];
    if (share < 0 || documents < 0 || tokens < 0 || since < 0 || counts[i] < 0) return 0;
    if (share > MANY || documents > MANY || tokens > MANY || since > tokens || counts[i] > MANY) return 0;
    a->grid += share > 0, shares += share;
    a->all_documents += documents, a->all_tokens += tokens, a->counted += tokens - since;
    if (shares > (int64_t)2 << SHARE || !fits(a)) return 0;
  }
  a->grid = a->grid < 1 ? 1 : a->grid;
  look(a);
  return fits(a);
}

/* run(points, chosen, first, numbers, lengths, change_at): draws from number `first` on. It stops at a source without a length at
 * hand, and after a draw behind which other weights may count. numbers: int64[5, S], for each source its share, documents, tokens,
 * tokens that do not count, and draws in this run. lengths: for each source a buffer of int64, or None. Returns the next draw, and
 * the source that has no length; -1 if there is none, -2 if the numbers are too large. */
PyObject* run(PyObject* module, PyObject* args) {
  PyObject *points_of, *chosen_of, *numbers_of, *lengths, *result = NULL;
  long long first, change_at;
  Py_buffer points, chosen, numbers, *given = NULL;
  if (!PyArg_ParseTuple(args, "OOLOO!L", &points_of, &chosen_of, &first, &numbers_of, &PyList_Type, &lengths, &change_at)) return NULL;
  points.obj = chosen.obj = numbers.obj = NULL;
  Arcs a = {0};
  a.num = PyList_Size(lengths);
  if (PyObject_GetBuffer(points_of, &points, PyBUF_SIMPLE) || PyObject_GetBuffer(chosen_of, &chosen, PyBUF_WRITABLE) ||
      PyObject_GetBuffer(numbers_of, &numbers, PyBUF_WRITABLE))
    goto done;
  Py_ssize_t num_points = points.len / 8, num = a.num;
  if (chosen.len != points.len || numbers.len != 5 * 8 * num || first < 0 || num < 1) {
    PyErr_SetString(PyExc_ValueError, "sizes of what is drawn by tokens that do not fit");
    goto done;
  }
  int64_t* base = numbers.buf;
  a.shares = base, a.documents = base + num, a.tokens = base + 2 * num, a.since = base + 3 * num;
  int64_t* counts = base + 4 * num;
  given = calloc(num, sizeof(Py_buffer));
  a.arcs = malloc(num * sizeof(int64_t)), a.tree = malloc((num + 1) * sizeof(int64_t));
  if (!given || !a.arcs || !a.tree) {
    PyErr_NoMemory();
    goto done;
  }
  for (Py_ssize_t i = 0; i < num; i++) {
    PyObject* each = PyList_GetItem(lengths, i);
    if (!each || (each != Py_None && PyObject_GetBuffer(each, &given[i], PyBUF_SIMPLE))) goto done;
  }
  Py_ssize_t next = first, missing = sum(&a, counts) ? -1 : -2;
  if (missing == -1) rebuild(&a);
  for (int stops = 0; next < num_points && !stops && missing == -1; next++) {
    if (!fits(&a)) {
      missing = -2;
      break;
    }
    Py_ssize_t source = choose(&a, ((uint64_t*)points.buf)[next]);
    if (source >= num || counts[source] >= given[source].len / 8) {
      missing = source < num ? source : -2;
      break;
    }
    const int64_t length = ((int64_t*)given[source].buf)[counts[source]];
    if (length < 0 || length > MANY) {
      missing = -2;
      break;
    }
    counts[source]++, drew(&a, source, length);
    ((int64_t*)chosen.buf)[next] = source;
    stops = change_at >= 0 && a.all_tokens >= change_at;
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

enum { CHOSEN, BEGINS, LENGTH, ENDS, SLOT, VALUE, KINDS, COUNTS, INDEX, NEW_ENDS, NEW_SLOT, NEW_VALUE, NUM_VIEWS };

static const char* interleave_all(int64_t** b, const Py_ssize_t* sizes, int64_t number) {
  const Py_ssize_t num = sizes[CHOSEN], sources = sizes[BEGINS], documents = sizes[LENGTH], kinds = sizes[KINDS];
  int64_t at = 0;
  if (sizes[ENDS] != documents + 1 || sizes[COUNTS] != kinds * sources || sizes[INDEX] != num || sizes[NEW_ENDS] != num + 1 ||
      sizes[VALUE] != sizes[SLOT] || sizes[NEW_VALUE] != sizes[NEW_SLOT])
    return "sizes of documents and draws that do not fit";
  b[NEW_ENDS][0] = 0;
  for (Py_ssize_t i = 0; i < num; i++) {
    const int64_t source = b[CHOSEN][i], document = source < 0 || source >= sources ? -1 : b[BEGINS][source]++;
    if (document < 0 || document >= documents) return "a draw of a document that is not there";
    const int64_t first = b[ENDS][document], stop = b[ENDS][document + 1];
    if (first < 0 || stop < first || stop > sizes[SLOT] || at + stop - first + 1 + kinds > sizes[NEW_SLOT])
      return "moves of documents are out of range";
    for (int64_t k = first; k < stop; k++, at++) b[NEW_SLOT][at] = b[SLOT][k], b[NEW_VALUE][at] = b[VALUE][k];
    b[NEW_SLOT][at] = 0, b[NEW_VALUE][at++] = ++number;
    for (Py_ssize_t kind = 0; kind < kinds; kind++)
      b[NEW_SLOT][at] = b[KINDS][kind] + source,
      b[NEW_VALUE][at++] = b[COUNTS][kind * sources + source] += kind ? b[LENGTH][document] : 1;
    b[INDEX][i] = document, b[NEW_ENDS][i + 1] = at;
  }
  return NULL;
}

/* interleave(number, chosen, begins, length, ends, slot, value, kinds, counts, index, new_ends, new_slot, new_value): puts documents in
 * the order of draws, and adds the counts of the mixture to the moves of each. All arguments but the first are buffers of int64.
 * begins and counts are changed; the buffers after counts are written. */
PyObject* interleave(PyObject* module, PyObject* args) {
  Py_buffer views[NUM_VIEWS];
  int64_t* buffers[NUM_VIEWS];
  Py_ssize_t sizes[NUM_VIEWS];
  int num = 0;
  const char* wrong = PyTuple_Size(args) == NUM_VIEWS + 1 ? NULL : "interleave takes a number and twelve buffers";
  const int64_t number = wrong ? 0 : PyLong_AsLongLong(PyTuple_GetItem(args, 0));
  for (; !wrong && !PyErr_Occurred() && num < NUM_VIEWS; num++) {
    const int is_written = num == BEGINS || num >= COUNTS;
    if (PyObject_GetBuffer(PyTuple_GetItem(args, num + 1), &views[num], is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE)) break;
    buffers[num] = views[num].buf, sizes[num] = views[num].len / 8;
  }
  if (num == NUM_VIEWS) wrong = interleave_all(buffers, sizes, number);
  while (num > 0) PyBuffer_Release(&views[--num]);
  if (wrong) PyErr_SetString(PyExc_ValueError, wrong);
  return PyErr_Occurred() ? NULL : (Py_INCREF(Py_None), Py_None);
}
