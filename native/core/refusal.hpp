// Why a saved tensor is not ours to keep; `none` where it is.
#pragma once

namespace stagehand::core {

enum class Refusal {
  none,
  foreign_storage,
  older_than_pool,
  kept,
  graph_capture,
  no_memory,  // of the host's, for our books
  private_pool,
  small,  // to evict it could never pay: ignored
};

}  // namespace stagehand::core
