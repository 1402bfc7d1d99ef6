/* The walk of walk.py, many times as fast: read that file first.
 *
 * A walk over one graph (Follower) notes the words of memory that it has read: types, slots, what
 * lists and attributes hold. The next walks compare them. The content of other dicts is not read again
 * until one changes, of which CPython notifies dict watchers; before Python 3.12 dicts have version
 * tags.
 *
 * The items of the stream are borrowed while only dicts, lists, tuples and slots are read, since no
 * Python code runs then: each is held by the item from which it was read. They become owned before
 * other objects are opened or compared, which runs Python code.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

/* The names shared with Python, in its order; walk.py compares them on import. A slot is where
 * CPython or Flax stores something in an object. */
#define SLOTS(X) X(METADATA) X(VALUE) X(TRACE) X(INITIALIZING) X(IS_SETUP) X(TREEDEF) X(LEAVES)
#define OPCODES(X) X(NODE) X(DICT) SLOTS(X) X(SEQUENCE) X(STATE) X(TREE) X(STATIC)
#define STEP(X) X(opcode) X(position) X(start)
#define RECIPE(X) X(steps) X(expected) X(types) X(rules) X(pins) X(frozen) X(mentions) X(first) \
    X(traces) X(leaves) X(objects) X(num_arguments)
#define PINS(X) X(frozen) X(mentions)
#define ROUTE(X) X(follow) X(names) X(plan) X(execute) X(donates) X(context_of) X(context) \
    X(slots) X(shardings) X(avals) X(known) X(entry)
/* What this module needs from walk.py and call.py besides the slots. */
#define HOOKS(X) X(open_tree) X(open_static) X(same_value) X(mapping_type) \
    X(is_ready) X(caller) X(held) X(settle) X(complete) X(is_bounded) X(wait) X(limit) \
    X(direct_mark)
/* Tuples that call.py and lifted.py make. */
#define DIRECT(X) X(routes) X(bound) X(fun) X(observer)
#define UPDATE(X) X(written) X(returned) X(unflatten)
/* Names of attributes. */
#define NAMES(X) X(_mapping) X(_direct) X(_flattened) X(_failed) X(fields) X(update) X(sharding) X(aval) X(num_devices)

#define AS_TEXT(name) " " #name
#define AS_STRING(name) #name,
#define AS_FIELD(name) int32_t name;
#define AS_OPCODE(name) name,
#define AS_RECIPE(name) RECIPE_##name,
#define AS_PINS(name) PINS_##name,
#define AS_ROUTE(name) ROUTE_##name,
#define AS_HOOK(name) HOOK_##name,
#define AS_DIRECT(name) DIRECT_##name,
#define AS_UPDATE(name) UPDATE_##name,
#define AS_NAME(name) NAME_##name,

enum opcode { OPCODES(AS_OPCODE) NUM_OPCODES };
enum { RECIPE(AS_RECIPE) NUM_RECIPE };
enum { PINS(AS_PINS) NUM_PINS };
enum { ROUTE(AS_ROUTE) NUM_ROUTE };
enum { HOOKS(AS_HOOK) NUM_HOOKS };
enum { DIRECT(AS_DIRECT) NUM_DIRECT };
enum { UPDATE(AS_UPDATE) NUM_UPDATE };
enum { NAMES(AS_NAME) NUM_NAMES };

#define MAX_DEPTH 8      /* of tuples that are compared here */
#define MAX_ARGUMENTS 32 /* of a method that is bound; with more, Python calls it */

static PyObject *hooks[NUM_HOOKS];
static PyObject *interned[NUM_NAMES];
static Py_ssize_t offsets[NUM_OPCODES];   /* of the slots */
static PyTypeObject *owners[NUM_OPCODES]; /* the types with the slots; NULL for other kinds */

#if PY_VERSION_HEX >= 0x030C0000
#define NUM_CHANGES 16 /* that are known; after more, all dicts are read again */
static int watcher = -1;
static uint64_t epoch = 1; /* counts the changes of all watched dicts */
static const PyObject *changed[NUM_CHANGES];

static int on_change(PyDict_WatchEvent Py_UNUSED(event), PyObject *dict, PyObject *Py_UNUSED(key),
                     PyObject *Py_UNUSED(value)) {
    changed[epoch++ % NUM_CHANGES] = dict;
    return 0;
}
#else
static const uint64_t epoch = 1;
#endif

/* How an item of the stream is compared: with a pin, by identity, or by its type. An item that says
 * to which trace its graph belongs is only compared within the same graph. */
enum { FROZEN = 1, MENTION = 2, TYPED = 4, OF_TRACE = 8 };

/* A step of a recipe, as recipe.py describes it. */
typedef struct {
    STEP(AS_FIELD)
} Step;

/* One kind of positions of a recipe, which holds them. */
typedef struct {
    const int32_t *positions;
    Py_ssize_t count;
} Positions;

/* A recipe, which holds all that the pointers lead to. */
typedef struct {
    PyObject_HEAD
    PyObject *recipe;
    const unsigned char *rules; /* by position in the stream */
    const int32_t *pins;        /* by position: the index of its pin */
    PyObject *const *types;     /* by position */
    PyObject *const *expected;  /* by step */
    const Step *steps;
    Positions frozen, mentions, first, traces, leaves, objects;
    Py_ssize_t num_arguments, size, num_steps;
    /* The steps that run no Python code come first, and of them those that open containers of the
     * arguments, which may be new in each call. */
    Py_ssize_t num_loose_steps, num_plain_steps, num_plain_items;
    Py_ssize_t *of_leaves, num_of_leaves; /* the plain steps that open hijax Variables */
} Walk;

typedef struct Follower Follower;

/* One walk. */
typedef struct {
    const Walk *walk;
    PyObject **items;
    int is_owned;
    Py_ssize_t length;
    PyObject **frozen;
    uint64_t *mentions;
    int is_match;          /* looks for another graph of the same structure, and records mentions */
    Py_ssize_t num_unequal; /* statics that Python has to compare with their pins */
    Follower *follower;     /* NULL if this is a match */
} Stream;

static inline PyObject *slot_of(PyObject *object, enum opcode slot) {
    return *(PyObject **)((char *)object + offsets[slot]);
}

static PyObject *attribute(PyObject *object, int name) {
    return PyObject_GetAttr(object, interned[name]);
}

/* The dict that is the only attribute of an object, borrowed; NULL for other objects. */
static PyObject *only_dict_in(PyObject *object) {
    PyObject *attributes = PyObject_GenericGetDict(object, NULL), *key, *value = NULL;
    Py_ssize_t position = 0;
    if (attributes == NULL) {
        PyErr_Clear();
        return NULL;
    }
    int is_one = PyDict_GET_SIZE(attributes) == 1 && PyDict_Next(attributes, &position, &key, &value);
    Py_DECREF(attributes);
    return is_one && PyDict_CheckExact(value) ? value : NULL;
}

