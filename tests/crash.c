/* Kills or stops the process at the n-th call that changes a file or a folder below a path.

   Loaded with LD_PRELOAD; tests/test_crashes.py arms it. Counts are of the whole process, with its
   threads, so that each n is another moment of what is written. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static atomic_long calls, target;
static int signal_number;

void crash_arm(const char *path, long n, int number) {
    strncpy(below, path, sizeof below - 1);
    atomic_store(&calls, 0);
    atomic_store(&target, n);
    signal_number = number;
}

long crash_count(void) { return atomic_load(&calls); }

static void count(const char *path) {
    if (!below[0] || !path || strncmp(path, below, strlen(below))) return;
    if (atomic_fetch_add(&calls, 1) + 1 == atomic_load(&target)) kill(getpid(), signal_number);
}

static void count_at(int folder, const char *path) {
    char link[64], full[PATH_MAX * 2];
    if (!below[0] || !path) return;
    if (path[0] == '/' || folder == AT_FDCWD) { count(path); return; }
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, full, PATH_MAX);
    if (length < 0) return;
    snprintf(full + length, sizeof full - length, "/%s", path);
    count(full);
}

static void count_file(int file) {
    char link[64], full[PATH_MAX];
    if (!below[0]) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, full, sizeof full - 1);
    if (length < 0) return;
    full[length] = 0;
    count(full);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(type, name, parameters, arguments, counted) \
    type name parameters {                               \
        counted;                                         \
        return REAL(name) arguments;                     \
    }

WRAP(int, rename, (const char *a, const char *b), (a, b), count(b))
WRAP(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), count_at(e, b))
WRAP(int, renameat2, (int d, const char *a, int e, const char *b, unsigned f), (d, a, e, b, f),
     count_at(e, b))
WRAP(int, link, (const char *a, const char *b), (a, b), count(b))
WRAP(int, linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f),
     count_at(e, b))
WRAP(int, symlink, (const char *a, const char *b), (a, b), count(b))
WRAP(int, unlink, (const char *a), (a), count(a))
WRAP(int, unlinkat, (int d, const char *a, int f), (d, a, f), count_at(d, a))
WRAP(int, rmdir, (const char *a), (a), count(a))
WRAP(int, mkdir, (const char *a, mode_t m), (a, m), count(a))
WRAP(int, mkdirat, (int d, const char *a, mode_t m), (d, a, m), count_at(d, a))
WRAP(int, chmod, (const char *a, mode_t m), (a, m), count(a))
WRAP(int, fchmod, (int f, mode_t m), (f, m), count_file(f))
WRAP(int, fchmodat, (int d, const char *a, mode_t m, int f), (d, a, m, f), count_at(d, a))
WRAP(int, truncate, (const char *a, off_t n), (a, n), count(a))
WRAP(int, ftruncate, (int f, off_t n), (f, n), count_file(f))
WRAP(int, ftruncate64, (int f, off64_t n), (f, n), count_file(f))
WRAP(int, fsync, (int f), (f), count_file(f))
WRAP(int, fdatasync, (int f), (f), count_file(f))
WRAP(ssize_t, write, (int f, const void *p, size_t n), (f, p, n), count_file(f))
WRAP(ssize_t, pwrite, (int f, const void *p, size_t n, off_t o), (f, p, n, o), count_file(f))
WRAP(ssize_t, pwrite64, (int f, const void *p, size_t n, off64_t o), (f, p, n, o), count_file(f))
WRAP(ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), count_file(f))
WRAP(ssize_t, pwritev, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o),
     count_file(f))
WRAP(ssize_t, sendfile, (int f, int g, off_t *o, size_t n), (f, g, o, n), count_file(f))
WRAP(ssize_t, copy_file_range, (int g, off64_t *p, int f, off64_t *o, size_t n, unsigned x),
     (g, p, f, o, n, x), count_file(f))

#define WRITES(flags) ((flags) & (O_CREAT | O_TRUNC))
#define MODE(flags)                        \
    mode_t mode = 0;                       \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more;                      \
        va_start(more, flags);             \
        mode = va_arg(more, mode_t);       \
        va_end(more);                      \
    }
#define WRAP_OPEN(name)                              \
    int name(const char *path, int flags, ...) {     \
        MODE(flags)                                  \
        if (WRITES(flags)) count(path);              \
        return REAL(name)(path, flags, mode);        \
    }
#define WRAP_OPENAT(name)                                    \
    int name(int folder, const char *path, int flags, ...) { \
        MODE(flags)                                          \
        if (WRITES(flags)) count_at(folder, path);           \
        return REAL(name)(folder, path, flags, mode);        \
    }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)
