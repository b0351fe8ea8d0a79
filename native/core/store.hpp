// Where the blocks of a device come from: our own heap, where torch's allocator is ours
// (heap_store.hpp), or torch's cache (torch_store.hpp). All that differs between the two is here;
// nothing else asks which it is.
//
// Guarded by the device's lock, but for what takes an Entry: that gives the lock up, and whatever
// was looked up before must be looked up again.
#pragma once

#include <span>
#include <string>

#include "core/alarm.hpp"
#include "core/budget.hpp"
#include "core/ledger.hpp"

namespace stagehand::core {

class Store {
 public:
  virtual ~Store() = default;

  // Blocks.
  virtual void set_state(Block* block, BlockState state) = 0;
  // Nobody needs the block: its memory serves again, behind all that names the block.
  virtual void put_away(Block* block) = 0;
  // The block's record ended while tensors are over it. True: the store has nothing more to do with
  // the block either.
  virtual bool disown(Block* block) = 0;
  // Backward was handed a tensor over the record's block.
  virtual void handed_out(Record& record) = 0;
  // Leaves the block at an address on the GPU. False: it is not of this store.
  virtual bool keep(Address address) = 0;

  // A record coming back: the bytes it takes, and a block for it. `make` makes room for them; null
  // with a status where there is none. It gives the lock up: the record may be back by then.
  virtual Bytes bytes_for(const Record& record) const = 0;
  virtual Block* make(Entry& entry, Record& record, Status* status) = 0;
  // The same ahead of need: only where there is room, and nothing is moved for it. Null without.
  // May give the lock up. `far`: not soon needed.
  virtual Block* make_ahead(Entry& entry, RecordId record, Bytes bytes, bool far) = 0;

  // A block for a weight group, for work on `stream`. `ahead`: as with `make_ahead`.
  virtual Block* make_weights(Entry& entry, Bytes bytes, driver::Stream stream, bool ahead,
                              Status* status) = 0;

  // Whether blocks of these sizes fit below the ceiling, beside what is live, for work on `stream`.
  virtual bool fits(std::span<const Bytes> sizes, driver::Stream stream) = 0;

  // Brings the books up to date with what the store does not tell of itself.
  virtual void look() {}
  // The same at an unpack, where what nobody else uses any more can also leave.
  virtual void look_around(Entry&) {}

  // A pool is entered; the last record is gone. False: nothing above `target` needs to go back.
  virtual bool begin_step(Bytes target) = 0;
  virtual void end_step() = 0;
  // Bytes in use, before a step.
  virtual Bytes in_use() const = 0;
  // Looks at them from here on, as the program asks for memory; then whether it rang.
  virtual void set_alarm(const Alarm& alarm) = 0;
  virtual bool rang() const = 0;
  // Gives free memory back to the driver until mapped <= target; waits for the GPU.
  virtual Bytes trim(Entry& entry, Bytes target) = 0;
  // Maps memory up to `target` at once, for requests like the record's, before anything is copied:
  // with a copy out under way the driver takes 30 times as long. Nothing where that is not
  // possible.
  virtual void map_ahead(Entry& entry, RecordId record, Bytes target) = 0;
  virtual Status add_peer(int device) = 0;
  // Whether it is told when a CUDA graph is captured; else each stream has to be asked.
  virtual bool tells_of_captures() const = 0;
  // Whether all streams that use a block are told to us. Else only its owner may write to what is
  // put away.
  virtual bool knows_all_users() const = 0;
  virtual void reset_peaks() {}

  // Empty, or the first broken invariant.
  virtual const char* broken() const = 0;

 protected:
  // Whether the program has given back enough since a step ended, of what was mapped then, for all
  // of it to be mapped at once: a request at a time it comes in pieces that hold no larger one.
  static bool gave_back(Bytes mapped, Bytes target, Bytes mapped_then) {
    constexpr Bytes kEnough = 8;  // a part of the target
    return fits_under(mapped, target / kEnough, mapped_then);
  }
};

}  // namespace stagehand::core
