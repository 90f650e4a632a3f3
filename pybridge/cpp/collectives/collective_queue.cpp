// Queues of the host's backends. Each group has a thread that runs the group's collectives one after another, because
// all ranks have to make the calls in the same order. Before each collective, the ranks exchange a number that tells
// whether they make the same call: otherwise Gloo would wait, or exchange the wrong bytes. Calls between two ranks go
// to a second queue. They have been started before they arrive there, and the queue only waits for their ends.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "boundary/shim.h"
#include "collectives/collective.h"

namespace tandem {

namespace {

using namespace std::chrono_literals;

// Time after which a thread without work ends.
constexpr auto kIdle = 2s;
// Time after which a rank that waits for the other ranks publishes its call.
constexpr auto kPatience = 2s;
// Time that the other ranks have to publish their calls, once a rank has found that a collective fails.
constexpr auto kExplaining = 3s;
// Number that a rank sends in place of the call's number if it cannot make the call.
constexpr int64_t kRefused = std::numeric_limits<int64_t>::min();

// The calls of one group to the host's backend, in order.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  void push(const std::shared_ptr<Collective>& collective);
  // The error of the first collective that failed, or null.
  std::exception_ptr error();

 private:
  void serve();
  void run(Collective& collective);
  void compare(const Collective& collective);

  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<std::shared_ptr<Collective>> waiting_;
  bool is_served_ = false;
  std::exception_ptr error_;
  // Number of collectives that have been compared.
  uint64_t number_ = 0;
};

std::string message_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

// The calls that the ranks of a group publish in the group's store. Its functions throw an error if the store is gone.
class Calls {
 public:
  Calls(const Collective& collective, uint64_t number)
      : collective_(collective),
        store_(c10::make_intrusive<c10d::PrefixStore>("tandem/" + std::to_string(number),
                                                      collective.group()->getStore()->clone())) {}

  // Publishes this rank's call, and the ops that the rank has issued before it.
  void publish() {
    auto text = said();
    std::array<char, 512> line{};
    for (const auto op : collective_.before())
      text += '\n' + std::string(line.data(), tt_describe_issued(op, line.data(), line.size()));
    store_->set(std::to_string(collective_.group()->getRank()), text);
  }
  // Returns a line for each rank, and the first op in which the ranks differ. Waits a moment for the other ranks to
  // publish.
  std::string describe() {
    const auto until = std::chrono::steady_clock::now() + kExplaining;
    std::string text, absent, difference;
    std::vector<std::string> first;
    for (int rank = 0; rank < collective_.group()->getSize(); rank++) {
      const auto key = std::to_string(rank);
      while (!store_->check({key}) && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(20ms);
      if (!store_->check({key})) {
        absent += (absent.empty() ? "" : ", ") + key;
        continue;
      }
      const auto published = store_->get(key);
      auto lines = lines_of(std::string(published.begin(), published.end()));
      text += "\n  rank " + key + ": " + lines[0];
      if (first.empty()) {
        first = std::move(lines);
        first_rank_ = key;
      } else if (difference.empty()) {
        difference = first_difference(first, lines, key);
      }
    }
    if (!absent.empty()) text += "\n  has ended, or has not come so far: rank " + absent;
    return text + difference;
  }

 private:
  std::string said() const;
  static std::vector<std::string> lines_of(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> lines;
    for (std::string line; std::getline(stream, line);) lines.push_back(std::move(line));
    return lines;
  }

  // Compares the ops since the previous collective, which follow each rank's first line.
  std::string first_difference(const std::vector<std::string>& one, const std::vector<std::string>& other,
                               const std::string& rank) const {
    const auto end = std::min(one.size(), other.size());
    size_t i = 1;
    while (i < end && one[i] == other[i]) i++;
    if (i == one.size() && i == other.size()) return "";
    const auto at = [&](const std::vector<std::string>& ops) { return i < ops.size() ? ops[i] : "the collective"; };
    return "\nThe first operator in which they differ since the collective before:\n  rank " + first_rank_ + ": " +
           at(one) + "\n  rank " + rank + ": " + at(other);
  }

  const Collective& collective_;
  c10::intrusive_ptr<c10d::PrefixStore> store_;
  std::string first_rank_;
};

// The call in one line or, if this rank cannot make the call, the reason.
std::string Calls::said() const {
  if (!collective_.refusal()) return collective_.description();
  try {
    std::rethrow_exception(collective_.refusal());
  } catch (const std::exception& error) {
    auto text = message_of(error);
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text.find(collective_.description()) == 0 ? text : collective_.description() + " failed: " + text;
  }
}

std::string explain(const Collective& collective, uint64_t number) {
  try {
    Calls calls(collective, number);
    calls.publish();
    return calls.describe();
  } catch (const std::exception&) {
    return "\n  the other ranks cannot be asked: the group's store, in the process of rank 0, is gone";
  }
}

void Queue::push(const std::shared_ptr<Collective>& collective) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(collective);
  pushed_.notify_one();
  // A thread that waits for another rank must not keep the process from ending.
  if (!std::exchange(is_served_, true)) std::thread([self = shared_from_this()] { self->serve(); }).detach();
}

std::exception_ptr Queue::error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Queue::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (pushed_.wait_for(lock, kIdle, [&] { return !waiting_.empty(); })) {
    auto collective = std::move(waiting_.front());
    waiting_.pop_front();
    auto error = error_;
    lock.unlock();
    if (!error) {
      try {
        run(*collective);
      } catch (...) {
        error = std::current_exception();
      }
    }
    collective->finish(error);
    collective.reset();
    lock.lock();
    if (!error_) error_ = error;
  }
  is_served_ = false;
}

