#include "native/held_torch.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "sim/control.hpp"

namespace stagehand::core::test {

namespace {

// c10/cuda/CUDACachingAllocator.cpp
constexpr Bytes kSmallSize = 1_MiB;  // up to here from small segments; and the least that is split
constexpr Bytes kSmallBuffer = 2_MiB;
constexpr Bytes kMinLargeAlloc = 10_MiB;
constexpr Bytes kLargeBuffer = 20_MiB;

FakeTorch* g_torch = nullptr;
thread_local TorchPool t_pool{};
thread_local bool t_making = false;  // this thread makes a block for the engine

// As torch and the engine's entry do around what a capture would forbid.
class Relaxed {
 public:
  explicit Relaxed(const driver::Table& table) : table_(table) {
    table_.thread_exchange_capture_mode(&mode_);
  }
  ~Relaxed() { table_.thread_exchange_capture_mode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const driver::Table& table_;
  int mode_ = driver::kCaptureModeRelaxed;
};

Storage* storage_of(void* storage) { return static_cast<Storage*>(storage); }

TorchSide table_of(bool triggers) {
  TorchSide side;
  side.version = TorchSide::kVersion;
  side.size = sizeof side;
  side.triggers = side.places = triggers ? 1 : 0;
  side.alone = [](void* storage, Address address, Bytes bytes) {
    const Storage* one = storage_of(storage);
    return one->references == 1 && one->address == address && one->bytes == bytes;
  };
  side.used_on = [](void* storage, int, driver::Stream stream) {
    g_torch->record_stream(storage_of(storage), stream);
  };
  side.drop = [](void* storage) { g_torch->drop(storage_of(storage)); };
  side.make = [](int, Bytes bytes, driver::Stream stream, bool quiet, HeldStorage* held) {
    t_making = true;
    Storage* made = g_torch->make_for_engine(bytes, stream, quiet);
    t_making = false;
    if (made != nullptr) {
      *held = {made, made, made->address, bytes, stream};
    }
    return made != nullptr;
  };
  side.release_cached = [] { return g_torch->release_cached(); };
  side.blocked = [] { return g_torch->blocked.load(); };
  side.fraction = [](int) { return g_torch->fraction.load(); };
  side.set_fraction = [](int, double share) {
    constexpr double kBytes = 1000003;  // torch keeps bytes
    g_torch->fraction = std::floor(share * kBytes) / kBytes;
  };
  return side;
}

}  // namespace

FakeTorch::FakeTorch(const driver::Table& table, Runtime& runtime, CacheMap& cache, bool triggers)
    : table_(table), runtime_(runtime), cache_(cache), triggers_(triggers) {
  g_torch = this;
  t_pool = kDefaultPool;
}

FakeTorch::~FakeTorch() { g_torch = nullptr; }

const TorchSide& FakeTorch::side(bool triggers) {
  static const TorchSide with = table_of(true);
  static const TorchSide without = table_of(false);
  return triggers ? with : without;
}

void FakeTorch::use_pool(TorchPool pool) { t_pool = pool; }

CacheEvent FakeTorch::event(CacheEvent::Kind kind, Address address, Bytes bytes, Address segment) {
  const Segment& of = segments_.at(segment);
  return {kind, 0, address, bytes, of.stream, {of.pool[0], of.pool[1]}, t_making};
}

void FakeTorch::tell(CacheEvent::Kind kind, Address address, Bytes bytes, Address segment) {
  if (triggers_) {
    cache_.apply(event(kind, address, bytes, segment));
  }
}

Storage* FakeTorch::make(Bytes bytes, driver::Stream stream, bool quiet) {
  driver::Stream from = stream;
  if (tells && triggers_ && !quiet) {
    if ((Runtime::awaits().load() & 1) != 0) {
      runtime_.asks();
    }
    const std::uint64_t sizes = std::atomic_ref(TorchStore::survivor_sizes()[0]).load();
    if (bytes > kSmallSize && (sizes & size_bit(bytes)) != 0) {
      from = cache_.place(bytes, stream);
    }
  }
  if (from != stream) {
    if (Storage* storage = make_for_engine(bytes, from, quiet); storage != nullptr) {
      record_stream(storage, stream);
      return storage;
    }
  }
  return make_for_engine(bytes, stream, quiet);
}

Storage* FakeTorch::make_for_engine(Bytes bytes, driver::Stream stream, bool quiet) {
  Address address = 0;
  if (!allocate(bytes, stream, quiet, &address)) {
    return nullptr;
  }
  auto* storage = new Storage;
  storage->address = address;
  storage->bytes = bytes;
  ++storages_;
  return storage;
}

void FakeTorch::drop(Storage* storage) {
  if (--storage->references == 0) {
    if (storage->address != 0) {
      free(storage->address);
    }
    delete storage;
    --storages_;
  }
}

void FakeTorch::resize(Storage* storage, Bytes bytes, driver::Stream stream) {
  if (storage->address != 0) {
    free(std::exchange(storage->address, 0));
  }
  storage->bytes = bytes;
  if (bytes > 0) {
    allocate(bytes, stream, false, &storage->address);
  }
}

void FakeTorch::record_stream(const Storage* storage, driver::Stream stream) {
  const RecursiveLock lock(mutex_);
  chunks_.at(storage->address).users.push_back(stream);
}

// malloc, with the mutex held all through it, the call of `missed` included.
bool FakeTorch::allocate(Bytes bytes, driver::Stream stream, bool quiet, Address* address) {
  const RecursiveLock lock(mutex_);
  const Relaxed relaxed(table_);
  process_events();
  const Bytes size = round_up(bytes, kBlockUnit);
  auto found = best_fit(size, stream, t_pool);
  if (found == chunks_.end() && triggers_ && !quiet && !blocked) {
    ++misses_;
    if (runtime_.missed(stream, tells ? bytes : 0)) {
      found = best_fit(size, stream, t_pool);
    }
  }
  if (found == chunks_.end() &&
      (grow(size, stream, t_pool) || (release_cached() && grow(size, stream, t_pool)))) {
    found = best_fit(size, stream, t_pool);
  }
  if (found == chunks_.end()) {
    return false;
  }
  const Bytes left = found->second.bytes - size;
  const bool small = segments_.at(found->second.segment).small;
  if (small || expandable ? left >= kBlockUnit : left > kSmallSize) {
    Chunk rest = found->second;
    rest.bytes = left;
    found->second.bytes = size;
    chunks_.emplace(found->first + size, rest);
  }
  found->second.used = true;
  found->second.requested = bytes;
  *address = found->first;
  tell(CacheEvent::alloc, found->first, bytes, found->second.segment);
  return true;
}

Bytes FakeTorch::largest_segment() const {
  Bytes largest = 0;
  for (const auto& [address, segment] : segments_) {
    largest = std::max(largest, segment.mapped());
  }
  return largest;
}

// One of max_split or more serves only as large a request, and that only where little is left.
bool FakeTorch::may_cut(const Chunk& chunk, Bytes bytes) const {
  constexpr Bytes kLeft = 20_MiB;  // max_non_split_rounding_size
  return chunk.bytes < max_split || (bytes >= max_split && chunk.bytes < bytes + kLeft);
}

// get_free_block. The smallest that fits, and of those the one at the lowest address; but what ends
// where an expandable segment is not mapped is as large as it could grow, as long as the next
// larger one is smaller than that.
FakeTorch::Chunks::iterator FakeTorch::best_fit(Bytes bytes, driver::Stream stream,
                                                TorchPool pool) {
  std::vector<Chunks::iterator> fitting;
  for (auto chunk = chunks_.begin(); chunk != chunks_.end(); ++chunk) {
    const Segment& segment = segments_.at(chunk->second.segment);
    if (!chunk->second.used && chunk->second.bytes >= bytes && segment.stream == stream &&
        segment.pool == pool && segment.small == (bytes <= kSmallSize) &&
        may_cut(chunk->second, bytes)) {
      fitting.push_back(chunk);
    }
  }
  std::stable_sort(fitting.begin(), fitting.end(), [](const auto& one, const auto& other) {
    return one->second.bytes < other->second.bytes;
  });
  const auto grown = [&](Chunks::iterator chunk) {
    const Segment& segment = segments_.at(chunk->second.segment);
    const Address base = chunk->second.segment;
    const Address end = chunk->first + chunk->second.bytes;
    if (segment.page == 0 || (end - base) % segment.page != 0 || segment.pages.contains(end)) {
      return chunk->second.bytes;
    }
    const auto next = segment.pages.lower_bound(end);
    const Address last = base + segment.bytes;
    return (next != segment.pages.end() ? next->first : last) - chunk->first;
  };
  for (std::size_t i = 0; i < fitting.size(); ++i) {
    if (i + 1 == fitting.size() || grown(fitting[i + 1]) >= grown(fitting[i])) {
      return fitting[i];
    }
  }
  return chunks_.end();
}

void FakeTorch::map_at(Address address, Bytes bytes, driver::PhysicalHandle handle) {
  const driver::AccessDesc access;
  if (table_.mem_map(address, bytes, 0, handle, 0) != driver::kSuccess ||
      table_.mem_set_access(address, bytes, &access, 1) != driver::kSuccess) {
    std::abort();  // addresses do not run out
  }
}

void FakeTorch::unmap_at(Address address, Bytes bytes, driver::PhysicalHandle handle) {
  table_.mem_unmap(address, bytes);
  table_.mem_release(handle);
}

void FakeTorch::drop_pages(Segment& segment, Address first, Address last) {
  for (Address at = first; at < last; at += segment.page) {
    unmap_at(at, segment.page, segment.pages.at(at));
    segment.pages.erase(at);
  }
}

bool FakeTorch::ours(TorchPool pool) const {
  return std::find(segment_pools_.begin(), segment_pools_.end(), pool) != segment_pools_.end();
}

bool FakeTorch::grow(Bytes bytes, driver::Stream stream, TorchPool pool) {
  if (expandable && !ours(pool)) {
    return expand(bytes, stream, pool);
  }
  Segment segment;
  segment.stream = stream;
  segment.pool = pool;
  segment.small = bytes <= kSmallSize;
  segment.bytes = segment.small            ? kSmallBuffer
                  : bytes < kMinLargeAlloc ? kLargeBuffer
                                           : round_up(bytes, 2_MiB);
  Address address = 0;
  if (ours(pool)) {
    address = runtime_.segment(segment.bytes, stream);
    if (address == 0) {
      return false;
    }
  } else {
    const driver::AllocationProp prop;
    if (table_.mem_create(&segment.handle, segment.bytes, &prop, 0) != driver::kSuccess) {
      return false;
    }
    if (table_.address_reserve(&address, segment.bytes, 0, 0, 0) != driver::kSuccess) {
      std::abort();  // addresses do not run out
    }
    map_at(address, segment.bytes, segment.handle);
  }
  segments_[address] = segment;
  chunks_[address] = {segment.bytes, false, address, 0, {}};
  tell(CacheEvent::segment, address, segment.bytes, address);
  reserved_peak_ = std::max(reserved_peak_, reserved());
  return true;
}

bool FakeTorch::expand(Bytes bytes, driver::Stream stream, TorchPool pool) {
  const bool small = bytes <= kSmallSize;
  auto found = std::find_if(segments_.begin(), segments_.end(), [&](const auto& one) {
    const Segment& segment = one.second;
    return segment.page != 0 && segment.stream == stream && segment.pool == pool &&
           segment.small == small;
  });
  if (found == segments_.end()) {
    Segment segment;
    segment.stream = stream;
    segment.pool = pool;
    segment.small = small;
    segment.page = small ? kSmallBuffer : kLargeBuffer;
    std::size_t unused = 0;
    std::size_t total = 0;
    Address base = 0;
    table_.mem_get_info(&unused, &total);
    segment.bytes = round_up(2 * total, kLargeBuffer);
    if (table_.address_reserve(&base, segment.bytes, 0, 0, 0) != driver::kSuccess) {
      std::abort();  // addresses do not run out
    }
    found = segments_.emplace(base, segment).first;
  }
  const Address base = found->first;
  const Segment& segment = found->second;
  const Address begin = room_in(base, segment, bytes);
  for (;;) {
    const auto free = chunks_.find(begin);
    const Bytes have = free != chunks_.end() ? free->second.bytes : 0;
    if (have >= bytes) {
      reserved_peak_ = std::max(reserved_peak_, reserved());
      return true;
    }
    const auto next = segment.pages.lower_bound(begin + have);
    const Address gap_end = next != segment.pages.end() ? next->first : base + segment.bytes;
    const Bytes gap = gap_end - (begin + have);
    if (!map_pages(base, begin + have, std::min(gap, round_up(bytes - have, segment.page)))) {
      return false;  // what was mapped stays
    }
  }
}

// find_expandable_block.
Address FakeTorch::room_in(Address base, const Segment& segment, Bytes bytes) {
  for (Address gap = base;; gap += segment.page) {
    SH_CHECK(gap < base + segment.bytes);
    if (segment.pages.contains(gap)) {
      continue;
    }
    Address begin = gap;
    if (auto before = chunks_.lower_bound(gap); before != chunks_.begin()) {
      --before;
      const bool ends_here = before->first + before->second.bytes == gap;
      begin =
          ends_here && before->second.segment == base && !before->second.used ? before->first : gap;
    }
    Bytes have = 0;
    while (have < bytes && begin + have < base + segment.bytes) {
      const auto chunk = chunks_.find(begin + have);
      if (chunk != chunks_.end() && chunk->second.used) {
        break;
      }
      have += chunk != chunks_.end() ? chunk->second.bytes : segment.page;
    }
    if (have >= bytes) {
      return begin;
    }
  }
}

bool FakeTorch::map_pages(Address base, Address first, Bytes bytes) {
  Segment& segment = segments_.at(base);
  const driver::AllocationProp prop;
  for (Address at = first; at < first + bytes; at += segment.page) {
    driver::PhysicalHandle handle = 0;
    if (table_.mem_create(&handle, segment.page, &prop, 0) != driver::kSuccess) {
      drop_pages(segment, first, at);  // all or nothing
      return false;
    }
    map_at(at, segment.page, handle);
    segment.pages[at] = handle;
  }
  tell(CacheEvent::mapped, first, bytes, base);
  join_free(chunks_.emplace(first, Chunk{bytes, false, base, 0, {}}).first);
  return true;
}

// unmap_block: the whole pages of free memory.
void FakeTorch::unmap_pages(Address base, Chunks::iterator free) {
  Segment& segment = segments_.at(base);
  const Address begin = free->first;
  const Address end = begin + free->second.bytes;
  const Address first = base + round_up(begin - base, segment.page);
  const Address last = base + (end - base) / segment.page * segment.page;
  if (first >= last) {
    return;
  }
  tell(CacheEvent::unmapped, first, last - first, base);
  drop_pages(segment, first, last);
  chunks_.erase(free);
  if (begin < first) {
    chunks_[begin] = {first - begin, false, base, 0, {}};
  }
  if (last < end) {
    chunks_[last] = {end - last, false, base, 0, {}};
  }
}

void FakeTorch::free(Address address) {
  const RecursiveLock lock(mutex_);
  const Relaxed relaxed(table_);
  const auto chunk = chunks_.find(address);
  if (chunk == chunks_.end() || !chunk->second.used) {
    std::fprintf(stderr, "torch: freed twice\n");
    std::abort();
  }
  if ((std::atomic_ref(*TorchStore::devices_that_follow()).load() & 1) != 0) {
    tell(CacheEvent::let_go, address, chunk->second.requested, chunk->second.segment);
  }
  if (chunk->second.users.empty()) {
    return free_now(chunk);
  }
  Pending pending{address, {}};
  for (driver::Stream user : std::exchange(chunk->second.users, {})) {
    driver::Event event = nullptr;
    table_.event_create(&event, driver::kEventDisableTiming);
    table_.event_record(event, user);
    pending.events.push_back(event);
  }
  pending_.push_back(std::move(pending));
}

void FakeTorch::free_now(Chunks::iterator chunk) {
  chunk->second.used = false;
  tell(CacheEvent::freed, chunk->first, chunk->second.requested, chunk->second.segment);
  join_free(chunk);
}

void FakeTorch::join_free(Chunks::iterator chunk) {
  const auto join = [&](Chunks::iterator one, Chunks::iterator two) {
    if (two != chunks_.end() && !one->second.used && !two->second.used &&
        one->second.segment == two->second.segment &&
        one->first + one->second.bytes == two->first) {
      one->second.bytes += two->second.bytes;
      chunks_.erase(two);
    }
  };
  join(chunk, std::next(chunk));
  if (chunk != chunks_.begin()) {
    join(std::prev(chunk), chunk);
  }
}

void FakeTorch::process_events() {
  for (std::size_t i = 0; i < pending_.size();) {
    auto& events = pending_[i].events;
    while (!events.empty() && table_.event_query(events.back()) == driver::kSuccess) {
      table_.event_destroy(events.back());
      events.pop_back();
    }
    if (!events.empty()) {
      ++i;
      continue;
    }
    const Address address = pending_[i].address;
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    free_now(chunks_.find(address));
  }
}

// Only what is free in the default pool: other pools keep theirs as long as they live.
bool FakeTorch::release_cached() {
  const RecursiveLock lock(mutex_);
  release_others();
  release_wholly_free([](const Segment& segment) { return segment.pool == kDefaultPool; });
  return true;
}

void FakeTorch::destroy_pool(TorchPool pool) {
  const RecursiveLock lock(mutex_);
  release_wholly_free([&](const Segment& segment) { return segment.pool == pool; });
}

// As cudaFree does, a segment is taken away from other devices before its own is waited for; before
// pages are unmapped torch waits for their stream.
void FakeTorch::release_wholly_free(const std::function<bool(const Segment&)>& which) {
  if (!pending_.empty() || expandable) {
    table_.ctx_synchronize();
  }
  process_events();
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    const auto [address, of] = *segment;
    if (of.page != 0) {
      segment = which(of) ? shrink(segment) : std::next(segment);
      continue;
    }
    const Chunk& first = chunks_.at(address);
    if (first.used || first.bytes != of.bytes || !which(of)) {
      ++segment;
      continue;
    }
    tell(CacheEvent::segment_gone, address, of.bytes, address);
    chunks_.erase(address);
    segment = segments_.erase(segment);
    if (of.handle == 0) {
      runtime_.free_segment(address);
    } else {
      stagehand_sim_take_from_others(address, of.bytes, 0);
      table_.ctx_synchronize();
      unmap_at(address, of.bytes, of.handle);
      table_.address_free(address, of.bytes);
    }
  }
}

// Gives back the free pages; the addresses too where no page is left. Returns the next segment.
FakeTorch::Segments::iterator FakeTorch::shrink(Segments::iterator segment) {
  const Address base = segment->first;
  const Address end = base + segment->second.bytes;
  for (auto chunk = chunks_.lower_bound(base); chunk != chunks_.end() && chunk->first < end;) {
    const auto next = std::next(chunk);
    if (!chunk->second.used) {
      unmap_pages(base, chunk);
    }
    chunk = next;
  }
  if (!segment->second.pages.empty()) {
    return std::next(segment);
  }
  table_.address_free(base, segment->second.bytes);
  return segments_.erase(segment);
}

void FakeTorch::tell_all(const std::function<void()>& meanwhile) {
  std::vector<CacheEvent> known;
  {
    const RecursiveLock lock(mutex_);
    for (const auto& [address, segment] : segments_) {
      if (segment.page == 0) {
        known.push_back(event(CacheEvent::segment, address, segment.bytes, address));
      }
      for (const auto& [page, handle] : segment.pages) {
        known.push_back(event(CacheEvent::mapped, page, segment.page, address));
      }
    }
    for (const auto& [address, chunk] : chunks_) {
      if (chunk.used) {
        known.push_back(event(CacheEvent::alloc, address, chunk.bytes, chunk.segment));
      }
    }
    cache_.snapshot();
  }
  meanwhile();
  for (const CacheEvent& one : known) {
    cache_.known(one);
  }
  cache_.told();
}

Bytes FakeTorch::reserved() {
  const RecursiveLock lock(mutex_);
  Bytes all = 0;
  for (const auto& [address, segment] : segments_) {
    all += segment.mapped();
  }
  return all;
}

Bytes FakeTorch::allocated() {
  const RecursiveLock lock(mutex_);
  Bytes all = 0;
  for (const auto& [address, chunk] : chunks_) {
    all += chunk.used ? chunk.bytes : 0;
  }
  return all;
}

Bytes FakeTorch::reserved_peak() {
  const RecursiveLock lock(mutex_);
  return reserved_peak_;
}

driver::Stream FakeTorch::stream_of(Address address) {
  const RecursiveLock lock(mutex_);
  return segments_.at(chunks_.at(address).segment).stream;
}

std::string FakeTorch::differs(CacheMap& cache) {
  const RecursiveLock lock(mutex_);
  if (!triggers_) {
    return "";
  }
  std::string text;
  const auto expect = [&](const char* what, Bytes told, Bytes is) {
    if (told != is && text.empty()) {
      text = std::string(what) + " is " + std::to_string(is) + ", and the map says " +
             std::to_string(told);
    }
  };
  expect("reserved", cache.usage().reserved, reserved());
  expect("allocated", cache.usage().allocated + cache.usage().aside, allocated());
  std::map<std::pair<driver::Stream, TorchPool>, Bytes> holes;
  Bytes releasable = 0;
  for (const auto& [address, chunk] : chunks_) {
    const Segment& segment = segments_.at(chunk.segment);
    Bytes& largest = holes[{segment.stream, segment.pool}];
    largest = std::max(largest, chunk.used || segment.small ? 0 : chunk.bytes);
    const bool whole = segment.page != 0 || chunk.bytes == segment.bytes;
    if (!chunk.used && whole && segment.pool == kDefaultPool) {
      releasable += chunk.bytes;
    }
  }
  expect("what can be released", cache.releasable(), releasable);
  for (const auto& [owner, largest] : holes) {
    expect("the largest hole", cache.largest_hole(CacheMap::Owner{owner.first, owner.second}),
           largest);
  }
  return text;
}

}  // namespace stagehand::core::test