/* Whether two dicts have the same objects under the same strings. */
static int are_same_dicts(PyObject *one, PyObject *two) {
    PyObject *key, *value, *other = NULL, *content = NULL;
    if (!PyDict_CheckExact(one) || !PyDict_CheckExact(two)) return 0;
    if (PyDict_GET_SIZE(one) != PyDict_GET_SIZE(two)) return 0;
    Py_ssize_t position = 0, place = 0;
    while (PyDict_Next(one, &position, &key, &value)) {
        PyDict_Next(two, &place, &other, &content); /* mostly in the same order */
        if (key == other && value == content && PyUnicode_CheckExact(key)) continue;
        if (!PyUnicode_CheckExact(key) || PyDict_GetItemWithError(two, key) != value) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* The same for mappings of Flax. */
static int are_same_mappings(PyObject *one, PyObject *two) {
    PyObject *first = attribute(one, NAME__mapping), *second = attribute(two, NAME__mapping);
    const int same = first != NULL && second != NULL && are_same_dicts(first, second);
    Py_XDECREF(first);
    Py_XDECREF(second);
    PyErr_Clear();
    return same;
}

/* Whether two statics are equal, if that can be decided without Python code. */
static int is_same_plain(PyObject *one, PyObject *two, int depth) {
    if (one == two) return 1;
    if (Py_TYPE(one) != Py_TYPE(two)) return 0;
    if ((PyObject *)Py_TYPE(one) == hooks[HOOK_mapping_type]) {
        return are_same_mappings(one, two);
    }
    if (PyFloat_CheckExact(one)) {
        double a = PyFloat_AS_DOUBLE(one), b = PyFloat_AS_DOUBLE(two);
        return memcmp(&a, &b, sizeof(a)) == 0;
    }
    if (PyTuple_CheckExact(one)) {
        Py_ssize_t count = PyTuple_GET_SIZE(one);
        if (PyTuple_GET_SIZE(two) != count || depth == MAX_DEPTH) return 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (!is_same_plain(PyTuple_GET_ITEM(one, i), PyTuple_GET_ITEM(two, i), depth + 1)) {
                return 0;
            }
        }
        return 1;
    }
    if (!PyUnicode_CheckExact(one) && !PyLong_CheckExact(one) && !PyBytes_CheckExact(one)) return 0;
    return PyObject_RichCompareBool(one, two, Py_EQ) == 1;
}

static int is_same_mention(Stream *stream, int32_t mention, PyObject *item) {
    const uint64_t id = (uint64_t)(uintptr_t)item;
    const int32_t first = stream->walk->first.positions[mention];
    if (!stream->is_match || first < 0) return stream->mentions[mention] == id;
    stream->mentions[mention] = id;
    return stream->mentions[first] == id;
}

/* Appends an item. Returns 1, or 0 for a change. */
static inline int append(Stream *stream, PyObject *item) {
    const Walk *walk = stream->walk;
    if (item == NULL || stream->length >= walk->size) return 0;
    const Py_ssize_t position = stream->length;
    const unsigned char rule = walk->rules[position];
    if (rule & FROZEN && item != stream->frozen[walk->pins[position]] &&
        !(stream->is_match && rule & OF_TRACE) &&
        !is_same_plain(item, stream->frozen[walk->pins[position]], 0)) {
        stream->num_unequal++;
    }
    if (rule & MENTION && !is_same_mention(stream, walk->pins[position], item)) return 0;
    if (rule & TYPED && (PyObject *)Py_TYPE(item) != walk->types[position]) return 0;
    stream->items[position] = stream->is_owned ? Py_NewRef(item) : item;
    stream->length++;
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
            /* Only keys whose comparison runs no user code. */
            int is_plain = (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(expected)) ||
                           (PyLong_CheckExact(key) && PyLong_CheckExact(expected));
            if (!is_plain || PyObject_RichCompareBool(key, expected, Py_EQ) != 1) return 0;
        }
        if (!append(stream, value)) return 0;
    }
    return i == count;
}

static int append_all(Stream *stream, PyObject *const *items, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!append(stream, items[i])) return 0;
    }
    return 1;
}

static int append_sequence(Stream *stream, PyObject *sequence, Py_ssize_t length) {
    if (!PyTuple_Check(sequence) && !PyList_CheckExact(sequence)) return 0;
    if (PySequence_Fast_GET_SIZE(sequence) != length) return 0;
    return append_all(stream, PySequence_Fast_ITEMS(sequence), length);
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

static int has_type(const Stream *stream, const Step *step) {
    return (PyObject *)Py_TYPE(stream->items[step->position]) == stream->walk->types[step->position];
}

static PyObject *expected_by(const Walk *walk, const Step *step) {
    return walk->expected[step - walk->steps];
}

/* The dict that a step reads, borrowed from its item; NULL, perhaps with an error set. */
static PyObject *dict_of(PyObject *item, enum opcode opcode) {
    if (opcode == METADATA) return slot_of(item, METADATA);
    if (opcode == DICT) return item;
    if (opcode == STATE) return only_dict_in(item);
    PyObject **place = _PyObject_GetDictPtr(item);
    if (place != NULL && *place != NULL) return *place;
    PyObject *dict = PyObject_GenericGetDict(item, NULL); /* not yet made */
    Py_XDECREF(dict);                                     /* the item has another reference */
    return dict;
}

/* Takes one step. Returns 1, 0 for a change, or -1 with an error set. */
static int take_step(Stream *stream, const Step *step) {
    PyObject *item = stream->items[step->position], *mapping;
    PyObject *expected = expected_by(stream->walk, step);
    if (!has_type(stream, step)) return 0;
    switch (step->opcode) {
        case NODE:
        case DICT:
        case METADATA:
        case STATE:
            mapping = dict_of(item, step->opcode);
            return mapping == NULL ? 0 : append_mapping(stream, mapping, expected);
        case LEAVES:
            item = slot_of(item, LEAVES);
            return item == NULL ? 0 : append_sequence(stream, item, PyLong_AsSsize_t(expected));
        case SEQUENCE:
            return append_sequence(stream, item, PyLong_AsSsize_t(expected));
        case TREE:
            return append_opened(stream, hooks[HOOK_open_tree], item, expected);
        case STATIC:
            return append_opened(stream, hooks[HOOK_open_static], item, expected);
        default:
            return append(stream, slot_of(item, step->opcode));
    }
}

static void pin_again(Stream *stream, Py_ssize_t number, int32_t position);

/* Compares by value statics that are not identical. Returns -1 with an error set. */
static int same_statics(Stream *stream) {
    const Walk *walk = stream->walk;
    for (Py_ssize_t i = 0; stream->num_unequal && i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (stream->is_match && walk->rules[position] & OF_TRACE) continue;
        if (is_same_plain(stream->items[position], stream->frozen[i], 0)) continue;
        PyObject *answer = PyObject_CallFunctionObjArgs(
            hooks[HOOK_same_value], stream->items[position], stream->frozen[i], NULL);
        if (answer == NULL) return -1;
        Py_DECREF(answer); /* a bool */
        if (answer != Py_True) return 0;
        if (stream->follower != NULL) pin_again(stream, i, position);
    }
    return 1;
}

/* Makes the items owned: from now on Python code may run. */
static int own_items(Stream *stream) {
    PyObject **items = PyMem_Malloc((stream->walk->size + 1) * sizeof(*items));
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < stream->length; i++) items[i] = Py_NewRef(stream->items[i]);
    stream->items = items;
    stream->is_owned = 1;
    return 1;
}

static void release_items(Stream *stream) {
    if (!stream->is_owned) return;
    for (Py_ssize_t i = 0; i < stream->length; i++) Py_DECREF(stream->items[i]);
    PyMem_Free(stream->items);
}

