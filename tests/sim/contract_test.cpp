// The driver's contract, kept by the simulator under every seed and without a hazard.
#include "native/contract.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include "sim/rig.hpp"

namespace stagehand::sim::test {

TEST("the simulator keeps the driver's contract under every seed") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Rig rig(seed);
    for (const std::string& broken : contract::run_contract(rig.driver)) {
      stagehand::test::fail("seed", static_cast<int>(seed), broken);
    }
    CHECK_EQ(stagehand_sim_physical_bytes(0), 0);
    CHECK_NO_HAZARD();
  }
}

TEST("the contract is kept without a current context and with poison") {
  RigSettings with;
  with.flags = 0;
  Rig rig(1, with);
  driver::Context popped = nullptr;
  CHECK_EQ(rig.driver.ctx_pop_current(&popped), 0);
  CHECK(contract::run_contract(rig.driver).empty());
  CHECK_NO_HAZARD();
  CHECK_EQ(rig.driver.ctx_push_current(rig.context), 0);
}

TEST("a driver without the optional functions keeps the contract of the rest") {
  RigSettings with;
  with.flags |= STAGEHAND_SIM_OLD_DRIVER;
  Rig rig(3, with);
  CHECK(rig.driver.memcpy_batch_async == nullptr);
  CHECK(contract::run_contract(rig.driver).empty());
  CHECK_NO_HAZARD();
}

TEST("the contract notices a driver that breaks it") {
  const char* const needed[] = {"cuMemMap",           "cuMemcpyDtoHAsync",  "cuStreamWaitEvent",
                                "cuMemsetD8Async",    "cuEventQuery",       "cuMemHostRegister",
                                "cuMemcpyBatchAsync", "cuStreamWaitValue64"};
  for (const char* symbol : needed) {
    Rig rig(0);
    stagehand_sim_fail(symbol, 1, 1, 999);
    CHECK(!contract::run_contract(rig.driver).empty());
  }
}

TEST("a forked child gets errors instead of a device") {
  Rig rig(2);
  const auto stream = rig.stream();
  const pid_t child = fork();
  if (child == 0) {
    driver::Context context = nullptr;
    const bool refused = rig.driver.primary_ctx_retain(&context, 0) != 0 &&
                         rig.driver.stream_synchronize(stream) != 0;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(rig.driver.stream_synchronize(stream), 0);
}

}  // namespace stagehand::sim::test

STAGEHAND_TEST_MAIN()
