/* The walk of walk.py, several times as fast: read that file first.
 *
 * A recipe becomes a list of steps. Each step opens one object of the stream, checks its type and
 * its names, and appends what it holds; what must be identical is compared as it is appended.
 * Python code runs only between steps (other pytrees) and after the last one (statics that are
 * equal without being identical, statics that can change), never while a dict is being read.
 * The stream owns its items, so that no such code can take them away.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

enum kind { NODE, STATE, DICT, METADATA, VALUE, SEQUENCE, TREE };
enum rule { ANY, FROZEN, MENTION };

typedef struct {
    enum kind kind;
    Py_ssize_t position;
    PyObject *type;     /* of what is opened; borrowed from the recipe, like all below */
    PyObject *expected; /* the keys of a mapping, the length of a sequence, the treedef of a tree */
    Py_ssize_t length;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *recipe;
    Step *steps;
    Py_ssize_t num_steps;
    unsigned char *rules;
    Py_ssize_t size;
    Py_ssize_t *leaves;
    PyObject *leaf_types;
    Py_ssize_t num_leaves;
    Py_ssize_t *objects;
    Py_ssize_t num_objects;
    Py_ssize_t *mutables;
    Py_ssize_t num_mutables;
} Walk;

/* What the module needs from Python, looked up once. */
static PyObject *get_mapping_name;
static PyObject *flatten_tree;
static PyObject *is_still;
static PyObject *Static;
static Py_ssize_t value_offset, metadata_offset, trace_state_offset;
static Py_ssize_t initializing_offset, is_setup_offset;

static inline PyObject *slot_at(PyObject *object, Py_ssize_t offset) {
    return *(PyObject **)((char *)object + offset);
}

/* The stream of one walk. */
typedef struct {
    const Walk *walk;
    PyObject **items;
    Py_ssize_t length;
    PyObject *frozen; /* pins, in the order of the stream */
    PyObject *mentions;
    Py_ssize_t num_frozen, num_mentions;
    /* Statics that are not identical to their pins, to be compared when the walk is over. */
    Py_ssize_t unequal[8];
    PyObject *unequal_pins[8];
    int num_unequal;
} Stream;

/* Appends an item, and checks it by its rule. Returns 1, or 0 for a change. */
static inline int append(Stream *stream, PyObject *item) {
    Py_ssize_t position = stream->length;
    if (item == NULL || position >= stream->walk->size) return 0;
    Py_INCREF(item);
    stream->items[position] = item;
    stream->length = position + 1;
    switch (stream->walk->rules[position]) {
        case FROZEN: {
            if (stream->num_frozen >= PyTuple_GET_SIZE(stream->frozen)) return 0;
            PyObject *pin = PyTuple_GET_ITEM(stream->frozen, stream->num_frozen++);
            if (item == pin) return 1;
            if (stream->num_unequal == 8) return 0;
            stream->unequal[stream->num_unequal] = position;
            stream->unequal_pins[stream->num_unequal++] = pin;
            return 1;
        }
        case MENTION: {
            if (stream->num_mentions >= PyTuple_GET_SIZE(stream->mentions)) return 0;
            PyObject *pin = PyTuple_GET_ITEM(stream->mentions, stream->num_mentions++);
            return PyLong_AsVoidPtr(pin) == (void *)item;
        }
        default:
            return 1;
    }
}

/* Appends the values of a mapping if it has exactly these keys in this order. */
static int append_mapping(Stream *stream, PyObject *mapping, PyObject *keys) {
    if (mapping == NULL || !PyDict_Check(mapping)) return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(keys), position = 0, i = 0;
    if (PyDict_GET_SIZE(mapping) != count) return 0;
    PyObject *key, *value;
    while (PyDict_Next(mapping, &position, &key, &value)) {
        PyObject *expected = PyTuple_GET_ITEM(keys, i++);
        if (key != expected) {
            /* Only keys whose comparison runs no code of the user's. */
            int is_plain = (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(expected)) ||
                           (PyLong_Check(key) && PyLong_Check(expected));
            if (!is_plain || PyObject_RichCompareBool(key, expected, Py_EQ) != 1) return 0;
        }
        if (!append(stream, value)) return 0;
    }
    return i == count;
}

