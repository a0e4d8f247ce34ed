# Finds what the operator libraries need of LibTorch, and nothing more.
#
# They use torch's stable ABI only: its headers, libtorch_cpu, libc10 and, for
# the CUDA kernels, libtorch_cuda. find_package(Torch) would also demand the
# CUDA toolkit that torch was built with, its cuDNN and its NCCL, set global
# flags and vary with torch's version; none of that is used here, so it is not
# asked for.
#
# Looks for TorchConfig.cmake as find_package(Torch) would: Torch_DIR,
# CMAKE_PREFIX_PATH (a LibTorch archive, or torch.utils.cmake_prefix_path of an
# installed wheel). If that fails, the Python in the PATH is asked.
#
# Targets: TorchStable::cpu and, if this torch has CUDA, TorchStable::cuda.
# Variables: TorchStable_FOUND, TorchStable_VERSION, TorchStable_PREFIX and, if
# this torch has CUDA, TorchStable_CUDA_MAJOR.

string(REPLACE ":" ";" _environment "$ENV{CMAKE_PREFIX_PATH}")
find_path(TorchStable_CONFIG_DIR TorchConfig.cmake
          HINTS ${Torch_DIR} ${CMAKE_PREFIX_PATH} ${_environment}
          PATH_SUFFIXES Torch share/cmake/Torch)
mark_as_advanced(TorchStable_CONFIG_DIR)
if(NOT TorchStable_CONFIG_DIR)
  find_program(TorchStable_PYTHON NAMES python3 python)
  mark_as_advanced(TorchStable_PYTHON)
  if(TorchStable_PYTHON)
    execute_process(
      COMMAND ${TorchStable_PYTHON} -c
              "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE _prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(TorchStable_CONFIG_DIR TorchConfig.cmake
              HINTS ${_prefix} PATH_SUFFIXES Torch)
  endif()
endif()

if(TorchStable_CONFIG_DIR)
  get_filename_component(TorchStable_PREFIX
                         ${TorchStable_CONFIG_DIR}/../../.. ABSOLUTE)
  file(STRINGS ${TorchStable_CONFIG_DIR}/TorchConfigVersion.cmake _version
       REGEX "PACKAGE_VERSION \"")
  string(REGEX MATCH "[0-9]+(\\.[0-9]+)+" TorchStable_VERSION "${_version}")
  # Under this torch only: a library of another one would not fit.
  foreach(_library torch_cpu c10 torch_cuda)
    find_library(TorchStable_${_library}_LIBRARY ${_library}
                 PATHS ${TorchStable_PREFIX}/lib NO_DEFAULT_PATH)
    mark_as_advanced(TorchStable_${_library}_LIBRARY)
  endforeach()
  find_path(TorchStable_INCLUDE_DIR torch/csrc/stable/library.h
            PATHS ${TorchStable_PREFIX}/include NO_DEFAULT_PATH)
  mark_as_advanced(TorchStable_INCLUDE_DIR)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchStable
  REQUIRED_VARS TorchStable_PREFIX TorchStable_torch_cpu_LIBRARY
                TorchStable_c10_LIBRARY TorchStable_INCLUDE_DIR
  VERSION_VAR TorchStable_VERSION
  REASON_FAILURE_MESSAGE "Set CMAKE_PREFIX_PATH to a LibTorch directory, or to \
what Python says is torch.utils.cmake_prefix_path.")

if(TorchStable_FOUND AND NOT TARGET TorchStable::cpu)
  foreach(_library torch_cpu c10 torch_cuda)
    if(TorchStable_${_library}_LIBRARY)
      add_library(TorchStable::${_library} SHARED IMPORTED)
      set_target_properties(
        TorchStable::${_library}
        PROPERTIES IMPORTED_LOCATION ${TorchStable_${_library}_LIBRARY}
                   INTERFACE_INCLUDE_DIRECTORIES ${TorchStable_INCLUDE_DIR})
      # What torch's own libraries need is found when they are loaded. To look
      # for it at link time finds the wrong NCCL on many a machine.
      target_link_options(TorchStable::${_library} INTERFACE
                          LINKER:--allow-shlib-undefined)
    endif()
  endforeach()
  add_library(TorchStable::cpu INTERFACE IMPORTED)
  target_link_libraries(TorchStable::cpu INTERFACE TorchStable::torch_cpu
                                                   TorchStable::c10)
  if(TARGET TorchStable::torch_cuda)
    # Which CUDA torch was built with is not written in any of its CMake files,
    # but in the name of the runtime that its smallest CUDA library asks for.
    file(STRINGS ${TorchStable_PREFIX}/lib/libc10_cuda.so _runtime
         REGEX "^libcudart.*\\.so\\.[0-9]+$")
    string(REGEX MATCH "[0-9]+$" TorchStable_CUDA_MAJOR "${_runtime}")
    add_library(TorchStable::cuda INTERFACE IMPORTED)
    target_link_libraries(TorchStable::cuda INTERFACE TorchStable::cpu
                                                      TorchStable::torch_cuda)
  endif()
endif()
