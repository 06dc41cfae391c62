/* Loaded before the C library: a disk below one directory that fails, or that forgets at a power cut.

`struct control` is a file that all processes map. FAIL lets calls on files below `prefix` fail, each with a chance, or
the nth of them alone. SHADOW copies to `shadow` what a power cut would leave: the content of a file at its last fsync as
`f-<inode>`, and the names in a directory at its last fsync as `d-<inode>`. Nothing is synchronised in earnest then. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, TRUNCATE, KINDS };
enum { FAIL = 1, SHADOW = 2 };

struct control {
    volatile uint32_t mode;
    volatile int32_t error;
    volatile uint32_t per_million; /* chance of each call */
    volatile uint32_t unused;
    volatile uint64_t nth; /* the only call that fails, from 1; 0: by chance */
    uint64_t number;       /* of the calls so far */
    uint64_t seen[KINDS];
    uint64_t failed[KINDS];
    char prefix[1024];
    char shadow[1024];
};

static struct control *control;
static unsigned char ours[1 << 16]; /* by descriptor */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DISK_CONTROL");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int below(const char *path) {
    if (!control || !control->prefix[0] || !path) return 0;
    size_t length = strlen(control->prefix);
    return strncmp(path, control->prefix, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_ours(int file) { return file >= 0 && file < (int)sizeof(ours) && ours[file]; }

static int below_at(int directory, const char *path) {
    return path && (path[0] == '/' ? below(path) : is_ours(directory));
}

static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/* Return whether this call fails, with errno set. */
static int fails(int kind) {
    if (!(control->mode & FAIL)) return 0;
    uint64_t number = __atomic_add_fetch(&control->number, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&control->seen[kind], 1, __ATOMIC_SEQ_CST);
    int now = control->nth ? number == control->nth : mixed(number) % 1000000 < control->per_million;
    if (now) {
        __atomic_add_fetch(&control->failed[kind], 1, __ATOMIC_SEQ_CST);
        errno = control->error;
    }
    return now;
}

static int shadowed(void) { return control && (control->mode & SHADOW); }

static void name_of(char *name, char what, ino_t inode, const char *suffix) {
    snprintf(name, 1200, "%s/%c-%lu%s", control->shadow, what, (unsigned long)inode, suffix);
}

static void forget(char what, ino_t inode) {
    char name[1200];
    name_of(name, what, inode, "");
    syscall(SYS_unlink, name);
}

static int copy_file(int from, int to, off_t size) {
    off_t done = 0;
    while (done < size)
        if (sendfile(to, from, &done, (size_t)(size - done)) <= 0) return -1;
    return 0;
}

static void list_directory(int from, int to) {
    int again = (int)syscall(SYS_openat, from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *directory = again < 0 ? NULL : fdopendir(again);
    if (!directory) return;
    for (struct dirent *each; (each = readdir(directory));) {
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, "..")) continue;
        if (each->d_type != DT_DIR && each->d_type != DT_REG) continue;
        char line[600];
        int length = snprintf(line, sizeof line, "%c %lu %s\n", each->d_type == DT_DIR ? 'd' : 'f',
                              (unsigned long)each->d_ino, each->d_name);
        if (syscall(SYS_write, to, line, (size_t)length) < 0) break;
    }
    closedir(directory);
}