void Queue::run(Collective& collective) {
  if (const auto& refusal = collective.refusal()) {
    try {
      if (!collective.is_point_to_point()) compare(collective);
    } catch (const std::exception&) {
      // The other ranks have been told, or are gone. On this rank, the reason is the error.
    }
    std::rethrow_exception(refusal);
  }
  try {
    if (!collective.is_point_to_point()) compare(collective);
    const auto work = collective.is_point_to_point() ? collective.work : collective.call();
    if (work) work->wait(std::max(collective.timeout(), std::chrono::milliseconds(kNoTimeout)));
    collective.complete();
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistBackendError, collective.description() + " failed: " + message_of(error));
  }
}

// Throws an error if the ranks of the group do not make the same call.
void Queue::compare(const Collective& collective) {
  number_++;
  const auto size = collective.group()->getSize();
  if (size == 1) return;
  const auto fingerprint = collective.refusal() ? kRefused : collective.fingerprint();
  std::vector<at::Tensor> mine{at::full({1}, fingerprint, at::kLong)}, each;
  for (int rank = 0; rank < size; rank++) each.push_back(at::empty({1}, at::kLong));
  std::vector<std::vector<at::Tensor>> all{each};
  c10d::AllgatherOptions options;
  options.timeout = collective.timeout();
  try {
    // The reason is published before the exchange, because the process may end after it.
    if (collective.refusal()) Calls(collective, number_).publish();
    const auto work = collective.backend()->allgather(all, mine, options);
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!work->isCompleted() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(20us);
    if (!work->isCompleted()) Calls(collective, number_).publish();
    work->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, message_of(error), explain(collective, number_));
  }
  bool differs = false, is_refused = false;
  for (const auto& other : each) {
    differs |= other.item<int64_t>() != fingerprint;
    is_refused |= other.item<int64_t>() == kRefused;
  }
  TORCH_CHECK(!differs, is_refused ? "not all ranks can call it" : "the ranks call different collectives",
              explain(collective, number_));
}

// The two queues of a backend: for collectives, and for calls between two ranks.
struct Queues {
  c10::weak_intrusive_ptr<c10d::Backend> backend;
  std::shared_ptr<Queue> together = std::make_shared<Queue>(), between_two = std::make_shared<Queue>();
};

Queue& queue_of(const Collective& collective) {
  static std::mutex mutex;
  static std::map<const c10d::Backend*, Queues> all;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = all.begin(); it != all.end();) it = it->second.backend.expired() ? all.erase(it) : std::next(it);
  const auto& backend = collective.backend();
  const auto& queues =
      all.try_emplace(backend.get(), Queues{c10::weak_intrusive_ptr<c10d::Backend>(backend)}).first->second;
  return collective.is_point_to_point() ? *queues.between_two : *queues.together;
}

}  // namespace

void enqueue(const std::shared_ptr<Collective>& collective) { queue_of(*collective).push(collective); }

void check_group(const Collective& collective) {
  if (const auto error = queue_of(collective).error()) std::rethrow_exception(error);
}

}  // namespace tandem
