/* The walk: is a graph the one that a recipe describes?
 *
 * walk.py has the same walk in Python, as the reference: read that first. By the steps of the recipe,
 * a walk appends what it reads to one list, the stream, and compares each item as it is appended:
 * names, types, statics, and the ids of objects. A model with 193 Variables has about 2,500 items.
 * Reading them takes 22 us where `jax.jit` itself takes 67 us for the same arrays, which is too long
 * for a walk that nearly always finds no change.
 *
 * So the first walks also note the words of memory that they have read: types, slots, pointers to
 * and in dicts, the items of lists. Later walks compare these words, which takes 5 us, and read only
 * arrays and what differs. Each word is in an object that the words before it lead to. So if all
 * words before it are unchanged, the object is alive and its memory may be read.
 *
 * The content of a dict is not noted as words unless it is stored in the object that owns the dict:
 *
 *     before 3.12   a dict has a version tag, which is one word
 *     from 3.12     CPython notifies us when a dict changes (a dict watcher)
 *     3.13, 3.14    CPython keeps attributes in the object itself, and does not notify us when these
 *                   change, so they are noted as words
 *     from 3.15     the layout of such attributes is not known here, so every walk reads everything
 *
 * While only dicts, lists, tuples and slots are read, no Python code runs. So the stream borrows its
 * items: each item is held by the item from which it was read. The stream owns its items before
 * Python code opens or compares anything, because that code may change the graph, or call the same
 * function.
 */

#include "native.h"

#define MAX_DEPTH 8 /* the depth to which nested tuples are compared in C */

#if PY_VERSION_HEX >= 0x030C0000
#define NUM_CHANGES 16 /* the changes that are remembered; after more, all dicts are read again */
static int watcher = -1;
static uint64_t epoch = 1; /* counts the changes of all watched dicts */
static const PyObject *changed[NUM_CHANGES]; /* the dicts of the last changes, in a ring */

/* CPython calls this when a watched dict changes: notes the dict in the ring, and counts. */
static int on_change(PyDict_WatchEvent Py_UNUSED(event), PyObject *dict, PyObject *Py_UNUSED(key),
                     PyObject *Py_UNUSED(value)) {
    changed[epoch++ % NUM_CHANGES] = dict;
    return 0;
}
#else
static const uint64_t epoch = 1;
#endif

/* The `Rule` of recipe.py: how an item of the stream is compared. */
enum { FROZEN = 1, MENTION = 2, TYPED = 4, OF_TRACE = 8 };

/* A step of a recipe, as recipe.py describes it. */
typedef struct {
    STEP(AS_FIELD)
} Step;

/* A field of a recipe with positions in the stream. The recipe holds the memory. */
typedef struct {
    const int32_t *positions;
    Py_ssize_t count;
} Positions;

/* A word of memory that a walk has read: its address, and its content then. */
typedef struct {
    const void *place;
    uintptr_t content;
} Word;

/* A recipe, and what walks have noted. The pointers lead into `recipe`, which holds the memory. */
typedef struct {
    PyObject_HEAD
    PyObject *recipe;
    const unsigned char *rules; /* by position in the stream */
    const int32_t *pins;        /* by position: the number of the item's pin */
    PyObject *const *types;     /* by position */
    PyObject *const *expected;  /* by step */
    const Step *steps;
    const uint64_t *ids; /* by mention */
    Positions frozen, mentions, first, traces, leaves, objects;
    Py_ssize_t num_arguments, size, num_steps;
    /* The plain steps, which run no Python code, come first. The first of these are the loose steps:
     * they open containers of the arguments, which may be new objects in each call. */
    Py_ssize_t num_loose_steps, num_plain_steps, num_plain_items;
    Py_ssize_t *of_leaves, num_of_leaves; /* the plain steps that open hijax Variables */
    PyObject *statics; /* a list of the pinned statics; an equal static may replace one of them */

    /* What the last walk that read everything has noted. The first `num_same` words must be the
     * same. The others are pointers to statics: such a static may also be another, equal object. */
    Word *words;
    Py_ssize_t num_words, num_same, room;
    PyObject **items; /* the items of the plain steps, borrowed: valid while the words are the same */
    const void **places; /* by position: the address of the pointer to the item in the graph, or in
                          * `items` if no word of the graph is read for the item */
    const PyObject **watched; /* the dicts whose changes CPython notifies us of, borrowed */
    Py_ssize_t num_watched;
    int is_noted;       /* whether the words are those of the last walk that read everything */
    uint64_t num_walks; /* the number of walks that read everything */
    uint64_t epoch;     /* the epoch at the last walk that found no change in dicts */
} Walk;

