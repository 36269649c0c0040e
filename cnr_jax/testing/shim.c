/* Counts the calls by which a process changes files below a folder, or looks at them where that is
 * asked for, and makes chosen ones fail.
 *
 * Loaded with LD_PRELOAD by cnr_jax.testing.faults, which documents what the environment
 * variables mean. Everything here may run in any thread, before main, between fork and exec, and
 * while the process is out of memory or of file descriptors: so no malloc, no locks, no stdio.
 *
 * Not seen: files written through mmap, through stdio's fwrite (the fopen is), by raw system
 * calls or io_uring, and by statically linked programs; and what is asked of open files.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define LINE (2 * PATH_MAX + 128)

enum action { NONE, KILL, KILL_AFTER, KILL_MIDWAY, SHORT, DELAY, ERROR };

static struct {
  char below[PATH_MAX];  /* with links resolved, as /proc/self/fd shows paths */
  char given[PATH_MAX];  /* the same folder as the caller wrote it */
  char log[PATH_MAX];
  char after[PATH_MAX];  /* nothing counts before this file exists */
  int looks; /* whether calls that only look count */
  int folders; /* whether the fault strikes at folders alone */
  char call[32];
  char match[PATH_MAX];
  long nth, times;
  double secs;
  enum action action;
  int error;
} config;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int enabled, begun;
static atomic_int log_fd = -1;
static atomic_long counted, matching;

static void forked(void) {
  atomic_store(&counted, 0);
  atomic_store(&matching, 0);
}

static void copy_variable(char *to, size_t size, const char *name) {
  const char *value = getenv(name);
  if (value && strlen(value) < size) strcpy(to, value);
}

/* Whether this process is the one that "NAME=VALUE" singles out among those that inherit. */
static int chosen(const char *condition) {
  char name[256];
  const char *equals = condition ? strchr(condition, '=') : NULL;
  if (!equals || (size_t)(equals - condition) >= sizeof name) return 1;
  memcpy(name, condition, equals - condition);
  name[equals - condition] = 0;
  const char *value = getenv(name);
  return value && strcmp(value, equals + 1) == 0;
}

static enum action action_from(const char *name) {
  static const char *names[] = {"", "kill", "kill_after", "kill_midway", "short_write", "delay"};
  for (int i = 1; i < 6; i++)
    if (strcmp(name, names[i]) == 0) return (enum action)i;
  config.error = atoi(name);
  return config.error > 0 ? ERROR : NONE;
}

static void configure(void) {
  copy_variable(config.below, sizeof config.below, "CNR_FAULT_BELOW");
  copy_variable(config.given, sizeof config.given, "CNR_FAULT_GIVEN");
  copy_variable(config.log, sizeof config.log, "CNR_FAULT_LOG");
  copy_variable(config.after, sizeof config.after, "CNR_FAULT_AFTER");
  config.looks = getenv("CNR_FAULT_LOOKS") != NULL;
  config.folders = getenv("CNR_FAULT_FOLDERS") != NULL;
  copy_variable(config.call, sizeof config.call, "CNR_FAULT_CALL");
  copy_variable(config.match, sizeof config.match, "CNR_FAULT_MATCH");
  const char *text = getenv("CNR_FAULT_ACTION");
  if (text && chosen(getenv("CNR_FAULT_PROCESS"))) config.action = action_from(text);
  config.nth = (text = getenv("CNR_FAULT_NTH")) ? atol(text) : 1;
  config.times = (text = getenv("CNR_FAULT_TIMES")) ? atol(text) : 1;
  config.secs = (text = getenv("CNR_FAULT_SECS")) ? atof(text) : 0;
  atomic_store(&begun, config.after[0] == 0);
  atomic_store(&enabled, config.below[0] && config.log[0]);
}

static void setup(void) {
  configure();
  pthread_atfork(NULL, NULL, forked);
}

/* For a process forked from one that has the library loaded: goes by the environment as it is now. */
EXPORT void cnr_faults_configure(void) {
  pthread_once(&once, setup);
  memset(&config, 0, sizeof config);
  atomic_store(&log_fd, -1);
  forked();
  configure();
}

/* Not by name: that would be a call that counts. */
static int look_at(const char *path, struct stat *found, int flags) {
  return syscall(SYS_newfstatat, AT_FDCWD, path, found, flags);
}

static int on(void) {
  pthread_once(&once, setup);
  if (!atomic_load(&enabled)) return 0;
  if (atomic_load(&begun)) return 1;
  struct stat unused;
  int saved = errno;
  int there = look_at(config.after, &unused, 0) == 0;
  errno = saved;
  if (there) atomic_store(&begun, 1);
  return there;
}

