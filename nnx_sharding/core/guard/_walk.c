/* The walk of walk.py, several times as fast: read that file first.
 *
 * Each item is compared when it is appended to the stream, and owned from then on, so that no
 * Python code can free it. Python code runs only between steps (other pytrees, rarer static
 * objects) and after the last one (statics that are equal without being identical), never while a
 * dict or a list is being read.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

/* The names that are shared with walk.py, in its order: it compares them on import. A slot is where
 * Flax keeps something in its objects. */
#define SLOTS(X) X(METADATA) X(VALUE) X(TRACE) X(INITIALIZING) X(IS_SETUP)
#define KINDS(X) X(NODE) X(STATE) X(DICT) SLOTS(X) X(SEQUENCE) X(TREE) X(STATIC)
#define STEP(X) X(kind) X(positions) X(expected)
#define RECIPE(X) X(steps) X(frozen) X(mentions) X(typed) X(types) X(leaves) X(objects) X(size)
#define PINS(X) X(frozen) X(mentions)
/* Functions that the module needs from Python, besides the descriptors of the slots. */
#define FUNCTIONS(X) X(get_mapping) X(open_tree) X(open_static) X(same_value)

#define AS_NAME(name) #name,
#define AS_KIND(name) name,
#define AS_STEP(name) STEP_##name,
#define AS_RECIPE(name) RECIPE_##name,
#define AS_PINS(name) PINS_##name,
#define AS_FUNCTION(name) CALL_##name,

enum kind { KINDS(AS_KIND) NUM_KINDS };
enum { STEP(AS_STEP) NUM_STEP };
enum { RECIPE(AS_RECIPE) NUM_RECIPE };
enum { PINS(AS_PINS) NUM_PINS };
enum { FUNCTIONS(AS_FUNCTION) NUM_FUNCTIONS };

static PyObject *functions[NUM_FUNCTIONS];
static Py_ssize_t offsets[NUM_KINDS];   /* of the slots */
static PyTypeObject *owners[NUM_KINDS]; /* the types with the slots; NULL for other kinds */

/* How an item of the stream is compared: with a pin, by identity, by its type. */
enum { FROZEN = 1, MENTION = 2, TYPED = 4 };

typedef struct {
    enum kind kind;
    int32_t position;   /* of the item that is opened */
    PyObject *expected; /* borrowed from the recipe */
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *recipe;
    unsigned char *rules; /* by position in the stream */
    PyObject **types;     /* likewise, where the rule is TYPED; borrowed from the recipe */
    Step *steps;
    Py_ssize_t size, num_steps, num_frozen, num_mentions;
} Walk;

/* One walk. */
typedef struct {
    const Walk *walk;
    PyObject **items; /* owned; NULL for a static that is identical to its pin */
    Py_ssize_t length;
    PyObject *const *frozen; /* the next pins */
    const uint64_t *mentions;
    Py_ssize_t num_unequal; /* statics that are not identical to their pins */
} Stream;

static inline PyObject *slot_of(PyObject *object, enum kind slot) {
    return *(PyObject **)((char *)object + offsets[slot]);
}

/* Appends an item. Returns 1, or 0 for a change. */
static inline int append(Stream *stream, PyObject *item) {
    if (item == NULL || stream->length >= stream->walk->size) return 0;
    Py_ssize_t position = stream->length++;
    const unsigned char rule = stream->walk->rules[position];
    if (rule == FROZEN && item == *stream->frozen) {
        stream->frozen++;
        return 1;
    }
    if (rule & FROZEN && item != *stream->frozen++) stream->num_unequal++;
    if (rule & MENTION && *stream->mentions++ != (uint64_t)(uintptr_t)item) return 0;
    if (rule & TYPED && (PyObject *)Py_TYPE(item) != stream->walk->types[position]) return 0;
    stream->items[position] = Py_NewRef(item);
    return 1;
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
    if (!PyTuple_Check(sequence) && !PyList_CheckExact(sequence)) return 0;
    if (PySequence_Fast_GET_SIZE(sequence) != length) return 0;
    PyObject **items = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t i = 0; i < length; i++) {
        if (!append(stream, items[i])) return 0;
    }
    return 1;
}

/* Appends the parts of what only Python can open. Returns -1 with an error set. */
static int append_opened(Stream *stream, PyObject *open, PyObject *item, PyObject *expected) {
    PyObject *opened = PyObject_CallOneArg(open, item), *parts, *name;
    if (opened == NULL) return -1;
    int same = -1;
    if (PyArg_ParseTuple(opened, "O!O", &PyList_Type, &parts, &name)) {
        same = PyObject_RichCompareBool(name, expected, Py_EQ);
        if (same == 1) same = append_sequence(stream, parts, PyList_GET_SIZE(parts));
    }
    Py_DECREF(opened);
    return same;
}

