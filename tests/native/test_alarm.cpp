// The alarm of a quiet step, and where it looks at what is in use.
#include "core/alarm.hpp"
#include "core/cache_map.hpp"
#include "native/core_rig.hpp"

namespace stagehand::core::test {
namespace {

int told = 0;       // the device
bool heard = true;  // by whoever is told

bool tell(int device) noexcept {
  told += device;
  return heard;
}

TEST("an alarm rings above its mark, once, and once more as long as nobody could be told") {
  told = 0;
  Alarm alarm(10, &tell, 1);
  alarm.look(10);
  CHECK(!alarm.rang());
  heard = false;
  alarm.look(11);
  alarm.look(12);
  CHECK_EQ(told, 2);
  heard = true;
  alarm.look(11);
  alarm.look(100);
  CHECK_EQ(told, 3);
  CHECK(alarm.rang());
  Alarm silent(10, nullptr, 1);
  silent.look(11);
  CHECK(silent.rang());
  CHECK_EQ(told, 3);
}

TEST("the process allocator's alarm looks at each request, and rings before the next one") {
  told = 0;
  CoreRig rig({.memory = 64_MiB, .classes = {{1_MiB, 4_MiB}, {2, 1}}, .host_limit = 4_MiB});
  const auto stream = rig.stream();
  rig.budget(64_MiB, 64_MiB);
  rig.runtime->set_alarm({8_MiB, &tell, 1});
  const Address a = rig.allocate(4_MiB, stream);
  const Address b = rig.allocate(4_MiB, stream);
  CHECK_EQ(told, 0);
  CHECK(!rig.runtime->read_alarm().rang);
  CHECK_EQ(rig.runtime->read_alarm().in_use, 8_MiB);
  const Address c = rig.allocate(4_MiB, stream);
  CHECK_EQ(told, 1);
  for (const Address one : {a, b, c}) {
    CHECK(rig.runtime->free(one));
  }
  CHECK(rig.runtime->read_alarm().rang);
  CHECK_EQ(rig.runtime->read_alarm().in_use, 0);
  CHECK_EQ(rig.runtime->read_alarm().pressed, 0);
  CHECK(!rig.runtime->read_alarm().shown);
  CHECK_EQ(rig.runtime->available(), 64_MiB);
}

TEST("the alarm of torch's cache looks at each block that is handed out") {
  told = 0;
  CacheMap map;
  map.set_alarm({8_MiB, &tell, 1});
  const auto event = [](CacheEvent::Kind kind, Bytes at, Bytes bytes) {
    return CacheEvent{kind, 0, 1_GiB + at, bytes, nullptr, {0, 0}};
  };
  map.apply(event(CacheEvent::segment, 0, 20_MiB));
  map.apply(event(CacheEvent::alloc, 0, 8_MiB));
  CHECK(!map.rang());
  map.apply(event(CacheEvent::alloc, 8_MiB, 2_MiB));
  map.apply(event(CacheEvent::alloc, 10_MiB, 2_MiB));
  CHECK(map.rang());
  CHECK_EQ(told, 1);
}

}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
