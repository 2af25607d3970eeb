// Lists of calls: see call_list.h. A list holds copies of the structs of its calls; the tensors that these point to are the
// caller's.
#include "call_list.h"

#include <cstdlib>
#include <cstring>

#define GM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
constexpr int64_t kAlign = 16, kNoOptions = -1;

struct Entry {
  GmReplay replay;
  int64_t call, options;  // offsets into `bytes`
};

template <class T>
struct Array {
  T* data;
  int64_t size, room;

  bool reserve(int64_t more) {
    if (size + more <= room) return true;
    const int64_t want = 2 * (size + more);
    void* grown = realloc(data, size_t(want) * sizeof(T));
    if (grown == nullptr) return false;
    data = static_cast<T*>(grown);
    room = want;
    return true;
  }
};

struct CallList {
  Array<Entry> entries;
  Array<char> bytes;
  bool failed;

  // The offset of a copy, behind those that `reserve` has made room for.
  int64_t put(const void* from, int64_t n) {
    const int64_t at = bytes.size;
    memcpy(bytes.data + at, from, size_t(n));
    bytes.size += (n + kAlign - 1) / kAlign * kAlign;
    return at;
  }
};

thread_local CallList* recording = nullptr;
}  // namespace

extern "C" void gm_note_call(GmReplay replay, const void* call, int64_t call_bytes, const void* options,
                             int64_t option_bytes) {
  CallList* list = recording;
  if (list == nullptr || list->failed) return;
  if (!list->entries.reserve(1) || !list->bytes.reserve(call_bytes + option_bytes + 2 * kAlign)) {
    list->failed = true;
    return;
  }
  const int64_t at = list->put(call, call_bytes);
  list->entries.data[list->entries.size++] = {
      replay, at, option_bytes == 0 ? kNoOptions : list->put(options, option_bytes)};
}

// An empty list; null if there is no memory.
GM_EXPORT void* gm_calls_new() { return calloc(1, sizeof(CallList)); }

// From now on add the calls of this thread to `list`; null ends it. Returns 0, or GM_E_NOMEM if the list that ends has not all.
GM_EXPORT int gm_calls_record(void* list) {
  const CallList* last = recording;
  recording = static_cast<CallList*>(list);
  return last != nullptr && last->failed ? -3 /* GM_E_NOMEM */ : 0;
}

GM_EXPORT int64_t gm_calls_count(const void* list) {
  return static_cast<const CallList*>(list)->entries.size;
}

// Make the calls [begin, end) again. Returns 0, or the code of the first that fails, after which none is made.
GM_EXPORT int gm_calls_run(const void* list, int64_t begin, int64_t end) {
  const CallList& calls = *static_cast<const CallList*>(list);
  if (begin < 0 || end > calls.entries.size) return -5;  // GM_E_ARG
  for (int64_t i = begin; i < end; ++i) {
    const Entry& entry = calls.entries.data[i];
    const char* bytes = calls.bytes.data;
    const int code =
        entry.replay(bytes + entry.call, entry.options == kNoOptions ? nullptr : bytes + entry.options);
    if (code != 0) return code;
  }
  return 0;
}

GM_EXPORT void gm_calls_free(void* list) {
  CallList* calls = static_cast<CallList*>(list);
  if (calls == nullptr) return;
  free(calls->entries.data);
  free(calls->bytes.data);
  free(calls);
}
