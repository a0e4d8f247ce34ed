# Decides whether the CUDA kernels are built, and enables the language if so.
#
# Input: TORCH_SGMCMC_CUDA (ON, OFF, AUTO). Output: TORCH_SGMCMC_BUILDS_CUDA.
# As in setup.py, what counts is the toolkit (CUDA_HOME, then PATH), never
# whether this machine has a GPU; and torch must be a build with CUDA.

set(TORCH_SGMCMC_BUILDS_CUDA OFF)
if(NOT TORCH_SGMCMC_CUDA)
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX}
   AND EXISTS $ENV{CUDA_HOME}/bin/nvcc)
  set(CMAKE_CUDA_COMPILER $ENV{CUDA_HOME}/bin/nvcc)
endif()
# Architectures that nvcc 12 and 13 both know, and PTX for what comes later: the
# default of setup.py.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90)
endif()

include(CheckLanguage)
check_language(CUDA)
set(missing "")
if(NOT CMAKE_CUDA_COMPILER)
  set(missing "no CUDA toolkit was found")
elseif(NOT TARGET TorchStable::cuda)
  set(missing "${TorchStable_PREFIX} is a torch without CUDA")
endif()

if(NOT missing)
  enable_language(CUDA)
  set(TORCH_SGMCMC_BUILDS_CUDA ON)
elseif(TORCH_SGMCMC_CUDA STREQUAL "AUTO")
  message(STATUS "CUDA kernels left out: ${missing}")
else()
  message(FATAL_ERROR "TORCH_SGMCMC_CUDA=${TORCH_SGMCMC_CUDA}, but ${missing}")
endif()