/* The state of one walk. */
typedef struct {
    Walk *walk;
    PyObject **items; /* by position; borrowed from the graph unless `is_owned` */
    int is_owned; /* whether the stream has a reference to each item, and the memory of `items` */
    Py_ssize_t length; /* the number of items so far: the position of the next one */
    PyObject **statics; /* the pins of statics, by number: the items of the walk's `statics` */
    uint64_t *found_ids; /* `match`: the ids of the mentions in the other graph; `follow`: NULL */
    Py_ssize_t num_unequal; /* the number of statics that Python has to compare with their pins */
} Stream;

/* What an object of Flax has in a slot, borrowed; NULL if the slot is empty. */
static inline PyObject *slot_of(PyObject *object, enum opcode slot) {
    return *(PyObject **)((char *)object + native.offsets[slot]);
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

/* Whether two mappings of Flax have the same objects under the same strings. */
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
    if ((PyObject *)Py_TYPE(one) == native.hooks[HOOK_mapping_type]) {
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

/* Whether a mention is of the right object. In `follow`, and for a pinned object, that is the
 * recorded object. In `match` it is the object of the first mention that it repeats. */
static int is_same_mention(Stream *stream, int32_t mention, PyObject *item) {
    const uint64_t id = (uint64_t)(uintptr_t)item;
    const int32_t first = stream->walk->first.positions[mention];
    if (stream->found_ids == NULL || first < 0) return stream->walk->ids[mention] == id;
    stream->found_ids[mention] = id;
    return stream->found_ids[first] == id;
}

/* Appends an item, after comparing it by its rule. Returns 1, or 0 for a change. A static that C does
 * not find equal is only counted (`num_unequal`), because `same_statics` compares it in Python. */
static inline int append(Stream *stream, PyObject *item) {
    const Walk *walk = stream->walk;
    if (item == NULL || stream->length >= walk->size) return 0;
    const Py_ssize_t position = stream->length;
    const unsigned char rule = walk->rules[position];
    if (rule & FROZEN && item != stream->statics[walk->pins[position]] &&
        !(stream->found_ids != NULL && rule & OF_TRACE) &&
        !is_same_plain(item, stream->statics[walk->pins[position]], 0)) {
        stream->num_unequal++;
    }
    if (rule & MENTION && !is_same_mention(stream, walk->pins[position], item)) return 0;
    if (rule & TYPED && (PyObject *)Py_TYPE(item) != walk->types[position]) return 0;
    stream->items[position] = stream->is_owned ? Py_NewRef(item) : item;
    stream->length++;
    return 1;
}

/* Appends the values of a mapping if it has exactly these keys in this order. Returns 1, or 0 for a
 * change. */
static int append_mapping(Stream *stream, PyObject *mapping, PyObject *keys) {
    if (mapping == NULL || !PyDict_Check(mapping)) return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(keys), position = 0, i = 0;
    if (PyDict_GET_SIZE(mapping) != count) return 0;
    PyObject *key, *value;
    while (PyDict_Next(mapping, &position, &key, &value)) {
        PyObject *expected = PyTuple_GET_ITEM(keys, i++);
        if (key != expected) {
            /* Comparing two strings or two ints runs no user code. */
            int is_plain = (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(expected)) ||
                           (PyLong_CheckExact(key) && PyLong_CheckExact(expected));
            if (!is_plain || PyObject_RichCompareBool(key, expected, Py_EQ) != 1) return 0;
        }
        if (!append(stream, value)) return 0;
    }
    return i == count;
}

/* Appends some items. Returns 1, or 0 for a change. */
static int append_all(Stream *stream, PyObject *const *items, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!append(stream, items[i])) return 0;
    }
    return 1;
}

