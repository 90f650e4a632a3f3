#include "calls/decode.h"

#include <ATen/core/List.h>
#include <c10/core/Storage.h>

#include <cstdint>

#include "calls/execute.h"
#include "device/storage.h"

namespace tandem {

c10::IValue Decoder::next() {
  const TtOut& out = outs_.outs[at_++];
  switch (out.kind) {
    case TT_OUT_HOST: return std::move(host_values()[out.input]);
    case TT_OUT_LIST: {
      c10::List<at::Tensor> list;
      list.reserve(out.input);
      for (uint32_t i = 0; i < out.input; i++) list.push_back(next_tensor());
      return list;
    }
    default: return tensor(out);
  }
}

at::Tensor Decoder::tensor(const TtOut& out) {
  switch (out.kind) {
    case TT_OUT_SAME: return encoder_.input(out.input);
    case TT_OUT_ALIAS: return window(encoder_.input(out.input).storage(), out);
    case TT_OUT_NEW: return window(c10::Storage(storage(out)), out);
    default: return at::Tensor();
  }
}

c10::intrusive_ptr<c10::StorageImpl> Decoder::storage(const TtOut& out) {
  for (const auto& [context, impl] : made_)
    if (context == out.storage) return impl;
  made_.emplace_back(out.storage, adopt_storage(out.storage, out.address, out.nbytes, encoder_.device()));
  return made_.back().second;
}

}  // namespace tandem