/* ---- paths ------------------------------------------------------------------------------ */

/* Removes empty, "." and ".." components of an absolute path, in place. */
static void normalize(char *path) {
  char *out = path;
  for (char *in = path; *in;) {
    while (*in == '/') in++;
    size_t length = strcspn(in, "/");
    if (length == 0) break;
    if (length == 2 && in[0] == '.' && in[1] == '.') {
      while (out > path && *--out != '/') {
      }
    } else if (!(length == 1 && in[0] == '.')) {
      *out++ = '/';
      memmove(out, in, length);
      out += length;
    }
    in += length;
  }
  if (out == path) *out++ = '/';
  *out = 0;
}

static int path_of_fd(int fd, char *to) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, to, PATH_MAX - 1);
  if (length <= 0) return 0;
  to[length] = 0;
  return to[0] == '/';
}

static int absolute_path(int directory, const char *path, char *to) {
  size_t start = 0;
  if (!path) return 0;
  if (path[0] != '/') {
    if (directory == AT_FDCWD ? !getcwd(to, PATH_MAX) : !path_of_fd(directory, to)) return 0;
    start = strlen(to);
    to[start++] = '/';
  }
  if (start + strlen(path) >= PATH_MAX) return 0;
  strcpy(to + start, path);
  normalize(to);
  return 1;
}

static size_t length_within(const char *path, const char *folder) {
  size_t length = strlen(folder);
  if (length == 0 || strncmp(path, folder, length) != 0) return 0;
  return path[length] == 0 || path[length] == '/' ? length : 0;
}

/* Whether a path counts; if so, rewrites it to start with the resolved folder. */
static int counts(char *path) {
  if (strcmp(path, config.log) == 0) return 0;
  if (length_within(path, config.below)) return 1;
  size_t length = length_within(path, config.given);
  size_t rest = strlen(path + length);
  if (!length || strlen(config.below) + rest >= PATH_MAX) return 0;
  memmove(path + strlen(config.below), path + length, rest + 1);
  memcpy(path, config.below, strlen(config.below));
  return 1;
}

/* ---- counting and striking -------------------------------------------------------------- */

static void write_line(const char *line, size_t length) {
  for (int attempt = 0; attempt < 2; attempt++) {
    int fd = atomic_load(&log_fd);
    if (fd < 0) {
      int low = syscall(SYS_openat, AT_FDCWD, config.log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC,
                        0666);
      if (low < 0) return;
      /* High, where a program that counts descriptors or closes the low ones is not met. */
      fd = fcntl(low, F_DUPFD_CLOEXEC, 800);
      if (fd >= 0) syscall(SYS_close, low);
      else fd = low;
      atomic_store(&log_fd, fd);
    }
    if (syscall(SYS_write, fd, line, length) == (long)length) return;
    atomic_store(&log_fd, -1);
  }
}

