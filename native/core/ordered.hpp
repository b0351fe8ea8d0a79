// An ordered set of objects that carry their own links: nothing is allocated, and an object is
// taken out without being searched for. A treap (Aragon and Seidel, 1989): a search tree by key, a
// heap by numbers drawn at random (the same in every run), so that its depth is logarithmic.
#pragma once

#include <cstdint>

namespace stagehand::core {

template <class T>
struct OrderedHook {
  T* parent = nullptr;
  T* left = nullptr;
  T* right = nullptr;
  std::uint32_t draw = 0;
  bool linked = false;
};

// `hook` is the member that carries the links; `Less` a strict order in which no two are equal.
// What it looks at does not change while an object is in the set.
template <class T, OrderedHook<T> T::* hook, class Less>
class Ordered {
 public:
  bool empty() const { return root_ == nullptr; }
  static bool has(const T& one) { return (one.*hook).linked; }

  void insert(T& one) {
    T* parent = nullptr;
    bool left = false;
    for (T* at = root_; at != nullptr; at = left ? (at->*hook).left : (at->*hook).right) {
      parent = at;
      left = Less{}(one, *at);
    }
    draw_ ^= draw_ << 13;
    draw_ ^= draw_ >> 17;
    draw_ ^= draw_ << 5;
    one.*hook = {parent, nullptr, nullptr, draw_, true};
    (parent == nullptr ? root_ : left ? (parent->*hook).left : (parent->*hook).right) = &one;
    while (parent != nullptr && (parent->*hook).draw < (one.*hook).draw) {
      rise(one);
      parent = (one.*hook).parent;
    }
  }

  void remove(T& one) {
    auto& links = one.*hook;
    while (links.left != nullptr || links.right != nullptr) {
      T* left = links.left;
      T* right = links.right;
      rise(right == nullptr || (left != nullptr && (left->*hook).draw > (right->*hook).draw)
               ? *left
               : *right);
    }
    replace(one, nullptr);
    links = {};
  }

  T* first() const {
    T* at = root_;
    while (at != nullptr && (at->*hook).left != nullptr) {
      at = (at->*hook).left;
    }
    return at;
  }
  T* last() const {
    T* at = root_;
    while (at != nullptr && (at->*hook).right != nullptr) {
      at = (at->*hook).right;
    }
    return at;
  }
  static T* next(T& one) {
    if (T* at = (one.*hook).right; at != nullptr) {
      while ((at->*hook).left != nullptr) {
        at = (at->*hook).left;
      }
      return at;
    }
    T* at = &one;
    T* up = (at->*hook).parent;
    while (up != nullptr && (up->*hook).right == at) {
      at = up;
      up = (at->*hook).parent;
    }
    return up;
  }
  // The first for which `holds` is true, where it is false for all before and true for all after.
  template <class Holds>
  T* first_that(Holds holds) const {
    T* found = nullptr;
    for (T* at = root_; at != nullptr;) {
      if (holds(*at)) {
        found = at;
        at = (at->*hook).left;
      } else {
        at = (at->*hook).right;
      }
    }
    return found;
  }

 private:
  // What hangs where `one` hangs from here on.
  void replace(T& one, T* other) {
    T* parent = (one.*hook).parent;
    T*& link = parent == nullptr              ? root_
               : (parent->*hook).left == &one ? (parent->*hook).left
                                              : (parent->*hook).right;
    link = other;
    if (other != nullptr) {
      (other->*hook).parent = parent;
    }
  }
  // One step up, above its parent.
  void rise(T& one) {
    T& parent = *(one.*hook).parent;
    replace(parent, &one);
    const bool was_left = (parent.*hook).left == &one;
    T*& inner = was_left ? (one.*hook).right : (one.*hook).left;
    (was_left ? (parent.*hook).left : (parent.*hook).right) = inner;
    if (inner != nullptr) {
      (inner->*hook).parent = &parent;
    }
    inner = &parent;
    (parent.*hook).parent = &one;
  }

  T* root_ = nullptr;
  std::uint32_t draw_ = 0x9E3779B9;
};

}  // namespace stagehand::core