static int append_sequence(Stream *stream, PyObject *sequence, Py_ssize_t length) {
    PyObject **items;
    if (PyTuple_Check(sequence)) {
        if (PyTuple_GET_SIZE(sequence) != length) return 0;
        items = ((PyTupleObject *)sequence)->ob_item;
    } else if (PyList_CheckExact(sequence)) {
        if (PyList_GET_SIZE(sequence) != length) return 0;
        items = ((PyListObject *)sequence)->ob_item;
    } else {
        return 0;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        if (!append(stream, items[i])) return 0;
    }
    return 1;
}

/* Appends the leaves of a pytree that only JAX can open. Returns -1 with an error set. */
static int append_tree(Stream *stream, PyObject *tree, PyObject *treedef) {
    PyObject *found = PyObject_CallOneArg(flatten_tree, tree);
    if (found == NULL) return -1;
    int same = 0;
    if (PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 2) {
        same = PyObject_RichCompareBool(PyTuple_GET_ITEM(found, 1), treedef, Py_EQ);
        PyObject *leaves = PyTuple_GET_ITEM(found, 0);
        if (same == 1) {
            same = PyList_CheckExact(leaves) &&
                   append_sequence(stream, leaves, PyList_GET_SIZE(leaves));
        }
    }
    Py_DECREF(found);
    return same;
}

static int take_step(Stream *stream, const Step *step) {
    if (step->position >= stream->length) return 0;
    PyObject *item = stream->items[step->position];
    if (step->kind == VALUE) return append(stream, slot_at(item, value_offset));
    if ((PyObject *)Py_TYPE(item) != step->type) return 0;
    switch (step->kind) {
        case NODE: {
            PyObject *own = PyObject_GenericGetDict(item, NULL);
            int same = append_mapping(stream, own, step->expected);
            Py_XDECREF(own);
            return same;
        }
        case STATE: {
            PyObject *own = PyObject_GetAttr(item, get_mapping_name);
            int same = append_mapping(stream, own, step->expected);
            Py_XDECREF(own);
            return same;
        }
        case DICT:
            return append_mapping(stream, item, step->expected);
        case METADATA:
            return append_mapping(stream, slot_at(item, metadata_offset), step->expected);
        case SEQUENCE:
            return append_sequence(stream, item, step->length);
        case TREE:
            return append_tree(stream, item, step->expected);
        default:
            return 0;
    }
}

/* Whether each Variable belongs to the trace that it belonged to. */
static int same_trace_states(const Stream *stream, PyObject *pins) {
    const Walk *walk = stream->walk;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < walk->num_steps; i++) {
        if (walk->steps[i].kind != METADATA) continue;
        PyObject *variable = stream->items[walk->steps[i].position];
        if (count >= PyTuple_GET_SIZE(pins)) return 0;
        if (slot_at(variable, trace_state_offset) != PyTuple_GET_ITEM(pins, count++)) return 0;
    }
    return 1;
}

/* Whether nodes are as far set up as they were. */
static int same_flags(PyObject *states, PyObject *flags) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(states); i++) {
        PyObject *state = PyTuple_GET_ITEM(states, i), *own = PyTuple_GET_ITEM(flags, i);
        if (slot_at(state, initializing_offset) != PyTuple_GET_ITEM(own, 0)) return 0;
        if (slot_at(state, is_setup_offset) != PyTuple_GET_ITEM(own, 1)) return 0;
    }
    return 1;
}