/* Keep what an fsync of this descriptor makes durable. One process at a time, so that no older copy comes last. */
static void keep(int file) {
    struct stat found;
    if (fstat(file, &found)) return;
    char what = S_ISDIR(found.st_mode) ? 'd' : 'f', name[1200], fresh[1200], lock[1200], path[64];
    name_of(name, what, found.st_ino, "");
    name_of(fresh, what, found.st_ino, ".new");
    name_of(lock, what, found.st_ino, ".lock");
    int locked = (int)syscall(SYS_openat, AT_FDCWD, lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    flock(locked, LOCK_EX);
    int to = (int)syscall(SYS_openat, AT_FDCWD, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int good = 1;
    if (what == 'd') {
        list_directory(file, to);
    } else {
        snprintf(path, sizeof path, "/proc/self/fd/%d", file); /* the descriptor may be for writing alone */
        int from = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
        good = from >= 0 && !fstat(from, &found) && !copy_file(from, to, found.st_size);
        if (from >= 0) syscall(SYS_close, from);
    }
    syscall(SYS_close, to);
    if (good) syscall(SYS_renameat2, AT_FDCWD, fresh, AT_FDCWD, name, 0);
    syscall(SYS_close, locked);
}

static void opened(int file, int is_new) {
    struct stat found;
    if (file < 0 || file >= (int)sizeof(ours)) return;
    ours[file] = 1;
    if (is_new && shadowed() && !fstat(file, &found)) forget('f', found.st_ino); /* of another file that was deleted */
}

static int is_missing(int directory, const char *path) {
    struct stat found;
    return shadowed() && fstatat(directory, path, &found, AT_SYMLINK_NOFOLLOW) && errno == ENOENT;
}

static int open_at(int directory, const char *path, int flags, mode_t mode) {
    if (!control || !below_at(directory, path)) return (int)syscall(SYS_openat, directory, path, flags, mode);
    if ((control->error != ENOSPC || flags & O_CREAT) && fails(OPEN)) return -1;
    int is_new = flags & O_CREAT && is_missing(directory, path);
    int file = (int)syscall(SYS_openat, directory, path, flags, mode);
    int error = errno;
    opened(file, is_new);
    errno = error;
    return file;
}

#define MODE(flags)                              \
    mode_t mode = 0;                             \
    if ((flags) & (O_CREAT | O_TMPFILE)) {       \
        va_list rest;                            \
        va_start(rest, flags);                   \
        mode = (mode_t)va_arg(rest, unsigned);   \
        va_end(rest);                            \
    }

int open(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) return open_at(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) return open_at(at, path, flags, mode); }

int close(int file) {
    if (file >= 0 && file < (int)sizeof(ours)) ours[file] = 0;
    return REAL(close)(file);
}

ssize_t write(int file, const void *data, size_t size) {
    return is_ours(file) && fails(WRITE) ? -1 : REAL(write)(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return is_ours(file) && fails(WRITE) ? -1 : REAL(pwrite)(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return is_ours(file) && fails(WRITE) ? -1 : REAL(pwrite64)(file, data, size, at);
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    return is_ours(file) && fails(WRITE) ? -1 : REAL(writev)(file, parts, number);
}
int ftruncate(int file, off_t size) { return is_ours(file) && fails(TRUNCATE) ? -1 : REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { return is_ours(file) && fails(TRUNCATE) ? -1 : REAL(ftruncate64)(file, size); }

static int synchronise(int file) {
    if (fails(SYNC)) return -1;
    if (!shadowed()) return 1; /* in earnest */
    keep(file);
    return 0;
}
int fsync(int file) {
    int done = is_ours(file) ? synchronise(file) : 1;
    return done == 1 ? REAL(fsync)(file) : done;
}
int fdatasync(int file) {
    int done = is_ours(file) ? synchronise(file) : 1;
    return done == 1 ? REAL(fdatasync)(file) : done;
}

int rename(const char *from, const char *to) { return below(to) && fails(RENAME) ? -1 : REAL(rename)(from, to); }
int renameat(int from_at, const char *from, int to_at, const char *to) {
    return below_at(to_at, to) && fails(RENAME) ? -1 : REAL(renameat)(from_at, from, to_at, to);
}
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return below_at(to_at, to) && fails(RENAME) ? -1 : (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
}
int link(const char *from, const char *to) { return below(to) && fails(LINK) ? -1 : REAL(link)(from, to); }
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    return below_at(to_at, to) && fails(LINK) ? -1 : REAL(linkat)(from_at, from, to_at, to, flags);
}
int unlink(const char *path) { return below(path) && fails(UNLINK) ? -1 : REAL(unlink)(path); }
int unlinkat(int at, const char *path, int flags) {
    return below_at(at, path) && fails(UNLINK) ? -1 : REAL(unlinkat)(at, path, flags);
}

static int made(int at, const char *path, int answer) {
    struct stat found;
    int error = errno;
    if (!answer && shadowed() && !fstatat(at, path, &found, 0)) forget('d', found.st_ino);
    errno = error;
    return answer;
}
int mkdir(const char *path, mode_t mode) {
    if (!below(path)) return REAL(mkdir)(path, mode);
    return fails(MKDIR) ? -1 : made(AT_FDCWD, path, REAL(mkdir)(path, mode));
}
int mkdirat(int at, const char *path, mode_t mode) {
    if (!below_at(at, path)) return REAL(mkdirat)(at, path, mode);
    return fails(MKDIR) ? -1 : made(at, path, REAL(mkdirat)(at, path, mode));
}
