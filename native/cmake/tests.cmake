# The native tests. What ends with STAGEHAND_TEST_MAIN() in tests/native is linked into one program,
# native_tests, of which ctest runs each file's tests by themselves; a .cpp with a main() of its own
# is a program of its own; the other files are what all of them share. tests/fuzz is one program,
# and tests/sim has a list of its own. Under the thread sanitizer the one program is of the files
# with "thread" in their name, and there is no other.
set(test_root ${CMAKE_CURRENT_SOURCE_DIR}/../tests)
set(test_libraries stagehand_core stagehand_sim)

# Tests look at what runs, and need not be quick themselves: compiling them is most of a build.
add_library(stagehand_test_options INTERFACE)
target_compile_options(stagehand_test_options INTERFACE -O0)

function(stagehand_test_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE ${test_libraries})
  target_include_directories(${name} PRIVATE ${test_root})
endfunction()

function(stagehand_add_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900)  # a busy machine is no failure
endfunction()

file(GLOB sources CONFIGURE_DEPENDS ${test_root}/native/*.cpp)
set(files "")     # of the one program
set(programs "")  # with a main of their own
set(shared "")
foreach(source ${sources})
  file(STRINGS ${source} frame_main REGEX "^STAGEHAND_TEST_MAIN\\(")
  file(STRINGS ${source} own_main REGEX "^int main\\(")
  if(frame_main)
    list(APPEND files ${source})
  elseif(own_main)
    list(APPEND programs ${source})
  else()
    list(APPEND shared ${source})
  endif()
endforeach()
if(STAGEHAND_SANITIZE STREQUAL "thread")
  list(FILTER files INCLUDE REGEX "/[^/]*thread[^/]*$")
  set(programs "")
endif()

add_library(stagehand_native_shared STATIC ${shared})
target_link_libraries(stagehand_native_shared PUBLIC ${test_libraries})
target_include_directories(stagehand_native_shared PUBLIC ${test_root})
list(PREPEND test_libraries stagehand_native_shared)

stagehand_test_program(native_tests ${files})
target_link_libraries(native_tests PRIVATE stagehand_test_options)
# What most of them begin with, read once.
target_precompile_headers(native_tests PRIVATE ${test_root}/native/held_rig.hpp)
foreach(source ${files})
  get_filename_component(name ${source} NAME_WE)
  stagehand_add_test(native_${name} native_tests --file ${name})
endforeach()
foreach(source ${programs})
  get_filename_component(name ${source} NAME_WE)
  stagehand_test_program(native_${name} ${source})
  target_link_libraries(native_${name} PRIVATE stagehand_test_options)
  stagehand_add_test(native_${name} native_${name})
endforeach()

if(NOT STAGEHAND_SANITIZE STREQUAL "thread")
  file(GLOB sources CONFIGURE_DEPENDS ${test_root}/fuzz/*.cpp)
  stagehand_test_program(stagehand_fuzz ${sources})
  # A slice of what `make fuzz` runs.
  foreach(store allocator torch)
    stagehand_add_test(fuzz_${store} stagehand_fuzz --store ${store} --seeds 16 --ops 1000)
    stagehand_add_test(fuzz_sweep_${store} stagehand_fuzz --store ${store} --seeds 2 --sweep)
  endforeach()

  # The driver contract is among what tests/native shares.
  add_library(stagehand_contract ALIAS stagehand_native_shared)
  add_subdirectory(${test_root}/sim ${CMAKE_BINARY_DIR}/tests_sim)
endif()
