/* The draws of a mixture. By tokens: the same as `rescale_data.nodes.mixture.lengths.TokenWeightArcs`, with the same numbers, in wider
 * integers; tests compare both. And the order of the drawn documents, for `rescale_data.nodes.reading.gather`. A part of `kernel.c`. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

typedef __int128 wide;

int refuse(const char* message); /* all in kernel.c */
Py_buffer* open_buffers(PyObject* args, Py_ssize_t first, Py_ssize_t least, unsigned written);
PyObject* close_buffers(Py_buffer* views, int is_done);

enum { PRIOR = 20, SLACK = 2, PATIENCE = 6, LONG = 256, MOST = 3, SHARE = 32, FINE = 8 };
#define SMALL ((int64_t)(0.02 * ((int64_t)1 << SHARE)))
#define LARGEST ((int64_t)1 << 22) /* tokens of a mean document: with more, products would need more than 127 bits */
#define MANY ((int64_t)1 << 53)    /* documents or tokens of a source, for the same reason */
#define ALL ((int64_t)1 << 61)     /* of all sources */

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
  mean = mean < 1 ? 1 : mean > LARGEST ? LARGEST : mean;
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

static void drew(Arcs* a, Py_ssize_t source, int64_t length) {
  a->documents[source]++, a->tokens[source] += length;
  a->all_documents++, a->all_tokens += length, a->counted += length;
  if (look(a)) rebuild(a);
  else set(a, source, arc_of(a, source));
}

/* Add up the counts of all sources, and make the arcs; true if all shares and counts are valid. */
static int begin(Arcs* a, const int64_t* counts) {
  int64_t shares = 0;
  for (Py_ssize_t i = 0; i < a->num; i++) {
    const int64_t share = a->shares[i], documents = a->documents[i], tokens = a->tokens[i], since = a->since[i];
    const int64_t values[] = {share, documents, tokens, since, counts[i]};
    for (int k = 0; k < 5; k++)
      if (values[k] < 0 || values[k] > MANY) return 0;
    a->grid += share > 0, shares += share;
    a->all_documents += documents, a->all_tokens += tokens, a->counted += tokens - since;
    if (since > tokens || shares > (int64_t)2 << SHARE || a->all_documents > ALL || a->all_tokens > ALL) return 0;
  }
  a->grid = a->grid < 1 ? 1 : a->grid;
  look(a), rebuild(a);
  return 1;
}

/* run(first, change_at, points, chosen, numbers, *lengths) -> the next draw, and the source that has no length, or -1: draws from
 * number `first` on. It stops at a source without a length at hand, and after a draw behind which other weights may count. numbers:
 * int64[5, S], for each source its share, documents, tokens, tokens that do not count, and draws in this run. lengths: for each source
 * a buffer of int64, or None. */
PyObject* run(PyObject* module, PyObject* args) {
  enum { POINTS, PICKED, NUMBERS, LENGTHS };
  Py_buffer* views = open_buffers(args, 2, LENGTHS, 1 << PICKED | 1 << NUMBERS);
  if (!views) return NULL;
  const int64_t first = PyLong_AsLongLong(PyTuple_GetItem(args, 0)), change_at = PyLong_AsLongLong(PyTuple_GetItem(args, 1));
  const Py_ssize_t num_points = views[POINTS].len / 8, num = PyTuple_Size(args) - 2 - LENGTHS;
  const uint64_t* points = views[POINTS].buf;
  int64_t *base = views[NUMBERS].buf, *counts = base + 4 * num, *picked = views[PICKED].buf, next = first;
  Arcs a = {.num = num, .shares = base, .documents = base + num, .tokens = base + 2 * num, .since = base + 3 * num};
  a.arcs = PyMem_Malloc(num * 8), a.tree = PyMem_Malloc((num + 1) * 8);
  Py_ssize_t missing = -1;
  int is_valid = 0;
  if (!a.arcs || !a.tree) PyErr_NoMemory();
  else is_valid = num > 0 && views[PICKED].len == views[POINTS].len && views[NUMBERS].len == 5 * 8 * num && first >= 0 && begin(&a, counts);
  for (int stops = 0; is_valid && next < num_points && !stops; next++) {
    const Py_ssize_t source = choose(&a, points[next]);
    if (source >= num || counts[source] >= views[LENGTHS + source].len / 8) {
      missing = source, is_valid = source < num;
      break;
    }
    const int64_t length = ((int64_t*)views[LENGTHS + source].buf)[counts[source]];
    is_valid = length >= 0 && length <= MANY - a.tokens[source] && a.all_tokens <= ALL;
    if (!is_valid) break;
    counts[source]++, drew(&a, source, length);
    picked[next] = source;
    stops = change_at >= 0 && a.all_tokens >= change_at;
  }
  if (!is_valid && !PyErr_Occurred()) refuse("sizes of what is drawn by tokens that do not fit, or counts beyond those of any run");
  PyMem_Free(a.arcs), PyMem_Free(a.tree);
  close_buffers(views, 0);
  return PyErr_Occurred() ? NULL : Py_BuildValue("nn", (Py_ssize_t)next, missing);
}