/* Takes some steps. Returns 1, 0 for a change, or -1 with an error set. */
static int take_steps(Stream *stream, Py_ssize_t step, Py_ssize_t end) {
    for (; step < end; step++) {
        if (stream->walk->steps[step].position >= stream->length) return 0;
        int same = take_step(stream, &stream->walk->steps[step]);
        if (same != 1) return same;
    }
    return 1;
}

/* All steps from a given one, then the statics. Returns 1, 0 for a change, or -1 with an error. */
static int finish(Stream *stream, Py_ssize_t step) {
    int same = take_steps(stream, step, stream->walk->num_steps);
    if (same != 1) return same;
    return stream->length == stream->walk->size ? same_statics(stream) : 0;
}

/* The items at some positions as a tuple; NULL with an error set. */
static PyObject *pick(const Stream *stream, Positions wanted) {
    PyObject *picked = PyTuple_New(wanted.count);
    for (Py_ssize_t i = 0; i < wanted.count && picked != NULL; i++) {
        PyTuple_SET_ITEM(picked, i, Py_NewRef(stream->items[wanted.positions[i]]));
    }
    return picked;
}

/* Takes the steps that run no Python code. Returns 1, or 0 for a change. */
static int read_plain(Stream *stream) {
    const Walk *walk = stream->walk;
    return take_steps(stream, 0, walk->num_plain_steps) == 1 &&
           stream->length == walk->num_plain_items;
}

/* What a walk found, as tuples. */
typedef struct {
    PyObject *leaves, *objects;
} Found;

static void drop_found(Found *found) {
    Py_CLEAR(found->leaves);
    Py_CLEAR(found->objects);
}

/* Returns 1, or -1 with an error set. */
static int pick_found(const Stream *stream, Found *found) {
    found->leaves = pick(stream, stream->walk->leaves);
    found->objects = found->leaves ? pick(stream, stream->walk->objects) : NULL;
    if (found->objects != NULL) return 1;
    drop_found(found);
    return -1;
}

/* Follower: the walk over one graph */

/* A word of memory that a walk has read: where, and what it was. */
typedef struct {
    const void *place;
    uintptr_t content;
} Word;

#define NUM_NOTED 8 /* walks of a graph that keeps changing; then only each 16th notes its words */

struct Follower {
    PyObject_HEAD
    Walk *walk;
    PyObject *pins;
    PyObject *frozen; /* the pinned statics, or equal ones that took their place */
    PyObject **items; /* those of the plain steps, borrowed: valid as long as they are unchanged */
    /* What the last walk that read all has noted: first what must be the same, where each word is in
     * an object that is held by the words before it; then statics, which may also be equal. */
    Word *words;
    Py_ssize_t num_words, num_same, room;
    const void **places; /* of the items, by position; those of `items` where there are no others */
    const PyObject **watched; /* dicts whose changes CPython notifies, borrowed */
    Py_ssize_t num_watched;
    int is_noted;
    uint64_t num_walks; /* that read all */
    uint64_t epoch;     /* at the last walk that found no change */
};

static inline uintptr_t word_at(const void *place) {
    uintptr_t word;
    memcpy(&word, place, sizeof(word));
    return word;
}

static inline PyObject *item_at(const void *place) { return (PyObject *)word_at(place); }

/* The first of some words that is not as it was noted, or the end. */
static const Word *first_other(const Word *word, const Word *end) {
    for (; end - word >= 4; word += 4) { /* most of the time of a walk is spent here */
        if (word_at(word[0].place) != word[0].content) return word;
        if (word_at(word[1].place) != word[1].content) return word + 1;
        if (word_at(word[2].place) != word[2].content) return word + 2;
        if (word_at(word[3].place) != word[3].content) return word + 3;
    }
    while (word < end && word_at(word->place) == word->content) word++;
    return word;
}

/* The first position that other steps read than the loose ones. */
static int32_t num_loose_items(const Walk *walk) {
    return walk->num_loose_steps < walk->num_plain_steps
               ? walk->steps[walk->num_loose_steps].start
               : (int32_t)walk->num_plain_items;
}

/* Pins the equal static that took the place of another, if its word was noted, so that Python
 * compares the two only once. */
static void pin_again(Stream *stream, Py_ssize_t number, int32_t position) {
    Follower *own = stream->follower;
    if (position < num_loose_items(own->walk)) return; /* it may be new in each call */
    for (Py_ssize_t i = own->num_same; own->is_noted && i < own->num_words; i++) {
        if (own->words[i].place != own->places[position]) continue;
        PyObject *item = stream->items[position];
        own->words[i].content = (uintptr_t)item;
        Py_XSETREF(stream->frozen[number], Py_NewRef(item));
        return;
    }
}

/* Returns 1, or 0 without memory. */
static int add_word(Follower *follower, const void *place, uintptr_t content) {
    if (follower->num_words == follower->room) {
        Py_ssize_t room = 2 * follower->room + 64;
        Word *words = PyMem_Realloc(follower->words, room * sizeof(Word));
        if (words == NULL) return 0;
        follower->words = words;
        follower->room = room;
    }
    follower->words[follower->num_words++] = (Word){place, content};
    return 1;
}

/* Notes the words at a place. */
static int note(Follower *follower, const void *place, size_t size) {
    for (size_t done = 0; done < size; done += sizeof(uintptr_t)) {
        const char *own = (const char *)place + done;
        if (!add_word(follower, own, word_at(own))) return 0;
    }
    return 1;
}

#if PY_VERSION_HEX >= 0x030D0000
/* The values of a dict whose class has its keys. Where they are stored inline in an object, Python
 * 3.13 does not notify watchers of their changes. Their order follows them, in whole words. */
typedef struct {
    uint8_t capacity, size, embedded, valid;
    PyObject *values[1];
} Values;
#endif

/* Notes the content of a dict, and where its values are if they are read each time. Returns 0 if a
 * change could not be seen. */
static int note_dict(Follower *follower, PyObject *dict, const void **places, Py_ssize_t count) {
    (void)follower, (void)places, (void)count; /* not needed in each version of Python */
#if PY_VERSION_HEX < 0x030C0000
    /* No two dicts ever have the same version tag. */
    const uint64_t *tag = &((PyDictObject *)dict)->ma_version_tag;
    return note(follower, tag, sizeof(*tag));
#else
#if PY_VERSION_HEX >= 0x030D0000
    const PyDictObject *own = (const PyDictObject *)dict;
    if (own->ma_values != NULL) {
        if (PY_VERSION_HEX >= 0x030E0000) return 0; /* not yet known */
        const Values *values = (const Values *)own->ma_values;
        const uint8_t *order = (const uint8_t *)&values->values[values->capacity];
        for (Py_ssize_t i = 0; i < count; i++) places[i] = &values->values[order[i]];
        return note(follower, &own->ma_keys, sizeof(own->ma_keys)) &&
               note(follower, &own->ma_values, sizeof(own->ma_values)) &&
               note(follower, values, offsetof(Values, values)) &&
               note(follower, order, count);
    }
#endif
    if (watcher >= 0 && PyDict_Watch(watcher, dict) == 0) {
        follower->watched[follower->num_watched++] = dict;
        return 1;
    }
    PyErr_Clear();
    return 0;
#endif
}

