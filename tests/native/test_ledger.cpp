// Records and their generations: core/ledger.
#include <random>
#include <vector>

#include "core/arena.hpp"
#include "core/ledger.hpp"
#include "native/test.hpp"

namespace stagehand::core {
namespace {

// A ledger, and a live block for records to name.
struct Books {
  Books()
      : clock(gate, events, captures, nullptr, 0),
        arena({}, clock, nodes, Address{1} << 40, 64_MiB) {
    block.clock = &clock;
  }
  Record* open() { return ledger.open(&block, 0, 512); }

  driver::Table table;
  Gate gate{table};
  SpareEvents events{gate};
  const int captures = 0;
  StreamClock clock;
  BlockNodes nodes;
  Arena arena;
  Block block;
  Ledger ledger;
};

TEST("a record is found by its id until it is closed") {
  Books books;
  Record* record = books.open();
  const RecordId id = Ledger::id_of(*record);
  CHECK(books.ledger.find(id) == record);
  books.ledger.close(record);
  CHECK(books.ledger.find(id) == nullptr);
  CHECK_EQ(books.ledger.size(), 0);
}

TEST("O2: a stale id finds nothing after its slot serves another record") {
  Books books;
  Record* record = books.open();
  const RecordId stale = Ledger::id_of(*record);
  books.ledger.close(record);
  Record* again = books.open();
  const RecordId fresh = Ledger::id_of(*again);
  CHECK_EQ(fresh.index, stale.index);
  CHECK(fresh.generation != stale.generation);
  CHECK(books.ledger.find(stale) == nullptr);
  CHECK(books.ledger.find(fresh) == again);
}

TEST("ids that were never given out find nothing") {
  Books books;
  CHECK(books.ledger.find({}) == nullptr);
  CHECK(books.ledger.find({12345, 1}) == nullptr);
  Record* record = books.open();
  CHECK(books.ledger.find({record->index, record->generation + 1}) == nullptr);
}

TEST("a slot used again starts as a new record") {
  Books books;
  Record* record = books.open();
  record->arrived = {1, 7};
  record->prefetched = true;
  record->block_begin = 512;
  books.ledger.close(record);
  record = books.open();
  CHECK_EQ(record->arrived.seq, 0);
  CHECK(!record->prefetched);
  CHECK_EQ(record->block_begin, 0);
  CHECK_EQ(record->handles, 0);
  CHECK(!record->clean());
  CHECK(!record->evicted());
}

TEST("records stand in the order of saving, whichever of them close") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Books books;
    std::vector<Record*> alive;
    for (int turn = 0; turn < 200; ++turn) {
      if (alive.empty() || random() % 3 != 0) {
        alive.push_back(books.open());
      } else {
        const auto gone = alive.begin() + random() % alive.size();
        books.ledger.close(*gone);
        alive.erase(gone);
      }
      CHECK_EQ(books.ledger.size(), alive.size());
      const Record* from_oldest = books.ledger.oldest();
      for (const Record* expected : alive) {
        CHECK(from_oldest == expected);
        from_oldest = from_oldest->newer;
      }
      CHECK(from_oldest == nullptr);
      const Record* from_newest = books.ledger.newest();
      for (auto expected = alive.rbegin(); expected != alive.rend(); ++expected) {
        CHECK(from_newest == *expected);
        from_newest = from_newest->older;
      }
      CHECK(from_newest == nullptr);
    }
  }
}

TEST("the order numbers rise and never repeat") {
  Books books;
  std::uint64_t last = 0;
  for (int i = 0; i < 100; ++i) {
    Record* record = books.open();
    CHECK(record->order > last);
    last = record->order;
    if (i % 3 == 0) {
      books.ledger.close(record);
    }
  }
}

}  // namespace
}  // namespace stagehand::core

STAGEHAND_TEST_MAIN()