enum { CHOSEN, BEGINS, LENGTH, ENDS, SLOT, VALUE, KINDS, COUNTS, INDEX, NEW_ENDS, NEW_SLOT, NEW_VALUE, NUM_VIEWS };

/* As NumPy adds: a sum of any two numbers is defined. */
static int64_t plus(int64_t one, int64_t other) { return (int64_t)((uint64_t)one + (uint64_t)other); }

static const char* interleave_all(int64_t** b, const Py_ssize_t* sizes, int64_t number) {
  const Py_ssize_t num = sizes[CHOSEN], sources = sizes[BEGINS], documents = sizes[LENGTH], kinds = sizes[KINDS];
  int64_t at = 0, *count;
  if (sizes[ENDS] != documents + 1 || sizes[COUNTS] != kinds * sources || sizes[INDEX] != num || sizes[NEW_ENDS] != num + 1 ||
      sizes[VALUE] != sizes[SLOT] || sizes[NEW_VALUE] != sizes[NEW_SLOT])
    return "sizes of documents and draws that do not fit";
  b[NEW_ENDS][0] = 0;
  for (Py_ssize_t i = 0; i < num; i++) {
    const int64_t source = b[CHOSEN][i], document = source < 0 || source >= sources ? -1 : b[BEGINS][source];
    if (document < 0 || document >= documents) return "a draw of a document that is not there";
    b[BEGINS][source]++;
    const int64_t first = b[ENDS][document], stop = b[ENDS][document + 1];
    if (first < 0 || stop < first || stop > sizes[SLOT] || at + stop - first + 1 + kinds > sizes[NEW_SLOT])
      return "moves of documents are out of range";
    for (int64_t k = first; k < stop; k++, at++) b[NEW_SLOT][at] = b[SLOT][k], b[NEW_VALUE][at] = b[VALUE][k];
    b[NEW_SLOT][at] = 0, b[NEW_VALUE][at++] = number = plus(number, 1);
    for (Py_ssize_t kind = 0; kind < kinds; kind++)
      b[NEW_SLOT][at] = plus(b[KINDS][kind], source), count = &b[COUNTS][kind * sources + source],
      b[NEW_VALUE][at++] = *count = plus(*count, kind ? b[LENGTH][document] : 1);
    b[INDEX][i] = document, b[NEW_ENDS][i + 1] = at;
  }
  return NULL;
}

/* interleave(number, chosen, begins, length, ends, slot, value, kinds, counts, index, new_ends, new_slot, new_value): puts documents in
 * the order of draws, and adds the counts of the mixture to the moves of each. All arguments but the first are buffers of int64.
 * begins and counts are changed; the buffers after counts are written. */
PyObject* interleave(PyObject* module, PyObject* args) {
  Py_buffer* views = open_buffers(args, 1, NUM_VIEWS, 1 << BEGINS | 31 << COUNTS);
  if (!views) return NULL;
  int64_t* buffers[NUM_VIEWS];
  Py_ssize_t sizes[NUM_VIEWS];
  for (int i = 0; i < NUM_VIEWS; i++) buffers[i] = views[i].buf, sizes[i] = views[i].len / 8;
  const int64_t number = PyLong_AsLongLong(PyTuple_GetItem(args, 0));
  const char* wrong = PyErr_Occurred() ? NULL : interleave_all(buffers, sizes, number);
  if (wrong) refuse(wrong);
  return close_buffers(views, !PyErr_Occurred());
}