/* The same for what a step has opened. */
static int note_parts(Follower *follower, const Step *step, Py_ssize_t count) {
    PyObject *item = follower->items[step->position], **dict;
    const void **places = follower->places + step->start;
    switch (step->opcode) {
        case SEQUENCE:
            for (Py_ssize_t i = 0; i < count; i++) places[i] = PySequence_Fast_ITEMS(item) + i;
            if (PyList_CheckExact(item) &&
                !note(follower, &((PyListObject *)item)->ob_item, sizeof(PyObject **))) {
                return 0;
            }
            return note(follower, &((PyVarObject *)item)->ob_size, sizeof(Py_ssize_t));
        case LEAVES: /* a new tuple after each call that changes it: it is read each time */
            return 1;
        case DICT:
            return note_dict(follower, item, places, count);
        case METADATA:
            dict = (PyObject **)((char *)item + offsets[METADATA]);
            break;
        case NODE:
        case STATE:
            dict = _PyObject_GetDictPtr(item);
            break;
        default:
            places[0] = (char *)item + offsets[step->opcode];
            return 1;
    }
    if (dict == NULL || *dict == NULL || !note(follower, dict, sizeof(*dict))) return 0;
    if (step->opcode == STATE) {
        PyObject *mapping = only_dict_in(item);
        const void *place = &mapping; /* where watching its holder is enough */
        if (mapping == NULL || !note_dict(follower, *dict, &place, 1)) return 0;
        if (place != &mapping && !note(follower, place, sizeof(mapping))) return 0;
        return note_dict(follower, mapping, places, count);
    }
    return note_dict(follower, *dict, places, count);
}

/* Notes the words that the last walk has read. Returns 0 if a change could not be seen in them. */
static int note_all(Follower *follower) {
    const Walk *walk = follower->walk;
    if (follower->places == NULL) {
        follower->places = PyMem_Malloc((walk->size + 1) * sizeof(*follower->places));
    }
    if (follower->watched == NULL) { /* a step reads at most two dicts */
        const size_t count = 2 * walk->num_plain_steps + 1;
        follower->watched = PyMem_Malloc(count * sizeof(*follower->watched));
    }
    if (follower->places == NULL || follower->watched == NULL) return 0;
    const void **places = follower->places;
    follower->num_words = follower->num_watched = 0;
    const int32_t loose = num_loose_items(walk);
    for (Py_ssize_t i = 0; i < walk->size; i++) places[i] = &follower->items[i];
    int32_t noted = -1; /* the position of the last item */
    for (Py_ssize_t i = walk->num_loose_steps; i < walk->num_steps; i++) {
        const Step *step = &walk->steps[i];
        const int is_plain = i < walk->num_plain_steps;
        if (step->position >= walk->num_plain_items) continue;
        PyObject *item = follower->items[step->position];
        if (step->position != noted) {
            /* A mention was noted with its holder. */
            if (!(walk->rules[step->position] & MENTION) &&
                !note(follower, places[step->position], sizeof(item))) {
                return 0;
            }
            if (is_plain && !note(follower, &item->ob_type, sizeof(item->ob_type))) return 0;
            noted = step->position;
        }
        if (!is_plain) continue;
        const Py_ssize_t end = i + 1 < walk->num_plain_steps ? step[1].start : walk->num_plain_items;
        if (!note_parts(follower, step, end - step->start)) return 0;
        for (Py_ssize_t part = step->start; part < end; part++) {
            if (walk->rules[part] & MENTION && !note(follower, places[part], sizeof(item))) return 0;
        }
    }
    follower->num_same = follower->num_words;
    PyObject *const *pins = ((PyListObject *)follower->frozen)->ob_item;
    for (Py_ssize_t i = 0; i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (position >= walk->num_plain_items || position < loose) continue;
        /* In a dict that is watched it stays the same. */
        if (places[position] == &follower->items[position] && item_at(places[position]) == pins[i]) {
            continue;
        }
        if (!add_word(follower, places[position], (uintptr_t)pins[i])) return 0;
    }
    follower->epoch = epoch;
    return 1;
}

/* Whether no dict that was watched has changed since the last walk. */
static int are_dicts_unchanged(Follower *follower) {
#if PY_VERSION_HEX >= 0x030C0000
    if (epoch - follower->epoch > NUM_CHANGES) return 0;
    for (uint64_t i = follower->epoch; i < epoch; i++) {
        for (Py_ssize_t k = 0; k < follower->num_watched; k++) {
            if (follower->watched[k] == changed[i % NUM_CHANGES]) return 0;
        }
    }
    follower->epoch = epoch;
#else
    (void)follower; /* their version tags are words */
#endif
    return 1;
}

/* Compares the words that were noted, and reads arrays and statics. Runs no Python code. Returns 1, 0
 * for a change, or -1 if all has to be read. */
static int read_noted(Follower *follower, Stream *stream, PyObject *const *arguments) {
    const Walk *walk = follower->walk;
    const void *const *places = follower->places;
    PyObject **items = stream->items;
    if (!follower->is_noted || !are_dicts_unchanged(follower)) return -1;
    if (!append_all(stream, arguments, walk->num_arguments)) return 0;
    if (take_steps(stream, 0, walk->num_loose_steps) != 1) return 0;
    const Word *word = first_other(follower->words, follower->words + follower->num_same);
    if (word < follower->words + follower->num_same) return -1;
    const Word *end = follower->words + follower->num_words;
    while ((word = first_other(word, end)) < end) {
        PyObject *item = item_at(word->place);
        if (item == NULL) return 0;
        stream->num_unequal += !is_same_plain(item, (PyObject *)word++->content, 0);
    }
    for (Py_ssize_t i = 0; i < walk->num_of_leaves; i++) {
        const Step *step = &walk->steps[walk->of_leaves[i]];
        stream->length = step->start;
        if (take_step(stream, step) != 1) return 0;
    }
    for (Py_ssize_t i = 0; i < walk->leaves.count; i++) {
        const int32_t position = walk->leaves.positions[i];
        if (position >= walk->num_plain_items) continue;
        PyObject *item = items[position] = item_at(places[position]);
        if (item == NULL || (PyObject *)Py_TYPE(item) != walk->types[position]) return 0;
    }
    /* The other items are the same, or not used unless Python code is run. */
    const int is_enough = walk->num_plain_steps == walk->num_steps && !stream->num_unequal;
    for (Py_ssize_t i = 0; !is_enough && i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (position < walk->num_plain_items) items[position] = item_at(places[position]);
    }
    stream->length = walk->num_plain_items;
    return 1;
}

/* Reads all that can be read without Python code. Returns 1, or 0 for a change. */
static int read_all(Follower *follower, Stream *stream, PyObject *const *arguments) {
    const Walk *walk = follower->walk;
    follower->is_noted = 0;
    stream->length = stream->num_unequal = 0;
    if (!append_all(stream, arguments, walk->num_arguments) || !read_plain(stream)) return 0;
    const uint64_t number = ++follower->num_walks;
    if (number <= NUM_NOTED || number % 16 == 0) follower->is_noted = note_all(follower);
    return 1;
}

static Stream stream_of(Walk *walk, PyObject *pins) {
    return (Stream){
        .walk = walk,
        .frozen = ((PyTupleObject *)PyTuple_GET_ITEM(pins, PINS_frozen))->ob_item,
        .mentions = (uint64_t *)PyBytes_AS_STRING(PyTuple_GET_ITEM(pins, PINS_mentions)),
    };
}

