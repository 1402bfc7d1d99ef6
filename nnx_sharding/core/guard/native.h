/* What the two files of the extension share: the names that Python and C agree on, and the functions
 * of walk.c that call.c uses. */

#ifndef NNX_SHARDING_NATIVE_H
#define NNX_SHARDING_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

/* Each list of names is one macro, and other macros make enums and texts of it. native.py compares
 * OPCODES, STEP, RECIPE and GUARD with its own lists when it is imported, so an old extension is not
 * loaded. A slot is the place in an object where CPython or Flax stores something. */
#define SLOTS(X) X(METADATA) X(VALUE) X(TRACE) X(INITIALIZING) X(IS_SETUP) X(TREEDEF) X(LEAVES)
#define OPCODES(X) X(NODE) X(DICT) SLOTS(X) X(SEQUENCE) X(STATE) X(TREE) X(STATIC)
#define STEP(X) X(opcode) X(position) X(start)
#define RECIPE(X) X(steps) X(expected) X(types) X(rules) X(pins) X(frozen) X(statics) X(mentions) \
    X(ids) X(first) X(traces) X(leaves) X(objects) X(num_arguments)
#define GUARD(X) X(walk) X(names) X(plan) X(key) X(donates) X(context_of) X(context) X(slots) \
    X(shardings) X(avals) X(known) X(references) X(execute)
/* The functions and objects that native.py and direct.py pass to `set_up`. */
#define HOOKS(X) X(open_tree) X(open_static) X(same_value) X(mapping_type) \
    X(is_ready) X(caller) X(held) X(settle) X(complete) X(is_bounded) X(wait) X(limit) \
    X(direct_mark)
/* The names of attributes that the extension reads. */
#define NAMES(X) X(_mapping) X(_direct) X(_flattened) X(_failed) X(fields) X(update) X(sharding) \
    X(aval) X(num_devices)

#define AS_TEXT(name) " " #name
#define AS_STRING(name) #name,
#define AS_FIELD(name) int32_t name;
#define AS_OPCODE(name) name,
#define AS_RECIPE(name) RECIPE_##name,
#define AS_GUARD(name) GUARD_##name,
#define AS_HOOK(name) HOOK_##name,
#define AS_NAME(name) NAME_##name,

enum opcode { OPCODES(AS_OPCODE) NUM_OPCODES };
enum { RECIPE(AS_RECIPE) NUM_RECIPE };
enum { GUARD(AS_GUARD) NUM_GUARD };
enum { HOOKS(AS_HOOK) NUM_HOOKS };
enum { NAMES(AS_NAME) NUM_NAMES };

/* What `set_up` was given, and the names as Python strings. */
struct native {
    PyObject *hooks[NUM_HOOKS];
    PyObject *names[NUM_NAMES];
    Py_ssize_t offsets[NUM_OPCODES];   /* by opcode: the offset of its slot in an object */
    PyTypeObject *owners[NUM_OPCODES]; /* by opcode: the type with the slot; NULL without a slot */
};
extern struct native native;

/* An attribute, named by an index in NAMES, as a new reference; NULL with an error set. */
static inline PyObject *attribute(PyObject *object, int name) {
    return PyObject_GetAttr(object, native.names[name]);
}

/* The tuples of arrays, by slot, and objects, by index, that a walk has found: owned references. */
typedef struct {
    PyObject *leaves, *objects;
} Found;

/* Releases both tuples, if there are any. */
static inline void drop_found(Found *found) {
    Py_CLEAR(found->leaves);
    Py_CLEAR(found->objects);
}

extern PyTypeObject WalkType;

/* Walks from the arguments of a call. Returns 1 and fills `found` if nothing has changed, 0 for a
 * change, or -1 with an error set. */
int walk_follow(PyObject *walk, PyObject *const *arguments, Py_ssize_t count, Found *found);

/* Registers a dict watcher if this version of Python has them. */
void walk_watch_dicts(void);

#endif