static void log_call(long number, const char *call, int hit, const char *path, const char *to) {
  char line[LINE];
  int length = snprintf(line, sizeof line, "%ld\t%d\t%s\t%d\t%s\t%s", number, (int)getpid(), call, hit,
                        path, to);
  if (length < 0 || length >= (int)sizeof line) return;
  for (int i = 0; i < length; i++)
    if (line[i] == '\n') line[i] = '?';
  line[length++] = '\n';
  write_line(line, length);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static void pause_secs(double secs) {
  struct timespec left = {(time_t)secs, (long)((secs - (time_t)secs) * 1e9)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

static int is_look(const char *call) {
  return strcmp(call, "stat") == 0 || strcmp(call, "scandir") == 0 || strcmp(call, "open_read") == 0;
}

static int is_folder(const char *path) {
  int fd = syscall(SYS_openat, AT_FDCWD, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0) syscall(SYS_close, fd);
  return fd >= 0;
}

static int fits(const char *call, const char *path, const char *to) {
  if (strcmp(config.call, "any") == 0 ? is_look(call) : strcmp(config.call, call) != 0) return 0;
  if (config.folders && !is_folder(path)) return 0;
  return !config.match[0] || strstr(path, config.match) || strstr(to, config.match);
}

/* Counts a call. Returns what is left to do about it: KILL_AFTER, KILL_MIDWAY, SHORT or ERROR. */
static enum action count(const char *call, char *path, char *to) {
  int saved = errno;
  int path_counts = path[0] && counts(path), to_counts = to[0] && counts(to);
  if (!path_counts && !to_counts) {
    errno = saved;
    return NONE;
  }
  long number = atomic_fetch_add(&counted, 1) + 1;
  int hit = 0;
  if (config.action != NONE && fits(call, path, to)) {
    long nth = atomic_fetch_add(&matching, 1) + 1;
    hit = nth >= config.nth && (config.times == 0 || nth < config.nth + config.times);
  }
  log_call(number, call, hit, path, to);
  if (hit && config.action == KILL) die();
  if (hit && config.action == DELAY) pause_secs(config.secs);
  errno = saved;
  return hit && config.action != DELAY ? config.action : NONE;
}

static enum action at_path(const char *call, int directory, const char *path) {
  char full[PATH_MAX], none[1] = "";
  if (!on() || !absolute_path(directory, path, full)) return NONE;
  return count(call, full, none);
}

static enum action at_paths(const char *call, int d1, const char *path, int d2, const char *to) {
  char full[PATH_MAX], target[PATH_MAX];
  if (!on() || !absolute_path(d1, path, full) || !absolute_path(d2, to, target)) return NONE;
  return count(call, full, target);
}

static enum action at_fd(const char *call, int fd) {
  char full[PATH_MAX], none[1] = "";
  if (!on() || fd == atomic_load(&log_fd)) return NONE;
  int saved = errno;
  int known = path_of_fd(fd, full);
  errno = saved;
  return known ? count(call, full, none) : NONE;
}

#define REAL(name)                                                    \
  static __typeof__(&name) real;                                      \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Returns from the wrapper with the result of `call`, or as the fault has it. */
#define STRIKE(what, failed, invoke)            \
  do {                                          \
    enum action action_ = (what);               \
    if (action_ == ERROR) {                     \
      errno = config.error;                     \
      return failed;                            \
    }                                           \
    __typeof__(invoke) result_ = (invoke);      \
    if (action_ == KILL_AFTER) die();           \
    return result_;                             \
  } while (0)

/* ---- opening ---------------------------------------------------------------------------- */

static int changes(int flags) {
  return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
}

static int has_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

static enum action opening(int directory, const char *path, int flags) {
  if (changes(flags)) return at_path("open", directory, path);
  return config.looks ? at_path("open_read", directory, path) : NONE;
}

#define MODE(flags)                      \
  mode_t mode = 0;                       \
  if (has_mode(flags)) {                 \
    va_list list;                        \
    va_start(list, flags);               \
    mode = va_arg(list, mode_t);         \
    va_end(list);                        \
  }

#define OPEN(name)                                                             \
  EXPORT int name(const char *path, int flags, ...) {                          \
    MODE(flags)                                                                \
    REAL(name);                                                                \
    STRIKE(opening(AT_FDCWD, path, flags), -1, real(path, flags, mode));       \
  }
#define OPENAT(name)                                                           \
  EXPORT int name(int directory, const char *path, int flags, ...) {           \
    MODE(flags)                                                                \
    REAL(name);                                                                \
    STRIKE(opening(directory, path, flags), -1, real(directory, path, flags, mode)); \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

/* What _FORTIFY_SOURCE makes of calls without a mode. */
int __open_2(const char *, int);
int __open64_2(const char *, int);
int __openat_2(int, const char *, int);
int __openat64_2(int, const char *, int);
#define OPEN_2(name)                                                    \
  EXPORT int name(const char *path, int flags) {                        \
    REAL(name);                                                         \
    STRIKE(opening(AT_FDCWD, path, flags), -1, real(path, flags));      \
  }
#define OPENAT_2(name)                                                       \
  EXPORT int name(int directory, const char *path, int flags) {              \
    REAL(name);                                                              \
    STRIKE(opening(directory, path, flags), -1, real(directory, path, flags)); \
  }
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)

#define CREAT(name)                                                     \
  EXPORT int name(const char *path, mode_t mode) {                      \
    REAL(name);                                                         \
    STRIKE(at_path("open", AT_FDCWD, path), -1, real(path, mode));      \
  }
CREAT(creat)
CREAT(creat64)

#define FOPEN(name)                                                                     \
  EXPORT FILE *name(const char *path, const char *mode) {                               \
    REAL(name);                                                                         \
    STRIKE(opening(AT_FDCWD, path, strpbrk(mode, "wa+") ? O_WRONLY : O_RDONLY), NULL,         \
           real(path, mode));                                                           \
  }
FOPEN(fopen)
FOPEN(fopen64)

/* ---- writing ---------------------------------------------------------------------------- */

/* Like STRIKE; `half` does half of the write. */
#define STRIKE_WRITE(fd, invoke, half)                         \
  do {                                                         \
    enum action action_ = at_fd("write", fd);                  \
    if (action_ == ERROR) {                                    \
      errno = config.error;                                    \
      return -1;                                               \
    }                                                          \
    int part_ = action_ == SHORT || action_ == KILL_MIDWAY;    \
    ssize_t result_ = part_ ? (half) : (invoke);               \
    if (action_ == KILL_AFTER || action_ == KILL_MIDWAY) die(); \
    return result_;                                            \
  } while (0)

/* At least one byte: nothing written would be no short write but an endless loop. */
static size_t half_of(size_t size) { return size > 1 ? size / 2 : size; }

EXPORT ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  STRIKE_WRITE(fd, real(fd, data, size), real(fd, data, half_of(size)));
}

#define PWRITE(name)                                                                   \
  EXPORT ssize_t name(int fd, const void *data, size_t size, off_t offset) {           \
    REAL(name);                                                                        \
    STRIKE_WRITE(fd, real(fd, data, size, offset), real(fd, data, half_of(size), offset)); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

/* Half of the first part that is not empty. */
static struct iovec first_half(const struct iovec *parts, int count) {
  struct iovec half = {NULL, 0};
  for (int i = 0; i < count && half.iov_len == 0; i++) half = parts[i];
  half.iov_len = half_of(half.iov_len);
  return half;
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  struct iovec half = first_half(parts, count);
  STRIKE_WRITE(fd, real(fd, parts, count), real(fd, &half, 1));
}

#define PWRITEV(name)                                                                 \
  EXPORT ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) {   \
    REAL(name);                                                                       \
    struct iovec half = first_half(parts, count);                                     \
    STRIKE_WRITE(fd, real(fd, parts, count, offset), real(fd, &half, 1, offset));     \
  }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define PWRITEV2(name)                                                                         \
  EXPORT ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) { \
    REAL(name);                                                                                \
    struct iovec half = first_half(parts, count);                                              \
    STRIKE_WRITE(fd, real(fd, parts, count, offset, flags), real(fd, &half, 1, offset, flags)); \
  }
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

ssize_t sendfile(int, int, off_t *, size_t);
ssize_t sendfile64(int, int, off_t *, size_t);
#define SENDFILE(name)                                                                    \
  EXPORT ssize_t name(int out, int in, off_t *offset, size_t size) {                      \
    REAL(name);                                                                           \
    STRIKE_WRITE(out, real(out, in, offset, size), real(out, in, offset, half_of(size))); \
  }
SENDFILE(sendfile)
SENDFILE(sendfile64)

EXPORT ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t size,
                               unsigned flags) {
  REAL(copy_file_range);
  STRIKE_WRITE(out, real(in, from, out, to, size, flags),
               real(in, from, out, to, half_of(size), flags));
}