/* Takes the other steps, and picks what was found, unless `same` says otherwise. Turns the garbage
 * collector on before it runs Python code. Returns 1, 0 for a change, or -1 with an error set. */
static int conclude(Stream *stream, int same, int collects, Found *found) {
    const Walk *walk = stream->walk;
    const int runs_python = walk->num_plain_steps < walk->num_steps || stream->num_unequal;
    if (same == 1) same = runs_python ? own_items(stream) : pick_found(stream, found);
    if (collects) PyGC_Enable();
    if (same == 1 && runs_python) same = finish(stream, walk->num_plain_steps);
    return same == 1 && runs_python ? pick_found(stream, found) : same;
}

/* Walks from the arguments of a call. Returns 1, 0 for a change, or -1 with an error set. */
static int follow(Follower *follower, PyObject *const *arguments, Py_ssize_t count, Found *found) {
    Stream stream = stream_of(follower->walk, follower->pins);
    stream.items = follower->items;
    stream.frozen = ((PyListObject *)follower->frozen)->ob_item;
    stream.follower = follower;
    /* Before Python 3.12 the garbage collector may run when a dict or tuple is made. */
    const int collects = PyGC_Disable();
    int same = count == stream.walk->num_arguments ? read_noted(follower, &stream, arguments) : 0;
    if (same < 0) same = read_all(follower, &stream, arguments);
    same = conclude(&stream, same, collects, found);
    release_items(&stream);
    if (same == 0) PyErr_Clear();
    return same;
}

static PyObject *Follower_call(PyObject *self, PyObject *arguments) {
    Found found = {0};
    int same = follow((Follower *)self, PySequence_Fast_ITEMS(arguments),
                      PySequence_Fast_GET_SIZE(arguments), &found);
    if (same < 0) return NULL;
    if (same == 0) Py_RETURN_NONE;
    PyObject *result = PyTuple_Pack(2, found.leaves, found.objects);
    drop_found(&found);
    return result;
}

static void Follower_dealloc(PyObject *self) {
    Follower *follower = (Follower *)self;
    PyObject_GC_UnTrack(self);
    PyMem_Free(follower->items);
    PyMem_Free(follower->words);
    PyMem_Free(follower->places);
    PyMem_Free(follower->watched);
    Py_XDECREF(follower->walk);
    Py_XDECREF(follower->pins);
    Py_XDECREF(follower->frozen);
    Py_TYPE(self)->tp_free(self);
}

static int Follower_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Follower *)self)->walk);
    Py_VISIT(((Follower *)self)->pins);
    Py_VISIT(((Follower *)self)->frozen);
    return 0;
}

static PyMethodDef follow_method = {
    "follow", Follower_call, METH_O,
    "The arrays and objects of an unchanged graph; None if it may have changed."};

static PyTypeObject FollowerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nnx_sharding.core.guard._native.Follower",
    .tp_doc = "The walk over one graph.",
    .tp_basicsize = sizeof(Follower),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = Follower_dealloc,
    .tp_traverse = Follower_traverse,
};

/* Walk: a recipe that is ready to be followed */

static PyObject *Walk_follower(PyObject *self, PyObject *pins) {
    Walk *walk = (Walk *)self;
    Follower *follower = (Follower *)FollowerType.tp_alloc(&FollowerType, 0);
    if (follower == NULL) return NULL;
    follower->walk = (Walk *)Py_NewRef(self);
    follower->pins = Py_NewRef(pins);
    follower->frozen = PySequence_List(PyTuple_GET_ITEM(pins, PINS_frozen));
    follower->items = PyMem_Calloc(walk->size + 1, sizeof(PyObject *));
    if (follower->items == NULL || follower->frozen == NULL) {
        Py_DECREF(follower);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    PyObject *follow = PyCFunction_New(&follow_method, (PyObject *)follower);
    Py_DECREF(follower);
    return follow;
}

/* Whether no object comes twice. */
static int are_distinct(PyObject *objects) {
    int bits = 4;
    while (((Py_ssize_t)1 << bits) < 2 * PyTuple_GET_SIZE(objects)) bits++;
    const size_t last = ((size_t)1 << bits) - 1;
    PyObject **table = PyMem_Calloc(last + 1, sizeof(*table)); /* with open addressing */
    int distinct = table != NULL;
    for (Py_ssize_t i = 0; distinct && i < PyTuple_GET_SIZE(objects); i++) {
        PyObject *own = PyTuple_GET_ITEM(objects, i);
        size_t place = (uint64_t)(uintptr_t)own * UINT64_C(0x9E3779B97F4A7C15) >> (64 - bits);
        while (table[place] != NULL && table[place] != own) place = (place + 1) & last;
        distinct = table[place] == NULL;
        table[place] = own;
    }
    PyMem_Free(table);
    return distinct;
}

static PyObject *Walk_match(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Walk *walk = (Walk *)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "match takes pins and arguments");
        return NULL;
    }
    Stream stream = stream_of(walk, args[0]);
    stream.is_match = 1;
    PyObject *mentions = PyBytes_FromStringAndSize(
        (const char *)stream.mentions, walk->mentions.count * (Py_ssize_t)sizeof(uint64_t));
    if (mentions == NULL) return NULL;
    stream.mentions = (uint64_t *)PyBytes_AS_STRING(mentions);
    PyObject **items = stream.items = PyMem_Malloc((walk->size + 1) * sizeof(*items));
    PyObject *result = NULL;
    Found found = {0};
    const int collects = PyGC_Disable();
    int same = items == NULL ? -1 : append_sequence(&stream, args[1], walk->num_arguments);
    if (same == 1) same = conclude(&stream, read_plain(&stream), 0, &found);
    if (same == 1) same = are_distinct(found.objects);
    if (same == 1) {
        result = Py_BuildValue("(OONON)", found.leaves, found.objects, pick(&stream, walk->frozen),
                               mentions, pick(&stream, walk->traces));
    } else if (same == 0) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    if (collects) PyGC_Enable();
    drop_found(&found);
    Py_DECREF(mentions);
    release_items(&stream);
    PyMem_Free(items);
    return result;
}

static int is_container(int32_t opcode) { return opcode == DICT || opcode == SEQUENCE || opcode == STATE; }

static Positions positions_of(PyObject *bytes) {
    return (Positions){(const int32_t *)PyBytes_AS_STRING(bytes),
                       PyBytes_GET_SIZE(bytes) / (Py_ssize_t)sizeof(int32_t)};
}

