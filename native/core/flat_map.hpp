// A map from addresses to small values, in one array. What is asked at every allocation touches one
// cache line there; a node of std::unordered_map is a miss for each step to it.
//
// Linear probing, at most half full. What is erased is filled from behind, so nothing marks where
// something was (Knuth, The Art of Computer Programming 3, 6.4, algorithm R). It grows as it has
// to, and is halved where it is cleared after it had little. 0 is no key: nothing is put under it.
// What `find` returns holds until the next `put` or `erase`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.hpp"

namespace stagehand::core {

template <class Value>
class FlatMap {
  static_assert(std::is_trivially_copyable_v<Value>);

 public:
  using Key = std::uintptr_t;

  const Value* find(Key key) const {
    const std::size_t at = look_for(key);
    return at != kNowhere ? &slots_[at].value : nullptr;
  }
  // In the place of what was there. std::bad_alloc: nothing has changed.
  void put(Key key, const Value& value) {
    SH_CHECK(key != 0);
    if (key == 0) {
      return;
    }
    if (2 * (size_ + 1) > slots_.size()) {
      grow();
    }
    std::size_t at = home_of(key);
    while (slots_[at].key != 0 && slots_[at].key != key) {
      at = after(at);
    }
    size_ += slots_[at].key == 0 ? 1 : 0;
    slots_[at] = {key, value};
    most_ = std::max(most_, size_);
  }
  // False: it was not there.
  bool erase(Key key) {
    std::size_t hole = look_for(key);
    if (hole == kNowhere) {
      return false;
    }
    for (std::size_t at = after(hole); slots_[at].key != 0; at = after(at)) {
      const std::size_t way = at - home_of(slots_[at].key);  // modulo the size: so is what follows
      if ((way & mask()) >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = {};
    --size_;
    return true;
  }
  // Takes as long as it is large.
  void clear() {
    if (slots_.size() > kSpare * std::max(most_, kLeast)) {
      --bits_;
      slots_.resize(slots_.size() / 2);
    }
    std::fill(slots_.begin(), slots_.end(), Slot{});
    size_ = most_ = 0;
  }
  std::size_t size() const { return size_; }
  // In no order.
  template <class F>
  void for_each(F&& call) const {
    for (const Slot& one : slots_) {
      if (one.key != 0) {
        call(one.key, one.value);
      }
    }
  }

 private:
  struct Slot {
    Key key = 0;
    Value value{};
  };
  static constexpr std::size_t kNowhere = ~std::size_t{0};
  static constexpr unsigned kLeastBits = 6;
  static constexpr std::size_t kLeast = std::size_t{1} << kLeastBits;
  static constexpr std::size_t kSpare = 8;

  std::size_t mask() const { return slots_.size() - 1; }
  std::size_t after(std::size_t at) const { return (at + 1) & mask(); }
  // Blocks lie at multiples of 512 bytes and more: the product's upper bits are of all of the
  // key's.
  std::size_t home_of(Key key) const {
    constexpr std::uint64_t kSpread = 0x9E3779B97F4A7C15U;
    return static_cast<std::size_t>(key * kSpread >> (64U - bits_));
  }
  std::size_t look_for(Key key) const {
    if (slots_.empty() || key == 0) {
      return kNowhere;
    }
    std::size_t at = home_of(key);
    while (slots_[at].key != key) {
      if (slots_[at].key == 0) {
        return kNowhere;
      }
      at = after(at);
    }
    return at;
  }
  void grow() {
    const unsigned bits = slots_.empty() ? kLeastBits : bits_ + 1;
    std::vector<Slot> before(std::size_t{1} << bits);
    before.swap(slots_);
    bits_ = bits;
    for (const Slot& one : before) {
      if (one.key != 0) {
        std::size_t at = home_of(one.key);
        while (slots_[at].key != 0) {
          at = after(at);
        }
        slots_[at] = one;
      }
    }
  }

  std::vector<Slot> slots_;  // 0, or a power of two of them
  unsigned bits_ = 0;        // that power
  std::size_t size_ = 0;
  std::size_t most_ = 0;  // at once, since it was cleared
};

}  // namespace stagehand::core