/* Python's part of the comparison. Returns -1 with an error set. */
static int same_statics(const Stream *stream, PyObject *mutables) {
    const Walk *walk = stream->walk;
    for (int i = 0; i < stream->num_unequal; i++) {
        PyObject *pin = PyObject_CallOneArg(Static, stream->unequal_pins[i]);
        if (pin == NULL) return -1;
        PyObject *item = stream->items[stream->unequal[i]];
        PyObject *answer = PyObject_CallFunctionObjArgs(is_still, item, pin, NULL);
        Py_DECREF(pin);
        if (answer == NULL) return -1;
        int same = answer == Py_True;
        Py_DECREF(answer);
        if (!same) return 0;
    }
    if (PyTuple_GET_SIZE(mutables) != walk->num_mutables) return 0;
    for (Py_ssize_t i = 0; i < walk->num_mutables; i++) {
        PyObject *item = stream->items[walk->mutables[i]];
        PyObject *answer =
            PyObject_CallFunctionObjArgs(is_still, item, PyTuple_GET_ITEM(mutables, i), NULL);
        if (answer == NULL) return -1;
        int same = answer == Py_True;
        Py_DECREF(answer);
        if (!same) return 0;
    }
    return 1;
}

static PyObject *pick(const Stream *stream, const Py_ssize_t *positions, Py_ssize_t count) {
    PyObject *picked = PyTuple_New(count);
    if (picked == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = stream->items[positions[i]];
        Py_INCREF(item);
        PyTuple_SET_ITEM(picked, i, item);
    }
    return picked;
}

/* Returns 1 if all is as it was, 0 for a change, -1 with an error set. */
static int follow_stream(Stream *stream, PyObject *pins, PyObject *arguments) {
    const Walk *walk = stream->walk;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
        if (!append(stream, PyTuple_GET_ITEM(arguments, i))) return 0;
    }
    for (Py_ssize_t i = 0; i < walk->num_steps; i++) {
        int same = take_step(stream, &walk->steps[i]);
        if (same != 1) return same;
    }
    if (stream->length != walk->size) return 0;
    for (Py_ssize_t i = 0; i < walk->num_leaves; i++) {
        PyObject *leaf = stream->items[walk->leaves[i]];
        if ((PyObject *)Py_TYPE(leaf) != PyTuple_GET_ITEM(walk->leaf_types, i)) return 0;
    }
    if (!same_trace_states(stream, PyTuple_GET_ITEM(pins, 3))) return 0;
    if (!same_flags(PyTuple_GET_ITEM(pins, 4), PyTuple_GET_ITEM(pins, 5))) return 0;
    return same_statics(stream, PyTuple_GET_ITEM(pins, 1));
}

static PyObject *Walk_follow(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Walk *walk = (Walk *)self;
    if (count != 2 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != 6 ||
        !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "follow(pins, arguments) takes two tuples");
        return NULL;
    }
    Stream stream = {.walk = walk,
                     .frozen = PyTuple_GET_ITEM(args[0], 0),
                     .mentions = PyTuple_GET_ITEM(args[0], 2)};
    stream.items = PyMem_Malloc((walk->size ? walk->size : 1) * sizeof(PyObject *));
    if (stream.items == NULL) return PyErr_NoMemory();
    int same = follow_stream(&stream, args[0], args[1]);
    PyObject *result = NULL;
    if (same == 1) {
        PyObject *leaves = pick(&stream, walk->leaves, walk->num_leaves);
        PyObject *objects = pick(&stream, walk->objects, walk->num_objects);
        if (leaves != NULL && objects != NULL) result = PyTuple_Pack(2, leaves, objects);
        Py_XDECREF(leaves);
        Py_XDECREF(objects);
    } else if (!PyErr_Occurred()) {
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < stream.length; i++) Py_DECREF(stream.items[i]);
    PyMem_Free(stream.items);
    return result;
}

/* Building: a recipe into steps. */

