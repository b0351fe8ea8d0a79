// Pages of torch's expandable segments: where it maps them, and holes that are made ahead.
#include <string>
#include <vector>

#include "core/expandable.hpp"
#include "core/holes_ahead.hpp"
#include "native/test.hpp"

namespace stagehand::core::test {
namespace {

constexpr Address kBase = 1_GiB;
constexpr Bytes kPage = CacheMap::kPage;

// One segment's stretches from a text, a page each: a block (m), a hole (.), nothing mapped (_).
std::vector<CacheMap::Stretch> stretches_of(const std::string& text) {
  std::vector<CacheMap::Stretch> all;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      CacheMap::Stretch one;
      one.address = kBase + i * kPage;
      one.bytes = kPage;
      one.hole = text[i] == '.';
      one.of_owner = one.by_pages = true;
      all.push_back(one);
    }
  }
  return all;
}

// "pages", with a + where they lie behind the last one.
std::string growth(const std::string& text, Bytes request, std::vector<Address> departing = {}) {
  const PageGrowth found = growth_of(stretches_of(text), departing, request);
  return std::to_string(found.bytes / kPage) + (found.at_end ? "+" : "");
}

TEST("torch maps what a request lacks at the lowest place that holds it") {
  CHECK_EQ(growth("mm", 3 * kPage), "3+");
  CHECK_EQ(growth("mm.", 3 * kPage), "2+");
  CHECK_EQ(growth("m._m", 2 * kPage), "1");
  CHECK_EQ(growth("m_m", 2 * kPage), "2+");
  CHECK_EQ(growth("m_.m__m", 2 * kPage), "1");
  CHECK_EQ(growth("m._m", kPage + 1), "1");
}

TEST("blocks that are about to go count as free where torch would map") {
  CHECK_EQ(growth("mm", 2 * kPage, {kBase + kPage}), "1+");
  CHECK_EQ(growth("mm_m", 2 * kPage, {kBase + kPage}), "1");
}

TEST("nothing is mapped where a hole is there, or where the owner has no pages") {
  CHECK_EQ(growth("m..m", 2 * kPage), "0");
  CHECK_EQ(growth("", kPage), "0");
}

// The place at which one is wanted; 0 for none.
std::size_t wanted(const HolesAhead& holes, std::uint64_t plan, std::size_t now,
                   std::size_t from = 0) {
  bool soon = false;
  const HolesAhead::Hole* hole = holes.wanted(plan, now, from, &soon);
  return hole != nullptr && soon ? hole->place : 0;
}

TEST("a hole that was lacking is wanted earlier each time") {
  HolesAhead holes;
  CHECK(holes.empty());
  holes.lacked(1, {20, kPage, {}}, 1);
  CHECK_EQ(wanted(holes, 1, 18), 0);
  CHECK_EQ(wanted(holes, 1, 19), 20);
  holes.lacked(1, {20, kPage, {}}, 1);
  CHECK_EQ(wanted(holes, 1, 17), 20);
  CHECK_EQ(wanted(holes, 2, 19), 0);
  CHECK_EQ(wanted(holes, 1, 21, 21), 0);
}

TEST("a hole that waited for another request, and was lacking, comes before that from then on") {
  HolesAhead holes;
  const HolesAhead::Hole hole{20, kPage, {}};
  const auto first = [&](std::size_t now) {
    bool soon = false;
    const HolesAhead::Hole* found = holes.wanted(1, now, 0, &soon);
    return found != nullptr && found->first;
  };
  holes.lacked(1, hole, 1);
  holes.lacked(1, hole, 2);
  holes.postponed(1, hole, 3);
  holes.postponed(1, hole, 0);  // and made in the same step
  holes.postponed(1, hole, 4);
  holes.lacked(1, hole, 5);  // in another one: for another reason
  CHECK(!first(19));
  CHECK_EQ(wanted(holes, 1, 15), 20);
  CHECK_EQ(wanted(holes, 1, 14), 0);
  holes.postponed(1, hole, 6);
  holes.lacked(1, hole, 6);
  CHECK(first(19));
  CHECK_EQ(wanted(holes, 1, 14), 0);  // no earlier than it was: that is not why it lacked
  holes.lacked(1, hole, 7);
  CHECK_EQ(wanted(holes, 1, 13), 20);
}

TEST("a hole that is lacking however early it is made is given up") {
  HolesAhead holes;
  for (int i = 0; i < 40; ++i) {
    holes.lacked(1, {200, kPage, {}}, 1);
  }
  CHECK_EQ(wanted(holes, 1, 199), 0);
}

TEST("what one plan's steps lacked is not set aside in another's") {
  HolesAhead holes;
  holes.lacked(1, {20, kPage, {}}, 1);
  holes.lacked(1, {20, kPage, {}}, 2);
  CHECK_EQ(wanted(holes, 2, 17), 0);
  CHECK_EQ(wanted(holes, 2, 19), 0);
  holes.lacked(2, {20, kPage, {}}, 3);
  CHECK_EQ(wanted(holes, 2, 18), 0);  // as the first time
  CHECK_EQ(wanted(holes, 2, 19), 20);
  CHECK_EQ(wanted(holes, 1, 17), 20);
}

TEST("where nothing has to leave for it, a hole is taken some places before") {
  HolesAhead holes;
  holes.lacked(1, {20, kPage, {}}, 1);
  bool soon = true;
  CHECK(holes.wanted(1, 15, 0, &soon) != nullptr);
  CHECK(!soon);
  CHECK(holes.wanted(1, 14, 0, &soon) == nullptr);
}

}  // namespace
}  // namespace stagehand::core::test

STAGEHAND_TEST_MAIN()
