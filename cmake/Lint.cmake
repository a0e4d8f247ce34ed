# The target lint: clang-tidy (.clang-tidy) and cppcheck on everything in csrc
# that a C++ compiler sees. Use the preset: clang-tidy reads clang++'s command lines.

if(NOT CMAKE_EXPORT_COMPILE_COMMANDS)
  message(FATAL_ERROR "TORCH_SGMCMC_LINT needs CMAKE_EXPORT_COMPILE_COMMANDS=ON")
endif()
find_program(CLANG_TIDY NAMES clang-tidy-14 clang-tidy REQUIRED)
find_program(CPPCHECK cppcheck REQUIRED)
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

# Python's module is built by setup.py; here is how it would be compiled.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_include())"
  OUTPUT_VARIABLE pybind11_include OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
find_sources(sources bindings/*.cpp)
add_library(torch_sgmcmc_python OBJECT EXCLUDE_FROM_ALL ${sources})
configure_target(torch_sgmcmc_python)
set_target_properties(torch_sgmcmc_python PROPERTIES UNITY_BUILD OFF)
target_include_directories(torch_sgmcmc_python SYSTEM PRIVATE ${pybind11_include})
target_link_libraries(torch_sgmcmc_python PRIVATE Python::Module)

add_custom_target(lint)
# A target for each file, for a build to run side by side.
function(tidy file)
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR} ${file})
  string(MAKE_C_IDENTIFIER "tidy_${name}" target)
  add_custom_target(
    ${target}
    COMMAND ${CLANG_TIDY} -p ${PROJECT_BINARY_DIR} --quiet ${file}
    COMMENT "clang-tidy ${name}"
    VERBATIM)
  add_dependencies(lint ${target})
endfunction()

# clang-tidy spends its time on LibTorch's headers, so it reads several sources as
# one (CMAKE_UNITY_BUILD): names are unique in a folder of csrc.
foreach(target torch_sgmcmc_core torch_sgmcmc_operators torch_sgmcmc)
  get_target_property(sources ${target} SOURCES)
  list(LENGTH sources count)
  math(EXPR last "(${count} - 1) / ${CMAKE_UNITY_BUILD_BATCH_SIZE}")
  foreach(index RANGE ${last})
    tidy(${PROJECT_BINARY_DIR}/CMakeFiles/${target}.dir/Unity/unity_${index}_cxx.cxx)
  endforeach()
endforeach()
get_target_property(sources torch_sgmcmc_python SOURCES)
foreach(source IN LISTS sources)
  tidy(${source})
endforeach()

# The build folder is below the project's .clang-tidy; that of the operators' folder
# has to stand beside their batches.
file(COPY ${PROJECT_SOURCE_DIR}/csrc/ops/.clang-tidy
     DESTINATION
       ${PROJECT_BINARY_DIR}/CMakeFiles/torch_sgmcmc_operators.dir/Unity)

# Not useStlAlgorithm: a loop of two lines says what it does.
add_custom_target(
  cppcheck
  COMMAND
    ${CPPCHECK} --quiet --error-exitcode=1 --inline-suppr --language=c++
    --std=c++20 --enable=warning,style,performance,portability
    --suppress=useStlAlgorithm -I ${PROJECT_SOURCE_DIR}/csrc
    -I ${PROJECT_SOURCE_DIR}/csrc/include ${PROJECT_SOURCE_DIR}/csrc
  COMMENT "cppcheck csrc"
  VERBATIM)
add_dependencies(lint cppcheck)