/* Appends the items of a tuple or list if it has this length. Returns 1, or 0 for a change. */
static int append_sequence(Stream *stream, PyObject *sequence, Py_ssize_t length) {
    if (!PyTuple_Check(sequence) && !PyList_CheckExact(sequence)) return 0;
    if (PySequence_Fast_GET_SIZE(sequence) != length) return 0;
    return append_all(stream, PySequence_Fast_ITEMS(sequence), length);
}

/* Appends the parts of an item that only Python can open: `open` returns a list of parts, and what
 * has to equal `expected`. The stream owns its items by now, because this runs Python code. Returns
 * 1, 0 for a change, or -1 with an error set. */
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

/* Whether the item that a step opens has the recorded type. */
static int has_type(const Stream *stream, const Step *step) {
    return (PyObject *)Py_TYPE(stream->items[step->position]) == stream->walk->types[step->position];
}

/* What a step must find: names, keys, a length or a treedef. Borrowed. */
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
    PyObject *dict = PyObject_GenericGetDict(item, NULL); /* makes the dict */
    Py_XDECREF(dict);                                     /* the item keeps a reference */
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
            return append_opened(stream, native.hooks[HOOK_open_tree], item, expected);
        case STATIC:
            return append_opened(stream, native.hooks[HOOK_open_static], item, expected);
        default:
            return append(stream, slot_of(item, step->opcode));
    }
}

static void pin_again(Stream *stream, Py_ssize_t number, int32_t position); /* see below */

/* Compares by value the statics that are not identical. Returns 1, 0 for a change, or -1 with an
 * error set. */
static int same_statics(Stream *stream) {
    const Walk *walk = stream->walk;
    for (Py_ssize_t i = 0; stream->num_unequal && i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (stream->found_ids != NULL && walk->rules[position] & OF_TRACE) continue;
        if (is_same_plain(stream->items[position], stream->statics[i], 0)) continue;
        PyObject *answer = PyObject_CallFunctionObjArgs(
            native.hooks[HOOK_same_value], stream->items[position], stream->statics[i], NULL);
        if (answer == NULL) return -1;
        Py_DECREF(answer); /* a bool */
        if (answer != Py_True) return 0;
        if (stream->found_ids == NULL) pin_again(stream, i, position);
    }
    return 1;
}

/* Makes the stream own its items, so that Python code may run. Returns 1, or -1 with an error set. */
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

/* Releases the items if the stream owns them. */
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

/* Takes all steps from a given one, then compares the statics. Returns 1, 0 for a change, or -1 with
 * an error set. */
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

/* Fills `found` with the arrays and objects. Returns 1, or -1 with an error set. */
static int pick_found(const Stream *stream, Found *found) {
    found->leaves = pick(stream, stream->walk->leaves);
    found->objects = found->leaves ? pick(stream, stream->walk->objects) : NULL;
    if (found->objects != NULL) return 1;
    drop_found(found);
    return -1;
}

/* The noted words */

/* Noting words is wasted on a graph that keeps changing, so after this number of walks that read
 * everything, only each 16th notes its words. */
#define NUM_NOTED 8

static inline uintptr_t word_at(const void *place) {
    uintptr_t word;
    memcpy(&word, place, sizeof(word));
    return word;
}

/* The object to which the pointer at a place leads, borrowed. */
static inline PyObject *item_at(const void *place) { return (PyObject *)word_at(place); }