/* ---- syncing, renaming, making, removing ------------------------------------------------- */

#define OF_FD(name, call)             \
  EXPORT int name(int fd) {           \
    REAL(name);                       \
    STRIKE(at_fd(call, fd), -1, real(fd)); \
  }
OF_FD(fsync, "fsync")
OF_FD(fdatasync, "fsync")
OF_FD(syncfs, "fsync")

EXPORT int rename(const char *from, const char *to) {
  REAL(rename);
  STRIKE(at_paths("rename", AT_FDCWD, from, AT_FDCWD, to), -1, real(from, to));
}
EXPORT int renameat(int d1, const char *from, int d2, const char *to) {
  REAL(renameat);
  STRIKE(at_paths("rename", d1, from, d2, to), -1, real(d1, from, d2, to));
}
EXPORT int renameat2(int d1, const char *from, int d2, const char *to, unsigned flags) {
  REAL(renameat2);
  STRIKE(at_paths("rename", d1, from, d2, to), -1, real(d1, from, d2, to, flags));
}

EXPORT int link(const char *from, const char *to) {
  REAL(link);
  STRIKE(at_paths("link", AT_FDCWD, from, AT_FDCWD, to), -1, real(from, to));
}
EXPORT int linkat(int d1, const char *from, int d2, const char *to, int flags) {
  REAL(linkat);
  STRIKE(at_paths("link", d1, from, d2, to), -1, real(d1, from, d2, to, flags));
}
EXPORT int symlink(const char *text, const char *path) {
  REAL(symlink);
  STRIKE(at_path("link", AT_FDCWD, path), -1, real(text, path));
}
EXPORT int symlinkat(const char *text, int directory, const char *path) {
  REAL(symlinkat);
  STRIKE(at_path("link", directory, path), -1, real(text, directory, path));
}

EXPORT int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  STRIKE(at_path("mkdir", AT_FDCWD, path), -1, real(path, mode));
}
EXPORT int mkdirat(int directory, const char *path, mode_t mode) {
  REAL(mkdirat);
  STRIKE(at_path("mkdir", directory, path), -1, real(directory, path, mode));
}