static PyObject *Walk_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *recipe;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &recipe)) return NULL;
    Walk *walk = (Walk *)type->tp_alloc(type, 0);
    if (walk == NULL) return NULL;
    walk->recipe = Py_NewRef(recipe);
    PyObject **fields = ((PyTupleObject *)recipe)->ob_item;
    walk->rules = (const unsigned char *)PyBytes_AS_STRING(fields[RECIPE_rules]);
    walk->pins = positions_of(fields[RECIPE_pins]).positions;
    walk->types = ((PyTupleObject *)fields[RECIPE_types])->ob_item;
    walk->expected = ((PyTupleObject *)fields[RECIPE_expected])->ob_item;
    walk->steps = (const Step *)PyBytes_AS_STRING(fields[RECIPE_steps]);
    walk->frozen = positions_of(fields[RECIPE_frozen]);
    walk->mentions = positions_of(fields[RECIPE_mentions]);
    walk->first = positions_of(fields[RECIPE_first]);
    walk->traces = positions_of(fields[RECIPE_traces]);
    walk->leaves = positions_of(fields[RECIPE_leaves]);
    walk->objects = positions_of(fields[RECIPE_objects]);
    walk->num_arguments = PyLong_AsSsize_t(fields[RECIPE_num_arguments]);
    walk->size = PyTuple_GET_SIZE(fields[RECIPE_types]);
    walk->num_steps = PyTuple_GET_SIZE(fields[RECIPE_expected]);
    while (walk->num_plain_steps < walk->num_steps &&
           walk->steps[walk->num_plain_steps].opcode < TREE) {
        walk->num_plain_steps++;
    }
    while (walk->num_loose_steps < walk->num_plain_steps &&
           is_container(walk->steps[walk->num_loose_steps].opcode)) {
        walk->num_loose_steps++;
    }
    walk->num_plain_items = walk->num_plain_steps < walk->num_steps
                                ? walk->steps[walk->num_plain_steps].start
                                : walk->size;
    walk->of_leaves = PyMem_Malloc((walk->num_plain_steps + 1) * sizeof(*walk->of_leaves));
    if (walk->of_leaves == NULL) {
        Py_DECREF(walk);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < walk->num_plain_steps; i++) {
        if (walk->steps[i].opcode == LEAVES) walk->of_leaves[walk->num_of_leaves++] = i;
    }
    return (PyObject *)walk;
}

static void Walk_dealloc(PyObject *self) {
    Walk *walk = (Walk *)self;
    PyObject_GC_UnTrack(self);
    PyMem_Free(walk->of_leaves);
    Py_XDECREF(walk->recipe);
    Py_TYPE(self)->tp_free(self);
}

static int Walk_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Walk *)self)->recipe);
    return 0;
}

static PyMethodDef Walk_methods[] = {
    {"follower", Walk_follower, METH_O,
     "A function of the arguments of a call: the arrays and objects of the graph with these pins, "
     "or None if it may have changed."},
    {"match", (PyCFunction)(void (*)(void))Walk_match, METH_FASTCALL,
     "The same for another graph of the same structure, with its pins and traces."},
    {NULL},
};

static PyTypeObject WalkType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nnx_sharding.core.guard._native.Walk",
    .tp_doc = "A recipe, ready to be followed.",
    .tp_basicsize = sizeof(Walk),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Walk_new,
    .tp_dealloc = Walk_dealloc,
    .tp_traverse = Walk_traverse,
    .tp_methods = Walk_methods,
};

/* Guarded calls: from the arguments of a jitted function to its result, without Python code
 *
 * `call` does what `LiftedFunction` and `run` in call.py do where a guard holds, no array has to be
 * placed, and only arrays of Variables change. Otherwise it leaves all, or the rest, to them. No
 * Python code runs between the program and the write-back, so no signal can come in between. */

/* Whether a call has the keyword arguments of a route, in their order. */
static int has_names(PyObject *names, PyObject *kwnames) {
    const Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (PyTuple_GET_SIZE(names) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_GET_ITEM(names, i) != PyTuple_GET_ITEM(kwnames, i)) return 0;
    }
    return 1;
}

/* Whether what a plan depends on besides the graph is as for a route; -1 with an error set. */
static int has_context(PyObject *route) {
    PyObject *context_of = PyTuple_GET_ITEM(route, ROUTE_context_of);
    if (context_of == Py_None) return 1;
    PyObject *context = PyObject_CallNoArgs(context_of);
    if (context == NULL) return -1;
    int same = PyObject_RichCompareBool(context, PyTuple_GET_ITEM(route, ROUTE_context), Py_EQ);
    Py_DECREF(context);
    return same;
}

/* Whether an attribute of an array has a value; -1 with an error set. */
static int has_attribute(PyObject *leaf, int name, PyObject *goal) {
    PyObject *value = attribute(leaf, name);
    if (value == NULL) return -1;
    int same = value == goal ? 1 : PyObject_RichCompareBool(value, goal, Py_EQ);
    Py_DECREF(value);
    return same;
}

/* Whether all arrays have the shapes and shardings of a plan; -1 with an error set. Those that stay
 * the same are known by weak references; Python's False is for those that calls replace. */
static int are_as_planned(PyObject *route, const Found *found) {
    PyObject *slots = PyTuple_GET_ITEM(route, ROUTE_slots);
    PyObject *shardings = PyTuple_GET_ITEM(route, ROUTE_shardings);
    PyObject *avals = PyTuple_GET_ITEM(route, ROUTE_avals);
    PyObject *all_known = PyTuple_GET_ITEM(route, ROUTE_known);
    const int32_t *positions = (const int32_t *)PyBytes_AS_STRING(slots);
    const Py_ssize_t count = PyBytes_GET_SIZE(slots) / (Py_ssize_t)sizeof(int32_t);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *leaf = PyTuple_GET_ITEM(found->leaves, positions[i]);
        PyObject *known = PyList_GET_ITEM(all_known, i), *goal = PyList_GET_ITEM(shardings, i);
        const int is_known = PyWeakref_CheckRef(known);
        if (is_known && ((PyWeakReference *)known)->wr_object == leaf) continue;
        int same = goal == Py_None ? 1 : has_attribute(leaf, NAME_sharding, goal);
        if (same == 1 && PyList_GET_SIZE(avals) > 0) {
            same = has_attribute(leaf, NAME_aval, PyList_GET_ITEM(avals, i));
        }
        if (same != 1) return same;
        if (known == Py_False) continue;
        known = is_known ? Py_NewRef(Py_False) : PyWeakref_NewRef(leaf, NULL);
        if (known == NULL || PyList_SetItem(all_known, i, known) < 0) return -1;
    }
    return 1;
}

/* As in `Guard.check`, errors are changes, but not what ends a program. */
static int is_interrupted(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 1;
    PyErr_Clear();
    return 0;
}

/* The first route of a function that holds for some arguments, as a new reference; NULL if none
 * does, perhaps with an error set. It is then the first in the list. */
static PyObject *find_route(PyObject *routes, PyObject *const *arguments, Py_ssize_t count,
                            PyObject *kwnames, Found *found) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(routes); i++) {
        PyObject *route = Py_NewRef(PyList_GET_ITEM(routes, i));
        PyObject *own = PyTuple_GET_ITEM(route, ROUTE_follow);
        if (PyCFunction_CheckExact(own) && Py_IS_TYPE(PyCFunction_GET_SELF(own), &FollowerType) &&
            has_names(PyTuple_GET_ITEM(route, ROUTE_names), kwnames) &&
            follow((Follower *)PyCFunction_GET_SELF(own), arguments, count, found) == 1) {
            int holds = has_context(route);
            if (holds == 1) holds = are_as_planned(route, found);
            if (holds == 1 && PyTuple_GET_ITEM(route, ROUTE_donates) == Py_True) {
                holds = PyObject_HasAttr(PyTuple_GET_ITEM(route, ROUTE_execute),
                                         hooks[HOOK_direct_mark]);
            }
            if (holds == 1) {
                if (i > 0 && i < PyList_GET_SIZE(routes)) { /* Python code may have run */
                    PyObject *moved = PyList_GET_ITEM(routes, i);
                    PyList_SET_ITEM(routes, i, PyList_GET_ITEM(routes, 0));
                    PyList_SET_ITEM(routes, 0, moved);
                }
                return route;
            }
            drop_found(found);
        }
        Py_DECREF(route);
        if (is_interrupted()) return NULL;
    }
    return NULL;
}

