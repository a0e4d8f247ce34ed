# Decides whether the CUDA kernels are built, and enables the language if so.
#
# Input: TORCH_SGMCMC_CUDA (ON, OFF, AUTO). Output: TORCH_SGMCMC_BUILDS_CUDA.
# As in setup.py, what counts is the toolkit (CUDA_HOME, then PATH), never
# whether this machine has a GPU; and torch must be a build with the same major
# version of CUDA. The runtime is linked statically (CMake's default): it works
# on the context that is current, which torch has set, and a shared one from the
# toolkit could take the place of the newer one that torch needs.

set(TORCH_SGMCMC_BUILDS_CUDA OFF)
if(NOT TORCH_SGMCMC_CUDA)
  return()
endif()

if(NOT DEFINED ENV{CUDACXX} AND EXISTS $ENV{CUDA_HOME}/bin/nvcc)
  set(ENV{CUDACXX} $ENV{CUDA_HOME}/bin/nvcc)
endif()
# Architectures that nvcc 12 and 13 both know, and PTX for what comes later:
# the default of setup.py.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90)
endif()

include(CheckLanguage)
check_language(CUDA)
set(obstacle "")
if(NOT CMAKE_CUDA_COMPILER)
  set(obstacle "no CUDA toolkit was found")
elseif(NOT TARGET LibTorch::stable_cuda)
  set(obstacle "${LibTorch_PREFIX} is a torch without CUDA")
endif()

if(NOT obstacle)
  enable_language(CUDA)
  string(REGEX MATCH "^[0-9]+" major "${CMAKE_CUDA_COMPILER_VERSION}")
  if(NOT major STREQUAL LibTorch_CUDA_MAJOR)
    set(obstacle "nvcc is of CUDA ${major} and torch of CUDA \
${LibTorch_CUDA_MAJOR}")
  endif()
endif()

if(NOT obstacle)
  set(TORCH_SGMCMC_BUILDS_CUDA ON)
elseif(TORCH_SGMCMC_CUDA STREQUAL "AUTO")
  message(STATUS "CUDA kernels left out: ${obstacle}")
else()
  message(FATAL_ERROR "TORCH_SGMCMC_CUDA=${TORCH_SGMCMC_CUDA}, but ${obstacle}")
endif()
