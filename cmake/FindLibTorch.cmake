# Finds LibTorch, in the layout of its archive or as pip installed it.
#
# find_package(Torch) would also demand the CUDA toolkit that torch was built
# with, its cuDNN and its NCCL, set global flags and vary with torch's version.
# Neither this project nor a program that uses it needs any of that, so it is
# not asked for. A project that calls find_package(Torch) for itself may do so.
#
# Looks for TorchConfig.cmake as find_package(Torch) would: Torch_DIR,
# CMAKE_PREFIX_PATH (a LibTorch archive, or torch.utils.cmake_prefix_path of an
# installed wheel). If that fails, the Python in the PATH is asked, if any.
#
# Targets:
#   LibTorch::stable       for code that uses torch's stable ABI alone
#   LibTorch::stable_cuda  the same for CUDA code, if this torch has CUDA
#   LibTorch::cpp          for libraries: torch's C++ API, which demands C++20
#   LibTorch::full         for programs: the same, and CUDA if this torch has it
# Variables: LibTorch_FOUND, LibTorch_VERSION, LibTorch_PREFIX and
# LibTorch_CUDA_MAJOR, empty for a torch without CUDA.

string(REPLACE ":" ";" _environment "$ENV{CMAKE_PREFIX_PATH}")
find_path(LibTorch_CONFIG_DIR TorchConfig.cmake
          HINTS ${Torch_DIR} ${CMAKE_PREFIX_PATH} ${_environment}
          PATH_SUFFIXES Torch share/cmake/Torch)
mark_as_advanced(LibTorch_CONFIG_DIR)
if(NOT LibTorch_CONFIG_DIR)
  find_program(LibTorch_PYTHON NAMES python3 python)
  mark_as_advanced(LibTorch_PYTHON)
  if(LibTorch_PYTHON)
    execute_process(
      COMMAND ${LibTorch_PYTHON} -c
              "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE _prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(LibTorch_CONFIG_DIR TorchConfig.cmake
              HINTS ${_prefix} PATH_SUFFIXES Torch)
  endif()
endif()

if(LibTorch_CONFIG_DIR)
  get_filename_component(LibTorch_PREFIX ${LibTorch_CONFIG_DIR}/../../..
                         ABSOLUTE)
  file(STRINGS ${LibTorch_CONFIG_DIR}/TorchConfigVersion.cmake _version
       REGEX "PACKAGE_VERSION \"")
  string(REGEX MATCH "[0-9]+(\\.[0-9]+)+" LibTorch_VERSION "${_version}")
  # Under this torch only: a library of another one would not fit.
  foreach(_library torch_cpu c10 torch_cuda c10_cuda)
    find_library(LibTorch_${_library}_LIBRARY ${_library}
                 PATHS ${LibTorch_PREFIX}/lib NO_DEFAULT_PATH)
    mark_as_advanced(LibTorch_${_library}_LIBRARY)
  endforeach()
  find_path(LibTorch_INCLUDE_DIR torch/csrc/stable/library.h
            PATHS ${LibTorch_PREFIX}/include NO_DEFAULT_PATH)
  mark_as_advanced(LibTorch_INCLUDE_DIR)
  # Which CUDA torch was built with is not written in any of its CMake files, but
  # in the name of the runtime that its smallest CUDA library asks for.
  set(LibTorch_CUDA_MAJOR "")
  if(LibTorch_c10_cuda_LIBRARY)
    file(STRINGS ${LibTorch_c10_cuda_LIBRARY} _runtime
         REGEX "^libcudart.*\\.so\\.[0-9]+$")
    string(REGEX MATCH "[0-9]+$" LibTorch_CUDA_MAJOR "${_runtime}")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch
  REQUIRED_VARS LibTorch_PREFIX LibTorch_torch_cpu_LIBRARY
                LibTorch_c10_LIBRARY LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "Set CMAKE_PREFIX_PATH to a LibTorch directory, or to \
what Python says is torch.utils.cmake_prefix_path.")

if(LibTorch_FOUND AND NOT TARGET LibTorch::stable)
  foreach(_library torch_cpu c10 torch_cuda c10_cuda)
    if(LibTorch_${_library}_LIBRARY)
      add_library(LibTorch::${_library} SHARED IMPORTED)
      set_target_properties(
        LibTorch::${_library}
        PROPERTIES IMPORTED_LOCATION ${LibTorch_${_library}_LIBRARY}
                   INTERFACE_INCLUDE_DIRECTORIES ${LibTorch_INCLUDE_DIR})
      # What torch's own libraries need is found when they are loaded. To look
      # for it at link time finds the wrong NCCL on many a machine.
      target_link_options(LibTorch::${_library} INTERFACE
                          LINKER:--allow-shlib-undefined)
    endif()
  endforeach()

  add_library(LibTorch::stable INTERFACE IMPORTED)
  target_link_libraries(LibTorch::stable INTERFACE LibTorch::torch_cpu
                                                   LibTorch::c10)

  # The directory of torch/torch.h comes second, as in find_package(Torch).
  add_library(LibTorch::cpp INTERFACE IMPORTED)
  target_link_libraries(LibTorch::cpp INTERFACE LibTorch::stable)
  target_include_directories(
    LibTorch::cpp INTERFACE ${LibTorch_INCLUDE_DIR}
                            ${LibTorch_INCLUDE_DIR}/torch/csrc/api/include)
  target_compile_features(LibTorch::cpp INTERFACE cxx_std_20)
  add_library(LibTorch::full INTERFACE IMPORTED)
  target_link_libraries(LibTorch::full INTERFACE LibTorch::cpp)

  if(TARGET LibTorch::torch_cuda)
    add_library(LibTorch::stable_cuda INTERFACE IMPORTED)
    target_link_libraries(LibTorch::stable_cuda INTERFACE LibTorch::stable
                                                          LibTorch::torch_cuda)
    # A program refers to no symbol of it. Unless it is loaded all the same, torch
    # has no CUDA in it, and many linkers drop what is not referred to.
    target_link_libraries(
      LibTorch::full
      INTERFACE
        "-Wl,--push-state,--no-as-needed,\"${LibTorch_torch_cuda_LIBRARY}\",--pop-state"
        LibTorch::torch_cuda LibTorch::c10_cuda)
  endif()
endif()
