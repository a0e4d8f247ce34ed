# Installs the libraries, their headers and the package for find_package.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/TorchSGMCMC)

install(TARGETS torch_sgmcmc torch_sgmcmc_operators EXPORT TorchSGMCMCTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/csrc/include/torch_sgmcmc
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT TorchSGMCMCTargets NAMESPACE TorchSGMCMC::
        DESTINATION ${package_dir})

# In a file of their own, since not every torch can use them.
if(TORCH_SGMCMC_BUILDS_CUDA)
  install(TARGETS torch_sgmcmc_operators_cuda EXPORT TorchSGMCMCCudaTargets)
  install(EXPORT TorchSGMCMCCudaTargets NAMESPACE TorchSGMCMC::
          DESTINATION ${package_dir})
endif()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" BUILT_WITH_TORCH "${LibTorch_VERSION}")
set(BUILT_WITH_CUDA_MAJOR "")
if(TORCH_SGMCMC_BUILDS_CUDA)
  set(BUILT_WITH_CUDA_MAJOR ${LibTorch_CUDA_MAJOR})
endif()
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/TorchSGMCMCConfig.cmake.in
  ${PROJECT_BINARY_DIR}/TorchSGMCMCConfig.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/TorchSGMCMCConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TorchSGMCMCConfig.cmake
              ${PROJECT_BINARY_DIR}/TorchSGMCMCConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake
        DESTINATION ${package_dir})