/* Runs a program, attributed to the call in which it may be traced; NULL with an error set. */
static PyObject *execute(PyObject *direct, PyObject *route, const Found *found) {
    PyObject *fun = PyTuple_GET_ITEM(direct, DIRECT_fun), *outputs = NULL;
    PyObject *plan = fun == Py_None ? Py_None : PyTuple_GET_ITEM(route, ROUTE_plan);
    PyObject *caller = PyTuple_Pack(6, fun, found->objects,
                                    PyTuple_GET_ITEM(direct, DIRECT_observer), Py_False, plan,
                                    found->leaves);
    PyObject *outer = caller ? attribute(hooks[HOOK_caller], NAME_fields) : NULL;
    if (outer == NULL ||
        PyObject_SetAttr(hooks[HOOK_caller], interned[NAME_fields], caller) < 0) {
        Py_XDECREF(outer);
        Py_XDECREF(caller);
        return NULL;
    }
    Py_DECREF(caller);
    outputs = PyObject_Vectorcall(PyTuple_GET_ITEM(route, ROUTE_execute),
                                  ((PyTupleObject *)found->leaves)->ob_item,
                                  PyTuple_GET_SIZE(found->leaves), NULL);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyObject_SetAttr(hooks[HOOK_caller], interned[NAME_fields], outer) < 0) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    Py_DECREF(outer);
    return outputs;
}

/* The array with a position in an output group, or -1 and a slot, borrowed; NULL if there is none.
 */
static PyObject *array_at(PyObject *outputs, const Found *found, int32_t group, int32_t position) {
    PyObject *arrays = found->leaves;
    if (group >= 0) {
        if (group >= PyTuple_GET_SIZE(outputs) - 1) return NULL;
        PyObject *own = PyTuple_GET_ITEM(outputs, group);
        if (!PyExceptionInstance_Check(own)) return NULL;
        PyObject *args = ((PyBaseExceptionObject *)own)->args; /* of an `OutputGroup` */
        if (PyTuple_GET_SIZE(args) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(args, 1))) return NULL;
        arrays = PyTuple_GET_ITEM(args, 1);
    }
    if (position < 0 || position >= PyTuple_GET_SIZE(arrays)) return NULL;
    return PyTuple_GET_ITEM(arrays, position);
}

/* The slot in which a Variable has its value; NULL for anything else. */
static PyObject **value_in(PyObject *variable) {
    enum opcode slot = VALUE;
    if (Py_IS_TYPE(variable, owners[LEAVES])) {
        slot = LEAVES;
    } else if (!PyType_IsSubtype(Py_TYPE(variable), owners[VALUE])) {
        return NULL;
    }
    return (PyObject **)((char *)variable + offsets[slot]);
}

/* Sets the Variables that an update names: indices of objects with groups and positions. Either all
 * or none: returns 1, or 0 if they are not as expected. */
static int write_back(PyObject *written, PyObject *outputs, const Found *found) {
    const int32_t(*sources)[3] = (const int32_t(*)[3])PyBytes_AS_STRING(written);
    const Py_ssize_t count = PyBytes_GET_SIZE(written) / (Py_ssize_t)sizeof(*sources);
    PyObject **values = PyMem_Malloc((count + 1) * sizeof(*values));
    Py_ssize_t made = 0;
    for (; values != NULL && made < count; made++) {
        const int32_t *source = sources[made];
        PyObject *array = array_at(outputs, found, source[1], source[2]);
        if (array == NULL || source[0] < 0 || source[0] >= PyTuple_GET_SIZE(found->objects)) break;
        PyObject *variable = PyTuple_GET_ITEM(found->objects, source[0]);
        if (value_in(variable) == NULL) break;
        const int is_hijax = Py_IS_TYPE(variable, owners[LEAVES]);
        values[made] = is_hijax ? PyTuple_Pack(1, array) : Py_NewRef(array);
        if (values[made] == NULL) break;
    }
    const int is_complete = values != NULL && made == count;
    for (Py_ssize_t i = 0; is_complete && i < count; i++) {
        PyObject **slot = value_in(PyTuple_GET_ITEM(found->objects, sources[i][0])), *old = *slot;
        *slot = values[i];
        values[i] = old;
    }
    /* Only now: the end of an array may run Python code. */
    for (Py_ssize_t i = 0; i < made; i++) Py_XDECREF(values[i]);
    PyMem_Free(values);
    PyErr_Clear(); /* without memory for a tuple */
    return is_complete;
}

/* The arrays that a call returns, in the user's containers; NULL with an error set. */
static PyObject *output_of(PyObject *update, PyObject *outputs, const Found *found) {
    PyObject *returned = PyTuple_GET_ITEM(update, UPDATE_returned);
    PyObject *unflatten = PyTuple_GET_ITEM(update, UPDATE_unflatten);
    const int32_t(*sources)[2] = (const int32_t(*)[2])PyBytes_AS_STRING(returned);
    const Py_ssize_t count = PyBytes_GET_SIZE(returned) / (Py_ssize_t)sizeof(*sources);
    PyObject *arrays = PyTuple_New(count), *result = NULL;
    for (Py_ssize_t i = 0; arrays != NULL && i < count; i++) {
        PyObject *array = array_at(outputs, found, sources[i][0], sources[i][1]);
        if (array == NULL) {
            PyErr_SetString(PyExc_ValueError, "a program returned other arrays than expected");
            Py_CLEAR(arrays);
            break;
        }
        PyTuple_SET_ITEM(arrays, i, Py_NewRef(array));
    }
    if (arrays == NULL) return NULL;
    if (unflatten != Py_None) {
        result = PyObject_CallOneArg(unflatten, arrays);
    } else if (count == 1) {
        result = Py_NewRef(PyTuple_GET_ITEM(arrays, 0));
    }
    Py_DECREF(arrays);
    return result;
}

/* Waits for every 16th program on virtual devices, as call.py does. Returns -1 with an error
 * set. */
