/* The walk of walk.py, several times as fast: read that file first.
 *
 * A recipe becomes a list of steps. Each step opens one object of the stream, checks its type and
 * its names, and appends what it holds. What is appended is compared at once, and kept only if
 * it is asked for later: arrays and objects go straight into the result.
 *
 * Python code runs only between steps (other pytrees, rarer static objects) and after the last one
 * (statics that are equal without being identical), never while a dict is being read.
 * What is kept is owned, so that no such code can take it away.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

enum kind { NODE, STATE, DICT, METADATA, VALUE, SEQUENCE, TREE, STATIC };

/* What happens to an item of the stream. */
enum rule {
    UNSET,
    FROZEN, /* is compared with a pin */
    LEAF,   /* its type is compared; goes to slot `index` */
    FIRST,  /* its identity is compared; goes to object `index` */
    AGAIN,  /* its identity is compared */
    OTHER,  /* is opened or compared later; goes to place `index` */
};

typedef struct {
    enum rule rule;
    int32_t index;
} Place;

typedef struct {
    enum kind kind;
    int is_object;      /* whether it opens an object of the result, or another item */
    int32_t index;      /* of that object or item */
    PyObject *type;     /* its type; borrowed from the recipe, as the next */
    PyObject *expected; /* the keys of a mapping, the treedef of a tree, the kind of a static */
    Py_ssize_t length;  /* of a sequence */
} Step;

/* A jax.Ref is an object and the content of a slot. */
typedef struct {
    int32_t slot, object;
} RefSlot;

typedef struct {
    PyObject_HEAD
    PyObject *recipe;
    PyObject *leaf_types; /* borrowed from the recipe */
    Place *places;
    Py_ssize_t size;
    Step *steps;
    Py_ssize_t num_steps;
    RefSlot *refs;
    Py_ssize_t num_refs, num_leaves, num_objects, num_others, num_frozen, num_mentions;
} Walk;

/* What the module needs from Python, looked up once. */
static PyObject *get_mapping_name;
static PyObject *open_tree;
static PyObject *open_static;
static PyObject *same_value;
static Py_ssize_t value_offset, metadata_offset, trace_state_offset;
static Py_ssize_t initializing_offset, is_setup_offset;

static inline PyObject *slot_at(PyObject *object, Py_ssize_t offset) {
    return *(PyObject **)((char *)object + offset);
}

static inline uint64_t id_of(PyObject *object) {
    return (uint64_t)(uintptr_t)object;
}

#define MAX_UNEQUAL 128

/* One walk. */
typedef struct {
    const Walk *walk;
    Py_ssize_t length;
    /* What is found, owned. No tuples yet: the collector would show them to others half filled. */
    PyObject **leaves, **objects, **others;
    /* Pins, in the order of the stream. */
    PyObject *const *frozen;
    const uint64_t *mentions;
    Py_ssize_t num_frozen, num_mentions;
    /* Statics that are not identical to their pins, to be compared when the walk is over. */
    PyObject *unequal[MAX_UNEQUAL], *unequal_pins[MAX_UNEQUAL];
    int num_unequal;
} Stream;

