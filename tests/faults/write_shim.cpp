// Loaded before a program (LD_PRELOAD): notes in the file $SHIM_LOG what the
// program does to files whose names contain ".pt" and to folders, those of
// draws left out, and makes the calls fail whose number in it is $SHIM_FAIL,
// from 1 on: no space is left.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int calls = 0;

// Whether a noted call is to fail.
bool Note(const char* call, const char* name, const char* more = "") {
  if (strstr(name, "/draws")) return false;
  static const char* log = getenv("SHIM_LOG");
  static const char* fail = getenv("SHIM_FAIL");
  if (FILE* file = fopen(log, "a")) {
    fprintf(file, "%s %s%s\n", call, name, more);
    fclose(file);
  }
  if (!fail || ++calls != atoi(fail)) return false;
  errno = ENOSPC;
  return true;
}

// Whether a noted call on an open file is to fail.
bool NoteFile(const char* call, int file) {
  char link[64];
  char name[PATH_MAX];
  struct stat status;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, name, sizeof name - 1);
  if (size <= 0 || fstat(file, &status) != 0) return false;
  name[size] = 0;
  if (!strstr(name, ".pt") && !S_ISDIR(status.st_mode)) return false;
  return Note(call, name);
}

}  // namespace

extern "C" {

ssize_t pwrite(int file, const void* data, size_t size, off_t at) {
  if (NoteFile("write", file)) return -1;
  return Next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite")(
      file, data, size, at);
}

int fsync(int file) {
  return NoteFile("fsync", file) ? -1 : Next<int (*)(int)>("fsync")(file);
}

int rename(const char* from, const char* to) noexcept {
  if (Note("rename", from)) return -1;
  return Next<int (*)(const char*, const char*)>("rename")(from, to);
}
}