/* The first word that is not as it was noted, or the end. Most of the time of a walk is spent here,
 * so the loop takes four words at a time. */
static const Word *first_other(const Word *word, const Word *end) {
    for (; end - word >= 4; word += 4) {
        if (word_at(word[0].place) != word[0].content) return word;
        if (word_at(word[1].place) != word[1].content) return word + 1;
        if (word_at(word[2].place) != word[2].content) return word + 2;
        if (word_at(word[3].place) != word[3].content) return word + 3;
    }
    while (word < end && word_at(word->place) == word->content) word++;
    return word;
}

/* The number of items that are arguments or appended by loose steps: the position of the next item. */
static int32_t num_loose_items(const Walk *walk) {
    return walk->num_loose_steps < walk->num_plain_steps
               ? walk->steps[walk->num_loose_steps].start
               : (int32_t)walk->num_plain_items;
}

/* Pins an equal static that has taken the place of another in the graph, if its word was noted, so
 * that Python compares the two only once. `number` is that of the pin, and `position` is where the
 * static is in the stream. */
static void pin_again(Stream *stream, Py_ssize_t number, int32_t position) {
    Walk *walk = stream->walk;
    if (position < num_loose_items(walk)) return; /* the static may be a new object in each call */
    for (Py_ssize_t i = walk->num_same; walk->is_noted && i < walk->num_words; i++) {
        if (walk->words[i].place != walk->places[position]) continue;
        PyObject *item = stream->items[position];
        walk->words[i].content = (uintptr_t)item;
        Py_XSETREF(stream->statics[number], Py_NewRef(item));
        return;
    }
}

/* Notes one word. Returns 1, or 0 if there is no memory. */
static int add_word(Walk *walk, const void *place, uintptr_t content) {
    if (walk->num_words == walk->room) {
        Py_ssize_t room = 2 * walk->room + 64;
        Word *words = PyMem_Realloc(walk->words, room * sizeof(Word));
        if (words == NULL) return 0;
        walk->words = words;
        walk->room = room;
    }
    walk->words[walk->num_words++] = (Word){place, content};
    return 1;
}

/* Notes the words of `size` bytes at a place. Returns 1, or 0 if there is no memory. */
static int note(Walk *walk, const void *place, size_t size) {
    for (size_t offset = 0; offset < size; offset += sizeof(uintptr_t)) {
        const char *word = (const char *)place + offset;
        if (!add_word(walk, word, word_at(word))) return 0;
    }
    return 1;
}

#if PY_VERSION_HEX >= 0x030D0000
/* The values of a dict whose keys are shared by all objects of a class: the `_dictvalues` of Python
 * 3.13 and 3.14. Behind the values comes their order, one byte for each, in whole words. If an object
 * stores the values inline, Python does not notify watchers of their changes. */
typedef struct {
    uint8_t capacity, size, embedded, valid;
    PyObject *values[1];
} Values;
#endif

/* Notes the content of a dict, of which the walk has read `count` values. Sets `places` to the
 * addresses of these values if they are words that are compared each time. Returns 1, or 0 if a
 * change of the dict would not be noticed. */
static int note_dict(Walk *walk, PyObject *dict, const void **places, Py_ssize_t count) {
    (void)walk, (void)places, (void)count; /* some versions of Python do not need them */
#if PY_VERSION_HEX < 0x030C0000
    /* No two dicts ever have the same version tag. */
    const uint64_t *tag = &((PyDictObject *)dict)->ma_version_tag;
    return note(walk, tag, sizeof(*tag));
#else
#if PY_VERSION_HEX >= 0x030D0000
    const PyDictObject *own = (const PyDictObject *)dict;
    if (own->ma_values != NULL) {
        if (PY_VERSION_HEX >= 0x030F0000) return 0; /* the layout of Python 3.15 is not known */
        const Values *values = (const Values *)own->ma_values;
        const uint8_t *order = (const uint8_t *)&values->values[values->capacity];
        for (Py_ssize_t i = 0; i < count; i++) places[i] = &values->values[order[i]];
        return note(walk, &own->ma_keys, sizeof(own->ma_keys)) &&
               note(walk, &own->ma_values, sizeof(own->ma_values)) &&
               note(walk, values, offsetof(Values, values)) &&
               note(walk, order, count);
    }
#endif
    if (watcher >= 0 && PyDict_Watch(watcher, dict) == 0) {
        walk->watched[walk->num_watched++] = dict;
        return 1;
    }
    PyErr_Clear();
    return 0;
#endif
}

