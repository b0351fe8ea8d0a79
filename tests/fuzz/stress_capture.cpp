// A program's stream captures, and the graphs that hold memory of theirs.
#include <utility>

#include "fuzz/stress.hpp"

namespace stagehand::fuzz {

// From here to the end of the capture the program allocates on one captured stream and on others,
// and joins nothing inside with anything outside. The thread is in the relaxed mode, as entry/ is
// around every call.
void Stress::begin_capture(const Instruction& in) {
  const Place place = place_of(in.stream);
  if (capturing_ || place.stream == 0) {
    return;
  }
  if (!contents_.capture(stream(place), true)) {
    return;
  }
  int mode = driver::kCaptureModeRelaxed;
  table_.thread_exchange_capture_mode(&mode);
  capturing_ = true;
  captured_ = place;
  graph_ = ++graphs_made_;
  graphs_.push_back({place.device, graph_});
  store_.capture(place.device, 1);
}

void Stress::end_capture() {
  if (!std::exchange(capturing_, false)) {
    return;
  }
  int mode = 0;
  table_.thread_exchange_capture_mode(&mode);
  contents_.capture(stream(captured_), false);
  store_.capture(captured_.device, -1);
}

void Stress::release_graph(std::uint64_t pick) {
  const auto at = graphs_.end() - 1 - static_cast<std::ptrdiff_t>(pick % graphs_.size());
  const Graph graph = *at;
  graphs_.erase(at);
  call([&] { store_.release_graph(graph.device, graph.id); });
}

bool Stress::crosses_capture(Place one, Place two) const {
  const auto inside = [&](Place place) {
    return place.device == captured_.device && place.stream == captured_.stream;
  };
  return capturing_ && inside(one) != inside(two);
}

}  // namespace stagehand::fuzz