static int wait_if_many(PyObject *outputs, const Found *found) {
    static int is_bounded = -1;
    static long in_flight;
    if (is_bounded < 0) {
        PyObject *answer = PyObject_CallNoArgs(hooks[HOOK_is_bounded]);
        if (answer == NULL) return -1;
        is_bounded = answer == Py_True;
        Py_DECREF(answer);
    }
    if (!is_bounded || ++in_flight < PyLong_AsLong(hooks[HOOK_limit])) return 0;
    PyObject *array = array_at(outputs, found, 0, 0);
    PyObject *sharding = array == NULL ? NULL : attribute(array, NAME_sharding);
    PyObject *devices = sharding == NULL ? NULL : attribute(sharding, NAME_num_devices);
    const int is_one = devices != NULL && PyLong_AsLong(devices) == 1;
    Py_XDECREF(sharding);
    Py_XDECREF(devices);
    PyErr_Clear();
    if (is_one) return 0;
    PyObject *groups = PyTuple_GetSlice(outputs, 0, PyTuple_GET_SIZE(outputs) - 1);
    PyObject *answer = groups ? PyObject_CallOneArg(hooks[HOOK_wait], groups) : NULL;
    if (answer == Py_True) in_flight = 0;
    Py_XDECREF(groups);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* What a call returns once its program was run; NULL with an error set. */
static PyObject *finish_call(PyObject *route, PyObject *outputs, const Found *found) {
    PyObject *plan = PyTuple_GET_ITEM(route, ROUTE_plan);
    PyObject *run = PyTuple_GET_ITEM(route, ROUTE_execute), *update = NULL, *result = NULL;
    if (PyTuple_Check(outputs) && PyTuple_GET_SIZE(outputs) > 0) {
        PyObject *outcome = PyTuple_GET_ITEM(outputs, PyTuple_GET_SIZE(outputs) - 1);
        update = attribute(outcome, NAME_update);
        if (update == NULL) PyErr_Clear();
    }
    if (update != NULL && PyTuple_Check(update) &&
        PyTuple_GET_ITEM(update, UPDATE_returned) != Py_None &&
        write_back(PyTuple_GET_ITEM(update, UPDATE_written), outputs, found)) {
        result = output_of(update, outputs, found);
        if (result != NULL && PyDict_GET_SIZE(hooks[HOOK_held]) > 0) {
            PyObject *settled = PyObject_CallFunctionObjArgs(hooks[HOOK_settle], run, outputs, NULL);
            if (settled == NULL) Py_CLEAR(result);
            Py_XDECREF(settled);
        }
    } else {
        result = PyObject_CallFunctionObjArgs(hooks[HOOK_complete], plan, run, found->objects,
                                              found->leaves, outputs, NULL);
    }
    Py_XDECREF(update);
    if (result != NULL && wait_if_many(outputs, found) < 0) Py_CLEAR(result);
    return result;
}

/* Lets Python explain an error: `_failed` may raise another one. */
static void explain(PyObject *self, PyObject *route, const Found *found) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) PyException_SetTraceback(value, traceback);
    PyObject *answer = PyObject_CallMethodObjArgs(self, interned[NAME__failed],
                                                  PyTuple_GET_ITEM(route, ROUTE_plan),
                                                  found->leaves, value, found->objects, NULL);
    if (answer == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    Py_DECREF(answer);
    PyErr_Restore(type, value, traceback);
}

/* A method of an object whose attribute `_direct` has its routes. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    PyObject *direct = attribute(self, NAME__direct), *route = NULL, *result = NULL;
    if (direct == NULL) return NULL;
    PyObject *routes = PyTuple_GET_ITEM(direct, DIRECT_routes);
    if (PyList_GET_SIZE(routes) > 0) {
        PyObject *bound = PyTuple_GET_ITEM(direct, DIRECT_bound);
        const Py_ssize_t own = PyTuple_GET_SIZE(bound);
        Py_ssize_t total = count + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
        PyObject *buffer[MAX_ARGUMENTS], *const *arguments = args;
        if (own > 0 && own + total <= MAX_ARGUMENTS) {
            for (Py_ssize_t i = 0; i < own; i++) buffer[i] = PyTuple_GET_ITEM(bound, i);
            for (Py_ssize_t i = 0; i < total; i++) buffer[own + i] = args[i];
            arguments = buffer;
        }
        Found found = {0};
        PyObject *ready = PyObject_CallNoArgs(hooks[HOOK_is_ready]);
        Py_XDECREF(ready);
        if (ready == Py_True && (own == 0 || arguments == buffer)) {
            route = find_route(routes, arguments, own + total, kwnames, &found);
        }
        if (route != NULL) {
            PyObject *outputs = execute(direct, route, &found);
            if (outputs == NULL) {
                explain(self, route, &found);
            } else {
                result = finish_call(route, outputs, &found);
                Py_DECREF(outputs);
            }
            drop_found(&found);
            Py_DECREF(route);
        }
    }
    Py_DECREF(direct);
    if (route != NULL || is_interrupted()) return result;
    PyObject *flattened = attribute(self, NAME__flattened);
    if (flattened == NULL) return NULL;
    result = PyObject_Vectorcall(flattened, args, count, kwnames);
    Py_DECREF(flattened);
    return result;
}

static PyMethodDef call_method = {
    "__call__", (PyCFunction)(void (*)(void))call, METH_FASTCALL | METH_KEYWORDS,
    "__call__($self, /, *args, **kwargs)\n--\n\n"
    "Calls the function; its changes are made to the caller's own objects."};

/* Takes one hook or slot by its name. Returns -1 with an error set. */
static int take(PyObject *name, PyObject *value) {
    static const char *const names[] = {HOOKS(AS_STRING)}, *const opcodes[] = {OPCODES(AS_STRING)};
    for (int i = 0; i < NUM_HOOKS; i++) {
        if (PyUnicode_CompareWithASCIIString(name, names[i]) != 0) continue;
        Py_XSETREF(hooks[i], Py_NewRef(value));
        return 0;
    }
    for (int i = METADATA; i <= LEAVES; i++) {
        PyMemberDescrObject *slot = (PyMemberDescrObject *)value;
        if (PyUnicode_CompareWithASCIIString(name, opcodes[i]) != 0) continue;
        if (!Py_IS_TYPE(value, &PyMemberDescr_Type) || slot->d_member->type != T_OBJECT_EX) break;
        offsets[i] = slot->d_member->offset;
        Py_XSETREF(owners[i], (PyTypeObject *)Py_NewRef(PyDescr_TYPE(slot)));
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%U: %R is not the descriptor of a slot", name, value);
    return -1;
}

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args), PyObject *kwargs) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(kwargs, &position, &name, &value)) {
        if (take(name, value) < 0) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"set_up", (PyCFunction)(void (*)(void))set_up, METH_VARARGS | METH_KEYWORDS,
     "Takes what this module needs from Python, and the slots in which Flax keeps values."},
    {NULL},
};

static int fill_module(PyObject *module) {
    static const char *const names[] = {NAMES(AS_STRING)};
#if PY_VERSION_HEX >= 0x030C0000
    if (watcher < 0) watcher = PyDict_AddWatcher(on_change);
    if (watcher < 0) PyErr_Clear(); /* none are left */
#endif
    for (int i = 0; i < NUM_NAMES; i++) {
        if ((interned[i] = PyUnicode_InternFromString(names[i])) == NULL) return -1;
    }
    PyObject *method = PyDescr_NewMethod(&PyBaseObject_Type, &call_method);
    if (method == NULL || PyModule_AddObject(module, "call", method) < 0) return -1;
    if (PyType_Ready(&FollowerType) < 0 || PyModule_AddType(module, &WalkType) < 0) return -1;
    return PyModule_AddStringConstant(
        module, "FIELDS",
        "Opcode" OPCODES(AS_TEXT) " Step" STEP(AS_TEXT) " Recipe" RECIPE(AS_TEXT) " Pins" PINS(AS_TEXT)
            " Route" ROUTE(AS_TEXT));
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill_module},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    /* Free-threaded Python turns the GIL on when this module is imported. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "nnx_sharding.core.guard._native",
    .m_doc = "The walk of walk.py, many times as fast.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