/* Notes the content of the item that a step has opened, and sets the places of its `count` parts.
 * Returns 1, or 0 if a change would not be noticed. */
static int note_parts(Walk *walk, const Step *step, Py_ssize_t count) {
    PyObject *item = walk->items[step->position], **dict;
    const void **places = walk->places + step->start;
    switch (step->opcode) {
        case SEQUENCE:
            for (Py_ssize_t i = 0; i < count; i++) places[i] = PySequence_Fast_ITEMS(item) + i;
            if (PyList_CheckExact(item) &&
                !note(walk, &((PyListObject *)item)->ob_item, sizeof(PyObject **))) {
                return 0;
            }
            return note(walk, &((PyVarObject *)item)->ob_size, sizeof(Py_ssize_t));
        case LEAVES: /* each call that changes the Variable makes a new tuple, so it is always read */
            return 1;
        case DICT:
            return note_dict(walk, item, places, count);
        case METADATA:
            dict = (PyObject **)((char *)item + native.offsets[METADATA]);
            break;
        case NODE:
        case STATE:
            dict = _PyObject_GetDictPtr(item);
            break;
        default:
            places[0] = (char *)item + native.offsets[step->opcode];
            return 1;
    }
    if (dict == NULL || *dict == NULL || !note(walk, dict, sizeof(*dict))) return 0;
    if (step->opcode == STATE) {
        PyObject *mapping = only_dict_in(item);
        const void *place = &mapping; /* stays so if the dict of the State is watched */
        if (mapping == NULL || !note_dict(walk, *dict, &place, 1)) return 0;
        if (place != &mapping && !note(walk, place, sizeof(mapping))) return 0;
        return note_dict(walk, mapping, places, count);
    }
    return note_dict(walk, *dict, places, count);
}

/* Notes the words that the last walk has read. Returns 1, or 0 if a change would not be noticed. */
static int note_all(Walk *walk) {
    if (walk->places == NULL) {
        walk->places = PyMem_Malloc((walk->size + 1) * sizeof(*walk->places));
    }
    if (walk->watched == NULL) { /* a step reads at most two dicts */
        const size_t count = 2 * walk->num_plain_steps + 1;
        walk->watched = PyMem_Malloc(count * sizeof(*walk->watched));
    }
    if (walk->places == NULL || walk->watched == NULL) return 0;
    const void **places = walk->places;
    walk->num_words = walk->num_watched = 0;
    const int32_t loose = num_loose_items(walk);
    for (Py_ssize_t i = 0; i < walk->size; i++) places[i] = &walk->items[i];
    int32_t noted = -1; /* the position of the item that was noted last: several steps may open it */
    for (Py_ssize_t i = walk->num_loose_steps; i < walk->num_steps; i++) {
        const Step *step = &walk->steps[i];
        const int is_plain = i < walk->num_plain_steps;
        if (step->position >= walk->num_plain_items) continue;
        PyObject *item = walk->items[step->position];
        if (step->position != noted) {
            /* The pointer to a mention was noted with the item that holds it. */
            if (!(walk->rules[step->position] & MENTION) &&
                !note(walk, places[step->position], sizeof(item))) {
                return 0;
            }
            if (is_plain && !note(walk, &item->ob_type, sizeof(item->ob_type))) return 0;
            noted = step->position;
        }
        if (!is_plain) continue;
        const Py_ssize_t end = i + 1 < walk->num_plain_steps ? step[1].start : walk->num_plain_items;
        if (!note_parts(walk, step, end - step->start)) return 0;
        for (Py_ssize_t part = step->start; part < end; part++) {
            if (walk->rules[part] & MENTION && !note(walk, places[part], sizeof(item))) return 0;
        }
    }
    walk->num_same = walk->num_words;
    PyObject *const *pins = ((PyListObject *)walk->statics)->ob_item;
    for (Py_ssize_t i = 0; i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (position >= walk->num_plain_items || position < loose) continue;
        /* A static in a dict that is watched needs no word, because the dict has to be unchanged. */
        if (places[position] == &walk->items[position] && item_at(places[position]) == pins[i]) {
            continue;
        }
        if (!add_word(walk, places[position], (uintptr_t)pins[i])) return 0;
    }
    walk->epoch = epoch;
    return 1;
}

