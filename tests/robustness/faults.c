/* Fails or kills a process at its n-th operation on the files below a directory; loaded with LD_PRELOAD.

   Every call of libc that changes a file system counts, whoever makes it: Python, Arrow, DuckDB, torch, Rust. With
   action 1 the process is killed before the n-th one, of a write after half of its bytes; with action 2 the n-th one and
   all later ones that need room (open for writing, write, mkdir) fail with `fault_errno`; with action 3 so do those that
   change names as well, as on a file system that has become read-only.  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static int action, fault_errno, report = -1;
static long countdown;
static volatile long counted;
static volatile pid_t owner;

/* Arms the process: `report_to` is a file descriptor that gets the name of the operation that was hit. */
void recpo_arm(const char *directory, int what, long at, int error, int report_to) {
  snprintf(root, sizeof root, "%s", directory);
  root_length = strlen(root);
  action = what, countdown = at, fault_errno = error, report = report_to, counted = 0, owner = getpid();
}

long recpo_count(void) { return counted; }

static int inside(const char *path) { return root_length && path && strncmp(path, root, root_length) == 0; }

static void resolve(int directory, const char *path, char *out) {
  char link[64];
  ssize_t length;
  if (path && path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
  if (directory == AT_FDCWD) { if (!getcwd(out, PATH_MAX)) out[0] = 0; length = strlen(out); }
  else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) length = 0;
    out[length] = 0;
  }
  if (path && length + 2 + strlen(path) < PATH_MAX) { out[length] = '/'; strcpy(out + length + 1, path); }
}

static void tell(const char *name, const char *path) {
  char line[PATH_MAX + 64];
  int length = snprintf(line, sizeof line, "%ld %s %s\n", counted, name, path + (inside(path) ? root_length : 0));
  if (report >= 0) { ssize_t ignored = syscall(1, report, line, length); (void)ignored; }
}

enum { ROOM, NAMES };

/* -1: this call fails with errno set; 1: this call is where the process dies; 0: go on */
static int hit(const char *name, const char *path, int kind) {
  long now;
  if (!action || !inside(path) || getpid() != owner) return 0;
  now = __sync_add_and_fetch(&counted, 1);
  if (action == 9) { tell(name, path); return 0; }
  if (now < countdown) return 0;
  if (action == 1) { tell(name, path); return 1; }
  if (kind == NAMES && action != 3) return 0;
  if (now == countdown || action) { if (report >= 0) { tell(name, path); report = -1; } }
  errno = fault_errno;
  return -1;
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define CHECK(name, path, kind, failed) \
  do { int found = hit(name, path, kind); if (found > 0) die(); if (found < 0) return failed; } while (0)

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    mode_t mode = 0; char full[PATH_MAX]; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) { resolve(AT_FDCWD, path, full); CHECK("open", full, ROOM, -1); } \
    return real(path, flags, mode); }
OPENS(open)
OPENS(open64)

#define OPENATS(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); \
    mode_t mode = 0; char full[PATH_MAX]; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) { resolve(at, path, full); CHECK("open", full, ROOM, -1); } \
    return real(at, path, flags, mode); }
OPENATS(openat)
OPENATS(openat64)

#define FOPENS(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(FILE *, #name, const char *, const char *); \
    char full[PATH_MAX]; \
    if (strpbrk(mode, "wa+")) { resolve(AT_FDCWD, path, full); CHECK("fopen", full, ROOM, NULL); } \
    return real(path, mode); }
FOPENS(fopen)
FOPENS(fopen64)

static int hit_fd(const char *name, int fd, int kind) {
  char full[PATH_MAX];
  if (!action || fd <= 2) return 0;
  resolve(fd, NULL, full);
  return hit(name, full, kind);
}

ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  int found = hit_fd("write", fd, ROOM);
  if (found > 0) { real(fd, bytes, size / 2); die(); }
  return found < 0 ? -1 : real(fd, bytes, size);
}

#define PWRITES(name) \
  ssize_t name(int fd, const void *bytes, size_t size, off64_t at) { \
    REAL(ssize_t, #name, int, const void *, size_t, off64_t); \
    int found = hit_fd("pwrite", fd, ROOM); \
    if (found > 0) { real(fd, bytes, size / 2, at); die(); } \
    return found < 0 ? -1 : real(fd, bytes, size, at); }
PWRITES(pwrite)
PWRITES(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(ssize_t, "writev", int, const struct iovec *, int);
  int found = hit_fd("writev", fd, ROOM);
  if (found > 0) die();
  return found < 0 ? -1 : real(fd, parts, count);
}

#define ON_FD(name, kind) \
  int name(int fd) { REAL(int, #name, int); int found = hit_fd(#name, fd, kind); if (found > 0) die(); return found < 0 ? -1 : real(fd); }
ON_FD(fsync, NAMES)
ON_FD(fdatasync, NAMES)

#define TRUNCATES(name) \
  int name(int fd, off64_t size) { REAL(int, #name, int, off64_t); int found = hit_fd("ftruncate", fd, ROOM); if (found > 0) die(); return found < 0 ? -1 : real(fd, size); }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

#define ON_PATH(name, kind) \
  int name(const char *path) { REAL(int, #name, const char *); char full[PATH_MAX]; resolve(AT_FDCWD, path, full); CHECK(#name, full, kind, -1); return real(path); }
ON_PATH(unlink, NAMES)
ON_PATH(rmdir, NAMES)
ON_PATH(remove, NAMES)

int unlinkat(int at, const char *path, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  char full[PATH_MAX]; resolve(at, path, full); CHECK("unlinkat", full, NAMES, -1);
  return real(at, path, flags);
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  char full[PATH_MAX]; resolve(AT_FDCWD, path, full); CHECK("mkdir", full, ROOM, -1);
  return real(path, mode);
}

int mkdirat(int at, const char *path, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  char full[PATH_MAX]; resolve(at, path, full); CHECK("mkdirat", full, ROOM, -1);
  return real(at, path, mode);
}

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  char full[PATH_MAX]; resolve(AT_FDCWD, to, full); CHECK("rename", full, NAMES, -1);
  return real(from, to);
}

int renameat(int at, const char *from, int beside, const char *to) {
  REAL(int, "renameat", int, const char *, int, const char *);
  char full[PATH_MAX]; resolve(beside, to, full); CHECK("renameat", full, NAMES, -1);
  return real(at, from, beside, to);
}

int renameat2(int at, const char *from, int beside, const char *to, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  char full[PATH_MAX]; resolve(beside, to, full); CHECK("renameat2", full, NAMES, -1);
  return real(at, from, beside, to, flags);
}

int link(const char *from, const char *to) {
  REAL(int, "link", const char *, const char *);
  char full[PATH_MAX]; resolve(AT_FDCWD, to, full); CHECK("link", full, ROOM, -1);
  return real(from, to);
}

int symlink(const char *from, const char *to) {
  REAL(int, "symlink", const char *, const char *);
  char full[PATH_MAX]; resolve(AT_FDCWD, to, full); CHECK("symlink", full, ROOM, -1);
  return real(from, to);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
  REAL(ssize_t, "sendfile", int, int, off_t *, size_t);
  int found = hit_fd("sendfile", out, ROOM);
  if (found > 0) { real(out, in, offset, size / 2); die(); }
  return found < 0 ? -1 : real(out, in, offset, size);
}
