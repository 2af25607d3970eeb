// Repeats the recorded calls of C++ kernels in a minimal process. bench/counts.py writes the script, compiles
// this file and runs it under callgrind, which counts the instructions inside `counted`.
//
//   replay LIBRARY SCRIPT
//
// A script has per call: "call SYMBOL", then "buffer BYTES BEFORE AFTER" (files), then per struct, in the order of
// the arguments, "struct WORDS" and as many lines "int VALUE" or "pointer BUFFER OFFSET", then "go". Exit status 1
// and a line on stderr if a call fails or its buffers differ from the recorded ones.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUFFERS 32
#define STRUCTS 2
#define WORDS 128

static void stop(const char* what, const char* name) {
  fprintf(stderr, "%s %s\n", what, name);
  exit(1);
}

static void fill(char* to, long bytes, const char* name) {
  FILE* file = fopen(name, "rb");
  if (!file || fread(to, 1, bytes, file) != (size_t)bytes) stop("cannot read", name);
  fclose(file);
}

// An entry with one struct ignores the second register (System V, AAPCS64).
typedef int (*Function)(const int64_t*, const int64_t*);

__attribute__((noinline)) int counted(Function call, const int64_t* first, const int64_t* second) {
  return call(first, second);
}

int main(int count, char** given) {
  if (count != 3) stop("expected LIBRARY SCRIPT, not", count > 1 ? given[1] : "nothing");
  void* library = dlopen(given[1], RTLD_NOW);
  if (!library) stop("cannot load", dlerror());
  FILE* script = fopen(given[2], "r");
  if (!script) stop("cannot read", given[2]);
  static char word[256], symbol[256], before[4096], after[BUFFERS][4096];
  char* buffer[BUFFERS];
  long bytes[BUFFERS], which, offset;
  int64_t words[STRUCTS][WORDS] = {{0}}, value;
  int buffers = 0, structs = 0, size = 0, left = 0;
  while (fscanf(script, "%255s", word) == 1) {
    if (!strcmp(word, "call") && fscanf(script, "%255s", symbol) == 1) {
      buffers = structs = left = 0;
    } else if (!strcmp(word, "buffer") && buffers < BUFFERS &&
               fscanf(script, "%ld %4095s %4095s", &bytes[buffers], before, after[buffers]) == 3) {
      // At the start of a cache line, as torch allocates:
      // where a buffer lies must not change what is counted.
      buffer[buffers] = aligned_alloc(64, (bytes[buffers] + 127) / 64 * 64);
      fill(buffer[buffers], bytes[buffers], before);
      ++buffers;
    } else if (!strcmp(word, "struct") && structs < STRUCTS && fscanf(script, "%d", &size) == 1 &&
               size <= WORDS) {
      ++structs, left = size;
    } else if (!strcmp(word, "int") && left > 0 && fscanf(script, "%ld", &value) == 1) {
      words[structs - 1][size - left--] = value;
    } else if (!strcmp(word, "pointer") && left > 0 && fscanf(script, "%ld %ld", &which, &offset) == 2 &&
               which < buffers) {
      words[structs - 1][size - left--] = (int64_t)(buffer[which] + offset);
    } else if (!strcmp(word, "go")) {
      Function function = (Function)dlsym(library, symbol);
      if (!function) stop("the library has no", symbol);
      if (counted(function, words[0], words[1]) != 0) stop("an error was the answer of", symbol);
      for (int b = 0; b < buffers; ++b) {
        char* wanted = malloc(bytes[b] + 1);
        fill(wanted, bytes[b], after[b]);
        if (memcmp(wanted, buffer[b], bytes[b]))
          stop("other bytes than when it was recorded were left by", symbol);
        free(wanted), free(buffer[b]);
      }
    } else {
      stop("cannot make sense of", word);
    }
  }
  return 0;
}
