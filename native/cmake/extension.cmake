# The extension module stagehand_alloc._native, and what a wheel carries beside it.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module
             OPTIONAL_COMPONENTS Development.SABIModule)
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
                OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

file(GLOB entry_sources CONFIGURE_DEPENDS entry/*.cpp)
# STABLE_ABI takes effect where Python is 3.12 or newer; older ones get a module of their own.
nanobind_add_module(_native STABLE_ABI NB_STATIC NOMINSIZE ${entry_sources})
target_link_libraries(_native PRIVATE stagehand_core)

# One name for all a package needs, so that a package build compiles nothing else.
add_custom_target(stagehand_package ALL DEPENDS _native stagehand_sim_library)

if(STAGEHAND_INPLACE)
  set(package_dir ${CMAKE_CURRENT_SOURCE_DIR}/../stagehand_alloc)
  set_target_properties(_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir})
  set_target_properties(stagehand_sim_library
                        PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package_dir}/_sim)
endif()

install(TARGETS _native LIBRARY DESTINATION stagehand_alloc)
install(TARGETS stagehand_sim_library LIBRARY DESTINATION stagehand_alloc/_sim)
# What is built on the user's machine, against the torch that is there.
install(FILES torch_hook/over_storage.hpp torch_hook/recipes.cpp torch_hook/requests.hpp torch_hook/serving.hpp
              torch_hook/storage.cpp torch_hook/tensors.cpp torch_hook/trigger.cpp
        DESTINATION stagehand_alloc/torch_hook)
install(FILES core/recipe_side.hpp core/storage_side.hpp core/tensor_side.hpp core/torch_side.hpp core/types.hpp
        DESTINATION stagehand_alloc/core)
install(FILES driver/driver.hpp DESTINATION stagehand_alloc/driver)
