// What is looked up by an address is what a std::map would find, whatever came and went before.
#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "core/address_list.hpp"
#include "core/flat_map.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr Address kUnit = 512;

template <class F>
void with_seeds(std::uint64_t all, F&& call) {
  for (std::uint64_t seed = 0; seed < stagehand::test::seeds(all); ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    call(random);
  }
}

TEST("a flat map has what was put in and not erased, also where keys crowd") {
  with_seeds(12, [](std::mt19937& random) {
    FlatMap<int> map;
    std::map<Address, int> expected;
    for (int i = 0; i < 4000; ++i) {
      const Address key = (1 + random() % 300) * kUnit;  // some hundred, so that they come again
      if (random() % 2 == 0) {
        map.put(key, i);
        expected[key] = i;
      } else {
        CHECK_EQ(map.erase(key), expected.erase(key) == 1);
      }
      CHECK_EQ(map.size(), expected.size());
    }
    std::map<Address, int> all;
    map.for_each([&](Address key, int value) { all[key] = value; });
    CHECK(all == expected);
    for (Address key = kUnit; key <= 301 * kUnit; key += kUnit) {
      const int* found = map.find(key);
      const auto wanted = expected.find(key);
      CHECK_EQ(found != nullptr, wanted != expected.end());
      CHECK(found == nullptr || *found == wanted->second);
    }
  });
}

TEST("a flat map that was cleared has nothing, and takes all that it had") {
  FlatMap<int> map;
  CHECK(map.find(kUnit) == nullptr);
  CHECK(!map.erase(kUnit));
  for (int round = 0; round < 2; ++round) {
    for (Address i = 1; i <= 3000; ++i) {
      map.put(i * kUnit, static_cast<int>(i));
    }
    CHECK_EQ(map.size(), 3000U);
    map.clear();
    CHECK_EQ(map.size(), 0U);
    CHECK(map.find(kUnit) == nullptr);
  }
  for (int round = 0; round < 6; ++round) {  // with few it gives memory up, and finds them still
    for (Address i = 1; i <= 20; ++i) {
      map.put(i * kUnit, round);
    }
    CHECK_EQ(map.size(), 20U);
    for (Address i = 1; i <= 20; ++i) {
      CHECK(map.find(i * kUnit) != nullptr && *map.find(i * kUnit) == round);
    }
    map.clear();
    CHECK(map.find(kUnit) == nullptr);
  }
}

struct Stretch {
  Address base = 0;
  Bytes bytes = 0;
  int number = 0;
};

TEST("an address list finds the stretch that an address is in, and none between them") {
  with_seeds(12, [](std::mt19937& random) {
    AddressList<Stretch> list;
    std::map<Address, Stretch> expected;
    for (int i = 0; i < 600; ++i) {
      const Address base = (1 + random() % 80) * 4 * kUnit;
      if (random() % 3 != 0) {
        const Stretch one{base, (1 + random() % 4) * kUnit, i};
        list.put(one);
        expected[base] = one;
      } else if (const Stretch* one = list.at(base); one != nullptr) {
        list.erase(one);
        CHECK_EQ(expected.erase(base), 1U);
      } else {
        CHECK(!expected.contains(base));
      }
    }
    for (Address address = 0; address < 84 * 4 * kUnit; address += kUnit / 2) {
      const auto after = expected.upper_bound(address);
      const Stretch* wanted = after != expected.begin() ? &std::prev(after)->second : nullptr;
      if (wanted != nullptr && address - wanted->base >= wanted->bytes) {
        wanted = nullptr;
      }
      const Stretch* found = list.around(address);
      CHECK_EQ(found != nullptr, wanted != nullptr);
      CHECK(found == nullptr || found->number == wanted->number);
      CHECK_EQ(list.at(address) != nullptr, expected.contains(address));
    }
    CHECK(std::is_sorted(list.begin(), list.end(),
                         [](const Stretch& a, const Stretch& b) { return a.base < b.base; }));
  });
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