static Py_ssize_t *positions_of(PyObject *tuple, Py_ssize_t size) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    Py_ssize_t *positions = PyMem_Calloc(count ? count : 1, sizeof(Py_ssize_t));
    if (positions == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        positions[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
        if (positions[i] < 0 || positions[i] >= size) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "position out of range");
            PyMem_Free(positions);
            return NULL;
        }
    }
    return positions;
}

static int set_rules(Walk *walk, PyObject *tuple, enum rule rule) {
    Py_ssize_t *positions = positions_of(tuple, walk->size);
    if (positions == NULL) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) walk->rules[positions[i]] = rule;
    PyMem_Free(positions);
    return 0;
}

/* The next expectations of each kind, in the order in which the recipe lists them. */
typedef struct {
    PyObject *types, *keys, *lengths, *treedefs;
    Py_ssize_t type, key, length, treedef;
} Expected;

static PyObject *next_of(PyObject *tuple, Py_ssize_t *index) {
    if (*index >= PyTuple_GET_SIZE(tuple)) {
        PyErr_SetString(PyExc_ValueError, "the recipe is too short");
        return NULL;
    }
    return PyTuple_GET_ITEM(tuple, (*index)++);
}

static int add_steps(Walk *walk, enum kind kind, PyObject *positions, Expected *expected) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Step *step = &walk->steps[walk->num_steps];
        step->kind = kind;
        step->position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i));
        if (step->position < 0) return -1;
        if (kind != VALUE) {
            step->type = next_of(expected->types, &expected->type);
            if (step->type == NULL) return -1;
        }
        if (kind == NODE || kind == STATE || kind == DICT || kind == METADATA) {
            step->expected = next_of(expected->keys, &expected->key);
            if (step->expected == NULL) return -1;
        } else if (kind == SEQUENCE) {
            PyObject *length = next_of(expected->lengths, &expected->length);
            if (length == NULL) return -1;
            step->length = PyLong_AsSsize_t(length);
        } else if (kind == TREE) {
            step->expected = next_of(expected->treedefs, &expected->treedef);
            if (step->expected == NULL) return -1;
        }
        walk->num_steps++;
    }
    return 0;
}

static int make_steps(Walk *walk, PyObject *waves, Expected *expected) {
    /* Fields of a wave, with Variables taken twice: first all metadata, then all values. */
    static const enum kind kinds[] = {NODE, STATE, DICT, METADATA, VALUE, SEQUENCE, TREE};
    static const int fields[] = {0, 1, 2, 3, 3, 4, 5};
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waves); i++) {
        PyObject *wave = PyTuple_GET_ITEM(waves, i);
        for (int j = 0; j < 7; j++) count += PyTuple_GET_SIZE(PyTuple_GET_ITEM(wave, fields[j]));
    }
    walk->steps = PyMem_Calloc(count ? count : 1, sizeof(Step));
    if (walk->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waves); i++) {
        PyObject *wave = PyTuple_GET_ITEM(waves, i);
        for (int j = 0; j < 7; j++) {
            PyObject *positions = PyTuple_GET_ITEM(wave, fields[j]);
            if (add_steps(walk, kinds[j], positions, expected) < 0) return -1;
        }
    }
    return 0;
}

static void Walk_dealloc(PyObject *self) {
    Walk *walk = (Walk *)self;
    PyObject_GC_UnTrack(self);
    PyMem_Free(walk->steps);
    PyMem_Free(walk->rules);
    PyMem_Free(walk->leaves);
    PyMem_Free(walk->objects);
    PyMem_Free(walk->mutables);
    Py_XDECREF(walk->recipe);
    Py_TYPE(self)->tp_free(self);
}

static int Walk_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Walk *)self)->recipe);
    return 0;
}

static PyObject *Walk_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *recipe;
    static char *names[] = {"recipe", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &recipe)) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(recipe) != 12) {
        PyErr_SetString(PyExc_ValueError, "a recipe has 12 fields");
        return NULL;
    }
    Walk *walk = (Walk *)type->tp_alloc(type, 0);
    if (walk == NULL) return NULL;
    walk->recipe = Py_NewRef(recipe);
