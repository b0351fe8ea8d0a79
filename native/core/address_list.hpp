// Stretches of memory in the order of their addresses, in arrays. What has an address is found by
// halving one array of addresses; a tree's nodes would each be a miss. Putting one in moves all
// behind it: for what comes and goes with calls to the driver, which take far longer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/types.hpp"

namespace stagehand::core {

// `One` has a `base` and `bytes`; none of them overlap. Pointers hold until the next change.
template <class One>
class AddressList {
 public:
  // The one that the address is in; null for none.
  One* around(Address address) {
    const std::size_t end = bases_up_to(address);
    One* one = end > 0 ? &all_[end - 1] : nullptr;
    return one != nullptr && address - one->base < one->bytes ? one : nullptr;
  }
  // The one that begins there.
  One* at(Address base) {
    One* one = around(base);
    return one != nullptr && one->base == base ? one : nullptr;
  }
  // In the place of the one that begins there.
  void put(const One& one) {
    const std::size_t end = bases_up_to(one.base);
    if (end > 0 && bases_[end - 1] == one.base) {
      all_[end - 1] = one;
      return;
    }
    if (bases_.size() == bases_.capacity()) {
      bases_.reserve(2 * bases_.size() + 16);  // so that the second of the two cannot fail
    }
    all_.insert(place(all_, end), one);
    bases_.insert(place(bases_, end), one.base);
  }
  void erase(const One* one) {
    const auto index = static_cast<std::size_t>(one - all_.data());
    all_.erase(place(all_, index));
    bases_.erase(place(bases_, index));
  }
  void clear() {
    all_.clear();
    bases_.clear();
  }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  auto rbegin() const { return all_.rbegin(); }
  auto rend() const { return all_.rend(); }

 private:
  // How many begin at the address, or before it. Without a branch that nobody could foretell.
  std::size_t bases_up_to(Address address) const {
    if (bases_.empty() || bases_.front() > address) {
      return 0;
    }
    std::size_t at = 0;
    for (std::size_t count = bases_.size(); count > 1;) {
      const std::size_t half = count / 2;
      at += bases_[at + half] <= address ? half : 0;
      count -= half;
    }
    return at + 1;
  }
  template <class T>
  static auto place(std::vector<T>& all, std::size_t index) {
    return all.begin() + static_cast<std::ptrdiff_t>(index);
  }

  std::vector<Address> bases_;
  std::vector<One> all_;
};

}  // namespace stagehand::core
