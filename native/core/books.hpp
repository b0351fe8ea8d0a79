// The books: the only writer of the states of blocks in use, of records and of host copies, and of
// the budget in force. Every change of one is a function here; it moves the state by its table
// (states.hpp) and keeps the counters, the plan and the index of victims in agreement.
//
// Guarded by the device's lock.
#pragma once

#include <functional>
#include <vector>

#include "core/counters.hpp"
#include "core/store.hpp"
#include "core/victim_index.hpp"

namespace stagehand::core {

struct Device;

class Books {
 public:
  explicit Books(Device& device);

  VictimIndex& victims() { return victims_; }

  // Blocks ----------------------------------------------------------------------------------------
  // A live block was handed out, to torch or for a record that comes back.
  void hand_out(Block* block);
  // One of its owners is gone: torch, or an alias. With none left it is retained while a record
  // needs it, and put away otherwise.
  void owner_left(Block* block);
  // A retained block is in use again.
  void revive(Block* block);
  // A block that was handed out for a record and is not used after all.
  void give_back(Block* block);
  // What the plan learns is what backward and forward need; not the optimizer, which runs disarmed.
  void note_live();
  // It came back ahead of need, and is not ahead any more.
  void no_more_ahead(Record& record);
  // What is occupied is more than the plan was told, where torch asked for memory.
  void note_occupied();
  // Memory went over `high` with so much live.
  void note_overshoot(Bytes live);

  // Records ---------------------------------------------------------------------------------------
  // One more handle for the record of the block's storage, which covers [first, last): opened, or
  // widened. Saved again, a storage may have changed since it was copied out, which is legal where
  // nobody asks for the old version any more: its copy is given up.
  // `made`: the tensor that can be made again, as the storage is now. The record can be as long as
  // that was said with each of its handles, and covers them; or each was saved in the call that
  // made it. What two calls save is not dropped: one may ask for it when the other cannot run.
  Record& save(Block* block, Address first, Address last, Made made = {}, Inside inside = {});
  // Whether the block was allocated in the call, and its record, if it has one, first saved there.
  static bool made_in(const Block& block, Inside call);
  // Nobody can make its bytes again after all.
  void forget_recipe(Record& record);
  void drop_handle(Record& record);
  // Evicted: its bytes are in its host copy, which is queued at least.
  void leave(Record& record);
  // Evicted without one: its recipe makes its bytes again. Once in its life at most, so that making
  // one again for want of another comes to an end.
  void drop(Record& record);
  // Its bytes were made again in a live block that is no record's.
  void refill(Record& record, Block* block);
  // A saved storage of so many bytes stays on the GPU, as torch's alone, because its eviction could
  // never pay. False: it is to be saved. As long as the tensor that was passed through is there:
  // what is ignored at a time is a thousandth of `high` at most.
  bool ignore(Bytes bytes);
  void ignored_ended(Bytes bytes) { ignored_ -= bytes; }
  // Its copy in was queued into the block, ahead of need or not.
  void arrive(Record& record, Block* block, bool ahead);
  // The driver refused its copy: no victim until `forgive`, which every attempt begins with.
  void refuse(Record& record);
  void forgive();

  // Host copies -----------------------------------------------------------------------------------
  void stage(Record& record);   // it has its slabs
  void queued(Record& record);  // its copy out is on the lane, or done
  void drop_copy(Record& record);
  void sealed(Record& record, std::uint32_t checksum);

  // Runs `body` without the lock, while nobody else touches the record's copy, and then `after`
  // with it, which is told whether the body succeeded and the copy is still good. The record may
  // have ended by the time this returns. Counted as a wait of the host.
  void wait(Entry& entry, Record& record, const std::function<bool()>& body,
            const std::function<void(bool)>& after);

  // The budget ------------------------------------------------------------------------------------
  // A pool is entered; it is left. The watermarks stay armed until the last record is gone.
  void arm(const Budget& budget);
  void pool_left();
  // torch's memory fraction; pools may only set less.
  void set_process_limit(Bytes limit);

  std::uint64_t serial() const { return serial_; }  // of the last block handed out
  std::uint32_t step() const { return step_; }      // the plan's, of the newest record

  // Empty, or the first broken invariant. Walks everything.
  const char* broken();

 private:
  void close(Record& record);
  void note_recipe(Record& record, const Block* block, const Made& made, bool of_call) const;
  Block* part(Record& record, RecordState state);
  void vacate(Block* block);
  void disarm_if_idle();

  Device& d_;
  VictimIndex victims_;
  std::vector<RecordId> refused_;
  std::uint64_t serial_ = 0;
  std::uint32_t step_ = 0;
  Bytes process_limit_;
  Bytes ignored_ = 0;
  Bytes saved_in_use_ = 0;  // of live blocks that records are of
  bool pool_open_ = false;
};

}  // namespace stagehand::core