/* Appends an item. Returns 1, or 0 for a change. */
static inline int append(Stream *stream, PyObject *item) {
    if (item == NULL || stream->length >= stream->walk->size) return 0;
    const Place place = stream->walk->places[stream->length++];
    switch (place.rule) {
        case FROZEN: {
            PyObject *expected = stream->frozen[stream->num_frozen++];
            if (item == expected) return 1;
            if (stream->num_unequal == MAX_UNEQUAL) return 0;
            stream->unequal[stream->num_unequal] = Py_NewRef(item);
            stream->unequal_pins[stream->num_unequal++] = expected;
            return 1;
        }
        case LEAF:
            if ((PyObject *)Py_TYPE(item) !=
                PyTuple_GET_ITEM(stream->walk->leaf_types, place.index)) {
                return 0;
            }
            stream->leaves[place.index] = Py_NewRef(item);
            return 1;
        case FIRST:
            if (stream->mentions[stream->num_mentions++] != id_of(item)) return 0;
            stream->objects[place.index] = Py_NewRef(item);
            return 1;
        case AGAIN:
            return stream->mentions[stream->num_mentions++] == id_of(item);
        default:
            stream->others[place.index] = Py_NewRef(item);
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
                           (PyLong_CheckExact(key) && PyLong_CheckExact(expected));
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

/* Appends the parts of what only Python can open. Returns -1 with an error set. */
static int append_opened(Stream *stream, PyObject *open, PyObject *item, PyObject *expected) {
    PyObject *found = PyObject_CallOneArg(open, item);
    if (found == NULL) return -1;
    int same = 0;
    if (PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 2) {
        same = PyObject_RichCompareBool(PyTuple_GET_ITEM(found, 1), expected, Py_EQ);
        PyObject *parts = PyTuple_GET_ITEM(found, 0);
        if (same == 1) {
            same = PyList_CheckExact(parts) &&
                   append_sequence(stream, parts, PyList_GET_SIZE(parts));
        }
    }
    Py_DECREF(found);
    return same;
}

static int take_step(Stream *stream, const Step *step) {
    PyObject *item = (step->is_object ? stream->objects : stream->others)[step->index];
    if (item == NULL) return 0;
    if (step->kind == VALUE) return append(stream, slot_at(item, value_offset));
    if ((PyObject *)Py_TYPE(item) != step->type) return 0;
    switch (step->kind) {
        case METADATA:
            return append_mapping(stream, slot_at(item, metadata_offset), step->expected);
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
        case SEQUENCE:
            return append_sequence(stream, item, step->length);
        case TREE:
            return append_opened(stream, open_tree, item, step->expected);
        case STATIC:
            return append_opened(stream, open_static, item, step->expected);
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
        PyObject *variable = stream->objects[walk->steps[i].index];
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

/* Asks Python of statics that are not identical. Returns -1 with an error set. */
static int same_statics(const Stream *stream) {
    int same = 1;
    for (int i = 0; i < stream->num_unequal && same == 1; i++) {
        PyObject *answer = PyObject_CallFunctionObjArgs(same_value, stream->unequal[i],
                                                        stream->unequal_pins[i], NULL);
        if (answer == NULL) return -1;
        same = answer == Py_True;
        Py_DECREF(answer);
    }
    return same;
}

/* Fields of Pins. */
enum { PIN_FROZEN, PIN_MENTIONS, PIN_TRACE_STATES, PIN_NODE_STATES, PIN_FLAGS, NUM_PINS };

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
    for (Py_ssize_t i = 0; i < walk->num_refs; i++) {
        PyObject *ref = stream->objects[walk->refs[i].object];
        Py_ssize_t slot = walk->refs[i].slot;
        if ((PyObject *)Py_TYPE(ref) != PyTuple_GET_ITEM(walk->leaf_types, slot)) return 0;
        stream->leaves[slot] = Py_NewRef(ref);
    }
    if (!same_trace_states(stream, PyTuple_GET_ITEM(pins, PIN_TRACE_STATES))) return 0;
    PyObject *node_states = PyTuple_GET_ITEM(pins, PIN_NODE_STATES);
    if (!same_flags(node_states, PyTuple_GET_ITEM(pins, PIN_FLAGS))) return 0;
    return same_statics(stream);
}

static int check_pins(const Walk *walk, PyObject *pins) {
    if (!PyTuple_Check(pins) || PyTuple_GET_SIZE(pins) != NUM_PINS) goto bad;
    for (int i = 0; i < NUM_PINS; i++) {
        PyObject *own = PyTuple_GET_ITEM(pins, i);
        if (i == PIN_MENTIONS ? !PyBytes_Check(own) : !PyTuple_Check(own)) goto bad;
    }
    if (PyTuple_GET_SIZE(PyTuple_GET_ITEM(pins, PIN_FROZEN)) != walk->num_frozen) goto bad;
    Py_ssize_t bytes = walk->num_mentions * (Py_ssize_t)sizeof(uint64_t);
    if (PyBytes_GET_SIZE(PyTuple_GET_ITEM(pins, PIN_MENTIONS)) != bytes) goto bad;
    PyObject *states = PyTuple_GET_ITEM(pins, PIN_NODE_STATES);
    if (PyTuple_GET_SIZE(states) != PyTuple_GET_SIZE(PyTuple_GET_ITEM(pins, PIN_FLAGS))) goto bad;
    return 0;
bad:
    PyErr_SetString(PyExc_TypeError, "these pins do not belong to this walk");
    return -1;
}

/* A tuple of what was found; NULL with an error set where something was not. */
static PyObject *tuple_of(PyObject *const *items, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (items[i] == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "the recipe leaves out what it should find");
            return NULL;
        }
    }
    PyObject *tuple = PyTuple_New(count);
    if (tuple == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(items[i]));
    return tuple;
}

static PyObject *Walk_follow(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Walk *walk = (Walk *)self;
    if (count != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "follow(pins, arguments) takes two tuples");
        return NULL;
    }
    PyObject *pins = args[0];
    if (check_pins(walk, pins) < 0) return NULL;
    PyObject *mentions = PyTuple_GET_ITEM(pins, PIN_MENTIONS);
    Py_ssize_t count_found = walk->num_leaves + walk->num_objects + walk->num_others;
    PyObject **found = PyMem_Calloc(count_found + 1, sizeof(PyObject *));
    if (found == NULL) return PyErr_NoMemory();
    Stream stream = {
        .walk = walk,
        .leaves = found,
        .objects = found + walk->num_leaves,
        .others = found + walk->num_leaves + walk->num_objects,
        .frozen = ((PyTupleObject *)PyTuple_GET_ITEM(pins, PIN_FROZEN))->ob_item,
        .mentions = (const uint64_t *)PyBytes_AS_STRING(mentions),
    };
    PyObject *result = NULL;
    int same = follow_stream(&stream, pins, args[1]);
    if (same == 1) {
        PyObject *leaves = tuple_of(stream.leaves, walk->num_leaves);
        PyObject *objects = leaves == NULL ? NULL : tuple_of(stream.objects, walk->num_objects);
        if (objects != NULL) result = PyTuple_Pack(2, leaves, objects);
        Py_XDECREF(leaves);
        Py_XDECREF(objects);
    } else if (same == 0) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    for (int i = 0; i < stream.num_unequal; i++) Py_DECREF(stream.unequal[i]);
    for (Py_ssize_t i = 0; i < count_found; i++) Py_XDECREF(found[i]);
    PyMem_Free(found);
    return result;
}

