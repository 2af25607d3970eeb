// Repeats the recorded calls of C++ kernels in a minimal process. bench/counts.py writes the script, compiles
// this file and runs it under callgrind, which counts the instructions inside `counted`.
//
//   replay LIBRARY SCRIPT
//
// A script has per call: "call SYMBOL", then "buffer BYTES BEFORE AFTER" (files), "int VALUE", "pointer
// BUFFER OFFSET" and "float BITS" in the order of the arguments, then "go". "struct WORDS" is an argument too, a pointer
// to the ints and pointers of so many lines that follow. Exit status 1 and a line on
// stderr if a call fails or its buffers differ from the recorded ones.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUFFERS 32
#define INTS 32
#define FLOATS 4
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

// Integers and floats are passed in separate registers, and only integers beyond the sixth (AArch64: the
// eighth) on the stack. A function therefore ignores surplus arguments, and one type serves all functions
// with at most this many (System V, AAPCS64).
typedef int (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float);

__attribute__((noinline)) int counted(Function call, const int64_t* i, const float* f) {
  return call(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14],
              i[15], i[16], i[17], i[18], i[19], i[20], i[21], i[22], i[23], i[24], i[25], i[26], i[27],
              i[28], i[29], i[30], i[31], f[0], f[1], f[2], f[3]);
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
  int64_t ints[INTS] = {0}, words[WORDS], value;
  float floats[FLOATS] = {0};
  unsigned bits;
  int buffers = 0, n = 0, m = 0, word_count = 0, words_left = 0;
  while (fscanf(script, "%255s", word) == 1) {
    if (!strcmp(word, "call") && fscanf(script, "%255s", symbol) == 1) {
      buffers = n = m = word_count = words_left = 0;
    } else if (!strcmp(word, "buffer") && buffers < BUFFERS &&
               fscanf(script, "%ld %4095s %4095s", &bytes[buffers], before, after[buffers]) == 3) {
      // At the start of a cache line, as torch allocates:
      // where a buffer lies must not change what is counted.
      buffer[buffers] = aligned_alloc(64, (bytes[buffers] + 127) / 64 * 64);
      fill(buffer[buffers], bytes[buffers], before);
      ++buffers;
    } else if (!strcmp(word, "struct") && n < INTS && fscanf(script, "%d", &words_left) == 1 &&
               word_count + words_left <= WORDS) {
      ints[n++] = (int64_t)(words + word_count);
    } else if ((!strcmp(word, "int") && n < INTS && fscanf(script, "%ld", &value) == 1) ||
               (!strcmp(word, "pointer") && n < INTS && fscanf(script, "%ld %ld", &which, &offset) == 2 &&
                which < buffers)) {
      if (word[0] == 'p') value = (int64_t)(buffer[which] + offset);
      if (words_left > 0)
        words[word_count++] = value, --words_left;
      else
        ints[n++] = value;
    } else if (!strcmp(word, "float") && m < FLOATS && fscanf(script, "%x", &bits) == 1) {
      memcpy(&floats[m++], &bits, 4);
    } else if (!strcmp(word, "go")) {
      Function function = (Function)dlsym(library, symbol);
      if (!function) stop("the library has no", symbol);
      if (counted(function, ints, floats) != 0) stop("an error was the answer of", symbol);
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
