/* Faults under libaio, for tests: preloaded (LD_PRELOAD), it stands between whoever calls io_submit, io_getevents, io_pgetevents, open and
 * openat and the kernel, so under our aio binding and under DeepSpeed's alike. Nothing fails until `failing_aio_arm` is called.
 *
 * A failing block really moves its first sector only; then its completion says what was asked for: an errno, or fewer bytes
 * than there were. A failing open is one with O_DIRECT.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SECTOR 512
#define MAX_MARKED 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char in_name[256];         /* part of the path of the files that fail; empty: not armed */
static int kind, number, after, left, seen, hits;

static struct { struct iocb* control; unsigned long num_bytes; int number; } marked[MAX_MARKED];

enum { READ = 0, WRITE = 1, OPEN_READ = 2, OPEN_WRITE = 3 };

/* The operations `kind_` on files whose path has `name` in it fail: none of the first `after_`, then `count` of them (-1: all).
 * `number_`: an errno, or 0 for a transfer that moves only a part. */
void failing_aio_arm(const char* name, int kind_, int number_, int after_, int count)
{
    pthread_mutex_lock(&lock);
    snprintf(in_name, sizeof(in_name), "%s", name);
    kind = kind_, number = number_, after = after_, left = count;
    if (name[0] != 0) { seen = hits = 0; }
    pthread_mutex_unlock(&lock);
}

int failing_aio_hits(void) { return hits; }
int failing_aio_seen(void) { return seen; }

static int is_due(const char* path, int kind_)
{
    if (in_name[0] == 0 || kind != kind_ || strstr(path, in_name) == NULL) { return 0; }
    ++seen;
    if (left == 0) { return 0; }
    if (after > 0) { return after--, 0; }
    if (left > 0) { --left; }
    return ++hits;
}

static void mark(struct iocb* control)
{
    const int write = control->aio_lio_opcode == IO_CMD_PWRITE;
    char link[64], path[4096];
    if ((!write && control->aio_lio_opcode != IO_CMD_PREAD) || in_name[0] == 0) { return; }
    for (int i = 0; i < MAX_MARKED; ++i) {
        if (marked[i].control == control) { return; } /* submitted once more */
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", control->aio_fildes);
    const ssize_t length = readlink(link, path, sizeof(path) - 1);
    path[length > 0 ? length : 0] = 0;
    if (control->u.c.nbytes < 2 * SECTOR || !is_due(path, write ? WRITE : READ)) { return; }
    for (int i = 0; i < MAX_MARKED; ++i) {
        if (marked[i].control == NULL) {
            marked[i].control = control;
            marked[i].num_bytes = control->u.c.nbytes;
            marked[i].number = number;
            control->u.c.nbytes = SECTOR;
            return;
        }
    }
}

int io_submit(io_context_t context, long count, struct iocb** controls)
{
    pthread_mutex_lock(&lock);
    for (long i = 0; i < count; ++i) { mark(controls[i]); }
    pthread_mutex_unlock(&lock);
    const long taken = syscall(SYS_io_submit, context, count, controls);
    return taken < 0 ? -errno : (int)taken;
}

static int settle(struct io_event* events, long count)
{
    pthread_mutex_lock(&lock);
    for (long e = 0; e < count; ++e) {
        for (int i = 0; i < MAX_MARKED; ++i) {
            if (marked[i].control != NULL && marked[i].control == events[e].obj) {
                marked[i].control->u.c.nbytes = marked[i].num_bytes;
                if (marked[i].number != 0) { events[e].res = -(long)marked[i].number; }
                marked[i].control = NULL;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return count < 0 ? -errno : (int)count;
}

int io_getevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* limit)
{
    return settle(events, syscall(SYS_io_getevents, context, least, most, events, limit));
}

/* DeepSpeed's binding calls this one, without a mask. */
int io_pgetevents(
    io_context_t context, long least, long most, struct io_event* events, struct timespec* limit, sigset_t* mask)
{
    if (mask != NULL) { return -EINVAL; }
    return settle(events, syscall(SYS_io_pgetevents, context, least, most, events, limit, NULL));
}

/* The name that a file has by now, whether it is asked for in a folder or through proc. */
static void name_of(int folder, const char* path, char* name, size_t room)
{
    char link[64], found[4096];
    const int through_proc = strncmp(path, "/proc/self/fd/", 14) == 0;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", folder);
    const ssize_t length = readlink(through_proc ? path : link, found, sizeof(found) - 1);
    found[length > 0 ? length : 0] = 0;
    if (through_proc) {
        snprintf(name, room, "%s", found);
    } else if (folder != AT_FDCWD && path[0] != '/') {
        snprintf(name, room, "%s/%s", found, path);
    } else {
        snprintf(name, room, "%s", path);
    }
}

/* Whether this opening is to fail, with errno set. */
static int is_failing(int folder, const char* path, int flags)
{
    char name[8192];
    if (!(flags & O_DIRECT)) { return 0; }
    name_of(folder, path, name, sizeof(name));
    pthread_mutex_lock(&lock);
    const int due = is_due(name, (flags & O_ACCMODE) == O_RDONLY ? OPEN_READ : OPEN_WRITE);
    const int failure = number;
    pthread_mutex_unlock(&lock);
    if (due) { errno = failure; }
    return due;
}

#define MODE(flags)                                                      \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0; \
    va_end(rest)

#define OPEN(name)                                                                             \
    int name(const char* path, int flags, ...)                                                 \
    {                                                                                          \
        MODE(flags);                                                                           \
        if (is_failing(AT_FDCWD, path, flags)) { return -1; }                                  \
        int (*real)(const char*, int, ...) = (int (*)(const char*, int, ...))dlsym(RTLD_NEXT, #name); \
        return real(path, flags, mode);                                                        \
    }

#define OPENAT(name)                                                                           \
    int name(int folder, const char* path, int flags, ...)                                     \
    {                                                                                          \
        MODE(flags);                                                                           \
        if (is_failing(folder, path, flags)) { return -1; }                                    \
        int (*real)(int, const char*, int, ...) = (int (*)(int, const char*, int, ...))dlsym(RTLD_NEXT, #name); \
        return real(folder, path, flags, mode);                                                \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
