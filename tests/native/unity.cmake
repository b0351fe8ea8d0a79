# Included by project() in the builds under sanitizers (Makefile), which compile everything once: the
# core's sources several at a time, which read the headers they share once. Where two sources of one
# batch give a constant the same name, one of them stands alone.
cmake_language(
  DEFER CALL set_target_properties stagehand_core PROPERTIES UNITY_BUILD ON
  UNITY_BUILD_BATCH_SIZE 8)
cmake_language(
  DEFER CALL set_source_files_properties core/step_shape.cpp core/torch_store.cpp PROPERTIES
  SKIP_UNITY_BUILD_INCLUSION ON)
