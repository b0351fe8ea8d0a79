#include "core/kin.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace stagehand::core {

namespace {

constexpr double kSame = 1.0 / 32;     // a scale that differs by less is 1
constexpr double kChanged = 1.0 / 16;  // one that differs by more changes what leaves

// Whether two numbers differ by so many times at most.
bool within(double times, double a, double b) { return a <= b * times && b <= a * times; }

Bytes bytes_of(double value) { return value > 0 ? static_cast<Bytes>(value) : 0; }

}  // namespace

void Kin::follow(std::shared_ptr<const Trace> trace, const Trace& step) {
  *this = {};
  trace_ = std::move(trace);
  newest_.assign(trace_->entries.size(), kNone);
  places_.reserve(step.entries.size());
  older_.reserve(step.entries.size());
  anchored_.reserve(step.entries.size());
  for (std::size_t i = 0; i + 1 < step.entries.size(); ++i) {
    const Bytes mine = step.entries[i].block_bytes;
    const std::size_t place = std::min(next_, trace_->entries.size() - 1);
    const Bytes its = trace_->entries[place].block_bytes;
    put(step, i, place);
    if (alike(mine, its)) {
      mine_ += static_cast<double>(mine);
      its_ += static_cast<double>(its);
    }
  }
  place(step);
  choose(step);
}

bool Kin::saved(const Trace& step) {
  place(step);
  if (mine_ < 2 * chosen_at_ || within(1 + kChanged, scale(), chosen_for_)) {
    return false;
  }
  choose(step);
  return true;
}

void Kin::put(const Trace& step, std::size_t index, std::size_t place) {
  const Trace::Entry& mine = step.entries[index];
  const Trace::Entry& its = trace_->entries[place];
  places_.push_back(static_cast<std::uint32_t>(place));
  older_.push_back(std::exchange(newest_[place], static_cast<std::uint32_t>(index)));
  const bool follows = place == next_ && older_.back() == kNone && mine.op == its.op &&
                       alike(mine.block_bytes, its.block_bytes);
  in_order_ = follows ? in_order_ + 1 : 0;
  anchored_.push_back(in_order_ > index || in_order_ >= kAnchored);
  next_ = place + 1;
}

bool Kin::alike(Bytes mine, Bytes its) const {
  const auto a = static_cast<double>(mine);
  const auto b = static_cast<double>(its);
  return within(2, a, b) || within(1.25, a, ratio_ * b);
}

// How well the newest records fit where the newest of them is at `place`.
int Kin::fit(const Trace& step, std::size_t place) const {
  int points = 0;
  for (std::size_t i = 0; i < kTail && i < step.entries.size() && i <= place; ++i) {
    const Bytes mine = step.entries[step.entries.size() - 1 - i].block_bytes;
    const Bytes its = trace_->entries[place - i].block_bytes;
    points += mine == its ? 2 : alike(mine, its) ? 1 : 0;
  }
  return points;
}

// The newest record's place: the next one, unless others fit better.
void Kin::place(const Trace& step) {
  const std::size_t index = step.entries.size() - 1;
  const auto mine = static_cast<double>(step.entries[index].block_bytes);
  const auto its_at = [&](std::size_t place) {
    return static_cast<double>(trace_->entries[place].block_bytes);
  };
  const std::size_t last = trace_->entries.size() - 1;
  std::size_t best = std::min(next_, last);
  const auto is_alike = [&](std::size_t place) {
    return alike(step.entries[index].block_bytes, trace_->entries[place].block_bytes);
  };
  if (compared_++ == 0 && within(8, mine, its_at(best))) {
    ratio_ = mine / its_at(best);  // a first guess; the next records tell
  }
  if (next_ > last || !is_alike(best)) {
    int most = next_ > last ? 0 : fit(step, best);
    for (std::size_t away = 1; away <= kReach; ++away) {
      for (const std::size_t at : {next_ + away, next_ - std::min(next_, away)}) {
        if (at > last || !is_alike(at)) {
          continue;
        }
        if (const int points = fit(step, at); points > most) {
          most = points;
          best = at;
        }
      }
    }
  }
  put(step, index, best);
  if (!is_alike(best)) {
    ++unlike_;
    return;
  }
  mine_ += mine;
  its_ += its_at(best);
  ratio_ = mine != its_at(best) ? mine / its_at(best) : ratio_;
}