/* Building: a recipe into places and steps. */

/* Fields of Recipe. */
enum {
    WAVES,
    KEYS,
    TYPES,
    LENGTHS,
    TREEDEFS,
    KINDS,
    FROZEN_STATICS,
    MENTIONS,
    LEAVES,
    LEAF_TYPES,
    OBJECTS,
    SIZE,
    NUM_FIELDS,
};

static PyObject *field(const Walk *walk, int index) {
    return PyTuple_GET_ITEM(walk->recipe, index);
}

/* The place that a number in the recipe speaks of; NULL with an error set if there is none. */
static Place *place_at(Walk *walk, PyObject *number) {
    Py_ssize_t position = PyLong_AsSsize_t(number);
    if (position >= 0 && position < walk->size) return &walk->places[position];
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "position out of range");
    return NULL;
}

static int set_rules(Walk *walk, int which, enum rule rule) {
    PyObject *positions = field(walk, which);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Place *place = place_at(walk, PyTuple_GET_ITEM(positions, i));
        if (place == NULL) return -1;
        if (rule == LEAF && place->rule == FIRST) {
            walk->refs[walk->num_refs++] = (RefSlot){.slot = (int32_t)i, .object = place->index};
        } else {
            place->rule = rule;
            place->index = (int32_t)i;
        }
    }
    return 0;
}

/* Gives all that has no rule yet a place of its own. */
static void place_others(Walk *walk) {
    for (Py_ssize_t i = 0; i < walk->size; i++) {
        if (walk->places[i].rule != UNSET) continue;
        walk->places[i] = (Place){.rule = OTHER, .index = (int32_t)walk->num_others++};
    }
}

/* The next expectations of each kind, in the order in which the recipe lists them. */
typedef struct {
    Py_ssize_t type, key, length, treedef, kind;
} Cursor;

static PyObject *next_of(const Walk *walk, int which, Py_ssize_t *index) {
    PyObject *tuple = field(walk, which);
    if (*index < PyTuple_GET_SIZE(tuple)) return PyTuple_GET_ITEM(tuple, (*index)++);
    PyErr_SetString(PyExc_ValueError, "the recipe is too short");
    return NULL;
}

static int add_steps(Walk *walk, enum kind kind, PyObject *positions, Cursor *cursor) {
    int opens_object = kind == NODE || kind == METADATA || kind == VALUE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Place *place = place_at(walk, PyTuple_GET_ITEM(positions, i));
        if (place == NULL) return -1;
        int is_object = place->rule == FIRST;
        if (opens_object ? !is_object : !is_object && place->rule != OTHER) {
            PyErr_SetString(PyExc_ValueError, "the recipe opens what it does not keep");
            return -1;
        }
        Step *step = &walk->steps[walk->num_steps];
        step->kind = kind;
        step->is_object = is_object;
        step->index = place->index;
        if (kind != VALUE) {
            step->type = next_of(walk, TYPES, &cursor->type);
            if (step->type == NULL) return -1;
        }
        if (kind == SEQUENCE) {
            PyObject *length = next_of(walk, LENGTHS, &cursor->length);
            if (length == NULL) return -1;
            step->length = PyLong_AsSsize_t(length);
        } else if (kind == TREE) {
            step->expected = next_of(walk, TREEDEFS, &cursor->treedef);
            if (step->expected == NULL) return -1;
        } else if (kind == STATIC) {
            step->expected = next_of(walk, KINDS, &cursor->kind);
            if (step->expected == NULL) return -1;
        } else if (kind != VALUE) {
            step->expected = next_of(walk, KEYS, &cursor->key);
            if (step->expected == NULL) return -1;
        }
        walk->num_steps++;
    }
    return 0;
}

