// Repeats the recorded calls of C++ kernels in a minimal process. bench/counts.py writes the calls to "calls.h",
// compiles this file with it and runs it under callgrind, which counts the instructions inside `counted`.
//
//   replay LIBRARY
//
// Exit status 1 and a line on stderr if a call fails or its buffers differ from the recorded ones.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char* what, const char* name) {
  fprintf(stderr, "%s %s\n", what, name);
  exit(1);
}

// The content of a file, at the start of a cache line, as torch allocates: where a buffer lies must not change
// what is counted.
static char* load(size_t bytes, const char* name) {
  char* to = aligned_alloc(64, (bytes + 127) / 64 * 64);
  FILE* file = fopen(name, "rb");
  if (!file || fread(to, 1, bytes, file) != bytes) stop("cannot read", name);
  fclose(file);
  return to;
}

static void compare(char* buffer, size_t bytes, const char* name, const char* symbol) {
  char* wanted = load(bytes, name);
  if (memcmp(wanted, buffer, bytes)) stop("other bytes than when it was recorded were left by", symbol);
  free(wanted), free(buffer);
}

// An entry without options ignores the second register (System V, AAPCS64).
typedef int (*Entry)(const uint64_t* call, const uint64_t* options);

__attribute__((noinline)) int counted(Entry entry, const uint64_t* call, const uint64_t* options) {
  return entry(call, options);
}

static void replay(void* library, const char* symbol, const uint64_t* call, const uint64_t* options) {
  Entry entry = (Entry)dlsym(library, symbol);
  if (!entry) stop("the library has no", symbol);
  if (counted(entry, call, options) != 0) stop("an error was the answer of", symbol);
}

int main(int count, char** given) {
  if (count != 2) stop("expected LIBRARY, not", count > 1 ? given[1] : "nothing");
  void* library = dlopen(given[1], RTLD_NOW);
  if (!library) stop("cannot load", dlerror());
#include "calls.h"
  return 0;
}
