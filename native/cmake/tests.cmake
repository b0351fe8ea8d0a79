# The native tests. What ends with STAGEHAND_TEST_MAIN() in tests/native is linked into one program,
# native_tests, of which ctest runs each file's tests by themselves; a .cpp with a main() of its own
# in tests/native or tests/fuzz is a program of its own; the other files are what all of them share.
# tests/sim has a list of its own. Under the thread sanitizer the one program is of the files with
# "thread" in their name.
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
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endfunction()

foreach(suite native fuzz)
  file(GLOB sources CONFIGURE_DEPENDS ${test_root}/${suite}/*.cpp)
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
  if(shared)
    add_library(stagehand_${suite}_shared STATIC ${shared})
    target_link_libraries(stagehand_${suite}_shared PUBLIC ${test_libraries})
    target_include_directories(stagehand_${suite}_shared PUBLIC ${test_root})
    list(PREPEND test_libraries stagehand_${suite}_shared)
  endif()
  if(files)
    stagehand_test_program(${suite}_tests ${files})
    target_link_libraries(${suite}_tests PRIVATE stagehand_test_options)
    # What most of them begin with, read once.
    target_precompile_headers(${suite}_tests PRIVATE ${test_root}/native/held_rig.hpp)
    foreach(source ${files})
      get_filename_component(name ${source} NAME_WE)
      stagehand_add_test(${suite}_${name} ${suite}_tests --file ${name})
    endforeach()
  endif()
  foreach(source ${programs})
    get_filename_component(name ${source} NAME_WE)
    stagehand_test_program(${suite}_${name} ${source})
    stagehand_add_test(${suite}_${name} ${suite}_${name})
  endforeach()
endforeach()

if(NOT STAGEHAND_SANITIZE STREQUAL "thread")
  # The driver contract is among what tests/native shares.
  add_library(stagehand_contract ALIAS stagehand_native_shared)
  add_subdirectory(${test_root}/sim ${CMAKE_BINARY_DIR}/tests_sim)
endif()