#define FIELD(i) PyTuple_GET_ITEM(recipe, i)
    walk->size = PyLong_AsSsize_t(FIELD(11));
    if (walk->size < 0) goto fail;
    walk->rules = PyMem_Calloc(walk->size ? walk->size : 1, 1);
    if (walk->rules == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (set_rules(walk, FIELD(5), FROZEN) < 0 || set_rules(walk, FIELD(7), MENTION) < 0) goto fail;
    Expected expected = {
        .types = FIELD(2), .keys = FIELD(1), .lengths = FIELD(3), .treedefs = FIELD(4)};
    if (make_steps(walk, FIELD(0), &expected) < 0) goto fail;
    walk->num_mutables = PyTuple_GET_SIZE(FIELD(6));
    walk->num_leaves = PyTuple_GET_SIZE(FIELD(8));
    walk->leaf_types = FIELD(9);
    walk->num_objects = PyTuple_GET_SIZE(FIELD(10));
    if ((walk->mutables = positions_of(FIELD(6), walk->size)) == NULL) goto fail;
    if ((walk->leaves = positions_of(FIELD(8), walk->size)) == NULL) goto fail;
    if ((walk->objects = positions_of(FIELD(10), walk->size)) == NULL) goto fail;
    return (PyObject *)walk;
#undef FIELD
fail:
    Py_DECREF(walk);
    return NULL;
}

static PyMethodDef Walk_methods[] = {
    {"follow", (PyCFunction)(void (*)(void))Walk_follow, METH_FASTCALL,
     "The arrays and objects of an unchanged graph; None if it may have changed."},
    {NULL},
};

static PyTypeObject WalkType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nnx_sharding.lifting._walk.Walk",
    .tp_doc = "A recipe, ready to be followed.",
    .tp_basicsize = sizeof(Walk),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Walk_new,
    .tp_dealloc = Walk_dealloc,
    .tp_traverse = Walk_traverse,
    .tp_methods = Walk_methods,
};

/* The place of a slot in its objects, by its descriptor; -1 with an error set if it is no slot. */
static Py_ssize_t offset_of(PyObject *descriptor) {
    if (Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        if (member->type == T_OBJECT_EX) return member->offset;
    }
    PyErr_Format(PyExc_TypeError, "%R is not the descriptor of a slot", descriptor);
    return -1;
}

static PyObject *set_up(PyObject *module, PyObject *args) {
    PyObject *flatten, *still, *statics, *value, *metadata, *trace_state, *initializing, *is_setup;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &flatten, &still, &statics, &value, &metadata,
                          &trace_state, &initializing, &is_setup)) {
        return NULL;
    }
    if ((value_offset = offset_of(value)) < 0) return NULL;
    if ((metadata_offset = offset_of(metadata)) < 0) return NULL;
    if ((trace_state_offset = offset_of(trace_state)) < 0) return NULL;
    if ((initializing_offset = offset_of(initializing)) < 0) return NULL;
    if ((is_setup_offset = offset_of(is_setup)) < 0) return NULL;
    Py_XSETREF(flatten_tree, Py_NewRef(flatten));
    Py_XSETREF(is_still, Py_NewRef(still));
    Py_XSETREF(Static, Py_NewRef(statics));
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_up", set_up, METH_VARARGS,
     "Tells what the walk needs of Python, and where Flax keeps what. TypeError if elsewhere."},
    {NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nnx_sharding.lifting._walk",
    .m_doc = "The walk of walk.py, several times as fast.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__walk(void) {
    if (PyType_Ready(&WalkType) < 0) return NULL;
    get_mapping_name = PyUnicode_InternFromString("_mapping");
    if (get_mapping_name == NULL) return NULL;
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "Walk", (PyObject *)&WalkType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