/* Returns 1, 0 for a change, or -1 with an error set. */
static int take_step(Stream *stream, const Step *step) {
    PyObject *item = stream->items[step->position], *mapping;
    if (item == NULL) return 0;
    int same = 0;
    switch (step->kind) {
        case NODE:
        case STATE:
            mapping = step->kind == NODE ? PyObject_GenericGetDict(item, NULL)
                                         : PyObject_CallOneArg(functions[CALL_get_mapping], item);
            if (mapping == NULL) return -1;
            same = append_mapping(stream, mapping, step->expected);
            Py_DECREF(mapping);
            return same;
        case DICT:
            return append_mapping(stream, item, step->expected);
        case METADATA:
            return append_mapping(stream, slot_of(item, METADATA), step->expected);
        case SEQUENCE:
            return append_sequence(stream, item, PyLong_AsSsize_t(step->expected));
        case TREE:
            return append_opened(stream, functions[CALL_open_tree], item, step->expected);
        case STATIC:
            return append_opened(stream, functions[CALL_open_static], item, step->expected);
        default:
            return append(stream, slot_of(item, step->kind));
    }
}

static PyObject *recipe_field(const Walk *walk, int index) {
    return PyTuple_GET_ITEM(walk->recipe, index);
}

/* Compares statics that are not identical by value. Returns -1 with an error set. */
static int same_statics(const Stream *stream, PyObject *pins) {
    if (stream->num_unequal == 0) return 1;
    PyObject *positions = recipe_field(stream->walk, RECIPE_frozen);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        PyObject *item = stream->items[PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i))];
        if (item == NULL) continue;
        PyObject *answer = PyObject_CallFunctionObjArgs(functions[CALL_same_value], item,
                                                        PyTuple_GET_ITEM(pins, i), NULL);
        if (answer == NULL) return -1;
        Py_DECREF(answer); /* a bool */
        if (answer != Py_True) return 0;
    }
    return 1;
}

/* Returns 1 if all is as it was, 0 for a change, -1 with an error set. */
static int follow_stream(Stream *stream, PyObject *pins, PyObject *arguments) {
    if (!append_sequence(stream, arguments, PyTuple_GET_SIZE(arguments))) return 0;
    for (Py_ssize_t i = 0; i < stream->walk->num_steps; i++) {
        int same = take_step(stream, &stream->walk->steps[i]);
        if (same != 1) return same;
    }
    if (stream->length != stream->walk->size) return 0;
    return same_statics(stream, PyTuple_GET_ITEM(pins, PINS_frozen));
}

static int are_pins(const Walk *walk, PyObject *pins) {
    if (!PyTuple_Check(pins) || PyTuple_GET_SIZE(pins) != NUM_PINS) return 0;
    PyObject *frozen = PyTuple_GET_ITEM(pins, PINS_frozen);
    PyObject *mentions = PyTuple_GET_ITEM(pins, PINS_mentions);
    return PyTuple_Check(frozen) && PyTuple_GET_SIZE(frozen) == walk->num_frozen &&
           PyBytes_Check(mentions) &&
           PyBytes_GET_SIZE(mentions) == walk->num_mentions * (Py_ssize_t)sizeof(uint64_t);
}

/* The items at some positions as a tuple; NULL with an error set. */
static PyObject *pick(const Stream *stream, PyObject *positions) {
    Py_ssize_t count = PyTuple_GET_SIZE(positions);
    PyObject *picked = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && picked != NULL; i++) {
        PyObject *item = stream->items[PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i))];
        PyTuple_SET_ITEM(picked, i, Py_NewRef(item));
    }
    return picked;
}

static PyObject *Walk_follow(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const Walk *walk = (Walk *)self;
    if (count != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "follow(pins, arguments) takes two tuples");
        return NULL;
    }
    if (!are_pins(walk, args[0])) {
        PyErr_SetString(PyExc_TypeError, "these pins do not belong to this walk");
        return NULL;
    }
    Stream stream = {
        .walk = walk,
        .items = PyMem_Calloc(walk->size + 1, sizeof(PyObject *)),
        .frozen = ((PyTupleObject *)PyTuple_GET_ITEM(args[0], PINS_frozen))->ob_item,
        .mentions = (uint64_t *)PyBytes_AS_STRING(PyTuple_GET_ITEM(args[0], PINS_mentions)),
    };
    if (stream.items == NULL) return PyErr_NoMemory();
    PyObject *result = NULL;
    int same = follow_stream(&stream, args[0], args[1]);
    if (same == 1) {
        PyObject *leaves = pick(&stream, recipe_field(walk, RECIPE_leaves));
        PyObject *objects = pick(&stream, recipe_field(walk, RECIPE_objects));
        if (leaves != NULL && objects != NULL) result = PyTuple_Pack(2, leaves, objects);
        Py_XDECREF(leaves);
        Py_XDECREF(objects);
    } else if (same == 0) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < stream.length; i++) Py_XDECREF(stream.items[i]);
    PyMem_Free(stream.items);
    return result;
}

