#include "calls/library.h"

#include <memory>
#include <unordered_map>

namespace tandem {

torch::Library& library(c10::DispatchKey key) {
  static std::unordered_map<int, std::unique_ptr<torch::Library>> libraries;
  auto& lib = libraries[static_cast<int>(key)];
  if (!lib) lib = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  return *lib;
}

}  // namespace tandem