double Kin::scale() const {
  const double found = its_ > 0 ? mine_ / its_ : ratio_;
  return within(1 + kSame, found, 1) ? 1 : found;
}

// Whether it is sooner made again than moved, as far as can be told without times: elementwise, and
// more than what the host takes to launch that.
bool Kin::cheap(const Trace::Entry& entry) {
  return entry.proven_for_all_sizes() && entry.block_bytes >= kCheap;
}

// What left there leaves here. All of it together is scaled: what the trace's step had of memory
// for its activations, and what of them left, makes up what it needed. That is at least a quarter
// more than bytes were short by: with less no hole is found, and what makes one is waited for. What
// is cheap to make again leaves first, at once, as far as bytes were short. Where more must leave
// than left there, what is needed last; where less, what of it is needed last.
void Kin::choose(const Trace& step) {
  constexpr double kForHoles = 1.25;
  chosen_for_ = scale();
  chosen_at_ = mine_;
  const auto room = [](const Trace& of) {
    return static_cast<double>(of.high - std::min(of.high, of.live_before));
  };
  double left = 0;
  for (const Trace::Entry& entry : trace_->entries) {
    left += entry.leaves ? static_cast<double>(entry.block_bytes) : 0;
  }
  double more = 0;  // than left there
  if (chosen_for_ != 1 || step.high != trace_->high || !step.begins_like(*trace_)) {
    more = room(*trace_) - room(step) / chosen_for_;
  }
  double is_short = static_cast<double>(trace_->short_by()) + more;
  double must = left > 0 ? std::max(left + more, kForHoles * is_short) : 0;
  enum class Turn : std::uint8_t { cheap, left_there, stayed };
  const auto turn_of = [](const Trace::Entry& entry) {
    return cheap(entry) ? Turn::cheap : entry.leaves ? Turn::left_there : Turn::stayed;
  };
  leaves_.assign(trace_->entries.size(), false);
  const auto take = [&](std::uint32_t place, Turn turn) {
    const Trace::Entry& entry = trace_->entries[place];
    if (turn_of(entry) != turn || must <= 0) {
      return;
    }
    const auto bytes = static_cast<double>(entry.block_bytes);
    leaves_[place] = turn != Turn::cheap || is_short > 0;
    is_short -= bytes;
    must -= leaves_[place] || entry.leaves ? bytes : 0;
  };
  for (const Turn turn : {Turn::cheap, Turn::left_there, Turn::stayed}) {
    for (std::uint32_t i = 0; i < trace_->entries.size(); ++i) {
      if (trace_->entries[i].used == 0) {
        take(i, turn);
      }
    }
    for (std::size_t use = trace_->by_use.size(); use-- > 0;) {
      take(trace_->by_use[use], turn);
    }
  }
}

std::uint32_t Kin::next_after(std::uint32_t index) const {
  if (older_[index] != kNone) {
    return older_[index];
  }
  const std::size_t used = trace_->entries[places_[index]].used;
  if (used == 0) {
    return kNone;
  }
  const std::size_t end = std::min(trace_->by_use.size(), used + kSkipped);
  for (std::size_t use = used; use < end; ++use) {
    if (const std::uint32_t found = newest_[trace_->by_use[use]]; found != kNone) {
      return found;
    }
  }
  return kNone;
}

// Live memory of the trace's step, at this one's size.
Bytes Kin::scaled(Bytes live, Bytes live_before) const {
  const double more = static_cast<double>(live) - static_cast<double>(trace_->live_before);
  return bytes_of(static_cast<double>(live_before) + scale() * more);
}

Bytes Kin::live(std::size_t use, Bytes live_before) const {
  return scaled(trace_->live[use], live_before);
}

// Of the last sizes' ratio, or of all, whichever is larger: a hole too small serves nobody.
Bytes Kin::request_at(std::size_t place) const {
  return bytes_of(static_cast<double>(trace_->request_at(place)) *
                  std::max({1.0, ratio_, scale()}));
}

Bytes Kin::unavoidable(Bytes live_before) const {
  return trace_->unavoidable > 0 ? scaled(trace_->unavoidable, live_before) : 0;
}

}  // namespace stagehand::core