/* Building: a recipe into places and steps. */

static int fail(const char *message) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, message);
    return -1;
}

/* A position of the recipe; -1 with an error set if it is out of range. */
static Py_ssize_t position_at(const Walk *walk, PyObject *positions, Py_ssize_t i) {
    Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i));
    if (position >= 0 && position < walk->size) return position;
    return fail("the recipe has a position that is out of range");
}

static int set_rules(Walk *walk, PyObject *positions, int rule) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Py_ssize_t position = position_at(walk, positions, i);
        if (position < 0) return -1;
        walk->rules[position] |= rule;
    }
    return 0;
}

static int set_types(Walk *walk, PyObject *positions, PyObject *types) {
    Py_ssize_t count = PyTuple_GET_SIZE(positions);
    if (PyTuple_GET_SIZE(types) != count) return fail("the recipe is too short");
    if (set_rules(walk, positions, TYPED) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *type = PyTuple_GET_ITEM(types, i);
        if (!PyType_Check(type)) return fail("the recipe has a type that is not one");
        walk->types[position_at(walk, positions, i)] = type;
    }
    return 0;
}

/* Results must be kept, which identical statics are not. */
static int check_results(Walk *walk, PyObject *positions) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Py_ssize_t position = position_at(walk, positions, i);
        if (position < 0) return -1;
        if (walk->rules[position] == FROZEN) return fail("the recipe returns what it does not keep");
    }
    return 0;
}

static int add_steps(Walk *walk, PyObject *step) {
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(step, STEP_kind));
    PyObject *positions = PyTuple_GET_ITEM(step, STEP_positions);
    PyObject *expected = PyTuple_GET_ITEM(step, STEP_expected);
    if (kind < 0 || kind >= NUM_KINDS) return fail("the recipe has a step of an unknown kind");
    if (PyTuple_GET_SIZE(positions) != PyTuple_GET_SIZE(expected)) {
        return fail("the recipe is too short");
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
        Py_ssize_t position = position_at(walk, positions, i);
        if (position < 0) return -1;
        PyTypeObject *type = (PyTypeObject *)walk->types[position];
        if (type == NULL) return fail("the recipe opens an item of any type");
        PyTypeObject *owner = owners[kind];
        if (owner != NULL && !PyType_IsSubtype(type, owner)) {
            return fail("the recipe looks for slots where there are none");
        }
        Step new = {kind, (int32_t)position, PyTuple_GET_ITEM(expected, i)};
        int has_keys = kind == NODE || kind == STATE || kind == DICT || kind == METADATA;
        if (has_keys && !PyTuple_Check(new.expected)) return fail("the recipe has no keys");
        walk->steps[walk->num_steps++] = new;
    }
    return 0;
}

static int build(Walk *walk) {
    PyObject *fields[NUM_RECIPE];
    for (int i = 0; i < NUM_RECIPE; i++) {
        fields[i] = recipe_field(walk, i);
        int is_right = i == RECIPE_size ? PyLong_Check(fields[i]) : PyTuple_Check(fields[i]);
        if (!is_right) return fail("expected a recipe");
    }
    walk->size = PyLong_AsSsize_t(fields[RECIPE_size]);
    if (walk->size < 0 || walk->size > INT32_MAX) return fail("the recipe has a wrong size");
    walk->num_frozen = PyTuple_GET_SIZE(fields[RECIPE_frozen]);
    walk->num_mentions = PyTuple_GET_SIZE(fields[RECIPE_mentions]);
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields[RECIPE_steps]); i++) {
        PyObject *step = PyTuple_GET_ITEM(fields[RECIPE_steps], i), *positions, *expected;
        if (!PyArg_ParseTuple(step, "OO!O!", &(PyObject *){NULL}, &PyTuple_Type, &positions,
                              &PyTuple_Type, &expected)) {
            return -1;
        }
        count += PyTuple_GET_SIZE(positions);
    }
    walk->rules = PyMem_Calloc(walk->size + 1, 1);
    walk->types = PyMem_Calloc(walk->size + 1, sizeof(PyObject *));
    walk->steps = PyMem_Calloc(count + 1, sizeof(Step));
    if (walk->rules == NULL || walk->types == NULL || walk->steps == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (set_rules(walk, fields[RECIPE_frozen], FROZEN) < 0) return -1;
    if (set_rules(walk, fields[RECIPE_mentions], MENTION) < 0) return -1;
    if (set_types(walk, fields[RECIPE_typed], fields[RECIPE_types]) < 0) return -1;
    if (check_results(walk, fields[RECIPE_leaves]) < 0) return -1;
    if (check_results(walk, fields[RECIPE_objects]) < 0) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields[RECIPE_steps]); i++) {
        if (add_steps(walk, PyTuple_GET_ITEM(fields[RECIPE_steps], i)) < 0) return -1;
    }
    return 0;
}

