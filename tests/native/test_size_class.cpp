// Which slabs hold so many bytes: core/size_class.
#include <algorithm>
#include <vector>

#include "core/size_class.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

std::vector<Bytes> slabs(Bytes total, const SlabSizes& sizes) {
  std::vector<Bytes> found;
  for (Bytes left = total; left > 0;) {
    found.push_back(sizes.bytes[sizes.choose(left, total)]);
    left -= std::min(left, found.back());
  }
  return found;
}

TEST("the default classes and counts are those of the v0 configuration") {
  const SizeClasses classes;
  CHECK(classes.bytes == (std::vector<Bytes>{1_MiB, 4_MiB, 16_MiB, 64_MiB, 256_MiB}));
  CHECK(classes.counts == (std::vector<std::uint32_t>{512, 2, 2, 2, 2}));
}

TEST("cells are halvings of the smallest class, of 4 KiB at least and 256 a slab at most") {
  const SlabSizes sizes{SizeClasses{}};
  CHECK_EQ(sizes.cells, 8);
  CHECK_EQ(sizes.bytes.front(), 4_KiB);
  CHECK_EQ(sizes.bytes[7], 512_KiB);
  CHECK_EQ(sizes.bytes[8], 1_MiB);
  CHECK_EQ(SlabSizes({{64_MiB}, {1}}).bytes.front(), 256_KiB);
  CHECK_EQ(SlabSizes({{4_KiB}, {1}}).cells, 0);
}

TEST("a storage takes the slabs it fills: 5 MiB are 4 and 1, never 16") {
  const SlabSizes sizes{SizeClasses{}};
  CHECK(slabs(5_MiB, sizes) == (std::vector<Bytes>{4_MiB, 1_MiB}));
  CHECK(slabs(4_MiB, sizes) == (std::vector<Bytes>{4_MiB}));
  CHECK(slabs(15_MiB, sizes) == (std::vector<Bytes>{16_MiB}));
  CHECK(slabs(900'000, sizes) == (std::vector<Bytes>{1_MiB}));  // one copy
  CHECK(slabs(4_MiB + 16_KiB, sizes) == (std::vector<Bytes>{4_MiB, 16_KiB}));
  CHECK(slabs(16_KiB, sizes) == (std::vector<Bytes>{16_KiB}));
  CHECK(slabs(600_MiB, sizes) == (std::vector<Bytes>{256_MiB, 256_MiB, 64_MiB, 64_MiB}));
}

TEST("a storage of up to 64 KiB is never divided") {
  const SlabSizes sizes{SizeClasses{}};
  for (Bytes bytes = 1; bytes <= 64_KiB; bytes += 511) {
    CHECK_EQ(slabs(bytes, sizes).size(), 1);
  }
}

TEST("less than 15 percent of a storage's slabs is empty, whatever the size and the classes") {
  for (const SizeClasses& classes :
       {SizeClasses{}, SizeClasses{{3_MiB, 10_MiB, 100_MiB}, {1, 1, 1}}, SizeClasses{{7_MiB}, {1}},
        SizeClasses{{64_KiB, 1_MiB}, {1, 1}}}) {
    const SlabSizes sizes(classes);
    const Bytes least = std::max<Bytes>(64_KiB, sizes.bytes.front() * 6) + 1;
    for (Bytes total = least; total < 1_GiB; total += total / 61 + 512) {
      Bytes all = 0;
      for (const Bytes slab : slabs(total, sizes)) {
        all += slab;
      }
      CHECK(all >= total);
      CHECK((all - total) * 100 < all * 15);
    }
  }
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
