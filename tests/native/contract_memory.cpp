// The contract, part one: memory and what is in it.
#include "native/contract_suite.hpp"

namespace stagehand::contract {

namespace {

void copies_round_trip(Suite& suite) {
  Block block(suite, suite.granule);
  Slab in(suite, suite.granule);
  Slab out(suite, suite.granule);
  in.number(suite.granule, 1);
  OwnedStream stream(suite);
  OK(suite, memcpy_htod_async, block.address, in.data(), block.bytes, stream);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, block.bytes, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(same(in, out, block.bytes), "the bytes did not come back");
  OK(suite, memcpy_dtoh_async, out.data() + 1, block.address + 5, 1000, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(std::memcmp(out.data() + 1, in.data() + 5, 1000) == 0,
               "bytes at odd addresses did not come back");
}

void neighbours_read_as_one_range(Suite& suite) {
  const driver::AllocationProp prop;
  const driver::AccessDesc access;
  const std::size_t granule = suite.granule;
  DevicePtr address = 0;
  PhysicalHandle handles[2] = {};
  OK(suite, address_reserve, &address, 2 * granule, 0, 0, 0);
  for (std::size_t i = 0; i < 2; ++i) {
    OK(suite, mem_create, &handles[i], granule, &prop, 0);
    OK(suite, mem_map, address + i * granule, granule, 0, handles[i], 0);
  }
  OK(suite, mem_set_access, address, 2 * granule, &access, 1);
  {
    Slab in(suite, kPage);
    Slab out(suite, kPage);
    in.number(kPage, 3);
    OwnedStream stream(suite);
    const DevicePtr seam = address + granule - kPage / 2;
    OK(suite, memcpy_htod_async, seam, in.data(), kPage, stream);
    OK(suite, memcpy_dtoh_async, out.data(), seam, kPage, stream);
    OK(suite, stream_synchronize, stream);
    suite.expect(same(in, out, kPage), "a copy over the seam of two mappings lost bytes");
  }
  OK(suite, mem_unmap, address, 2 * granule);
  for (const PhysicalHandle handle : handles) {
    OK(suite, mem_release, handle);
  }
  OK(suite, address_free, address, 2 * granule);
}

void aliases_share_bytes(Suite& suite) {
  Block block(suite, suite.granule);
  DevicePtr alias = 0;
  OK(suite, address_reserve, &alias, block.bytes, 0, 0, 0);
  block.map(alias);
  {
    Slab in(suite, kPage);
    Slab out(suite, kPage);
    in.number(kPage, 9);
    OwnedStream stream(suite);
    OK(suite, memcpy_htod_async, block.address, in.data(), kPage, stream);
    OK(suite, memset_d8_async, alias, 0x5A, 16, stream);
    OK(suite, memcpy_dtoh_async, out.data(), block.address, kPage, stream);
    OK(suite, stream_synchronize, stream);
    suite.expect(
        all(out.data(), 16, 0x5A) && std::memcmp(out.data() + 16, in.data() + 16, kPage - 16) == 0,
        "two addresses of one handle did not show the same bytes");
  }
  OK(suite, mem_unmap, alias, block.bytes);
  OK(suite, address_free, alias, block.bytes);
}

void memory_moves_to_another_address(Suite& suite) {
  Block block(suite, suite.granule);
  Slab in(suite, kPage);
  Slab out(suite, kPage);
  in.number(kPage, 4);
  OwnedStream stream(suite);
  OK(suite, memcpy_htod_async, block.address, in.data(), kPage, stream);
  OK(suite, stream_synchronize, stream);
  OK(suite, mem_unmap, block.address, block.bytes);
  DevicePtr elsewhere = 0;
  OK(suite, address_reserve, &elsewhere, block.bytes, 0, 0, 0);
  block.map(elsewhere);
  OK(suite, memcpy_dtoh_async, out.data(), elsewhere, kPage, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(same(in, out, kPage), "the bytes did not move with the memory");
  OK(suite, mem_unmap, elsewhere, block.bytes);
  OK(suite, address_free, elsewhere, block.bytes);
  block.mapped = false;
}

void released_memory_lives_while_mapped(Suite& suite) {
  Block block(suite, suite.granule);
  Slab out(suite, kPage);
  OK(suite, mem_release, block.handle);
  block.held = false;
  OwnedStream stream(suite);
  OK(suite, memset_d8_async, block.address, 0x77, kPage, stream);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, kPage, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(all(out.data(), kPage, 0x77), "memory was gone before it was unmapped");
}

void refused_memory_changes_nothing(Suite& suite) {
  std::size_t free_before = 0;
  std::size_t total = 0;
  OK(suite, mem_get_info, &free_before, &total);
  suite.expect(free_before <= total && total > 0, "memory info makes no sense");
  const driver::AllocationProp prop;
  PhysicalHandle handle = 0;
  const std::size_t too_much = (2 * total / suite.granule + 1) * suite.granule;
  suite.expect(suite.driver.mem_create(&handle, too_much, &prop, 0) == driver::kOutOfMemory,
               "more memory than there is was not refused as such");
  Block block(suite, suite.granule);
  std::size_t free_after = 0;
  OK(suite, mem_get_info, &free_after, &total);
  suite.expect(free_after < free_before, "created memory is not missing from the free memory");
  suite.expect(free_before - free_after <= 16 * suite.granule, "refused memory was not given back");
}

void pageable_memory_is_copied_right(Suite& suite) {
  Block block(suite, suite.granule);
  std::vector<unsigned char> in(100'000, 0x2A);
  std::vector<unsigned char> out(100'000, 0);
  OwnedStream stream(suite);
  OK(suite, memcpy_htod_async, block.address, in.data(), in.size(), stream);
  OK(suite, memcpy_dtoh_async, out.data(), block.address, out.size(), stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(in == out, "the bytes did not come back");
}

void host_memory_is_registered_once(Suite& suite) {
  Slab slab(suite, 16 * kPage);
  suite.expect(suite.driver.host_register(slab.data(), 16 * kPage, 0) != driver::kSuccess,
               "host memory was registered twice");
  Block block(suite, suite.granule);
  OwnedStream stream(suite);
  OK(suite, memset_d8_async, block.address, 0x19, kPage, stream);
  OK(suite, memcpy_dtoh_async, slab.data(), block.address, kPage, stream);
  OK(suite, stream_synchronize, stream);
  suite.expect(all(slab.data(), kPage, 0x19), "a refused registration broke the first one");
}

}  // namespace

std::vector<Promise> memory_promises() {
  return {
      {"bytes copied in come back", copies_round_trip},
      {"mappings side by side are one range", neighbours_read_as_one_range},
      {"two addresses of one handle show the same bytes", aliases_share_bytes},
      {"memory keeps its bytes when it moves to another address", memory_moves_to_another_address},
      {"released memory lives until it is unmapped", released_memory_lives_while_mapped},
      {"refused memory changes nothing", refused_memory_changes_nothing},
      {"pageable memory is copied right", pageable_memory_is_copied_right},
      {"host memory is registered once", host_memory_is_registered_once},
  };
}

}  // namespace stagehand::contract
