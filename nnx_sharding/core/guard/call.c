/* The call: from the arguments of a jitted function to its result, without Python code.
 *
 * `call` is the `__call__` of what `jit` returns. It does what `_flattened` in lifted.py and `run` in
 * call.py do in the usual case: a guard holds, no array has to be placed, and only arrays of
 * Variables change. It takes three steps:
 *
 *     find_guard   walks by each of the last guards until one holds (walk.c)
 *     execute      runs the program of the guard's plan, which is a function of JAX in C
 *     finish_call  stores the new arrays in the Variables, and returns the outputs
 *
 * If no guard holds, `call` leaves the whole call to the Python method `_flattened`. If more than
 * arrays of Variables changed, it leaves the write-back to `_complete` in direct.py.
 *
 * No Python code runs between the program and the write-back, so no signal handler can run there. A
 * handler that raises an error would lose the arrays that replace donated ones. For the same reason
 * all values are made before the first is stored, and old arrays are released after the last.
 */

#include "native.h"

/* The fields of two tuples: the attribute `_direct`, which lifted.py makes, and the update of an
 * outcome, which call.py makes. */
#define DIRECT(X) X(guards) X(bound) X(fun) X(observer)
#define UPDATE(X) X(written) X(returned) X(unflatten)
#define AS_DIRECT(name) DIRECT_##name,
#define AS_UPDATE(name) UPDATE_##name,
enum { DIRECT(AS_DIRECT) NUM_DIRECT };
enum { UPDATE(AS_UPDATE) NUM_UPDATE };

#define MAX_ARGUMENTS 32 /* arguments of a bound method; Python makes calls with more */

struct native native;

/* Whether a call has the keyword arguments of a guard, in their order. */
static int has_names(PyObject *names, PyObject *kwnames) {
    const Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (PyTuple_GET_SIZE(names) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_GET_ITEM(names, i) != PyTuple_GET_ITEM(kwnames, i)) return 0;
    }
    return 1;
}

/* Whether the mesh in context is the one that the guard was made for, if the plan depends on it.
 * Returns 1, 0, or -1 with an error set. */
static int has_context(PyObject *guard) {
    PyObject *context_of = PyTuple_GET_ITEM(guard, GUARD_context_of);
    if (context_of == Py_None) return 1;
    PyObject *context = PyObject_CallNoArgs(context_of);
    if (context == NULL) return -1;
    int same = PyObject_RichCompareBool(context, PyTuple_GET_ITEM(guard, GUARD_context), Py_EQ);
    Py_DECREF(context);
    return same;
}

/* Whether an attribute of an array, named by an index in NAMES, equals `goal`: 1, 0, or -1 with an
 * error set. */
static int has_attribute(PyObject *leaf, int name, PyObject *goal) {
    PyObject *value = attribute(leaf, name);
    if (value == NULL) return -1;
    int same = value == goal ? 1 : PyObject_RichCompareBool(value, goal, Py_EQ);
    Py_DECREF(value);
    return same;
}

/* Whether all arrays have the shapes and shardings of a plan; -1 with an error set. A weak reference
 * in `known` is to an array that was found to fit, so the same array is not looked at again. If
 * another array comes, calls replace the array, so Python's False takes the place of the reference. */