static PyObject *Walk_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *recipe;
    static char *names[] = {"recipe", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &PyTuple_Type, &recipe)) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(recipe) != NUM_RECIPE || functions[0] == NULL) {
        PyErr_SetString(PyExc_ValueError, "expected a recipe, after a call of set_up");
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
    PyMem_Free(walk->rules);
    PyMem_Free(walk->types);
    PyMem_Free(walk->steps);
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

/* One keyword argument of set_up, borrowed; NULL with an error set. */
static PyObject *needed(PyObject *kwargs, const char *name) {
    PyObject *value = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, name);
    if (value == NULL) PyErr_Format(PyExc_TypeError, "set_up() needs the argument %s", name);
    return value;
}

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs) {
    static const char *const names[] = {FUNCTIONS(AS_NAME) SLOTS(AS_NAME)};
    const int count = sizeof(names) / sizeof(*names);
    for (int i = 0; i < count; i++) {
        PyObject *value = needed(kwargs, names[i]);
        if (value == NULL) return NULL;
        if (i < NUM_FUNCTIONS) {
            Py_XSETREF(functions[i], Py_NewRef(value));
            continue;
        }
        PyMemberDescrObject *slot = (PyMemberDescrObject *)value;
        if (!Py_IS_TYPE(value, &PyMemberDescr_Type) || slot->d_member->type != T_OBJECT_EX) {
            PyErr_Format(PyExc_TypeError, "%R is not the descriptor of a slot", value);
            return NULL;
        }
        enum kind kind = METADATA + i - NUM_FUNCTIONS; /* the first slot, and those after it */
        offsets[kind] = slot->d_member->offset;
        Py_XSETREF(owners[kind], (PyTypeObject *)Py_NewRef(PyDescr_TYPE(slot)));
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_up", (PyCFunction)(void (*)(void))set_up, METH_VARARGS | METH_KEYWORDS,
     "Takes the functions that the walk calls, and the slots in which Flax keeps values."},
    {NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nnx_sharding.core.guard._walk",
    .m_doc = "The walk of walk.py, several times as fast.",
    .m_size = -1,
    .m_methods = module_methods,
};

/* Adds a tuple of names to a dict. Returns -1 with an error set. */
static int add_names(PyObject *fields, const char *key, const char *const *names, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; i < count && tuple != NULL; i++) {
        PyTuple_SET_ITEM(tuple, i, PyUnicode_FromString(names[i]));
    }
    int failed = tuple == NULL ? -1 : PyDict_SetItemString(fields, key, tuple);
    Py_XDECREF(tuple);
    return failed;
}

PyMODINIT_FUNC PyInit__walk(void) {
    static const char *const kinds[] = {KINDS(AS_NAME)}, *const step[] = {STEP(AS_NAME)};
    static const char *const recipe[] = {RECIPE(AS_NAME)}, *const pins[] = {PINS(AS_NAME)};
    if (PyType_Ready(&WalkType) < 0) return NULL;
    PyObject *module = PyModule_Create(&module_definition), *fields = PyDict_New();
    if (module == NULL || fields == NULL || add_names(fields, "Kind", kinds, NUM_KINDS) < 0 ||
        add_names(fields, "Step", step, NUM_STEP) < 0 ||
        add_names(fields, "Recipe", recipe, NUM_RECIPE) < 0 ||
        add_names(fields, "Pins", pins, NUM_PINS) < 0 ||
        PyModule_AddObjectRef(module, "FIELDS", fields) < 0 ||
        PyModule_AddObjectRef(module, "Walk", (PyObject *)&WalkType) < 0) {
        Py_CLEAR(module);
    }
    Py_XDECREF(fields);
    return module;
}
