/* The head of the program in one file: unpacks what is appended to it once, then becomes Python.
 *
 * Appended are some files as they are (Python, enough of its library to unpack the rest), the rest,
 * compressed, and `struct tail`. They go to a folder named by their digest, below the first of the
 * places of `main` that takes it. No other user may write there: what is there is run. Linked
 * statically, with system calls only.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

struct tail { /* little-endian, as is all that is appended */
    uint64_t files, n_files, rest, rest_size; /* where they begin; how many; bytes */
    char id[32];
    char marks[16];
};
struct entry { /* of an appended file, before its path and its bytes */
    uint32_t path_size, mode;
    uint64_t size;
};
static const char MARKS[16] = "tamis program 1";
static char message[2 * PATH_MAX] = "no folder can be written to";

static void say(const char *what, const char *path)
{
    snprintf(message, sizeof message, "%s %s: %s", what, path, strerror(errno));
}

static int mine(const char *path) /* a folder of this user that no other may write to */
{
    struct stat s;
    return !lstat(path, &s) && S_ISDIR(s.st_mode) && s.st_uid == geteuid() && !(s.st_mode & 022);
}

static int make_parents(char *path) /* every folder above the last part */
{
    for (char *at = path + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        int failed = mkdir(path, 0700) && errno != EEXIST;
        *at = '/';
        if (failed)
            return -1;
    }
    return 0;
}

static void remove_folder(const char *path)
{
    char below[PATH_MAX];
    DIR *folder = opendir(path);
    for (struct dirent *e; folder && (e = readdir(folder));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
            continue;
        snprintf(below, sizeof below, "%s/%s", path, e->d_name);
        if (unlink(below) && (errno == EISDIR || errno == EPERM))
            remove_folder(below);
    }
    if (folder)
        closedir(folder);
    rmdir(path);
}

static int copy(int from, uint64_t at, uint64_t size, const char *path, mode_t mode)
{
    static char bytes[1 << 16];
    int to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (to < 0)
        return -1;
    while (size) {
        ssize_t n = pread(from, bytes, size < sizeof bytes ? size : sizeof bytes, at);
        if (n <= 0 || write(to, bytes, n) != n) {
            if (n == 0)
                errno = EIO;
            close(to);
            return -1;
        }
        at += n, size -= n;
    }
    return close(to);
}

static int write_files(int self, const struct tail *tail, const char *folder)
{
    char path[PATH_MAX];
    uint64_t at = tail->files;
    for (uint64_t i = 0; i < tail->n_files; i++) {
        struct entry e;
        size_t start = snprintf(path, sizeof path, "%s/", folder);
        if (pread(self, &e, sizeof e, at) != sizeof e || start + e.path_size >= sizeof path)
            return -1;
        at += sizeof e;
        if (pread(self, path + start, e.path_size, at) != e.path_size)
            return -1;
        path[start + e.path_size] = 0;
        at += e.path_size;
        if (make_parents(path) || copy(self, at, e.size, path, e.mode)) {
            say("cannot write", path);
            return -1;
        }
        at += e.size;
    }
    return 0;
}

static int unpack_rest(int self, const struct tail *tail, const char *folder)
{
    char python[PATH_MAX], script[PATH_MAX], file[12], at[24], size[24];
    snprintf(file, sizeof file, "%d", self);
    snprintf(python, sizeof python, "%s/bin/python3", folder);
    snprintf(script, sizeof script, "%s/unpack.pyc", folder);
    snprintf(at, sizeof at, "%llu", (unsigned long long)tail->rest);
    snprintf(size, sizeof size, "%llu", (unsigned long long)tail->rest_size);
    pid_t child = fork();
    if (!child) {
        execl(python, python, "-I", "-S", script, file, at, size, folder, (char *)0);
        _exit(126);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (status) {
        errno = WIFEXITED(status) && WEXITSTATUS(status) == 126 ? EACCES : ENOSPC;
        say("cannot unpack to", folder);
    }
    return status;
}

static int unpack(int self, const struct tail *tail, char *folder)
{
    char part[PATH_MAX];
    if (!access(folder, F_OK)) {
        errno = EPERM;
        say("others can write to", folder);
        return -1;
    }
    snprintf(part, sizeof part, "%s.XXXXXX", folder);
    if (make_parents(part) || !mkdtemp(part)) {
        say("cannot make", part);
        return -1;
    }
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", part);
    *strrchr(parent, '/') = 0;
    if (!mine(parent)) { /* others could exchange what is in it */
        errno = EPERM;
        say("others can write to", parent);
        rmdir(part);
        return -1;
    }
    int failed = write_files(self, tail, part) || unpack_rest(self, tail, part);
    /* Another process may have been faster: what it has made is the same. */
    if (!failed && rename(part, folder) && !mine(folder)) {
        say("cannot rename", part);
        failed = 1;
    }
    if (failed || !access(part, F_OK))
        remove_folder(part);
    return failed ? -1 : 0;
}

static void become(int self, const char *folder, int argc, char **argv)
{
    char python[PATH_MAX], script[PATH_MAX];
    char **words = calloc(argc + 3, sizeof *words);
    snprintf(python, sizeof python, "%s/bin/python3", folder);
    snprintf(script, sizeof script, "%s/tamis.pyc", folder);
    words[0] = python, words[1] = "-I", words[2] = script;
    memcpy(words + 3, argv + 1, (argc - 1) * sizeof *words);
    fcntl(self, F_SETFD, FD_CLOEXEC);
    execv(python, words);
    say("cannot run", python);
}

static int open_self(const char *path, struct tail *tail) /* the file, open; -1: not this one */
{
    int file = path ? open(path, O_RDONLY) : -1;
    off_t end = file < 0 ? -1 : lseek(file, 0, SEEK_END);
    if (end > (off_t)sizeof *tail
        && pread(file, tail, sizeof *tail, end - sizeof *tail) == sizeof *tail
        && !memcmp(tail->marks, MARKS, sizeof MARKS))
        return file;
    return -1;
}

int main(int argc, char **argv)
{
    struct tail tail;
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int self = open_self("/proc/self/exe", &tail);
    if (self < 0) /* where there is no /proc */
        self = open_self((const char *)getauxval(AT_EXECFN), &tail);
    if (self < 0) {
        fputs("error: this file is not whole: fetch it again\n", stderr);
        return 1;
    }
    char places[5][PATH_MAX] = {""}, folder[PATH_MAX];
    int n = 0;
    if (cache && *cache == '/')
        snprintf(places[n++], PATH_MAX, "%s/tamis", cache);
    if (home && *home == '/')
        snprintf(places[n++], PATH_MAX, "%s/.cache/tamis", home);
    const char *temporary[] = {"/var/tmp", "/tmp", "/dev/shm"};
    for (int i = 0; i < 3; i++)
        if (!access(temporary[i], W_OK))
            snprintf(places[n++], PATH_MAX, "%s/tamis-%u", temporary[i], geteuid());
    for (int unpacking = 0; unpacking < 2; unpacking++)
        for (int i = 0; i < n; i++) {
            int size = snprintf(folder, sizeof folder, "%s/program-%.32s", places[i], tail.id);
            if (size >= (int)sizeof folder - 8)
                continue;
            if (mine(folder) ? mine(places[i]) : unpacking && !unpack(self, &tail, folder)) {
                if (!home || *home != '/')
                    setenv("HOME", places[i], 1); /* for models and what is kept of chats */
                become(self, folder, argc, argv);
            }
        }
    fprintf(stderr, "error: %s; set XDG_CACHE_HOME to a folder that you may write to and run "
            "programs from, with 250 MB free\n", message);
    return 1;
}