static int are_as_planned(PyObject *guard, const Found *found) {
    PyObject *slots = PyTuple_GET_ITEM(guard, GUARD_slots);
    PyObject *shardings = PyTuple_GET_ITEM(guard, GUARD_shardings);
    PyObject *avals = PyTuple_GET_ITEM(guard, GUARD_avals);
    PyObject *all_known = PyTuple_GET_ITEM(guard, GUARD_known);
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

/* Clears an error, which means that the graph has changed, as in `check` of guard.py. Returns 1, and
 * leaves the error set, if it is no Exception: a KeyboardInterrupt, say, ends the call. */
static int is_interrupted(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 1;
    PyErr_Clear();
    return 0;
}

/* The first guard of a function that holds for some arguments, as a new reference; NULL if none
 * holds, perhaps with an error set. The guard is swapped to the front of the list, so the next call
 * tries it first. */
static PyObject *find_guard(PyObject *guards, PyObject *const *arguments, Py_ssize_t count,
                            PyObject *kwnames, Found *found) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(guards); i++) {
        PyObject *guard = Py_NewRef(PyList_GET_ITEM(guards, i));
        PyObject *walk = PyTuple_GET_ITEM(guard, GUARD_walk);
        if (Py_IS_TYPE(walk, &WalkType) && /* only `walk_follow` follows a walk in C */
            has_names(PyTuple_GET_ITEM(guard, GUARD_names), kwnames) &&
            walk_follow(walk, arguments, count, found) == 1) {
            int holds = has_context(guard);
            if (holds == 1) holds = are_as_planned(guard, found);
            /* If a program deletes arrays, it must run no Python code, so it has to be marked. */
            if (holds == 1 && PyTuple_GET_ITEM(guard, GUARD_donates) == Py_True) {
                holds = PyObject_HasAttr(PyTuple_GET_ITEM(guard, GUARD_execute),
                                         native.hooks[HOOK_direct_mark]);
            }
            if (holds == 1) {
                /* The list may be shorter now, because Python code may have run. */
                if (i > 0 && i < PyList_GET_SIZE(guards)) {
                    PyObject *moved = PyList_GET_ITEM(guards, i);
                    PyList_SET_ITEM(guards, i, PyList_GET_ITEM(guards, 0));
                    PyList_SET_ITEM(guards, 0, moved);
                }
                return guard;
            }
            drop_found(found);
        }
        Py_DECREF(guard);
        if (is_interrupted()) return NULL;
    }
    return NULL;
}

/* Runs a program, and returns its outputs; NULL with an error set. While it runs, the fields of
 * CALLER (call_context.py) name this call, because the program may be traced again. */
static PyObject *execute(PyObject *direct, PyObject *guard, const Found *found) {
    PyObject *fun = PyTuple_GET_ITEM(direct, DIRECT_fun), *outputs = NULL;
    PyObject *plan = fun == Py_None ? Py_None : PyTuple_GET_ITEM(guard, GUARD_plan);
    /* The fields of a `Caller`: fun, objects, observer, nested, plan, leaves. */
    PyObject *caller = PyTuple_Pack(6, fun, found->objects,
                                    PyTuple_GET_ITEM(direct, DIRECT_observer), Py_False, plan,
                                    found->leaves);
    PyObject *outer = caller ? attribute(native.hooks[HOOK_caller], NAME_fields) : NULL;
    if (outer == NULL ||
        PyObject_SetAttr(native.hooks[HOOK_caller], native.names[NAME_fields], caller) < 0) {
        Py_XDECREF(outer);
        Py_XDECREF(caller);
        return NULL;
    }
    Py_DECREF(caller);
    outputs = PyObject_Vectorcall(PyTuple_GET_ITEM(guard, GUARD_execute),
                                  ((PyTupleObject *)found->leaves)->ob_item,
                                  PyTuple_GET_SIZE(found->leaves), NULL);
    /* An error of the program is put aside, because setting an attribute must not meet one. */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyObject_SetAttr(native.hooks[HOOK_caller], native.names[NAME_fields], outer) < 0) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    Py_DECREF(outer);
    return outputs;
}

/* The array at a position of an output group, borrowed; NULL if there is none. If the group is -1,
 * the position is the slot of an argument. */
static PyObject *array_at(PyObject *outputs, const Found *found, int32_t group, int32_t position) {
    PyObject *arrays = found->leaves;
    if (group >= 0) {
        if (group >= PyTuple_GET_SIZE(outputs) - 1) return NULL;
        /* An `OutputGroup` is an exception whose arguments are names and arrays. */
        PyObject *output_group = PyTuple_GET_ITEM(outputs, group);
        if (!PyExceptionInstance_Check(output_group)) return NULL;
        PyObject *args = ((PyBaseExceptionObject *)output_group)->args;
        if (PyTuple_GET_SIZE(args) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(args, 1))) return NULL;
        arrays = PyTuple_GET_ITEM(args, 1);
    }
    if (position < 0 || position >= PyTuple_GET_SIZE(arrays)) return NULL;
    return PyTuple_GET_ITEM(arrays, position);
}

/* The place in memory where a Variable has its value; NULL for any other object. */
static PyObject **value_in(PyObject *variable) {
    enum opcode slot = VALUE;
    if (Py_IS_TYPE(variable, native.owners[LEAVES])) {
        slot = LEAVES;
    } else if (!PyType_IsSubtype(Py_TYPE(variable), native.owners[VALUE])) {
        return NULL;
    }
    return (PyObject **)((char *)variable + native.offsets[slot]);
}

