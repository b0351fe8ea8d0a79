// The records that may be evicted, in the order of their next use: who leaves first, who is copied
// out first, which planned victim fits. Each question and each change costs a logarithm. While
// nobody asks, a change costs a link: records are filed when somebody does.
//
// Guarded by the device's lock. Decides by the plan and by what the record says; changes neither.
#pragma once

#include "core/ledger.hpp"

namespace stagehand::core {

class VictimIndex {
 public:
  explicit VictimIndex(const Plan& plan) : plan_(plan) {}

  // The record became evictable, or something that it is filed under has changed.
  void put(Record& record);
  // It may not be evicted any more.
  void remove(Record& record);

  // The record whose next use is farthest; where nobody knows, the oldest: side by side, mostly, so
  // that whole segments come free. Records in small blocks free pieces for a large request only
  // when whole pieces come free: last, unless `small_too`. Null without any.
  Record* last_needed(bool small_too, bool of_mem_pools = true);
  // All in small or in large blocks, in turn: those that leave in any case, then as above.
  Record* first(bool small);
  Record* next(Record& record);
  // The smallest planned victim in a large block that frees `bytes`, the largest where none does;
  // those whose copy is queued already before others. Null without any.
  Record* planned(Bytes bytes);
  // Whether small blocks are most of what may be evicted, in bytes. The smallest record in one that
  // frees `bytes`, the one needed last of that size, of those that leave in any case or of the
  // others; and the next larger one. Null without any.
  bool mostly_small();
  Record* in_small_block(Bytes bytes, bool leaves);
  static Record* next_larger(Record& record) { return SmallBySize::next(record); }
  // Of those not copied out yet, and not asked for by backward: the one that leaves first.
  Record* first_dirty();
  // Of those, under kSmallCopy, the next after `record` in the order of saving.
  Record* next_small_dirty(Record& record);
  // Bytes that could leave for nothing, of what backward has not asked for.
  Bytes clean_bytes();
  // Whether the record leaves in any case, and has not yet: in which order does not matter.
  bool planned_to_leave(const Record& record) const;
  // Whether it may be dropped, and is not to leave by a copy.
  bool drops(const Record& record) const {
    return record.droppable() && !plan_.copies(record.place);
  }
  // Whether it could leave without a copy out.
  bool leaves_free(const Record& record) const { return record.clean() || drops(record); }
  // When it is needed next; greater is later, kLeaves is never.
  Plan::Use need(const Record& record) const;
  static constexpr Plan::Use kLeaves = ~Plan::Use{0};

  // Null, or the first record that is filed wrongly. Walks everything.
  const char* broken(const Ledger& ledger);

 private:
  struct LaterUse {
    bool operator()(const Record& a, const Record& b) const {
      return a.filed.use != b.filed.use ? a.filed.use > b.filed.use : a.order < b.order;
    }
  };
  struct Later {
    bool operator()(const Record& a, const Record& b) const {
      return a.filed.need != b.filed.need ? a.filed.need > b.filed.need : a.order < b.order;
    }
  };
  struct Smaller {
    bool operator()(const Record& a, const Record& b) const {
      return a.filed.bytes != b.filed.bytes ? a.filed.bytes < b.filed.bytes : a.order < b.order;
    }
  };
  struct SmallerLaterUse {
    bool operator()(const Record& a, const Record& b) const {
      return a.filed.bytes != b.filed.bytes ? a.filed.bytes < b.filed.bytes : LaterUse{}(a, b);
    }
  };
  struct Older {
    bool operator()(const Record& a, const Record& b) const { return a.order < b.order; }
  };
  using ByUse = Ordered<Record, &Record::need_hook, LaterUse>;
  using Leaving = Ordered<Record, &Record::leaves_hook, Older>;
  using BySize = Ordered<Record, &Record::size_hook, Smaller>;
  using SmallBySize = Ordered<Record, &Record::size_hook, SmallerLaterUse>;

  static bool in_small(const Record& record) { return record.filed.bytes <= kSmallLimit; }
  void file();
  void file(Record& record);
  void unfile(Record& record);
  void wait(Record& record);
  void stop_waiting(Record& record);

  const Plan& plan_;
  std::uint64_t plan_version_ = 0;  // by which those filed are filed
  Record* waiting_ = nullptr;
  ByUse by_use_[2][2];    // in small blocks, in blocks of a MemPool
  Leaving leaving_[2];    // in small blocks: those that leave in any case
  BySize planned_[2];     // clean; in large blocks
  SmallBySize small_[2];  // leaves in any case
  Bytes small_bytes_ = 0;
  Bytes large_bytes_ = 0;
  Ordered<Record, &Record::dirty_hook, Later> dirty_;
  Ordered<Record, &Record::small_hook, Older> small_dirty_;
  Bytes clean_bytes_ = 0;
};

}  // namespace stagehand::core