/* Whether no dict that was watched has changed since the last walk. */
static int are_dicts_unchanged(Walk *walk) {
#if PY_VERSION_HEX >= 0x030C0000
    if (epoch - walk->epoch > NUM_CHANGES) return 0;
    for (uint64_t i = walk->epoch; i < epoch; i++) {
        for (Py_ssize_t k = 0; k < walk->num_watched; k++) {
            if (walk->watched[k] == changed[i % NUM_CHANGES]) return 0;
        }
    }
    walk->epoch = epoch;
#else
    (void)walk; /* the version tags of dicts are among the words */
#endif
    return 1;
}

/* Compares the words that were noted, and reads arrays and statics. Runs no Python code. Returns 1, 0
 * for a change, or -1 if everything has to be read, and then without an error set. */
static int read_noted(Walk *walk, Stream *stream, PyObject *const *arguments) {
    const void *const *places = walk->places;
    PyObject **items = stream->items;
    if (!walk->is_noted || !are_dicts_unchanged(walk)) return -1;
    if (!append_all(stream, arguments, walk->num_arguments)) return 0;
    if (take_steps(stream, 0, walk->num_loose_steps) != 1) return 0;
    const Word *word = first_other(walk->words, walk->words + walk->num_same);
    if (word < walk->words + walk->num_same) return -1;
    /* The words behind the first `num_same` are pointers to statics, which may be other equal ones. */
    const Word *end = walk->words + walk->num_words;
    while ((word = first_other(word, end)) < end) {
        PyObject *item = item_at(word->place);
        if (item == NULL) return 0;
        stream->num_unequal += !is_same_plain(item, (PyObject *)word++->content, 0);
    }
    for (Py_ssize_t i = 0; i < walk->num_of_leaves; i++) {
        const Step *step = &walk->steps[walk->of_leaves[i]];
        stream->length = step->start; /* where `take_step` appends */
        if (take_step(stream, step) != 1) return 0;
    }
    for (Py_ssize_t i = 0; i < walk->leaves.count; i++) {
        const int32_t position = walk->leaves.positions[i];
        if (position >= walk->num_plain_items) continue;
        PyObject *item = items[position] = item_at(places[position]);
        if (item == NULL || (PyObject *)Py_TYPE(item) != walk->types[position]) return 0;
    }
    /* All other items are unchanged, or are used only if Python code runs. */
    const int is_enough = walk->num_plain_steps == walk->num_steps && !stream->num_unequal;
    for (Py_ssize_t i = 0; !is_enough && i < walk->frozen.count; i++) {
        const int32_t position = walk->frozen.positions[i];
        if (position < walk->num_plain_items) items[position] = item_at(places[position]);
    }
    stream->length = walk->num_plain_items;
    return 1;
}