static int make_steps(Walk *walk) {
    /* Fields of a wave, with Variables taken twice: first all metadata, then all values. */
    enum { STEPS = 8 };
    static const enum kind kinds[STEPS] = {NODE,     STATE, DICT,  METADATA, VALUE,
                                           SEQUENCE, TREE,  STATIC};
    static const int fields[STEPS] = {0, 1, 2, 3, 3, 4, 5, 6};
    PyObject *waves = field(walk, WAVES);
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waves); i++) {
        PyObject *wave = PyTuple_GET_ITEM(waves, i);
        for (int j = 0; j < STEPS; j++) count += PyTuple_GET_SIZE(PyTuple_GET_ITEM(wave, fields[j]));
    }
    walk->steps = PyMem_Calloc(count + 1, sizeof(Step));
    if (walk->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Cursor cursor = {0};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(waves); i++) {
        PyObject *wave = PyTuple_GET_ITEM(waves, i);
        for (int j = 0; j < STEPS; j++) {
            PyObject *positions = PyTuple_GET_ITEM(wave, fields[j]);
            if (add_steps(walk, kinds[j], positions, &cursor) < 0) return -1;
        }
    }
    return 0;
}

static int build(Walk *walk) {
    walk->size = PyLong_AsSsize_t(field(walk, SIZE));
    if (walk->size < 0) return -1;
    walk->leaf_types = field(walk, LEAF_TYPES);
    walk->num_leaves = PyTuple_GET_SIZE(field(walk, LEAVES));
    walk->num_objects = PyTuple_GET_SIZE(field(walk, OBJECTS));
    walk->num_frozen = PyTuple_GET_SIZE(field(walk, FROZEN_STATICS));
    walk->num_mentions = PyTuple_GET_SIZE(field(walk, MENTIONS));
    walk->places = PyMem_Calloc(walk->size + 1, sizeof(Place));
    walk->refs = PyMem_Calloc(walk->num_leaves + 1, sizeof(RefSlot));
    if (walk->places == NULL || walk->refs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (set_rules(walk, FROZEN_STATICS, FROZEN) < 0) return -1;
    if (set_rules(walk, MENTIONS, AGAIN) < 0) return -1;
    if (set_rules(walk, OBJECTS, FIRST) < 0) return -1;
    if (set_rules(walk, LEAVES, LEAF) < 0) return -1;
    place_others(walk);
    return make_steps(walk);
}

static PyObject *Walk_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *recipe;
    static char *names[] = {"recipe", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &recipe)) {
        return NULL;
    }
    if (same_value == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "set_up has not been called");
        return NULL;
    }
    if (PyTuple_GET_SIZE(recipe) != NUM_FIELDS) {
        PyErr_SetString(PyExc_ValueError, "this is no recipe");
        return NULL;
    }
    Walk *walk = (Walk *)type->tp_alloc(type, 0);
    if (walk == NULL) return NULL;
    walk->recipe = Py_NewRef(recipe);
    if (build(walk) < 0) Py_CLEAR(walk);
    return (PyObject *)walk;
}

static void Walk_dealloc(PyObject *self) {
    Walk *walk = (Walk *)self;
    PyObject_GC_UnTrack(self);
    PyMem_Free(walk->places);
    PyMem_Free(walk->steps);
    PyMem_Free(walk->refs);
    Py_XDECREF(walk->recipe);
    Py_TYPE(self)->tp_free(self);
}

static int Walk_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Walk *)self)->recipe);
    return 0;
}

static PyMethodDef Walk_methods[] = {
    {"follow", (PyCFunction)(void (*)(void))Walk_follow, METH_FASTCALL,
     "The arrays and objects of an unchanged graph; None if it may have changed."},
    {NULL},
};

static PyTypeObject WalkType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nnx_sharding.core.guard._walk.Walk",
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

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *tree, *content, *same, *value, *metadata, *trace_state, *initializing, *is_setup;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &tree, &content, &same, &value, &metadata,
                          &trace_state, &initializing, &is_setup)) {
        return NULL;
    }
    if ((value_offset = offset_of(value)) < 0) return NULL;
    if ((metadata_offset = offset_of(metadata)) < 0) return NULL;
    if ((trace_state_offset = offset_of(trace_state)) < 0) return NULL;
    if ((initializing_offset = offset_of(initializing)) < 0) return NULL;
    if ((is_setup_offset = offset_of(is_setup)) < 0) return NULL;
    Py_XSETREF(open_tree, Py_NewRef(tree));
    Py_XSETREF(open_static, Py_NewRef(content));
    Py_XSETREF(same_value, Py_NewRef(same));
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_up", set_up, METH_VARARGS,
     "Tells what the walk needs of Python, and where Flax keeps what. TypeError if elsewhere."},
    {NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nnx_sharding.core.guard._walk",
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
