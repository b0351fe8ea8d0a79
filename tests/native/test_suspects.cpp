#include "native/core_rig.hpp"
namespace stagehand::core::test {
namespace {
TEST("A fragmentation without records does not exhaust addresses") {
  CoreRig rig({.memory = 512_MiB});
  const auto s = rig.stream();
  for (int round = 0; round < 40; ++round) {
    std::vector<Tensor> t;
    const Bytes n = round % 2 ? 32_MiB : 64_MiB;
    for (Bytes b = 0; b + n <= 512_MiB; b += n) { Address a=0; Status st=rig.runtime->allocate(n, s, 0, &a); CHECK_EQ(st, Status::ok); if(st!=Status::ok){std::fprintf(stderr,"round %d %s\n",round,rig.runtime->report(n).c_str());return;} t.push_back({a,n,s,1}); CHECK_EQ(stagehand_sim_fill(s,a,4096,1),0);}
    for (auto& x : t) rig.drop(x);
    Address a=0; CHECK_EQ(rig.runtime->allocate(512_MiB-32_MiB*(round%3), s, 0, &a), Status::ok);
    if(a) rig.runtime->free(a);
  }
  std::fprintf(stderr,"retiring %llu gathers %llu\n",(unsigned long long)rig.counters().retiring_bytes,(unsigned long long)rig.counters().gathers);
  rig.verify_empty();
}
TEST("A2 interleaved frees force gathers") {
  CoreRig rig({.memory = 512_MiB});
  const auto s = rig.stream();
  for (int round = 0; round < 60; ++round) {
    std::vector<Tensor> t;
    for (int i = 0; i < 16; ++i) { Address a=0; Status st=rig.runtime->allocate(32_MiB, s, 0, &a); CHECK_EQ(st, Status::ok); if(st!=Status::ok){std::fprintf(stderr,"round %d %s\n",round,rig.runtime->report(32_MiB).c_str());return;} t.push_back({a,32_MiB,s,1}); CHECK_EQ(stagehand_sim_fill(s,a,4096,1),0);}
    for (int i = 0; i < 16; i += 2) rig.drop(t[i]);
    Address a=0; Status st = rig.runtime->allocate(256_MiB, s, 0, &a);
    CHECK_EQ(st, Status::ok);
    if(st!=Status::ok){std::fprintf(stderr,"round %d retiring %llu %s\n",round,(unsigned long long)rig.counters().retiring_bytes,rig.runtime->report(256_MiB).c_str());return;}
    CHECK_EQ(stagehand_sim_fill(s,a,4096,1),0);
    rig.runtime->free(a);
    for (int i = 1; i < 16; i += 2) rig.drop(t[i]);
  }
  rig.verify_empty();
}
TEST("B released graph arena with foreign user") {
  CoreRig rig;
  const auto s = rig.stream(); const auto t = rig.stream();
  Address a = rig.allocate(64_MiB, s, 7);
  rig.runtime->record_stream(a, t);
  rig.runtime->free(a);
  rig.runtime->release_graph(7);
  stagehand_sim_drain();
  Address b = rig.allocate(250_MiB, s);
  CHECK(b != 0);
  rig.verify();
}
TEST("C gather over more clocks than a fence holds waits for the copies out") {
  for (int seed = 0; seed < 50; ++seed) {
  CoreRig rig({.seed=(std::uint64_t)seed, .memory = 512_MiB, .classes={{16_MiB},{2}}, .host_limit=60_MiB});
  std::vector<driver::Stream> s;
  for (int i = 0; i < 6; ++i) s.push_back(rig.stream());
  rig.budget(512_MiB, 512_MiB);
  for (int i = 1; i < 5; ++i) { rig.drop(rig.make(32_MiB, s[i])); }
  const Held h = rig.retain(32_MiB, s[5]);
  rig.evict_all(s[0]);
  Tensor t = rig.make(490_MiB, s[0]);
  rig.drop(t);
  rig.back(h, s[5]);
  rig.verify_empty();
  }
}
TEST("D restore into a block whose fence was full") {
  for (int seed = 0; seed < 50; ++seed) {
  CoreRig rig({.seed=(std::uint64_t)seed, .memory = 64_MiB, .classes={{16_MiB},{2}}, .host_limit=60_MiB});
  const auto s = rig.stream();
  std::vector<driver::Stream> f;
  for (int i = 0; i < 4; ++i) f.push_back(rig.stream());
  rig.budget(32_MiB, 32_MiB, 32_MiB);
  const Held first = rig.retain(16_MiB, s);
  rig.evict_all(s);
  stagehand_sim_drain();
  const Tensor t = rig.make(16_MiB, s);
  for (auto x : f) { rig.order(s, x); rig.check(t, x); rig.runtime->record_stream(t.address, x); }
  const Held second = rig.save(t);
  rig.drop(t);
  const Tensor blocker = rig.make(12_MiB, s);
  rig.back(first, s);
  rig.drop(blocker);
  rig.back(second, s);
  rig.verify_empty();
  }
}
TEST("E consumer beyond 64 streams") {
  CoreRig rig;
  std::vector<driver::Stream> f;
  const auto s = rig.stream();
  rig.budget(256_MiB,256_MiB);
  for (int i = 0; i < 70; ++i) { f.push_back(rig.stream()); const Tensor t = rig.make(512, f[i]); rig.drop(t); }
  const Held h = rig.retain(8_MiB, s);
  rig.order(s, f[69]);
  stagehand_sim_kernel(f[69], 1000000, nullptr,0,nullptr,0,nullptr,nullptr);
  rig.back(h, f[69]);
  const Tensor n = rig.make(8_MiB, s);
  rig.drop(n);
  rig.verify_empty();
}
TEST("E2 record_stream beyond 64 streams, used after the call") {
  CoreRig rig;
  std::vector<driver::Stream> f;
  const auto s = rig.stream();
  for (int i = 0; i < 70; ++i) { f.push_back(rig.stream()); const Tensor t = rig.make(512, f[i]); rig.drop(t); }
  const Tensor h = rig.make(8_MiB, s);
  rig.order(s, f[69]);
  rig.runtime->record_stream(h.address, f[69]);
  rig.check(h, f[69]);
  rig.drop(h);
  const Tensor n = rig.make(8_MiB, s);
  rig.drop(n);
  rig.verify_empty();
}
TEST("F gather into a hole too small while another is large") {
  CoreRig rig({.memory=512_MiB});
  const auto s = rig.stream();
  rig.runtime->set_limit(116_MiB);
  const Tensor a = rig.make(32_MiB, s);
  const Tensor b = rig.make(32_MiB, s);
  const Tensor c = rig.make(32_MiB, s);
  const Tensor d = rig.make(20_MiB, s);  // piece of 20: full
  rig.drop(d);
  const Tensor e = rig.make(16_MiB, rig.stream());  // takes the 20 away
  rig.drop(a); rig.drop(c);
  (void)b; (void)e;
  rig.order(s, s);
  CHECK_EQ(rig.try_allocate(64_MiB, s), Status::ok);
  rig.verify();
}
TEST("F2 hole of 4 in the middle") {
  CoreRig rig({.memory=512_MiB});
  const auto s = rig.stream(); const auto t = rig.stream();
  const Tensor a = rig.make(32_MiB, s);
  rig.runtime->set_limit(52_MiB);
  const Tensor d = rig.make(20_MiB, s);  // a piece of 20
  rig.runtime->set_limit(256_MiB);
  const Tensor b = rig.make(32_MiB, s);
  rig.drop(d);
  rig.runtime->set_limit(84_MiB);
  const Tensor e = rig.make(20_MiB, t);  // moves the 20
  rig.order(t, t);
  stagehand_sim_drain();
  rig.runtime->trim(84_MiB);
  rig.drop(b);
  // s: a(32) hole(20) free(32)
  rig.runtime->set_limit(84_MiB);
  const Tensor f = rig.make(20_MiB, s);
  rig.drop(f);
  const Tensor g = rig.make(32_MiB, t);  // takes s's 32
  rig.runtime->trim(84_MiB);
  rig.drop(g);
  Address x = 0;
  const Status st = rig.runtime->allocate(18_MiB, s, 0, &x);
  CHECK_EQ(st, Status::ok);
  (void)a;(void)e;
  rig.verify();
}
TEST("G trim beside another thread") {
  for (int seed = 0; seed < 20; ++seed) {
  CoreRig rig({.seed=(std::uint64_t)seed, .memory=512_MiB, .classes={{16_MiB},{2}}, .host_limit=128_MiB});
  const auto s = rig.stream();
  rig.budget(128_MiB, 128_MiB, 512_MiB);
  const Held h = rig.retain(96_MiB, s);
  Tensor t;
  interludes().event_synchronize = [&] {
    rig.budget(128_MiB, 128_MiB, 512_MiB);
    t = rig.make(33_MiB, s);
  };
  rig.runtime->trim(0);
  std::fprintf(stderr, "evicted %llu mapped %llu\n", (unsigned long long)rig.counters().evicted, (unsigned long long)rig.counters().mapped);
  rig.drop(t);
  rig.back(h, s);
  rig.verify_empty();
  }
}
}  // namespace
}  // namespace stagehand::core::test
STAGEHAND_TEST_MAIN()
