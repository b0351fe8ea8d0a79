// What torch calls: the functions whose addresses `allocator()` hands to
// torch._C._cuda_customAllocator. Any thread, with or without the GIL; none takes it (rule T1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace stagehand::entry {

// Name and address of every entry point.
std::vector<std::pair<std::string, std::uintptr_t>> entry_points();

}  // namespace stagehand::entry
