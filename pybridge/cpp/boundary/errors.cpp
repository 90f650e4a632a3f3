#include "boundary/errors.h"

#include "boundary/last_exception.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

// The exception by which libtorch_python reports that a Python error is set on this thread. The shim does not link
// libtorch_python, because that library differs between Python versions. C++ matches exceptions by type name, so
// libtorch_python catches this definition, which has the same name, base class and members.
struct TT_EXPORT python_error : std::exception {
  void* type = nullptr;
  void* value = nullptr;
  void* traceback = nullptr;
  std::string message;
};

namespace tandem {

namespace {

thread_local std::exception_ptr kept;     // the exception of the latest function that failed, for Rust
thread_local std::exception_ptr pending;  // the exception to throw when Rust returns to C++
std::mutex last_mutex;
std::string last_message;  // of the latest exception that any thread has kept

template <class E>
std::exception_ptr with_context(E e, const std::string& context) {
  e.add_context(context);
  return std::make_exception_ptr(std::move(e));
}

// Returns an exception of the same type whose message has an additional line.
std::exception_ptr explain(const std::exception_ptr& e, const std::string& context) {
  try {
    std::rethrow_exception(e);
  } catch (const c10::IndexError& x) {
    return with_context(x, context);
  } catch (const c10::ValueError& x) {
    return with_context(x, context);
  } catch (const c10::TypeError& x) {
    return with_context(x, context);
  } catch (const c10::NotImplementedError& x) {
    return with_context(x, context);
  } catch (const c10::LinAlgError& x) {
    return with_context(x, context);
  } catch (const c10::OutOfMemoryError& x) {
    return with_context(x, context);
  } catch (const c10::Error& x) {
    return with_context(x, context);
  } catch (const std::exception& x) {
    return std::make_exception_ptr(std::runtime_error(std::string(x.what()) + "\n" + context));
  } catch (...) {
    return e;
  }
}

std::string first_line(const std::exception_ptr& e) {
  try {
    std::rethrow_exception(e);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    const std::string text = known ? known->what_without_backtrace() : error.what();
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "";
  }
}

}  // namespace

void keep_exception(std::exception_ptr e) {
  // The message is kept, not the exception, which may hold Python objects.
  auto message = first_line(e);
  {
    const std::lock_guard<std::mutex> lock(last_mutex);
    last_message.swap(message);
  }
  kept = std::move(e);
}

std::string last_exception() {
  const std::lock_guard<std::mutex> lock(last_mutex);
  return last_message;
}

void throw_pending() {
  auto e = std::move(pending);
  pending = nullptr;
  if (!e) throw std::runtime_error("tandem: an operator failed without an exception");
  std::rethrow_exception(e);
}

}  // namespace tandem

using namespace tandem;

extern "C" {

void* ttc_take_exception() { return new std::exception_ptr(std::move(kept)); }
void ttc_drop_exception(void* e) { delete static_cast<std::exception_ptr*>(e); }

int32_t ttc_describe_exception(void* e, char* message, size_t capacity, size_t* len) {
  const auto tell = [&](const char* text, TtException kind) {
    *len = std::min(capacity, std::strlen(text));
    std::memcpy(message, text, *len);
    return kind;
  };
  try {
    std::rethrow_exception(*static_cast<std::exception_ptr*>(e));
  } catch (const c10::IndexError& x) {
    return tell(x.what_without_backtrace(), TT_INDEX);
  } catch (const c10::ValueError& x) {
    return tell(x.what_without_backtrace(), TT_VALUE);
  } catch (const c10::TypeError& x) {
    return tell(x.what_without_backtrace(), TT_TYPE);
  } catch (const c10::NotImplementedError& x) {
    return tell(x.what_without_backtrace(), TT_NOT_IMPLEMENTED);
  } catch (const c10::LinAlgError& x) {
    return tell(x.what_without_backtrace(), TT_LIN_ALG);
  } catch (const c10::OutOfMemoryError& x) {
    return tell(x.what_without_backtrace(), TT_OUT_OF_MEMORY);
  } catch (const c10::Error& x) {
    return tell(x.what_without_backtrace(), TT_RUNTIME);
  } catch (const std::exception& x) {
    return tell(x.what(), TT_RUNTIME);
  } catch (...) {
    return tell("unknown exception", TT_RUNTIME);
  }
}

void ttc_set_pending(void* e, const char* context, size_t len) {
  const auto& original = *static_cast<std::exception_ptr*>(e);
  pending = context ? explain(original, std::string(context, len)) : original;
}

void ttc_set_pending_message(int32_t kind, const char* message, size_t len) {
  const std::string text(message, len);
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (kind == 2)
    pending = std::make_exception_ptr(python_error());
  else if (kind == 3)
    pending = std::make_exception_ptr(c10::IndexError(here, text));
  else if (kind == 1)
    pending = std::make_exception_ptr(c10::NotImplementedError(here, text));
  else
    pending = std::make_exception_ptr(c10::Error(here, text));
}
}
