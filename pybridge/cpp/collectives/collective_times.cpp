// Figures of collectives for the report: their number, bytes and times, by line of the program.
#include <torch/library.h>

#include <map>
#include <mutex>
#include <sstream>

#include "collectives/collective.h"

namespace tandem {

namespace {

struct Times {
  int64_t count = 0, bytes = 0;
  // Total time from the starts of collectives to their ends, and the part in which the executor waited for them.
  std::chrono::nanoseconds took{0}, waited{0};
};

struct Table {
  std::mutex mutex;
  std::map<std::string, Times> by_place;
};
Table& table() {
  static Table t;
  return t;
}

// Lines of tab-separated fields: place, count, bytes, nanoseconds, nanoseconds waited.
std::string collectives_as_text() {
  auto& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  std::ostringstream text;
  for (const auto& [place, times] : t.by_place)
    text << place << '\t' << times.count << '\t' << times.bytes << '\t' << times.took.count() << '\t'
         << times.waited.count() << '\n';
  return text.str();
}

void forget_collectives() {
  auto& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.by_place.clear();
}

}  // namespace

void count_collective(const Collective& collective, std::chrono::nanoseconds took) {
  auto& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  auto& times = t.by_place[collective.place()];
  times.count++;
  times.bytes += collective.bytes();
  times.took += took;
}

void count_wait(const Collective& collective, std::chrono::nanoseconds waited) {
  auto& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  t.by_place[collective.place()].waited += waited;
}

TORCH_LIBRARY_FRAGMENT(torch_tandem, m) {
  m.def("collectives() -> str", collectives_as_text);
  m.def("forget_collectives() -> ()", forget_collectives);
}

}  // namespace tandem
