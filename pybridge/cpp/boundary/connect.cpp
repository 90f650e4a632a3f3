// Connects the shim to `_core`: defines the pointers to Rust's functions and sets them.
#include <utility>

namespace {

// A pointer to a function of Rust. The pointers form a linked list, which is complete when the library has been loaded.
struct Import {
  Import(const char* name, void (*set)(void* address)) : name(name), set(set), next(std::exchange(last, this)) {}
  const char* name;
  void (*set)(void* address);
  const Import* next;

  inline static const Import* last = nullptr;
};

}  // namespace

#define TT(result, name, ...)  \
  result (*name)(__VA_ARGS__); \
  static const Import name##_import(#name, [](void* address) { name = reinterpret_cast<decltype(name)>(address); })
#include "boundary/shim.h"

extern "C" const char* ttc_connect(void* (*find)(const void* core, const char* name), const void* core) {
  for (const Import* import = Import::last; import; import = import->next) {
    void* const address = find(core, import->name);
    if (!address) return import->name;
    import->set(address);
  }
  return nullptr;
}