/* Reads all that can be read without Python code. Returns 1, or 0 for a change. */
static int read_all(Walk *walk, Stream *stream, PyObject *const *arguments) {
    walk->is_noted = 0; /* the items of the last walk are overwritten, and the words belong to them */
    stream->length = stream->num_unequal = 0;
    if (!append_all(stream, arguments, walk->num_arguments) || !read_plain(stream)) return 0;
    const uint64_t number = ++walk->num_walks;
    if (number <= NUM_NOTED || number % 16 == 0) walk->is_noted = note_all(walk);
    return 1;
}

/* Takes the steps that run Python code, and fills `found`, if `same` is 1: the plain steps have found
 * no change. Otherwise returns `same`. Turns the garbage collector on before Python code runs, if
 * `collects`. Returns 1, 0 for a change, or -1 with an error set. */
static int conclude(Stream *stream, int same, int collects, Found *found) {
    const Walk *walk = stream->walk;
    const int runs_python = walk->num_plain_steps < walk->num_steps || stream->num_unequal;
    if (same == 1) same = runs_python ? own_items(stream) : pick_found(stream, found);
    if (collects) PyGC_Enable();
    if (same == 1 && runs_python) same = finish(stream, walk->num_plain_steps);
    return same == 1 && runs_python ? pick_found(stream, found) : same;
}