/* Sets the values of all Variables that an update names, and returns 1. Sets none, and returns 0, if
 * one of them is not as expected. `written` has three numbers for each: the index of the Variable,
 * then the group and the position of its new array. */
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
        const int is_hijax = Py_IS_TYPE(variable, native.owners[LEAVES]);
        values[made] = is_hijax ? PyTuple_Pack(1, array) : Py_NewRef(array);
        if (values[made] == NULL) break;
    }
    const int is_complete = values != NULL && made == count;
    for (Py_ssize_t i = 0; is_complete && i < count; i++) {
        PyObject **slot = value_in(PyTuple_GET_ITEM(found->objects, sources[i][0])), *old = *slot;
        *slot = values[i];
        values[i] = old;
    }
    /* Old arrays are released last, because the end of an array may run Python code. */
    for (Py_ssize_t i = 0; i < made; i++) Py_XDECREF(values[i]);
    PyMem_Free(values);
    PyErr_Clear(); /* an error is set if there was no memory for a tuple */
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

/* Waits for every 16th program on virtual devices, as `wait_for_some` in in_flight.py does; here the
 * programs of all threads are counted together. If that program runs on one device, the next one is
 * looked at instead. Returns 0, or -1 with an error set. */
static int wait_if_many(PyObject *outputs, const Found *found) {
    static int is_bounded = -1;
    static long in_flight;
    if (is_bounded < 0) {
        PyObject *answer = PyObject_CallNoArgs(native.hooks[HOOK_is_bounded]);
        if (answer == NULL) return -1;
        is_bounded = answer == Py_True;
        Py_DECREF(answer);
    }
    if (!is_bounded || ++in_flight < PyLong_AsLong(native.hooks[HOOK_limit])) return 0;
    PyObject *array = array_at(outputs, found, 0, 0);
    PyObject *sharding = array == NULL ? NULL : attribute(array, NAME_sharding);
    PyObject *devices = sharding == NULL ? NULL : attribute(sharding, NAME_num_devices);
    const int is_one = devices != NULL && PyLong_AsLong(devices) == 1;
    Py_XDECREF(sharding);
    Py_XDECREF(devices);
    PyErr_Clear();
    if (is_one) return 0;
    PyObject *groups = PyTuple_GetSlice(outputs, 0, PyTuple_GET_SIZE(outputs) - 1);
    PyObject *answer = groups ? PyObject_CallOneArg(native.hooks[HOOK_wait], groups) : NULL;
    if (answer == Py_True) in_flight = 0;
    Py_XDECREF(groups);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Writes the outputs of a program back, and returns what the call returns; NULL with an error set. */
static PyObject *finish_call(PyObject *guard, PyObject *outputs, const Found *found) {
    PyObject *plan = PyTuple_GET_ITEM(guard, GUARD_plan);
    PyObject *run = PyTuple_GET_ITEM(guard, GUARD_execute), *update = NULL, *result = NULL;
    if (PyTuple_Check(outputs) && PyTuple_GET_SIZE(outputs) > 0) {
        PyObject *outcome = PyTuple_GET_ITEM(outputs, PyTuple_GET_SIZE(outputs) - 1);
        update = attribute(outcome, NAME_update);
        if (update == NULL) PyErr_Clear();
    }
    if (update != NULL && PyTuple_Check(update) &&
        PyTuple_GET_ITEM(update, UPDATE_returned) != Py_None &&
        write_back(PyTuple_GET_ITEM(update, UPDATE_written), outputs, found)) {
        result = output_of(update, outputs, found);
        /* Signals are deferred, so JAX has compiled in this call: Python delivers them now. */
        if (result != NULL && PyDict_GET_SIZE(native.hooks[HOOK_held]) > 0) {
            PyObject *settled = PyObject_CallFunctionObjArgs(native.hooks[HOOK_settle], run, outputs, NULL);
            if (settled == NULL) Py_CLEAR(result);
            Py_XDECREF(settled);
        }
    } else {
        result = PyObject_CallFunctionObjArgs(native.hooks[HOOK_complete], plan, run, found->objects,
                                              found->leaves, outputs, NULL);
    }
    Py_XDECREF(update);
    if (result != NULL && wait_if_many(outputs, found) < 0) Py_CLEAR(result);
    return result;
}

/* Lets Python explain the error that is set: `_failed` may raise another one, which is set then. */
static void explain(PyObject *self, PyObject *guard, const Found *found) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) PyException_SetTraceback(value, traceback);
    PyObject *answer = PyObject_CallMethodObjArgs(self, native.names[NAME__failed],
                                                  PyTuple_GET_ITEM(guard, GUARD_plan),
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

/* A method of an object whose attribute `_direct` has its guards. Returns what the user's function
 * returns, or NULL with an error set. `guard` stays NULL if none holds, and `_flattened` then takes
 * the call, unless looking for a guard was interrupted. */
static PyObject *call(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    PyObject *direct = attribute(self, NAME__direct), *guard = NULL, *result = NULL;
    if (direct == NULL) return NULL;
    PyObject *guards = PyTuple_GET_ITEM(direct, DIRECT_guards);
    if (PyList_GET_SIZE(guards) > 0) {
        PyObject *bound = PyTuple_GET_ITEM(direct, DIRECT_bound);
        /* The arguments that are bound to the function come before those of the call. */
        const Py_ssize_t num_bound = PyTuple_GET_SIZE(bound);
        Py_ssize_t num_passed = count + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
        PyObject *buffer[MAX_ARGUMENTS], *const *arguments = args;
        if (num_bound > 0 && num_bound + num_passed <= MAX_ARGUMENTS) {
            for (Py_ssize_t i = 0; i < num_bound; i++) buffer[i] = PyTuple_GET_ITEM(bound, i);
            for (Py_ssize_t i = 0; i < num_passed; i++) buffer[num_bound + i] = args[i];
            arguments = buffer;
        }
        Found found = {0};
        PyObject *ready = PyObject_CallNoArgs(native.hooks[HOOK_is_ready]);
        Py_XDECREF(ready);
        if (ready == Py_True && (num_bound == 0 || arguments == buffer)) {
            guard = find_guard(guards, arguments, num_bound + num_passed, kwnames, &found);
        }
        if (guard != NULL) {
            PyObject *outputs = execute(direct, guard, &found);
            if (outputs == NULL) {
                explain(self, guard, &found);
            } else {
                result = finish_call(guard, outputs, &found);
                Py_DECREF(outputs);
            }
            drop_found(&found);
            Py_DECREF(guard);
        }
    }
    Py_DECREF(direct);
    if (guard != NULL || is_interrupted()) return result;
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

/* Stores one hook or slot by its name. Returns 0, or -1 with an error set. */
static int take(PyObject *name, PyObject *value) {
    static const char *const names[] = {HOOKS(AS_STRING)}, *const opcodes[] = {OPCODES(AS_STRING)};
    for (int i = 0; i < NUM_HOOKS; i++) {
        if (PyUnicode_CompareWithASCIIString(name, names[i]) != 0) continue;
        Py_XSETREF(native.hooks[i], Py_NewRef(value));
        return 0;
    }
    for (int i = METADATA; i <= LEAVES; i++) {
        PyMemberDescrObject *slot = (PyMemberDescrObject *)value;
        if (PyUnicode_CompareWithASCIIString(name, opcodes[i]) != 0) continue;
        if (!Py_IS_TYPE(value, &PyMemberDescr_Type) || slot->d_member->type != T_OBJECT_EX) break;
        native.offsets[i] = slot->d_member->offset;
        Py_XSETREF(native.owners[i], (PyTypeObject *)Py_NewRef(PyDescr_TYPE(slot)));
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%U: %R is not the descriptor of a slot", name, value);
    return -1;
}

/* Stores the hooks and slots that Python passes by name. The files native.py and direct.py both call
 * this, each with some of them. */
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

/* Adds `call`, `Walk` and `FIELDS` to the new module. Returns 0, or -1 with an error set. */
static int fill_module(PyObject *module) {
    static const char *const names[] = {NAMES(AS_STRING)};
    walk_watch_dicts();
    for (int i = 0; i < NUM_NAMES; i++) {
        if ((native.names[i] = PyUnicode_InternFromString(names[i])) == NULL) return -1;
    }
    PyObject *method = PyDescr_NewMethod(&PyBaseObject_Type, &call_method);
    if (method == NULL || PyModule_AddObject(module, "call", method) < 0) return -1;
    if (PyModule_AddType(module, &WalkType) < 0) return -1;
    return PyModule_AddStringConstant(
        module, "FIELDS",
        "Opcode" OPCODES(AS_TEXT) " Step" STEP(AS_TEXT) " Recipe" RECIPE(AS_TEXT) " Guard" GUARD(AS_TEXT));
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
    .m_doc = "The walk of walk.py and the calls of guarded functions, many times as fast.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