EXPORT int unlink(const char *path) {
  REAL(unlink);
  STRIKE(at_path("unlink", AT_FDCWD, path), -1, real(path));
}
EXPORT int rmdir(const char *path) {
  REAL(rmdir);
  STRIKE(at_path("rmdir", AT_FDCWD, path), -1, real(path));
}
EXPORT int unlinkat(int directory, const char *path, int flags) {
  REAL(unlinkat);
  const char *call = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
  STRIKE(at_path(call, directory, path), -1, real(directory, path, flags));
}
EXPORT int remove(const char *path) {
  REAL(remove);
  struct stat found;
  int folder = look_at(path, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(found.st_mode);
  STRIKE(at_path(folder ? "rmdir" : "unlink", AT_FDCWD, path), -1, real(path));
}

/* ---- sizes ------------------------------------------------------------------------------- */

#define FTRUNCATE(name)                                     \
  EXPORT int name(int fd, off_t size) {                     \
    REAL(name);                                             \
    STRIKE(at_fd("truncate", fd), -1, real(fd, size));      \
  }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

#define TRUNCATE(name)                                                      \
  EXPORT int name(const char *path, off_t size) {                           \
    REAL(name);                                                             \
    STRIKE(at_path("truncate", AT_FDCWD, path), -1, real(path, size));      \
  }
TRUNCATE(truncate)
TRUNCATE(truncate64)

#define FALLOCATE(name)                                                     \
  EXPORT int name(int fd, int mode, off_t offset, off_t size) {             \
    REAL(name);                                                             \
    STRIKE(at_fd("truncate", fd), -1, real(fd, mode, offset, size));        \
  }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

/* These return the error instead of setting errno. */
#define POSIX_FALLOCATE(name)                                                    \
  EXPORT int name(int fd, off_t offset, off_t size) {                            \
    REAL(name);                                                                  \
    STRIKE(at_fd("truncate", fd), config.error, real(fd, offset, size));         \
  }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)

/* ---- looking ----------------------------------------------------------------------------- */

/* Asked of an open file, there is no path. */
static enum action looking(const char *call, int directory, const char *path) {
  pthread_once(&once, setup);
  return config.looks && path && path[0] ? at_path(call, directory, path) : NONE;
}

#define STAT(name, type)                                                      \
  EXPORT int name(const char *path, struct type *found) {                     \
    REAL(name);                                                               \
    STRIKE(looking("stat", AT_FDCWD, path), -1, real(path, found));           \
  }
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)

#define FSTATAT(name, type)                                                              \
  EXPORT int name(int directory, const char *path, struct type *found, int flags) {      \
    REAL(name);                                                                          \
    STRIKE(looking("stat", directory, path), -1, real(directory, path, found, flags));   \
  }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

EXPORT int statx(int directory, const char *path, int flags, unsigned mask, struct statx *found) {
  REAL(statx);
  STRIKE(looking("stat", directory, path), -1, real(directory, path, flags, mask, found));
}

/* What programs call that were linked before glibc 2.33. */
int __xstat(int, const char *, struct stat *);
int __lxstat(int, const char *, struct stat *);
int __xstat64(int, const char *, struct stat64 *);
int __lxstat64(int, const char *, struct stat64 *);
int __fxstatat(int, int, const char *, struct stat *, int);
int __fxstatat64(int, int, const char *, struct stat64 *, int);
#define XSTAT(name, type)                                                     \
  EXPORT int name(int version, const char *path, struct type *found) {        \
    REAL(name);                                                               \
    STRIKE(looking("stat", AT_FDCWD, path), -1, real(version, path, found));  \
  }
#define FXSTATAT(name, type)                                                                        \
  EXPORT int name(int version, int directory, const char *path, struct type *found, int flags) {    \
    REAL(name);                                                                                     \
    STRIKE(looking("stat", directory, path), -1, real(version, directory, path, found, flags));     \
  }
XSTAT(__xstat, stat)
XSTAT(__lxstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat64, stat64)
FXSTATAT(__fxstatat, stat)
FXSTATAT(__fxstatat64, stat64)

EXPORT DIR *opendir(const char *path) {
  REAL(opendir);
  STRIKE(looking("scandir", AT_FDCWD, path), NULL, real(path));
}
EXPORT DIR *fdopendir(int fd) {
  REAL(fdopendir);
  pthread_once(&once, setup);
  STRIKE(config.looks ? at_fd("scandir", fd) : NONE, NULL, real(fd));
}