int walk_follow(PyObject *self, PyObject *const *arguments, Py_ssize_t count, Found *found) {
    Walk *walk = (Walk *)self;
    if (walk->items == NULL) walk->items = PyMem_Calloc(walk->size + 1, sizeof(*walk->items));
    if (walk->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Stream stream = {
        .walk = walk,
        .items = walk->items,
        .statics = ((PyListObject *)walk->statics)->ob_item,
    };
    /* Before Python 3.12 the garbage collector may run when a dict or tuple is made, and it may run
     * Python code. */
    const int collects = PyGC_Disable();
    int same = count == walk->num_arguments ? read_noted(walk, &stream, arguments) : 0;
    if (same < 0) same = read_all(walk, &stream, arguments);
    same = conclude(&stream, same, collects, found);
    release_items(&stream);
    if (same == 0) PyErr_Clear();
    return same;
}

/* Walk: a recipe that is ready to be followed */

static PyObject *Walk_follow(PyObject *self, PyObject *arguments) {
    Found found = {0};
    if (!PyTuple_Check(arguments)) {
        PyErr_SetString(PyExc_TypeError, "follow takes a tuple of arguments");
        return NULL;
    }
    int same = walk_follow(self, ((PyTupleObject *)arguments)->ob_item,
                           PyTuple_GET_SIZE(arguments), &found);
    if (same < 0) return NULL;
    if (same == 0) Py_RETURN_NONE;
    PyObject *result = PyTuple_Pack(2, found.leaves, found.objects);
    drop_found(&found);
    return result;
}

/* Whether no object comes twice. */
static int are_distinct(PyObject *objects) {
    /* A hash table with open addressing. The product spreads addresses, which are multiples of a
     * power of two. */
    int bits = 4;
    while (((Py_ssize_t)1 << bits) < 2 * PyTuple_GET_SIZE(objects)) bits++;
    const size_t last = ((size_t)1 << bits) - 1;
    PyObject **table = PyMem_Calloc(last + 1, sizeof(*table));
    int distinct = table != NULL;
    for (Py_ssize_t i = 0; distinct && i < PyTuple_GET_SIZE(objects); i++) {
        PyObject *object = PyTuple_GET_ITEM(objects, i);
        size_t place = (uint64_t)(uintptr_t)object * UINT64_C(0x9E3779B97F4A7C15) >> (64 - bits);
        while (table[place] != NULL && table[place] != object) place = (place + 1) & last;
        distinct = table[place] == NULL;
        table[place] = object;
    }
    PyMem_Free(table);
    return distinct;
}

static PyObject *Walk_match(PyObject *self, PyObject *arguments) {
    Walk *walk = (Walk *)self;
    PyObject *ids = PyBytes_FromStringAndSize(
        (const char *)walk->ids, walk->mentions.count * (Py_ssize_t)sizeof(*walk->ids));
    if (ids == NULL) return NULL;
    PyObject **items = PyMem_Malloc((walk->size + 1) * sizeof(*items)), *result = NULL;
    if (items == NULL) {
        Py_DECREF(ids);
        return PyErr_NoMemory();
    }
    Stream stream = {
        .walk = walk,
        .items = items,
        .statics = ((PyListObject *)walk->statics)->ob_item,
        .found_ids = (uint64_t *)PyBytes_AS_STRING(ids),
    };
    Found found = {0};
    const int collects = PyGC_Disable();
    int same = append_sequence(&stream, arguments, walk->num_arguments);
    /* The collector stays off until the result is made, because the stream may still borrow items. */
    if (same == 1) same = conclude(&stream, read_plain(&stream), 0, &found);
    if (same == 1) same = are_distinct(found.objects);
    if (same == 1) {
        result = Py_BuildValue("(OONON)", found.leaves, found.objects, pick(&stream, walk->frozen),
                               ids, pick(&stream, walk->traces));
    } else if (same == 0) {
        PyErr_Clear();
        result = Py_NewRef(Py_None);
    }
    if (collects) PyGC_Enable();
    drop_found(&found);
    Py_DECREF(ids);
    release_items(&stream);
    PyMem_Free(items);
    return result;
}

/* Whether steps with an opcode open containers, which may be loose steps. */
static int is_container(int32_t opcode) {
    return opcode == DICT || opcode == SEQUENCE || opcode == STATE;
}

/* A field of a recipe, whose bytes are 32-bit integers. The recipe keeps the memory. */
static Positions positions_of(PyObject *bytes) {
    return (Positions){(const int32_t *)PyBytes_AS_STRING(bytes),
                       PyBytes_GET_SIZE(bytes) / (Py_ssize_t)sizeof(int32_t)};
}

/* Makes a walk of a `Recipe`: reads the fields, then counts the loose and the plain steps. */
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
    walk->ids = (const uint64_t *)PyBytes_AS_STRING(fields[RECIPE_ids]);
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
    walk->statics = PySequence_List(fields[RECIPE_statics]);
    if (walk->of_leaves == NULL || walk->statics == NULL) {
        Py_DECREF(walk);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
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
    PyMem_Free(walk->items);
    PyMem_Free(walk->words);
    PyMem_Free(walk->places);
    PyMem_Free(walk->watched);
    Py_XDECREF(walk->statics);
    Py_XDECREF(walk->recipe);
    Py_TYPE(self)->tp_free(self);
}

static int Walk_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Walk *)self)->recipe);
    Py_VISIT(((Walk *)self)->statics);
    return 0;
}

static PyMethodDef Walk_methods[] = {
    {"follow", Walk_follow, METH_O,
     "The arrays and objects of the graph, from the arguments of a call; None if it may have changed."},
    {"match", Walk_match, METH_O,
     "The same for another graph of the same structure, with its statics, ids and traces."},
    {NULL},
};

static PyMemberDef Walk_members[] = {
    {"recipe", T_OBJECT, offsetof(Walk, recipe), READONLY, "The recipe."},
    {NULL},
};

PyTypeObject WalkType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "nnx_sharding.core.guard._native.Walk",
    .tp_doc = "A recipe, ready to be followed.",
    .tp_basicsize = sizeof(Walk),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Walk_new,
    .tp_dealloc = Walk_dealloc,
    .tp_traverse = Walk_traverse,
    .tp_methods = Walk_methods,
    .tp_members = Walk_members,
};

void walk_watch_dicts(void) {
#if PY_VERSION_HEX >= 0x030C0000
    if (watcher < 0) watcher = PyDict_AddWatcher(on_change);
    if (watcher < 0) PyErr_Clear(); /* no watcher is left, so every walk reads everything */
#endif
}
