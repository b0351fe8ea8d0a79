// Tensors over what a record holds, exactly as the saved ones were. With the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <utility>
#include <vector>

#include "core/runtime.hpp"
#include "entry/torch_api.hpp"
#include "entry/twins.hpp"

namespace stagehand::entry {

namespace nb = nanobind;

class Handle;

// What a tensor is beside its memory.
struct Geometry {
  static constexpr std::int32_t kInline = 8;

  void set(const core::SeenTensor& tensor);
  core::Bytes item_bytes() const { return (core::Bytes{dtype.bits} * dtype.lanes + 7) / 8; }
  // From the first to behind the last element.
  core::Bytes extent() const;
  const std::int64_t* shape() const { return ndim <= kInline ? near_.data() : far_.data(); }
  const std::int64_t* strides() const { return shape() + ndim; }

  dlpack::Device device{};
  dlpack::DataType dtype{};
  std::int32_t ndim = 0;

 private:
  std::array<std::int64_t, 2 * kInline> near_{};
  std::vector<std::int64_t> far_;
};

// Over a storage of torch's, which torch holds from then on; the engine sees that by itself.
nb::object make_view(const Handle& handle, const core::Unpacked& unpacked, driver::Stream consumer);
// Over the block, and one more reference to its storage.
std::pair<nb::object, SharedStorage> make_alias(const Handle& handle,
                                                const core::Unpacked& unpacked);
// The same by DLPack, without that.
nb::object make_alias_by_dlpack(const Handle& handle, const core::Unpacked& unpacked);

}  // namespace stagehand::entry
